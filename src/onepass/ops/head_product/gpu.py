"""Products of each head with a weight of its own: their parameters and programs."""

from collections import namedtuple
from typing import Any, Final, NamedTuple

from ...gpu.chip import Chip
from ...gpu.compile import Build
from ...gpu.launch import SHORT_NAMES, Family
from ..attention.spec import ROWS
from .gpu_kernel import _head_product_kernel
from .spec import HeadCall, HeadRows, HeadSpec

WARPS: Final = 4
AHEAD: Final = 1056
"""Up to this many programs, weights are requested while the kernel before still runs: eight for each multiprocessor."""

HeadTile = namedtuple("HeadTile", "rows columns step stages")
"""Sizes of a program: rows, columns, and rows of a weight that are multiplied at a time, with the stages of this loop."""
HeadMath = namedtuple("HeadMath", "order even hw_rounding pdl")

_TILES: Final = {"rows": HeadTile(ROWS, 128, 128, 2), "columns": HeadTile(ROWS, 32, 128, 5)}
"""32 KB of DeepSeek-V3's weights for each program."""
_SIZES: Final = HeadRows._fields[:4]
TABLE: Final = {
    "x": "* x",
    "weight": "* weight",
    "out": "* out",
    "rows": HeadRows._make(f"{'i32' if name in _SIZES else 'i64'} rows.{name}" for name in HeadRows._fields),
    "ahead": f"i32 int(programs[0] <= {AHEAD})",
}


class HeadFacts(NamedTuple):
    """What selects the machine code of a call, besides its spec."""

    even: bool
    """Whether tiles cover K and N exactly."""


def _facts(call: HeadCall, chip: Chip) -> HeadFacts:
    tile, rows = _TILES[call.spec.order], call.rows
    return HeadFacts(rows.k % tile.step == 0 and rows.n % tile.columns == 0)


def build_for(spec: HeadSpec, facts: HeadFacts, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed."""
    math = HeadMath(spec.order, facts.even, chip.rounds_casts, chip.has_pdl)
    name = f"head_product x={SHORT_NAMES[spec.x]} {spec.order}{' even' * facts.even}"
    divisible = {"x": 16, "weight": 16, "out": 16} | {f"rows.{field}": 8 for field in HeadRows._fields[2:]}
    dtypes = dict.fromkeys(("x", "weight", "out"), spec.x)
    constants = {"TILE": _TILES[spec.order], "MATH": math}
    return FAMILY.make_build(name, _head_product_kernel, chip, dtypes, constants, {}, divisible, WARPS, 0)


def _grid(call: HeadCall, config: Any) -> tuple[int]:
    tile, rows = _TILES[call.spec.order], call.rows
    return (rows.heads * -(-rows.n // tile.columns) * -(-rows.rows // tile.rows),)


FAMILY: Final = Family(
    HeadCall,
    TABLE,
    _facts,
    lambda spec, facts, chip: None,
    lambda spec, facts, config, chip: build_for(spec, facts, chip),
    _grid,
    device="x",
)
builds = FAMILY.builds
launch = FAMILY.launch
