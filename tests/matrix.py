"""The matrix: every case of every op. `onepass check` makes few calls (`onepass.testing.runner`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tests.attention import cases as attention
from tests.gemv_norm import cases as gemv_norm
from tests.head_product import cases as head_product
from tests.latent_attention import cases as latent_attention
from tests.linear import cases as linear
from tests.mla_cache import cases as mla_cache
from tests.oracle.case import Check
from tests.oracle.runner import among
from tests.qk_cache import cases as qk_cache
from tests.qk_norm import cases as qk_norm
from tests.rms_norm import cases as rms_norm

CASES: Final[tuple[Check, ...]] = (
    *rms_norm.CASES,
    *gemv_norm.CASES,
    *linear.CASES,
    *qk_norm.CASES,
    *mla_cache.CASES,
    *qk_cache.CASES,
)
"""Cases that every device runs."""
GPU_CASES: Final[tuple[Check, ...]] = (
    *attention.CASES,
    *latent_attention.CASES,
    *head_product.CASES,
    *linear.GPU_CASES,
)
"""Cases of kernels that a CPU does not have, and of what a GPU does differently. The interpreter has the former."""


def select(ops: Sequence[str] = (), match: str = "", device: str = "cpu") -> list[Check]:
    """The device's cases of these ops (all when empty) whose name contains ``match``, or one of its alternatives separated by ``|``."""
    return among(CASES if device == "cpu" else (*CASES, *GPU_CASES), ops, match)
