"""The CPU backend against a float64 reference, its number formats bit by bit, and its cache and threads."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from llvmlite import ir

from onepass.cpu import _args, _bits, _compile, _function, _math, _parallel, _prologue, _vec, rms_norm
from onepass.formats import E4M3FN, E4M3FNUZ, Fp8Format, ScaleRule
from onepass.prologues import OPCODES, Prologue, exp, minimum, prologue, silu_and_mul, tanh
from onepass.rows import Operand, RowSpec, geometry, row_spec

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A cache directory of the test run's own."""
    directory = tmp_path_factory.mktemp("objects")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEPASS_CACHE_DIR", str(directory))
        yield directory


# --- harness: run a vector function over a float32 tensor ----------------------------------------------------------


def elementwise(function: Callable[[_vec.Float], _vec.Value], x: Tensor, cpu: tuple[str, str] | None = None) -> Tensor:
    """``function`` of every element of ``x`` [multiple of LANES]; the 32-bit results as int32."""
    module = ir.Module(name="test")
    f = _function.Function(module, "serial", 3)
    source, target, count = f.parameters
    with f.loop(f.index(0), count, _vec.LANES) as i:
        value = function(_vec.Float(f.builder, f.load(source + i * 4, _vec.F32)))
        f.store(value.ir, target + i * 4)
    f.builder.ret_void()
    code = _compile.link(_compile.compile_ir(str(module), *(cpu or _compile.host())), "serial")
    assert x.dtype == F32 and x.is_contiguous() and x.numel() % _vec.LANES == 0
    out = torch.full(x.shape, 0x5A5A5A5A, dtype=torch.int32)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(code["serial"])(x.data_ptr(), out.data_ptr(), x.numel())
    return out


def all_values(dtype: torch.dtype) -> Tensor:
    """Every value of a 16-bit float dtype, as float32."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()


def random_bits(count: int, seed: int = 0) -> Tensor:
    """float32 values with uniformly random bits: every exponent, subnormals, infinities and NaNs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64, generator=generator).to(torch.int32).view(F32)


def neighbours(x: Tensor) -> Tensor:
    """``x`` and the float32 values next to it."""
    return torch.cat([x, torch.nextafter(x, torch.tensor(INF)), torch.nextafter(x, torch.tensor(-INF))])


def pad(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros(-x.numel() % _vec.LANES)]).contiguous()


# --- number formats ------------------------------------------------------------------------------------------------


def encoder(fmt: Fp8Format, limit: float) -> Callable[[_vec.Float], _vec.Int]:
    return lambda value: _bits.encode(fmt, limit, value).bytes()


@pytest.mark.parametrize("fmt", [E4M3FN, E4M3FNUZ], ids=lambda f: f.name)
def test_encode_agrees_with_torch(fmt: Fp8Format) -> None:
    for limit in fmt.maxima:
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.dtype).float()
        levels = codes[codes.isfinite()].sort().values
        ties = (levels[1:] + levels[:-1]) / 2
        small = random_bits(1 << 18)
        small = small[small.isfinite()]
        x = pad(
            torch.cat([neighbours(levels), neighbours(ties), all_values(BF16), all_values(F16), small]).nan_to_num(
                0.0, limit, -limit
            )
        )
        got = elementwise(encoder(fmt, limit), x)
        want = x.clamp(-limit, limit).to(fmt.dtype).view(torch.uint8).int()
        assert torch.equal(got, want)
        assert got.unique().numel() > 200


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_rounding_agrees_with_torch(dtype: torch.dtype) -> None:
    exact = all_values(dtype)
    exact = exact[exact.isfinite()].sort().values
    ties = (exact[1:].double() + exact[:-1].double()).div(2).float()
    x = pad(
        torch.cat(
            [random_bits(1 << 18), exact, neighbours(ties), torch.tensor([0.0, -0.0, INF, -INF, 65520.0, 3.4e38])]
        )
    )
    got = elementwise(lambda v: _bits.round_to(dtype, v), x).view(F32)
    want = x.to(dtype).float()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()].view(torch.int32), want[~want.isnan()].view(torch.int32))


def test_power_of_two_scale() -> None:
    x = pad(
        torch.cat(
            [
                neighbours(2.0 ** torch.arange(-126.0, 120.0)),
                random_bits(1 << 16).abs(),
                torch.tensor([0.0, 2.0**-127, 2.0**-149]),
            ]
        )
    )
    x = x.nan_to_num(1.0, 1.0, 1.0).clamp(max=2.0**126)
    got = elementwise(_bits._power_of_two_above, x).view(F32).double()
    exact = x.double().frexp()
    want = torch.where(
        (exact.mantissa == 0.5) & (x >= 2.0**-127), x.double(), (2.0 ** exact.exponent.double()).clamp(min=2.0**-127)
    )
    assert torch.equal(got, torch.where(x == 0, 2.0**-127, want))


# --- functions of the prologue -------------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[[_vec.Float], _vec.Float], Callable[[Tensor], Tensor]]] = {
    "exp": (_math.exp, torch.exp),
    "log": (_math.log, torch.log),
    "tanh": (_math.tanh, torch.tanh),
    "sigmoid": (_math.sigmoid, lambda x: torch.where(x < 0, x.exp(), 1.0) / (1 + (-x.abs()).exp())),
    "rsqrt": (_math.rsqrt, torch.rsqrt),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_within_4_ulp(name: str) -> None:
    function, exact = FUNCTIONS[name]
    line = torch.cat(
        [torch.linspace(-110, 95, 200_000), torch.linspace(-1, 2, 200_000), torch.linspace(0.99, 1.01, 20_000)]
    )
    x = pad(
        torch.cat(
            [
                line,
                random_bits(1 << 18),
                torch.tensor([0.0, -0.0, INF, -INF, NAN, 88.72283, 88.7229, -87.4, -103.9, 2.0**-149]),
            ]
        )
    )
    got = elementwise(function, x).view(F32)
    want = exact(x.double())
    rounded = want.float()
    assert torch.equal(got.isnan(), rounded.isnan())
    assert torch.equal(got.isinf(), rounded.isinf()) and torch.equal(got[got.isinf()], rounded[rounded.isinf()])
    finite = rounded.isfinite()
    step = torch.nextafter(rounded.abs(), torch.tensor(INF)).double() - rounded.abs().double()
    step[step.isinf()] = 2.0**104
    ulps = ((got.double() - want).abs() / step)[finite]
    assert ulps.max() <= 4, f"{name}: {ulps.max():.2f} ulp at {x[finite][ulps.argmax()]}"


def test_every_opcode_has_code() -> None:
    assert set(_prologue._OPERATIONS) == OPCODES - {"const"}


# --- float64 reference ---------------------------------------------------------------------------------------------

SLACK = 4e-6
"""Relative float32 error allowed before a rounding."""


def spread(value: Tensor, rounding: Callable[[Tensor], Tensor], error: Tensor | float = 0.0) -> list[Tensor]:
    """What ``value`` may become when rounded after a relative error of SLACK and an absolute one of ``error``."""
    slack = torch.where(value.isfinite(), SLACK * value.abs() + error, 0.0)
    return [rounding(value - slack), rounding(value), rounding(value + slack)]


def rounder(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda value: value.float().to(dtype).double()


def encode64(fmt: Fp8Format, limit: float, value: Tensor) -> Tensor:
    """FP8 codes by search among all values of the format, ties to the even code."""
    levels = torch.arange(0x7F if fmt is E4M3FN else 0x80, dtype=torch.uint8).view(fmt.dtype).double()
    a = value.abs().clamp(max=limit)
    above = torch.searchsorted(levels, a.nan_to_num(0.0)).clamp(max=len(levels) - 1)
    below = (above - 1).clamp(min=0)
    up = levels[above] - a < a - levels[below]
    tie = levels[above] - a == a - levels[below]
    code = torch.where(up | (tie & (above % 2 == 0)), above, below)
    negative = torch.signbit(value) & (torch.ones_like(code, dtype=torch.bool) if fmt.has_negative_zero else code > 0)
    return torch.where(value.isnan(), fmt.nan_code, code + 0x80 * negative).to(torch.uint8)


def one_of(got: Tensor, candidates: list[Tensor]) -> bool:
    """Every code equals one candidate."""
    return bool(torch.stack([got == candidate for candidate in candidates]).any(0).all())


def between(got: Tensor, candidates: list[Tensor]) -> bool:
    """Every number lies between the least and the greatest candidate; NaN only where all of them are."""
    every = torch.stack(candidates)
    inside = (got >= every.amin(0)) & (got <= every.amax(0))
    return bool(torch.where(every.isnan().any(0), got.isnan(), inside).all())


class Case:
    """One call: random inputs, poisoned outputs, and the check against float64."""

    def __init__(self, spec: RowSpec, m: int, n: int, seed: int = 0, **numbers: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec
        self.n = n
        self.numbers = {"eps": 1e-6, "weight_offset": 0.0, "scale_ub": INF, **numbers}
        row = torch.randn(m, 1, generator=generator).exp()

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.x = (normal(m, n) * row).to(spec.x)
        self.gamma = normal(n).to(spec.gamma)
        self.residual = (normal(m, n) * row).to(spec.residual) if spec.residual else None
        shapes = {"full": (m, n), "column": (n,), "row": (m, 1)}
        self.operands = [normal(*shapes[o.kind]).to(o.dtype) for o in spec.operands]
        self.static = torch.tensor([0.0625]) if spec.scale and spec.scale.kind == "static" else None
        self.norm = torch.full((m, n), NAN, dtype=spec.norm) if spec.norm else None
        self.codes = torch.full((m, n), 0x55, dtype=torch.uint8).view(spec.fp8.dtype) if spec.fp8 else None
        self.new_residual = torch.full((m, n), NAN, dtype=spec.residual) if spec.residual else None
        self.scale = None
        if spec.scale is not None and self.static is None:
            groups = 1 if spec.scale.kind == "row" else -(-n // spec.scale.group)
            self.scale = (
                torch.full((m, groups), 0x55, dtype=torch.uint8)
                .repeat(1, spec.scale.dtype.itemsize)
                .view(spec.scale.dtype)
            )

    def rows(self) -> list[Tensor | None]:
        operands = [t if o.kind != "column" else None for t, o in zip(self.operands, self.spec.operands, strict=True)]
        return [self.x, self.residual, self.norm, self.codes, self.scale, self.new_residual, *operands]

    def run(self, launch: Callable[..., None] = rms_norm.launch) -> Case:
        found = geometry(self.rows())
        assert found is not None
        launch(self.spec, *found, self.n, self.x, self.gamma, self.residual, self.operands, self.static, self.norm,
               self.codes, self.scale, self.new_residual, **self.numbers)  # fmt: skip
        return self

    def bytes(self) -> list[Tensor]:
        return [
            t.clone().view(torch.uint8) for t in (self.norm, self.codes, self.scale, self.new_residual) if t is not None
        ]

    def check(self, x: Tensor | None = None, residual: Tensor | None = None) -> None:
        """Compare with float64; ``x`` and ``residual`` are the inputs where a run has overwritten them."""
        spec = self.spec
        h = (self.x if x is None else x).double()
        error = torch.zeros_like(h)  # of h: a prologue may add and subtract numbers larger than its result
        if spec.prologue is not None:
            error = 1e-6 * (1 + h.abs()) * sum(1 + o.double().abs() for o in self.operands)
            h = spec.prologue(h, *(o.double() for o in self.operands))
        if spec.residual is not None:
            r = self.residual if residual is None else residual
            assert r is not None and self.new_residual is not None
            h = h + r.double()
            assert between(self.new_residual.double(), spread(h, rounder(spec.residual), error))
            if spec.rounding == "hf":
                h, error = self.new_residual.double(), torch.zeros_like(h)
        g = self.gamma.double() + self.numbers["weight_offset"]
        v = (h * h).float().double().mean(-1, keepdim=True) + self.numbers["eps"]
        rs = torch.where(v > torch.finfo(F32).max, NAN, torch.where(v == 0, 0.0, v.rsqrt()))
        if spec.rounding == "once":
            ys, error = [h * rs * g], error * rs * g.abs()
            norms = spread(ys[0], rounder(spec.norm), error) if spec.norm else []
        else:
            round_x = rounder(spec.x)
            ys, error = (
                [y for n in spread(h * rs, round_x, error * rs) for y in spread(n * g, round_x)],
                torch.zeros_like(h),
            )
            norms = [rounder(spec.norm)(y) for y in ys] if spec.norm else []
        if self.norm is not None:
            assert between(self.norm.double(), norms)
        if spec.fp8 is not None:
            self._check_fp8(spec.fp8, ys, error)

    def _check_fp8(self, fmt: Fp8Format, ys: list[Tensor], error: Tensor) -> None:
        rule = self.spec.scale
        assert rule is not None and self.codes is not None
        if self.static is not None:
            scales = self.static.double().expand_as(ys[0])
        else:
            assert self.scale is not None
            size = self.n if rule.kind == "row" else rule.group
            scales = self.scale.double().repeat_interleave(size, -1)[:, : self.n]
            wide = [torch.nn.functional.pad(y.abs(), (0, -self.n % size)).unflatten(-1, (-1, size)) for y in ys]
            amaxes = [torch.where(w.isnan().any(-1), NAN, w.amax(-1)) for w in wide]
            self._check_scale(rule, amaxes)
        k = torch.where(scales == 0, 0.0, 1 / scales)
        candidates = [c for y in ys for c in spread(y * k, lambda v: encode64(fmt, self.spec.fp8_max, v), error * k)]
        assert one_of(self.codes.view(torch.uint8), candidates)

    def _check_scale(self, rule: ScaleRule, amaxes: list[Tensor]) -> None:
        assert self.scale is not None
        wanted = [
            amax.clamp(max=self.numbers["scale_ub"]).where(amax.isfinite(), torch.tensor(NAN)) / self.spec.fp8_max
            for amax in amaxes
        ]
        if rule.ue8m0:
            parts = [t.frexp() for w in wanted for t in (w * (1 - SLACK), w, w * (1 + SLACK))]
            powers = [2.0 ** (p.exponent - (p.mantissa == 0.5).int()).double().clamp(min=-127) for p in parts]
            candidates = [
                torch.where(wanted[0].isnan(), NAN, torch.where(amaxes[0] == 0, 2.0**-127, p)) for p in powers
            ]
        else:
            largest = torch.finfo(rule.dtype).max
            small = [torch.where(w < 2.0**-126, 0.0, w.clamp(max=largest)) for w in wanted]
            candidates = [c for w in small for c in spread(w, rounder(rule.dtype))]
        assert between(self.scale.double(), candidates)


@prologue
def gated(x, gate, bias, factor):  # type: ignore[no-untyped-def]
    """Uses most of the language; not 0 at 0."""
    t = x * factor + bias
    t = t if t < 3.0 and not (gate > 2.0) else 0.5 * t
    return t / (1.5 + abs(gate)) + minimum(exp(gate), 2.0) * tanh(x) - 0.25


def spec_of(x: torch.dtype = BF16, gamma: torch.dtype = BF16, residual: torch.dtype | None = None, norm: torch.dtype | None = None,
            rounding: Any = "once", fmt: Fp8Format | None = None, scale: ScaleRule | None = None, limit: float = 0.0,
            function: Prologue | None = None, operands: tuple[Operand, ...] = ()) -> RowSpec:  # fmt: skip
    return row_spec(x, gamma, residual, norm, rounding, function.key if function else "", operands,
                    fmt.dtype if fmt else None, (limit or fmt.max) if fmt else 0.0, scale)  # fmt: skip


# --- kernels -------------------------------------------------------------------------------------------------------

ROW, STATIC = ScaleRule("row", F32), ScaleRule("static", F32)
GATED_OPERANDS = (Operand("full", BF16), Operand("column", F32), Operand("row", F32))

SPECS = {
    "norm_bf16": spec_of(norm=BF16),
    "norm_f16": spec_of(F16, F16, norm=F16),
    "norm_f32": spec_of(F32, F32, norm=F32),
    "norm_mixed": spec_of(BF16, F32, norm=F32),
    "norm_mixed_f16": spec_of(F16, BF16, norm=BF16),
    "norm_hf": spec_of(norm=BF16, rounding="hf"),
    "norm_hf_f16": spec_of(F16, F32, F16, F32, "hf"),
    "add_norm": spec_of(residual=BF16, norm=BF16),
    "add_norm_f32": spec_of(BF16, BF16, F32, BF16),
    "add_norm_hf": spec_of(residual=BF16, norm=BF16, rounding="hf"),
    "add_norm_prologue": spec_of(F16, F32, F16, F16, function=gated, operands=GATED_OPERANDS),
    "silu": spec_of(norm=BF16, function=silu_and_mul, operands=(Operand("full", BF16),)),
    "fp8": spec_of(fmt=E4M3FN, scale=ROW),
    "fp8_f16": spec_of(F16, F16, fmt=E4M3FN, scale=ScaleRule("row", F16)),
    "fp8_f32": spec_of(F32, F32, fmt=E4M3FN, scale=ScaleRule("row", BF16)),
    "fp8_hf": spec_of(fmt=E4M3FN, scale=ROW, rounding="hf"),
    "fp8_fnuz": spec_of(fmt=E4M3FNUZ, scale=ROW),
    "fp8_fnuz_224": spec_of(F16, F32, fmt=E4M3FNUZ, scale=ROW, limit=224.0),
    "fp8_ue8m0": spec_of(fmt=E4M3FN, scale=ScaleRule("row", torch.float8_e8m0fnu, ue8m0=True)),
    "fp8_ue8m0_hf": spec_of(fmt=E4M3FN, scale=ScaleRule("row", F32, ue8m0=True), rounding="hf"),
    "fp8_group": spec_of(fmt=E4M3FN, scale=ScaleRule("group", F32, 128)),
    "fp8_group_64_hf": spec_of(F16, F16, fmt=E4M3FN, scale=ScaleRule("group", F16, 64), rounding="hf"),
    "fp8_group_ue8m0": spec_of(F32, BF16, fmt=E4M3FNUZ, scale=ScaleRule("group", torch.float8_e8m0fnu, 64, ue8m0=True)),
    "fp8_static": spec_of(fmt=E4M3FN, scale=STATIC),
    "fp8_static_hf": spec_of(F16, F16, fmt=E4M3FNUZ, scale=STATIC, rounding="hf"),
    "everything": spec_of(BF16, F32, BF16, F16, fmt=E4M3FN, scale=ROW, function=gated, operands=GATED_OPERANDS),
    "everything_hf": spec_of(
        BF16, BF16, F32, BF16, "hf", E4M3FN, ScaleRule("group", F32, 128), function=gated, operands=GATED_OPERANDS
    ),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


@each_spec
def test_kernel_agrees_with_float64(spec: RowSpec) -> None:
    for n in (*range(1, 68), 127, 128, 129, 1000, 4096):
        Case(spec, 3, n, seed=n).run().check()
    Case(spec, 5, 96, weight_offset=1.0, scale_ub=1.5, eps=1e-2).run().check()


def test_reference_rejects_wrong_output() -> None:
    for spec in SPECS.values():
        case = Case(spec, 3, 100).run()
        for tensor in (case.norm, case.codes, case.scale, case.new_residual):
            if tensor is not None:
                kept = tensor.clone()
                tensor.view(torch.uint8).zero_()
                with pytest.raises(AssertionError):
                    case.check()
                tensor.copy_(kept)


@each_spec
def test_special_rows(spec: RowSpec) -> None:
    """NaN, infinity, overflow, zeros and subnormals stay in their row and make the documented outputs."""
    case = Case(spec, 8, 200, eps=0.0)
    largest = float(torch.finfo(spec.x).max)
    tiny = torch.finfo(spec.x).smallest_normal
    case.x[1, 7], case.x[2, 150], case.x[3, 199] = NAN, INF, largest
    case.x[4], case.x[5] = 0.0, tiny
    case.x[6, ::2] = -0.0
    if case.residual is not None:
        case.residual[4:6] = 0.0
    case.run().check()
    plain = spec.prologue is None
    for tensor in (case.norm, case.scale) if plain else ():
        if tensor is not None:
            assert tensor[1:3].float().isnan().all()
            assert not tensor[4].float().isnan().any() and not tensor[0].float().isnan().any()
    if case.codes is not None and plain and spec.fp8 is not None:
        raw = case.codes.view(torch.uint8)
        assert (raw[1:3] == spec.fp8.nan_code).all()
        assert (raw[4] & 0x7F == 0).all() and not (raw[0] == spec.fp8.nan_code).any()


SINGLE = {
    "norm_f32": spec_of(F32, F32, norm=F32),
    "norm_f16": spec_of(F32, F32, norm=F16),
    "norm_hf": spec_of(F16, F32, norm=F32, rounding="hf"),
    "fp8": spec_of(F32, F32, fmt=E4M3FN, scale=ROW),
    "fp8_f16_scale": spec_of(F32, F32, fmt=E4M3FNUZ, scale=ScaleRule("row", F16)),
    "fp8_bf16_scale": spec_of(F32, F32, fmt=E4M3FN, scale=ScaleRule("row", BF16)),
    "fp8_ue8m0": spec_of(F32, F32, fmt=E4M3FN, scale=ScaleRule("row", torch.float8_e8m0fnu, ue8m0=True)),
    "fp8_group": spec_of(F32, F32, fmt=E4M3FN, scale=ScaleRule("group", F32, 64)),
    "fp8_hf": spec_of(BF16, F32, fmt=E4M3FNUZ, scale=ROW, rounding="hf"),
    "fp8_static": spec_of(F32, F32, fmt=E4M3FN, scale=STATIC),
    "fp8_static_hf": spec_of(BF16, F32, fmt=E4M3FNUZ, scale=STATIC, rounding="hf"),
}


@pytest.mark.parametrize("spec", SINGLE.values(), ids=SINGLE.keys())
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_single_column_bit_for_bit(spec: RowSpec, eps: float) -> None:
    """With one column every float32 step is determined: random bits in, torch's float32 arithmetic step by step."""
    for gamma in (1.0, -0.3, 0.0, 1e-38, 3e-42, -2e38, INF, NAN):
        for bound in (INF, 0.75):
            case = Case(spec, 4096, 1, eps=eps, scale_ub=bound)
            bits = torch.cat([random_bits(2048), torch.randn(2048, generator=torch.Generator().manual_seed(1))])
            case.x = bits.to(spec.x).view(-1, 1)
            case.gamma.fill_(gamma)
            case.run()
            norm, codes, scale = single_column(case)
            for got, want in ((case.norm, norm), (case.scale, scale)):
                if got is not None and want is not None:
                    a, b = got.float(), want.float()
                    assert torch.equal(a.isnan(), b.isnan())
                    assert torch.equal(a[~a.isnan()].view(torch.int32), b[~b.isnan()].view(torch.int32))
            if case.codes is not None:
                assert torch.equal(case.codes.view(torch.uint8), codes)


def single_column(case: Case) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Norm, codes and scale of rows of one column, each operation one float32 operation of torch."""
    spec, hf = case.spec, case.spec.rounding == "hf"
    h, g = case.x.float(), case.gamma.float() + 0.0
    v = h * h + torch.tensor(case.numbers["eps"], dtype=F32)
    root = v.double().sqrt().float()  # torch's float32 square root is not always the nearest
    rs = torch.where(v.isfinite(), torch.where(v == 0, 0.0, 1 / root), NAN)
    y = ((h * rs).to(spec.x).float() * g).to(spec.x).float() if hf else h * rs * g
    norm = y.to(spec.norm) if spec.norm else None
    if spec.fp8 is None or spec.scale is None:
        return norm, torch.empty(0), None
    if case.static is not None:
        scale = case.static.expand_as(h)
    else:
        amax = y.abs() if hf else (h * g).abs() * rs
        t = torch.where(amax.isfinite(), amax.clamp(max=case.numbers["scale_ub"]), NAN) / spec.fp8_max
        if spec.scale.ue8m0:
            mantissa, exponent = t.double().frexp()
            power = (2.0 ** (exponent - (mantissa == 0.5).int()).double()).clamp(min=2.0**-127)
            scale = torch.where(t.isnan(), NAN, torch.where(t == 0, 2.0**-127, power)).float()
        else:
            t = torch.where(t < 2.0**-126, 0.0, t)
            scale = t.clamp(max=torch.finfo(spec.scale.dtype).max).to(spec.scale.dtype).float()
    top = torch.ones_like(rs) if hf else rs
    k = torch.where(scale == 0, 0.0, (top / scale).clamp(max=torch.finfo(F32).max))
    value = (y if hf else h * g) * k
    nan = value.isnan() if case.static is not None else scale.isnan()
    codes = value.clamp(-spec.fp8_max, spec.fp8_max).nan_to_num(0.0).to(spec.fp8.dtype).view(torch.uint8)
    stored = scale.to(spec.scale.dtype) if case.scale is not None else None
    return norm, torch.where(nan, spec.fp8.nan_code, codes).to(torch.uint8), stored


def test_zero_row_scales() -> None:
    for name, value in (("fp8", 0.0), ("fp8_ue8m0", 2.0**-127), ("fp8_ue8m0_hf", 2.0**-127)):
        case = Case(SPECS[name], 2, 64)
        case.x.zero_()
        case.x[:, ::2] = -0.0
        case.gamma.fill_(1.0)
        case.run()
        assert case.scale is not None and case.codes is not None
        assert (case.scale.double() == value).all()
        assert torch.equal(case.codes.view(torch.uint8), torch.tensor([0x80, 0x00], dtype=torch.uint8).repeat(2, 32))


def test_group_of_infinite_gamma_is_nan_alone() -> None:
    case = Case(SPECS["fp8_group"], 2, 384)
    case.gamma[200] = INF
    case.run()
    assert case.scale is not None and case.codes is not None
    assert case.scale.isnan().tolist() == [[False, True, False]] * 2
    assert ((case.codes.view(torch.uint8) == 0x7F).view(2, 3, 128).all(-1)).tolist() == [[False, True, False]] * 2


def test_static_scale_of_zero_infinity_nan() -> None:
    for value, code in ((0.0, 0), (INF, 0), (NAN, 0x7F)):
        case = Case(SPECS["fp8_static"], 2, 100)
        case.static = torch.tensor([value])
        case.run()
        assert case.codes is not None
        assert ((case.codes.view(torch.uint8) & 0x7F) == code).all()


@pytest.mark.parametrize("name", ["norm_bf16", "norm_f16", "add_norm", "add_norm_hf", "add_norm_prologue", "norm_hf"])
def test_outputs_may_replace_inputs(name: str) -> None:
    for n in (31, 100, 1000):
        apart, same = Case(SPECS[name], 4, n).run(), Case(SPECS[name], 4, n)
        same.norm, same.new_residual = same.x, same.residual
        same.run()
        assert all(torch.equal(a, b) for a, b in zip(apart.bytes(), same.bytes(), strict=True))


@each_spec
def test_bytes_around_rows_stay(spec: RowSpec) -> None:
    for n in (1, 15, 33, 67, 200):
        case = Case(spec, 3, n)
        frames = []
        for name in ("norm", "codes", "scale", "new_residual"):
            tensor = getattr(case, name)
            if tensor is not None:
                rows, width = tensor.shape
                frame = torch.full((rows + 2, (width + 70) * tensor.element_size()), 0xA5, dtype=torch.uint8).view(
                    tensor.dtype
                )
                setattr(case, name, frame[1:-1, 35:-35])
                frames.append(frame)
        case.run().check()
        for frame in frames:
            clean = torch.full_like(frame.view(torch.uint8), 0xA5).view(frame.dtype)
            frame[1:-1, 35:-35] = clean[1:-1, 35:-35]
            assert torch.equal(frame.view(torch.uint8), clean.view(torch.uint8))


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
@pytest.mark.parametrize("name", ["norm_bf16", "norm_f16", "fp8", "fp8_f32", "fp8_group_64_hf", "everything"])
def test_reads_and_writes_end_with_the_row(name: str) -> None:
    """Every tensor ends where an inaccessible page begins: one byte too far would be a crash."""
    pages: list[mmap.mmap] = []

    def against_the_edge(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        page = mmap.PAGESIZE
        memory = mmap.mmap(-1, 2 * page)
        pages.append(memory)
        raw = torch.frombuffer(memory, dtype=torch.uint8)
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(raw.data_ptr() + page), page, 0) == 0
        size = tensor.numel() * tensor.element_size()
        moved = raw[page - size : page].view(tensor.dtype).view(tensor.shape)
        return moved.copy_(tensor)

    for n in (1, 31, 45, 96):
        case = Case(SPECS[name], 2, n)
        for attribute in ("x", "gamma", "residual", "norm", "codes", "scale", "new_residual"):
            setattr(case, attribute, against_the_edge(getattr(case, attribute)))
        case.operands = [o for o in map(against_the_edge, case.operands) if o is not None]
        case.run().check()


def test_strided_rows() -> None:
    spec = SPECS["everything"]
    flat = Case(spec, 2 * 3 * 4, 50).run()
    case = Case(spec, 24, 50)
    for attribute in ("x", "residual", "norm", "codes", "scale", "new_residual"):
        tensor = getattr(case, attribute)
        spaced = torch.zeros(4, 2, 3, tensor.shape[-1] + 7, dtype=tensor.dtype)
        view = spaced.permute(1, 2, 0, 3)[..., : tensor.shape[-1]]
        setattr(case, attribute, view.copy_(tensor.view(2, 3, 4, -1)))
    case.operands = [
        o.view(2, 3, 4, -1) if k.kind != "column" else o for o, k in zip(case.operands, spec.operands, strict=True)
    ]
    case.run()
    for attribute in ("norm", "codes", "scale", "new_residual"):
        got, want = getattr(case, attribute).reshape(24, -1), getattr(flat, attribute)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_scales_in_column_layout() -> None:
    spec = SPECS["fp8_group"]
    flat, case = Case(spec, 6, 512).run(), Case(spec, 6, 512)
    case.scale = torch.full((4, 6), NAN).t()
    case.run()
    assert flat.scale is not None
    assert torch.equal(case.scale, flat.scale)


# --- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["norm_bf16", "fp8", "everything_hf"])
def test_result_is_independent_of_threads_and_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[name]
    m, n = 301, 1000
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(Case(spec, m, n).run().bytes())
        monkeypatch.setattr(_parallel, "_team", lambda: ("pool", _parallel._pool_team))
        results.append(Case(spec, m, n).run().bytes())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    if spec.prologue is None:
        whole, alone = Case(spec, m, n), Case(spec, 1, n)
        alone.gamma = whole.gamma
        for row in (0, 157, 300):
            alone.x.copy_(whole.x[row : row + 1])
            alone.run()
            assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone.bytes(), results[0], strict=True))


def test_torch_brings_the_threads() -> None:
    described = rms_norm.describe()
    assert set(described) == {"cpu", "vector", "threads", "cache"}
    if sys.platform == "linux":
        assert "OpenMP" in described["threads"]


def test_many_callers_at_once() -> None:
    spec = row_spec(BF16, F32, None, F32, "once")
    cases = [Case(spec, 3, 300, seed) for seed in range(8)]
    callers = [threading.Thread(target=case.run) for case in cases]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for case in cases:
        case.check()


# --- the same bytes on other CPUs ----------------------------------------------------------------------------------


@pytest.mark.skipif("+avx2" not in _compile.host()[1], reason="runs code for an x86 CPU with AVX2")
@pytest.mark.parametrize("name", ["norm_f16", "fp8", "fp8_group_ue8m0", "everything_hf", "silu"])
def test_other_instruction_sets_give_the_same_bytes(name: str) -> None:
    spec = SPECS[name]
    other = _compile.Kernel(spec, _compile.compile_object(spec, "haswell"))
    for n in (1, 37, 64, 1000):
        here = Case(spec, 3, n).run()
        there = Case(spec, 3, n)
        rms_norm.scratch.grow(2 * (n + _vec.LANES))
        there.run(lambda spec_, *a, **k: other.serial(other.pack(rms_norm.scratch.address, 1, *a, **k)))
        assert all(torch.equal(a, b) for a, b in zip(here.bytes(), there.bytes(), strict=True))


# --- the cache -----------------------------------------------------------------------------------------------------


def fresh(spec: RowSpec, monkeypatch: pytest.MonkeyPatch) -> list[RowSpec]:
    """Forget the kernel in memory; returns the list of specs that the compiler is then asked for."""
    compiled: list[RowSpec] = []
    original = _compile.compile_object

    def counting(wanted: RowSpec) -> bytes:
        compiled.append(wanted)
        return original(wanted)

    monkeypatch.setattr(_compile, "_kernels", {})
    monkeypatch.setattr(_compile, "compile_object", counting)
    return compiled


def test_cache_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["norm_bf16"]
    directory = tmp_path / "deep" / "cache"
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(directory))
    compiled = fresh(spec, monkeypatch)
    rms_norm.precompile(spec)
    assert compiled == [spec]
    (file,) = directory.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    fresh(spec, monkeypatch)
    Case(spec, 2, 77).run().check()
    assert compiled == [spec]

    good = file.read_bytes()
    for bad in (good[:-1], good[:200] + b"?" + good[201:], b"", b"junk" * 100):
        file.write_bytes(bad)
        compiled = fresh(spec, monkeypatch)
        Case(spec, 2, 77).run().check()
        assert compiled[:1] == [spec] and file.read_bytes() == good
    assert [file] == list(directory.iterdir())


def test_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["norm_bf16"]
    (tmp_path / "file").write_text("in the way")
    for place in ("off", "/proc/nowhere", str(tmp_path / "file")):
        monkeypatch.setenv("ONEPASS_CACHE_DIR", place)
        compiled = fresh(spec, monkeypatch)
        Case(spec, 2, 77).run().check()
        assert compiled[:1] == [spec]


def test_read_only_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:  # what mkstemp does in a read-only directory; root may write to any real one
        raise PermissionError("read-only")

    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    compiled = fresh(SPECS["norm_bf16"], monkeypatch)
    Case(SPECS["norm_bf16"], 2, 77).run().check()
    assert compiled == [SPECS["norm_bf16"]] and not list(tmp_path.iterdir())


def test_names_tell_specs_apart() -> None:
    names = [_compile.cache_file(spec) for spec in SPECS.values()]
    assert len(set(names)) == len(names) and None not in names
    assert all(_args.offsets(spec)["next"] == 0 for spec in SPECS.values())


def test_warm_start_needs_no_compiler(cache: Path) -> None:
    """A process that finds its kernel on disk imports neither Numba nor the code generator."""
    program = (
        "import sys, torch, onepass.cpu.rms_norm as r; from onepass.rows import row_spec;"
        "assert 'llvmlite' not in sys.modules;"
        "r.precompile(row_spec(torch.bfloat16, torch.bfloat16, None, torch.bfloat16, 'once'));"
        "print(sorted({'numba', 'onepass.cpu._row', 'onepass.cpu._vec'} & set(sys.modules)))"
    )
    source = str(Path(rms_norm.__file__).parents[2])
    environment = {**os.environ, "ONEPASS_CACHE_DIR": str(cache), "PYTHONPATH": source}
    outputs = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert outputs[1].stdout.strip() == "[]"
