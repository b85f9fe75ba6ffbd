"""A float64 reference for CPU row kernels that gives the values an output may have, and the specs to test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")


from onepass.core.layout import geometry
from onepass.cpu import compile as compiler
from onepass.cpu.launch import CpuKernels, Kernel, ir_of
from onepass.formats import E4M3FN, E4M3FNUZ, Fp8Format, ScaleRule
from onepass.ops.rms_norm import cpu as rms_norm
from onepass.ops.rms_norm.launch import RowCall, RowSpec, row_spec
from onepass.prologues import Operand, Prologue, exp, minimum, prologue, silu_and_mul, tanh

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")


def random_bits(count: int, seed: int = 0) -> Tensor:
    """float32 values with uniformly random bits: every exponent, subnormals, infinities and NaNs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64, generator=generator).to(torch.int32).view(F32)


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


def kernel_for(kernels: CpuKernels[Any, Any, Any], spec: Any, cpu: str) -> Kernel:
    """The kernel of ``spec``, compiled for another CPU than this one."""
    image = compiler.compile_ir(ir_of(spec, features=""), cpu, "")
    return Kernel(kernels, spec, compiler.link(image, *kernels.symbols))


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
        outs = (self.norm, self.codes, self.scale, self.new_residual)
        call = RowCall(self.spec, self.x, self.gamma, 0.0, 0.0, self.residual, self.operands, self.static, *outs)
        numbers: dict[str, Any] = dict(self.numbers)
        launch(call._replace(n=self.n, geom=found[0], strides=found[1], **numbers))
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


def spec_of(
    x: torch.dtype = BF16,
    gamma: torch.dtype = BF16,
    residual: torch.dtype | None = None,
    norm: torch.dtype | None = None,
    rounding: Any = "once",
    fmt: Fp8Format | None = None,
    scale: ScaleRule | None = None,
    limit: float = 0.0,
    function: Prologue | None = None,
    operands: tuple[Operand, ...] = (),
) -> RowSpec:
    codes, largest = (fmt.dtype, limit or fmt.max) if fmt else (None, 0.0)
    key = function.key if function else ""
    return row_spec(x, gamma, residual, norm, rounding, key, operands, codes, largest, scale)


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
