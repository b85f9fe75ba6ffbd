"""``y = act @ weight.T`` and the norm of its segments on the CPU, in one parallel region."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch

from ...cpu.launch import Family, Fields
from ...cpu.sizes import CHUNK, TILE, row_blocks
from . import spec as gemv_norm
from .spec import MAX_ROWS, GemvCall, GemvSpec

SERIAL_BELOW: Final = 131072
"""Weights below which waking other threads costs more than it saves: with two threads 192 rows of 1024 gain, 96 do
not."""


@cache
def _parts(n: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    """First tile, first column and end of each segment and of the tail; then the number of tiles."""
    found: list[int] = []
    tile = begin = 0
    for count, width in zip(gemv_norm.tiles(n, widths, TILE), (*widths, n - sum(widths)), strict=True):
        found += [tile, begin, begin + width]
        tile, begin = tile + count, begin + width
    return (*found, tile)


def _fields(spec: GemvSpec) -> tuple[Fields, Sequence[str]]:
    segments = range(len(spec.gammas))
    fields: Fields = {"next": "0", "threads": "0", "team": "team", "m": "act.shape[0]", "k": "weight.shape[1]"}
    fields |= {"block": "rows[0]", "blocks": "rows[1]", "scratch": "scratch"}
    fields["parts"] = ("parts", 3 * len(spec.gammas) + 4)
    strided = {"act": "act", "weight": "weight", **{f"normed{i}": f"normed[{i}]" for i in segments}}
    for name, expression in strided.items():
        fields |= {name: f"{expression}.data_ptr()", f"{name}.stride": f"{expression}.stride(0)"}
    for name in ("y", "unnormed"):
        fields[name] = f"0 if {name} is None else {name}.data_ptr()"
        fields[f"{name}.stride"] = f"0 if {name} is None else {name}.stride(0)"
    fields |= {f"gamma{i}": f"gammas[{i}].data_ptr()" for i in segments}
    if spec.weight_scale != "none":
        fields["weight_scale"] = "weight_scale.data_ptr()"
        fields["weight_scale.stride"] = "weight_scale.stride(0)"
    if spec.fp8 is not None:
        fields |= {"scale": "scale.data_ptr()", "scale.stride": "scale.stride(0)"}
    fields["counter"] = "0 if counter is None else counter.data_ptr()"
    fields |= {f"counter{i}": "0" for i in segments}
    if spec.traced:
        fields |= {"trace": "trace.data_ptr()", "units": "0 if units is None else units.data_ptr()"}
    return fields, ("eps",)


def _config(call: GemvCall) -> tuple[Any, ...]:
    """Scratch memory holds ``act`` as float32."""
    n, k = call.weight.shape
    parts = _parts(n, call.widths)
    size, count = rows = row_blocks(call.act.shape[0])
    team = 1 if n * k < SERIAL_BELOW else min(torch.get_num_threads(), parts[-1])
    return team, size * count * -(-k // CHUNK) * CHUNK, parts, rows


_VALUES: Final = ("team", "size", "parts", "rows")
FAMILY: Final = Family(GemvCall, _fields, _config, _VALUES, prepares=True, writes_block=True)
precompile = FAMILY.precompile
_launch = FAMILY.launcher()


def launch(call: GemvCall) -> None:
    """Run the kernel of ``call.spec``. A product without norms may have more rows than one kernel call can take."""
    if call.act.shape[0] > MAX_ROWS and call.unnormed is not None:
        for rows, out in zip(call.act.split(MAX_ROWS), call.unnormed.split(MAX_ROWS), strict=True):
            _launch(call._replace(act=rows, unnormed=out))
    else:
        _launch(call)
