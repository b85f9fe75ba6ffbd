"""8-bit weights on their way to tensor cores: which columns a step multiplies, and the machine code."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
import torch

pytest.importorskip("triton")

from triton._C.libtriton import gluon_ir, ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon import language as gluon

from onepass.formats import WeightScale
from onepass.gpu.chip import tuning
from onepass.gpu.compile import Build
from onepass.gpu.lib import codes
from onepass.gpu.tuning.table import ANY
from onepass.ops.gemv_norm.launch import gemv_spec
from onepass.ops.linear import gpu as linear
from onepass.ops.linear.gpu_tile import linear_config
from onepass.ops.linear.launch import linear_spec
from tests.gemv_norm.test_gpu import BF16, F8, F16, INT8
from tests.gemv_norm.test_gpu import build as gemv_build
from tools.evidence import records
from tools.evidence.records import lowered

DECODERS = ("_E4M3_BF16", "_E4M3_F16", "_INT8_BF16", "_INT8_F16")
LANES = range(32)


# --- columns of a step ---------------------------------------------------------------------------------------------


def step_of(place: int) -> int:
    """Which of the two steps of 32 columns multiplies the number at a place, as `gpu.lib.codes` says."""
    return place // 2 % 2


def check_grouping(columns: dict[int, int]) -> None:
    """The column at each of 32 places: a permutation, with sixteen neighbours for each step."""
    assert sorted(columns) == sorted(columns.values()) == list(range(32))
    for step in (0, 1):
        own = {column for place, column in columns.items() if step_of(place) == step}
        assert own == set(range(16 * step, 16 * step + 16))
    assert any(place != column for place, column in columns.items())


def test_columns_of_unaligned_operands_are_neighbours() -> None:
    places = torch.arange(256)
    columns = codes.regrouped.fn(places)
    assert torch.equal(columns // 32, places // 32)
    for stretch in columns.view(-1, 32):
        check_grouping(dict(enumerate((stretch % 32).tolist())))


def registers(side: int, shape: list[int], lane: int) -> list[tuple[int, ...]]:
    """The index of each register's number in one side of a batched product, in the order of Triton's numbering."""
    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget("cuda", 90, 32)).load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    mma = gluon.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    layout = gluon.DotOperandLayout(side, mma, 4)._to_ir(builder)
    found = builder.to_linear_layout(layout, shape)

    def at(number: int, bases: Iterable[Iterable[int]]) -> torch.Tensor:
        chosen = [torch.tensor(base) for bit, base in enumerate(bases) if number >> bit & 1]
        return torch.stack(chosen).sum(0) if chosen else torch.zeros(3, dtype=torch.int64)

    first = at(lane, found.lane_bases)
    return [tuple((first + at(r, found.reg_bases)).tolist()) for r in range(1 << len(found.reg_bases))]


def left_moves(assembly: str) -> dict[int, int]:
    """Where the decoded numbers of sixteen registers come from: each word has four codes, each output two numbers."""
    words: dict[int, list[int]] = {}
    for index in map(int, re.findall(r"\$(\d+)", assembly)):
        if index >= 8:
            written = words.setdefault(index - 8, [])
        else:
            written.append(index)
    assert sorted(words) == [0, 1, 2, 3] and all(len(pairs) == 2 for pairs in words.values())
    return {
        2 * pair + i: 4 * word + 2 * half + i
        for word, pairs in words.items()
        for half, pair in enumerate(pairs)
        for i in (0, 1)
    }


def right_moves(assembly: str) -> dict[int, int]:
    """The same for eight registers of 16-bit numbers."""
    moves = re.findall(r"mov\.b32 \$(\d), \$(\d);", assembly)
    return {2 * int(to) + i: 2 * (int(source) - 4) + i for to, source in moves for i in (0, 1)}


def gathered(indices: list[tuple[int, ...]], moves: dict[int, int], k: int) -> list[tuple[tuple[int, ...], int]]:
    """For each register after ``moves``: its index, and the column of the number that it then holds."""
    pack = len(moves)
    assert sorted(moves) == sorted(moves.values()) == list(range(pack))
    found = []
    for start in range(0, len(indices), pack):
        for to, source in moves.items():
            place, origin = indices[start + to], indices[start + source]
            assert all(place[i] == origin[i] for i in range(3) if i != k), "numbers stay in their row"
            assert place[k] // 32 == origin[k] // 32
            found.append((place, origin[k] % 32))
    return found


@pytest.mark.sampled(4)  # each lowers a kernel
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("columns", "rows", "step"), [(16, 8, 256), (32, 16, 128), (64, 16, 64)])
def test_columns_of_aligned_operands_are_neighbours(decoder: str, columns: int, rows: int, step: int) -> None:
    """Both sides are regrouped in the same way, given the order in which Triton numbers registers."""
    left, right = (
        left_moves(getattr(codes, f"{decoder}_REGROUPED").value),
        right_moves(codes._REGROUP.value),
    )
    weights: dict[int, int] = {}
    acts: dict[int, int] = {}
    for lane in LANES:
        for place, column in gathered(registers(0, [4, columns, step], lane), left, 2):
            assert weights.setdefault(place[2] % 32, column) == column
        for place, column in gathered(registers(1, [4, step, rows], lane), right, 1):
            assert acts.setdefault(place[1] % 32, column) == column
    assert weights == acts
    check_grouping(weights)


@pytest.mark.parametrize("decoder", DECODERS)
def test_flat_tiles_decode_in_place(decoder: str) -> None:
    assembly = getattr(codes, decoder).value
    assert re.findall(r"\$(\d+)", assembly)[-1] == "1" and set(re.findall(r"\$(\d+)", assembly)) == {"0", "1", "2"}
    assert assembly.index("$0") < assembly.index("$1")


# --- machine code --------------------------------------------------------------------------------------------------


def build(
    x: torch.dtype,
    weight: torch.dtype,
    scaled: WeightScale,
    m: int,
    n: int,
    k: int,
    aligned: bool = True,
    gated: bool = False,
) -> Build:
    spec = linear_spec(x, weight, scaled, activation="silu_mul" if gated else None)
    config = linear_config(spec, m, n, k, aligned, records.H200)
    return linear.build_for(spec, config, aligned, n % 16 == 0, False, records.H200)


def assemblies(text: str) -> dict[int, list[str]]:
    """The layouts of what inline assembly reads, by the numbers that it takes at a time; one is another use."""
    found: dict[int, list[str]] = {}
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", text, re.MULTILINE))
    pattern = r"tt\.elementwise_inline_asm .*packed_element = (\d+) : .*\} %\w+ : tensor<[\dx]+x\w+, (.*?)> -> "
    for pack, layout in re.findall(pattern, text):
        found.setdefault(int(pack), []).append(layouts.get(layout, layout))
    return found


def sizes_of_cubes() -> dict[str, tuple[int, int, int]]:
    """M, N and K of a call for each cube of 8-bit weights that an H200 uses."""
    found = {}
    for m, n, k, cut in tuning(records.H200).pieces.codes:
        if cut.kind == "cube" and m < ANY:
            size = (m, min(n, 24576), min(k, 4096))
            found[f"{cut.columns}x{cut.rows}x{cut.step}/{cut.stages} of {'x'.join(map(str, size))}"] = size
    return found


CUBES = sizes_of_cubes()
KINDS: dict[str, tuple[torch.dtype, torch.dtype, WeightScale]] = {
    "fp8 blocks": (BF16, F8, "block"),
    "int8 rows": (F16, INT8, "row"),
}


def check_cube(made: Build) -> None:
    """Operands come from shared memory in the layout of the product, and only then are they regrouped."""
    assert dict(made.constants)["TILE.kind"] == "cube"
    text = lowered(made, records.H200, "ttgir")
    found = assemblies(text)
    assert sorted(found) == [8, 16]
    for layout in found[16]:
        assert re.fullmatch(r"#ttg\.dot_op<\{opIdx = 0, parent = #mma, kWidth = 4\}>", layout), layout
    for layout in found[8]:  # before its columns and rows change places
        bases = (
            r"\{register = \[\[0, 0, 1\], \[0, 0, 2\], \[0, 0, 16\], .*lane = \[\[0, 0, 4\], \[0, 0, 8\], \[0, 1, 0\]"
        )
        assert re.match(rf"#ttg\.linear<{bases}", layout), layout
    layout = rf"versionMajor = 2, versionMinor = 0, warpsPerCTA = \[{made.warps}, 1, 1\], instrShape = \[1, 16, 8\]"
    assert re.search(layout, text)
    machine = lowered(made, records.H200, "ptx")
    for instruction in ("cp.async.cg.shared.global", "ldmatrix", "mma.sync.aligned.m16n8k16"):
        assert instruction in machine, instruction
    before_sums = machine[: machine.rindex("mma.sync")]
    assert "shfl" not in machine and not re.search(r"\bst\.shared|ld\.global[\w:.]*\.b(8|16)\b", before_sums)


@pytest.mark.sampled(9)  # each lowers a kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", CUBES)
def test_aligned_weights_are_regrouped_in_registers(size: str, kind: str) -> None:
    check_cube(build(*KINDS[kind], *CUBES[size]))


@pytest.mark.sampled(4)  # each lowers a kernel
@pytest.mark.parametrize(
    ("kind", "k", "gated"), [("fp8 blocks", 1040, False), ("int8 rows", 1040, True), ("fp8 blocks", 4096, True)]
)
def test_masked_and_gated_weights_are_regrouped_in_registers(kind: str, k: int, gated: bool) -> None:
    check_cube(build(*KINDS[kind], 16, 4096, k, gated=gated))


@pytest.mark.sampled(3)  # each lowers a kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 4, 16])
def test_weights_of_the_gemv_are_fragments_as_loaded(m: int, kind: str) -> None:
    """They are decoded where 16-byte loads put them: nothing is exchanged before the products."""
    act, weight, scaled = KINDS[kind]
    made = gemv_build(gemv_spec(act, weight, scaled, (act,), None, False), m, 2112, 4096, (1536,))
    machine = lowered(made, records.H200, "ptx")
    before_sums = machine[: machine.rindex("mma.sync.aligned.m16n8k16")]
    assert "v4.b32" in before_sums and not re.search(
        r"shfl|ldmatrix|\b(ld|st)\.shared|ld\.global[\w:.]*\.b(8|16)\b", before_sums
    )


@pytest.mark.sampled(4)  # each lowers a kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 16])
def test_unaligned_weights_are_loaded_in_the_order_of_steps(m: int, kind: str) -> None:
    """They need no regrouping, and `decode_words` works in any layout."""
    made = build(*KINDS[kind], m, 4096, 1001, aligned=False)
    text = lowered(made, records.H200, "ttgir")
    assert dict(made.constants)["TILE.kind"] == "cube" and sorted(assemblies(text)) == [4]
    assert re.findall(r"tt\.dot .*?kWidth = (\d).*?kWidth = (\d)", text) == [("4", "4")]


@pytest.mark.sampled(5)  # each lowers a kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "aligned"), [(32, 8192, True), (100, 16384, True), (300, 4096, False)])
def test_flat_tiles_are_products_of_warp_groups(m: int, n: int, aligned: bool, kind: str) -> None:
    """Sixteen neighbouring columns at a time; weights are decoded in registers, so that nothing is regrouped."""
    made = build(*KINDS[kind], m, n, 1024 if aligned else 1001, aligned)
    text = lowered(made, records.H200, "ttgir")
    assert dict(made.constants)["TILE.kind"] == "flat"
    assert sorted(assemblies(text)) == [4]
    assert re.search(
        r"ttng\.warp_group_dot %\w+, %\w+, .*: tensor<\w+, #ttg\.dot_op<\{opIdx = 0, .*kWidth = 2\}>", text
    )
    assert re.search(r"versionMajor = 3, .*instrShape = \[16, \d+, 16\]", text) and "tt.dot " not in text
