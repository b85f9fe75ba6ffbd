"""Arguments of `fused_rope_rmsnorm_quantization` for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass import PagedKVCache, fused_rope_rmsnorm_quantization
from onepass.ops.mla_cache import op as mla_cache
from onepass.testing.samples import sample

CONTRACT = mla_cache.FUSED_ROPE_RMSNORM_QUANTIZATION
FP8 = torch.float8_e4m3fn
SIZES = {"T": 5, "H": 3, "R": 8, "C": 40, "L": 32, "F": 6, "W": 8, "O": 3, "B": 2, "X": 4, "P": 8, "S": 4, "Z": 40}
SLOTS = torch.tensor([0, 1, 2, 3, 4])
INDEX = dict.fromkeys(("input_row_offsets", "cache_lengths", "lookup_table"), torch.int32)


def positional(cache: torch.dtype = torch.bfloat16, **changes: Any) -> dict[str, Any]:
    """Every argument of a good call by name, in the contract's order."""
    given = ["freqs_cis", "input_row_offsets", "cache_lengths", "lookup_table", "positions", "slot_mapping"]
    dtypes = {"q_rope": torch.bfloat16, "blocks": cache, **INDEX}
    tensors = sample(CONTRACT, SIZES, (), dtypes=dtypes, optional=given)
    tensors["slot_mapping"] = torch.tensor([3, -1, 0, 31, 9])
    values: dict[str, Any] = {name: tensors.get(name) for name in CONTRACT.args}
    values |= {name: option.default for name, option in CONTRACT.options.items()}
    return {**values, **changes}


def angles(positions: int, dim: int) -> Tensor:
    angle = torch.rand(positions, dim // 2) * 6.3
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)


class Call:
    """A good call of two requests, and a cache for it."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, cache: torch.dtype = FP8) -> None:
        self.q, self.kv = torch.randn(5, 4, 64).to(dtype), torch.randn(5, 192).to(dtype)
        self.offsets, self.freqs, self.gamma = torch.tensor([0, 2, 5]), angles(30, 64), torch.randn(128).to(dtype)
        self.cache = self.fresh(cache)

    def fresh(self, dtype: torch.dtype = FP8) -> PagedKVCache:
        return PagedKVCache(
            torch.zeros(8, 4, 192).to(dtype), torch.tensor([3, 9]), torch.tensor([[5, 1, 0], [2, 7, 6]])
        )

    def __call__(self, out: Tensor | None = None, **changes: Any) -> Tensor:
        names = ("q", "kv", "offsets", "freqs", "gamma", "cache")
        values = [changes.pop(name, getattr(self, name)) for name in names]
        return fused_rope_rmsnorm_quantization(out, *values, **changes)
