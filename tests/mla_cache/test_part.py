"""MLA's cache write with unnormed columns between the norm and the rotated columns: `kv_norm_dim`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.errors import ContractError
from onepass.testing.tensors import same_bytes

FP8 = torch.float8_e4m3fn
T, H, R = 5, 3, 8


def angles() -> Tensor:
    angle = torch.rand(20, R // 2, generator=torch.Generator().manual_seed(1)) * 6
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)


def write(kv: Tensor, gamma: Tensor, dtype: torch.dtype = FP8, **options: Any) -> Tensor:
    """The entries of the tokens."""
    q = torch.ones(T, H, R).to(kv.dtype)
    blocks = torch.zeros(2, 4, kv.shape[1]).to(dtype)
    slots = torch.arange(T)
    options |= {"slot_mapping": slots, "positions": slots + 2}
    cache = onepass.PagedKVCache(blocks)
    onepass.fused_rope_rmsnorm_quantization(None, q, kv, None, angles(), gamma, cache, **options)
    return blocks.view(torch.uint8).flatten(0, 1)[:T].view(dtype)


def inputs(latent: int, normed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return (3 * torch.randn(T, latent + R)).to(dtype), torch.randn(normed).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("latent", "normed"), [(96, 64), (97, 33), (40, 1), (64, 63), (2040, 2000)])
@pytest.mark.parametrize("rounding", ["once", "reference"])
def test_each_part_equals_a_separate_call(dtype: torch.dtype, latent: int, normed: int, rounding: str) -> None:
    kv, gamma = inputs(latent, normed, dtype)
    whole = write(kv, gamma, kv_norm_dim=normed, rounding=rounding)
    alone = write(torch.cat((kv[:, :normed], kv[:, latent:]), -1), gamma, rounding=rounding)
    assert same_bytes(whole[:, :normed], alone[:, :normed])
    assert same_bytes(whole[:, latent:], alone[:, normed:])
    between = kv[:, normed:latent].float().clamp(-448, 448).to(FP8)
    assert between.float().any() and same_bytes(whole[:, normed:latent], between)


def test_columns_between_are_copied_to_a_cache_of_their_dtype() -> None:
    kv, gamma = inputs(96, 64, torch.bfloat16)
    kv[1, 70] = torch.nan
    kv[2, 71] = torch.inf
    entry = write(kv, gamma, torch.bfloat16, kv_norm_dim=64)
    assert torch.equal(entry[:, 64:96].nan_to_num(7.0), kv[:, 64:96].nan_to_num(7.0))
    assert entry[:, :64].isfinite().all(), "what is not normed spoils no norm"


def test_scale_includes_the_columns_between() -> None:
    kv, gamma = inputs(96, 64, torch.float32)
    kv[:, 70] = 1000.0
    scale = torch.zeros(2, 4)
    entry = write(kv, gamma, kv_norm_dim=64, per_token_scale=scale)
    assert torch.equal(scale.flatten()[:T], torch.full((T,), 1000.0) / 448)
    assert entry[:, 70].float().eq(448).all()
    given = write(kv, gamma, kv_norm_dim=64, kv_scale=torch.tensor(1000.0 / 448))
    assert same_bytes(given, entry)


def test_kv_norm_dim_of_all_columns_changes_nothing() -> None:
    kv, gamma = inputs(96, 96, torch.bfloat16)
    assert same_bytes(write(kv, gamma, kv_norm_dim=96), write(kv, gamma))


@pytest.mark.parametrize(
    ("normed", "options", "message"),
    [
        (64, {}, r"`kv` must have gamma's and q_rope's columns \(with kv_norm_dim: at least\)"),
        (97, {"kv_norm_dim": 97}, "`kv` must have gamma's and q_rope's columns"),
        (64, {"kv_norm_dim": 63}, "`kv_norm_dim` must be gamma's length"),
        (64, {"kv_norm_dim": 0}, "`kv_norm_dim` must be an int and satisfy kv_norm_dim > 0, got 0"),
        (64, {"kv_norm_dim": 64.0}, "`kv_norm_dim` must be an int"),
        (64, {"kv_norm_dim": True}, "`kv_norm_dim` must be an int"),
    ],
)
def test_bad_calls_are_rejected(normed: int, options: dict[str, Any], message: str) -> None:
    kv, gamma = inputs(96, normed, torch.bfloat16)
    with pytest.raises(ContractError, match=f"^fused_rope_rmsnorm_quantization: {message}"):
        write(kv, gamma, **options)


def test_limit_of_columns() -> None:
    kv, gamma = inputs(2049, 8, torch.bfloat16)
    with pytest.raises(ContractError, match="`kv` must have at most 2048 columns before q_rope's"):
        write(kv, gamma, kv_norm_dim=8)
