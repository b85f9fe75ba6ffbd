"""One call of the CPU kernel of ``linear``, its float64 reference, and the specs to test."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from onepass.core.layout import Geometry
from onepass.ops.linear import cpu as linear
from onepass.ops.linear.launch import LinearCall, LinearSpec, linear_spec
from onepass.ops.rms_norm import cpu as rms_norm
from onepass.ops.rms_norm.launch import RowCall, row_spec
from tests.cpu.reference import BF16, F16, F32, between, rounder
from tests.gemv_norm.cpu_reference import FP8, GUARD, framed, weight_scales

INT8, E8M0 = torch.int8, torch.float8_e8m0fnu
UNIT = 2.0**-24
SPECS = {
    "bf16": linear_spec(BF16, BF16),
    "f16": linear_spec(F16, F16, "tensor", out=F32),
    "f32": linear_spec(F32, F32, "row", bias=F32),
    "fp8_rows": linear_spec(BF16, FP8, "row"),
    "fp8_tensor": linear_spec(F16, FP8, "tensor", bias=F16, add=F16),
    "fp8_blocks": linear_spec(BF16, FP8, "block"),
    "fp8_ue8m0": linear_spec(F32, FP8, "ue8m0_block", gamma=F32, add=F32),
    "int8": linear_spec(F16, INT8),
    "int8_rows": linear_spec(BF16, INT8, "row", bias=F32, out=F32),
    "norm": linear_spec(BF16, BF16, gamma=F32),
    "norm_hf": linear_spec(F16, F16, gamma=F16, residual=F16, bias=F16, add=F16, rounding="hf"),
    "residual": linear_spec(BF16, FP8, "row", residual=F32),
    "residual_hf": linear_spec(BF16, BF16, residual=BF16, rounding="hf"),
    "silu": linear_spec(BF16, BF16, activation="silu_mul"),
    "silu_hf": linear_spec(BF16, FP8, "block", BF16, BF16, BF16, "silu_mul", BF16, rounding="hf"),
    "gelu_tanh": linear_spec(F32, F32, gamma=F32, residual=F32, activation="gelu_tanh_mul", add=F32),
    "gelu": linear_spec(BF16, INT8, "row", BF16, BF16, BF16, "gelu_mul", F32, F32),
}


def activation64(spec: LinearSpec, g: Tensor) -> Tensor:
    """The gate's activation in float64."""
    if spec.activation == "silu_mul":
        return g / (1 + (-g).exp())
    if spec.activation == "gelu_tanh_mul":
        return 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
    return 0.5 * g * (1 + torch.erf(g / math.sqrt(2)))


class Case:
    """One call on random inputs. Rows of x, residual and add are apart; outputs are surrounded by guard bytes."""

    def __init__(self, spec: LinearSpec, m: int, n: int, k: int, seed: int = 0, apart: int = 5) -> None:
        """``n`` is the number of columns of the output."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        def rows(columns: int, dtype: torch.dtype) -> Tensor:
            wide = torch.full((m, columns + apart), float("nan"), dtype=dtype)
            return wide[:, :columns].copy_(normal(m, columns) * normal(m, 1).exp())

        self.spec, self.m, self.n, self.k, self.eps, self.offset = spec, m, n, k, 1e-6, 0.5
        count = n if spec.activation is None else 2 * n
        self.x = rows(k, spec.x)
        self.weight = torch.zeros(count, k + apart, dtype=spec.weight)[:, :k]
        if spec.weight == INT8:
            self.weight.copy_(torch.randint(-128, 128, (count, k), generator=generator))
        else:
            self.weight.copy_((normal(count, k) * (8.0 if spec.weight == FP8 else 1.0)).to(spec.weight))
        self.weight_scale: Tensor | None = None
        if spec.weight_scale in ("tensor", "row"):
            self.weight_scale = normal(count if spec.weight_scale == "row" else 1).exp()
        elif spec.weight_scale != "none":
            blocks = normal(-(-count // 128), -(-k // 128) + 3)[:, :-3].exp2()
            ue8m0 = spec.weight_scale == "ue8m0_block"
            self.weight_scale = blocks.log2().round().exp2().to(E8M0) if ue8m0 else blocks
        self.gamma = normal(k).to(spec.gamma) if spec.gamma else None
        self.residual = rows(k, spec.residual) if spec.residual else None
        self.bias = normal(count).to(spec.bias) if spec.bias else None
        self.add = rows(n, spec.add) if spec.add else None
        self.outputs(m)

    def outputs(self, m: int) -> None:
        """Fresh outputs that contain only guard bytes."""
        self.frame, self.out = framed(m, self.n, self.spec.out)
        self.frames = [(self.frame, self.out)]
        self.residual_out: Tensor | None = None
        if self.spec.residual is not None:
            frame, self.residual_out = framed(m, self.k, self.spec.residual)
            self.frames.append((frame, self.residual_out))

    def rows(self, first: int, m: int) -> Case:
        """The same call on some of the rows."""
        for name in ("x", "residual", "add"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor[first : first + m])
        self.outputs(m)
        return self

    def run(self) -> Case:
        tensors = (self.weight_scale, self.gamma, self.residual, self.bias, self.add, self.residual_out)
        linear.launch(LinearCall(self.spec, self.x, self.weight, self.out, *tensors, self.eps, self.offset))
        return self

    def bytes(self) -> list[Tensor]:
        """Everything that the call wrote, row by row."""
        outs = [self.out, *([] if self.residual_out is None else [self.residual_out])]
        return [out.contiguous().view(torch.uint8) for out in outs]

    def a(self) -> tuple[Tensor, Tensor | None]:
        """What the weights are multiplied by and the new residual: by the row kernel, or in torch."""
        spec = self.spec
        if self.gamma is None:
            if self.residual is None:
                return self.x, None
            h = self.x.float() + self.residual.float()
            new = h.to(self.residual.dtype)
            return (new if spec.rounding == "hf" else h).to(spec.x), new
        normed = torch.empty(self.x.shape, dtype=spec.x)
        added = torch.empty(self.x.shape, dtype=spec.residual) if spec.residual else None
        row = row_spec(spec.x, self.gamma.dtype, spec.residual, spec.x, spec.rounding)
        tensors = (self.x, self.x if self.residual is None else self.residual, normed, normed, normed, normed)
        strides = [(tensor.stride(0), 0, 0) for tensor in tensors]
        call = RowCall(row, self.x, self.gamma, self.eps, self.offset, self.residual, norm=normed, new_residual=added)
        rms_norm.launch(call._replace(n=self.k, geom=Geometry(len(self.x), 1, 1), strides=strides))
        return normed, added

    def scales(self) -> Tensor:
        """The scale of every weight, in float64."""
        return weight_scales(self.weight_scale, self.spec.weight_scale, len(self.weight), self.k)

    def check(self) -> None:
        """Compare with float64, and check the guard bytes."""
        spec = self.spec
        a, new = self.a()
        weight = self.weight.double() * self.scales()
        y = a.double() @ weight.T
        error = 4 * UNIT * (a.double().abs() @ weight.abs().T)
        if self.bias is not None:
            y = y + self.bias.double()
            error = error + UNIT * y.abs()
        hf = spec.rounding == "hf"
        spread: Callable[[Tensor], Tensor] = rounder(spec.x) if hf else (lambda value: value)
        low, high = spread(y - error), spread(y + error)
        if spec.activation is not None:
            low, high = self._activated(low, high, hf)
        if self.add is not None:
            low, high = ((v + self.add.double()) for v in (low, high))
            low, high = low - UNIT * low.abs(), high + UNIT * high.abs()
        assert between(self.out.double(), [rounder(spec.out)(v) for v in (low, high)])
        assert new is None or (self.residual_out is not None and torch.equal(self.residual_out, new))
        for frame, out in self.frames:
            kept = out.clone()
            out.view(torch.uint8).fill_(GUARD)
            assert (frame.view(torch.uint8) == GUARD).all()
            out.copy_(kept)

    def _activated(self, low: Tensor, high: Tensor, hf: bool) -> tuple[Tensor, Tensor]:
        """The range of act(gate) * up. The slope of an activation is at most 1.13."""
        round_x = rounder(self.spec.x) if hf else (lambda value: value)
        (gate_low, up_low), (gate_high, up_high) = low.split(self.n, 1), high.split(self.n, 1)
        middle, half = (gate_low + gate_high) / 2, (gate_high - gate_low) / 2
        value = activation64(self.spec, middle)
        error = 1.13 * half + 4 * UNIT * (middle.abs() + value.abs())
        gates = [round_x(value - error), round_x(value + error)]
        products = torch.stack([gate * up for gate in gates for up in (up_low, up_high)])
        low, high = products.amin(0), products.amax(0)
        return round_x(low - UNIT * low.abs()), round_x(high + UNIT * high.abs())


def same(left: Case, right: Case) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.bytes(), right.bytes(), strict=True))


def case(name: str, m: int, n: int, k: int, **options: Any) -> Case:
    return Case(SPECS[name], m, n, k, **options)


def without(spec: LinearSpec, **changes: Any) -> LinearSpec:
    """The interned spec with some fields changed."""
    changed = replace(spec, **changes)
    return linear_spec(**{name: getattr(changed, name) for name in changed.__dataclass_fields__})
