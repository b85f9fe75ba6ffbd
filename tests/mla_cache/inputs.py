"""Valid calls of `fused_rope_rmsnorm_quantization`."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from onepass import PagedKVCache, fused_rope_rmsnorm_quantization
from onepass.formats import E4M3FN
from onepass.kvcache import DS_MLA_BYTES
from onepass.ops.mla_cache.op import FUSED_ROPE_RMSNORM_QUANTIZATION
from tests.inputs import I32, Arguments, Build, Form, Rows, Tensors, angles, both, positions, sampled_arguments, writing


def mla_arguments(scale: str, device: str = "cpu") -> Arguments:
    """A cache of pages. ``scale`` is the argument with the scale of its entries."""
    sizes = {"T": 5, "H": 3, "R": 8, "C": 40, "L": 32, "F": 6, "W": 8, "O": 3, "B": 2, "X": 4, "P": 8, "S": 4, "Z": 40}
    tables = {
        "input_row_offsets": torch.tensor([0, 2, 5], dtype=I32, device=device),
        "cache_lengths": torch.tensor([3, 1], dtype=I32, device=device),
        "lookup_table": torch.tensor([[5, 1, 0, 3], [2, 7, 6, 4]], dtype=I32, device=device),
    }
    optional = ("freqs_cis", *tables, "positions", scale)
    options = {"epsilon": 0.5, "rope_dim": 8, **dict.fromkeys(tables, I32)}
    return sampled_arguments(FUSED_ROPE_RMSNORM_QUANTIZATION, sizes, (), device, optional, **options) | tables


BY_CONTRACT: dict[str, Build] = {FUSED_ROPE_RMSNORM_QUANTIZATION.name: partial(mla_arguments, "kv_scale")}


def call_mla(values: Arguments) -> Any:
    values = dict(values)
    cache = PagedKVCache(torch.zeros(1, 1, 1))
    for name in ("blocks", "cache_lengths", "lookup_table", "entry_format"):
        setattr(cache, name, values.pop(name))  # unchecked
    return fused_rope_rmsnorm_quantization(**values, k_cache=cache)


_CONTRACT = FUSED_ROPE_RMSNORM_QUANTIZATION
FORMS: list[Form] = [
    *both("mla, scale", _CONTRACT, partial(mla_arguments, "kv_scale"), call_mla),
    writing("mla, scales of tokens", _CONTRACT, partial(mla_arguments, "per_token_scale"), call_mla),
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
