"""The CPU kernels of ``linear``: values, bytes, memory, threads."""

from __future__ import annotations

import sys
from fractions import Fraction

import pytest
import torch

pytest.importorskip("llvmlite")

import onepass
from onepass.cpu import compile as compiler
from onepass.cpu import threads
from onepass.cpu.sizes import CHUNK, MAX_SLOTS, SUM, TILE
from onepass.formats import WeightScale
from onepass.ops.gemv_norm import cpu as gemv_norm
from onepass.ops.gemv_norm.launch import GemvCall, gemv_spec
from onepass.ops.linear import cpu as linear
from onepass.ops.linear.launch import ACTIVATIONS, LinearCall, LinearSpec, linear_spec
from onepass.testing.tensors import same_bytes
from tests.cpu.page_edge import against_the_edge
from tests.cpu.reference import BF16, F16, F32, INF, NAN, kernel_for
from tests.cpu.team import team as team
from tests.gemv_norm.cpu_reference import FP8
from tests.linear.cpu_reference import INT8, SPECS, Case, activation64, case, same, without

each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
ROWS = (1, 2, 3, 5, 16, 17, 64, 200)


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(8)  # test_case runs the same kernels
@each_spec
def test_agrees_with_float64(spec: LinearSpec) -> None:
    for i, m in enumerate((*range(1, 18), 33, 64, 65, 140)):
        n, k = TILE + 7 * i, (1, 31, 32, 33, 127, 129, 511, 512, 513, 1025)[i % 10] + 32 * (i // 10)
        Case(spec, m, n, k, seed=i, apart=i % 3).run().check()
    Case(spec, 2, 5, 7168).run().check()


@pytest.mark.sampled(6)  # each compiles a kernel
@each_spec
def test_check_rejects_wrong_outputs(spec: LinearSpec) -> None:
    one = Case(spec, 3, 60, 300).run()
    outs = [one.out, *([] if one.residual_out is None else [one.residual_out])]
    for out in outs:
        kept = out.clone()
        for wrong in (torch.zeros_like(out), kept.roll(1, -1), kept.roll(1, 0)):
            out.copy_(wrong)
            with pytest.raises(AssertionError):
                one.check()
        out.copy_(kept)
    one.check()
    for frame, _ in one.frames:
        frame.view(torch.uint8)[0, 0] ^= 1
        with pytest.raises(AssertionError):
            one.check()
        frame.view(torch.uint8)[0, 0] ^= 1


def test_long_sums_stay_accurate() -> None:
    one = case("f32", 1, 4, 2**17 + 3)
    for tensor in (one.x, one.weight):
        tensor.abs_()  # nothing cancels: errors add up
    one.run().check()


@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_every_weight_is_exact(dtype: torch.dtype) -> None:
    """With one column, and 1 in x, the output is the weight itself."""
    codes = torch.arange(256, dtype=torch.uint8)
    for filler in (0, 100):
        weight = torch.zeros(257, 1 + filler, dtype=torch.uint8)
        weight[1:, filler] = codes
        for m in (1, 20):
            out = torch.full((m, 257), 5.0)
            x = torch.ones(m, 1 + filler)
            linear.launch(LinearCall(linear_spec(F32, dtype), x, weight.view(dtype), out))
            want = torch.cat([torch.zeros(1), codes.view(dtype).float()]).expand(m, -1)
            assert torch.equal(out.isnan(), want.isnan()) and int(out[0].isnan().sum()) == (2 if dtype == FP8 else 0)
            assert torch.equal(out.nan_to_num(1.0), want.nan_to_num(1.0))


def test_powers_of_two_as_scales() -> None:
    """All 256 codes of a scale, each on one block of weights, by rows of x that are 0 elsewhere."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = torch.tensor([2.0, -0.5]).repeat(64).view(128, 1).expand(128, 128 * 256).to(FP8)
    x = torch.zeros(256, 256, 128)
    x[range(256), range(256), 5] = 0.25
    x, out = x.view(256, -1), torch.empty(256, 128)
    spec = linear_spec(F32, FP8, "ue8m0_block")
    linear.launch(LinearCall(spec, x[:255, : 255 * 128], weight[:, : 255 * 128], out[:255], codes[:255].view(1, 255)))
    want = codes[:255].double().view(-1, 1) * torch.tensor([0.5, -0.125]).double().repeat(64)
    assert torch.equal(out[:255].double(), want) and not want.eq(0).any()
    linear.launch(LinearCall(spec, torch.ones(1, 128), weight[:, :128], out[255:], codes[255:].view(1, 1)))
    assert out[255].isnan().all()


def test_scales_of_blocks_take_part_in_one_rounding() -> None:
    """With one product per block, y is a chain of fused multiply-adds."""
    generator = torch.Generator().manual_seed(0)
    a, scale = (torch.randn(300, 3, generator=generator).abs(), torch.rand(1, 3, generator=generator))
    x = torch.zeros(300, 3, 128)
    x[:, :, 77] = a
    out = torch.empty(300, 1)
    linear.launch(LinearCall(linear_spec(F32, FP8, "block"), x.view(300, -1), torch.ones(1, 384).to(FP8), out, scale))
    different = 0
    for row, got in zip(a, out, strict=True):
        total, unfused = Fraction(0), torch.zeros(1)
        for value, factor in zip(row, scale[0], strict=True):
            exact = total + Fraction(value.item()) * Fraction(factor.item())
            total = Fraction(torch.tensor(float(exact), dtype=F32).item())
            unfused = unfused + value * factor
        assert got.item() == float(total)
        different += got.item() != unfused.item()
    assert different > 30


def test_activations_of_known_gates() -> None:
    """The gate is x itself and the other factor 1: the output is the activation."""
    g = torch.cat([torch.linspace(-12, 12, 9001), torch.tensor([0.0, -0.0, 89.0, -89.0, 3e38, -3e38])]).view(-1, 1)
    weight, bias = torch.tensor([[1.0], [0.0]]), torch.tensor([0.0, 1.0])
    for activation in ACTIVATIONS:
        spec = linear_spec(F32, F32, bias=F32, activation=activation)
        out, special = torch.empty(len(g), 1), torch.empty(1, 1)
        linear.launch(LinearCall(spec, g, weight, out, bias=bias))
        want = activation64(spec, g.double())
        assert ((out.double() - want).abs() <= 4 * 2.0**-24 * (g.double().abs() + want.abs())).all()
        assert want.abs().max() > 1e38 and want[:9001].abs().mean() > 1
        for gate in (INF, NAN):
            given = torch.tensor([gate, 1.0])
            linear.launch(LinearCall(spec, torch.ones(1, 1), torch.zeros(2, 1), special, bias=given))
            assert special.isnan() if gate != INF else special == INF


@pytest.mark.sampled(4)  # test_op.py has NaN and infinity too
@each_spec
def test_bad_numbers_stay_in_their_row_or_column(spec: LinearSpec) -> None:
    one = Case(spec, 20, 40, 300)
    clean = Case(spec, 20, 40, 300).run()
    one.x[7, 299], one.x[12, 3] = NAN, INF
    one.run()
    rows = torch.arange(20)
    others = (rows != 7) & (rows != 12)
    assert one.out[7].isnan().all() and torch.equal(one.out[others], clean.out[others])
    assert not one.out[12].isfinite().any() or spec.activation is not None
    if spec.weight == INT8:
        return
    one = Case(spec, 20, 40, 300)
    if spec.weight == FP8:
        one.weight.view(torch.uint8)[5, 298], one.weight.view(torch.uint8)[9, 0] = 0x7F, 0xFF
    else:
        one.weight[5, 298], one.weight[9, 0] = NAN, NAN
    one.run()
    columns = torch.arange(40)
    others = (columns != 5) & (columns != 9)
    assert one.out[:, [5, 9]].isnan().all() and torch.equal(one.out[:, others], clean.out[:, others])


def test_special_scales() -> None:
    one = case("fp8_blocks", 4, 200, 300)
    assert one.weight_scale is not None
    one.weight_scale[0, 0], one.weight_scale[1, 2] = 0.0, NAN
    one.run()
    assert one.out[:, 128:].isnan().all()
    weight = one.weight.double() * one.scales()
    want = one.x.double() @ weight[:128].T
    assert ((one.out[:, :128].double() - want).abs() <= 2.0**-7 * want.abs() + 1e-3).all() and want.abs().max() > 1
    one.weight_scale[:] = 0.0
    assert (one.run().out == 0).all()
    one.x[2, 5] = INF
    assert one.run().out[2].isnan().all() and (one.out[[0, 1, 3]] == 0).all()


# --- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)  # tools/test_determinism.py has batches too
@each_spec
def test_a_row_gives_the_same_bytes_in_any_batch(spec: LinearSpec) -> None:
    whole = Case(spec, 200, 53, 1100).run()
    for m in ROWS:
        for first in sorted({0, 1, 199 - m, 200 - m} & set(range(201 - m))):
            part = Case(spec, 200, 53, 1100).rows(first, m).run()
            for a, b in zip(part.bytes(), whole.bytes(), strict=True):
                assert torch.equal(a, b[first : first + m])


@pytest.mark.sampled(16)  # each compiles three kernels
@each_spec
def test_product_has_the_bytes_of_the_gemv(spec: LinearSpec) -> None:
    """The norm and the residual are the row kernel's, and the product is the GEMV's."""
    plain = without(spec, gamma=None, residual=None, bias=None, activation=None, add=None, out=None, rounding="once")
    for m, k in ((1, 700), (3, 2500), (16, 33), (40, 700)):
        one = Case(spec, m, 61, k)
        a, new = one.a()
        out, product = (torch.empty(m, len(one.weight), dtype=spec.x) for _ in range(2))
        linear.launch(LinearCall(plain, a, one.weight, out, one.weight_scale))
        gemv = gemv_spec(spec.x, spec.weight, spec.weight_scale, (), None, False)
        gemv_norm.launch(GemvCall(gemv, (), a, one.weight, one.weight_scale, (), None, (), None, product))
        assert torch.equal(out.view(torch.uint8), product.view(torch.uint8))
        fused = Case(spec, m, 61, k).run()
        separate = Case(without(spec, gamma=None, residual=None), m, 61, k)
        for name in ("weight", "weight_scale", "bias", "add"):
            setattr(separate, name, getattr(fused, name))
        separate.x = a
        assert torch.equal(fused.bytes()[0], separate.run().bytes()[0])
        assert new is None or torch.equal(fused.bytes()[1], new.view(torch.uint8))


@pytest.mark.sampled(3)  # each compiles kernels
@each_spec
def test_options_have_the_bytes_of_separate_steps(spec: LinearSpec) -> None:
    """Scale, bias and ``add`` are single float32 operations on the float32 product."""
    if spec.activation is not None or spec.rounding == "hf":
        return
    one = Case(spec, 9, 70, 400)
    product = torch.empty(9, 70)
    scale = spec.weight_scale if "block" in spec.weight_scale else "none"
    plain = without(spec, weight_scale=scale, gamma=None, residual=None, bias=None, add=None, out=F32)
    given = None if scale == "none" else one.weight_scale
    linear.launch(LinearCall(plain, one.a()[0], one.weight, product, given))
    if scale == "none" and one.weight_scale is not None:
        product = product * one.weight_scale
    if one.bias is not None:
        product = product + one.bias.float()
    if one.add is not None:
        product = product + one.add.float()
    assert torch.equal(one.run().out.contiguous(), product.to(spec.out))


def test_hf_rounds_where_transformers_does() -> None:
    """The same roundings in torch, from the float32 product."""
    one = case("silu_hf", 6, 50, 256)
    assert one.bias is not None and one.add is not None
    plain = without(one.spec, gamma=None, residual=None, bias=None, activation=None, add=None, out=F32, rounding="once")
    product = torch.empty(6, 100)
    linear.launch(LinearCall(plain, one.a()[0], one.weight, product, one.weight_scale))
    y = (product + one.bias.float()).to(BF16)
    gate, up = y[:, :50], y[:, 50:]
    want = torch.nn.functional.silu(gate.float()).to(BF16) * up + one.add
    got = one.run().out
    different = got.view(torch.int16).int() - want.view(torch.int16).int()
    assert (different != 0).float().mean() < 0.02  # exp differs from torch's in its last bit
    once = Case(without(one.spec, rounding="once"), 6, 50, 256).run().out
    assert (once != want).float().mean() > 0.1


@pytest.mark.parametrize("name", ["bf16", "fp8_blocks", "int8_rows", "norm"])
def test_bytes_depend_on_neither_address_nor_tile(name: str) -> None:
    plain = case(name, 5, 90, 333).run()
    for shift, apart in ((1, 0), (3, 5), (17, 64)):
        moved = case(name, 5, 90, 333)
        for attribute in ("x", "weight"):
            old = getattr(moved, attribute)
            wide = torch.zeros(old.shape[0] * (old.shape[1] + apart) + shift, dtype=old.dtype)[shift:]
            setattr(moved, attribute, wide.view(old.shape[0], -1)[:, : old.shape[1]].copy_(old))
        assert same(moved.run(), plain)
    for first in (1, 23, 40):  # the same weight rows as other columns
        part = case(name, 5, 90, 333)
        if "block" in part.spec.weight_scale:
            assert part.weight_scale is not None
            part.weight_scale[:] = part.weight_scale[:1]
        part.weight = part.weight[first:]
        for attribute in ("weight_scale", "bias"):
            old = getattr(part, attribute)
            setattr(part, attribute, old[first:] if old is not None and old.shape[0] == 90 else old)
        part.n = 90 - first
        part.outputs(5)
        assert torch.equal(part.run().out.contiguous(), plain.out[:, first:].contiguous())


@pytest.mark.sampled(4)  # tools/test_determinism.py has threads too
@each_spec
def test_bytes_do_not_depend_on_threads(spec: LinearSpec, team: pytest.MonkeyPatch) -> None:
    def run(count: int) -> Case:
        torch.set_num_threads(count)
        return Case(spec, 150, 100, 260).run()

    one = run(1)
    assert same(one, run(2)) and same(one, run(3))
    team.setattr(threads, "_team", lambda: ("own", threads._own_team()))
    assert same(one, run(2))


@pytest.mark.sampled(3)  # each compiles two kernels
@pytest.mark.skipif("+avx2" not in compiler.host()[1], reason="runs code for an x86 CPU with AVX2")
@pytest.mark.parametrize("name", ["bf16", "f32", "fp8_rows", "fp8_ue8m0", "int8_rows", "silu_hf", "gelu"])
def test_other_instruction_sets_give_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[name]
    here = [Case(spec, m, 70, 600).run() for m in ROWS]
    monkeypatch.setitem(linear.KERNELS.loaded, spec, kernel_for(linear.KERNELS, spec, "haswell"))
    assert all(same(one, Case(spec, one.m, 70, 600).run()) for one in here)


@pytest.mark.skipif("+avx2" not in compiler.host()[1], reason="runs code for an x86 CPU with AVX2")
@pytest.mark.parametrize("scale", ["row", "block"])
def test_fp8_weights_are_added_in_one_order(scale: WeightScale, monkeypatch: pytest.MonkeyPatch) -> None:
    """However codes are converted: the steps at a row's end, and those that do not fill one, belong to the same sum."""
    spec = linear_spec(F32, FP8, scale)
    shapes = [(m, k) for m in (1, 3, 4) for k in (32, 96, 600, 1000)]
    here = [Case(spec, m, 30, k).run() for m, k in shapes]
    monkeypatch.setitem(linear.KERNELS.loaded, spec, kernel_for(linear.KERNELS, spec, "haswell"))
    assert all(same(one, Case(spec, m, 30, k).run()) for one, (m, k) in zip(here, shapes, strict=True))


# --- memory --------------------------------------------------------------------------------------------------------


def test_outputs_may_replace_inputs(team: pytest.MonkeyPatch) -> None:
    for name in ("norm_hf", "silu_hf"):
        for m in (1, 150):
            apart, together = case(name, m, 60, 200).run(), case(name, m, 60, 200)
            assert together.add is not None
            together.out, together.residual_out = together.add, together.residual
            assert same(together.run(), apart)


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
@each_spec
def test_no_reads_beyond_the_row(spec: LinearSpec) -> None:
    """Every input ends where an inaccessible page begins: reading one more byte would crash."""
    for m, n, k in ((1, 3, 1), (2, 25, 31), (5, 9, 145), (19, 137, 513)):
        one = Case(spec, m, n, k)
        for name in ("x", "weight", "weight_scale", "gamma", "residual", "bias", "add"):
            if (value := getattr(one, name)) is not None:
                setattr(one, name, against_the_edge(value))
        one.run().check()


def test_scratch_memory_is_bounded() -> None:
    weight, k = torch.empty(2112, 1000, dtype=BF16), 1000
    spec = linear_spec(BF16, BF16)

    def size(m: int) -> int:
        call = LinearCall(spec, torch.empty(m, k, dtype=BF16), weight, torch.empty(m, 2112, dtype=BF16))
        return linear._work(call).size

    row = -(-k // CHUNK) * CHUNK + torch.get_num_threads() * TILE * SUM
    assert size(1) == row and size(16) == 16 * row and size(64) == 64 * row
    assert size(65536) == size(128) < 128 * row


# --- threads -------------------------------------------------------------------------------------------------------


def test_many_small_calls(team: pytest.MonkeyPatch) -> None:
    """Threads race for the rows and tiles of few and of many panels, some of which share a slot of scratch memory."""
    for m, n, count in ((2, 100, 300), (700, 20, 60), (300, 50, 60)):
        first = case("norm", m, n, 40).run()
        first.check()
        for _ in range(count):
            again = case("norm", m, n, 40)
            assert same(first, again.run())


def test_panels_share_slots() -> None:
    spec = linear_spec(F16, F16)

    def slots(m: int, n: int, threads: int) -> int:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            call = LinearCall(spec, torch.empty(m, 4096, dtype=F16), torch.empty(n, 4096, dtype=F16), torch.empty(m, n))
            return linear._work(call).slots
        finally:
            torch.set_num_threads(before)

    assert slots(64, 500, 2) == 1 and slots(128, 500, 2) == 2 and slots(6400, 500, 2) == 2
    assert 2 < slots(6400, TILE, 4) <= MAX_SLOTS and slots(6400, 1, 64) == MAX_SLOTS


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16])
def test_nan_codes_are_one_nan_for_any_number_of_rows(code: int, act: torch.dtype) -> None:
    """Found by fuzzing: up to four rows gave it the sign of a table's entry."""
    codes = torch.full((3, 70), 0xB0, dtype=torch.uint8)
    codes[1, 5] = code
    x = torch.ones(9, 70, dtype=act)
    whole = onepass.linear(x, codes.view(torch.float8_e4m3fn))
    assert whole[:, 1].isnan().all() and not whole[:, ::2].isnan().any() and not whole[:, 1].signbit().any()
    for rows in (1, 4, 5):
        assert same_bytes(onepass.linear(x[:rows], codes.view(torch.float8_e4m3fn)), whole[:rows])
