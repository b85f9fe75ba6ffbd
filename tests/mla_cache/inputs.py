"""Valid calls of `fused_rope_rmsnorm_quantization`, and a cache with two requests for them."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from onepass import PagedKVCache, fused_rope_rmsnorm_quantization
from onepass.formats import E4M3FN
from onepass.kvcache import DS_MLA_BYTES
from onepass.ops.mla_cache.op import FUSED_ROPE_RMSNORM_QUANTIZATION
from tests.inputs import (
    BF16,
    FP8,
    I32,
    Arguments,
    Build,
    Form,
    Rows,
    Tensors,
    angles,
    both,
    positions,
    sampled_arguments,
    writing,
)

CONTRACT = FUSED_ROPE_RMSNORM_QUANTIZATION
SIZES = {"T": 5, "H": 3, "R": 8, "C": 40, "L": 32, "F": 6, "W": 8, "O": 3, "B": 2, "X": 4, "P": 8, "S": 4, "Z": 40}
SLOTS = torch.tensor([0, 1, 2, 3, 4])


def mla_arguments(scale: str, device: str = "cpu") -> Arguments:
    """A cache of pages. ``scale`` is the argument with the scale of its entries."""
    tables = {
        "input_row_offsets": torch.tensor([0, 2, 5], dtype=I32, device=device),
        "cache_lengths": torch.tensor([3, 1], dtype=I32, device=device),
        "lookup_table": torch.tensor([[5, 1, 0, 3], [2, 7, 6, 4]], dtype=I32, device=device),
    }
    optional = ("freqs_cis", *tables, "positions", scale)
    options = {"epsilon": 0.5, "rope_dim": 8, **dict.fromkeys(tables, I32)}
    return sampled_arguments(CONTRACT, SIZES, (), device, optional, **options) | tables


BY_CONTRACT: dict[str, Build] = {CONTRACT.name: partial(mla_arguments, "kv_scale")}


def positional(cache: torch.dtype = BF16, **changes: Any) -> Arguments:
    """Every argument of a good call by name, in the contract's order."""
    tables = dict.fromkeys(("input_row_offsets", "cache_lengths", "lookup_table"), I32)
    optional = ("freqs_cis", *tables, "positions", "slot_mapping")
    values = sampled_arguments(CONTRACT, SIZES, (), "cpu", optional, blocks=cache, **tables)
    return {**values, "slot_mapping": torch.tensor([3, -1, 0, 31, 9]), **changes}


def rotations(positions: int, dim: int) -> Tensor:
    """Random angles as cosines and sines."""
    angle = torch.rand(positions, dim // 2) * 6.3
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)


class Call:
    """A good call of two requests, and a cache for it."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, cache: torch.dtype = FP8) -> None:
        self.q, self.kv = torch.randn(5, 4, 64).to(dtype), torch.randn(5, 192).to(dtype)
        self.offsets, self.freqs, self.gamma = torch.tensor([0, 2, 5]), rotations(30, 64), torch.randn(128).to(dtype)
        self.cache = self.fresh(cache)

    def fresh(self, dtype: torch.dtype = FP8) -> PagedKVCache:
        return PagedKVCache(
            torch.zeros(8, 4, 192).to(dtype), torch.tensor([3, 9]), torch.tensor([[5, 1, 0], [2, 7, 6]])
        )

    def __call__(self, out: Tensor | None = None, **changes: Any) -> Tensor:
        names = ("q", "kv", "offsets", "freqs", "gamma", "cache")
        values = [changes.pop(name, getattr(self, name)) for name in names]
        return fused_rope_rmsnorm_quantization(out, *values, **changes)


def call_mla(values: Arguments) -> Any:
    values = dict(values)
    cache = PagedKVCache(torch.zeros(1, 1, 1))
    for name in ("blocks", "cache_lengths", "lookup_table", "entry_format"):
        setattr(cache, name, values.pop(name))  # unchecked
    return fused_rope_rmsnorm_quantization(**values, k_cache=cache)


FORMS: list[Form] = [
    *both("mla, scale", CONTRACT, partial(mla_arguments, "kv_scale"), call_mla),
    writing("mla, scales of tokens", CONTRACT, partial(mla_arguments, "per_token_scale"), call_mla),
]

# --- any number of rows ---------------------------------------------------------------------------------------------


def _mla(t: Tensors, **options: Any) -> list[Tensor]:
    """q, entries and scales in token order; slots run backwards."""
    count, device = t["kv"].shape[0], t["kv"].device
    blocks = torch.zeros(-(-count // 4) + 1, 4, t["kv"].shape[1], device=device).to(E4M3FN.dtype)
    scale = torch.zeros(blocks.shape[:2], device=device)
    slots = torch.arange(count, device=device).flip(0) + 3
    options |= {"per_token_scale": scale, "slot_mapping": slots, "positions": positions(t)}
    named = (t["q"].unflatten(1, (2, 32)), t["kv"], None, angles(t["q"]), t["gamma"], PagedKVCache(blocks))
    q = fused_rope_rmsnorm_quantization(None, *named, **options)
    return [q, blocks.view(torch.uint8).flatten(0, 1)[slots], scale.flatten()[slots]]


def _packed(t: Tensors) -> list[Tensor]:
    """Entries of 656 bytes in token order."""
    count, device = t["kv"].shape[0], t["kv"].device
    blocks = torch.zeros(-(-count // 4) + 1, 4, DS_MLA_BYTES, dtype=torch.uint8, device=device)
    slots = torch.arange(count, device=device).flip(0) + 3
    cache = PagedKVCache(blocks, entry_format="fp8_ds_mla")
    named = (t["q"].unflatten(1, (2, 64)), t["kv"], None, angles(t["q"]), t["gamma"], cache)
    q = fused_rope_rmsnorm_quantization(None, *named, slot_mapping=slots, positions=positions(t))
    return [q, blocks.flatten(0, 1)[slots]]


def _latent(t: Tensors) -> Tensor:
    """A gamma for the columns that do not rotate."""
    columns = t["kv"].shape[1] - 32
    return torch.arange(columns, device=t["kv"].device).cos().to(t["kv"].dtype)


_MLA = {"q": 64, "kv": 0}
ROWS: Final = (
    Rows("fused_rope_rmsnorm_quantization", _MLA, {}, lambda t: _mla({**t, "gamma": _latent(t)})),
    Rows(
        "fused_rope_rmsnorm_quantization, reference",
        _MLA,
        {},
        lambda t: _mla({**t, "gamma": _latent(t)}, rounding="reference", rope_style="half"),
    ),
    Rows("fused_rope_rmsnorm_quantization, packed", {"q": 128, "kv": 576}, {"gamma": (512,)}, _packed),
)
