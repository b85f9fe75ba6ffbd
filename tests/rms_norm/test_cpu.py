"""CPU row kernels against the float64 reference: values, memory, instruction sets."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from onepass.cpu import compile as compiler
from onepass.cpu import launch as launcher
from onepass.formats import E4M3FN, E4M3FNUZ, ScaleRule
from onepass.ops.mla_cache.launch import MAX_LATENT, MAX_ROPE, mla_spec
from onepass.ops.rms_norm import cpu as rms_norm
from onepass.ops.rms_norm.launch import RowSpec
from onepass.rope import RopeStyle
from tests.cpu.reference import (
    BF16,
    F16,
    F32,
    INF,
    NAN,
    ROW,
    SPECS,
    STATIC,
    Case,
    kernel_for,
    random_bits,
    spec_of,
)

each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


@pytest.mark.sampled(3)  # test_case runs the same kernels
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
    """NaN, infinity, overflow, zeros and subnormals affect only their row and have the documented outputs."""
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
    """With one column every float32 step is determined: torch repeats them on random bits."""
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
def test_bytes_around_rows_do_not_change(spec: RowSpec) -> None:
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
def test_no_accesses_beyond_the_row(name: str) -> None:
    """Every tensor ends where an inaccessible page begins: touching one more byte would crash."""
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


@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_stack_memory_holds_the_largest_token(style: RopeStyle) -> None:
    """Cosines, sines and the entry lie side by side on the stack, in float32: an overrun might go unnoticed."""
    spec = mla_spec(BF16, BF16, BF16, BF16, BF16, F32, style=style)
    sizes = [int(size) for size in re.findall(r"alloca \[(\d+) x i8\], align 64", launcher.ir_of(spec))]
    assert len(sizes) == 3
    assert all(
        size >= 4 * n
        for size, n in zip(sorted(sizes), (MAX_ROPE // 2, MAX_ROPE // 2, MAX_LATENT + MAX_ROPE), strict=True)
    )


# --- the same bytes on other CPUs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "vector"),
    [("+avx512f,+avx", "512 bit"), ("-avx512f,+avx,+sse2", "256 bit"), ("-avx512f,-avx,+sse2", "128 bit")],
)
def test_vector_width(features: str, vector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "host", lambda: ("some cpu", features))
    assert rms_norm.describe()["vector"] == vector


@pytest.mark.skipif("+avx2" not in compiler.host()[1], reason="runs code for an x86 CPU with AVX2")
@pytest.mark.parametrize("name", ["norm_f16", "fp8", "fp8_group_ue8m0", "everything_hf", "silu"])
def test_other_instruction_sets_give_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[name]
    widths = (1, 37, 64, 1000)
    here = [Case(spec, 3, n).run().bytes() for n in widths]
    monkeypatch.setitem(rms_norm.KERNELS.loaded, spec, kernel_for(rms_norm.KERNELS, spec, "haswell"))
    for n, expected in zip(widths, here, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(Case(spec, 3, n).run().bytes(), expected, strict=True))
