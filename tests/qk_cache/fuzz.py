"""Random calls of the norm, rotation and cache write of q, k and v.

Heads, columns, dtypes, rotations, layouts, pages, starts and strides; every value is checked, and so is every byte around
and between the buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from onepass.formats import FLOATS, FP8_FORMATS, ROUNDINGS
from onepass.ops.qk_cache.launch import CACHE_LAYOUTS, Scaling
from onepass.rope import SECTION_STYLES, STYLES
from onepass.testing.tensors import moved
from tests.qk_cache import checks as qk_cache
from tests.qk_cache.cases import NORMS
from tests.qk_cache.checks import Angles, QkCacheCase
from tools.fuzz import draw
from tools.fuzz.draw import NORMAL, Values

OPS = (qk_cache.OP,)
VALUES = ("q", "k", "v", "gamma", "seed")
"""Fields of a case that do not affect machine code."""
_FP8 = tuple(FP8_FORMATS)
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class QkCacheConfiguration:
    """What determines the machine code. ``sizes`` lists heads, columns and rotated columns to draw from."""

    op: str
    x: torch.dtype
    gamma: torch.dtype
    gamma_k: torch.dtype
    norm: str
    style: str
    pair: torch.dtype | None
    positions: torch.dtype | None
    rounding: str
    cache: torch.dtype | None
    layout: str
    index: torch.dtype
    scale: str
    scaling: Scaling
    sections: bool
    section_style: str
    norm_v: bool
    keys: bool
    out: torch.dtype | None
    sizes: tuple[tuple[int, int, int, int], ...] = ()


def configuration(op: str, r: Random, bounded: bool) -> QkCacheConfiguration:
    """A random configuration that the contract allows."""
    x = r.choice(FLOATS)
    cache = r.choice((None, x, *FLOATS, *_FP8, *_FP8))
    scaling: Scaling = r.choice(("tensor", "head", "own")) if cache in _FP8 else "tensor"
    keys = cache is not None and r.random() < 0.15
    return QkCacheConfiguration(
        op,
        x,
        gamma=r.choice((x, *FLOATS)),
        gamma_k=r.choice((x, *FLOATS)),
        norm=r.choice(NORMS),
        style=r.choice(STYLES),
        pair=r.choice((None, None, *FLOATS)),
        positions=r.choice((None, *_INTEGERS)),
        rounding=r.choice((*ROUNDINGS, "hf_rope")),
        cache=cache,
        layout=r.choice(CACHE_LAYOUTS),
        index=r.choice(_INTEGERS),
        scale="kv" if scaling == "own" else r.choice(("", "k", "v", "kv")) if cache in _FP8 else "",
        scaling=scaling,
        sections=r.random() < 0.3,
        section_style=r.choice(SECTION_STYLES),
        norm_v=cache is not None and not keys and r.random() < 0.3,
        keys=keys,
        out=r.choice((None, None, *FLOATS)),
        sizes=tuple(_sizes(r) for _ in range(3)) if bounded else (),
    )


def _sizes(r: Random) -> tuple[int, int, int, int]:
    head = draw.size(r, 300) if r.random() < 0.2 else draw.size(r, 130)
    dim = r.choice((0, head // 2 * 2, 2 * r.randint(0, head // 2)))
    return r.choice((1, 2, 3, r.randint(4, 12))), r.choice((1, 2, r.randint(3, 9))), head, dim


@dataclass(frozen=True)
class QkCacheFuzzed:
    """One call: its shapes and places as a `QkCacheCase`, and its values."""

    case: QkCacheCase
    q: Values = NORMAL
    k: Values = NORMAL
    v: Values = NORMAL
    gamma: Values = NORMAL
    seed: int = 0

    @property
    def op(self) -> str:
        """The op's name."""
        return self.case.op

    def simpler(self) -> Iterator[QkCacheFuzzed]:
        """Cases that are simpler in one respect."""
        c = self.case
        one = (1, 1) if len(c.lead) == 2 else (1,)
        plain: dict[str, Any] = {"q_heads": 1, "k_heads": 1, "memory": "contiguous", "value": None, "angles": None}
        plain |= {"norm": "none", "lead": one, "page": 4, "rounding": "once", "out": None, "options": {}}
        plain |= {"norm_v": False} if c.scaling == "own" else {"norm_v": False, "scale": ""}
        for name, value in plain.items():
            yield replace(self, case=replace(c, **{name: value}))
        if c.angles is None:
            for head in (1, 2, c.head // 2):
                if head:
                    yield replace(self, case=replace(c, head=head))
        yield from draw.simpler(self)

    def run(self, device: str) -> str | None:
        """None, or what is wrong."""
        arguments = qk_cache.inputs(self.case, "cpu", self.seed)
        c = self.case
        for name in ("q", "k", "v"):
            if name in arguments and arguments[name].numel():
                values: Values = getattr(self, name)
                arguments[name].copy_(values.make(tuple(arguments[name].shape), c.x))
        for name, dtype in (("gamma_q", c.gamma), ("gamma_k", c.gamma_k or c.gamma)):
            if name in arguments:
                arguments[name].copy_(draw.gamma(self.gamma, arguments[name].shape[0], dtype))
        given = arguments if device == "cpu" else moved(arguments, device)
        return qk_cache.run_once(c, given, lambda case, _, results: qk_cache.verify(case, arguments, results), 64)[1]


def draw_case(c: QkCacheConfiguration, r: Random) -> QkCacheFuzzed:
    """A call with this configuration."""
    q_heads, k_heads, head, dim = r.choice(c.sizes) if c.sizes else _sizes(r)
    two = c.layout == "dense" or r.random() < 0.3
    lead = (r.randint(1, 4), r.choice((1, 1, r.randint(2, 6)))) if two else (r.choice((1, r.randint(2, 20))),)
    angles = None
    if dim:
        shared = c.pair is not None and len(lead) == 2 and r.random() < 0.3
        angles = Angles(dim, c.style, None if c.pair is not None else c.positions, c.pair, shared)
        if c.sections and angles.positions is not None and dim >= 6:
            angles = replace(angles, sections=_sections(dim // 2, r), section_style=c.section_style)
    memories = ["contiguous", "packed", "misaligned"]
    if c.norm != "whole":
        memories.append("transposed")
    if two:
        memories.append("parts")
    options = {"eps": draw.epsilon(r), "weight_offset": draw.offset(r)}
    same = (
        "x",
        "gamma",
        "gamma_k",
        "norm",
        "rounding",
        "cache",
        "layout",
        "index",
        "scale",
        "scaling",
        "norm_v",
        "keys",
        "out",
    )
    case = QkCacheCase(
        "fuzz",
        lead,
        q_heads,
        k_heads,
        head,
        value=r.choice((None, None, draw.size(r, 100))),
        angles=angles,
        page=r.choice((1, 2, 3, 4, 16, r.randint(5, 20))),
        slots=c.index,
        start=r.choice(("default", "int", "one", "each")),
        memory=r.choice(memories),  # type: ignore[arg-type]
        options=options if c.norm != "none" or c.norm_v else {},
        **{name: getattr(c, name) for name in same},
    )
    return QkCacheFuzzed(case, _values(r), _values(r), _values(r), draw.weights(r), r.randrange(1 << 30))


def _sections(pairs: int, r: Random) -> tuple[int, int, int]:
    """Pairs by time, height and width that fit in either style."""
    height, width = r.randint(1, max(1, pairs // 3)), r.randint(1, max(1, pairs // 3))
    return pairs - height - width, height, width


def _values(r: Random) -> Values:
    """Values whose sums of squares and rotated pairs stay within float32."""
    found = draw.values(r)
    return Values(start=found.start) if "largest" in (found.kind, found.other) else found


__all__ = ["OPS", "QkCacheConfiguration", "QkCacheFuzzed", "configuration", "draw_case"]
