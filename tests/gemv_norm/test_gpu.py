"""The GEMV kernel without a GPU: its machine code, configurations and order of summation."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import onepass
from onepass.formats import SCALE_BLOCK, WeightScale
from onepass.gpu import product_tile as product_config
from onepass.gpu.chip import Chip, tuning
from onepass.gpu.compile import Build, compile_build
from onepass.gpu.lib import arrivals, gemv_stream, product
from onepass.gpu.product_tile import StreamTile
from onepass.ops.gemv_norm import gpu as gemv_norm
from onepass.ops.gemv_norm import gpu_kernel as gemv_norm_kernels
from onepass.ops.gemv_norm import gpu_tile as gemv_norm_config
from onepass.ops.gemv_norm.gpu_tile import FragmentTile, GemvConfig, NormTile, gemv_config
from onepass.ops.gemv_norm.launch import MAX_ROWS, MOST_COLUMNS, GemvSpec, gemv_spec, programs, tiles
from tests.helpers.interpreting import passed_checks
from tests.matrix import select
from tools.evidence import records
from tools.evidence.records import lowered

ROOT = Path(__file__).parents[2]
OTHER_CHIPS = [Chip("cuda", 80, 32), Chip("cuda", 100, 32), Chip("hip", "gfx942", 64)]
BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
INT8 = torch.int8
KINDS_OF_PRODUCT: list[tuple[torch.dtype, torch.dtype, WeightScale]] = [
    (BF16, BF16, "none"),
    (F16, F16, "row"),
    (F32, F32, "none"),
    (BF16, F8, "row"),
    (F16, F8, "block"),
    (F32, F8, "ue8m0_block"),
    (BF16, INT8, "tensor"),
]


def plain_spec(gammas: int = 1, traced: bool = False) -> GemvSpec:
    return gemv_spec(BF16, BF16, "none", (BF16,) * gammas, None, traced)


def build(
    spec: GemvSpec, m: int, n: int, k: int, widths: tuple[int, ...], chip: Chip = records.H200, aligned: bool = True
) -> Build:
    config = gemv_config(spec.act, spec.weight, spec.weight_scale, m, n, k, widths, aligned, chip)
    return gemv_norm.build_for(spec, config, aligned, not any(w % 16 for w in widths), chip)


# --- traces --------------------------------------------------------------------------------------------------------


def without_traces(source: str) -> str:
    """The kernels' source without trace statements and without blocks under ``if TRACED``."""
    kept: list[str] = []
    block: int | None = None
    for line in source.splitlines():
        indent = len(line) - len(line.lstrip())
        if block is not None and (not line.strip() or indent > block):
            continue
        block = indent if line.strip() == "if TRACED:" else None
        if block is None and not re.match(r"\s*(stamp|name_unit)\(.*\)$|from \.device\.trace import", line):
            kept.append(line)
    return "\n".join(kept) + "\n"


@pytest.fixture
def untraceable(tmp_path: Path) -> Any:
    """The kernel compiled from a source without trace statements."""
    source = Path(gemv_norm_kernels.__file__).read_text()
    bare = without_traces(source)
    assert source.count("\n") - bare.count("\n") > 12
    assert not re.search(r"stamp\(|name_unit\(|if TRACED|device\.trace\b", bare)
    file = tmp_path / "_gemv_without_trace.py"
    file.write_text(bare)
    spec = importlib.util.spec_from_file_location("onepass.ops.gemv_norm._gemv_without_trace", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._gemv_partial_norm_kernel


@pytest.mark.full  # each compiles two kernels
@pytest.mark.parametrize(
    ("m", "n", "k", "widths"), [(1, 2112, 7168, (1536,)), (2, 100, 640, (40, 30))], ids=["decode", "two segments"]
)
def test_untraced_kernel_has_no_trace_code(m: int, n: int, k: int, widths: tuple[int, ...], untraceable: Any) -> None:
    """Its PTX equals that of a source without trace statements and reads no clock."""
    shipped = build(plain_spec(len(widths)), m, n, k, widths)
    bare = replace(shipped, kernel=untraceable)
    texts = [lowered(b, records.H200, "ptx") for b in (shipped, bare)]
    assert texts[0] == texts[1]
    assert "globaltimer" not in texts[0] and "smid" not in texts[0]
    traced = lowered(build(plain_spec(len(widths), True), m, n, k, widths), records.H200, "ptx")
    # six in every block, two around the norms, and two in the norm of each segment
    assert traced.count("globaltimer") == 8 + 2 * len(widths) and "smid" in traced


# --- configurations ------------------------------------------------------------------------------------------------

WIDTHS: list[tuple[int, ...]] = [(), (1,), (512,), (513, 3), (1536, 512), (4096,), (4097,), (9000, 1, 1, 1)]


def chunks_of(norm: NormTile) -> list[int]:
    """The chunks of each segment that a program holds, whole tiles of them."""
    return [count * norm.side for count in norm.tiles]


def configurations(kind: tuple[Any, Any, WeightScale], widths: tuple[int, ...]) -> list[tuple[Any, GemvConfig]]:
    """(m, n, k, aligned) of many calls, each with its configuration."""
    found = []
    lengths = (1, 33, 255, 256, 1001, 2048, 2560, 4096, 7168, 16384, 28672, 40000)
    for m, tail, k in itertools.product((*range(1, 17), 17, 40, 1000), (0, 5, 64, 2112, 9000), lengths):
        for aligned in (True, False) if k % 16 == 0 else (False,):
            n = sum(widths) + tail or 1
            found.append(((m, n, k, aligned), gemv_config(*kind, m, n, k, widths, aligned, records.H200)))
    return found


@pytest.mark.sampled(4)  # some configurations stay
@pytest.mark.parametrize("kind", KINDS_OF_PRODUCT, ids=str)
def test_settings_that_affect_bits_do_not_depend_on_rows(kind: tuple[Any, Any, WeightScale]) -> None:
    """Pieces and blocks depend on the dtypes and the kind of scale, whether a norm reads twice on its width."""
    act, weight, scaled = kind
    decided: dict[int, set[tuple[int, ...]]] = {}
    for widths in WIDTHS:
        calls = configurations(kind, widths)
        for (_, n, _, _), (tile, _) in calls:
            match tile:
                case FragmentTile():
                    order: tuple[int, ...] = (tile.vec,)
                case StreamTile():
                    order = (tile.pieces, tile.block, tile.vec)
            decided.setdefault(n, set()).add(order)
        assert len({norm.longs for _, (_, norm) in calls}) == 1
        assert len({config for _, config in calls}) > 4, "the other settings depend on sizes"
    blocks = scaled.endswith("block")
    for settings in decided.values():
        (decision,) = settings
        if act == F32:
            assert decision == (16, SCALE_BLOCK if blocks else 16, 4)
        else:
            assert decision == (16 // weight.itemsize,)
    assert any(n >= 8192 for n in decided) and any(n < 7168 for n in decided)


def test_kernel_and_config_constants_agree() -> None:
    assert product.SCALED.value == SCALE_BLOCK
    assert gemv_norm_kernels.CHUNK.value == gemv_norm_config.CHUNK
    assert gemv_norm_config.MOST_CHUNKS % gemv_norm_kernels.PHASES.value == 0
    assert arrivals.ARRIVED.value == gemv_norm_config.MOST_COUNTED
    spec = gemv_spec(BF16, F8, "row", (BF16,), None, False)
    for m, n, warps in ((1, 40, 4), (4, 40, 8), (16, 40, 16), (1, 9000, 4), (8, 9000, 16)):
        kernel = build(spec, m, n, 1024, (24,))
        assert kernel.warps == dict(kernel.constants)["TILE.warps"] == warps


def check_stream(tile: StreamTile, m: int, k: int, aligned: bool) -> None:
    """What kernels assume about a tile of float32 x."""
    parts = tile.pieces // tile.warps
    assert parts * tile.warps == tile.pieces and parts in (1, 2, 4, 8)
    assert (tile.warps, tile.columns) == (4, 4) and tile.rows == (1 if m == 1 else 4)
    assert 1 <= tile.depth <= tile.steps and 1 <= tile.ahead <= tile.steps
    # a block takes whole loads, of four lanes
    assert tile.loads * 4 * tile.vec == tile.block and tile.steps % tile.loads == 0
    step = tile.pieces * tile.block
    covered = tile.steps // tile.loads * step
    # without a loop the steps cover k, and only those of the last blocks, which are masked, exceed it
    assert tile.long or covered - step < k <= covered
    assert tile.mask == (k % covered != 0)
    assert tile.long or tile.steps <= product_config.MOST_LOADS
    assert aligned or (tile.long and tile.steps == tile.loads)
    assert tile.pace == 0 or (tile.pace > 0 and aligned and not tile.long)


def check_fragments(tile: FragmentTile, m: int, k: int, aligned: bool) -> None:
    """What kernels assume about a tile of 16-bit act."""
    parts = gemv_stream.PIECES.value // tile.warps
    assert parts * tile.warps == gemv_stream.PIECES.value and parts in (1, 2, 4)
    assert tile.columns % (16 // parts) == 0 and tile.rows % (8 // parts) == 0, "whole fragments"
    assert tile.rows >= min(m, tuning(records.H200).gemv.unaligned_rows)
    assert 1 <= tile.depth <= tile.steps and 1 <= tile.ahead <= tile.steps
    covered = tile.steps * gemv_stream.PIECES.value * 4 * tile.vec
    assert tile.vec % gemv_stream.HALF.value == 0
    assert tile.split == 1 or (tile.warps == 16 and tile.split == 4 and m <= MAX_ROWS)
    assert tile.long or covered == k
    assert tile.mask == (k % covered != 0)
    assert aligned or (tile.long and tile.steps == 1)
    assert tile.pace == 0 or (tile.pace > 0 and aligned and not tile.long)


@pytest.mark.parametrize("kind", KINDS_OF_PRODUCT, ids=str)
def test_configurations_are_valid(kind: tuple[Any, Any, WeightScale]) -> None:
    act, weight, _ = kind
    scales: tuple[WeightScale, ...] = ("none", "row", "block") if weight.itemsize == 1 else ("none", "row")
    for widths in WIDTHS:
        for (m, n, k, aligned), (stream, norm) in configurations(kind, widths):
            match stream:
                case FragmentTile():
                    check_fragments(stream, m, k, aligned)
                case StreamTile():
                    check_stream(stream, m, k, aligned)
            wide = stream.columns * norm.split
            assert m > MAX_ROWS or wide <= MOST_COLUMNS, "the workspace has room for whole tiles"
            assert norm.side == max(1, stream.warps // 4) and len(norm.tiles) == len(norm.longs) == len(widths)
            for width, chunks, long in zip(widths, chunks_of(norm), norm.longs, strict=True):
                assert long == (chunks * gemv_norm_config.CHUNK < width)
                assert chunks == gemv_norm_config.MOST_CHUNKS or not long
            counts = [-(-width // wide) * norm.split * -(-m // stream.rows) for width in widths]
            assert norm.shared == (
                m > 1 and len(widths) > 0 and all(m <= count <= arrivals.ARRIVED.value for count in counts)
            )
            if m <= MAX_ROWS:
                for other_scale, other_place in itertools.product(scales, (True, False)):
                    other, _ = gemv_config(act, weight, other_scale, m, n, k, widths, other_place, records.H200)
                    assert (other.columns, other.rows) == (stream.columns, stream.rows), (
                        "blocks must not depend on alignment or scales"
                    )
                blocks = programs(n, widths, stream.columns, norm.split) * -(-m // stream.rows)
                assert gemv_norm_config.trace_blocks(act, weight, m, n, k, widths) == blocks


def test_more_programs_than_a_counter_counts_do_not_share_the_norm() -> None:
    def shared(width: int) -> bool:
        return gemv_config(BF16, BF16, "none", 4, width, 64, (width,), True, records.H200).norm.shared

    assert shared(8 * arrivals.ARRIVED.value)
    assert not shared(8 * arrivals.ARRIVED.value + 1)


SHARES = """
import sys, torch, triton, triton.language as tl
from onepass.gpu.lib.arrivals import await_all

@triton.jit
def arrive(counter, shares, count, sharing):
    state = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    mine = 0
    if state & 0xFFF >= count - sharing:
        begin, end, bits = await_all(counter, state, count, sharing)
        for share in range(begin, end):
            mine += bits & 1 << share
    tl.store(shares + tl.program_id(0), mine)

for count, sharing in ((1, 1), (2, 2), (5, 3), (40, 16)):
    counter, shares = torch.zeros(1, dtype=torch.int32), torch.full((count,), -1, dtype=torch.int32)
    arrive[(count,)](counter, shares, count, sharing)
    assert shares.tolist() == [0] * (count - 1) + [2**sharing - 1], shares
    assert counter.item() == 0
"""


def test_programs_that_would_wait_forever_give_their_shares_up(tmp_path: Path) -> None:
    """The interpreter runs one program after another, so all but the last wait in vain."""
    (tmp_path / "shares.py").write_text(SHARES)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "ignore", str(tmp_path / "shares.py")], env=environment, check=True)


def test_tiles_do_not_span_segments() -> None:
    assert tiles(100, (60, 1), 8) == [8, 1, 5]
    assert tiles(61, (60, 1), 4) == [15, 1, 0]
    assert tiles(7, (), 4) == [2]
    assert programs(100, (60, 1), 8, 1) == 8 + 1 + 5
    assert programs(100, (60, 1), 8, 4) == 8 + 4 + 5, "those that share a tile are whole"


# --- the order of the norm's sum -----------------------------------------------------------------------------------


def chunk_sum(squares: Tensor) -> Tensor:
    """The sum of 512 numbers in the order of `_sum_chunk`."""
    total = squares.view(-1, 4, 32, 4)[0]
    total = (total[..., 0] + total[..., 1]) + (total[..., 2] + total[..., 3])
    while total.shape[1] > 1:
        first, second = total.chunk(2, 1)
        total = first + second
    return (total[0, 0] + total[1, 0]) + (total[2, 0] + total[3, 0])


def piece_sum(pieces: Tensor) -> Tensor:
    """The sum of 16 pieces in the order of `fold_fragments`."""
    for _ in range(2):
        columns = pieces.view(-1, 4).unbind(1)
        pieces = (columns[0] + columns[1]) + (columns[2] + columns[3])
    return pieces


SUMS = """
import sys, torch, triton, triton.language as tl
from onepass.gpu.lib.gemv_stream import fold_fragments
from onepass.ops.gemv_norm.gpu_tile import FragmentTile
from onepass.ops.gemv_norm.gpu_kernel import _sum_chunk, _sum_phases

@triton.jit
def add_chunks(x, y):
    row = tl.arange(0, 4)
    tl.store(y + row, _sum_chunk(tl.load(x + row[:, None] * 512 + tl.arange(0, 512)[None, :]), 4))

@triton.jit
def add_phases(x, y, SIDE: tl.constexpr):
    COUNT: tl.constexpr = 4 // SIDE
    place = tl.arange(0, SIDE)[:, None] * 512 + tl.arange(0, 512)[None, :]
    phases = ()
    for i in tl.static_range(COUNT):
        phases = phases + (tl.load(x + i * SIDE * 512 + place),)
    tl.store(y + tl.arange(0, 1), _sum_phases(phases, COUNT, SIDE))

@triton.jit
def add_pieces(x, y, TILE: tl.constexpr):
    PARTS: tl.constexpr = 16 // TILE.warps
    ROWS: tl.constexpr = 8 // PARTS
    warp = tl.arange(0, TILE.warps)[:, None, None] * 128
    total = tl.load(x + warp + tl.arange(0, 16)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :])
    place = tl.arange(0, 2 * ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(y + place, fold_fragments(total, TILE))

given = torch.load(sys.argv[1] + "/given")
sums = [torch.empty(4), torch.empty(3)]
add_chunks[(1,)](given["chunks"], sums[0])
for i in range(3):
    add_phases[(1,)](given["chunks"], sums[1][i:], 1 << i)
for warps, pieces in given["pieces"].items():
    sums.append(torch.empty(2 * warps // 2, warps // 2))
    add_pieces[(1,)](pieces, sums[-1], FragmentTile(warps, 8, 0, 0, 1, 0, False, False, 0, 0, 0))
torch.save(sums, sys.argv[1] + "/sums")
"""


@pytest.mark.full  # the sums of qk_norm and the pieces of linear stay
def test_kernels_sum_in_the_documented_order(tmp_path: Path) -> None:
    """The squares of a norm, and the pieces of a product for every number of warps."""
    chunks = torch.randn(4, 512)
    # [warps, columns x parts, rows x parts], of which only equal parts count
    pieces = {warps: torch.randn(warps, 16, 8) for warps in (4, 8, 16)}
    torch.save({"chunks": chunks, "pieces": pieces}, tmp_path / "given")
    (tmp_path / "adds.py").write_text(SUMS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", str(tmp_path / "adds.py"), str(tmp_path)]
    subprocess.run(command, env=environment, check=True)
    squares, phases, *folded = torch.load(tmp_path / "sums")
    p0, p1, p2, p3 = [chunk_sum(row) for row in chunks]
    assert squares.tolist() == [float(p) for p in (p0, p1, p2, p3)]
    assert phases.tolist() == [float((p0 + p1) + (p2 + p3))] * 3, "for 1, 2 and 4 chunks side by side"
    for (warps, total), sums in zip(pieces.items(), folded, strict=True):
        parts = 16 // warps
        fragments = total.view(warps, 16 // parts, parts, 8 // parts, parts).diagonal(dim1=2, dim2=4)
        for column, row in itertools.product(range(16 // parts), range(8 // parts)):
            assert sums[column, row] == piece_sum(fragments[:, column, row].flatten())


@pytest.mark.sampled(8)  # each compiles a kernel
@pytest.mark.parametrize("codes", [None, F8], ids=["norm", "codes"])
@pytest.mark.parametrize("weight", [BF16, F8])
@pytest.mark.parametrize(("m", "aligned"), [(1, True), (4, True), (16, True), (16, False)])
def test_order_of_summation_does_not_depend_on_layouts(
    m: int, aligned: bool, weight: torch.dtype, codes: torch.dtype | None
) -> None:
    """Float reductions add two numbers, or one number and the zeros of a fragment."""
    scaled: WeightScale = "row" if weight == F8 else "none"
    made = build(
        gemv_spec(BF16, weight, scaled, (BF16,), codes, False), m, 96, 1024 if aligned else 1001, (64,), aligned=aligned
    )
    assert not made.contracts
    text = lowered(made, records.H200, "ttgir")
    reductions = re.findall(
        r'"tt.reduce"\(%\w+\) <\{axis = (\d) : i32\}> .*?arith\.(\w+) .*?: \(tensor<([\dx]+)xf32', text, re.DOTALL
    )
    assert len(reductions) >= 7
    parts = gemv_stream.PIECES.value // made.warps
    for axis, kind, shape in reductions:
        size = int(shape.split("x")[int(axis)])
        diagonal = shape.startswith(f"{made.warps}x16x") and size == parts
        assert kind == "addf" and (size == 2 or diagonal), (kind, shape)


# --- other chips ---------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Chip], Build]] = {
    "aligned": lambda chip: build(plain_spec(2), 1, 96, 3072, (64, 16), chip),
    "8 rows, misaligned": lambda chip: build(plain_spec(), 8, 97, 1001, (65,), chip, aligned=False),
    "fp8 weights and codes": lambda chip: build(
        gemv_spec(BF16, F8, "row", (BF16,), F8, False), 1, 96, 2048, (64,), chip
    ),
    "float32": lambda chip: build(gemv_spec(F32, F32, "none", (F32,), None, False), 1, 96, 1024, (64,), chip),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "chip",
    # each compiles a kernel
    [pytest.param(c, marks=pytest.mark.sampled(4) if c.backend == "hip" else pytest.mark.full) for c in OTHER_CHIPS],
    ids=lambda c: str(c.arch),
)
def test_compiles_for_other_chips(chip: Chip, kind: str) -> None:
    text = compile_build(KINDS[kind](chip), chip).asm["amdgcn" if chip.backend == "hip" else "ptx"]
    if chip.backend == "hip":  # its matrix cores have no 8-column product, so float32 products are used
        assert re.search(r"v_(pk_)?fmac?_f32", text)
    else:
        assert ("mma.sync.aligned.m16n8k16" in text) == (kind != "float32")
    assert ("griddepcontrol" in text) == chip.has_pdl


def test_traced_kernel_is_rejected_on_amd() -> None:
    """Trace code uses NVIDIA assembly, which would crash AMD's assembler."""
    with pytest.raises(onepass.Unsupported, match="traces need an NVIDIA GPU or a CPU"):
        build(plain_spec(traced=True), 1, 64, 1024, (32,), Chip("hip", "gfx942", 64))


# --- the interpreter -----------------------------------------------------------------------------------------------

INTERPRETED = ("rows: 1x", "rows: 5x", "k: 2x20x513", "segments: 1x80x300 15", "values: 9x48x256 24+8 bf16")


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
@pytest.mark.slow
def test_interpreted_kernel_passes_its_cases() -> None:
    cases = [case for match in INTERPRETED for case in select(["gemv_and_partial_norm"], match)]
    assert len(cases) == len(INTERPRETED) and all(case.interpretable for case in cases)
    assert passed_checks("gemv_and_partial_norm", match="|".join(INTERPRETED)) == len(cases)
