"""Cases of the norm, rotation and cache write of q, k and v: inputs, calls and verification."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor

from onepass.formats import E4M3FN, E4M3FNUZ, FLOATS, FP8_FORMATS, Rounding
from onepass.ops.qk_cache import reference as qk_cache_reference
from onepass.ops.qk_cache.launch import CacheLayout, NormKind, Scaling
from onepass.ops.qk_cache.op import qk_norm_rope_cache
from onepass.ops.qk_norm import reference as qk_norm_reference
from onepass.rope import Rope
from onepass.testing import compare
from onepass.testing.tensors import moved, same_bytes, set_special, short_dtype
from tests.oracle import bounds
from tests.oracle.bounds import Bounds
from tests.oracle.case import GPU_ONLY, Values, case_name, labelled
from tests.oracle.guarded import GUARD, run_guarded
from tests.oracle.interpreter import interpreting
from tests.oracle.memory import to_cpu
from tests.qk_norm.checks import code_fault

BF16, F16, F32 = FLOATS
FP8, FNUZ = E4M3FN.dtype, E4M3FNUZ.dtype
I32, I64 = torch.int32, torch.int64
OP: Final = "qk_norm_rope_cache"
OPS: Final = (OP,)

Memory = Literal["contiguous", "packed", "misaligned", "transposed", "parts"]
"""packed: q, k and v in one tensor, both caches in another; misaligned: the same, one element further; transposed: heads
before tokens; parts: sequences that are parts of longer ones."""
Start = Literal["default", "int", "one", "each"]
"""How a dense cache's first entry is given; "one" and "each" are tensors."""


@dataclass(frozen=True)
class Angles:
    """A rotation of ``dim`` columns: from a table by positions (None: the token's index), or from a pair of tensors."""

    dim: int
    style: str = "half"
    positions: torch.dtype | None = I64
    pair: torch.dtype | None = None
    shared: bool = False
    """One sequence's pair serves all."""
    sections: tuple[int, int, int] | None = None
    section_style: str = "contiguous"
    """Three positions per token, and which pairs turn by which."""

    def __str__(self) -> str:
        at = "" if self.positions is None else f"@{short_dtype(self.positions)}"
        if self.pair is not None:
            at = f"@{'shared ' * self.shared}pair of {short_dtype(self.pair)}"
        sections = "" if self.sections is None else f" {self.section_style} sections of {list(self.sections)}"
        return f"{self.style}:{self.dim}{at}{sections}".replace(", ", ",")


@dataclass(frozen=True, eq=False)
class QkCacheCase:
    """One call: tokens, heads, dtypes, norm, rotation, cache, memory layout, values and options."""

    group: str
    lead: tuple[int, ...] = (5,)
    q_heads: int = 4
    k_heads: int = 2
    head: int = 64
    value: int | None = None
    x: torch.dtype = BF16
    norm: NormKind = "head"
    gamma: torch.dtype = BF16
    gamma_k: torch.dtype | None = None
    angles: Angles | None = field(default_factory=lambda: Angles(64))
    rounding: Rounding = "once"
    cache: torch.dtype | None = BF16
    layout: CacheLayout = "NHD"
    page: int = 4
    slots: torch.dtype = I64
    start: Start = "each"
    index: torch.dtype = I64
    scale: str = ""
    scaling: Scaling = "tensor"
    norm_v: bool = False
    keys: bool = False
    """There is no v."""
    out: torch.dtype | None = None
    memory: Memory = "contiguous"
    values: Values = "normal"
    options: dict[str, Any] = field(default_factory=dict)
    op: str = OP

    @property
    def tokens(self) -> int:
        """Tokens of the call."""
        return torch.Size(self.lead).numel()

    @property
    def entries(self) -> int:
        """Entries per page; of a dense cache, per sequence."""
        return self.lead[-1] + 3 if self.layout == "dense" else self.page

    @property
    def interpretable(self) -> bool:
        """See `Check`."""
        return self.group not in GPU_ONLY

    @property
    def name(self) -> str:
        """See `Check`."""
        values = "" if self.value is None else f"+{self.value}"
        shape = f"{'x'.join(map(str, self.lead))}x({self.q_heads}+{self.k_heads})x{self.head}{values}"
        other = f",{short_dtype(self.gamma_k)}" if self.gamma_k is not None else ""
        norm = "no norm" if self.norm == "none" else f"{self.norm}={short_dtype(self.gamma)}{other}"
        rounding = "" if self.rounding == "once" else self.rounding
        if self.cache is None:
            cache = ["no cache"]
        else:
            indices = f"start={self.start}" if self.layout == "dense" else f"pages of {self.page}"
            index = self.index if self.layout == "dense" else self.slots
            cache = [f"{self.layout}={short_dtype(self.cache)}", indices, "" if index == I64 else short_dtype(index)]
        cache += ["norm_v"] * self.norm_v + ["keys alone"] * self.keys
        options = (f"{k}={v}" for k, v in self.options.items())
        parts = short_dtype(self.x), norm, labelled("rope", self.angles), rounding, *cache
        scale = f"{'' if self.scaling == 'tensor' else f'{self.scaling} '}scale={self.scale}" if self.scale else ""
        return case_name(
            self.group, shape, *parts, scale, labelled("out", self.out), *options, self.memory, self.values
        )


POSITIONS: Final = 48
"""Rows of freqs."""
SCALES: Final = {"k_scale": 0.0218437, "v_scale": 0.0317519}
"""Not close to the reciprocal of a small integer: bfloat16 values would have multiples at the ties of fp8."""
START: Final = 2
"""Where a dense cache's tokens begin if start is one number."""


# --- inputs ---------------------------------------------------------------------------------------------------------


def inputs(case: QkCacheCase, device: str, seed: int = 0) -> dict[str, Any]:
    """Tensors and options by their names in the contract; outputs and caches are filled with noise."""
    generator = torch.Generator().manual_seed(seed + case.head)
    value = case.head if case.value is None else case.value
    shapes = (case.q_heads, case.head), (case.k_heads, case.head), (case.k_heads, value)
    made = [torch.randn(*case.lead, *shape, generator=generator).to(case.x) for shape in shapes]
    if case.values == "special":
        for i, t in enumerate(made):
            set_special(t.view(-1, t.shape[-1])[i:], large=1e4 if case.x != torch.float16 else 1e2)
    found: dict[str, Any] = dict(zip("qkv", _laid_out(case, made, generator), strict=True))
    if case.norm != "none":
        for name, heads, dtype in (("gamma_q", case.q_heads, case.gamma), ("gamma_k", case.k_heads, case.gamma_k)):
            n = case.head if case.norm == "head" else heads * case.head
            found[name] = (1 + 0.25 * torch.randn(n, generator=generator)).to(dtype or case.gamma)
    found |= _angles(case, generator)
    noise = (_noise(generator, *case.lead, h, case.head * (case.out or case.x).itemsize) for h in shapes_heads(case))
    found |= {name: t.view(case.out or case.x) for name, t in zip(("q_out", "k_out"), noise, strict=True)}
    if case.cache is None:
        del found["v"]
    else:
        del found["k_out"]
        found |= _cache(case, value, generator)
    options: dict[str, Any] = dict(case.options)
    if "first" in found:
        options["first"] = found.pop("first")
    if case.norm == "whole":
        options["per_head"] = False
    if case.rounding != "once":
        options["rounding"] = case.rounding
    if case.norm_v:
        options["norm_v"] = True
    if case.keys:
        for name in ("v", "v_cache", "v_scale", "v_scale_out"):
            found.pop(name, None)
    return moved(found, device) | options


def shapes_heads(case: QkCacheCase) -> tuple[int, int]:
    """The numbers of heads of q and k."""
    return case.q_heads, case.k_heads


def _noise(generator: torch.Generator, *shape: int) -> Tensor:
    """Random bytes."""
    count = math.prod(shape)
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), generator=generator)
    return words.view(torch.uint8)[:count].view(shape)


def _laid_out(case: QkCacheCase, made: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    if case.memory in ("packed", "misaligned"):
        before = 8 if case.memory == "packed" else 1
        edge = torch.zeros(*case.lead, before, dtype=case.x)
        whole = torch.cat([edge, *(t.flatten(-2) for t in made), edge], -1)
        widths = [t.shape[-2] * t.shape[-1] for t in made]
        slices = whole.split((before, *widths, before), -1)[1:4]
        return [part.unflatten(-1, t.shape[-2:]) for part, t in zip(slices, made, strict=True)]
    if case.memory == "transposed":
        return [t.transpose(-3, -2).contiguous().transpose(-3, -2) for t in made]
    if case.memory == "parts" and len(case.lead) == 2:
        longer = [torch.cat((t, t[:, :1] * 0 + 3), 1) for t in made]
        return [t[:, : case.lead[1]] for t in longer]
    return made


def _angles(case: QkCacheCase, generator: torch.Generator) -> dict[str, Any]:
    turn = case.angles
    if turn is None:
        return {}
    if turn.pair is not None:
        lead = (1, *case.lead[1:]) if turn.shared else case.lead
        angle = torch.rand(*lead, turn.dim // 2, generator=generator) * 6.3
        angle = torch.cat((angle, angle), -1)
        return {"cos": angle.cos().to(turn.pair), "sin": angle.sin().to(turn.pair)}
    angle = torch.rand(POSITIONS, turn.dim // 2, generator=generator) * 6.3
    found = {"freqs": torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)}
    if turn.positions is not None:
        # some lie outside freqs and use its first or last row
        lead = case.lead if turn.sections is None else (3, *case.lead)
        at = torch.randint(-2, POSITIONS + 2, lead, generator=generator)
        found["positions"] = at.to(turn.positions)
    return found


def _cache(case: QkCacheCase, value: int, generator: torch.Generator) -> dict[str, Any]:
    """Caches of noise, indices and scales."""
    cache = case.cache
    assert cache is not None
    size, found = case.entries, dict[str, Any]()
    if case.layout == "dense":
        pages = case.lead[0]
        if case.start == "int":
            found["first"] = START
        elif case.start == "one":
            found["starts"] = torch.tensor([START], dtype=case.index)
        elif case.start == "each":  # some entries lie outside the cache
            found["starts"] = (torch.arange(pages) * 4 - 2).to(case.index)
    else:
        pages = -(-2 * case.tokens // size) + 1
        slots = torch.randperm(pages * size, generator=generator)[: case.tokens]
        slots[::3] = torch.tensor([-1, -7, pages * size, -(2**31), 2**31 - 1])[torch.arange(slots[::3].shape[0]) % 5]
        found["slots"] = slots.to(case.slots).view(case.lead)
    middle = (size, case.k_heads) if case.layout == "NHD" else (case.k_heads, size)
    extra = {"misaligned": 3, "packed": 16}.get(case.memory, 0) * cache.itemsize
    widths = [n * cache.itemsize for n in (case.head, value)]
    if case.memory == "packed":
        parent = _noise(generator, pages, 2, *middle, max(widths) + extra)
        both = parent[:, 0], parent[:, 1]
    else:
        first, second = (_noise(generator, pages, *middle, width + extra) for width in widths)
        both = first, second
    for name, t, width in zip(("k_cache", "v_cache"), both, widths, strict=True):
        found[name] = t.view(cache)[..., : width // cache.itemsize]
    for name in case.scale:
        scale = torch.tensor(SCALES[f"{name}_scale"])
        if case.scaling == "own":
            inline = 3 if case.memory == "packed" else 1
            parent = _noise(generator, pages, *middle, 4 * inline).view(F32)
            found[f"{name}_scale_out"] = parent[..., inline // 2]
        else:
            count = case.k_heads if case.scaling == "head" else 0
            found[f"{name}_scale"] = scale * (1 + torch.arange(count)) if count else scale
    return found


# --- calls ----------------------------------------------------------------------------------------------------------

Verify = Callable[[QkCacheCase, dict[str, Any], tuple[Tensor, ...]], str | None]
Way = Literal["given", "allocated", "in place"]


def call(case: QkCacheCase, arguments: dict[str, Any], way: Way = "given") -> tuple[Tensor, ...]:
    """q_out, then k_out or both caches, after a call with copies of the arguments."""
    return call_with(case, moved(arguments), way)


def call_with(case: QkCacheCase, arguments: dict[str, Any], way: Way = "given") -> tuple[Tensor, ...]:
    """The same after a call with the arguments themselves."""
    given = dict(arguments)
    freqs, positions = given.pop("freqs", None), given.pop("positions", None)
    cos, sin, turn = given.pop("cos", None), given.pop("sin", None), case.angles
    if turn is not None and freqs is not None:
        sections: dict[str, Any] = {"sections": turn.sections, "section_style": turn.section_style}
        given["rope"] = Rope(freqs, positions, turn.style, turn.dim, **sections)  # type: ignore[arg-type]
    elif turn is not None:
        given["rope"] = Rope(style=turn.style, cos=cos, sin=sin)  # type: ignore[arg-type]
    start = given.pop("starts", None)
    first = given.pop("first", None)
    given["start"] = first if start is None else start
    q, k, q_out, k_out = given.pop("q"), given.pop("k"), given.pop("q_out"), given.pop("k_out", None)
    if way == "in place":
        q_out, k_out = q, None if k_out is None else k
    if way != "allocated":
        given["out"] = q_out if k_out is None else (q_out, k_out)
    scales = given.pop("k_scale_out", None), given.pop("v_scale_out", None)
    if scales[0] is not None:
        given["scale_out"] = scales
    q_made, k_made = qk_norm_rope_cache(q, k, **given, layout=case.layout)
    if k_made is not None:
        return q_made, k_made
    return tuple(t for t in (q_made, given["k_cache"], given.get("v_cache"), *scales) if t is not None)


def zeroable(case: QkCacheCase) -> list[tuple[int, str]]:
    """Position and name of each result."""
    if case.cache is None:
        return [(0, "q_out"), (1, "k_out")]
    stored = "k" if case.keys else "kv"
    scales = [f"{name}_scale_out" for name in stored if case.scaling == "own"]
    return list(enumerate(["q_out", *(f"{name}_cache" for name in stored), *scales]))


def variants(case: QkCacheCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[tuple[str, Any]]:
    """Other ways to make the same call: into guarded memory, into allocated outputs, and in place."""
    given, wrong = run_once(case, arguments, check=lambda *_: None)
    if wrong is not None:
        raise AssertionError(wrong)
    yield "in guarded memory", given
    if case.out in (None, case.x):
        if not interpreting():  # there the first call was the same launch
            yield "when outputs are allocated", call(case, arguments, "allocated")
        yield "when outputs are in place", call(case, arguments, "in place")


def run_once(
    case: QkCacheCase, arguments: dict[str, Any], check: Verify | None = None, guard: int = GUARD
) -> tuple[tuple[Tensor, ...], str | None]:
    """The results of a call into guarded tensors, and what is wrong with them or with the memory around them."""
    results, stored, wrong = run_guarded(arguments, partial(call_with, case), guard)
    return results, wrong or (check or verify)(case, arguments, stored)


# --- verification ---------------------------------------------------------------------------------------------------


def verify(case: QkCacheCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong: every value lies between bounds, and only entries of tokens were written."""
    host = to_cpu(arguments)
    q, *others = (t.cpu() for t in results)
    wrong = side(case, host, "q").stored(q)
    if wrong is not None:
        return f"q: {wrong}"
    k = side(case, host, "k")
    if case.cache is None:
        wrong = k.stored(others[0])
        return wrong and f"k: {wrong}"
    names = "k" if case.keys else "kv"
    for i, name in enumerate(names):
        own = others[i + len(names)] if case.scaling == "own" else None
        wrong = _cache_fault(case, host, name, k if name == "k" else _values(case, host), others[i], own)
        if wrong is not None:
            return f"{name}_cache: {wrong}"
    return None


def _values(case: QkCacheCase, host: dict[str, Any]) -> Bounds:
    """Bounds of v before scale and store."""
    v = host["v"].double()
    if not case.norm_v or not v.numel():
        return Bounds(v, v)
    y = bounds.normed(v, bounds.reciprocal_rms(v, host.get("eps", 1e-6)), torch.ones(1).double(), None)
    return y if case.rounding == "once" else y.rounded(case.x)


def _cache_fault(
    case: QkCacheCase, host: dict[str, Any], name: str, values: Bounds, after: Tensor, own: Tensor | None
) -> str | None:
    """None, or what is wrong with a cache, and with its entries' ``own`` scales."""
    page, entry = places(case, host)
    here = page >= 0
    page, entry = page[here], entry[here]
    before, now = (by_entry(case, t) for t in (host[f"{name}_cache"], after))
    free = torch.ones(now.shape[:2], dtype=torch.bool)
    free[page, entry] = False
    written = [(before, now)]
    if own is not None:
        written += [(by_entry(case, host[f"{name}_scale_out"]), by_entry(case, own))]
    if not all(same_bytes(old[free], new[free]) for old, new in written):
        return "entries that belong to no token were written"
    ends = Bounds(*(end.flatten(0, len(case.lead) - 1)[here] for end in values))
    got = now[page, entry].view(after.dtype)
    if own is not None and got.numel():
        return code_fault(ends, got, written[1][1].view(F32)[page, entry], True)
    scale = host.get(f"{name}_scale")
    if scale is None or not got.numel():
        return compare.between(got, *ends, FP8_FORMATS.get(after.dtype))
    return code_fault(ends, got, scale.view(-1, 1), False)


def by_entry(case: QkCacheCase, cache: Tensor) -> Tensor:
    """The bytes of a cache or of its scales as [pages, entries, heads, bytes]."""
    columns = cache if cache.dim() == 4 else cache.unsqueeze(-1)
    ordered = columns if case.layout == "NHD" else columns.transpose(1, 2)
    return ordered.contiguous().view(torch.uint8)


def places(case: QkCacheCase, host: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Page and entry of every token; the page is -1 for none."""
    if case.layout != "dense":
        return qk_cache_reference.paged(host["slots"], host["k_cache"].shape[0], case.entries)
    starts = host["starts"].tolist() if "starts" in host else [host.get("first", 0)]
    sequences, tokens = case.lead
    return qk_cache_reference.dense(starts, sequences, tokens, case.entries)


def side(case: QkCacheCase, host: dict[str, Any], name: str) -> Bounds:
    """Bounds of q or k before scale and store: normed, rotated and rounded as the case asks."""
    x = host[name]
    y = Bounds(x.double(), x.double())
    if not x.numel():
        return y
    if case.norm != "none":
        rows = x.double() if case.norm == "head" else x.double().flatten(-2)
        rs = bounds.reciprocal_rms(rows, host.get("eps", 1e-6))
        g = bounds.weight(host[f"gamma_{name}"], host.get("weight_offset", 0.0))
        y = bounds.normed(rows, rs, g, x.dtype if case.rounding == "hf" else None)
        y = Bounds(*(end.reshape(x.shape) for end in y))
        if case.rounding == "hf_rope":
            y = y.rounded(x.dtype)
    if case.angles is None:
        return y
    freqs, positions = _table(case, host)
    turn: dict[str, Any] = {"positions": positions, "style": case.angles.style, "dim": case.angles.dim}
    if case.rounding == "once":

        def rotated(t: Tensor) -> qk_norm_reference.Rotated:
            found = qk_norm_reference.rotate(t.flatten(-2), freqs, case.head, **turn)
            return qk_norm_reference.Rotated(*(part.view(t.shape) for part in found))

        turned = bounds.rotated(y, rotated)
    else:
        turned = bounds.rotated_stepwise(y, freqs, x.dtype, **turn)
    still = torch.arange(case.head) >= case.angles.dim
    return Bounds(*(torch.where(still, end, new) for end, new in zip(y, turned, strict=True)))


def _table(case: QkCacheCase, host: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Angles as a table: a pair's rows become one, with a row per token."""
    turn = case.angles
    if turn is not None and turn.sections is not None:
        table = qk_cache_reference.section_table(host["freqs"], host["positions"], turn.sections, turn.section_style)
        return table, torch.arange(case.tokens).view(case.lead)
    if "freqs" in host:
        return host["freqs"], host.get("positions")
    half = host["cos"].shape[-1] // 2
    cos, sin = (host[name][..., :half].double().expand(*case.lead, half) for name in ("cos", "sin"))
    table = torch.stack((cos, sin), -1).flatten(-2).reshape(-1, 2 * half)
    return table, torch.arange(case.tokens).view(case.lead)
