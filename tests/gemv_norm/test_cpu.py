"""The CPU kernels of ``gemv_and_partial_norm``: values, bytes, memory, threads, times."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")

from onepass.core.layout import Geometry
from onepass.cpu import compile as compiler
from onepass.cpu import launch as launcher
from onepass.cpu import threads
from onepass.cpu.sizes import TILE, row_blocks
from onepass.formats import ScaleRule
from onepass.ops.gemv_norm import cpu as gemv_norm
from onepass.ops.gemv_norm import launch as gemv
from onepass.ops.gemv_norm.cpu import trace_blocks
from onepass.ops.gemv_norm.launch import GemvSpec, gemv_spec
from onepass.ops.rms_norm import cpu as rms_norm
from onepass.ops.rms_norm.launch import RowCall, row_spec
from tests.cpu.page_edge import against_the_edge
from tests.cpu.reference import BF16, F32, INF, NAN, kernel_for
from tests.cpu.team import team as team
from tests.gemv_norm.cpu_reference import FP8, SPECS, Case, case, same

each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(8)  # test_case runs the same kernels
@each_spec
def test_agrees_with_float64(spec: GemvSpec) -> None:
    two = len(spec.gammas) == 2
    for m in range(1, 17):
        n, k = 2 * TILE + 7 * m, (1, 31, 32, 33, 511, 512, 513, 1025)[m % 8] + 32 * (m // 8)
        widths = (TILE + m, 3 * m) if two else (n - 3 if m % 3 else n,)
        Case(spec, m, n, k, *widths, seed=m).run().check()
    Case(spec, 2, 5, 7168, *((3, 1) if two else (4,))).run().check()


@pytest.mark.sampled(4)  # each compiles a kernel
@each_spec
def test_check_rejects_wrong_outputs(spec: GemvSpec) -> None:
    one = Case(spec, 3, 60, 100, *(20,) * len(spec.gammas)).run()
    for out in (one.y, *one.normed, one.unnormed, *([one.scale] if spec.fp8 else [])):
        kept = out.clone()
        for wrong in (torch.zeros_like(out), kept.roll(1, -1) if out.shape[-1] > 1 else kept.roll(1, 0)):
            out.copy_(wrong)
            with pytest.raises(AssertionError):
                one.check()
        out.copy_(kept)
    one.check()
    one.frames[0][0].view(torch.uint8)[0, 0] = 0
    with pytest.raises(AssertionError):
        one.check()


def test_no_segment_is_a_plain_product(team: pytest.MonkeyPatch) -> None:
    for m in (1, 16):
        plain = Case(gemv_spec(BF16, BF16, "none", (), None, False), m, 100, 333)
        plain.counter = None
        plain.run().check()


def test_long_sums_stay_accurate() -> None:
    one = case("f32", 1, 4, 2**17 + 3, 3)
    for tensor in (one.act, one.weight):
        tensor.abs_()  # nothing cancels: errors add up
    one.run().check()


def test_every_fp8_weight_is_exact() -> None:
    """With one column, and 1 in ``act``, the tail is the weight itself."""
    codes = torch.arange(256, dtype=torch.uint8)
    for filler in (0, 100):  # NaN codes alone in their rows, and beyond the first step
        one = case("f16_fp8_tensor", 1, 257, 1 + filler, 1)
        assert one.weight_scale is not None
        one.weight_scale.fill_(1.0)
        one.weight = torch.zeros(257, 1 + filler, dtype=torch.uint8)
        one.weight[1:, filler] = codes
        one.weight = one.weight.view(FP8)
        one.act.fill_(1.0)
        got, want = one.run().unnormed[0], codes.view(FP8).float()
        assert torch.equal(got.isnan(), want.isnan()) and int(want.isnan().sum()) == 2
        assert torch.equal(got.nan_to_num(1.0), want.nan_to_num(1.0))


@each_spec
def test_norm_matches_the_row_kernel_bit_for_bit(spec: GemvSpec) -> None:
    """The float32 workspace is normalized, special rows included."""
    for width in (1, 40, 1500):
        one = Case(spec, 5, width * len(spec.gammas) + 3, 33, *(width,) * len(spec.gammas), eps=0.0)
        one.act[1], one.act[2, 7], one.act[3, 32] = 0.0, NAN, INF
        one.run()
        for i, out in enumerate(one.normed):
            y, gamma = one.y[:, i * width : (i + 1) * width], one.gammas[i]
            fp8 = spec.fp8 if i == 0 else None
            norm = torch.empty(5, width, dtype=fp8.dtype if fp8 else spec.act)
            scale = torch.empty(5, 1) if fp8 else None
            row = row_spec(F32, gamma.dtype, None, None if fp8 else spec.act, "once")
            if fp8 is not None:
                rule = ScaleRule("row", F32)
                row = row_spec(F32, gamma.dtype, None, None, "once", "", (), fp8.dtype, fp8.max, rule)
            strides = [(t.stride(0), 0, 0) for t in (y, y, norm, norm, scale if fp8 and scale is not None else y)]
            outs = {"codes": norm, "scale": scale} if fp8 else {"norm": norm}
            call = RowCall(row, y, gamma, 0.0, 0.0, n=width, geom=Geometry(5, 1, 1), strides=strides)
            rms_norm.launch(call._replace(**outs))
            assert torch.equal(out.contiguous().view(torch.uint8), norm.view(torch.uint8))
            assert scale is None or torch.equal(one.scale.contiguous().view(torch.uint8), scale.view(torch.uint8))
            if fp8 is None:
                assert (out[1] == 0).all() and out[2:4].isnan().all() and not out[[0, 1, 4]].isnan().any()


def test_special_rows_of_codes() -> None:
    one = case("codes", 4, 100, 65, 40, 30, eps=0.0)
    one.act[1], one.act[2, 64] = 0.0, NAN
    one.run()
    codes = one.normed[0].view(torch.uint8)
    assert one.scale[1] == 0 and (codes[1] & 0x7F == 0).all()
    assert one.scale[2].isnan() and (codes[2] == 0x7F).all() and one.unnormed[2].isnan().all()
    assert (codes[[0, 3]] & 0x7F != 0x7F).all() and not one.unnormed[[0, 3]].isnan().any()


def test_a_bad_weight_affects_only_its_segment() -> None:
    for name, value in (("bf16", NAN), ("bf16", INF)):
        one = case(name, 3, 100, 50, 40, 30)
        one.weight[45, 49] = value
        one.run()
        assert not one.normed[0].isnan().any() and one.normed[1].isnan().all() and not one.unnormed.isnan().any()


# --- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "f32", "f16_fp8_tensor", "bf16_fp8_blocks", "f16_int8_rows", "codes"])
def test_a_row_gives_the_same_bytes_in_any_batch(name: str) -> None:
    whole = case(name, 16, 70, 1100, 41, 13).run()
    for m, first in [(1, row) for row in range(16)] + [(m, 1) for m in range(2, 16)]:
        part = case(name, 16, 70, 1100, 41, 13)
        part.act = part.act[first : first + m]
        part.outputs(m)
        part.run()
        for a, b in zip(part.bytes(), whole.bytes(), strict=True):
            assert torch.equal(a, b[first : first + m])


@pytest.mark.parametrize("name", ["bf16", "f16", "bf16_fp8_rows"])
def test_bytes_depend_on_neither_address_nor_tile(name: str) -> None:
    """Addresses, row strides, and the position of a column in y do not matter."""
    plain = case(name, 5, 90, 333, 90, 0)
    if len(plain.spec.gammas) == 2:
        plain = case(name, 5, 90, 333, 50, 40)
    plain.run()
    for shift, apart in ((1, 0), (3, 5), (17, 64)):
        moved = Case(plain.spec, 5, 90, 333, *plain.widths)
        for attribute in ("act", "weight"):
            old = getattr(moved, attribute)
            wide = torch.zeros(old.shape[0] * (old.shape[1] + apart) + shift, dtype=old.dtype)[shift:]
            view = wide.view(old.shape[0], -1)[:, : old.shape[1]]
            setattr(moved, attribute, view.copy_(old))
        assert same(moved.run(), plain)
    rolled = Case(plain.spec, 5, 90, 333, *plain.widths)
    rolled.weight = rolled.weight.view(torch.uint8).roll(11, 0).view(rolled.weight.dtype)
    if rolled.weight_scale is not None:
        rolled.weight_scale = rolled.weight_scale.roll(11)
    assert torch.equal(rolled.run().y.roll(-11, -1), plain.y)


@each_spec
def test_bytes_do_not_depend_on_threads(spec: GemvSpec, team: pytest.MonkeyPatch) -> None:
    def run(count: int) -> Case:
        torch.set_num_threads(count)
        return Case(spec, 3, 400, 700, *(130,) * len(spec.gammas)).run()

    one = run(1)
    assert same(one, run(2)) and same(one, run(3))
    team.setattr(threads, "_team", lambda: ("own", threads._own_team()))
    assert same(one, run(2))


@pytest.mark.sampled(3)  # each compiles two kernels
@pytest.mark.skipif("+avx2" not in compiler.host()[1], reason="runs code for an x86 CPU with AVX2")
@pytest.mark.parametrize("name", ["bf16", "bf16_fp8_rows", "f32_fp8_ue8m0", "f16_int8_rows"])
def test_other_instruction_sets_give_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[name]
    here = [case(name, m, 70, 600, 30, 29).run() for m in (1, 2, 3, 6, 8, 11, 16)]
    monkeypatch.setitem(gemv_norm.KERNELS.loaded, spec, kernel_for(gemv_norm.KERNELS, spec, "haswell"))
    assert all(same(one, Case(spec, len(one.act), 70, 600, *one.widths).run()) for one in here)


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
@pytest.mark.parametrize("name", ["bf16", "f16", "f32", "bf16_fp8_rows", "bf16_fp8_blocks", "f16_int8_rows"])
def test_no_reads_beyond_the_row(name: str) -> None:
    """Every input ends where an inaccessible page begins: reading one more byte would crash."""
    for m, n, k in ((1, 3, 1), (2, 25, 31), (5, 9, 145), (16, 137, 513)):
        one = case(name, m, n, k, 2, 1)
        one.act, one.weight = against_the_edge(one.act), against_the_edge(one.weight)
        one.gammas = [against_the_edge(gamma) for gamma in one.gammas]
        if one.weight_scale is not None:
            one.weight_scale = against_the_edge(one.weight_scale)
        one.run().check()


# --- threads and counters ------------------------------------------------------------------------------------------


def test_many_small_calls(team: pytest.MonkeyPatch) -> None:
    """Two threads race for the tiles of three segments, with the caller's counters or with the call's own."""
    spec = gemv_spec(BF16, BF16, "none", (BF16, BF16, BF16), None, False)
    first = Case(spec, 2, 7 * TILE, 40, 2 * TILE, 1, TILE + 1)
    first.run().check()
    again = Case(spec, 2, 7 * TILE, 40, 2 * TILE, 1, TILE + 1)
    counter = again.counter
    for i in range(400):
        again.counter = counter if i % 2 else None
        for out in (again.y, *again.normed, again.unnormed):
            out.fill_(NAN)
        again.run()
        assert same(first, again)


def test_blocks() -> None:
    spec = SPECS["bf16"]
    for n, widths in ((TILE, (1, 2)), (100, (60, 40)), (2112, (1536, 512))):
        assert trace_blocks(spec.act, spec.weight, 1, n, 8, widths) == sum(gemv.tiles(n, widths, TILE))
    assert [row_blocks(m) for m in (1, 2, 3, 5, 8, 9, 16)] == [
        (1, 1),
        (2, 1),
        (4, 1),
        (6, 1),
        (8, 1),
        (6, 2),
        (8, 2),
    ]


# --- times ---------------------------------------------------------------------------------------------------------


def test_trace(team: pytest.MonkeyPatch) -> None:
    widths = (3 * TILE + 1, 2 * TILE)
    for m in (1, 9):
        begin = time.monotonic_ns()
        one = Case(SPECS["traced"], m, 8 * TILE, 800, *widths).run()
        end = time.monotonic_ns()
        assert one.trace is not None and one.units is not None
        count = trace_blocks(one.spec.act, one.spec.weight, 1, one.n, one.k, widths)
        assert count == len(one.units) - 1 == 9
        assert ((one.units[:-1] >= 0) & (one.units[:-1] < 2)).all() and one.units[-1] == -1
        assert (one.trace[16 * count :] == -1).all()
        slots = one.trace[: 16 * count].view(count, 16)
        assert (slots[:, 10:] == -1).all()
        lasts = slots[:, 5] != -1
        segments = [slice(0, 4), slice(4, 6), slice(6, 9)]
        assert [int(lasts[s].sum()) for s in segments] == [1, 1, 0]
        for block, row in enumerate(slots.tolist()):
            written = [0, 1, 2, *([3, 4] if block < 6 else []), *([5, 6, 7, 8] if lasts[block] else []), 9]
            times = [row[slot] for slot in written]
            assert times == sorted(times) and begin <= times[0] and times[-1] <= end
            assert all(row[slot] == -1 for slot in range(10) if slot not in written)
        for segment in segments[:2]:
            last = int(slots[segment, 5].argmax())
            assert slots[segment, 4][last] >= slots[segment, 3].max()
        untraced = Case(SPECS["bf16"], m, 8 * TILE, 800, *widths).run()
        assert same(one, untraced)
        one.units = None
        one.run()


def test_untraced_code_has_no_clock() -> None:
    assert "clock_gettime" in launcher.ir_of(SPECS["traced"])
    assert "clock" not in launcher.ir_of(SPECS["bf16"])
    for name, clock in (("traced", True), ("bf16", False)):
        gemv_norm.KERNELS.kernel(SPECS[name])
        image = compiler.read_object(compiler.cache_file(SPECS[name]))
        assert image is not None and (b"clock_gettime" in image) is clock


# --- kernels on disk -----------------------------------------------------------------------------------------------


def test_kernels_are_cached_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["f32"]
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    names = {compiler.cache_file(spec) for spec in SPECS.values()}
    assert len(names) == len(SPECS)
    monkeypatch.delitem(gemv_norm.KERNELS.loaded, spec, raising=False)
    gemv_norm.KERNELS.kernel(spec)
    assert [*tmp_path.iterdir()] == [compiler.cache_file(spec)]

    def refuse(*_: Any) -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.delitem(gemv_norm.KERNELS.loaded, spec)
    monkeypatch.setattr(compiler, "compile_ir", refuse)
    case("f32", 2, 30, 40, 30).run().check()
