"""Quantized weights, against definitions that are written here again: DeepSeek's decoder, and codes by search in a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import onepass
from onepass import ContractError, dequantize_weight, quantize_weight, weights
from onepass.formats import FLOATS
from onepass.weights import SCHEMES, Scheme

SHAPES = [(1, 1), (3, 5), (128, 128), (129, 127), (100, 200), (72, 896), (264, 640), (300, 1)]
"""[72, 896] and [264, 640] end within a block, as DeepSeek's [576, 7168] and [2112, 7168] do."""
BLOCKS: tuple[Scheme, ...] = ("fp8_block", "fp8_block_ue8m0")


def random(n: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows and columns of different sizes, and a few zeros."""
    generator = torch.Generator().manual_seed(n * 1000 + k)
    weight = torch.randn(n, k, generator=generator) * torch.randn(n, 1, generator=generator).exp()
    weight *= torch.logspace(-2, 1, k)
    return torch.where(torch.rand(n, k, generator=generator) < 0.02, 0.0, weight).to(dtype)


def decoded_by_deepseek(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """Each block of 128 x 128 times its element of ``weight_scale_inv``: README_WEIGHTS.md of DeepSeek-V3."""
    n, k = codes.shape
    assert codes.dtype is torch.float8_e4m3fn and scale_inv.shape == ((n + 127) // 128, (k + 127) // 128)
    out = torch.full((n, k), torch.nan)
    for row in range(scale_inv.shape[0]):
        for column in range(scale_inv.shape[1]):
            at = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
            out[at] = codes[at].float() * scale_inv[row, column].float()
    return out


def groups(scheme: Scheme, n: int, k: int) -> list[tuple[slice, slice]]:
    """The elements that share each scale, in the order of the scales."""
    if scheme in BLOCKS:
        return [(slice(r, r + 128), slice(c, c + 128)) for r in range(0, n, 128) for c in range(0, k, 128)]
    everything = slice(None)
    return [(everything, everything)] if scheme == "fp8_tensor" else [(slice(r, r + 1), everything) for r in range(n)]


TABLE = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()[:127]
"""The magnitudes of float8_e4m3fn in order; a magnitude's index is its code."""


def nearest_codes(quotient: np.ndarray[Any, Any]) -> Any:
    """The code of the nearest magnitude, ties to the even code, with the sign of the quotient."""
    magnitude = np.minimum(np.abs(quotient), 448.0)
    above = np.searchsorted(TABLE, magnitude).clip(1)
    low, high = magnitude - TABLE[above - 1], TABLE[above] - magnitude
    code = np.where((low < high) | ((low == high) & ((above - 1) % 2 == 0)), above - 1, above)
    return (code + 128 * np.signbit(quotient)).astype(np.uint8)


def expected(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """The rules of `quantize_weight`, one group at a time; scales as float32."""
    values = weight.float().numpy()
    codes = np.zeros(values.shape, np.int8 if scheme == "int8_row" else np.uint8)
    scales = []
    for at in groups(scheme, *values.shape):
        largest = np.float32(np.abs(values[at]).max())
        scale = largest / np.float32(127 if scheme == "int8_row" else 448)
        if scheme == "fp8_block_ue8m0":
            scale = np.float32(2.0 ** min(e for e in range(-127, 128) if 2.0**e * 448 >= float(largest)))
        scales.append(scale)
        quotient = (values[at] / (scale or np.float32(1))).astype(np.float64)
        if scheme == "int8_row":
            codes[at] = np.rint(quotient).clip(-127, 127)
        else:
            codes[at] = nearest_codes(quotient)
    return torch.from_numpy(codes), torch.from_numpy(np.array(scales, np.float32))


def bits(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.int8 else tensor.view(torch.uint8)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_scales(scheme: Scheme, shape: tuple[int, int]) -> None:
    weight = random(*shape)
    codes, scale = quantize_weight(weight, scheme)
    wanted_codes, wanted_scale = expected(weight, scheme)
    assert codes.dtype is (torch.int8 if scheme == "int8_row" else torch.float8_e4m3fn)
    assert scale.dtype is (torch.float8_e8m0fnu if scheme == "fp8_block_ue8m0" else torch.float32)
    n, k = shape
    assert scale.shape == {"fp8_tensor": (1,), "fp8_row": (n,), "int8_row": (n,)}.get(
        scheme, (-(-n // 128), -(-k // 128))
    )
    assert torch.equal(scale.float().flatten(), wanted_scale)
    assert torch.equal(bits(codes), wanted_codes)
    assert wanted_codes.any()


def test_codes_of_a_block_written_by_hand() -> None:
    """The largest weight is 448 * 0.5, so the scale is 0.5, and codes are those of twice the weights."""
    weight = torch.zeros(2, 130)
    weight[0, :8] = torch.tensor([224.0, -224.0, 0.5, -0.25, 8.5, 9.5, 2.0**-10, -(2.0**-11)])
    weight[1, 128] = 448.0 * 3
    codes, scale = quantize_weight(weight, "fp8_block")
    assert scale.tolist() == [[0.5, 3.0]]
    # 17 and 19 are halfway between 16, 18 and 20; 2**-10 is half the smallest code and 2**-9 is that code
    assert codes.view(torch.uint8)[0, :8].tolist() == [0x7E, 0xFE, 0x38, 0xB0, 0x58, 0x5A, 0x01, 0x80]
    assert codes.float()[0, :6].tolist() == [448, -448, 1, -0.5, 16, 20]
    assert codes.view(torch.uint8)[1, 128] == 0x7E
    assert (codes.view(torch.uint8) != 0).sum() == 9


def test_ue8m0_scales_are_rounded_up() -> None:
    """Exactly 448 * 2**e keeps 2**e; the next float32 needs the next power, so nothing saturates."""
    next_up = torch.nextafter(torch.tensor(448.0), torch.tensor(torch.inf))
    for exponent in (-120, -5, 0, 7, 100):
        for value, wanted in ((448.0, exponent), (float(next_up), exponent + 1), (225.0, exponent)):
            codes, scale = quantize_weight(torch.tensor([[value]]) * 2.0**exponent, "fp8_block_ue8m0")
            assert scale.view(torch.uint8).item() == 127 + wanted
            assert codes.float().item() == {448.0: 448.0, 225.0: 224.0}.get(value, 224.0)


def test_int8_ties_go_to_even() -> None:
    codes, scale = quantize_weight(torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0]]), "int8_row")
    assert scale.tolist() == [1.0] and codes.tolist() == [[127, 0, 2, -2, -127]]


@pytest.mark.parametrize("scheme", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_deepseek_decodes_the_same_weights(scheme: Scheme, shape: tuple[int, int]) -> None:
    weight = random(*shape)
    codes, scale = quantize_weight(weight, scheme)
    decoded = decoded_by_deepseek(codes, scale)
    assert torch.equal(dequantize_weight(codes, scale), decoded)
    assert decoded.abs().max() > 0


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(264, 640), (100, 200)], ids=str)
def test_error_of_a_round_trip(scheme: Scheme, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Half a step of the format: 2**-4 of the weight, or half the smallest step of its group."""
    weight = random(*shape, dtype)
    codes, scale = quantize_weight(weight, scheme)
    again = dequantize_weight(codes, scale)
    for at, step in zip(groups(scheme, *shape), scale.double().flatten(), strict=True):
        relative, least = (0.0, 0.5) if scheme == "int8_row" else (2.0**-4, 2.0**-10)
        # quotient and product are float32: 2**-23 of codes up to 127 and of the weight
        allowed = (weight[at].double().abs() * relative).clamp(min=least * step) * (1 + 2.0**-15)
        assert ((again[at].double() - weight[at].double()).abs() <= allowed).all()
    assert torch.equal(dequantize_weight(codes, scale, dtype), again.to(dtype))
    codes_again, scale_again = quantize_weight(again, scheme)
    if scheme == "fp8_block_ue8m0":  # the largest code may be 224 or less, and then half the scale is enough
        assert torch.equal(dequantize_weight(codes_again, scale_again), again)
    else:
        torch.testing.assert_close(scale_again, scale, rtol=3e-7, atol=0)
        assert torch.equal(bits(codes_again), bits(codes))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_strides(scheme: Scheme) -> None:
    weight = random(150, 260)
    wanted = [bits(t) if t.element_size() == 1 else t for t in quantize_weight(weight, scheme)]
    wide = torch.full((300, 520), torch.nan)
    wide[::2, 1::2] = weight
    for view in (weight.t().contiguous().t(), wide[::2, 1::2], torch.nn.Parameter(weight)):
        got = quantize_weight(view, scheme)
        assert not any(t.requires_grad for t in got) and all(t.is_contiguous() for t in got)
        assert all(torch.equal(bits(g) if g.element_size() == 1 else g, w) for g, w in zip(got, wanted, strict=True))
    codes, scale = quantize_weight(weight, scheme)
    assert torch.equal(dequantize_weight(codes.t().contiguous().t(), scale), dequantize_weight(codes, scale))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros(scheme: Scheme) -> None:
    """A row or block of zeros, and one whose scale would be a subnormal float32."""
    weight = torch.zeros(256, 128)
    weight[128:] = 1e-38
    weight[128, 0] = -1e-38
    codes, scale = quantize_weight(weight, scheme)
    if scheme == "fp8_block_ue8m0":
        assert scale.view(torch.uint8).tolist() == [[0], [0]] and (scale.float() == 2.0**-127).all()
        assert torch.equal(codes.float(), (weight.double() * 2.0**127).to(torch.float8_e4m3fn).float())
        assert codes[128:].float().all()
    else:
        assert not scale.any() and not codes.float().any()
    assert torch.equal(dequantize_weight(codes[:128], scale[:1] if scale.shape[0] == 2 else scale[:128]), weight[:128])


@pytest.mark.parametrize("scheme", SCHEMES[:-1])
def test_nan_and_infinity_in_fp8(scheme: Scheme) -> None:
    """They are NaN codes, and nothing else changes."""
    weight = random(130, 140)
    broken, clean = weight.clone(), weight.clone()
    places = [(0, 0, torch.nan), (1, 139, torch.inf), (129, 3, -torch.inf), (129, 4, -torch.nan)]
    for row, column, value in places:
        broken[row, column], clean[row, column] = value, 0.0
    codes, scale = quantize_weight(broken, scheme)
    clean_codes, clean_scale = quantize_weight(clean, scheme)
    assert torch.equal(scale.float(), clean_scale.float())
    at = ~broken.isfinite()
    assert at.sum() == 4 and (codes.view(torch.uint8)[at] == 0x7F).all()
    assert torch.equal(codes.view(torch.uint8)[~at], clean_codes.view(torch.uint8)[~at])
    assert torch.equal(dequantize_weight(codes, scale).isnan(), at)
    for value in (torch.nan, torch.inf):
        codes, scale = quantize_weight(torch.full((1, 3), value), scheme)
        assert (codes.view(torch.uint8) == 0x7F).all()
        assert scale.float().item() == (2.0**-127 if scheme == "fp8_block_ue8m0" else 0.0)
        assert dequantize_weight(codes, scale).isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_int8_refuses_nan_and_infinity(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(300, 4)
    weight[259, 2] = value
    monkeypatch.setattr(weights, "PANEL", 128 * 4)
    with pytest.raises(ContractError, match=r"`weight` must be finite with scheme='int8_row', got NaN .* in row 259$"):
        quantize_weight(weight, "int8_row")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_largest_float32(scheme: Scheme) -> None:
    largest = torch.finfo(torch.float32).max
    codes, scale = quantize_weight(torch.tensor([[largest, -largest, largest / 2]]), scheme)
    assert scale.float().isfinite().all()
    decoded = dequantize_weight(codes, scale).double()
    assert (decoded[0, 0] > largest * 0.93) and torch.equal(decoded[0, 0], -decoded[0, 1])


class Allocations(TorchDispatchMode):
    """The largest float32 or bool tensor that an operator returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [
            t.numel() for t in tree_leaves(result) if isinstance(t, Tensor) and t.dtype in (torch.float32, torch.bool)
        ]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.parametrize("scheme", SCHEMES)
def test_panels_bound_the_memory(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Intermediate results have one panel's size, and the size of panels changes nothing."""
    weight = random(700, 160, torch.bfloat16)
    whole = quantize_weight(weight, scheme)
    decoded = dequantize_weight(*whole)
    monkeypatch.setattr(weights, "PANEL", 300 * 160)  # whole blocks: 256 rows
    with Allocations() as seen:
        codes, scale = quantize_weight(weight, scheme)
    assert 256 * 160 <= seen.largest <= 256 * 256  # blocks are padded to 256 columns
    assert torch.equal(bits(codes), bits(whole[0])) and torch.equal(scale.float(), whole[1].float())
    with Allocations() as seen:
        again = dequantize_weight(codes, scale, torch.bfloat16)
    assert 256 * 160 <= seen.largest <= 256 * 256
    assert torch.equal(again, decoded.bfloat16())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_meta_tensors(scheme: Scheme) -> None:
    codes, scale = quantize_weight(torch.empty(300, 200, device="meta", dtype=torch.bfloat16), scheme)
    real = quantize_weight(random(300, 200), scheme)
    assert codes.is_meta and scale.is_meta
    assert [(t.shape, t.dtype) for t in (codes, scale)] == [(t.shape, t.dtype) for t in real]
    assert dequantize_weight(codes, scale, torch.float16).shape == (300, 200)


def test_scales_of_checkpoints_are_decoded() -> None:
    """Scales [N, 1], and a scale for a whole int8 weight."""
    codes, scale = quantize_weight(random(6, 40), "int8_row")
    assert torch.equal(dequantize_weight(codes, scale[:, None]), dequantize_weight(codes, scale))
    assert torch.equal(dequantize_weight(codes, torch.tensor([0.5])), codes.float() * 0.5)
    nan = torch.tensor([[255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert dequantize_weight(torch.ones(6, 40).to(torch.float8_e4m3fn), nan).isnan().all()


def test_bad_arguments_are_refused() -> None:
    weight, codes = torch.ones(200, 300), torch.ones(200, 300).to(torch.float8_e4m3fn)
    value: Any
    for value, message in (
        (torch.ones(3), r"`weight` must have shape \[N, K\] with N, K > 0, got \[3\]"),
        (torch.ones(0, 3), r"`weight` must have shape \[N, K\] with N, K > 0, got \[0, 3\]"),
        (weight.double(), "`weight` must be bfloat16 or float16 or float32, got a tensor .* of float64"),
        (codes, "`weight` must be bfloat16 or float16 or float32, got a tensor .* of float8_e4m3fn"),
    ):
        with pytest.raises(ContractError, match=f"^quantize_weight: {message}"):
            quantize_weight(value, "fp8_row")
    for value in ("fp8", None, ["fp8_row"]):
        with pytest.raises(ContractError, match=r"^quantize_weight: `scheme` must be 'fp8_tensor' or 'fp8_row' or "):
            quantize_weight(weight, value)
    for value in (torch.ones(2), torch.ones(3, 2), torch.ones(1, 200), torch.ones(200, 3)):
        with pytest.raises(
            ContractError, match=r"^dequantize_weight: `scale` must have shape \[1\], \[N\] or \[N, 1\]"
        ):
            dequantize_weight(codes, value)
    for value in (torch.ones(1).double(), torch.ones(200).bfloat16()):
        with pytest.raises(ContractError, match="`scale` must be float32 or, per block, float8_e8m0fnu, got a tensor"):
            dequantize_weight(codes, value)
    with pytest.raises(ContractError, match=r"`scale` must have shape \[1\], \[N\] or \[N, 1\] with N=200, got"):
        dequantize_weight(weight.to(torch.int8), torch.ones(2, 3))
    with pytest.raises(ContractError, match="`scale` must be on cpu, got meta"):
        dequantize_weight(codes, torch.ones(1, device="meta"))


def test_exported() -> None:
    assert {"quantize_weight", "dequantize_weight"} <= set(onepass.__all__)
