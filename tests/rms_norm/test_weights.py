"""No gamma, a gamma of each head, the stored reciprocal RMS, and norms of a row's first columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.errors import ContractError
from onepass.formats import FLOATS
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.testing.tensors import same_bytes

BF16, F16, F32 = FLOATS
Results = tuple[Tensor, ...]
DTYPE = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).removeprefix("torch."))


def rows(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(x: Tensor, gamma: Tensor | None, **options: Any) -> Results:
    return onepass.rms_norm(x, gamma, return_rstd=True, **options)


def layer(x: Tensor, gamma: Tensor | None, **options: Any) -> Results:
    return onepass.layer_norm(x, gamma, return_rstd=True, **options)


OPS: dict[str, Callable[..., Results]] = {
    "rms_norm": plain,
    "rms_norm, hf": lambda x, gamma, **o: plain(x, gamma, rounding="hf", **o),
    "rms_norm, residual": lambda x, gamma, **o: plain(x, gamma, residual=x.flip(0), **o),
    "layer_norm": layer,
    "fp8": lambda x, gamma, **o: onepass.rms_norm_fused_fp8(x, gamma, **o),
    "fp8, groups": lambda x, gamma, **o: onepass.rms_norm_fused_fp8(x, gamma, group_size=64, **o),
    "fp8, hf": lambda x, gamma, **o: onepass.rms_norm_fused_fp8(x, gamma, rounding="hf", return_norm=True, **o),
    "int8": lambda x, gamma, **o: onepass.rms_norm_fused_quant(x, gamma, format="int8", **o),
    "nvfp4": lambda x, gamma, **o: onepass.rms_norm_fused_quant(x, gamma, format="nvfp4", quantize="divide", **o),
    "layer, mxfp8": lambda x, gamma, **o: onepass.rms_norm_fused_quant(
        x, gamma, format="mxfp8", statistic="layer", **o
    ),
}


@pytest.mark.parametrize(("op", "dtype"), [*((op, BF16) for op in OPS), ("rms_norm, hf", F16), ("fp8, hf", F32)])
def test_no_gamma_has_the_bytes_of_ones(op: str, dtype: torch.dtype) -> None:
    x = rows(4, 320, dtype=dtype)
    x[1], x[2, 3] = 0.0, torch.inf
    found, expected = OPS[op](x, None), OPS[op](x, torch.ones(320, dtype=dtype))
    assert found[0].float().nan_to_num().abs().amax() > 1
    assert len(found) == len(expected) and all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_the_first_columns_of_wider_rows(op: str) -> None:
    """Views of the first columns are normed as if they were alone, and the other columns of the outputs keep their values."""
    k = 192
    whole, gamma = rows(2, 3, 300), 1 + rows(k) / 4
    expected = OPS[op](whole[..., :k].contiguous(), gamma)
    width, size = expected[0].shape[-1], expected[0].itemsize
    memory = torch.full((2, 3, 300 * size), 7, dtype=torch.uint8)
    room = memory.view(expected[0].dtype)
    found = OPS[op](whole[..., :k], gamma, out=room[..., :width])
    assert found[0].data_ptr() == room.data_ptr()
    assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))
    assert (memory[..., width * size :] == 7).all()


def test_the_first_columns_in_place() -> None:
    x, gamma = rows(5, 300), 1 + rows(128) / 4
    before = x.clone()
    onepass.rms_norm(x[:, :128], gamma, out=x[:, :128])
    assert same_bytes(x[:, :128], onepass.rms_norm(before[:, :128].contiguous(), gamma))
    assert same_bytes(x[:, 128:], before[:, 128:])


@pytest.mark.parametrize("shape", [(3, 96), (2, 5, 3, 96), (1, 3, 96), (2, 2, 2, 2, 3, 96)])
@DTYPE
def test_each_head_has_its_gamma(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gamma = rows(*shape, dtype=dtype), rows(3, 96, dtype=F16, seed=1)
    x = x.transpose(0, -3).contiguous().transpose(0, -3) if len(shape) > 3 else x
    ways: list[dict[str, Any]] = [
        {},
        {"rounding": "hf", "weight_offset": 1.0},
        {"residual": x.flip(0), "gate": x.flip(-1)},
    ]
    for options in ways:
        found = onepass.rms_norm(x, gamma, **options)
        for head in range(3):
            part: dict[str, Any] = {n: v[..., head, :] if isinstance(v, Tensor) else v for n, v in options.items()}
            alone = onepass.rms_norm(x[..., head, :], gamma[head], **part)
            pairs = [(found, alone)] if isinstance(found, Tensor) else list(zip(found, alone, strict=True))
            assert all(same_bytes(a[..., head, :], b) for a, b in pairs)


@pytest.mark.parametrize("op", OPS)
def test_each_head_has_its_gamma_in_every_op(op: str) -> None:
    x, gamma = rows(5, 3, 128), rows(3, 128, dtype=F16, seed=1)
    found = OPS[op](x, gamma, weight_offset=1.0)
    assert found[0].float().abs().amax() > 1
    for head in range(3):
        alone = OPS[op](x[:, head], gamma[head], weight_offset=1.0)
        assert all(same_bytes(a[:, head], b) for a, b in zip(found, alone, strict=True))


def test_heads_agree_with_the_oracle() -> None:
    x, gamma = rows(4, 3, 96, dtype=F32), rows(3, 96, dtype=F32, seed=1)
    assert torch.allclose(onepass.rms_norm(x, gamma).double(), rms_norm_reference.rms_norm(x, gamma, 1e-6).y, rtol=1e-5)
    assert torch.allclose(onepass.rms_norm(x, None).double(), rms_norm_reference.rms_norm(x, None, 1e-6).y, rtol=1e-5)


@DTYPE
def test_the_reciprocal_rms_is_that_of_the_rows(dtype: torch.dtype) -> None:
    x, residual = rows(2, 3, 200, dtype=dtype), rows(2, 3, 200, dtype=dtype, seed=1)
    y, h, rstd = onepass.rms_norm(x, None, 1e-5, residual=residual, round_sum=True, return_rstd=True)
    expected = (h.double().square().mean(-1) + 1e-5).rsqrt()
    assert rstd.shape == (2, 3) and rstd.dtype is F32 and torch.allclose(rstd.double(), expected, rtol=1e-6)
    assert same_bytes(y, (h.float() * rstd[..., None]).to(dtype))
    room = torch.zeros(3, 2, 2)
    given = onepass.rms_norm(x, None, 1e-5, residual=h, return_rstd=True, rstd_out=room[..., 1].T)[-1]
    assert given.data_ptr() == room[..., 1].data_ptr() and (room[..., 1] > 0).all() and (room[..., 0] == 0).all()


@pytest.mark.parametrize("op", [op for op in OPS if "rms_norm" not in op and op != "layer_norm"])
def test_the_reciprocal_rms_of_every_quantizing_op(op: str) -> None:
    """It is the last result, with the bytes that the plain norm stores, and changes no other result."""
    x, gamma = rows(4, 2, 128), rows(128, seed=1)
    plain = onepass.layer_norm if op.startswith("layer") else onepass.rms_norm
    *others, rstd = OPS[op](x, gamma, return_rstd=True)
    assert same_bytes(rstd, plain(x, gamma, return_rstd=True)[-1]) and (rstd > 0).all()
    assert all(same_bytes(a, b) for a, b in zip(others, OPS[op](x, gamma), strict=True))
    room = torch.zeros(4, 2)
    assert OPS[op](x, gamma, return_rstd=True, rstd_out=room)[-1] is room and same_bytes(room, rstd)


def test_the_reciprocal_rms_of_layer_norm_is_that_of_centered_rows() -> None:
    x = rows(6, 200, dtype=F32) + 3
    y, rstd = onepass.layer_norm(x, None, eps=1e-5, return_rstd=True)
    expected = (x.double().var(-1, correction=0) + 1e-5).rsqrt()
    assert torch.allclose(rstd.double(), expected, rtol=1e-6)
    assert torch.allclose(y.double(), (x - x.mean(-1, keepdim=True)).double() * expected[:, None], atol=1e-5)


def test_the_reciprocal_rms_of_special_rows() -> None:
    x = rows(3, 64, dtype=F32)
    x[0], x[1, 5] = 0.0, torch.nan
    rstd = onepass.rms_norm(x, None, 1e-4, return_rstd=True)[1]
    assert rstd[0] == pytest.approx(100) and rstd[1].isnan() and rstd[2].isfinite()
    assert onepass.rms_norm(x[2], None, return_rstd=True)[1].shape == ()


@pytest.mark.parametrize(
    ("gamma", "change", "message"),
    [
        (None, {"weight_offset": 1.0}, "`weight_offset` must be 0 without gamma, got 1.0"),
        (torch.ones(2, 64), {}, r"`gamma` must have shape \[N\], or \[H, N\] with x \[..., H, N\]"),
        (torch.ones(6, 63), {}, r"`gamma` must have shape \[H, N\] with H=6, N=64, got \[6, 63\]"),
        (torch.ones(1, 6, 64), {}, r"`gamma` must have shape \[N\] with N=64, got \[1, 6, 64\]"),
        (None, {"rstd_out": torch.empty(6)}, "`rstd_out` must be None unless return_rstd"),
        (None, {"return_rstd": True, "rstd_out": torch.empty(6, 1)}, r"`rstd_out` must have shape \[...\]"),
        (None, {"return_rstd": 1}, "`return_rstd` must be a bool"),
    ],
)
def test_wrong_calls_are_refused(gamma: Tensor | None, change: dict[str, Any], message: str) -> None:
    for op in (onepass.rms_norm, onepass.layer_norm, onepass.rms_norm_fused_fp8, onepass.rms_norm_fused_quant):
        with pytest.raises(ContractError, match=f"{op.__name__}: {message}"):
            op(torch.ones(6, 64), gamma, **change)


def test_wrong_weightless_calls_are_refused() -> None:
    codes, scale = torch.ones(6, 64, dtype=torch.int8), torch.ones(6, 1)
    options: dict[str, Any] = {"prologue": onepass.prologues.dequantize, "prologue_args": [scale]}
    assert onepass.rms_norm_fused_fp8(codes, None, **options)[0].float().abs().max() == 448
    with pytest.raises(ContractError, match="`gamma` must be given for the norm of an 8-bit x"):
        onepass.rms_norm_fused_fp8(codes, None, return_norm=True, **options)
    heads = torch.full((6, 64), 2.0, dtype=F16)
    assert onepass.rms_norm_fused_fp8(codes, heads, return_norm=True, **options)[2].dtype is F16
