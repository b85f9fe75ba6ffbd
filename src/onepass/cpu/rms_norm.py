"""RMSNorm rows on the CPU: normalize, add, quantize."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

from ..specs.layout import LEVELS
from ..specs.rms_norm import RowCall, RowSpec
from .launcher import Family, Fields, describe, scratch, share
from .sizes import BLOCK

__all__ = ["FAMILY", "describe", "launch", "precompile", "scratch"]

_EXPENSIVE: Final = frozenset({"exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "div"})
"""Operations that take longer than storing and loading a float32."""


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
    fields |= {"n": "n", "gamma": "gamma.data_ptr()", "scratch": "scratch"}
    tensors = [(name, name, given) for name, given in present.items()]
    tensors += [(f"operand{i}", f"operands[{i}]", True) for i in range(len(spec.operands))]
    for position, (name, expression, given) in enumerate(tensors):
        if given:
            fields[name] = f"{expression}.data_ptr()"
            fields[f"{name}.strides"] = (f"strides[{position}]", LEVELS)
    if rule is not None and rule.kind == "group":
        fields["scale.group"] = "scale.stride(-1)"
    if rule is not None and rule.kind == "static":
        fields["static_scale"] = "static_scale.data_ptr()"
    if rule is not None and rule.bound_in_memory:
        fields["scale_ub_tensor"] = "scale_ub_tensor.data_ptr()"
    least = rule is not None and rule.has_least
    return fields, ("eps", "weight_offset", "scale_ub", *(("min_scale",) if least else ()))


def _config(call: RowCall) -> tuple[int, int, int]:
    """Scratch memory has a row for the weights and, to save ``h``, one per thread."""
    spec, n = call.spec, call.n
    threads, chunk = share(call.geom[0], n)
    saved = threads if spec.prologue is not None and keeps_h(spec) else 0
    return threads, (n + BLOCK) * (saved + 1), chunk


FAMILY: Final = Family(RowCall, _fields, _config, ("threads", "size", "chunk"), prepares=True)
launch = FAMILY.launcher()
precompile = FAMILY.precompile
