"""Codes and scales without a norm, of x or of its product with a gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import onepass
from onepass.core.backend import launching_with
from onepass.errors import ContractError, Unsupported
from onepass.formats import FLOATS, QUANT_FORMATS
from onepass.ops.rms_norm import reference
from onepass.testing import runner
from onepass.testing.quantized import plain_scales
from onepass.testing.tensors import same_bytes

BF16, F16, F32 = FLOATS
E8M0 = torch.float8_e8m0fnu
quantize: Any = onepass.quantize
GROUPED: Final[dict[str, dict[str, Any]]] = {
    "e4m3fn": {"group_size": 64},
    "e5m2": {"group_size": 32, "scale_format": "ue8m0", "scales_dtype": E8M0},
    "int8": {"group_size": 16},
    "mxfp8": {},
    "mxfp4": {"scale_layout": "128x4"},
    "nvfp4": {},
}
"""Groups and scales of every kind of codes."""


def tensors(n: int = 256, rows: int = 6, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """x and a gate."""
    generator = torch.Generator().manual_seed(n)
    x, gate = (torch.randn(rows, n, generator=generator).to(dtype) for _ in range(2))
    return x, gate


def same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return len(ours) == len(theirs) and all(map(same_bytes, ours, theirs))


def groups_of(format: Any) -> int:
    group = GROUPED[format].get("group_size") or QUANT_FORMATS[format].groups[0]
    assert isinstance(group, int)
    return group


def scales_of(format: Any, x: Tensor, scale: Tensor) -> Tensor:
    """Scales [rows, groups] as float64."""
    layout = GROUPED[format].get("scale_layout", "row")
    plain = plain_scales(scale, x.shape, groups_of(format), layout)
    assert isinstance(plain, Tensor)
    return reference.scale_values(plain)


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)  # each compiles kernels
@pytest.mark.parametrize("n", [1, 33, 640, 1024, 4099, 20000])
@pytest.mark.parametrize("format", ["e4m3fn", "e5m2", "int8"])
def test_codes_and_scales_are_those_of_torch(n: int, format: Any) -> None:
    codes = QUANT_FORMATS[format].codes
    for dtype in FLOATS:
        x, _ = tensors(n, dtype=dtype)
        for group in [None] + [g for g in (16, 128) if n % g == 0]:
            y = x.float().unflatten(-1, (-1, group or n))
            scale = y.abs().amax(-1, keepdim=True) / codes.max
            for way, quotient in (("reciprocal", y * (1 / scale)), ("divide", y / scale)):
                clamped = quotient.clamp(-codes.max, codes.max).flatten(-2)
                wanted = (clamped.round() if codes.integer else clamped).to(codes.dtype)
                options: dict[str, Any] = {"format": format, "group_size": group, "quantize": way}
                assert same(quantize(x, **options), (wanted, scale.squeeze(-1)))


def test_numbers_are_near_the_reference() -> None:
    x, gate = tensors(4096)
    for activation in ("silu", "sigmoid"):
        for rounding in ("once", "stored", "hf"):
            options: dict[str, Any] = {"gate": gate, "gate_activation": activation, "rounding": rounding}
            q, scale = quantize(x, group_size=128, **options)
            y = reference.gated(x, gate, activation, rounding)
            off = (q.double().unflatten(-1, (-1, 128)) * scale.double().unsqueeze(-1)).flatten(-2) - y
            step = scale.double().repeat_interleave(128, -1)
            assert (off.abs() <= y.abs() * 2.0**-4 + step * 2.0**-9).all() and y.abs().max() > 3


@pytest.mark.sampled(3)  # each compiles kernels
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_product_is_quantized_as_it_is_stored(dtype: torch.dtype) -> None:
    """The activation of a whole number from 20 on is that number, so the product is known to the bit."""
    x, _ = tensors(1024, dtype=dtype)
    gate = torch.randint(20, 60, x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for format, options in GROUPED.items():
        stored = quantize(x * gate, format=format, **options)
        unrounded = quantize(x.float() * gate.float(), format=format, **options)
        for rounding, wanted in {"once": unrounded, "stored": stored, "hf": stored}.items():
            ours = quantize(x, gate=gate, format=format, rounding=rounding, **options)
            if options.get("scale_layout") == "128x4":
                wanted, ours = ((q, scales_of(format, x, scale)) for q, scale in (wanted, ours))
            assert same(ours, wanted), (format, rounding)
    assert dtype == F32 or not same(stored, unrounded)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_hf_is_the_activation_of_a_gated_mlp(dtype: torch.dtype) -> None:
    """Equal but for values next to a rounding boundary. "stored" does not round the activation."""
    x, gate = tensors(4096, 64, dtype)
    wanted, scale = quantize(silu(gate) * x, group_size=128)
    ours, mine = quantize(x, gate=gate, group_size=128, rounding="hf")
    other, _ = quantize(x, gate=gate, group_size=128, rounding="stored")

    def differing(codes: Tensor) -> float:
        return float((codes.view(torch.uint8) != wanted.view(torch.uint8)).float().mean())

    assert differing(ours) < 0.001 < 0.003 < differing(other)
    assert (mine != scale).float().mean() < 0.01 and wanted.float().abs().mean() > 10


def test_without_a_gate_roundings_are_the_same() -> None:
    x, _ = tensors()
    once = quantize(x, format="nvfp4")
    assert same(quantize(x, format="nvfp4", rounding="hf"), once)
    assert same(quantize(x, format="nvfp4", rounding="stored"), once)


# --- NaN, infinity, zeros -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", GROUPED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["x", "gate", "no gate"])
def test_what_is_not_finite_spoils_its_group(format: Any, value: float, where: str) -> None:
    options, group = GROUPED[format], groups_of(format)
    fmt = QUANT_FORMATS[format].codes
    x, gate = tensors(1088)
    gates: dict[str, Any] = {} if where == "no gate" else {"gate": gate}
    clean, steps = quantize(x, format=format, **gates, **options)
    (gate if where == "gate" else x)[2, group + 1] = value
    codes, scale = quantize(x, format=format, **gates, **options)
    ours, before = scales_of(format, x, scale), scales_of(format, x, steps)
    spoilt = torch.zeros_like(ours, dtype=torch.bool)
    spoilt[2, 1] = True
    assert torch.equal(ours.isnan(), spoilt) and torch.equal(ours[~spoilt], before[~spoilt])
    width = group * fmt.bits // 8
    bytes_, old = (t.view(torch.uint8).unflatten(-1, (-1, width)) for t in (codes, clean))
    assert (bytes_[2, 1] == fmt.nan_code).all() and torch.equal(bytes_[~spoilt], old[~spoilt])
    assert (old[2, 1] != fmt.nan_code).any()


@pytest.mark.parametrize("format", ["e4m3fn", "e4m3fnuz", "e5m2", "int8"])
@pytest.mark.parametrize("n", [64, 20000])
def test_what_is_not_finite_spoils_its_row(format: Any, n: int) -> None:
    fmt = QUANT_FORMATS[format].codes
    x, _ = tensors(n)
    clean, steps = quantize(x, format=format)
    x[1, 5], x[3, n - 1], x[4, 0] = torch.nan, torch.inf, -torch.inf
    for bound in (None, 1.0, torch.tensor(1.0)):
        codes, scale = quantize(x, format=format, scale_ub=bound)
        for row in (1, 3, 4):
            assert scale[row].isnan() and (codes[row].view(torch.uint8) == fmt.nan_code).all()
        assert scale[[0, 2, 5]].isfinite().all()
    codes, scale = quantize(x, format=format)
    assert same((codes[[0, 2, 5]], scale[[0, 2, 5]]), (clean[[0, 2, 5]], steps[[0, 2, 5]]))


@pytest.mark.parametrize("format", ["e4m3fn", "e4m3fnuz", "e5m2", "int8"])
@pytest.mark.parametrize("way", ["reciprocal", "divide"])
def test_a_static_scale_keeps_values_apart(format: Any, way: Any) -> None:
    """A NaN has the NaN code, 0 in int8, and an infinity saturates."""
    fmt = QUANT_FORMATS[format].codes
    x, gate = tensors(200)
    static = torch.tensor(0.02)
    for gates in ({}, {"gate": gate}):
        options: dict[str, Any] = {"format": format, "static_scale": static, "quantize": way, **gates}
        spoilt = x.clone()
        spoilt[0, 3], spoilt[1, 4], spoilt[2, 5] = torch.nan, torch.inf, -torch.inf
        clean, codes = quantize(x, **options)[0], quantize(spoilt, **options)[0]
        at = torch.zeros_like(x, dtype=torch.bool)
        at[0, 3] = at[1, 4] = at[2, 5] = True
        assert torch.equal(codes.view(torch.uint8)[~at], clean.view(torch.uint8)[~at])
        signs = [1, 1] if not gates else [int(gate[1, 4].sign()), int(gate[2, 5].sign())]
        assert codes[0, 3].view(torch.uint8) == fmt.nan_code
        assert float(codes[1, 4]) == signs[0] * fmt.max and float(codes[2, 5]) == -signs[1] * fmt.max
        for nothing in (0.0, torch.inf):
            codes, _ = quantize(spoilt, **options | {"static_scale": torch.tensor(nothing)})
            assert (codes[3:].float() == 0).all()
            assert all(codes[row, column].view(torch.uint8) == fmt.nan_code for row, column in ((0, 3), (1, 4), (2, 5)))


def test_a_product_may_overflow() -> None:
    """Beyond float16 where it is rounded to it, beyond float32 elsewhere."""
    x = torch.full((2, 64), 1e4, dtype=F16)
    gate = torch.full((2, 64), 30.0, dtype=F16)
    gate[1] = 1.0
    assert quantize(x, gate=gate)[1].isfinite().all()
    for rounding in ("stored", "hf"):
        codes, scale = quantize(x, gate=gate, rounding=rounding)
        assert scale[0].isnan() and codes[0].isnan().all() and scale[1].isfinite() and not codes[1].isnan().any()
    wide, gate = torch.full((1, 64), 3e38), torch.full((1, 64), 30.0)
    assert quantize(wide, gate=gate)[1].isnan() and quantize(wide)[1].isfinite()


@pytest.mark.parametrize("format", GROUPED)
def test_rows_of_zeros(format: Any) -> None:
    x = torch.zeros(3, 128, dtype=BF16)
    x[1] = -0.0
    x[2] = 1e-45  # 0 in bfloat16
    for gates in ({}, {"gate": torch.randn(3, 128)}):
        codes, scale = quantize(x, format=format, **gates, **GROUPED[format])
        assert (codes.view(torch.uint8) & 0x77 == 0).all()  # but for signs
        least = 2.0**-127 if scale.dtype == E8M0 else 0.0
        assert (scales_of(format, x, scale) == least).all()


def test_a_scale_too_small_for_float32_is_zero() -> None:
    codes, scale = quantize(torch.full((1, 64), 1e-37))
    assert scale == 0 and (codes.float() == 0).all()
    codes, scale = quantize(torch.full((1, 64), 1e-37), min_scale=1e-37)
    assert scale == torch.tensor(1e-37) and (codes.float() == 1).all()


# --- rows and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"group_size": 128}, {"format": "nvfp4"}, {"static_scale": torch.tensor(0.1)}])
@pytest.mark.parametrize("gated", [False, True])
def test_rows_alone_and_in_a_batch(options: dict[str, Any], gated: bool) -> None:
    """Enough rows for several threads."""
    x, gate = tensors(1152, 300)
    whole = quantize(x, gate=gate if gated else None, **options)
    for rows in (slice(0, 1), slice(299, 300), slice(17, 34), slice(100, 228)):
        part = quantize(x[rows], gate=gate[rows] if gated else None, **options)
        assert same(part, tuple(t if t.dim() == 0 else t[rows] for t in whole))


@pytest.mark.parametrize("n", [96, 1056, 20000])
def test_halves_of_one_tensor(n: int) -> None:
    """x and gate as a merged projection leaves them, also with another stride in front and misaligned."""
    generator = torch.Generator().manual_seed(n)
    for wide in (
        torch.randn(4, 5, 2 * n, generator=generator),
        torch.randn(5, 4, 2 * n + 1, generator=generator).mT.mT,
    ):
        both = wide.bfloat16()[..., -2 * n :].transpose(0, 1)
        gate, x = both[..., :n], both[..., n:]
        assert not x.is_contiguous()
        ours = quantize(x, gate=gate, rounding="hf", group_size=16)
        assert same(ours, quantize(x.contiguous(), gate=gate.contiguous(), rounding="hf", group_size=16))


def test_results_in_given_tensors() -> None:
    x, gate = tensors(1024)
    for format, options in GROUPED.items():
        codes, scale = quantize(x, gate=gate, format=format, **options)
        given = torch.empty_like(codes), torch.zeros_like(scale)
        ours = quantize(x, gate=gate, format=format, out=given[0], scale_out=given[1], **options)
        assert ours[0] is given[0] and ours[1] is given[1] and same_bytes(given[0], codes)
        assert torch.equal(scales_of(format, x, given[1]), scales_of(format, x, scale))
    static = torch.tensor(0.02)
    assert quantize(x, static_scale=static)[1] is static


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=BF16)
    codes, scale = quantize(x, gate=x, format="mxfp4")
    assert codes.shape == (*shape[:-1], 32) and scale.shape == (*shape[:-1], 2)


def test_errors_name_the_op_and_the_argument() -> None:
    x, gate = tensors(64)
    with pytest.raises(
        ContractError, match=r"^quantize: `gate` must have shape \[\.\.\., N\] with .*N=64, got \[6, 63\]"
    ):
        quantize(x, gate=gate[:, :63])
    with pytest.raises(ContractError, match=r"^quantize: `x` must have dtype bfloat16 or float16 or float32, got int8"):
        quantize(x.to(torch.int8))
    with pytest.raises(ContractError, match=r"^quantize: `group_size` must divide the number of columns, N=64"):
        quantize(x, group_size=128)
    with pytest.raises(ContractError, match=r"^quantize: `scale_ub` must be None with static_scale"):
        quantize(x, static_scale=torch.tensor(1.0), scale_ub=torch.tensor(1.0))
    apart = torch.empty(3, 2, 2, 2, 2, 96, dtype=BF16).permute(4, 3, 2, 1, 0, 5)
    with pytest.raises(Unsupported, match=r"^quantize: `scale_layout` '128x4' needs rows that fold"):
        quantize(apart, format="nvfp4", scale_layout="128x4")


# --- launches -------------------------------------------------------------------------------------------------------


def test_a_call_is_one_launch() -> None:
    x, gate = tensors(128)
    launches: list[str] = []
    with launching_with(lambda family: lambda call: launches.append(family)):
        quantize(x, gate=gate)
        quantize(x, format="nvfp4")
    assert launches == ["rms_norm"] * 2


CALLS: Final[dict[str, Callable[[Tensor], object]]] = {
    "row": quantize,
    "groups": lambda x: quantize(x, group_size=128, scale_format="ue8m0"),
    "gate": lambda x: quantize(x, gate=x, rounding="hf", format="nvfp4"),
    "static": lambda x: quantize(x, gate=x, static_scale=torch.empty(())),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("n", [128, 7168, 20480])
def test_gpu_kernels_raise_until_they_have_run(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are listed as unproven, and norms to the same codes are not."""
    pytest.importorskip("triton")
    from onepass.gpu import compile as compiler
    from tools.evidence import records

    x, gamma = torch.empty(4, n, dtype=BF16), torch.empty(n, dtype=BF16)
    (build,) = records.builds_of(lambda: CALLS[name](x), records.H200)
    assert compiler.is_unproven(build) and records.missing([build], {}, records.H200) == []
    monkeypatch.delenv("ONEPASS_UNPROVEN", raising=False)
    with pytest.raises(Unsupported, match=r"^rms_norm_.* unnormed x=bf16 .*has not run on a GPU yet"):
        compiler.Launcher(build, 0)
    (proven,) = records.builds_of(lambda: onepass.rms_norm_fused_quant(x, gamma), records.H200)
    assert not compiler.is_unproven(proven)


def test_onepass_check_leaves_it_out_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEPASS_UNPROVEN", raising=False)
    assert all("quantize" in {case.op for case in runner.select(device=device)} for device in ("cpu", "interpreter"))
    assert "quantize" not in {case.op for case in runner.select(device="cuda")} and "quantize" in runner.left_out(
        "cuda"
    )
