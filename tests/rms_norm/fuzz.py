"""Random calls of rms_norm, layer_norm, rms_norm_add_rms_norm, the norms that quantize, and quantize."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.formats import FLOATS, FP8_FORMATS
from onepass.ops.rms_norm.op import (
    layer_norm,
    quantize,
    rms_norm,
    rms_norm_add_rms_norm,
    rms_norm_add_rms_norm_quant,
    rms_norm_fused_fp8,
    rms_norm_fused_quant,
)
from onepass.testing.quantized import without_padding
from onepass.testing.tensors import same_bytes
from tests.oracle.batch_regime import REGIMES, assuming
from tests.rms_norm import checks as testing
from tests.rms_norm.fuzz_configuration import PROLOGUES, SANDWICH, STORES_NORM, RowConfiguration, configuration
from tools.fuzz import draw
from tools.fuzz.draw import NORMAL, PLAIN, Place, Values
from tools.fuzz.steps import InSteps, Steps

if TYPE_CHECKING:
    from onepass.gpu.tuning.table import Regime

OPS = ("rms_norm", "rms_norm_fused_fp8", "rms_norm_fused_quant", "layer_norm", *SANDWICH, "quantize")
VALUES = ("values", "second", "gamma", "post", "eps", "scale_ub", "min_scale", "static", "overall", "branch")
"""Fields of a case that do not affect machine code."""
_BOUNDS = (1.5, 448.0, 1e-3, 0.0, -0.0, -2.0, float("inf"), float("-inf"), float("nan"), 1e-42)
"""A bound in memory may be anything."""
_LEAST = (1 / (448 * 512), 0.01, 1e-30, 1e-40, 7e4)
_OVERALL = (1.0, 37.5, 2.0**-4, 1e5, -2.0, 0.0, -0.0, 1e-30, 1e-40, float("inf"), float("-inf"), float("nan"))
_BRANCH = (0.5, 0.22, -1.4, 0.0, 1e-3)
_STATIC = (0.02, 1.0, 0.0, 2.0**-14, 3e4, float("nan"), float("inf"), 1e-40)


@dataclass(frozen=True)
class RowCase(InSteps):
    """One call."""

    config: RowConfiguration
    lead: tuple[int, ...] = (1,)
    n: int = 1
    eps: float = 1e-6
    offset: float = 0.0
    scale_ub: float | None = None
    min_scale: float = 0.01
    """Where the configuration has one."""
    static: float = 0.02
    overall: float = 1.0
    branch: float = 0.5
    """What multiplies a post-norm, where the configuration says so."""
    column: bool = False
    values: Values = NORMAL
    second: Values = NORMAL
    gamma: Values = NORMAL
    post: Values = NORMAL
    """Of the post-norm's gamma."""
    places: tuple[Place, Place, Place, Place] = (PLAIN, PLAIN, PLAIN, PLAIN)
    """Of x, of residual and operands, of codes or y, of the other results."""
    shift: int = 0
    """Elements before gamma."""
    regime: Regime | None = None
    """The batch regime that a GPU is to assume, if not the one of these rows."""

    @property
    def op(self) -> str:
        """The op's name."""
        return self.config.op

    def simpler(self) -> Iterator[RowCase]:
        """Cases that are simpler in one respect."""
        unit = self.config.unit
        for lead in ((1,), (2,), self.lead[:-1]):
            yield replace(self, lead=lead or ((1,) if self.config.heads else ()))
        for n in (1, 2, self.n // unit // 2, self.n // unit - 1):
            yield replace(self, n=max(1, n) * unit)
        yield from draw.simpler(
            self,
            eps=1e-6,
            offset=0.0,
            scale_ub=1.5 if self.config.bounded else None,
            min_scale=0.01,
            static=0.02,
            overall=1.0,
            branch=0.5,
            column=False,
            shift=0,
            regime=None,
        )

    def steps(self, device: str) -> Steps:
        """What `run` does."""
        return _steps(self, device)

    @property
    def elements(self) -> int:
        """How much there is to verify."""
        return math.prod(self.lead) * self.n


def draw_case(c: RowConfiguration, r: Random) -> RowCase:
    """A call with this configuration."""
    lead = draw.lead(r, 12)
    if c.lengths:
        n = r.choices(c.lengths, (4, 3, 1))[0]  # long rows take long to verify
    elif r.random() < 0.01:
        n, lead = draw.size(r, 5000), lead[-1:]
    else:
        n = draw.size(r, 300)
    if not c.lengths:
        n = c.unit * max(1, n // c.unit)
    if c.layout == "128x4":
        lead = lead[:3]  # of which rows always fold to three strides
    if c.heads and not (lead and lead[-1]):
        lead = (*lead[:-1], 1)
    tame = bool(c.prologue) or c.gate is not None or c.bias is not None or c.layer
    bounds = _BOUNDS if c.bounded else (None,) if c.static else (None, None, 1.5, 448.0, 1e-3)
    return RowCase(
        c,
        lead,
        n,
        eps=draw.epsilon(r),
        offset=draw.offset(r) if c.gamma is not None else 0.0,
        scale_ub=r.choice(bounds),
        min_scale=r.choice(_LEAST),
        static=r.choice(_STATIC),
        overall=r.choice(_OVERALL),
        column=r.random() < 0.3,
        values=draw.values(r, tame=tame),
        second=draw.values(r, tame=tame),
        gamma=draw.weights(r),
        post=draw.weights(r) if c.post is not None else NORMAL,
        branch=r.choice(_BRANCH) if c.scaled else 0.5,
        places=(draw.place(r), draw.place(r), draw.place(r, inputs=False), draw.place(r, inputs=False)),
        shift=r.choice((0, 0, 1, 3)),
        regime=r.choice((None, None, *REGIMES[1:])),
    )


def inputs(case: RowCase) -> dict[str, Any]:
    """Keyword arguments of the public function, on the CPU."""
    c, shape = case.config, (*case.lead, case.n)
    x_place, other_place = case.places[:2]
    found: dict[str, Any] = {"x": x_place.put(_x(case.values, shape, c.x)), "rounding": c.rounding}
    if c.normed:
        found |= {"eps": case.eps, "weight_offset": case.offset, "round_sum": c.round_sum}
    if c.post is not None:
        found["gamma_post"] = Place(start=case.shift).put(draw.gamma(case.post, case.n, c.post))
        found["gamma_pre"] = _gamma(case)
        found["branch_scale"] = case.branch if c.scaled else 1.0
    elif c.normed:
        found |= {"gamma": _gamma(case), "return_rstd": c.rstd}
    if c.residual is not None:
        found["residual"] = other_place.put(case.second.make(shape, c.residual))
    if c.gate is not None:
        gate = Values(start=case.second.start + 1).make(shape, torch.float32) * 3
        found |= {"gate": other_place.put(gate.to(c.gate)), "gate_activation": c.gate_activation}
        found |= {"gate_order": c.gate_order} if c.normed else {}
    if c.bias is not None:
        found["bias"] = Values(start=case.second.start + 2).make((case.n,), c.bias)
    if c.op in STORES_NORM:
        found["out_dtype"] = c.y
        if c.op == "layer_norm":
            del found["rounding"]
        return found
    if c.format and c.normed and c.post is None:
        found["statistic"] = "layer" if c.layer else "rms"
    found |= {"quantize": c.quantize} | ({"return_norm": c.norm} if c.normed else {})
    found |= {"format": c.format, "code_max": c.fp8_max} if c.format else {"out_dtype": c.out, "fp8_max": c.fp8_max}
    if c.overall:
        found["global_scale"] = torch.tensor(case.overall)
    if c.static:
        found["static_scale"] = torch.tensor(case.static)
    else:
        found |= {"scales_dtype": c.scales, "group_size": c.group, "scale_ub": case.scale_ub}
        found["min_scale"] = case.min_scale if c.least else 0.0
        if c.bounded:
            found["scale_ub"] = torch.tensor(case.scale_ub)
        if c.format:
            found |= {"scale_format": c.scale_format, "scale_layout": c.layout}
        else:
            order = "column" if case.column else "row"
            found |= {"scale_format": "ue8m0" if c.ue8m0 else "float", "scale_layout": order}
    if c.prologue:
        found["prologue"], kinds = PROLOGUES[c.prologue]
        shapes = {"full": shape, "column": (case.n,), "row": (*case.lead, 1)}
        shapes["group"] = (*case.lead, case.n // (c.operand_group or 1))
        made = (
            replace(case.second, start=case.second.start + i).make(shapes[k], c.operand) for i, k in enumerate(kinds)
        )
        found["prologue_args"] = [t if k == "column" else other_place.put(t) for t, k in zip(made, kinds, strict=True)]
    return found


def _gamma(case: RowCase) -> Tensor | None:
    c = case.config
    if c.gamma is None:
        return None
    heads = case.lead[-1] if c.heads else 1
    gamma = Place(start=case.shift).put(draw.gamma(case.gamma, heads * case.n, c.gamma))
    return gamma.view(heads, case.n) if c.heads else gamma


def _x(values: Values, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The values, clamped for 8-bit formats: integers have no NaN, and neither format has infinities."""
    if dtype in FLOATS:
        return values.make(shape, dtype)
    t = values.make(shape, torch.float32)
    if dtype == torch.int8:
        return (16 * t.nan_to_num()).clamp(-128, 127).to(dtype)
    limit = FP8_FORMATS[dtype].max
    return t.clamp(-limit, limit).to(dtype)


def _call(op: str, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    functions: dict[str, Any] = {"rms_norm": rms_norm, "rms_norm_fused_fp8": rms_norm_fused_fp8}
    functions |= {"layer_norm": layer_norm, "rms_norm_add_rms_norm": rms_norm_add_rms_norm}
    functions |= {"rms_norm_add_rms_norm_quant": rms_norm_add_rms_norm_quant, "quantize": quantize}
    result = functions.get(op, rms_norm_fused_quant)(**arguments)
    result = result if isinstance(result, tuple) else (result,)
    if arguments.get("scale_layout") == "128x4":
        return result[0], without_padding(result[1], arguments["x"].shape[:-1].numel()), *result[2:]
    return result


def result_names(c: RowConfiguration) -> list[str]:
    """The keyword by which each result can be given, in the order they are returned."""
    names = ["out"] if c.op in STORES_NORM else ["out", testing.SCALE_NAMES[c.op]]
    return names + ["residual_out"] * (c.residual is not None) + ["norm_out"] * c.norm + ["rstd_out"] * c.rstd


def _steps(case: RowCase, device: str) -> Steps:
    c = case.config
    host = inputs(case)
    arguments = {k: draw.on_device(v, device) for k, v in host.items()}
    before = draw.snapshot(host)
    with nullcontext() if case.regime is None else assuming(case.regime):
        results, again, others, rooms = _calls(case, device, host, arguments)
    inside = draw.named(arguments)
    names = result_names(c)
    seen, results, again, others = yield inside.values(), results, again, others
    touched = draw.changed(dict(zip(inside, seen, strict=True)), before)
    if touched is not None:
        return f"{touched} was written"
    for name, first, second in zip(names, results, again, strict=True):
        if not same_bytes(first, second):
            return f"{name} differs when written into the caller's tensor"
        if name in rooms and draw.spilt(rooms[name], second):
            return f"bytes beside {name} were written"
    for name, first, second in zip(names if others else (), results, others, strict=False):
        if not same_bytes(first, second):
            return f"{name} differs in place"
    return verify(case, host, results)


_Tensors = tuple[Tensor, ...]


def _calls(
    case: RowCase, device: str, host: dict[str, Any], arguments: dict[str, Any]
) -> tuple[_Tensors, _Tensors, _Tensors, dict[str, Tensor]]:
    """The results of a call, of one into given tensors, of one in place if there can be, and the given tensors before."""
    c = case.config
    results = _call(c.op, arguments)
    names = result_names(c)
    rooms: dict[str, Tensor] = {}
    for name, like in zip(names, results, strict=True):
        if (name in testing.SCALE_NAMES.values() and (c.static or case.column or c.layout != "row")) or not like.dim():
            continue
        where = case.places[2 if name == "out" else 3]
        rooms[name] = where.room(like.shape, like.dtype)
    given = {name: draw.fresh(t, device) for name, t in rooms.items()}
    again = _call(c.op, {**arguments, **given})
    others: tuple[Tensor, ...] = ()
    if c.residual == c.x and not c.prologue and not any(p.expanded for p in case.places[:2]):
        fresh = {k: draw.fresh(v, device) for k, v in host.items()}
        own = {
            "residual_out": fresh["residual"],
            **({"out": fresh["x"]} if c.op in STORES_NORM and c.y in (None, c.x) else {}),
        }
        others = _call(c.op, {**fresh, **own})
    return results, again, others, rooms


def verify(case: RowCase, host: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results."""
    statistic = "layer" if case.config.layer else "rms"
    return testing.verify_call(host | {"statistic": testing.STATISTICS.get(case.op, statistic)}, results)


__all__ = ["OPS", "RowCase", "RowConfiguration", "configuration", "draw_case", "inputs", "verify"]
