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

from onepass.formats import E4M3FN, FLOATS, FP8_FORMATS
from onepass.kvcache import DS_MLA_COLUMNS
from onepass.rope import STYLES
from onepass.testing.tensors import moved
from tests.mla_cache import checks as mla_cache
from tests.mla_cache.checks import MlaCase
from tools.fuzz import draw
from tools.fuzz.draw import NORMAL, Values

OPS = (mla_cache.OP,)
VALUES = ("q", "kv", "gamma", "seed")
"""Fields of a case that do not affect machine code."""
_FP8 = tuple(FP8_FORMATS)


@dataclass(frozen=True)
class MlaConfiguration:
    """What determines the machine code. ``widths`` lists the latent and rope widths to draw from."""

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
    """A random configuration that the contract allows."""
    q, kv = r.choice(FLOATS), r.choice(FLOATS)
    cache = r.choice((*_FP8, *_FP8, *FLOATS))
    scale = r.choice(("none", "tensor", "token", "tile")) if cache in _FP8 else "none"
    return MlaConfiguration(
        op,
        q,
        kv,
        gamma=r.choice((kv, *FLOATS)),
        cache=E4M3FN.dtype if scale == "tile" else cache,
        out=r.choice((None, None, *FLOATS, *_FP8)),
        freqs=r.choice((torch.float32, torch.float32, *FLOATS)),
        style=r.choice(STYLES),
        scale=scale,
        rounding=r.choice(("once", "reference")),
        index=r.choice((torch.uint32, torch.int32, torch.int64)),
        slots=r.choice((None, None, None, torch.int32, torch.int64)),
        positions=r.choice((None, None, torch.int32, torch.int64)),
        widths=tuple((draw.size(r, 700), 2 * draw.size(r, 40)) for _ in range(3)) if bounded else (),
    )


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
        """Cases that are simpler in one respect."""
        c = self.case
        plain: dict[str, Any] = {"padding": (0, 0), "heads": 1, "layout": "contiguous", "fault": "", "page": 4}
        changes: list[dict[str, Any]] = [{name: value} for name, value in plain.items()]
        changes += [{"batch": c.batch[:count]} for count in range(len(c.batch))] + [{"batch": ((0, 1),)}]
        changes += [{"normed": None}, {"normed": 1}] if c.normed is not None else []
        if c.scale != "tile":
            changes += [{"latent": n} for n in (1, 2, c.latent // 2) if n and (c.normed is None or c.normed <= n)]
            changes.append({"rope": 2, "turned": None, "freqs": torch.float32})
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
        given = arguments if device == "cpu" else moved(arguments, device)
        return mla_cache.run_once(c, given, lambda case, _, results: mla_cache.verify(case, arguments, results), 64)[1]


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
    if c.scale == "tile":
        latent, rope = DS_MLA_COLUMNS
    normed = r.choice((None, None, None, r.randint(1, latent)))
    turned = None if rope and rope % 2 == 0 and r.random() < 0.6 else 2 * r.randint(0, rope // 2)
    same = ("q", "kv", "gamma", "cache", "out", "style", "scale", "index", "slots", "positions")
    case = MlaCase(
        "fuzz",
        batch,
        heads=r.choice((1, 2, 3, r.randint(4, 12))),
        latent=latent,
        rope=rope,
        turned=turned,
        normed=normed,
        freqs=None if turned == 0 and r.random() < 0.5 else c.freqs,
        page=page,
        padding=r.choice(((0, 0), (0, 0), (r.randint(0, 3), r.randint(0, 5)))),
        layout=r.choice(("contiguous", "slices", "misaligned", "transposed")),
        fault=r.choice(("", "", "", "", "pages" if c.slots is None else "slots")),
        options={"rounding": c.rounding, "epsilon": draw.epsilon(r), "weight_offset": draw.offset(r)},
        **{name: getattr(c, name) for name in same},
    )
    return MlaFuzzed(case, _values(r), _values(r), draw.weights(r), r.randrange(1 << 30))


def _values(r: Random) -> Values:
    """Values whose sums of squares and rotated pairs stay within float32."""
    found = draw.values(r)
    return Values(start=found.start) if "largest" in (found.kind, found.other) else found


__all__ = ["OPS", "MlaConfiguration", "MlaFuzzed", "configuration", "draw_case"]
