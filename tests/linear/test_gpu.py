"""The kernels of `linear` without a GPU: configurations, machine code and order of summation."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from onepass.formats import SCALE_BLOCK, WeightScale
from onepass.gpu.chip import INTERPRETER, Chip
from onepass.gpu.compile import Build, compile_build
from onepass.gpu.product_tile import PieceTile, StreamTile, order_of, piece_tile
from onepass.ops.gemv_norm.gpu_tile import FragmentTile, gemv_config
from onepass.ops.linear import gpu as linear
from onepass.ops.linear.gpu_tile import LinearConfig, fuses_norm, linear_config
from onepass.ops.linear.launch import LinearSpec, linear_spec
from tests.gemv_norm.test_gpu import BF16, F8, F16, F32, INT8, OTHER_CHIPS, check_stream
from tests.helpers.interpreting import interpret
from tests.linear import interpreter_worker as linear_worker
from tests.matrix import select
from tools.evidence import records
from tools.evidence.records import lowered

SPECS = {
    "bf16": linear_spec(BF16, BF16),
    "f16, norm, gate": linear_spec(F16, F16, "none", F16, activation="silu_mul"),
    "f32, norm, gate": linear_spec(F32, F32, "none", F32, F32, activation="gelu_mul"),
    "f32, fp8": linear_spec(F32, F8, "block"),
    "fp8 rows": linear_spec(BF16, F8, "row", BF16, F32),
    "fp8 blocks": linear_spec(BF16, F8, "block"),
    "fp8 powers, gate": linear_spec(F16, F8, "ue8m0_block", activation="silu_mul"),
    "int8": linear_spec(BF16, INT8, "row", residual=BF16),
}
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, "gfx942": 64 * 1024}
"""Bytes that a program of a chip may have."""


def build(spec: LinearSpec, m: int, n: int, k: int, aligned: bool = True, chip: Chip = records.H200) -> Build:
    return linear.build_for(spec, linear_config(spec, m, n, k, aligned, chip), aligned, n % 16 == 0, False, chip)


# --- configurations ------------------------------------------------------------------------------------------------

ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 5000)
COLUMNS = (2, 40, 2112, 2642, 4096, 6144, 7168, 8190, 8192, 36864)
LENGTHS = (1, 17, 127, 128, 200, 1000, 1024, 2048, 4096, 7168, 18432, 40000)


def configurations(spec: LinearSpec, chip: Chip) -> Iterator[tuple[tuple[int, int, int, bool], LinearConfig]]:
    """(m, n, k, aligned) of many calls, each with its configuration."""
    for m, n, k in itertools.product(ROWS, COLUMNS, LENGTHS):
        for aligned in (True, False) if k % 16 == 0 else (False,):
            yield (m, n, k, aligned), linear_config(spec, m, n, k, aligned, chip)


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_order_of_summation_depends_on_dtypes_scale_and_columns(spec: LinearSpec) -> None:
    """Float32 x has the order of `gemv_and_partial_norm`, too."""
    kernels: set[str] = set()
    blocks = spec.weight_scale.endswith("block")
    for (m, n, k, aligned), config in configurations(spec, records.H200):
        tile = config.stream or config.pieces
        order = order_of(spec.x, spec.weight, spec.weight_scale, n)
        other = gemv_config(spec.x, spec.weight, spec.weight_scale, m, n, k, (), aligned, records.H200).tile
        if isinstance(tile, PieceTile):
            kernels.add(tile.kind)
            few, many = (8 if n <= 2640 else 4, 4) if spec.weight.itemsize == 1 else (4, 1)
            pieces = many if n >= 7168 else few
            assert order == (tile.pieces, 0, tile.grain) == (pieces, 0, SCALE_BLOCK if blocks else 64)
            assert isinstance(other, FragmentTile)
        else:
            kernels.add("stream")
            assert tile is not None and isinstance(other, StreamTile)
            assert order == (tile.pieces, tile.block, 0) == (other.pieces, other.block, 0)
            assert order == (16, SCALE_BLOCK if blocks else 16, 0)
    if spec.x == F32:
        assert kernels == {"stream"}
    elif spec.weight.itemsize == 1:
        assert kernels == {"cube", "flat", "decoded"}
    else:
        assert kernels == {"cube", "flat", "descriptors", "split"}


@pytest.mark.parametrize(("weight", "scaled"), [(BF16, "none"), (INT8, "row"), (F8, "block")], ids=str)
@pytest.mark.parametrize("chip", [INTERPRETER, *OTHER_CHIPS], ids=lambda c: str(c.arch))
def test_chips_whose_sums_are_not_known_use_one_instruction(
    chip: Chip, weight: torch.dtype, scaled: WeightScale
) -> None:
    """Batched products are never computed by warp groups or by tensor memory. Their order is that of an H200."""
    for m, n, k in itertools.product(ROWS, COLUMNS, LENGTHS):
        for aligned in {False, k % 16 == 0}:
            tile = piece_tile(weight, scaled, m, n, k, aligned, chip, True)
            assert tile.kind == "cube" and tile.pieces == order_of(BF16, weight, scaled, n).pieces
            check_pieces(tile, weight, scaled, k, aligned)


def check_pieces(tile: PieceTile, weight: torch.dtype, scaled: WeightScale, k: int, aligned: bool) -> None:
    """What kernels assume about a tile of 16-bit x."""
    for size in (tile.columns, tile.rows, tile.step, tile.warps):
        assert size & (size - 1) == 0
    assert tile.columns >= 16 and tile.rows >= 8 and tile.step >= 64 and tile.stages >= 2
    assert tile.grain == (SCALE_BLOCK if scaled.endswith("block") else 64) and tile.aligned == aligned
    length = -(-k // (tile.pieces * tile.grain)) * tile.grain
    assert tile.mask == (tile.pieces * length != k or length % tile.step != 0)
    if tile.kind != "cube":  # a step does not reach into the next piece
        assert tile.pieces == 1 or length % tile.step == 0
    copied = tile.kind not in ("cube", "flat")
    assert aligned or not copied
    if tile.kind == "decoded":
        assert weight.itemsize == 1 and (not scaled.endswith("block") or tile.step == SCALE_BLOCK)
    elif weight.itemsize == 1:
        assert not copied and tile.weights_first, "decoded weights are a product's left side"
        assert tile.kind != "cube" or tile.warps == tile.pieces, "a warp has its fragments of one piece"
        assert not scaled.endswith("block") or tile.step == SCALE_BLOCK, "a step has one scale, a scale one step"
    together = tile.pieces if tile.kind == "cube" else 1
    size = 2 if tile.kind == "decoded" else weight.itemsize
    held = together * tile.step * (tile.columns * size + tile.rows * 2)
    stages = tile.stages - (not copied)
    assert held * stages <= SHARED_MEMORY[90]


def bins_of(k: int) -> int:
    """The bins in which docs/numerics.md says that a row's squares are added."""
    return next(bins for most, bins in ((2048, 512), (8192, 2048), (65536, 4096)) if k <= most)


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_configurations_are_valid(spec: LinearSpec) -> None:
    for (m, _, k, aligned), (stream, stats, pieces) in configurations(spec, records.H200):
        assert (stream is None) != (pieces is None)
        if pieces is not None:
            assert stats is None
            check_pieces(pieces, spec.weight, spec.weight_scale, k, aligned)
        if stream is not None:
            check_stream(stream, m, k, aligned)
            # with an activation, a tile has as many columns of either half
            parts = stream.pieces // stream.warps
            assert stream.columns % (2 * (8 // parts)) == 0
            assert (stats is not None) == (spec.gamma is not None or spec.residual is not None)
            if stats is not None:
                # the bytes of rms_norm; bins without columns add zeros
                assert stats.bins == bins_of(k) or k <= stats.bins <= bins_of(k)
                assert stats.rows >= m and stats.rows & (stats.rows - 1) == 0


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
@pytest.mark.parametrize("chip", [records.H200, INTERPRETER, *OTHER_CHIPS], ids=lambda c: str(c.arch))
def test_programs_that_norm_have_all_rows(chip: Chip, spec: LinearSpec) -> None:
    """Only the kernel for float32 x computes norms, of rows that are all in one tile."""
    fused = set()
    for (m, _, k, _), (stream, _, _) in configurations(spec, chip):
        if fuses_norm(spec, m, k, chip):
            fused.add(m)
            assert stream is not None and stream.rows >= m and k <= 2048
    assert fused == ({1, 2, 3, 4} if spec.x == F32 else set())


# --- machine code --------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Chip], Build]] = {
    "norm and gate": lambda chip: build(
        linear_spec(BF16, BF16, "none", BF16, F32, activation="silu_mul"), 1, 96, 1024, chip=chip
    ),
    "fp8 blocks, 100 rows": lambda chip: build(
        linear_spec(BF16, F8, "block", bias=F32, add=F32), 100, 96, 2048, chip=chip
    ),
    "fp8": lambda chip: build(linear_spec(BF16, F8), 1, 4096, 4096, chip=chip),
    "int8, misaligned": lambda chip: build(linear_spec(F16, INT8, "row"), 8, 97, 1001, False, chip),
    "float32": lambda chip: build(linear_spec(F32, F32, bias=F32), 2, 96, 1024, chip=chip),
}


@pytest.mark.sampled(6)  # each compiles a kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chip", OTHER_CHIPS, ids=lambda c: str(c.arch))
def test_compiles_for_other_chips(chip: Chip, kind: str) -> None:
    compiled = compile_build(KINDS[kind](chip), chip)
    assert compiled.metadata.shared <= SHARED_MEMORY[chip.arch]
    text = compiled.asm["amdgcn" if chip.backend == "hip" else "ptx"]
    if chip.backend == "hip":  # its matrix cores have no 8-column product, so vector instructions are used
        assert re.search(r"v_(pk_)?fmac?_f32|v_dot2c_f32_f16", text)
    else:
        assert ("mma.sync.aligned.m16n8k16" in text) == (kind != "float32")
    assert ("griddepcontrol" in text) == chip.has_pdl


@pytest.mark.sampled(4)  # each compiles a kernel
@pytest.mark.parametrize(
    ("spec", "m", "n"),
    [
        (SPECS["bf16"], 1, 4096),
        (SPECS["bf16"], 64, 4096),
        (SPECS["bf16"], 300, 4096),
        (SPECS["fp8 blocks"], 1, 4096),
        (SPECS["fp8 blocks"], 64, 8192),
    ],
    ids=lambda v: str(v) if isinstance(v, int) else "",
)
def test_tiles_use_asynchronous_loads_and_warp_groups(spec: LinearSpec, m: int, n: int) -> None:
    made = build(spec, m, n, 1024)
    text = lowered(made, records.H200, "ptx")
    copies = "cp.async.bulk.tensor.2d" if m == 300 else "cp.async.cg.shared.global"
    assert copies in text and not re.search(r"ld\.global[\w:.]*\.b16", text)
    assert ("wgmma.mma_async" in text) == (m > 1), "a batched product of few rows is one of warps"


@pytest.mark.parametrize(
    ("weight", "scaled", "m", "n"),
    [(BF16, "none", 1, 4096), (BF16, "none", 16, 9216), (F8, "row", 16, 4096), (F8, "block", 8, 6144)],
    ids=str,
)
def test_only_the_first_static_weights_are_requested_before_the_wait(
    weight: torch.dtype, scaled: WeightScale, m: int, n: int
) -> None:
    """x and what is added to the result are loaded after it."""
    spec = linear_spec(BF16, weight, scaled, add=BF16, rounding="hf")
    static = build(replace(spec, static=True), m, n, 4096)
    tile = dict(static.constants)
    early, late = (
        lowered(made, records.H200, "ptx").split("griddepcontrol.wait", 1) for made in (static, build(spec, m, n, 4096))
    )
    step = tile["TILE.columns"] * tile["TILE.step"] * weight.itemsize
    step *= tile["TILE.pieces"] if tile["TILE.kind"] == "cube" else 1
    assert early[0].count("cp.async.cg.shared.global") == step // (16 * 32 * static.warps) > 0
    assert "cp.async" not in late[0] and "ld.global" not in early[0] + late[0]
    assert re.search(r"ld\.global", early[1].rpartition("griddepcontrol.wait")[2]), "the addition"


@pytest.mark.parametrize(("weight", "scaled"), [(BF16, "none"), (INT8, "row"), (F8, "block")], ids=str)
def test_static_weights_change_tiles_of_few_aligned_rows_only(weight: torch.dtype, scaled: WeightScale) -> None:
    for m, n, k in itertools.product(ROWS, COLUMNS, LENGTHS):
        for aligned in {False, k % 16 == 0}:
            sizes = (weight, scaled, m, n, k, aligned)
            tile = piece_tile(*sizes, records.H200, True, static=True)
            assert tile.static == (m <= 16 and aligned)
            check_pieces(tile, weight, scaled, k, aligned)
            if not tile.static:
                assert tile == piece_tile(*sizes, records.H200, True)
            for chip in (INTERPRETER, *OTHER_CHIPS):
                assert piece_tile(*sizes, chip, True, static=True).static == (tile.static and chip.has_pdl)


# --- the interpreter -----------------------------------------------------------------------------------------------


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
@pytest.mark.slow
def test_tiles_agree_with_float64() -> None:
    """Each kind of tile, with the columns that an H200 would load, where the interpreter would choose other tiles."""
    found = json.loads(interpret("-m", "tests.linear.interpreter_worker", "cases"))
    assert found["failed"] == []
    for run, kernels in zip(linear_worker.RUNS, found["kernels"], strict=True):
        kinds = [re.findall(r" (cube|flat|descriptors|split|decoded) ", name) for name in kernels]
        assert kinds and all(kind == [run.kind] for kind in kinds), (run, kernels)


def documented_sums(call: linear_worker.Sums) -> list[float]:
    """Each row's sum, of products of which one per block of K is not zero."""
    given = linear_worker.sparse(call)
    x, scale = given["x"].float(), given.get("weight_scale")
    block, rows = call.block, x.shape[0]
    if call.act == F32:  # elements of a piece have sums of their own, which are added as a tree
        pieces = 16
        padded = torch.zeros(rows, -(-x.shape[1] // (pieces * block)) * pieces * block)
        padded[:, : x.shape[1]] = x
        total = torch.zeros(rows, pieces, block)
        for stretch in padded.view(rows, -1, pieces, block).unbind(1):
            total = total + stretch
        for size in (4, 4):
            total = total.unflatten(-1, (-1, size))
            total = (total[..., 0] + total[..., 1]) + (total[..., 2] + total[..., 3])
        total = total.squeeze(-1).unflatten(-1, (4, 4)).transpose(1, 2)
        for _ in range(2):
            total = (total[..., 0] + total[..., 1]) + (total[..., 2] + total[..., 3])
        return [float(value) for value in total]
    # neighbouring pieces; the interpreter adds a whole step at a time
    pieces = 8 if call.weight in (F8, INT8) else 1 if call.wide else 4
    length = -(-x.shape[1] // (block * pieces)) * block
    total = torch.zeros(rows)
    for piece in range(pieces):
        own = torch.zeros(rows)
        for first in range(piece * length, min((piece + 1) * length, x.shape[1]), block):
            partial = x[:, first : min(first + block, (piece + 1) * length)].double().sum(1)  # one number and zeros
            if call.scaled == "block" and scale is not None:  # a power of two
                partial = partial * scale[0, first // block]
            own = own + partial.float()
        total = total + own
    return [float(value) for value in total]


@pytest.mark.slow
def test_pieces_are_added_in_the_documented_order() -> None:
    found = json.loads(interpret("-m", "tests.linear.interpreter_worker", "sums"))
    for name, call in zip(found["kernels"], linear_worker.SUMS, strict=True):
        assert ("/products/" if call.act == F32 else f" {call.kind} ") in name
    for call, sums in zip(linear_worker.SUMS, found["sums"], strict=True):
        expected = documented_sums(call)
        assert sums == [[value] * 2 for value in expected], call
        x, scale = linear_worker.sparse(call)["x"].float(), linear_worker.sparse(call).get("weight_scale")
        if call.scaled == "block" and scale is not None:
            x = x * scale.repeat_interleave(call.block, 1)[:, : x.shape[1]]
        other = torch.zeros(x.shape[0])
        # one piece is added in the order of columns
        for column in reversed(x.unbind(1)) if call.weight == BF16 and call.wide else x.unbind(1):
            other = other + column
        assert other.tolist() != expected, "sums that do not depend on their order"


INTERPRETED = "|".join(
    (
        "activation: 5x46x96 bf16",
        "activation: 5x46x96 f32 bias=f32 activation=silu",
        "activation: 4x384x160 bf16 weight=f8_e4m3fn scale=row",
        "activation: 1x40x256",
        "add: 1x40x96 bf16 add=bf16",
        "bias: 2x72x96",
        "layouts: 2x140",
        "norm: 5x40x321",
        "rows: 33x48x160",
    )
)


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
@pytest.mark.slow
def test_interpreted_kernel_passes_its_cases() -> None:
    """Cases of the groups that test_interpreter.py leaves out, and of others."""
    cases = select(["linear"], INTERPRETED)
    assert {case.group for case in cases} >= {"activation", "add", "bias", "layouts"} and len(cases) > 14
    program = (
        "import json, sys\n"
        "from tests.oracle.runner import run_cases\nfrom tests.matrix import select\n"
        "cases = [case for case in select(['linear'], sys.argv[1]) if case.interpretable]\n"
        "print(json.dumps([f'{r.case}: {r.message}' for r in run_cases(cases, 'interpreter') if not r.passed]))\n"
    )
    assert json.loads(interpret("-c", program, INTERPRETED)) == []
