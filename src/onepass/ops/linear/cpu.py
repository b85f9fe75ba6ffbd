"""``y = norm(x) @ weight.T`` with everything before and after it on the CPU, in one parallel region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import torch

from ...cpu.launch import Family, Fields
from ...cpu.sizes import CHUNK, MAX_BLOCKS, MAX_SLOTS, PREPARED_ROWS, SUM, TILE, row_blocks
from .spec import LinearCall, LinearSpec, linear_spec

SERIAL_BELOW: Final = 131072
"""A call is serial if ``N * K * (1 + M // 8)`` is smaller, as in `gemv_norm`."""


def _fields(spec: LinearSpec) -> tuple[Fields, Sequence[str]]:
    fields: Fields = {
        "next": "0",
        "threads": "0",
        "team": "team",
        "m": "x.shape[0]",
        "k": "weight.shape[1]",
        "n": "out.shape[1]",
    }
    fields |= {"block": "block", "blocks": "blocks", "panels": "panels", "slots": "slots", "scratch": "scratch"}
    fields |= {"preparations": "preparations", "tiles": "tiles"}
    fields |= dict.fromkeys(("prepared", "done"), (f"(0,) * {MAX_SLOTS}", MAX_SLOTS))
    present = {
        "x": True,
        "weight": True,
        "out": True,
        "weight_scale": spec.weight_scale != "none",
        "residual": spec.residual is not None,
        "residual_out": spec.residual is not None,
        "add": spec.add is not None,
    }
    for name, given in present.items():
        if given:
            fields |= {name: f"{name}.data_ptr()", f"{name}.stride": f"{name}.stride(0)"}
    if spec.gamma is not None:
        fields["gamma"] = "gamma.data_ptr()"
    if spec.bias is not None:
        fields["bias"] = "bias.data_ptr()"
    return fields, ("eps", "weight_offset")


def _config(call: LinearCall) -> tuple[Any, ...]:
    """Scratch memory has a slot of float32 rows for each panel that is worked on at a time, and every thread's sums."""
    n, k = call.weight.shape
    m, columns = call.out.shape
    block, count = row_blocks(m)
    panels = -(-count // MAX_BLOCKS)
    blocks = -(-count // panels)
    tiles = -(-columns // TILE)
    team = 1 if n * k * (1 + m // 8) < SERIAL_BELOW else min(torch.get_num_threads(), tiles * panels)
    slots = min(panels, MAX_SLOTS, 2 + team // tiles)
    rows = block * blocks
    size = slots * rows * -(-k // CHUNK) * CHUNK + team * rows * TILE * SUM
    return team, size, block, blocks, panels, slots, -(-rows // PREPARED_ROWS), tiles


_VALUES: Final = ("team", "size", "block", "blocks", "panels", "slots", "preparations", "tiles")


def _canonical(spec: LinearSpec) -> LinearSpec:
    """Static weights make no difference on a CPU."""
    return linear_spec(**asdict(spec) | {"static": False}) if spec.static else spec


FAMILY: Final = Family(LinearCall, _fields, _config, _VALUES, writes_block=True, canonical=_canonical)
precompile = FAMILY.precompile
launch = FAMILY.launcher()
