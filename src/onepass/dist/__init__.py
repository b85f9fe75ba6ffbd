"""RMSNorm over columns that are sharded over ranks, with one small all-reduce of sums of squares.

Tensor parallelism gives rank r the columns q_r [..., Nq_r] and k_r [..., Nk_r] of a projection that the model norms as a
whole (OLMo-2, MiniMax-M2). A rank needs only one more float32 per row and tensor::

    s_r     = [sum(q_r^2), sum(k_r^2)]                       float32 [..., 2], in a fixed order
    S       = s_0 + s_1 + ... + s_(W-1)                      one all-reduce: 8 bytes per row
    mean    = S / [Nq, Nk]                                   Nq, Nk: columns of all ranks
    q_out   = (q_r * (1 / sqrt(mean_q + eps))) * gamma_q_r   and k_out likewise

Ranks exchange sums, not means, because shards may differ in width. Where several ranks hold copies of the same k columns
(fewer kv heads than ranks, ``kv_replicas``), the first of them sends its sum and the others send 0. Adding 0 is exact.
Sending a share of the sum is not exact, because dividing by a number that is not a power of two rounds.

`plan` determines the column counts, once per group and widths. `qk_rms_norm` does everything; `start_qk_stats` and
`finish_qk_rms_norm` are its two halves, so that other work can run in between. `rms_norm` is the same for one tensor.
`QKNormParallel` and `QKAttentionParallel` are styles for `torch.distributed.tensor.parallel.parallelize_module`. Costs
and guarantees: docs/scaling.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import Unsupported

if not torch.distributed.is_available():
    raise Unsupported("onepass.dist needs a torch built with torch.distributed")

from ._norm import PendingStats, finish_qk_rms_norm, qk_rms_norm, rms_norm, start_qk_stats
from ._plan import QKNormPlan, plan

if TYPE_CHECKING:
    from .parallel import QKAttentionParallel, QKNormParallel

__all__ = [
    "PendingStats",
    "QKAttentionParallel",
    "QKNormParallel",
    "QKNormPlan",
    "finish_qk_rms_norm",
    "plan",
    "qk_rms_norm",
    "rms_norm",
    "start_qk_stats",
]


def __getattr__(name: str) -> object:
    """Import the parallel styles at first use: their base class imports all of DTensor."""
    if name in ("QKAttentionParallel", "QKNormParallel"):
        from . import parallel

        return getattr(parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, including those imported at first use."""
    return sorted(__all__)
