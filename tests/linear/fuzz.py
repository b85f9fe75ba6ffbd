"""Random calls of linear: against bounds, and against its separate steps to the byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from onepass.formats import FLOATS, ROUNDINGS
from onepass.ops.linear.launch import ACTIVATIONS
from onepass.ops.linear.op import LINEAR, linear
from onepass.ops.rms_norm.op import rms_norm
from onepass.testing.tensors import same_bytes
from tests.linear.checks import as_rows, verify_call
from tools.fuzz import draw, weights
from tools.fuzz.draw import NORMAL, PLAIN, Place, Values
from tools.fuzz.steps import InSteps, Steps

OPS = ("linear",)
VALUES = ("values", "weight", "scale", "gamma", "residual", "bias", "add", "eps")
"""Fields of a case that do not affect machine code."""
_ROWS = (1, 1, 2, 3, 4, 5, 8, 16, 17, 33, 70)
F32 = torch.float32
FLAGS = tuple(name for name, option in LINEAR.options.items() if option.type == "bool")


@dataclass(frozen=True)
class LinearConfiguration:
    """What determines the machine code. ``shapes`` lists the columns of the result and K to draw from."""

    op: str
    x: torch.dtype = torch.bfloat16
    weight: torch.dtype = torch.bfloat16
    scale: str = "none"
    gamma: torch.dtype | None = None
    residual: torch.dtype | None = None
    bias: torch.dtype | None = None
    activation: str | None = None
    add: torch.dtype | None = None
    out: torch.dtype | None = None
    rounding: str = "once"
    flags: tuple[str, ...] = ()
    """Options that are true."""
    shapes: tuple[tuple[int, int], ...] = ()


def configuration(op: str, r: Random, bounded: bool) -> LinearConfiguration:
    """A random configuration that the contract allows."""
    x = r.choice(FLOATS)
    weight = weights.dtype(r, x)
    rounding = r.choice(("once", *ROUNDINGS))
    return LinearConfiguration(
        op,
        x,
        weight,
        scale=weights.scale_kind(r, weight),
        gamma=r.choice((None, None, x, *FLOATS)),
        residual=r.choice((None, None, x, F32)),
        bias=r.choice((None, None, None, *FLOATS)),
        activation=r.choice((None, None, None, *ACTIVATIONS)),
        add=r.choice((None, None, x, F32)),
        out=None if rounding == "hf" else r.choice((None, x, F32)),
        rounding=rounding,
        flags=tuple(name for name in FLAGS if r.random() < 0.4),
        shapes=tuple(_shape(r) for _ in range(3)) if bounded else (),
    )


def _shape(r: Random) -> tuple[int, int]:
    wide = r.random() < 0.04
    return draw.size(r, 700 if wide else 150), draw.size(r, 40 if wide else 1200 if r.random() < 0.05 else 300)


@dataclass(frozen=True)
class LinearCase(InSteps):
    """One call."""

    config: LinearConfiguration
    lead: tuple[int, ...] = (1,)
    columns: int = 1
    k: int = 1
    eps: float = 1e-6
    offset: float = 0.0
    values: Values = NORMAL
    weight: Values = NORMAL
    scale: Values = NORMAL
    gamma: Values = NORMAL
    residual: Values = NORMAL
    bias: Values = NORMAL
    add: Values = NORMAL
    places: tuple[Place, Place, Place, Place, Place] = (PLAIN,) * 5
    """Of x, of weight, of the residual, of add, of the results."""
    separate: bool = True
    """Whether the separate steps and one row alone are called too."""

    @property
    def op(self) -> str:
        """The op's name."""
        return self.config.op

    @property
    def n(self) -> int:
        """Rows of weight."""
        return self.columns * (2 if self.config.activation else 1)

    def simpler(self) -> Iterator[LinearCase]:
        """Cases that are simpler in one respect."""
        for lead in ((1,), (2,), self.lead[1:] or (1,)):
            yield replace(self, lead=lead)
        for k in (1, 2, self.k // 2, self.k - 1):
            yield replace(self, k=max(1, k))
        for columns in (1, self.columns // 2, self.columns - 1):
            yield replace(self, columns=max(1, columns))
        yield from draw.simpler(self, eps=1e-6, offset=0.0, separate=False)

    def steps(self, device: str) -> Steps:
        """What `run` does."""
        return _steps(self, device)

    @property
    def elements(self) -> int:
        """How much there is to verify."""
        m = math.prod(self.lead)
        return m * self.k + self.n * self.k + 4 * m * self.n


def _finite(r: Random) -> Values:
    """Values whose products do not exceed float32."""
    found = draw.values(r)
    return Values(start=found.start) if "largest" in (found.kind, found.other) else found


def draw_case(c: LinearConfiguration, r: Random) -> LinearCase:
    """A call with this configuration."""
    columns, k = r.choice(c.shapes) if c.shapes else _shape(r)
    gamma = draw.weights(r)
    return LinearCase(
        c,
        draw.lead(r, 20) if r.random() < 0.5 else (r.choice(_ROWS),),
        columns,
        k,
        eps=draw.epsilon(r),
        offset=draw.offset(r),
        values=_finite(r),
        weight=weights.weights(r),
        scale=weights.scale_values(r),
        gamma=replace(gamma, spoil="nan") if gamma.spoil else gamma,
        residual=_finite(r),
        bias=draw.values(r, tame=True),
        add=_finite(r),
        places=(
            draw.place(r),
            replace(draw.place(r, inputs=False), reverse=False),
            draw.place(r),
            draw.place(r),
            draw.place(r, inputs=False),
        ),
        separate=r.random() < 0.5,
    )


def inputs(case: LinearCase) -> dict[str, Any]:
    """Keyword arguments of the public function, on the CPU."""
    c, k = case.config, case.k
    found: dict[str, Any] = {
        "x": case.places[0].put(case.values.make((*case.lead, k), c.x)),
        "weight": weights.made(case.weight, (case.n, k), c.x, c.weight, case.places[1]),
        "weight_scale": weights.scale(case.scale, c.scale, case.n, k, case.places[1] != PLAIN),
        "activation": c.activation,
        "rounding": c.rounding,
        "out_dtype": c.out,
        **{name: name in c.flags for name in FLAGS},
    }
    if c.gamma is not None:
        found |= {"gamma": draw.gamma(case.gamma, k, c.gamma), "eps": case.eps, "weight_offset": case.offset}
    if c.residual is not None:
        found["residual"] = case.places[2].put(case.residual.make((*case.lead, k), c.residual))
    if c.bias is not None:
        found["bias"] = case.bias.make((case.n,), c.bias)
    if c.add is not None:
        found["add"] = case.places[3].put(case.add.make((*case.lead, case.columns), c.add))
    return found


def _call(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    results = linear(**arguments)
    return results if isinstance(results, tuple) else (results,)


def _steps(case: LinearCase, device: str) -> Steps:
    """Make all calls, fetch everything at once, then compare."""
    host = inputs(case)
    arguments = {name: draw.on_device(value, device) for name, value in host.items()}
    before = draw.snapshot(host)
    results = _call(arguments)
    rooms = [case.places[4].room(t.shape, t.dtype) for t in results]
    given = dict(zip(("out", "residual_out"), (draw.fresh(t, device) for t in rooms), strict=False))
    others = _call(arguments | given)
    in_place = _in_place(arguments, results)
    steps = _separately(arguments) if case.separate else ()
    alone = _alone(arguments) if case.separate and 0 not in case.lead else ()
    inside = draw.named(arguments)
    calls = (results, others, in_place, steps, alone)
    seen, results, others, in_place, steps, alone = yield inside.values(), *calls
    touched = draw.changed(dict(zip(inside, seen, strict=True)), before)
    if touched is not None:
        return f"{touched} was written"
    for index, (first, second) in enumerate(zip(results, others, strict=True)):
        if not same_bytes(first, second):
            return f"result {index} differs with out"
        if draw.spilt(rooms[index], second):
            return f"bytes beside result {index} were written"
    if not all(same_bytes(a, b) for a, b in zip(results, in_place, strict=True)):
        return "results differ in place"
    same = same_bytes if "gamma" in host else _same_values  # torch's sum may have another NaN
    if not all(same(a, b) for a, b in zip(results, steps, strict=False)):
        return "results differ from those of separate steps"
    if not all(same_bytes(t.reshape(-1, t.shape[-1])[-1:], row) for t, row in zip(results, alone, strict=False)):
        return "the last row differs alone"
    return verify(case, host, results, device == "cuda")


def verify(case: LinearCase, host: dict[str, Any], results: tuple[Tensor, ...], on_gpu: bool = False) -> str | None:
    """None, or what is wrong with the results."""
    if results[0].shape != (*case.lead, case.columns):
        return f"shape {list(results[0].shape)}"
    if 0 in case.lead:
        return None
    return verify_call(as_rows(host), tuple(t.reshape(-1, t.shape[-1]) for t in results), on_gpu)


def _in_place(arguments: dict[str, Any], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Results in place of copies of add and the residual."""
    again = dict(arguments)
    if "add" in again and again["add"].dtype == results[0].dtype:
        again["add"] = again["out"] = again["add"].clone(memory_format=torch.contiguous_format)
    if len(results) > 1:
        again["residual"] = again["residual_out"] = again["residual"].clone(memory_format=torch.contiguous_format)
    return _call(again)


def _separately(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The product of `rms_norm`'s result, or of the rounded sum, and the new residual. Empty if there is no such step."""
    x, residual = arguments["x"], arguments.get("residual")
    names = ("gamma", "eps", "weight_offset", "residual")
    if "gamma" in arguments:
        norm = rms_norm(x, **{name: arguments[name] for name in (*names, "rounding") if name in arguments})
        a, *new = norm if isinstance(norm, tuple) else (norm,)
    elif residual is not None:
        total = x.float() + residual.float()
        a, *new = total.to(x.dtype), total.to(residual.dtype)
    else:
        return ()
    rest = {name: value for name, value in arguments.items() if name not in names}
    return *_call(rest | {"x": a}), *new


def _same_values(a: Tensor, b: Tensor) -> bool:
    return same_bytes(*(torch.where(t.isnan(), torch.nan, t) for t in (a, b)))


def _alone(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The results of the last row of the batch alone."""
    found = ((name, arguments.get(name)) for name in ("x", "residual", "add"))
    return _call(arguments | {name: t.reshape(-1, t.shape[-1])[-1:] for name, t in found if t is not None})
