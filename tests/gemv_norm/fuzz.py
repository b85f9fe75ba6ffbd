"""Random calls of gemv_and_partial_norm in its four forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from onepass.formats import FLOATS, FP8_FORMATS
from onepass.ops.gemv_norm.launch import MAX_ROWS, MAX_SEGMENTS
from onepass.ops.gemv_norm.op import (
    gemv_and_partial_norm,
    gemv_and_partial_norm_unfused_with_scratch,
    gemv_and_partial_norm_with_scratch,
)
from onepass.testing.tensors import same_bytes
from tests.gemv_norm.checks import products, verify_call, verify_norm_of_stored
from tests.oracle.bounds import Bounds
from tools.fuzz import draw, weights
from tools.fuzz.draw import NORMAL, PLAIN, Place, Values
from tools.fuzz.steps import InSteps, Steps

OPS = ("gemv_and_partial_norm",)
VALUES = ("act", "weight", "scale", "gamma", "eps")
"""Fields of a case that do not affect machine code."""


@dataclass(frozen=True)
class GemvConfiguration:
    """What determines the machine code. ``shapes`` lists the (N, K) and segments to draw from."""

    op: str
    act: torch.dtype = torch.bfloat16
    weight: torch.dtype = torch.bfloat16
    scale: str = "none"
    gammas: tuple[torch.dtype, ...] = (torch.bfloat16,)
    codes: torch.dtype | None = None
    shapes: tuple[tuple[int, int, tuple[int, ...]], ...] = ()


def configuration(op: str, r: Random, bounded: bool) -> GemvConfiguration:
    """A random configuration that the contract allows."""
    act = r.choice(FLOATS)
    weight = weights.dtype(r, act)
    segments = r.choice((1, 1, 1, 2, MAX_SEGMENTS))
    c = GemvConfiguration(
        op,
        act,
        weight=weight,
        scale=weights.scale_kind(r, weight),
        gammas=tuple(r.choice((act, *FLOATS)) for _ in range(segments)),
        codes=r.choice((None, None, None, *FP8_FORMATS)),
    )
    return replace(c, shapes=tuple(_shape(c, r) for _ in range(2))) if bounded else c


def _shape(c: GemvConfiguration, r: Random) -> tuple[int, int, tuple[int, ...]]:
    widths = tuple(draw.size(r, 40) for _ in c.gammas)
    return sum(widths) + r.choice((0, 1, draw.size(r, 40))), draw.size(r, 1200 if r.random() < 0.02 else 250), widths


@dataclass(frozen=True)
class GemvCase(InSteps):
    """One call."""

    config: GemvConfiguration
    m: int = 1
    n: int = 1
    k: int = 1
    widths: tuple[int, ...] = (1,)
    eps: float = 1e-6
    act: Values = NORMAL
    weight: Values = NORMAL
    scale: Values = NORMAL
    gamma: Values = NORMAL
    places: tuple[Place, Place, Place] = (PLAIN, PLAIN, PLAIN)
    """Of act, of weight, of the results."""
    unfused: bool = True
    """Whether the forms of two launches are called too."""

    @property
    def op(self) -> str:
        """The op's name."""
        return self.config.op

    def simpler(self) -> Iterator[GemvCase]:
        """Cases that are simpler in one respect."""
        ones = (1,) * len(self.widths)
        for m in (1, 2, self.m // 2):
            yield replace(self, m=m)
        for k in (1, 2, self.k // 2, self.k - 1):
            yield replace(self, k=max(1, k))
        for widths in (ones, tuple(max(1, w // 2) for w in self.widths)):
            yield replace(self, widths=widths, n=sum(widths) + self.n - sum(self.widths))
        yield replace(self, n=sum(self.widths))
        yield from draw.simpler(self, eps=1e-6, unfused=False)

    def steps(self, device: str) -> Steps:
        """What `run` does."""
        return _steps(self, device)

    @property
    def elements(self) -> int:
        """How much there is to verify."""
        return self.m * self.k + self.n * self.k + 4 * self.m * self.n


def _place(r: Random, *, inputs: bool = True) -> Place:
    return replace(draw.place(r, inputs=inputs), reverse=False)


def _gammas(r: Random) -> Values:
    """No infinite gamma: its product with a sum that may be zero is undetermined."""
    found = draw.weights(r)
    return replace(found, spoil="nan") if found.spoil else found


def draw_case(c: GemvConfiguration, r: Random) -> GemvCase:
    """A call with this configuration."""
    n, k, widths = r.choice(c.shapes) if c.shapes else _shape(c, r)
    act = draw.values(r)
    if "largest" in (act.kind, act.other):
        act = Values(start=act.start)
    return GemvCase(
        c,
        0 if r.random() < 0.01 else r.randint(1, MAX_ROWS),
        n,
        k,
        widths,
        eps=draw.epsilon(r),
        act=act,
        weight=weights.weights(r),
        scale=weights.scale_values(r),
        gamma=_gammas(r),
        places=(_place(r), _place(r, inputs=False), _place(r, inputs=False)),
        unfused=r.random() < 0.3,
    )


def inputs(case: GemvCase) -> dict[str, Any]:
    """Keyword arguments of the public function, on the CPU."""
    c = case.config
    gammas = [
        draw.gamma(replace(case.gamma, start=case.gamma.start + i), w, dtype)
        for i, (w, dtype) in enumerate(zip(case.widths, c.gammas, strict=True))
    ]
    found: dict[str, Any] = {
        "act": case.places[0].put(case.act.make((case.m, case.k), c.act)),
        "weight": weights.made(case.weight, (case.n, case.k), c.act, c.weight, case.places[1]),
        "gamma": gammas[0],
        "segments": gammas[1:],
        "eps": case.eps,
        "normed_dtype": c.codes,
    }
    scale = weights.scale(case.scale, c.scale, case.n, case.k, case.places[1] != PLAIN)
    return found if scale is None else found | {"weight_scale": scale}


def _steps(case: GemvCase, device: str) -> Steps:
    c, host = case.config, inputs(case)
    arguments = {k: draw.on_device(v, device) for k, v in host.items()}
    before = draw.snapshot(host)
    results = gemv_and_partial_norm(**arguments)
    rooms = [case.places[2].room(t.shape, t.dtype) for t in results]
    given = gemv_and_partial_norm(**arguments, out=_fresh(rooms, device))
    scratch = _fresh(rooms, device)
    counter = torch.zeros(len(case.widths), dtype=torch.int32, device=device)
    rest = list(scratch)
    normed, unnormed = rest.pop(0), rest.pop()
    scale = rest.pop(0) if c.codes is not None else None
    named = (arguments["act"], arguments["weight"], arguments["gamma"], case.eps, counter)
    more = {"segments": arguments["segments"], "weight_scale": arguments.get("weight_scale")}
    gemv_and_partial_norm_with_scratch(normed, unnormed, *named, segment_outputs=rest, scale_output=scale, **more)
    inside = draw.named(arguments)
    seen, results, given, made, (counter,) = yield inside.values(), results, given, scratch, (counter,)
    if counter.any():
        return f"the counter is {counter.tolist()} after a call"
    touched = draw.changed(dict(zip(inside, seen, strict=True)), before)
    if touched is not None:
        return f"{touched} was written"
    for form, others in (("out", given), ("scratch", made)):
        for index, (first, second) in enumerate(zip(results, others, strict=True)):
            if not same_bytes(first, second):
                return f"result {index} differs with {form}"
            if draw.spilt(rooms[index], second):
                return f"bytes beside result {index} were written with {form}"
    y = products(host, device == "cuda")
    wrong = verify(case, host, results, y)
    if wrong is None and case.unfused:
        wrong = yield from _unfused(case, host, arguments, device, y)
    return wrong


def verify(case: GemvCase, host: dict[str, Any], results: tuple[Tensor, ...], y: Bounds) -> str | None:
    """None, or what is wrong with the results; ``y`` are the products."""
    return verify_call(host, results, y)


def _fresh(rooms: list[Tensor], device: str) -> list[Tensor]:
    return [draw.fresh(t, device) for t in rooms]


def _unfused(case: GemvCase, host: dict[str, Any], arguments: dict[str, Any], device: str, exact: Bounds) -> Steps:
    """Both forms in two launches: y as rounded, and the norm of the rounded y."""
    given: dict[str, Any] = {
        name: arguments[name] for name in ("act", "weight", "gamma", "eps", "weight_scale") if name in arguments
    }
    normed, unnormed = gemv_and_partial_norm(**given, fused=False)
    room = torch.empty(case.m, case.n, dtype=case.config.act, device=device)
    again = torch.empty_like(normed)
    scale = given.pop("weight_scale", None)
    gemv_and_partial_norm_unfused_with_scratch(again, **given, y_scratch=room, weight_scale=scale)
    ((normed, unnormed, again, room),) = yield ((normed, unnormed, again, room),)
    width = case.widths[0]
    if not same_bytes(again, normed) or not same_bytes(room[:, width:], unnormed):
        return "fused=False differs with scratch"
    wrong = None
    if _summed_by_us(case):
        wrong = exact.stored(room) or (yield from _often(given, normed, unnormed, scale))
    if wrong is not None:
        return f"fused=False: {wrong}"
    wrong = verify_norm_of_stored(host, normed, room)
    return wrong and f"fused=False: {wrong}"


def _often(given: dict[str, Any], normed: Tensor, unnormed: Tensor, scale: Tensor | None) -> Steps:
    """Repeat the rows beyond what one launch can norm: they must keep their bytes."""
    times = MAX_ROWS // max(1, normed.shape[0]) + 1
    many = gemv_and_partial_norm(
        given["act"].repeat(times, 1), given["weight"], given["gamma"], given["eps"], weight_scale=scale, fused=False
    )
    (many,) = yield (many,)
    same = all(same_bytes(t, once.repeat(times, 1)) for t, once in zip(many, (normed, unnormed), strict=True))
    return None if same else "rows differ among more rows"


def _summed_by_us(case: GemvCase) -> bool:
    """Whether onepass computes y, rather than torch, which rounds differently."""
    return case.config.weight not in FLOATS or case.config.scale != "none"
