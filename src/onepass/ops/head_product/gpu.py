"""Products of each head with a weight of its own: their parameters and programs."""

from typing import Annotated, Final, NamedTuple

from ...gpu.chip import Chip
from ...gpu.compile import Build
from ...gpu.launch import I32, SHORT_NAMES, GpuKernels, Pointer, Sizes, make_build
from ..attention.launch import ROWS
from .gpu_kernel import _head_product_kernel
from .launch import HeadCall, HeadRows, HeadSpec

WARPS: Final = 4
AHEAD: Final = 1056
"""Up to this many programs, weights are requested while the kernel before still runs: eight for each multiprocessor."""


class HeadParameters(NamedTuple):
    """The parameters of the kernel. ``ahead``: whether weights are requested while the kernel before still runs."""

    x: Pointer
    weight: Pointer
    out: Pointer
    rows: Annotated[HeadRows, Sizes(4)]
    ahead: I32


class HeadTile(NamedTuple):
    """Sizes of a program: rows, columns, and rows of a weight that are multiplied at a time, with the stages of this loop."""

    rows: int
    columns: int
    step: int
    stages: int


class HeadMath(NamedTuple):
    """What a kernel computes. ``even``: see `HeadFacts`."""

    order: str
    even: bool
    hw_rounding: bool
    pdl: bool


_TILES: Final = {"rows": HeadTile(ROWS, 128, 128, 2), "columns": HeadTile(ROWS, 32, 128, 5)}
"""32 KB of DeepSeek-V3's weights for each program."""


class HeadFacts(NamedTuple):
    """What selects the machine code of a call, besides its spec."""

    even: bool
    """Whether tiles cover K and N exactly."""


def _facts(call: HeadCall, chip: Chip) -> HeadFacts:
    tile, rows = _TILES[call.spec.order], call.rows
    return HeadFacts(rows.k % tile.step == 0 and rows.n % tile.columns == 0)


def _tile(spec: HeadSpec, facts: HeadFacts, chip: Chip) -> HeadTile:
    return _TILES[spec.order]


def build_for(spec: HeadSpec, facts: HeadFacts, tile: HeadTile, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed."""
    math = HeadMath(spec.order, facts.even, chip.rounds_casts, chip.has_pdl)
    name = f"head_product x={SHORT_NAMES[spec.x]} {spec.order}{' even' * facts.even}"
    divisible = {"x": 16, "weight": 16, "out": 16} | {f"rows.{field}": 8 for field in HeadRows._fields[2:]}
    return make_build(
        HeadParameters,
        name,
        _head_product_kernel,
        chip,
        dtypes=dict.fromkeys(("x", "weight", "out"), spec.x),
        constants={"TILE": tile, "MATH": math},
        unused={},
        divisible=divisible,
        warps=WARPS,
    )


def _grid(call: HeadCall, tile: HeadTile) -> tuple[int]:
    rows = call.rows
    return (rows.heads * -(-rows.n // tile.columns) * -(-rows.rows // tile.rows),)


def pack(call: HeadCall, tile: HeadTile, programs: tuple[int, ...]) -> HeadParameters:
    """The parameters of a call."""
    return HeadParameters(call.x, call.weight, call.out, call.rows, ahead=int(programs[0] <= AHEAD))


KERNELS: Final[GpuKernels[HeadSpec, HeadCall, HeadFacts, HeadTile]] = GpuKernels(
    HeadParameters, _facts, _tile, build_for, _grid, pack
)
launch, builds = KERNELS.launch, KERNELS.builds
