"""The argument block of a kernel: one table read by the host, which packs it, and by the kernel, which unpacks it.

A block is 64-bit fields: addresses, counts and strides in elements, then float64 numbers. It has only the fields
that a spec's kernel reads, so packing stays cheap.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from ..specs.gemv_norm import GemvCall, GemvSpec
from ..specs.rms_norm import RowCall, RowSpec

Spec = RowSpec | GemvSpec

BLOCK: Final = 32
"""Columns a kernel works on at a time; rows of scratch memory are whole blocks."""
CHUNK: Final = 512
"""Columns of K that a GEMV adds up before it puts the sum aside: the error of a long sum stays that of a short one."""
SUM: Final = 16
"""Lanes of a GEMV's sum."""
TILE: Final = 24
"""Columns of y in a GEMV's tile: a multiple of all the numbers of weight rows that are worked on together."""
ROW_BLOCKS: Final = (1, 2, 4, 6, 8)
"""Rows of ``act`` that a GEMV holds sums for at a time; with more of them, two sixes or eights take turns."""

_COSTLY: Final = frozenset({"exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "div"})
"""Operations that take longer than storing and loading a float32."""
_ROW_TENSORS: Final = ("x", "residual", "norm", "codes", "scale", "new_residual")
"""In the order of `launch`'s strides; the operands follow."""
_PARAMETERS: Final = "scratch, chunk, call"
_GEMV_PARAMETERS: Final = "scratch, team, parts, blocks, call"

Packer = Callable[..., bytes]


def _expressions(spec: Spec) -> dict[str, str]:
    """Each field and the Python expression over `launch`'s arguments that gives it; the last ones are float64."""
    return _gemv_expressions(spec) if isinstance(spec, GemvSpec) else _row_expressions(spec)


def floats(spec: Spec) -> tuple[str, ...]:
    """The float64 fields."""
    if isinstance(spec, GemvSpec):
        return ("eps",)
    least = spec.scale is not None and spec.scale.has_least
    return ("eps", "weight_offset", "scale_ub", *(("min_scale",) if least else ()))


def _row_expressions(spec: RowSpec) -> dict[str, str]:
    scaled = spec.scale is not None and spec.scale.kind != "static"
    present = {
        "x": True,
        "residual": spec.residual is not None,
        "norm": spec.norm is not None,
        "codes": spec.fp8 is not None,
        "scale": scaled,
        "new_residual": spec.residual is not None,
    }
    fields = {
        "next": "0",
        "threads": "0",
        "chunk": "chunk",
        "rows": "geom[0]",
        "n1": "geom[1]",
        "n2": "geom[2]",
        "n": "n",
    }
    fields |= {"gamma": "gamma.data_ptr()", "scratch": "scratch"}
    tensors = [(name, name) for name in _ROW_TENSORS]
    tensors += [(f"operand{i}", f"operands[{i}]") for i in range(len(spec.operands))]
    for position, (name, expression) in enumerate(tensors):
        if present.get(name, True):
            fields[name] = f"{expression}.data_ptr()"
            fields[f"{name}.strides"] = f"*strides[{position}]"
    if spec.scale is not None and spec.scale.kind == "group":
        fields["scale.group"] = "scale.stride(-1)"
    if spec.scale is not None and not scaled:
        fields["static_scale"] = "static_scale.data_ptr()"
    if spec.scale is not None and spec.scale.bound_in_memory:
        fields["scale_ub_tensor"] = "scale_ub_tensor.data_ptr()"
    return fields | {name: name for name in floats(spec)}


def _gemv_expressions(spec: GemvSpec) -> dict[str, str]:
    """``parts`` has, for each segment and the tail, its first tile, its first column and its end; then all tiles."""
    segments = range(len(spec.gammas))
    fields = {
        "next": "0",
        "threads": "0",
        "team": "team",
        "m": "act.shape[0]",
        "k": "weight.shape[1]",
        "block": "blocks[0]",
        "blocks": "blocks[1]",
    }
    fields |= {"scratch": "scratch", "parts": "*parts"}
    strided = {"act": "act", "weight": "weight", **{f"normed{i}": f"normed[{i}]" for i in segments}}
    for name, expression in strided.items():
        fields |= {name: f"{expression}.data_ptr()", f"{name}.stride": f"{expression}.stride(0)"}
    for name in ("y", "unnormed"):
        fields[name] = f"0 if {name} is None else {name}.data_ptr()"
        fields[f"{name}.stride"] = f"0 if {name} is None else {name}.stride(0)"
    fields |= {f"gamma{i}": f"gammas[{i}].data_ptr()" for i in segments}
    if spec.weight_scale != "none":
        fields["weight_scale"] = "weight_scale.data_ptr()"
    if spec.fp8 is not None:
        fields |= {"scale": "scale.data_ptr()", "scale.stride": "scale.stride(0)"}
    fields["counter"] = "0 if counter is None else counter.data_ptr()"
    fields |= {f"counter{i}": "0" for i in segments}
    if spec.traced:
        fields |= {"trace": "trace.data_ptr()", "units": "0 if units is None else units.data_ptr()"}
    return fields | {name: name for name in floats(spec)}


def row_blocks(m: int) -> tuple[int, int]:
    """The block of rows that a GEMV of ``m`` rows takes, and how often: together ``m`` rows, or a few more."""
    count = -(-m // ROW_BLOCKS[-1])
    return next(block for block in ROW_BLOCKS if block * count >= m), count


def offsets(spec: Spec) -> dict[str, int]:
    """Byte offset of each field; ``name.strides`` is three fields, ``parts`` one and three for each part of y."""
    found: dict[str, int] = {}
    at = 0
    for name in _expressions(spec):
        found[name] = at
        at += 24 if name.endswith(".strides") else 8
        if name == "parts" and isinstance(spec, GemvSpec):
            at += 24 * (len(spec.gammas) + 1)
    return found


def keeps_h(spec: RowSpec) -> bool:
    """Whether a row's ``h`` is kept in scratch memory after the statistics rather than computed again.

    Scratch memory is float32 rows of whole blocks: the weights, then a row for each thread if this holds.
    """
    return spec.prologue is not None and any(i.op in _COSTLY for i in spec.prologue.program)


def packer(spec: Spec) -> Packer:
    """A function that returns the block: of what `launch` has worked out and, after it, its arguments after the spec."""
    integers = offsets(spec)["eps"] // 8
    pack = struct.Struct(f"={integers}q{len(floats(spec))}d").pack
    arguments = ", ".join(_expressions(spec).values())
    parameters = _GEMV_PARAMETERS if isinstance(spec, GemvSpec) else _PARAMETERS
    names = ", ".join(GemvCall._fields if isinstance(spec, GemvSpec) else RowCall._fields)
    lines = (f"def packed({parameters}):", f"    {names} = call", f"    return pack({arguments})")
    scope: dict[str, Any] = {"pack": pack}
    exec("\n".join(lines), scope)
    function: Packer = scope["packed"]
    return function
