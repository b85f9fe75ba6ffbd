"""Random ragged batches of MLA's cache write.

Page sizes 1 to 256, shuffled tables, empty requests, padding, slots, strides, dtypes and options; every value is checked,
and so is every byte around and between the buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from onepass.formats import FLOATS, FP8_FORMATS, ScaleRule
from onepass.rope import STYLES
from onepass.testing import compare, mla_cache, oracle
from onepass.testing.mla_cache_inputs import MlaCase
from tools.fuzz import bounds, draw
from tools.fuzz.bounds import Bounds
from tools.fuzz.draw import NORMAL, Values

OPS = (mla_cache.OP,)
VALUES = ("q", "kv", "gamma", "seed")
"""Fields of a case that choose no machine code."""
_FP8 = tuple(FP8_FORMATS)


@dataclass(frozen=True)
class MlaConfiguration:
    """What shapes the machine code; ``widths``, latent and rope, the only ones to be drawn."""

    op: str
    q: torch.dtype
    kv: torch.dtype
    gamma: torch.dtype
    cache: torch.dtype
    out: torch.dtype | None
    freqs: torch.dtype
    style: str
    scale: str
    rounding: str
    index: torch.dtype
    slots: torch.dtype | None
    positions: torch.dtype | None
    widths: tuple[tuple[int, int], ...] = ()


def configuration(op: str, r: Random, bounded: bool) -> MlaConfiguration:
    """Any that the contract allows."""
    q, kv = r.choice(FLOATS), r.choice(FLOATS)
    cache = r.choice((*_FP8, *_FP8, *FLOATS))
    return MlaConfiguration(
        op, q, kv, r.choice((kv, *FLOATS)), cache, r.choice((None, None, *FLOATS, *_FP8)),
        r.choice((torch.float32, torch.float32, *FLOATS)), r.choice(STYLES),
        r.choice(("none", "tensor", "token")) if cache in _FP8 else "none", r.choice(("once", "reference")),
        r.choice((torch.uint32, torch.int32, torch.int64)), r.choice((None, None, None, torch.int32, torch.int64)),
        r.choice((None, None, torch.int32, torch.int64)),
        tuple((draw.size(r, 700), 2 * draw.size(r, 40)) for _ in range(3)) if bounded else (),
    )  # fmt: skip


@dataclass(frozen=True)
class MlaFuzzed:
    """One call: its shapes and tables as a `MlaCase`, and its values."""

    case: MlaCase
    q: Values = NORMAL
    kv: Values = NORMAL
    gamma: Values = NORMAL
    seed: int = 0

    @property
    def op(self) -> str:
        """The op's name."""
        return self.case.op

    def simpler(self) -> Iterator[MlaFuzzed]:
        """Cases that differ in one thing, which is simpler."""
        c = self.case
        plain: dict[str, Any] = {"padding": (0, 0), "heads": 1, "layout": "contiguous", "fault": "", "page": 4}
        changes: list[dict[str, Any]] = [{name: value} for name, value in plain.items()]
        changes += [{"batch": c.batch[:count]} for count in range(len(c.batch))] + [{"batch": ((0, 1),)}]
        changes += [{"normed": None}, {"normed": 1}] if c.normed is not None else []
        changes += [{"latent": n} for n in (1, 2, c.latent // 2) if n and (c.normed is None or c.normed <= n)] + [
            {"rope": 2, "turned": None, "freqs": torch.float32}
        ]
        changes.append({"options": {"rounding": c.options["rounding"]}})
        for change in changes:
            yield replace(self, case=replace(c, **change))
        yield from draw.simpler(self)

    def run(self, device: str) -> str | None:
        """None, or what is wrong."""
        arguments = mla_cache.inputs(self.case, "cpu", self.seed)
        c = self.case
        with_values = {
            "q_rope": (self.q, (c.tokens, c.heads, c.rope), c.q),
            "kv": (self.kv, (c.tokens, c.latent + c.rope), c.kv),
        }
        for name, (values, shape, dtype) in with_values.items():
            if arguments[name].numel():
                arguments[name].copy_(values.make(shape, dtype))
        arguments["gamma"].copy_(draw.gamma(self.gamma, arguments["gamma"].shape[0], c.gamma))
        given = arguments if device == "cpu" else mla_cache.moved(arguments, device)
        return mla_cache.run_once(c, given, verify, guard=64)[1]


def draw_case(c: MlaConfiguration, r: Random) -> MlaFuzzed:
    """A call with this configuration."""
    page = r.choice(
        (1, 2, 3, r.randint(4, 64), 16, 64, r.randint(65, 256)) if r.random() < 0.1 else (1, 2, 3, r.randint(4, 16))
    )
    long = r.random() < 0.05
    batch = tuple(
        (r.choice((0, r.randint(1, 9), r.randint(10, 300 if long else 30))), r.choice((0, 1, 1, r.randint(2, 6))))
        for _ in range(r.randint(0, 4))
    )
    rope = r.choice((0, 2 * r.randint(1, 8), 2 * r.randint(1, 32), r.randint(1, 40)))
    latent = r.choice((draw.size(r, 64), draw.size(r, 700 if long and page <= 64 else 64)))
    if c.widths:
        latent, rope = r.choice(c.widths)
    normed = r.choice((None, None, None, r.randint(1, latent)))
    turned = None if rope and rope % 2 == 0 and r.random() < 0.6 else 2 * r.randint(0, rope // 2)
    case = MlaCase(
        "fuzz", batch, r.choice((1, 2, 3, r.randint(4, 12))), latent, rope, turned, normed, c.q, c.kv, c.gamma, c.cache,
        None if turned == 0 and r.random() < 0.5 else c.freqs, c.out, page, c.style, c.scale, c.index, c.slots,  # type: ignore[arg-type]
        c.positions, r.choice(((0, 0), (0, 0), (r.randint(0, 3), r.randint(0, 5)))),
        r.choice(("contiguous", "slices", "misaligned", "transposed")), "normal",
        r.choice(("", "", "", "", "pages" if c.slots is None else "slots")),
        {"rounding": c.rounding, "epsilon": draw.epsilon(r), "weight_offset": draw.offset(r)},
    )  # fmt: skip
    return MlaFuzzed(case, _values(r), _values(r), draw.weights(r), r.randrange(1 << 30))


def _values(r: Random) -> Values:
    """None so large that a sum of two squares, or a turned pair, is beyond float32."""
    found = draw.values(r)
    return Values(start=found.start) if "largest" in (found.kind, found.other) else found


def verify(case: MlaCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results: every value between bounds, and nothing written but entries of tokens."""
    host = arguments if arguments["kv"].is_cpu else mla_cache.moved(arguments, "cpu")
    q, blocks, *scales = (t.cpu() for t in results)
    place = mla_cache.places(case, host, blocks)
    rounded = arguments["rounding"] == "reference"
    turned = _turned(case, host, host["q_rope"], place.position, rounded)
    message = compare.between(q, *turned, FP8_FORMATS.get(q.dtype))
    if message is not None:
        return f"q: {message}"
    message = mla_cache.beside(case, host, place, blocks, scales)
    if message is not None:
        return message
    here = place.slot >= 0
    entry = _entry(case, host, here, place.position, rounded)
    written = place.slot[here]
    got = blocks.view(torch.uint8).flatten(0, 1)[written].view(case.cache)
    fmt = FP8_FORMATS.get(case.cache)
    if case.scale == "none" or fmt is None:
        message = compare.between(got, *entry, fmt)
        return message and f"entries: {message}"
    divisor = host["kv_scale"].double() if not scales else scales[0].flatten()[written].double().unsqueeze(-1)
    if scales:
        stored = scales[0].flatten()[written].unsqueeze(-1)
        ends = [bounds.largest(t, None) for t in bounds.sizes(entry)]
        message = bounds.scales(stored, ends[0], ends[1], None, fmt.max, ScaleRule("row", torch.float32))
        if message is not None:
            return message
    low, high = (_divided(end, divisor) for end in entry)
    least, most = (bounds.around(end, end.abs() * bounds.PRODUCT + bounds.FLOOR) for end in (low, high))
    message = compare.between(got, least.low, most.high, fmt)
    return message and f"entries: {message}"


def _divided(end: Tensor, divisor: Tensor) -> Tensor:
    value = torch.where(divisor == 0, torch.where(end.isnan(), torch.nan, 0.0), end / divisor)
    return torch.where(divisor.isnan(), torch.nan, value)


def _turned(case: MlaCase, host: dict[str, Any], heads: Tensor, position: Tensor, rounded: bool) -> Bounds:
    """RoPE of [T, H, R]."""
    freqs, values = host.get("freqs_cis"), heads.double()
    if freqs is None or case.turned == 0 or not heads.numel():
        return Bounds(values, values)

    def turn(t: Tensor) -> oracle.Rotated:
        turned = oracle.rotate(t.flatten(1), freqs, t.shape[2], positions=position, style=case.style, dim=case.turned)
        return oracle.Rotated(*(part.view(t.shape) for part in turned))

    found = bounds.rotated(Bounds(values, values), turn)
    dim = freqs.shape[1] if case.turned is None else case.turned
    found = found.rounded(heads.dtype) if rounded else found
    still = torch.arange(heads.shape[2]) >= dim  # these are converted, no more
    return Bounds(*(torch.where(still, values, end) for end in found))


def _entry(case: MlaCase, host: dict[str, Any], here: Tensor, position: Tensor, rounded: bool) -> Bounds:
    kv = host["kv"][here]
    normed = host["gamma"].shape[0]
    latent, between, k = kv[:, :normed].double(), kv[:, normed : case.latent].double(), kv[:, case.latent :]
    rs = bounds.reciprocal_rms(latent, host.get("epsilon", 1e-6))
    g = bounds.weight(host["gamma"], host.get("weight_offset", 0.0))
    y = bounds.normed(latent, rs, g, case.kv if rounded else None)
    turned = _turned(case, host, k.unsqueeze(1), position[here], rounded)
    return Bounds(*(torch.cat((a, between, b.squeeze(1)), -1) for a, b in zip(y, turned, strict=True)))


__all__ = ["OPS", "MlaConfiguration", "MlaFuzzed", "configuration", "draw_case", "verify"]
