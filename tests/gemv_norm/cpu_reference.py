"""One call of the CPU kernel of ``gemv_and_partial_norm``, its float64 reference, and the specs to test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from onepass.formats import E4M3FN, E4M3FNUZ
from onepass.ops.gemv_norm import cpu as gemv_norm
from onepass.ops.gemv_norm.cpu import trace_blocks
from onepass.ops.gemv_norm.launch import GemvCall, GemvSpec, gemv_spec
from tests.cpu.reference import BF16, F16, F32, between, encode64, one_of, rounder, spread

FP8 = E4M3FN.dtype
GUARD = 0xA5
POISON = 0x5A5A5A5A
SPECS = {
    "bf16": gemv_spec(BF16, BF16, "none", (BF16, F32), None, False),
    "f16": gemv_spec(F16, F16, "none", (F16,), None, False),
    "f32": gemv_spec(F32, F32, "none", (F32,), None, False),
    "bf16_fp8_rows": gemv_spec(BF16, FP8, "row", (BF16,), None, False),
    "f16_fp8_tensor": gemv_spec(F16, FP8, "tensor", (F32,), E4M3FNUZ.dtype, False),
    "bf16_fp8_blocks": gemv_spec(BF16, FP8, "block", (BF16,), None, False),
    "f32_fp8_ue8m0": gemv_spec(F32, FP8, "ue8m0_block", (F32,), None, False),
    "f16_int8_rows": gemv_spec(F16, torch.int8, "row", (F16,), None, False),
    "codes": gemv_spec(BF16, BF16, "row", (BF16, BF16), FP8, False),
    "traced": gemv_spec(BF16, BF16, "none", (BF16, F32), None, True),
}


def framed(rows: int, columns: int, dtype: torch.dtype, step: int = 0) -> tuple[Tensor, Tensor]:
    """A tensor of guard bytes, and the part of it that is the output; its rows are ``step`` elements apart."""
    step = step or columns + 38
    frame = torch.full((rows + 2, step * dtype.itemsize), GUARD, dtype=torch.uint8).view(dtype)
    return frame, frame[1:-1, step - columns - 1 : step - 1]


def weight_scales(scale: Tensor | None, kind: str, n: int, k: int) -> Tensor:
    """The scale of every weight of an [n, k] matrix, in float64: of its row, of its block of 128 by 128, or 1."""
    if scale is None:
        return torch.ones(1, 1).double()
    if "block" not in kind:
        return scale.double().view(-1, 1)
    return scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]


class Case:
    """One call on random inputs. Outputs are surrounded by guard bytes, also between rows."""

    def __init__(self, spec: GemvSpec, m: int, n: int, k: int, *widths: int, seed: int = 0, eps: float = 1e-6) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.spec, self.n, self.k, self.widths, self.eps = spec, n, k, widths, eps
        self.act = (normal(m, k) * normal(m, 1).exp()).to(spec.act)
        self.weight = (normal(n, k) * {FP8: 8.0, torch.int8: 40.0}.get(spec.weight, 1.0)).to(spec.weight)
        self.weight_scale = None
        if spec.weight_scale in ("block", "ue8m0_block"):
            blocks = normal(-(-n // 128), -(-k // 128) + 3)[:, :-3].exp2()  # rows of scales are apart
            self.weight_scale = blocks
            if spec.weight_scale == "ue8m0_block":
                self.weight_scale = blocks.log2().round().exp2().to(torch.float8_e8m0fnu)
        elif spec.weight_scale != "none":
            self.weight_scale = normal(n if spec.weight_scale == "row" else 1).exp()
        self.gammas = [normal(width).to(dtype) for width, dtype in zip(widths, spec.gammas, strict=True)]
        self.counter: Tensor | None = torch.zeros(len(widths), dtype=torch.int32)
        self.trace = self.units = None
        if spec.traced:
            count = trace_blocks(spec.act, spec.weight, m, n, k, widths)
            self.trace, self.units = torch.full((16 * count + 8,), -1), torch.full((count + 1,), -1, dtype=torch.int32)
        self.outputs(m)

    def outputs(self, m: int) -> None:
        """Fresh outputs that contain only guard bytes."""
        spec, total = self.spec, sum(self.widths)
        workspace = torch.full((m * total + 64,), POISON, dtype=torch.int32).view(F32)
        self.y = workspace[32:-32].view(m, total)
        dtypes = [spec.fp8.dtype if spec.fp8 is not None and not i else spec.act for i in range(len(self.widths))]
        frames = [framed(m, width, dtype) for width, dtype in zip(self.widths, dtypes, strict=True)]
        self.normed = [out for _, out in frames]
        tail, self.unnormed = framed(m, self.n - total, spec.act)
        scales, self.scale = framed(m, 1, F32, 5)
        self.frames = [*frames, (tail, self.unnormed), (scales, self.scale)]
        self.margins = [workspace[:32], workspace[-32:]]

    def run(self) -> Case:
        y = self.y if self.widths else None
        scale = self.scale if self.spec.fp8 else None
        unnormed = self.unnormed if self.unnormed.numel() else None
        call = GemvCall(
            *(self.spec, self.widths, self.act, self.weight, self.weight_scale, self.gammas),
            *(y, self.normed, scale, unnormed),
            *(self.counter, self.trace, self.units, self.eps),
        )
        gemv_norm.launch(call)
        assert self.counter is None or not self.counter.any()
        return self

    def bytes(self) -> list[Tensor]:
        """Everything that the call wrote, row by row."""
        outs = [self.y, *self.normed, self.unnormed, *([self.scale] if self.spec.fp8 else [])]
        return [out.contiguous().view(torch.uint8) for out in outs]

    def scales(self) -> Tensor:
        """The scale of every weight, in float64."""
        return weight_scales(self.weight_scale, self.spec.weight_scale, self.n, self.k)

    def check(self) -> None:
        """Compare with float64, and check the guard bytes."""
        weight = self.weight.double() * self.scales()
        exact = self.act.double() @ weight.T
        error = 4 * 2.0**-24 * (self.act.double().abs() @ weight.abs().T)
        total = sum(self.widths)
        assert ((self.y.double() - exact[:, :total]).abs() <= error[:, :total]).all()
        tail = exact[:, total:]
        candidates = [rounder(self.spec.act)(tail + e) for e in (-error[:, total:], error[:, total:])]
        assert between(self.unnormed.double(), candidates)
        begin = 0
        for i, (width, out) in enumerate(zip(self.widths, self.normed, strict=True)):
            values, errors = exact[:, begin : begin + width], error[:, begin : begin + width]
            rs = (values.square().mean(-1, keepdim=True) + self.eps).rsqrt()
            self._check_norm(i, out, values * rs * self.gammas[i], errors * rs * self.gammas[i].abs())
            begin += width
        self._check_guards()

    def _check_norm(self, i: int, out: Tensor, value: Tensor, error: Tensor) -> None:
        error = error + error.amax(-1, keepdim=True) / 4  # of the element, and through the mean square
        fp8 = self.spec.fp8
        if i or fp8 is None:
            assert between(out.double(), spread(value, rounder(self.spec.act), error))
            return
        amax, slack = value.abs().amax(-1, keepdim=True), error.amax(-1, keepdim=True)
        assert between(self.scale.double(), spread(amax / fp8.max, rounder(F32), slack / fp8.max))
        k = 1 / self.scale.double()
        codes = spread(value * k, lambda v: encode64(fp8, fp8.max, v), error * k)
        assert one_of(out.view(torch.uint8), codes)

    def _check_guards(self) -> None:
        for frame, out in self.frames:
            kept = out.clone()
            out.view(torch.uint8).fill_(GUARD)
            assert (frame.view(torch.uint8) == GUARD).all()
            out.copy_(kept)
        assert all((margin.view(torch.int32) == POISON).all() for margin in self.margins)


def same(left: Case, right: Case) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.bytes(), right.bytes(), strict=True))


def case(name: str, m: int, n: int, k: int, *widths: int, **options: Any) -> Case:
    """A case with as many of ``widths`` as the spec has segments."""
    return Case(SPECS[name], m, n, k, *widths[: len(SPECS[name].gammas)], **options)
