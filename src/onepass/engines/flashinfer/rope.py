"""``flashinfer.rope``: the rotation and fp8 cast of MLA's queries and keys.

This is elementwise work without a norm, so torch computes it. `onepass.fused_rope_rmsnorm_quantization` also norms
the latent and writes the cache, in one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.contract import describe
from ...errors import ContractError, Unsupported
from ..arguments import require_tensors

__all__ = ["mla_rope_quantize_fp8"]

_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def mla_rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor,
    k_nope: Tensor,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``fp8(rope(x) * quant_scale)`` of the first two, ``fp8(x * quant_scale)`` of the others: (q_rope, k_rope, q_nope, k_nope).

    Queries are [tokens, heads, columns]; keys are [tokens, columns] or have heads too. ``cos_sin_cache`` [positions,
    columns of q_rope] is float32, first all cosines, then all sines. ``is_neox`` pairs columns i and i + columns/2, else
    2i and 2i + 1. Everything is float32 until one rounding. Values that the format lacks become its largest.
    """
    name = "mla_rope_quantize_fp8"
    require_tensors(name, q_rope=q_rope, k_rope=k_rope, q_nope=q_nope, k_nope=k_nope)
    require_tensors(name, cos_sin_cache=cos_sin_cache, pos_ids=pos_ids)
    outs = (q_rope_out, k_rope_out, q_nope_out, k_nope_out)
    dtype = quantize_dtype or next((out.dtype for out in outs if out is not None), torch.float8_e4m3fn)
    if dtype not in _FORMATS:
        raise Unsupported(f"{name}: `quantize_dtype` must be one of {', '.join(map(str, _FORMATS))}, got {dtype}")
    queries, keys = {"q_rope": q_rope, "q_nope": q_nope}, {"k_rope": k_rope, "k_nope": k_nope}
    _check(name, queries, keys, cos_sin_cache, pos_ids)
    for label, factor in (("quant_scale_q", quant_scale_q), ("quant_scale_kv", quant_scale_kv)):
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise ContractError(f"{name}: `{label}` must be a number, got {describe(factor)}")
    cos, sin = cos_sin_cache[pos_ids.long()].chunk(2, -1)
    values = (
        _rotated(q_rope, cos, sin, is_neox) * quant_scale_q,
        _rotated(k_rope, cos, sin, is_neox) * quant_scale_kv,
        q_nope.float() * quant_scale_q,
        k_nope.float() * quant_scale_kv,
    )
    results = []
    for value, out in zip(values, outs, strict=True):
        limit = torch.finfo(dtype).max
        codes = value.clamp(-limit, limit).to(dtype)
        results.append(codes if out is None else out.copy_(codes))
    q_turned, k_turned, q_plain, k_plain = results
    return q_turned, k_turned, q_plain, k_plain


def _check(
    name: str, queries: dict[str, Tensor], keys: dict[str, Tensor], cos_sin_cache: Tensor, pos_ids: Tensor
) -> None:
    """The dtypes, devices and shapes of what is rotated or cast, by the names of the arguments."""
    if cos_sin_cache.dtype != torch.float32 or cos_sin_cache.dim() != 2:
        raise ContractError(
            f"{name}: `cos_sin_cache` must be float32 [positions, columns], got {describe(cos_sin_cache)}"
        )
    if pos_ids.dim() != 1 or pos_ids.dtype not in (torch.int32, torch.int64):
        raise ContractError(f"{name}: `pos_ids` must be [tokens] of int32 or int64, got {describe(pos_ids)}")
    for label, x in {**queries, **keys, "pos_ids": pos_ids}.items():
        if x.device != cos_sin_cache.device:
            raise ContractError(
                f"{name}: `{label}` must be on {cos_sin_cache.device} like cos_sin_cache, got {x.device}"
            )
    for label, x in {**queries, **keys}.items():
        if x.dim() not in ((3,) if label in queries else (2, 3)) or x.shape[0] != pos_ids.shape[0]:
            shapes = "[tokens, heads, columns]" if label in queries else "[tokens, columns] or [tokens, heads, columns]"
            raise ContractError(
                f"{name}: `{label}` must be {shapes} with the {pos_ids.shape[0]} tokens of pos_ids, got {list(x.shape)}"
            )
        if not x.dtype.is_floating_point:
            raise ContractError(f"{name}: `{label}` must have a float dtype, got {x.dtype}")
    for label, rotated in (("q_rope", queries["q_rope"]), ("k_rope", keys["k_rope"])):
        if rotated.shape[-1] != cos_sin_cache.shape[-1]:
            raise ContractError(
                f"{name}: `{label}` must have the {cos_sin_cache.shape[-1]} columns of cos_sin_cache, got {rotated.shape[-1]}"
            )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """A float32 copy with its pairs of columns rotated."""
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x = x.float()
    a, b = x.chunk(2, -1) if is_neox else (x[..., ::2], x[..., 1::2])
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2)
