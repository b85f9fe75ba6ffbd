"""8-bit rows, which a prologue interprets, and prologue tensors with one value per group of columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.formats import FLOATS, FP8_FORMATS, OPERAND_GROUPS, QUANTIZED
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.prologues import dequantize, prologue
from tests.helpers.interpreting import interpret
from tools.ulps import floats

BF16, F16, F32 = FLOATS
N = 512


@prologue
def plain(x):  # type: ignore[no-untyped-def]
    """The row itself."""
    return x


def every_code(dtype: torch.dtype) -> Tensor:
    """[2, 256]: every bit pattern once, numbers in one row, NaN and zeros in the other."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    nan = codes.float().isnan() if dtype.is_floating_point else torch.zeros(256, dtype=torch.bool)
    bits = codes.view(torch.uint8)
    return torch.stack([torch.where(nan, 0, bits), torch.where(nan, bits, 0)]).view(dtype)


def values(x: Tensor) -> Tensor:
    """What a kernel reads: with a residual of -0 the new residual is the prologue's result."""
    residual = torch.full(x.shape, -0.0)
    return onepass.rms_norm_fused_fp8(x, torch.ones(x.shape[-1]), residual=residual, prologue=plain)[2]


def wrong_codes(dtype: torch.dtype) -> int:
    """The number of bit patterns that a kernel reads differently from torch, including the sign of zero."""
    x = every_code(dtype)
    got, expected = values(x), x.float()
    same = (got.view(torch.int32) == expected.view(torch.int32)) | (got.isnan() & expected.isnan())
    return int((~same).sum())


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_every_code_is_decoded_exactly(dtype: torch.dtype) -> None:
    assert wrong_codes(dtype) == 0


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
@pytest.mark.slow
def test_triton_kernel_decodes_every_code_exactly() -> None:
    """In the interpreter, which decodes like GPUs without a hardware instruction."""
    pytest.importorskip("triton")
    program = """
from tests.oracle.runner import running_on
from tests.prologues.test_dequantize import QUANTIZED, wrong_codes
with running_on("interpreter"):
    print([wrong_codes(dtype) for dtype in QUANTIZED])
"""
    assert interpret("-c", program) == "[0, 0, 0]\n"


def quantized(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return (40 * torch.randn(shape, generator=generator)).clamp(-127, 127).to(dtype)


@pytest.mark.sampled(12)  # each compiles kernels
@pytest.mark.parametrize("group", OPERAND_GROUPS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_scale_per_group_equals_scale_per_column(dtype: torch.dtype, group: int) -> None:
    x, gamma = quantized(dtype, 3, N), torch.linspace(0.5, 1.5, N)
    scale = torch.rand(3, N // group, generator=torch.Generator().manual_seed(1)) + 0.01
    spread = scale.repeat_interleave(group, -1)
    assert spread.unique().numel() == scale.numel()
    results = [
        onepass.rms_norm_fused_fp8(x, gamma, prologue=dequantize, prologue_args=[s], return_norm=True)
        for s in (scale, spread)
    ]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    exact = rms_norm_reference.rms_norm(x, gamma, 1e-6, prologue=dequantize, prologue_args=[scale])
    assert floats(results[0][2], exact.y) is None
    swapped = rms_norm_reference.rms_norm(x, gamma, 1e-6, prologue=dequantize, prologue_args=[scale.flip(-1)])
    assert floats(results[0][2], swapped.y) is not None


def test_an_8_bit_row_gives_the_bytes_of_its_float32_copy() -> None:
    for dtype in QUANTIZED:
        x, scale = quantized(dtype, 4, N), torch.rand(4, N // 128)
        residual, gamma = torch.randn(4, N), torch.randn(N)
        arguments: dict[str, Any] = {"residual": residual, "prologue": dequantize, "prologue_args": [scale]}
        narrow = onepass.rms_norm_fused_fp8(x, gamma, return_norm=True, **arguments)
        wide = onepass.rms_norm_fused_fp8(x.float(), gamma, return_norm=True, **arguments)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(narrow, wide, strict=True))


@pytest.mark.sampled(5)  # each compiles a kernel
@pytest.mark.parametrize("gamma", FLOATS)
@pytest.mark.parametrize("residual", FLOATS)
def test_the_norm_of_an_8_bit_row_has_gammas_dtype(gamma: torch.dtype, residual: torch.dtype) -> None:
    x = quantized(torch.int8, 2, 64)
    codes, _, new_residual, norm = onepass.rms_norm_fused_fp8(
        x, torch.ones(64, dtype=gamma), residual=torch.zeros(2, 64, dtype=residual), prologue=plain, return_norm=True
    )
    assert (codes.dtype, new_residual.dtype, norm.dtype) == (torch.float8_e4m3fn, residual, gamma)
    exact = rms_norm_reference.rms_norm(x, torch.ones(64), 1e-6)
    assert floats(norm, exact.y) is None


@pytest.mark.full  # test_compile.py compiles calls with a prologue
def test_compiled_calls_have_the_same_bytes() -> None:
    x, gamma, scale = quantized(torch.float8_e4m3fn, 4, 256), torch.ones(256).bfloat16(), torch.rand(4, 2)

    def call(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return onepass.rms_norm_fused_fp8(x, gamma, prologue=dequantize, prologue_args=[scale], return_norm=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(call(x, scale), compiled(x, scale), strict=True):
        assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# --- refusals -------------------------------------------------------------------------------------------------------


def refused(x: Tensor, **options: Any) -> str:
    with pytest.raises(onepass.ContractError) as caught:
        onepass.rms_norm_fused_fp8(x, torch.ones(x.shape[-1]), **options)
    return str(caught.value)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_8_bit_x_needs_a_prologue(dtype: torch.dtype) -> None:
    message = refused(quantized(dtype, 2, 64))
    name = str(dtype).removeprefix("torch.")
    assert message == (
        "rms_norm_fused_fp8: `x` must be bfloat16, float16 or float32 without a prologue, "
        f"got a tensor [2, 64] of {name} on cpu"
    )


def test_hf_rounding_is_rejected_for_an_8_bit_x() -> None:
    message = refused(quantized(torch.int8, 2, 64), prologue=plain, rounding="hf")
    assert (
        message == "rms_norm_fused_fp8: `rounding` must be 'once' for an 8-bit x ('hf' rounds to x's dtype), got 'hf'"
    )


def test_other_dtypes_are_rejected() -> None:
    for dtype in (torch.uint8, torch.float8_e5m2, torch.int16, torch.float64):
        assert "`x` must have dtype bfloat16 or float16 or float32 or float8_e4m3fn" in refused(
            torch.ones(2, 64).to(dtype), prologue=plain
        )
    scale = torch.ones(2, 2).to(torch.float8_e4m3fn)
    assert "`prologue_args` must have dtype" in refused(torch.ones(2, 64), prologue=dequantize, prologue_args=[scale])
    assert set(QUANTIZED) == {*FP8_FORMATS, torch.int8}


@pytest.mark.parametrize("shape", [(3, 63), (63,), (3, 3), (3, 32), (3, 16), (2, 4), (2,), (3, 64, 1), ()])
def test_error_lists_every_shape_of_prologue_args(shape: tuple[int, ...]) -> None:
    good = torch.ones(3, 1)
    fused = prologue(both)
    message = refused(torch.ones(3, 64), prologue=fused, prologue_args=[good, torch.ones(shape)])
    assert message == (
        "rms_norm_fused_fp8: `prologue_args` must have shape [..., N] or [N] or [..., 1] or [..., N/32] or [..., N/64] "
        f"or [..., N/128] or [..., N/256] with ...=[3], N=64, got {list(shape)} at index 1"
    )


def both(x, a, b):  # type: ignore[no-untyped-def]
    return x + a + b


def test_group_must_divide_the_row() -> None:
    for n, groups in ((96, 3), (512, 2), (256, 1)):
        scale = torch.rand(2, groups)
        onepass.rms_norm_fused_fp8(torch.ones(2, n), torch.ones(n), prologue=dequantize, prologue_args=[scale])
    for n, groups in ((100, 3), (96, 2), (512, 32), (1024, 2), (40, 2)):
        message = refused(torch.ones(2, n), prologue=dequantize, prologue_args=[torch.rand(2, groups)])
        assert f"N={n}, got [2, {groups}] at index 0" in message
    strided = torch.rand(2, 4).t().contiguous().t()
    assert "contiguous last dimension" in refused(torch.ones(2, 128), prologue=dequantize, prologue_args=[strided])
