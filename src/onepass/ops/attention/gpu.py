"""The attention of a decode step: its parameters, programs and memory for sums of splits."""

from collections import namedtuple
from typing import Any, Final, NamedTuple

import torch

from ...gpu import counters
from ...gpu.chip import Chip
from ...gpu.compile import Build
from ...gpu.launch import SHORT_NAMES, Family
from ..latent_attention.spec import LatentCall, LatentRows
from ..qk_cache.gpu_tile import power_of_two
from .gpu_kernel import _attention_kernel
from .spec import ROWS, SPLIT, AttentionCall, AttentionRows, AttentionSpec

WARPS: Final = 4
AHEAD: Final = 264
"""Up to this many programs, entries are requested while the kernel before still runs. More would queue."""

AttentionTensors = namedtuple("AttentionTensors", "q k v mask out sums tops counter")
AttentionTile = namedtuple("AttentionTile", "rows columns split block stages lines looked joined join_stages")
"""Sizes of a program: rows, columns of a head (padded), entries of a split and of a step, stages of the loop, cache
lines of an entry; splits whose largest scores are looked at together, rows that are joined at a time, and the stages of that.
"""
AttentionMath = namedtuple("AttentionMath", "mask columns several hw_rounding pdl")

_SIZES: Final = AttentionRows._fields[:7]
TABLE: Final = {
    "tensors": AttentionTensors(*(f"* {name}" for name in AttentionTensors._fields)),
    "rows": AttentionRows._make(f"{'i32' if name in _SIZES else 'i64'} rows.{name}" for name in AttentionRows._fields),
    "scale": "fp32 scale",
    "ahead": f"i32 int(programs[0] <= {AHEAD})",
}


class AttentionFacts(NamedTuple):
    """What selects the machine code of a call, besides its spec."""

    columns: int
    several: bool
    """Whether there are several splits."""


def _tile(columns: int) -> AttentionTile:
    """Steps of 128 entries, or 64 for long heads."""
    padded = max(16, power_of_two(columns))
    return AttentionTile(ROWS, padded, SPLIT, 64 if padded > 128 else 128, 2, max(1, padded // 64), 64, 4, 6)


def build_for(spec: AttentionSpec, facts: AttentionFacts, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed."""
    sums, masked = torch.float32, spec.mask != "none"
    tensors = AttentionTensors(
        q=spec.x,
        k=spec.x,
        v=spec.x,
        mask=spec.x if masked else None,
        out=spec.x,
        sums=sums if facts.several else None,
        tops=sums if facts.several else None,
        counter=torch.int32 if facts.several else None,
    )
    math = AttentionMath(spec.mask, facts.columns, facts.several, chip.rounds_casts, chip.has_pdl)
    names = ["batch", "columns"]
    names += [] if masked else ["mask_batch"]
    names += [] if spec.mask == "many" else ["mask_token"]
    strides = [name for name in AttentionRows._fields if name[:2] in ("q_", "k_", "v_")]
    divisible = {f"tensors.{name}": 16 for name in ("q", "k", "v", "out", "sums", "tops")}
    divisible |= {f"rows.{name}": 8 for name in strides}
    name = f"attention x={SHORT_NAMES[spec.x]} mask={spec.mask} columns={facts.columns}{' splits' * facts.several}"
    return FAMILY.make_build(
        name,
        _attention_kernel,
        chip,
        {f"tensors.{name}": dtype for name, dtype in tensors._asdict().items()},
        {"TILE": _tile(facts.columns), "MATH": math},
        {f"rows.{name}": 0 for name in names} | ({} if facts.several else {"rows.splits": 1}),
        divisible,
        WARPS,
        0,
    )


def units(rows: AttentionRows | LatentRows) -> int:
    """Tiles of rows, of all heads of keys and sequences."""
    return rows.batch * rows.heads * -(-rows.groups * rows.tokens // ROWS)


def _grid(call: AttentionCall, config: Any) -> tuple[int]:
    return (units(call.rows) * call.rows.splits,)


FAMILY: Final = Family(
    AttentionCall,
    TABLE,
    lambda call, chip: AttentionFacts(call.rows.columns, call.rows.splits > 1),
    lambda spec, facts, chip: None,
    lambda spec, facts, config, chip: build_for(spec, facts, chip),
    _grid,
    device="q",
)
builds = FAMILY.builds


def launch(call: AttentionCall) -> None:
    """One launch on the current stream. Several splits need memory for their sums, and a counter per unit."""
    launch_splits(FAMILY, call, _tile(call.rows.columns).columns)


def launch_splits(family: Family, call: AttentionCall | LatentCall, columns: int) -> None:
    """Launch a call, with memory for the sums of its splits if there are several: ``columns`` for each row."""
    rows, device = call.rows, call.q.get_device()
    if rows.splits == 1:
        family.launch(call)
        return
    count = units(rows)
    programs = count * rows.splits
    sums = torch.empty(programs * ROWS * (columns + 2), dtype=torch.float32, device=call.q.device)
    sums, tops = sums.split_with_sizes((programs * ROWS * columns, programs * ROWS * 2))
    if device < 0:
        family.launch(call._replace(sums=sums, tops=tops, counter=torch.zeros(count, dtype=torch.int32)))
        return
    counter, key = counters.take(device, count)
    try:
        family.launch(call._replace(sums=sums, tops=tops, counter=counter))
    except BaseException:
        counters.discard(key)
        raise
