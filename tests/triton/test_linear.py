"""The kernels of `linear` without a GPU: configurations, machine code and order of summation."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from onepass.specs.gemv_norm import SCALE_BLOCK
from onepass.specs.linear import LinearSpec, linear_spec
from onepass.testing.runner import select
from onepass.triton import linear
from onepass.triton.chip import INTERPRETER, Chip
from onepass.triton.compiler import Build, compile_build
from onepass.triton.gemv_norm_config import gemv_config
from onepass.triton.linear_config import LinearConfig, fuses_norm, linear_config
from onepass.triton.product_config import GRAIN, PieceTile, order_of, piece_tile
from tests.helpers import linear_worker
from tests.triton.test_gemv_norm import BF16, F8, F16, F32, INT8, OTHER_CHIPS, check_stream
from tools.evidence import records
from tools.evidence.records import lowered

ROOT = Path(__file__).parents[2]
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
SHARED_MEMORY = 227 * 1024
"""Bytes that a program of an H200 may have."""


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
    """All kernels have the order of `gemv_and_partial_norm`, which documents state."""
    kernels: set[str] = set()
    for (m, n, k, aligned), config in configurations(spec, records.H200):
        tile = config.stream or config.product or config.pieces
        assert tile is not None
        order = order_of(spec.x, spec.weight, spec.weight_scale, n)
        other = gemv_config(spec.x, spec.weight, spec.weight_scale, m, n, k, (), aligned, records.H200).tile
        if isinstance(tile, PieceTile):
            kernels.add(tile.kind)
            assert isinstance(other, PieceTile) and tile.pieces == other.pieces
            assert order == (tile.pieces, 0) == (1 if n >= 7168 else 4, 0)
            continue
        kernels.add("tile" if config.stream is None else "stream")
        assert not isinstance(other, PieceTile)
        block = SCALE_BLOCK if spec.weight_scale.endswith("block") else 16 if spec.x == F32 else 64
        assert (tile.pieces, tile.block) == (4 if n >= 8192 and spec.x != F32 else 16, block)
        assert order == (tile.pieces, tile.block) == (other.pieces, other.block)
    if spec.x == F32:
        assert kernels == {"stream"}
    elif spec.weight.itemsize == 1:
        assert kernels == {"stream", "tile"}
    else:
        assert kernels == {"cube", "flat", "descriptors"}


def check_pieces(tile: PieceTile, k: int, aligned: bool) -> None:
    """What kernels assume about a tile of 16-bit weights."""
    for size in (tile.columns, tile.rows, tile.step, tile.warps):
        assert size & (size - 1) == 0
    assert tile.columns >= 16 and tile.rows >= 8 and tile.step >= 64
    length = -(-k // (tile.pieces * GRAIN)) * GRAIN
    assert tile.mask == (tile.pieces * length != k or length % tile.step != 0)
    if tile.kind != "cube":  # a step does not reach into the next piece
        assert tile.pieces == 1 or length % tile.step == 0
        held = tile.columns + tile.rows
    else:
        held = (tile.columns + tile.rows) * tile.pieces
    assert aligned or tile.kind != "descriptors"
    assert 2 * held * tile.step * (tile.stages if tile.kind == "descriptors" else tile.stages - 1) <= SHARED_MEMORY


@pytest.mark.parametrize("chip", OTHER_CHIPS, ids=lambda c: str(c.arch))
def test_chips_whose_sums_are_not_known_use_one_instruction(chip: Chip) -> None:
    """Batched products are never computed by warp groups or by tensor memory."""
    for m, n, k in itertools.product(ROWS, COLUMNS, LENGTHS):
        assert piece_tile(m, n, k, k % 16 == 0, chip, True).kind == "cube"


def bins_of(k: int) -> int:
    """The bins in which docs/numerics.md says that a row's squares are added."""
    return next(bins for most, bins in ((2048, 512), (8192, 2048), (65536, 4096)) if k <= most)


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_configurations_are_valid(spec: LinearSpec) -> None:
    for (m, _, k, aligned), (stream, stats, product, pieces) in configurations(spec, records.H200):
        assert [stream, product, pieces].count(None) == 2
        if pieces is not None:
            assert stats is None
            check_pieces(pieces, k, aligned)
        if stream is not None:
            check_stream(stream, m, k, spec.weight, aligned)
            # with an activation, a fragment has as many columns of either half
            parts = stream.pieces // stream.warps
            assert stream.columns % (2 * (8 // parts)) == 0
            assert (stats is not None) == (spec.gamma is not None or spec.residual is not None)
            if stats is not None:
                # the bytes of rms_norm; bins without columns add zeros
                assert stats.bins == bins_of(k) or k <= stats.bins <= bins_of(k)
                assert stats.rows >= m and stats.rows & (stats.rows - 1) == 0
        if product is not None:
            assert stats is None
            step = product.block * product.run
            assert product.mask == (k % (product.pieces * step if product.run > 1 else step) != 0)
            for size in (product.columns, product.rows):
                assert size & (size - 1) == 0 and size >= 16
            if spec.weight_scale.endswith("block"):
                assert product.run == 1 and product.weights_first, "a step has one scale"
            if spec.weight.itemsize == 1:
                assert product.weights_first, "decoded weights are in registers, an MMA's left side"
            assert product.warps in (1, 4, 8) and product.group >= 1
            held = step * (product.columns * spec.weight.itemsize + product.rows * spec.x.itemsize)
            assert product.stages >= 2 and product.stages * held <= SHARED_MEMORY


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
@pytest.mark.parametrize("chip", [records.H200, INTERPRETER, *OTHER_CHIPS], ids=lambda c: str(c.arch))
def test_programs_that_norm_have_all_rows(chip: Chip, spec: LinearSpec) -> None:
    """Only the kernel for few rows computes norms, of rows that are all in one tile."""
    fused = set()
    for (m, _, k, _), (stream, _, product, _) in configurations(spec, chip):
        if fuses_norm(spec, m, k, chip):
            fused.add(m)
            assert stream is not None and stream.rows >= m
            assert spec.weight.itemsize == 1 or k <= 2048
        if chip.arch != 90:  # whether its tensor cores' sums depend on the tile is not known
            assert product is None
    assert fused == (set() if spec.x != F32 and spec.weight.itemsize == 2 else {1, 2, 3, 4})


# --- machine code --------------------------------------------------------------------------------------------------

STREAMED: dict[str, tuple[LinearSpec, int, int, int, bool]] = {
    "fp8 rows": (linear_spec(BF16, F8, "row"), 1, 4096, 1024, True),
    "fp8 rows, 4 pieces": (linear_spec(BF16, F8, "row"), 1, 9008, 512, True),
    "fp8 rows, norm": (SPECS["fp8 rows"], 2, 4096, 1040, True),
    "fp8 blocks": (SPECS["fp8 blocks"], 1, 4096, 2048, True),
    "fp8 blocks, 16 rows, 4 pieces": (SPECS["fp8 blocks"], 16, 9008, 1024, True),
    "fp8 powers, gate": (SPECS["fp8 powers, gate"], 4, 4096, 2048, True),
    "int8, masked": (linear_spec(BF16, INT8, "row"), 1, 4096, 1040, True),
    "int8, residual": (SPECS["int8"], 4, 4096, 1024, True),
    "fp8 blocks, unaligned": (SPECS["fp8 blocks"], 1, 4096, 2001, False),
    "int8, unaligned": (linear_spec(F16, INT8, "row"), 16, 4096, 1001, False),
}


@pytest.mark.parametrize("name", STREAMED)
def test_columns_of_a_fragment_are_those_that_kernels_assume(name: str) -> None:
    """`fragments` numbers columns for an MMA that takes 4 neighbours of 8-bit weights at a time."""
    made = build(*STREAMED[name])
    text = lowered(made, records.H200, "ttgir")
    operands = re.findall(r"#ttg\.dot_op<\{opIdx = (\d), parent = #\w+, kWidth = (\d)\}>", text)
    assert {int(index) for index, _ in operands} == {0, 1}
    assert {int(width) for _, width in operands} == {4}
    assert "warp_group_dot" not in text


@pytest.mark.parametrize("name", [name for name, case in STREAMED.items() if case[-1]])
def test_aligned_weights_do_not_pass_through_shared_memory(name: str) -> None:
    """Lanes exchange them by shuffles. Barriers come before the products, for the norm, or after them."""
    spec = STREAMED[name][0]
    text = lowered(build(*STREAMED[name]), records.H200, "ptx")
    first, last = text.index("mma.sync"), text.rindex("mma.sync")
    shared = r"\b(bar\.sync|barrier\.sync|(ld|st)\.shared|(ld|st)matrix)\b"
    assert not re.search(shared, text[first:last])
    if spec.gamma is None and spec.residual is None:
        assert not re.search(shared, text[:first])
    assert "shfl.sync" in text[:last]
    assert re.search(r"ld\.global[\w:.]*\.v4\.[bu]32|ld\.global[\w:.]*\.v2\.b64", text), "16 bytes at a time"


def test_unaligned_weights_pass_through_shared_memory() -> None:
    """What the test above looks for is there if lanes do not exchange weights by shuffles."""
    text = lowered(build(*STREAMED["int8, unaligned"]), records.H200, "ptx")
    assert re.search(r"\bbar\.sync\b", text[text.index("mma.sync") : text.rindex("mma.sync")])


KINDS: dict[str, Callable[[Chip], Build]] = {
    "norm and gate": lambda chip: build(
        linear_spec(BF16, BF16, "none", BF16, F32, activation="silu_mul"), 1, 96, 1024, chip=chip
    ),
    "fp8 blocks, 40 rows": lambda chip: build(
        linear_spec(BF16, F8, "block", bias=F32, add=F32), 40, 96, 2048, chip=chip
    ),
    "int8, misaligned": lambda chip: build(linear_spec(F16, INT8, "row"), 8, 97, 1001, False, chip),
    "float32": lambda chip: build(linear_spec(F32, F32, bias=F32), 2, 96, 1024, chip=chip),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chip", OTHER_CHIPS, ids=lambda c: str(c.arch))
def test_compiles_for_other_chips(chip: Chip, kind: str) -> None:
    text = compile_build(KINDS[kind](chip), chip).asm["amdgcn" if chip.backend == "hip" else "ptx"]
    if chip.backend == "hip":  # its matrix cores have no 8-column product, so vector instructions are used
        assert re.search(r"v_(pk_)?fmac?_f32|v_dot2c_f32_f16", text)
    else:
        assert ("mma.sync.aligned.m16n8k16" in text) == (kind != "float32")
    assert ("griddepcontrol" in text) == chip.has_pdl


@pytest.mark.parametrize(
    ("spec", "m"),
    [(SPECS["bf16"], 1), (SPECS["bf16"], 64), (SPECS["bf16"], 300), (SPECS["fp8 blocks"], 64)],
    ids=lambda v: str(v) if isinstance(v, int) else "",
)
def test_tiles_use_asynchronous_loads_and_warp_groups(spec: LinearSpec, m: int) -> None:
    made = build(spec, m, 4096, 1024)
    text = lowered(made, records.H200, "ptx")
    copies = "cp.async.bulk.tensor.2d" if m == 300 else "cp.async.cg.shared.global"
    assert copies in text and not re.search(r"ld\.global[\w:.]*\.b16", text)
    assert ("wgmma.mma_async" in text) == (m > 1), "a batched product of few rows is one of warps"


# --- the interpreter -----------------------------------------------------------------------------------------------


def interpret(*command: str) -> Any:
    """What a process that interprets kernels prints as JSON."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_kernel_for_many_rows_agrees_with_float64(part: int) -> None:
    """It is for one chip, but forced here."""
    indices = list(range(part, len(linear_worker.CASES), 2))
    found = interpret("-m", "tests.helpers.linear_worker", json.dumps(indices))
    assert found["failed"] == []
    assert len(found["kernels"]) >= 2 * len(indices)
    kinds = {re.findall(r" (tile|cube|flat|descriptors) ", name)[0] for name in found["kernels"]}
    assert kinds == {"tile", "flat", "descriptors"}


def documented_sums(call: linear_worker.Sums) -> list[float]:
    """Each row's sum, of products of which one per block of K is not zero."""
    given = linear_worker.sparse(call)
    x, scale = given["x"].float(), given.get("weight_scale")
    block, pieces = call.block, 4 if call.wide else 16
    blocks = -(-x.shape[1] // block)
    if call.weight == BF16:  # neighbouring pieces; the interpreter adds a whole step at a time
        pieces = 1 if call.wide else 4
        length = -(-x.shape[1] // (64 * pieces)) * 64
        total = torch.zeros(x.shape[0])
        for piece in x.split(length, 1):
            own = torch.zeros(x.shape[0])
            for step in piece.split(block, 1):
                own = own + step.double().sum(1).float()  # one number and zeros
            total = total + own
        return [float(value) for value in total]
    if call.act == F32:  # elements of a piece have sums of their own, which are added as a tree
        padded = torch.zeros(x.shape[0], -(-blocks // pieces) * pieces * block)
        padded[:, : x.shape[1]] = x
        total = torch.zeros(x.shape[0], pieces, block)
        for stretch in padded.view(x.shape[0], -1, pieces, block).unbind(1):
            total = total + stretch
        for size in (4, 4):
            total = total.unflatten(-1, (-1, size))
            total = (total[..., 0] + total[..., 1]) + (total[..., 2] + total[..., 3])
        total = total.squeeze(-1).unflatten(-1, (4, 4)).transpose(1, 2)
        for _ in range(2):
            total = (total[..., 0] + total[..., 1]) + (total[..., 2] + total[..., 3])
        return [float(value) for value in total]
    total = torch.zeros(x.shape[0])
    for piece in range(pieces):
        own = torch.zeros(x.shape[0])
        for b in range(piece, blocks, pieces):
            partial = x[:, b * block : (b + 1) * block].double().sum(1).float()  # one number and zeros
            own = own + (partial * scale[0, b] if call.scaled == "block" and scale is not None else partial)
        total = total + own
    return [float(value) for value in total]


@pytest.mark.slow
def test_pieces_are_added_in_the_documented_order() -> None:
    found = interpret("-m", "tests.helpers.linear_worker")
    for name, call in zip(found["kernels"], linear_worker.SUMS, strict=True):
        assert (f" {call.kind} " if call.weight == BF16 else " tile " if call.tiled else " ") in name
        assert call.tiled or " tile " not in name
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


@pytest.mark.slow
def test_interpreted_kernel_passes_its_cases() -> None:
    """Cases of the groups that test_interpreter.py leaves out, and of others."""
    cases = select(["linear"], INTERPRETED)
    assert {case.group for case in cases} >= {"activation", "add", "bias", "layouts"} and len(cases) > 14
    program = (
        "import json, sys\n"
        "from onepass.testing.runner import run_cases, select\n"
        "cases = [case for case in select(['linear'], sys.argv[1]) if case.interpretable]\n"
        "print(json.dumps([f'{r.case}: {r.message}' for r in run_cases(cases, 'interpreter') if not r.passed]))\n"
    )
    assert interpret("-c", program, INTERPRETED) == []
