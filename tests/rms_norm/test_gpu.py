"""The GPU kernels without a GPU: compiled, compared with the GPU evidence, interpreted, inspected."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import get_args

import pytest
import torch

import onepass

pytest.importorskip("triton")

from onepass.formats import E4M3FN, QUANTIZED, ROUNDINGS, ScaleRule
from onepass.gpu import compile as compiler
from onepass.gpu.chip import INTERPRETER, Chip
from onepass.gpu.compile import Build
from onepass.gpu.tuning.table import Regime, Variant
from onepass.ops.rms_norm.gpu import build_for, variant_of
from onepass.ops.rms_norm.gpu_tile import RowConfig, row_bins, row_config, row_unit
from onepass.ops.rms_norm.launch import RowSpec, row_spec
from onepass.prologues import Operand, dequantize
from onepass.testing.rms_norm import soft_cap_gate
from tests import matrix
from tests.all_ops.test_interpreter import INTERPRETED
from tests.gpu.test_other_chips import OTHER_CHIPS
from tests.helpers.interpreting import passed_checks
from tests.oracle.batch_regime import others
from tests.oracle.case import Check
from tests.rms_norm.cases import CASES
from tools.evidence import families, proof, records
from tools.evidence.chips import MACHINES

ROOT = Path(__file__).parents[2]
EVIDENCE = MACHINES["h200"].evidence
BF16 = torch.bfloat16
SHARES = 2


@cache
def builds_of_cases() -> list[tuple[Check, list[Build]]]:
    """Every configuration of every case. Cached, because it creates the inputs of all cases."""
    return [(case, proof.builds(case, records.H200)) for case in matrix.select(device="cuda")]


@cache
def all_builds() -> list[Build]:
    """Every configuration that the cases or the published models need."""
    found = {build.name: build for _, builds in builds_of_cases() for build in builds}
    for builds in families.needed(records.H200).values():
        found |= builds
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("index", range(SHARES))
def test_every_kernel_passed_its_cases_on_a_gpu(index: int) -> None:
    """The machine code of each configuration is the one that passed its cases on the H200.

    Configurations whose source digest is in the evidence are not compiled. For the others the IR is
    compared, and compiled if it differs. Each test takes half of the configurations.
    """
    problems = records.missing(all_builds()[index::SHARES], records.read(EVIDENCE), records.H200)
    assert not problems, "\n".join([f"{len(problems)} configurations must run on a GPU (make gpu):", *problems])


@pytest.mark.full  # compiles 40 kernels; digests of all stay
@pytest.mark.slow
def test_sampled_kernels_compile_to_the_recorded_machine_code() -> None:
    """Compiles one configuration in a hundred, because the test above trusts source digests.

    The choice depends on the kernels' sources, so it changes whenever they do.
    """
    proofs = records.read(EVIDENCE)
    sources = b"".join(path.read_bytes() for path in sorted((ROOT / "src" / "onepass" / "triton").glob("*.py")))
    known = [build for build in all_builds() if build.name in proofs]
    order = sorted(known, key=lambda build: hashlib.sha256(sources + build.name.encode()).digest())
    for build in order[: -(-len(known) // 100)]:
        proven = proofs[build.name]
        found = records.prove(build, records.H200, proven.cases)
        assert (found.machine_code, found.stack) == (proven.machine_code, proven.stack), build.name
        if proven.source == found.source:
            assert found.ir == proven.ir, build.name


_DIVIDE = "rms_norm_row x=bf16 gamma=bf16 "
_LONG = "rms_norm_long x=bf16 gamma=bf16 e4m3fn:448/row:{} least bound 1x4096/16w/v8/r32"
SPILLING = {
    "rms_norm_row x=f16 gamma=f16 residual=f16 norm hf 4x2*256-/2w/v8": 8,
    _DIVIDE + "e4m3fn:448/row:f32 divide least hf 4*1024/4w/v8": 8,
    _DIVIDE + "e4m3fn:448/row:f32 divide least hf 4*2048/8w/v8": 8,
    _DIVIDE + "e4m3fn:448/row:f32 divide least bound hf 4*1024/4w/v8": 16,
    _DIVIDE + "norm e4m3fn:448/static:f32 divide 4*1024/4w/v8": 8,
    "rms_norm_row x=bf16 gamma=bf16 per row gate=bf16 norm 16x128-/2w/v8u levels=3": 96,
    **{_LONG.format(scale): 8 for scale in ("ue8m0:f32", "f16", "f32")},
    "linear x=bf16 weight=e4m3fn scale=row add=bf16 even decoded 256x128x64/8w/s4g8m p4": 56,
    "gemv act=bf16 weight=e4m3fn scale=row plain even 16x32/16w/dot/v16/7 d2a1p0": 72,
    "linear x=bf16 weight=e4m3fn scale=block silu_mul hf even cube 64x16x128/4w/s2g8ls p4": 8,
    **{f"attention x={x} mask=none columns={n} splits": 8 for x in ("bf16", "f16") for n in (80, 96)},
    **{f"latent_attention x={x} mask=many columns=512+64": 8 for x in ("bf16", "f16")},
}
"""Bytes of stack that these configurations use."""
CAPPED = 32
"""Bytes that a row kernel with capped registers may spill: the cap gains more than a few bytes cost."""
MISALIGNED = 3072
"""Bytes that a product of misaligned rows may spill: each element is loaded into a register of its own, and the number of
blocks in a trace must not depend on alignment."""


@pytest.mark.slow  # next to the test above, in whose process the configurations are known
def test_spills_stay_within_their_limits() -> None:
    """Stack sizes come from the evidence, which the tests above compare with this machine code."""
    proofs = records.read(EVIDENCE)
    assert set(SPILLING) <= {build.name for build in all_builds()}
    for build in all_builds():
        proven = proofs.get(build.name)
        if proven is None:
            continue  # the test above reports it
        limit = SPILLING.get(build.name, 0)
        if build.name.startswith("rms_norm_row") and build.registers > 0:
            limit = max(limit, CAPPED)
        elif build.name.startswith(("gemv", "linear")) and re.search(r"v\d+u/|g8m?u ", build.name):
            limit = MISALIGNED
        assert proven.stack is not None and proven.stack <= limit, build.name


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
@pytest.mark.slow
@pytest.mark.parametrize("family", ["rms_norm", "rms_norm_fused_fp8", "qk"])
def test_interpreted_kernels_pass_their_cases(family: str) -> None:
    ops = [op for op in INTERPRETED if op == family or (family in op and family == "qk")]
    cases = [case.op for case in matrix.select(ops) if case.interpretable]
    assert ops and all(cases.count(op) >= INTERPRETED[op] for op in ops)
    assert passed_checks(*ops) == len(cases)


def fp8_spec() -> RowSpec:
    return row_spec(BF16, BF16, None, None, "once", "", (), E4M3FN.dtype, E4M3FN.max, ScaleRule("row", torch.float32))


def norm_spec(residual: bool = False) -> RowSpec:
    return row_spec(BF16, BF16, BF16 if residual else None, BF16, "once")


def columns_per_thread(spec: RowSpec, config: RowConfig) -> int:
    """Adjacent columns per thread in the tile whose bins are summed."""
    text = records.lowered(build_for(spec, config, 1, True, records.H200), records.H200, "ttgir")
    (added,) = set(re.findall(rf"tt.reshape %\w+ : tensor<{config.rows}x{config.chunk}xf32, #(\w+)>", text))
    layout = re.search(rf"#{added} = #ttg.blocked<{{sizePerThread = \[1, (\d+)\]", text)
    assert layout is not None
    return int(layout[1])


def test_configurations_that_differ_have_different_names() -> None:
    """For every option of a row kernel's quantization and sum."""
    config = row_config(4096, 2, records.H200, "other", "large")
    builds: dict[str, Build] = {}
    flags = tuple(product((False, True), repeat=3))
    for flag, rounding, residual, round_sum in product(flags, ROUNDINGS, (None, BF16), (None, True, False)):
        divides, least, bound = flag
        rule = ScaleRule("row", torch.float32, divides=divides, has_least=least, bound_in_memory=bound)
        spec = row_spec(BF16, BF16, residual, None, rounding, "", (), E4M3FN.dtype, 448.0, rule, round_sum)
        build = build_for(spec, config, 1, True, records.H200)
        assert builds.setdefault(build.name, build) == build
    assert len(builds) == 8 * (2 + 4)


@pytest.mark.sampled(3)  # each lowers a kernel
@pytest.mark.parametrize("group", [0, 128])
def test_division_is_correctly_rounded(group: int) -> None:
    """Each value is divided by an IEEE 754 instruction; a reciprocal would need one division per scale.

    Scales of groups need none: `device.ratios` rounds as a division does.
    """
    config = row_config(4096, 2, records.H200, "group scales" if group else "other", "large")
    counts = []
    for divides in (False, True):
        rule = ScaleRule("group" if group else "row", torch.float32, group, divides=divides)
        spec = row_spec(BF16, BF16, None, None, "hf", "", (), E4M3FN.dtype, 448.0, rule)
        ptx = records.lowered(build_for(spec, config, 1, True, records.H200), records.H200, "ptx")
        assert not re.findall(r"div\.(?:full|approx)|rcp\.(?!approx\.ftz\.f64)", ptx)
        counts.append(len(re.findall(r"div\.rn\.f32", ptx)))
    values = config.chunk * config.count // (32 * config.warps)
    assert counts[1] == counts[0] - (0 if group else 1) + values


@pytest.mark.parametrize("n", [7168, 8192])
def test_wide_loads_and_stores(n: int) -> None:
    """Loads of 16 bytes and stores of the codes that they give; only the scale's store is narrower."""
    config = row_config(n, 2, records.H200, "row scale", "large")
    ptx = records.lowered(build_for(fp8_spec(), config, 1, True, records.H200), records.H200, "ptx")
    assert set(re.findall(r"(?:ld|st)\.global[.\w]*", ptx)) == {"ld.global.v4.b32", "st.global.v2.b32", "st.global.b32"}


def test_narrower_loads_avoid_a_partial_chunk() -> None:
    config = row_config(7168, 2, records.H200, "norm", "large")
    ptx = records.lowered(build_for(norm_spec(), config, 1, True, records.H200), records.H200, "ptx")
    assert config.whole and set(re.findall(r"(?:ld|st)\.global[.\w]*", ptx)) == {"ld.global.v2.b32", "st.global.v2.b32"}


@pytest.mark.sampled(4)  # each lowers a kernel
@pytest.mark.parametrize("prologue", ["", "soft_cap_gate"])
@pytest.mark.parametrize("regime", ["small", "large"])
@pytest.mark.parametrize(("n", "columns"), [(34, 2), (100, 4), (640, 8)])
def test_aligned_operands_do_not_widen_the_row_layout(n: int, columns: int, regime: Regime, prologue: str) -> None:
    """The alignment of rows sets the columns per thread, even if gamma or a prologue's operands are aligned better."""
    operands = (Operand("full", BF16), Operand("column", BF16), Operand("row", BF16)) if prologue else ()
    spec = row_spec(
        BF16, BF16, None, None, "once", soft_cap_gate.key if prologue else "", operands, E4M3FN.dtype, 448.0,
        ScaleRule("row", torch.float32),
    )  # fmt: skip
    config = row_config(n, 2, records.H200, variant_of(spec), regime)
    assert columns_per_thread(spec, config) == config.vec == columns


@pytest.mark.sampled(10)  # each lowers a kernel
@pytest.mark.parametrize("regime", ["small", "large"])
@pytest.mark.parametrize("x", [BF16, *QUANTIZED])
@pytest.mark.parametrize("n", [96, 640, 1536])
def test_group_operands_do_not_change_the_row_layout(n: int, x: torch.dtype, regime: Regime) -> None:
    """Loading them per column used to give each thread single columns, with a load and a store for each."""
    spec = row_spec(
        x, BF16, BF16, None, "once", dequantize.key, (Operand("group", torch.float32, 32),), E4M3FN.dtype, 448.0,
        ScaleRule("row", torch.float32),
    )  # fmt: skip
    config = row_config(n, spec.itemsize, records.H200, variant_of(spec), regime)
    assert columns_per_thread(spec, config) == config.vec > 1


@pytest.mark.sampled(10)  # each lowers a kernel
@pytest.mark.parametrize(
    "chip", [Chip("cuda", 80, 32), records.H200, Chip("cuda", 100, 32)], ids=lambda chip: str(chip.arch)
)
@pytest.mark.parametrize(
    ("n", "group", "x", "regime"),
    [
        (512, 128, BF16, "small"),
        (1536, 128, BF16, "small"),
        (4096, 64, BF16, "large"),
        (7168, 128, BF16, "small"),
        (7168, 128, BF16, "large"),
        (16384, 128, BF16, "large"),
        (7168, 128, torch.float32, "large"),
    ],
)
def test_group_occupies_adjacent_lanes(n: int, group: int, x: torch.dtype, regime: Regime, chip: Chip) -> None:
    """The premise of `store_groups_by_lane`: a row stays where its loads put it, VEC columns per lane in order.

    Only the last few sums of squares change their layout.
    """
    rule = ScaleRule("group", torch.float32, group)
    spec = row_spec(x, x, None, None, "once", codes=E4M3FN.dtype, fp8_max=448.0, scale=rule)
    config = row_config(n, x.itemsize, records.H200, variant_of(spec), regime)
    build = build_for(spec, config, 1, True, chip)
    text = records.lowered(build, chip, "ttgir")
    assert dict(build.constants)["TILE.lane_scales"] and "shfl.sync.bfly" in text
    moved = re.findall(r"ttg.convert_layout %\w+ : tensor<([\dx]+)xf32", text)
    assert text.count("ttg.convert_layout") == len(moved) == 1 and math.prod(map(int, moved[0].split("x"))) <= 16
    (loaded,) = set(re.findall(rf"tt.load .* : tensor<1x{config.chunk}x!tt.ptr<\w+>, #(\w+)>", text))
    lanes = rf"sizePerThread = \[1, {config.vec}\], threadsPerWarp = \[1, 32\], warpsPerCTA = \[1, {config.warps}\], order = \[1, 0\]"
    assert re.search(rf"#{loaded} = #ttg.blocked<{{{lanes}", text)
    assert config.vec * 32 % group == 0


def test_lane_scales_are_used_only_where_groups_fit() -> None:
    """Not on other backends, for rows that share a tile, loop or are masked, or with too many chunks per lane."""

    def spec_of(group: int) -> RowSpec:
        rule = ScaleRule("group", torch.float32, group)
        return row_spec(BF16, BF16, None, None, "once", codes=E4M3FN.dtype, fp8_max=448.0, scale=rule)

    def built(spec: RowSpec, config: RowConfig, chip: Chip, aligned: bool) -> object:
        return dict(build_for(spec, config, 1, aligned, chip).constants)["TILE.lane_scales"]

    def lane_scales(n: int, chip: Chip = records.H200, aligned: bool = True, group: int = 64) -> object:
        spec = spec_of(group)
        return built(spec, row_config(n, 2, chip, variant_of(spec), "large"), chip, aligned)

    assert all(lane_scales(n, group=group) for n in (1536, 2048, 4096, 16384) for group in (16, 32, 64, 128))
    assert not lane_scales(4096, aligned=False)
    assert not any(lane_scales(n) for n in (512, 1024, 4160, 16384 + 4096))
    assert not lane_scales(4096, Chip("hip", "gfx942", 64)) and not lane_scales(4096, INTERPRETER)
    tile = row_config(16384, 2, records.H200, "group scales", "large")
    few, many = (tile._replace(chunk=16384 // count, count=count, warps=1) for count in (16, 32))
    assert built(spec_of(16), few, records.H200, True) and not built(spec_of(16), many, records.H200, True)


@pytest.mark.slow
def test_builds_with_equal_names_are_equal() -> None:
    """For all cases, and for rows of many lengths in every regime."""
    found: dict[str, Build] = {}
    for build in chain(*(builds for _, builds in builds_of_cases()), _tiles()):
        assert found.setdefault(build.name, build) == build, build.name
    assert len(found) > 700


def _tiles() -> Iterator[Build]:
    """Builds of two ops for rows of up to 300 columns and for some longer ones."""
    for spec in (norm_spec(), fp8_spec()):
        for n in (*range(1, 300), *range(300, 20000, 173), *range(512, 20000, 512)):
            for regime in get_args(Regime):
                config = row_config(n, 2, records.H200, variant_of(spec), regime)
                for aligned in (True, False):
                    yield build_for(spec, config, 1, aligned, records.H200)


@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 100, 1000, 2049, 4097, 7168, 16384, 16385, 131072])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("warp_size", [32, 64])
def test_configurations_are_valid(n: int, itemsize: int, warp_size: int) -> None:
    chip = Chip("cuda", 90, 32) if warp_size == 32 else Chip("hip", "gfx942", 64)
    for variant, regime in product(get_args(Variant), get_args(Regime)):
        config = row_config(n, itemsize, chip, variant, regime)
        assert config.long or config.chunk * (config.count - 1) < n <= config.chunk * config.count
        assert (
            config.chunk & (config.chunk - 1) == 0
            and config.warps in (1, 2, 4, 8, 16, 32)
            and config.warps * warp_size <= 1024
        )
        assert config.vec * itemsize <= 16 and n % config.vec == 0 and config.unit % config.vec == 0
        assert config.unit == row_unit(n, itemsize), "alignment is computed before the variant is known"
        for vectors in (True, False):
            tile = config.laid_out(vectors, warp_size)
            assert config.bins == min(config.chunk * tile.sets, row_bins(n))
            assert config.chunk % tile.pieces == 0 and tile.pieces * tile.sets <= 16


def test_checks_cover_every_regime_with_a_different_tile() -> None:
    lengths = (128, 2048, 4096, 4097, 7168, 8192, 8193, 16384, 20480)
    for n, itemsize, variant in product(lengths, (2, 4), get_args(Variant)):
        if itemsize == 4 and variant not in ("other", "prologue"):
            continue
        streaming = row_config(n, itemsize, records.H200, variant, "streaming")
        large = row_config(n, itemsize, records.H200, variant, "large")
        assert streaming == large or "streaming" in others(1, n * itemsize)
    assert row_config(7168, 2, records.H200, "norm", "streaming") != row_config(7168, 2, records.H200, "norm", "large")


class TestEvidence:
    def test_changed_machine_code_is_reported(self) -> None:
        build = build_for(norm_spec(), row_config(512, 2, records.H200, "norm", "large"), 1, True, records.H200)
        proofs = {build.name: records.Proof("0" * 24, ("a case",))}
        assert records.missing([build], proofs, records.H200) == [
            f"{build.name}: its machine code has changed since it ran on a GPU"
        ]
        assert records.missing([build], {}, records.H200) == [f"{build.name}: never run on a GPU"]
        proven = records.prove(build, records.H200, ())
        assert proven.machine_code == records.compiled_hash(build, records.H200) and proven.stack == 0
        for ir in (None, "0" * 24):  # unknown, or from another source with the same machine code
            assert not records.missing([build], {build.name: replace(proven, ir=ir, source=None)}, records.H200)

    def test_proven_ir_is_not_compiled_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        build = build_for(norm_spec(), row_config(512, 2, records.H200, "norm", "large"), 1, True, records.H200)
        proofs = {build.name: records.Proof("0" * 24, (), records.ir_hash(build, records.H200))}
        monkeypatch.setattr(records, "compile_build", None)
        assert not records.missing([build], proofs, records.H200)

    def test_ir_hash_depends_on_every_compiler_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = row_config(1536, 2, records.H200, "norm", "large")
        build = build_for(norm_spec(), config, 1, True, records.H200)
        others = [
            build_for(norm_spec(residual=True), config, 1, True, records.H200),
            build_for(norm_spec(), config, 1, False, records.H200),
            replace(build, divisible=()),
            replace(build, warps=2 * build.warps),
            replace(build, pdl=not build.pdl),
            replace(build, registers=128),
            replace(build, contracts=not build.contracts),
        ]
        found = [records.ir_hash(b, records.H200) for b in (build, *others)]
        found += [records.ir_hash(build, chip) for chip in OTHER_CHIPS]
        assert records.ir_hash(replace(build, name="other"), records.H200) == found[0]
        monkeypatch.setattr("triton.__version__", "0")
        found.append(records.ir_hash(build, records.H200))
        assert len(set(found)) == len(found) == 1 + len(others) + len(OTHER_CHIPS) + 1

    def test_refresh_updates_only_proven_entries(self, tmp_path: Path) -> None:
        cases = [case for case in CASES if case.group == "short" and case.n in (1, 512)][:2]
        builds = list(proof.distinct_builds(cases, records.H200).values())[:2]
        right, wrong = (records.prove(build, records.H200, ("a case",)) for build in builds)
        wrong = replace(wrong, machine_code="0" * 24, ir=None)
        file = tmp_path / "evidence.json"
        old = {builds[0].name: replace(right, ir="0", stack=None), builds[1].name: wrong, "gone": wrong}
        records.write(file, {"gpu": "one"}, old)
        assert proof.refresh(file, cases, records.H200).startswith("1 configurations")
        assert records.read(file) == {**old, builds[0].name: right}
        assert '"gpu": "one"' in file.read_text()

    def test_unproven_kernels_run_only_on_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        build = build_for(norm_spec(), row_config(512, 2, records.H200, "norm", "large"), 1, True, records.H200)
        assert not compiler.is_unproven(build)
        monkeypatch.setattr(compiler, "UNPROVEN", ("rms_norm_row x=bf16",))
        assert records.missing([build], {}, records.H200) == []
        with pytest.raises(onepass.Unsupported, match="has not run on a GPU yet; ONEPASS_UNPROVEN=1"):
            compiler.Launcher(build, 0)

    def test_round_trip_and_format(self, tmp_path: Path) -> None:
        proofs = {"b": records.Proof("1", ("y", "x"), "i", 8), "a": records.Proof("2", ())}
        records.write(tmp_path / "e.json", {"gpu": "none"}, proofs)
        assert records.read(tmp_path / "e.json") == {
            "a": records.Proof("2", ()),
            "b": records.Proof("1", ("x", "y"), "i", 8),
        }
        (tmp_path / "e.json").write_text('{"format": 0}')
        with pytest.raises(ValueError, match="evidence format 0"):
            records.read(tmp_path / "e.json")

    @pytest.mark.slow
    def test_every_case_has_a_configuration(self) -> None:
        for case, builds in builds_of_cases():
            assert bool(builds) == (case.group != "empty"), case.name
