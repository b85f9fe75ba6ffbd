"""The attention of a decode step to latents: its parameters, programs and memory for sums of splits."""

from collections import namedtuple
from typing import Any, Final, NamedTuple

import torch

from ...gpu.chip import Chip
from ...gpu.compile import Build
from ...gpu.launch import SHORT_NAMES, Family
from ..attention.gpu import AHEAD, launch_splits, units
from ..attention.spec import ROWS, SPLIT, AttentionSpec
from ..qk_cache.gpu_tile import power_of_two
from .gpu_kernel import _latent_attention_kernel
from .spec import BLOCK, PIECES, LatentCall, LatentRows

WARPS: Final = PIECES

LatentTensors = namedtuple("LatentTensors", "q q_rot latent k_rot mask out sums tops counter")
LatentTile = namedtuple("LatentTile", "rows columns rotated pieces split block stages lines looked joined join_stages")
"""Sizes of a program: rows, columns of a latent and of a rotated key (padded) and their pieces, entries of a split and of
a step, stages of the loop, cache lines of a latent; the rest is that of `AttentionTile`.
"""
LatentMath = namedtuple("LatentMath", "mask columns rotated several hw_rounding pdl")

_SIZES: Final = LatentRows._fields[:8]
TABLE: Final = {
    "tensors": LatentTensors(*(f"* {name}" for name in LatentTensors._fields)),
    "rows": LatentRows._make(f"{'i32' if name in _SIZES else 'i64'} rows.{name}" for name in LatentRows._fields),
    "scale": "fp32 scale",
    "ahead": f"i32 int(programs[0] <= {AHEAD})",
}


class LatentFacts(NamedTuple):
    """What selects the machine code of a call, besides its spec."""

    columns: int
    rotated: int
    several: bool
    """Whether there are several splits."""


def _tile(facts: LatentFacts) -> LatentTile:
    """A piece has at least the 16 columns that a tensor core takes."""
    columns, rotated = (max(16 * PIECES, power_of_two(n)) for n in (facts.columns, facts.rotated))
    return LatentTile(ROWS, columns, rotated, PIECES, SPLIT, BLOCK, 3, columns // 64, 64, 4, 6)


def build_for(spec: AttentionSpec, facts: LatentFacts, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed."""
    sums, masked = torch.float32, spec.mask != "none"
    tensors = LatentTensors(
        q=spec.x,
        q_rot=spec.x,
        latent=spec.x,
        k_rot=spec.x,
        mask=spec.x if masked else None,
        out=spec.x,
        sums=sums if facts.several else None,
        tops=sums if facts.several else None,
        counter=torch.int32 if facts.several else None,
    )
    math = LatentMath(spec.mask, facts.columns, facts.rotated, facts.several, chip.rounds_casts, chip.has_pdl)
    names = ["batch", "columns", "rotated"]
    names += [] if masked else ["mask_batch"]
    names += [] if spec.mask == "many" else ["mask_token"]
    strides = [name for name in LatentRows._fields if name.startswith(("q_", "latent_", "k_rot_"))]
    divisible = {f"tensors.{name}": 16 for name in ("q", "q_rot", "latent", "k_rot", "out", "sums", "tops")}
    divisible |= {f"rows.{name}": 8 for name in strides}
    columns = f"{facts.columns}+{facts.rotated}"
    name = f"latent_attention x={SHORT_NAMES[spec.x]} mask={spec.mask} columns={columns}{' splits' * facts.several}"
    fixed = {f"rows.{name}": 0 for name in names} | {"rows.heads": 1}
    return FAMILY.make_build(
        name,
        _latent_attention_kernel,
        chip,
        {f"tensors.{name}": dtype for name, dtype in tensors._asdict().items()},
        {"TILE": _tile(facts), "MATH": math},
        fixed | ({} if facts.several else {"rows.splits": 1}),
        divisible,
        WARPS,
        0,
    )


def _facts(rows: LatentRows) -> LatentFacts:
    return LatentFacts(rows.columns, rows.rotated, rows.splits > 1)


def _grid(call: LatentCall, config: Any) -> tuple[int]:
    return (units(call.rows) * call.rows.splits,)


FAMILY: Final = Family(
    LatentCall,
    TABLE,
    lambda call, chip: _facts(call.rows),
    lambda spec, facts, chip: None,
    lambda spec, facts, config, chip: build_for(spec, facts, chip),
    _grid,
    device="q",
)
builds = FAMILY.builds


def launch(call: LatentCall) -> None:
    """One launch on the current stream. Several splits need memory for their sums, and a counter per unit."""
    launch_splits(FAMILY, call, _tile(_facts(call.rows)).columns)
