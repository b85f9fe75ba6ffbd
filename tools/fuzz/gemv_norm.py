"""Random calls of gemv_and_partial_norm in its four forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from onepass.formats import FLOATS, FP8_FORMATS, ScaleRule
from onepass.ops.gemv_norm import (
    gemv_and_partial_norm,
    gemv_and_partial_norm_unfused_with_scratch,
    gemv_and_partial_norm_with_scratch,
)
from onepass.specs.gemv_norm import MAX_ROWS, MAX_SEGMENTS
from onepass.testing import compare, oracle
from onepass.testing.case import on_device, same_bytes
from tools.fuzz import bounds, draw
from tools.fuzz.bounds import FLOOR, Bounds
from tools.fuzz.draw import NORMAL, PLAIN, Kind, Place, Values
from tools.fuzz.rms_norm import copied

OPS = ("gemv_and_partial_norm",)
VALUES = ("act", "weight", "scale", "gamma", "eps")
"""Fields of a case that choose no machine code."""
_KINDS: tuple[Kind, ...] = ("normal", "normal", "ties", "small", "equal", "one hot", "zero", "-zero")
"""Of weights. Of act also larger ones: sums must not be beyond float32."""
_SCALED = 256
"""Products with fp8 weights are summed at 1/256 of their size, so that much more falls among subnormal numbers."""


@dataclass(frozen=True)
class GemvConfiguration:
    """What shapes the machine code; ``shapes``, (N, K) and the segments, the only ones to be drawn."""

    op: str
    act: torch.dtype = torch.bfloat16
    weight: torch.dtype = torch.bfloat16
    scale: str = "none"
    gammas: tuple[torch.dtype, ...] = (torch.bfloat16,)
    codes: torch.dtype | None = None
    shapes: tuple[tuple[int, int, tuple[int, ...]], ...] = ()


def configuration(op: str, r: Random, bounded: bool) -> GemvConfiguration:
    """Any that the contract allows."""
    act = r.choice(FLOATS)
    segments = r.choice((1, 1, 1, 2, MAX_SEGMENTS))
    c = GemvConfiguration(
        op, act, r.choice((act, act, torch.float8_e4m3fn)), r.choice(("none", "none", "row", "tensor")),
        tuple(r.choice((act, *FLOATS)) for _ in range(segments)), r.choice((None, None, None, *FP8_FORMATS)),
    )  # fmt: skip
    return replace(c, shapes=tuple(_shape(c, r) for _ in range(2))) if bounded else c


def _shape(c: GemvConfiguration, r: Random) -> tuple[int, int, tuple[int, ...]]:
    widths = tuple(draw.size(r, 40) for _ in c.gammas)
    return sum(widths) + r.choice((0, 1, draw.size(r, 40))), draw.size(r, 1200 if r.random() < 0.02 else 250), widths


@dataclass(frozen=True)
class GemvCase:
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
        """Cases that differ in one thing, which is simpler."""
        ones = (1,) * len(self.widths)
        for m in (1, 2, self.m // 2):
            yield replace(self, m=m)
        for k in (1, 2, self.k // 2, self.k - 1):
            yield replace(self, k=max(1, k))
        for widths in (ones, tuple(max(1, w // 2) for w in self.widths)):
            yield replace(self, widths=widths, n=sum(widths) + self.n - sum(self.widths))
        yield replace(self, n=sum(self.widths))
        yield from draw.simpler(self, eps=1e-6, unfused=False)

    def run(self, device: str) -> str | None:
        """None, or what is wrong."""
        return _run(self, device)


def _place(r: Random, *, inputs: bool = True) -> Place:
    return replace(draw.place(r, inputs=inputs), reverse=False)


def _weights(r: Random) -> Values:
    """No infinite gamma: times a sum that may or may not be zero it is anything."""
    found = draw.weights(r)
    return replace(found, spoil="nan") if found.spoil else found


def draw_case(c: GemvConfiguration, r: Random) -> GemvCase:
    """A call with this configuration."""
    n, k, widths = r.choice(c.shapes) if c.shapes else _shape(c, r)
    act = draw.values(r)
    if "largest" in (act.kind, act.other):
        act = Values(start=act.start)
    return GemvCase(
        c, 0 if r.random() < 0.01 else r.randint(1, MAX_ROWS), n, k, widths, draw.epsilon(r), act,
        Values(r.choice(_KINDS), 0, None, "", r.randrange(1 << 20)), Values(r.choice(("normal", "equal", "zero")), 0, None, "", 5),
        _weights(r), (_place(r), _place(r, inputs=False), _place(r, inputs=False)),
        r.random() < 0.3,
    )  # fmt: skip


def inputs(case: GemvCase) -> dict[str, Any]:
    """Keyword arguments of the public function, on the CPU."""
    c = case.config
    weight = case.weight.make((case.n, case.k), c.act).to(c.weight)
    gammas = [
        draw.gamma(replace(case.gamma, start=case.gamma.start + i), w, dtype)
        for i, (w, dtype) in enumerate(zip(case.widths, c.gammas, strict=True))
    ]
    found: dict[str, Any] = {
        "act": case.places[0].put(case.act.make((case.m, case.k), c.act)),
        "weight": _put(case.places[1], weight),
        "gamma": gammas[0],
        "segments": gammas[1:],
        "eps": case.eps,
        "normed_dtype": c.codes,
    }
    if c.scale != "none":
        found["weight_scale"] = case.scale.make((case.n if c.scale == "row" else 1,), torch.float32)
    return found


def _put(place: Place, values: Tensor) -> Tensor:
    """`Place.put` of any dtype: fp8 is copied as bytes."""
    if values.dtype in FLOATS or place == PLAIN:
        return place.put(values)
    room = place.room(values.shape, values.dtype)
    room.view(torch.uint8).copy_(values.view(torch.uint8))
    return room


def _run(case: GemvCase, device: str) -> str | None:
    c, host = case.config, inputs(case)
    arguments = {k: _moved(v, device) for k, v in host.items()}
    before = draw.snapshot(arguments)
    results = gemv_and_partial_norm(**arguments)
    rooms = [case.places[2].room(t.shape, t.dtype) for t in results]
    forms = {"out": gemv_and_partial_norm(**arguments, out=_fresh(rooms, device))}
    scratch = _fresh(rooms, device)
    counter = torch.zeros(len(case.widths), dtype=torch.int32, device=device)
    rest = list(scratch)
    normed, unnormed = rest.pop(0), rest.pop()
    scale = rest.pop(0) if c.codes is not None else None
    gemv_and_partial_norm_with_scratch(
        normed, unnormed, arguments["act"], arguments["weight"], arguments["gamma"], case.eps, counter,
        segments=arguments["segments"], segment_outputs=rest, weight_scale=arguments.get("weight_scale"), scale_output=scale,
    )  # fmt: skip
    forms["scratch"] = tuple(scratch)
    if counter.any():
        return f"the counter is {counter.tolist()} after a call"
    touched = draw.changed(arguments, before)
    if touched is not None:
        return f"{touched} was written"
    for form, others in forms.items():
        for index, (first, second) in enumerate(zip(results, others, strict=True)):
            if not same_bytes(first, second):
                return f"result {index} differs with {form}"
            if draw.spilt(rooms[index], second):
                return f"bytes beside result {index} were written with {form}"
    y = products(case, host, device)
    wrong = verify(case, host, tuple(t.cpu() for t in results), y)
    if wrong is None and case.unfused:
        wrong = _run_unfused(case, host, arguments, device, y)
    return wrong


def _fresh(rooms: list[Tensor], device: str) -> list[Tensor]:
    return [on_device(t, device) if device != "cpu" else copied(t) for t in rooms]


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return on_device(value, device)
    return [on_device(t, device) for t in value] if isinstance(value, list) else value


def _as_tensor_cores_align(t: Tensor) -> Tensor:
    """Sizes as far as it matters to what sums lose: a subnormal float16 number counts as the smallest normal one."""
    return torch.where(t == 0, t, t.abs().clamp_min(2.0**-14)) if t.dtype == torch.float16 else t


def products(case: GemvCase, host: dict[str, Any], device: str) -> Bounds:
    """``act @ weight.T`` and what float32 sums may be off; the sign of a zero depends on the order of the sum."""
    y, slack = oracle.matmul(host["act"], host["weight"], host.get("weight_scale"))
    if device == "cuda":
        act, weight = (_as_tensor_cores_align(host[name]) for name in ("act", "weight"))
        slack = oracle.matmul(act, weight, host.get("weight_scale"))[1]
    factor = 1.0 if "weight_scale" not in host else 1 + host["weight_scale"].double().abs()
    exact = ~y.isfinite() | (slack == 0)
    slack = slack + FLOOR * case.k * factor * (1 if case.config.weight in FLOATS else _SCALED)
    low, high = torch.where(exact, y, y - slack), torch.where(exact, y, y + slack)
    return Bounds(torch.where(low == 0, -0.0, low), torch.where(high == 0, 0.0, high))


def verify(case: GemvCase, host: dict[str, Any], results: tuple[Tensor, ...], y: Bounds) -> str | None:
    """None, or what is wrong with the results; ``y`` are the `products`."""
    left, begin = list(results), 0
    for index, gamma in enumerate((host["gamma"], *host["segments"])):
        part = slice(begin, begin + gamma.shape[0])
        begin = part.stop
        codes = left.pop(0)
        if index == 0 and case.config.codes is not None:
            wrong = _verify_codes(codes, left.pop(0), y.part(part), gamma.double(), case.eps)
        else:
            normed, _ = _normed(y.part(part), gamma.double(), case.eps)
            wrong = normed.stored(codes)
        if wrong is not None:
            return f"segment {index}: {wrong}"
    wrong = y.part(slice(begin, None)).stored(left.pop(0))
    return wrong and f"unnormed: {wrong}"


def _normed(y: Bounds, gamma: Tensor, eps: float) -> tuple[Bounds, Tensor]:
    """The norm of a y that lies between bounds, and the least root."""
    least, most = bounds.sizes(y)
    slow, fast = bounds.reciprocal_rms(most, eps), bounds.reciprocal_rms(least, eps)
    ends = torch.stack([end * rs * gamma for end in y for rs in (slow, fast)])
    low, high = ends.amin(0), ends.amax(0)
    off = compare.FLOAT32_ERROR
    low, high = low - low.abs() * off - FLOOR * (1 + gamma.abs()), high + high.abs() * off + FLOOR * (1 + gamma.abs())
    exact = ~(low.isfinite() & high.isfinite()) | (gamma == 0)
    return Bounds(torch.where(exact, ends[0], low), torch.where(exact, ends[3], high)), slow


def _verify_codes(codes: Tensor, scale: Tensor, y: Bounds, gamma: Tensor, eps: float) -> str | None:
    fmt = FP8_FORMATS[codes.dtype]
    normed, slow = _normed(y, gamma, eps)
    tiny = FLOOR * slow
    ends = [bounds.largest(t, None) for t in bounds.sizes(normed)]
    wrong = bounds.scales(scale, ends[0] - tiny, ends[1] + tiny, None, fmt.max, ScaleRule("row", torch.float32))
    if wrong is not None:
        return wrong
    stored = scale.double()
    k = torch.where(stored == 0, 0.0, 1 / stored)
    ends = [torch.where((end == 0) & ~k.isnan(), end, end * k) for end in normed]
    if bool((slow / stored > 1e38).any()):
        return None  # the factor is beyond float32: its codes are those of `rms_norm_fused_fp8`, where it is tested
    off = compare.FLOAT32_ERROR
    low, high = ends[0] - ends[0].abs() * off, ends[1] + ends[1].abs() * off
    exact = ends[0] == 0
    return compare.between(codes, torch.where(exact, ends[0], low), torch.where(exact, ends[1], high), fmt)


def _run_unfused(
    case: GemvCase, host: dict[str, Any], arguments: dict[str, Any], device: str, exact: Bounds
) -> str | None:
    """Both forms in two launches: y as rounded, and the norm of the rounded y."""
    given: dict[str, Any] = {
        name: arguments[name] for name in ("act", "weight", "gamma", "eps", "weight_scale") if name in arguments
    }
    normed, unnormed = gemv_and_partial_norm(**given, fused=False)
    room = torch.empty(case.m, case.n, dtype=case.config.act, device=device)
    again = torch.empty_like(normed)
    scale = given.pop("weight_scale", None)
    gemv_and_partial_norm_unfused_with_scratch(again, **given, y_scratch=room, weight_scale=scale)
    width = case.widths[0]
    if not same_bytes(again, normed) or not same_bytes(room[:, width:], unnormed):
        return "fused=False differs with scratch"
    y = room.cpu()
    wrong = (exact.stored(y) or _run_often(given, normed, unnormed, scale)) if _summed_by_us(case) else None
    if wrong is not None:
        return f"fused=False: {wrong}"
    h = y[:, :width].double()
    rs, g = bounds.reciprocal_rms(h, case.eps), host["gamma"].double()
    wrong = bounds.normed(h, rs, g, None).stored(normed.cpu())
    return wrong and f"fused=False: {wrong}"


def _run_often(given: dict[str, Any], normed: Tensor, unnormed: Tensor, scale: Tensor | None) -> str | None:
    """The same rows over and over, more than one launch could norm: each has the bytes it had."""
    times = MAX_ROWS // max(1, normed.shape[0]) + 1
    many = gemv_and_partial_norm(
        given["act"].repeat(times, 1), given["weight"], given["gamma"], given["eps"], weight_scale=scale, fused=False
    )
    same = all(same_bytes(t, once.repeat(times, 1)) for t, once in zip(many, (normed, unnormed), strict=True))
    return None if same else "rows differ among more rows"


def _summed_by_us(case: GemvCase) -> bool:
    """Whether y is not torch's own product, whose roundings are its own."""
    return case.config.weight not in FLOATS or case.config.scale != "none"
