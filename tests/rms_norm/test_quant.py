"""Formats and layouts of `rms_norm_fused_quant`, read by a decoder of their own and compared with known bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.formats import QUANT_FORMATS
from onepass.testing.tensors import same_bytes

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GROUPED = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
NAN = math.nan


def quant(x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows whose norm is the row itself: x has a mean square of one, up to float32 error."""
    codes, scale = onepass.rms_norm_fused_quant(x, torch.ones(x.shape[-1]), 0.0, **options)
    return codes, scale


def unit_rows(rows: list[list[float]]) -> Tensor:
    """Rows with mean square 1, in float32."""
    x = torch.tensor(rows)
    return x / x.square().mean(-1, keepdim=True).sqrt()


def rows_of(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-1, 2, (rows, columns // 16), generator=generator).float()).repeat_interleave(
        16, 1
    )
    x = torch.randn(rows, columns, generator=generator) * sizes
    return x.to(dtype), (1 + 0.2 * torch.randn(columns, generator=generator)).to(dtype)


# --- an independent decoder, value by value -------------------------------------------------------------------------


def number(byte: int, name: str) -> float:
    """What one code stands for, by the format's definition."""
    if name == "int8":
        return float(byte - 256 if byte > 127 else byte)
    if name in ("mxfp4", "nvfp4"):
        return -E2M1[byte - 8] if byte > 7 else E2M1[byte]
    mantissa, bias = (2, 15) if name == "e5m2" else (3, 8 if name == "e4m3fnuz" else 7)
    if (name == "e4m3fnuz" and byte == 0x80) or (name != "e4m3fnuz" and byte & 0x7F == 0x7F):
        return NAN
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, rest = (byte & 0x7F) >> mantissa, byte & ((1 << mantissa) - 1)
    if exponent == 0:
        return sign * math.ldexp(rest, 1 - bias - mantissa)
    return sign * math.ldexp(1 + rest / 2**mantissa, exponent - bias)


def decoded(codes: Tensor, name: str) -> list[list[float]]:
    """Rows of numbers; pairs have the even column in the low half."""
    found = []
    for row in codes.view(torch.uint8).tolist():
        flat = [half for byte in row for half in (byte & 15, byte >> 4)] if name in ("mxfp4", "nvfp4") else row
        found.append([number(byte, name) for byte in flat])
    return found


def scale_of(byte: int, name: str) -> float:
    """A scale of one byte: an exponent, or for nvfp4 an e4m3 number."""
    if name == "nvfp4":
        return number(byte, "e4m3fn")
    return NAN if byte == 255 else 2.0 ** (byte - 127)


@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.full) for dtype in DTYPES[1:])])
@pytest.mark.parametrize(
    ("name", "floor"), [("mxfp8", False), ("mxfp8", True), ("mxfp4", False), ("mxfp4", True), ("nvfp4", False)]
)
def test_block_formats_by_their_own_decoder(name: str, floor: bool, dtype: torch.dtype) -> None:
    """Every value is within half a step of the norm, every scale is the rule's, and zeros would fail."""
    x, gamma = rows_of(6, 160, dtype)
    options: dict[str, Any] = {"scale_format": "ue8m0_floor"} if floor else {}
    codes, scale = onepass.rms_norm_fused_quant(x, gamma, format=name, **options)  # type: ignore[arg-type]
    exact = onepass.rms_norm(x.float(), gamma.float()).double().tolist()
    size, largest = GROUPED[name], 448.0 if name == "mxfp8" else 6.0
    steps = sorted({abs(number(b, name)) for b in range(127 if name == "mxfp8" else 8)})
    for numbers, bytes_, row in zip(decoded(codes, name), scale.view(torch.uint8).tolist(), exact, strict=True):
        for g, byte in enumerate(bytes_):
            group, s = row[g * size : (g + 1) * size], scale_of(byte, name)
            amax = max(map(abs, group))
            if name == "nvfp4":
                assert abs(s - amax / 6) <= amax / 6 / 16 * 1.001
            elif floor:
                emax = 8 if name == "mxfp8" else 2
                assert s == 2.0 ** (math.floor(math.log2(amax)) - emax)
            else:
                assert s / 2 < amax / largest * 1.000001 and amax / largest <= s * 1.000001
            for value, got in zip(group, numbers[g * size : (g + 1) * size], strict=True):
                wanted = min(abs(value) / s, largest)
                below = max(t for t in steps if t <= wanted)
                above = min((t for t in steps if t >= wanted), default=largest)
                assert abs(abs(got) - wanted) <= (above - below) / 2 * 1.0001 + 1e-6 * wanted
                assert math.copysign(1.0, got) == math.copysign(1.0, value)
    assert any(abs(v) >= largest / 2 for v in decoded(codes, name)[0])


def test_known_bytes_of_nvfp4() -> None:
    """A row of sixteen values whose scale is exactly 1: each code, halfway values to even, the sign in the top bit."""
    wanted = [6.0, -6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, -0.25, 0.0, -0.0, 1.0, 3.0, -0.5]
    norm = math.sqrt(sum(v * v for v in wanted) / 16)
    x = torch.tensor([wanted])
    codes, scale = onepass.rms_norm_fused_quant(x, torch.full((16,), norm), 0.0, format="nvfp4", quantize="divide")
    assert scale.float().item() == 1.0
    nibbles = [7, 15, 0, 2, 2, 4, 4, 6, 6, 14, 8, 0, 8, 2, 5, 9]
    assert codes.tolist() == [[nibbles[i] | nibbles[i + 1] << 4 for i in range(0, 16, 2)]]


def test_known_bytes_of_int8() -> None:
    """Halfway values to even, at most 127 on either side, also beyond the bound of amax."""
    x = unit_rows([[127.0, 0.5, 1.5, -0.5, -2.5, -127.0, 126.4, 0.0]])
    codes, scale = quant(x, format="int8")
    assert codes.tolist() == [[127, 0, 2, 0, -2, -127, 126, 0]] and codes.dtype == torch.int8
    torch.testing.assert_close(codes * scale, x, atol=float(scale) * 0.51, rtol=0.0)
    for bound in (0.5, torch.tensor(0.5)):
        codes, scale = quant(x, format="int8", scale_ub=bound)
        assert codes[0, 0] == 127 and codes[0, 5] == -127 and torch.equal(scale, torch.full((1, 1), 0.5) / 127)
    codes, _ = quant(x, format="int8", static_scale=torch.tensor(1e-3))
    assert codes.min() == -127 and codes.max() == 127


def test_rules_of_powers_of_two() -> None:
    """The smallest power that makes nothing saturate, and OCP's, which may saturate the largest values."""
    x = torch.ones(1, 32)
    x[0, 0] = 7.0
    gamma = torch.full((32,), float(x.square().mean().sqrt()))
    for name, up, down in (("mxfp4", 2.0, 1.0), ("mxfp8", 2.0**-6, 2.0**-6)):
        found = []
        for rule in ("ue8m0", "ue8m0_floor"):
            codes, scale = onepass.rms_norm_fused_quant(x, gamma, 0.0, format=name, scale_format=rule)  # type: ignore[arg-type]
            found.append((scale.float().item(), decoded(codes, name)[0][0]))
        assert found[0][0] == up and found[1][0] == down
        assert found[0][1] == (4.0 if name == "mxfp4" else 448.0) and found[1][1] == (6.0 if name == "mxfp4" else 448.0)


# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)  # each compiles kernels
@pytest.mark.parametrize(("name", "size"), [("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("lead", [(3,), (2, 70), (2, 3, 5)])
@pytest.mark.parametrize("columns", [96, 32, 256])
def test_layouts_hold_the_same_scales(name: str, size: int, lead: tuple[int, ...], columns: int) -> None:
    rows, groups = math.prod(lead), columns // size
    x, gamma = (t.reshape(*lead, columns) if t.dim() == 2 else t for t in rows_of(rows, columns))
    plain = onepass.rms_norm_fused_quant(x, gamma, format=name)  # type: ignore[arg-type]
    expected = plain[1].view(torch.uint8).reshape(rows, groups).tolist()

    def laid_out(layout: Any, **more: Any) -> Tensor:
        codes, scale = onepass.rms_norm_fused_quant(x, gamma, format=name, scale_layout=layout, **more)  # type: ignore[arg-type]
        assert same_bytes(codes, plain[0])
        return scale

    column, padded = laid_out("column"), laid_out("column_tma")
    stride = -(-rows // 16) * 16
    assert column.shape == padded.shape == (*lead, groups)
    assert column.stride(-1) == rows and padded.stride(-1) == stride and column.stride(-2) == padded.stride(-2) == 1
    for scale in (column, padded):
        assert scale.contiguous().view(torch.uint8).reshape(rows, groups).tolist() == expected
    tiled = laid_out("128x4")
    across = -(-groups // 4)
    assert tiled.shape == (-(-rows // 128) * 128, 4 * across) and tiled.is_contiguous()
    memory = tiled.view(torch.uint8).flatten().tolist()
    for r in range(rows):
        for j in range(4 * across):
            at = 512 * (r // 128 * across + j // 4) + 16 * (r % 32) + 4 * (r % 128 // 32) + j % 4
            assert memory[at] == (expected[r][j] if j < groups else 0)
    if name == "nvfp4":
        return
    words = laid_out("column_packed")
    assert words.dtype == torch.int32 and words.shape == (*lead, across) and words.stride(-1) == -(-rows // 4) * 4
    for r, row in enumerate(words.reshape(rows, across).tolist()):
        for j in range(4 * across):
            assert row[j // 4] >> 8 * (j % 4) & 255 == (expected[r][j] if j < groups else 0)


def test_outputs_of_the_caller() -> None:
    """Words and tiles are also written into given memory, and nothing beside them."""
    x, gamma = rows_of(5, 128)
    for name, layout in (("mxfp4", "column_packed"), ("nvfp4", "128x4")):
        options: dict[str, Any] = {"format": name, "scale_layout": layout}
        codes, scale = onepass.rms_norm_fused_quant(x, gamma, **options)
        room = torch.full((7, 70), 0x5A, dtype=torch.uint8)
        given = torch.empty_strided(scale.shape, scale.stride(), dtype=scale.dtype)
        again = onepass.rms_norm_fused_quant(x, gamma, **options, out=room[1:6, 3:67], scale_out=given)
        assert again[1] is given and same_bytes(again[0], codes)
        assert (room[:, :3] == 0x5A).all() and (room[:, 67:] == 0x5A).all() and (room[[0, 6]] == 0x5A).all()
        if layout == "column_packed":
            assert torch.equal(given, scale)
    with pytest.raises(onepass.ContractError, match="be contiguous for scale_layout '128x4'"):
        other = torch.empty(8, 128, dtype=torch.float8_e4m3fn).t()
        onepass.rms_norm_fused_quant(x, gamma, format="nvfp4", scale_layout="128x4", scale_out=other)


# --- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(7)  # each compiles a kernel
@pytest.mark.parametrize("name", QUANT_FORMATS)
@pytest.mark.parametrize("quantize", ["reciprocal", "divide"])
def test_rows_with_nan_infinity_and_zeros(name: Any, quantize: Any) -> None:
    """A spoiled row has NaN scales, and NaN codes or zeros; others keep their bytes. Zeros have codes 0."""
    x, gamma = rows_of(7, 96)
    x[3] = 0.0
    good = onepass.rms_norm_fused_quant(x, gamma, format=name, quantize=quantize)
    for value in (NAN, math.inf, -math.inf):
        spoiled = x.clone()
        spoiled[1, 50], spoiled[5, 0] = value, value
        codes, scale = onepass.rms_norm_fused_quant(spoiled, gamma, format=name, quantize=quantize)
        for row in (1, 5):
            values = decoded(codes, name)[row]
            assert scale[row].float().isnan().all()
            assert all(v == 0 for v in values) if name in ("int8", "mxfp4", "nvfp4") else all(map(math.isnan, values))
        others = [0, 2, 3, 4, 6]
        assert same_bytes(codes[others], good[0][others]) and same_bytes(scale[others], good[1][others])
    assert all(v == 0 for v in decoded(good[0], name)[3])
    zero = 2.0**-127 if name.startswith("mx") else 0.0
    assert (good[1][3].double() == zero).all()


def test_int8_of_a_spoiled_row_with_a_given_scale() -> None:
    """No scale is stored, and int8 has no NaN: the row is zeros."""
    x, gamma = rows_of(3, 64)
    x[1, 7] = NAN
    for quantize in ("reciprocal", "divide"):
        codes, _ = onepass.rms_norm_fused_quant(
            x,
            gamma,
            format="int8",
            static_scale=torch.tensor(0.05),
            quantize=quantize,
        )
        assert codes[1].eq(0).all() and codes[0].abs().max() > 10


def test_negative_zeros() -> None:
    x = torch.full((1, 64), -0.0)
    x[0, 0] = 1.0
    for name, code in (("e5m2", 0x80), ("e4m3fn", 0x80), ("int8", 0), ("mxfp4", 0x88), ("nvfp4", 0x88)):
        codes, _ = quant(x, format=name)
        assert (codes.view(torch.uint8)[0, 1 if codes.shape[1] == 32 else 2 :] == code).all(), name


def test_global_scale() -> None:
    """It multiplies scales before they are rounded, so that small groups keep theirs; other values have a rule too."""
    x, gamma = rows_of(8, 64)
    gamma[:16] *= 1e-3
    codes, scale = onepass.rms_norm_fused_quant(x, gamma, format="nvfp4")
    assert (scale[:, 0].float() < 2.0**-6).any()
    wide, wide_scale = onepass.rms_norm_fused_quant(x, gamma, format="nvfp4", global_scale=torch.tensor(64.0))
    y = onepass.rms_norm(x, gamma).double()

    def error(codes: Tensor, scale: Tensor, by: float) -> float:
        values = torch.tensor(decoded(codes, "nvfp4")).double() * scale.double().repeat_interleave(16, -1) / by
        return float((values - y)[:, :16].norm() / y[:, :16].norm())

    assert error(wide, wide_scale, 64.0) < 0.2 < error(codes, scale, 1.0)
    for value in (0.0, -1.0):
        codes, scale = onepass.rms_norm_fused_quant(x, gamma, format="nvfp4", global_scale=torch.tensor(value))
        assert scale.float().eq(0).all() and all(v == 0 for row in decoded(codes, "nvfp4") for v in row)
    codes, scale = onepass.rms_norm_fused_quant(x, gamma, format="nvfp4", global_scale=torch.tensor(NAN))
    assert scale.float().isnan().all() and codes.eq(0).all()


@pytest.mark.sampled(7)  # each compiles a kernel
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", ["e4m3fn", "int8", "nvfp4"])
def test_stored_quantizes_what_rms_norm_stores(name: Any, dtype: torch.dtype) -> None:
    """Rounded once to x's dtype: the bytes of two calls, of which the second normalizes nothing."""
    x, gamma = rows_of(9, 128, dtype)
    residual, _ = rows_of(9, 128, dtype, seed=1)
    options: dict[str, Any] = {"format": name, "quantize": "divide"}
    codes, scale, h, norm = onepass.rms_norm_fused_quant(
        x, gamma, residual=residual, rounding="stored", round_sum=True, return_norm=True, **options
    )
    y, total = onepass.rms_norm(x, gamma, residual=residual, round_sum=True)
    assert same_bytes(norm, y) and same_bytes(h, total)
    largest, size = {"e4m3fn": (448.0, 128), "int8": (127.0, 128), "nvfp4": (6.0, 16)}[name]
    amax = y.float().unflatten(-1, (-1, size)).abs().amax(-1)
    wanted = (amax / largest).to(scale.dtype)
    assert same_bytes(scale, wanted)
    divided = (y.float() / wanted.float().repeat_interleave(size, -1)).clamp(-largest, largest)
    if name == "int8":
        expected = divided.round().tolist()
    elif name == "e4m3fn":
        expected = divided.to(torch.float8_e4m3fn).double().tolist()
    else:
        table = torch.tensor(E2M1)
        middle = (table[1:] + table[:-1]) / 2
        low = torch.bucketize(divided.abs(), middle)
        up = torch.bucketize(divided.abs(), middle, right=True)
        expected = (table[torch.where(low % 2 == 0, low, up)].copysign(divided)).tolist()
    assert decoded(codes, name) == expected
    once = onepass.rms_norm_fused_quant(x, gamma, residual=residual, **options)
    assert not same_bytes(once[0], codes)


@pytest.mark.sampled(7)  # each compiles sixteen kernels
@pytest.mark.parametrize("group", QUANT_FORMATS["e5m2"].groups)
def test_fp8_is_a_form_of_it(group: int | None) -> None:
    x, gamma = rows_of(5, 256, torch.bfloat16)
    for name in ("e4m3fn", "e4m3fnuz", "e5m2"):
        ways: tuple[dict[str, Any], ...] = (
            {},
            {"rounding": "hf"},
            {"quantize": "divide", "min_scale": 0.01},
            {"scale_ub": 1.0},
        )
        for options in ways if group in (None, 128) else ways[:1]:
            given: dict[str, Any] = {"group_size": group, "return_norm": True, **options}
            ours = onepass.rms_norm_fused_fp8(x, gamma, out_dtype=QUANT_FORMATS[name].codes.dtype, **given)
            theirs = onepass.rms_norm_fused_quant(x, gamma, format=name, **given)
            assert all(same_bytes(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "fp6"}, "`format` must be"),
        ({"format": "mxfp8", "group_size": 64}, "`group_size` must suit format"),
        ({"format": "int8", "scale_format": "ue8m0"}, "`scale_format` must suit format"),
        ({"format": "nvfp4", "scale_format": "ue8m0"}, "`scale_format` must suit format"),
        ({"format": "int8", "scales_dtype": torch.int32}, "`scales_dtype` must suit scale_format"),
        ({"format": "mxfp8", "scales_dtype": torch.int32}, "`scales_dtype` must be int32 for scale_layout"),
        ({"format": "int8", "group_size": 32, "scale_layout": "128x4"}, "`scales_dtype` must be float8_e8m0fnu or"),
        ({"scale_format": "ue8m0", "scale_layout": "column_packed"}, "`group_size` must not be None for scale_layout"),
        ({"format": "mxfp4", "static_scale": torch.tensor(1.0)}, "`group_size` must be None with static_scale"),
        ({"format": "mxfp4", "global_scale": torch.tensor(1.0)}, "`global_scale` must be None unless format is 'nvfp4'"),
        ({"format": "int8", "code_max": 448.0}, "`code_max` must be a limit of format"),
        ({"format": "nvfp4", "rounding": "twice"}, "`rounding` must be"),
    ],
)  # fmt: skip
def test_combinations_that_do_not_exist(options: dict[str, Any], message: str) -> None:
    with pytest.raises(onepass.ContractError, match=message):
        onepass.rms_norm_fused_quant(torch.randn(2, 64), torch.ones(64), **options)


def test_tiles_of_rows_with_many_strides() -> None:
    """Four levels of strides take several launches, whose rows tiles cannot number."""
    x = torch.randn(3, 2, 3, 2, 64).permute(3, 2, 1, 0, 4)
    codes, scale = onepass.rms_norm_fused_quant(x, torch.ones(64), format="nvfp4")
    whole = onepass.rms_norm_fused_quant(x.contiguous(), torch.ones(64), format="nvfp4")
    assert same_bytes(codes, whole[0]) and same_bytes(scale, whole[1])
    with pytest.raises(onepass.Unsupported, match="'128x4' needs rows that fold to three strides"):
        onepass.rms_norm_fused_quant(x, torch.ones(64), format="nvfp4", scale_layout="128x4")


def test_compiled_calls_have_the_same_bytes() -> None:
    def layer(x: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
        tiled = onepass.rms_norm_fused_quant(x, gamma, format="nvfp4", scale_layout="128x4")
        words = onepass.rms_norm_fused_quant(x, gamma, format="mxfp8", scale_layout="column_packed")
        return tiled[0], words[0], words[1], *onepass.rms_norm_fused_quant(x, gamma, format="int8")

    x, gamma = rows_of(6, 96, torch.bfloat16)
    expected = layer(x, gamma)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, gamma)
    assert all(same_bytes(a, b) and a.stride() == b.stride() for a, b in zip(got, expected, strict=True))
