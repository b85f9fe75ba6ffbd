"""The argument block of a kernel: one table read by the host, which packs it, and by the kernel, which unpacks it.

A block is 64-bit fields: addresses, counts and strides in elements, then float64 numbers. It has only the fields
that a spec's kernel reads, so packing stays cheap.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from ..rows import RowSpec

BLOCK: Final = 32
"""Columns a kernel works on at a time; rows of scratch memory are whole blocks."""
FLOATS: Final = ("eps", "weight_offset", "scale_ub")
_COSTLY: Final = frozenset({"exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "div"})
"""Operations that take longer than storing and loading a float32."""
_ROW_TENSORS: Final = ("x", "residual", "norm", "codes", "scale", "new_residual")
"""In the order of `launch`'s strides; the operands follow."""
_PARAMETERS: Final = (
    "scratch, chunk, geom, strides, n, x, gamma, residual, operands, static_scale, norm, codes, scale, new_residual, "
    "eps, weight_offset, scale_ub"
)

Packer = Callable[..., bytes]


def _expressions(spec: RowSpec) -> dict[str, str]:
    """Each 64-bit field and the Python expression over `launch`'s arguments that gives it."""
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
    return fields


def offsets(spec: RowSpec) -> dict[str, int]:
    """Byte offset of each field; ``name.strides`` is three fields."""
    found: dict[str, int] = {}
    at = 0
    for name in _expressions(spec):
        found[name] = at
        at += 24 if name.endswith(".strides") else 8
    return {**found, **{name: at + 8 * i for i, name in enumerate(FLOATS)}}


def keeps_h(spec: RowSpec) -> bool:
    """Whether a row's ``h`` is kept in scratch memory after the statistics rather than computed again.

    Scratch memory is float32 rows of whole blocks: the weights, then a row for each thread if this holds.
    """
    return spec.prologue is not None and any(i.op in _COSTLY for i in spec.prologue.program)


def packer(spec: RowSpec) -> Packer:
    """A function of a scratch address, a chunk size and `launch`'s arguments after the spec that returns the block."""
    integers = offsets(spec)["eps"] // 8
    pack = struct.Struct(f"={integers}q{len(FLOATS)}d").pack
    arguments = ", ".join([*_expressions(spec).values(), *FLOATS])
    function: Packer = eval(f"lambda {_PARAMETERS}: pack({arguments})", {"pack": pack})
    return function
