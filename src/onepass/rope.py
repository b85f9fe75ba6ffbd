"""Rotary position embedding as an argument: `Rope` specifies angles, pairs of columns and their number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor

RopeStyle = Literal["half", "interleaved"]
STYLES: Final[tuple[RopeStyle, ...]] = ("half", "interleaved")


@dataclass(slots=True, eq=False)  # not frozen, which would double what one costs per layer and token
class Rope:
    """Rotate the first ``dim`` columns of every head by the angles of the token's position.

    The angles are a table, ``freqs``, or each token's own, ``cos`` and ``sin``.

    ``freqs`` [max_seq, dim] float32 holds (cos, sin) of each pair, interleaved: c0, s0, c1, s1, ...
    ``positions``, int32 or int64 with the leading shape, selects each token's row of freqs; the default is
    the token's index in the last leading dimension. ``style="half"`` pairs columns i and i + dim/2
    (Llama, Qwen), "interleaved" columns 2i and 2i + 1 (GPT-J, DeepSeek)::

        a, b = a * cos - b * sin, b * cos + a * sin

    ``dim`` is even and at most freqs' width, which is the default. Further columns of a head are not
    rotated. ``head_dim`` is required if the op cannot infer it.

    ``cos`` and ``sin`` [..., dim] have one row per token ([1, S, dim] serves every sequence), as transformers'
    ``position_embeddings``. Their second halves repeat the first and are not read. `qk_norm_rope_cache` takes them.

    A position outside freqs uses the nearest row. With ``ONEPASS_DEBUG=1`` in the environment it raises instead.

    >>> import torch, onepass
    >>> quarter = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # no rotation at position 0, a quarter turn at 1
    >>> q = k = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    >>> onepass.qk_rms_norm(q, k, torch.ones(2), torch.ones(2), rope=onepass.Rope(quarter, head_dim=2))[0]
    tensor([[ 1.0000,  1.0000],
            [-1.0000,  1.0000]])
    """

    freqs: Tensor | None = None
    positions: Tensor | None = None
    style: RopeStyle = "half"
    dim: int | None = None
    head_dim: int | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
