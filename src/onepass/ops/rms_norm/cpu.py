"""RMSNorm rows on the CPU: normalize, add, quantize."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

import torch

from ...core.layout import LEVELS
from ...core.scale_layout import TILE_BYTES
from ...cpu.launch import CHUNK, CHUNKS_PER_THREAD, Family, Fields, describe, scratch
from ...cpu.sizes import BLOCK
from .spec import RowCall, RowSpec

__all__ = ["FAMILY", "describe", "launch", "precompile", "scratch"]

_EXPENSIVE: Final = frozenset({"exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "div"})
"""Operations that take longer than storing and loading a float32."""


SERIAL_BELOW: Final = 65536
"""Elements of inputs below which waking other threads costs more than it saves. A parallel region of two threads that
are awake takes 0.7 us, and 16 rows of 4096 take 6 us on one thread; threads that sleep take several times as long."""
FAR: Final = {"norm": 1, "new_residual": 2}
"""The bits of outputs that bypass the caches. An output larger than the caches is not in them when it is read again. Stored
as usual, its lines are read first: three transfers per element of x and y instead of two."""
USUAL_CACHE: Final = 32 << 20
TAKES: Final = 4
"""A thread that would take rows fewer times than this takes them at once."""


@cache
def keeps_h(spec: RowSpec) -> bool:
    """Whether ``h`` is saved in scratch memory after the statistics, because computing it again would take longer."""
    return spec.prologue is not None and any(i.op in _EXPENSIVE for i in spec.prologue.program)


def _fields(spec: RowSpec) -> tuple[Fields, Sequence[str]]:
    rule = spec.scale
    stored_scale = rule is not None and rule.kind != "static"
    present = {
        "x": True,
        "residual": spec.residual is not None,
        "norm": spec.norm is not None,
        "codes": spec.fp8 is not None,
        "scale": stored_scale,
        "new_residual": spec.residual is not None,
    }
    fields: Fields = {
        "next": "0",
        "threads": "0",
        "chunk": "chunk",
        "rows": "geom[0]",
        "n1": "geom[1]",
        "n2": "geom[2]",
    }
    shared_gamma = spec.gamma is not None and not spec.per_row
    fields |= {"n": "n"} | ({"gamma": "gamma.data_ptr()"} if shared_gamma else {}) | {"scratch": "scratch"}
    if spec.fp8 is None:
        fields["far"] = "far"
    tensors = [(name, name, given) for name, given in present.items()]
    tensors += [(f"operand{i}", f"operands[{i}]", True) for i in range(len(spec.operands))]
    tensors += [("row_gamma", "row_gamma", spec.per_row), ("rstd", "rstd", spec.rstd)]
    for position, (name, expression, given) in enumerate(tensors):
        if given:
            fields[name] = f"{expression}.data_ptr()"
            fields[f"{name}.strides"] = (f"strides[{position}]", LEVELS)
    if rule is not None and rule.kind == "group":
        fields["scale.group"] = "scale.stride(-1)" if rule.packing != "128x4" else str(TILE_BYTES)
    if rule is not None and (rule.kind == "static" or rule.has_global):
        fields["static_scale"] = "static_scale.data_ptr()"
    if rule is not None and rule.bound_in_memory:
        fields["scale_ub_tensor"] = "scale_ub_tensor.data_ptr()"
    least = rule is not None and rule.has_least
    return fields, ("eps", "weight_offset", "scale_ub", *(("min_scale",) if least else ()))


@cache
def _inputs(spec: RowSpec) -> int:
    """Tensors that are read row by row."""
    return 1 + (spec.residual is not None) + sum(operand.kind == "full" for operand in spec.operands)


def split(rows: int, columns: int, inputs: int) -> tuple[int, int]:
    """The number of threads for these rows, and the number of rows that a thread takes at a time."""
    if rows <= 1 or rows * columns * inputs < SERIAL_BELOW:
        return 1, 1
    count = torch.get_num_threads()
    chunk = max(1, CHUNK // columns, rows // (count * CHUNKS_PER_THREAD))
    threads = min(count, -(-rows // chunk))
    each = -(-rows // threads)
    return threads, each if each < TAKES * chunk else chunk


@cache
def cache_size() -> int:
    """Bytes of the largest cache, as Linux reports it, or `USUAL_CACHE`."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 0) if text[:-1].isdigit() else 0)
    return max([*sizes, 0]) or USUAL_CACHE


def _far(call: RowCall) -> int:
    """Outputs that bypass the caches: they are larger than all caches, and not read before they are written."""
    inputs = [call.x.data_ptr(), 0 if call.residual is None else call.residual.data_ptr()]
    outs = {"norm": call.norm, "new_residual": call.new_residual}
    chosen = [name for name, t in outs.items() if t is not None and t.data_ptr() not in inputs]
    return sum(FAR[name] for name in chosen)


def _config(call: RowCall) -> tuple[int, int, int, int]:
    """Scratch memory has a row for the weights and, to save ``h``, one per thread."""
    spec, n, rows = call.spec, call.n, call.geom[0]
    threads, chunk = split(rows, n, _inputs(spec))
    saved = threads if spec.prologue is not None and keeps_h(spec) else 0
    far = _far(call) if spec.fp8 is None and rows * n * 2 >= cache_size() else 0
    return threads, (n + BLOCK) * (saved + 1), chunk, far


FAMILY: Final = Family(RowCall, _fields, _config, ("threads", "size", "chunk", "far"), prepares=True)
launch = FAMILY.launcher()
precompile = FAMILY.precompile
