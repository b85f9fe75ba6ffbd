"""Cases of MLA's cache write: inputs, calls and verification."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor

from onepass.formats import E4M3FN, E4M3FNUZ, FLOATS, FP8_FORMATS, SMALLEST_SCALE, ScaleRule
from onepass.kvcache import DS_MLA, DS_MLA_BYTES, DS_MLA_COLUMNS, DS_MLA_TILE, PagedKVCache
from onepass.ops.mla_cache import reference as mla_cache_reference
from onepass.ops.mla_cache.launch import ScaleKind
from onepass.ops.mla_cache.op import fused_rope_rmsnorm_quantization
from onepass.ops.qk_norm import reference as qk_norm_reference
from onepass.testing import compare
from onepass.testing.tensors import moved, same_bytes, set_special
from tests.oracle import bounds
from tests.oracle.bounds import Bounds
from tests.oracle.case import GPU_ONLY, Values, case_name, labelled
from tests.oracle.guarded import GUARD, run_guarded
from tests.oracle.memory import to_cpu

BF16, F16, F32 = FLOATS
FP8, FNUZ = E4M3FN.dtype, E4M3FNUZ.dtype
I32, I64, U32 = torch.int32, torch.int64, torch.uint32
OP: Final = "fused_rope_rmsnorm_quantization"
OPS: Final = (OP,)

MlaLayout = Literal["contiguous", "slices", "misaligned", "transposed"]
"""slices: q in heads 128 columns wider, its output in heads 512 wider, kv the last columns of a projection, entries with
room behind them that holds the token's scale; transposed: heads before tokens."""
Fault = Literal["", "pages", "width", "lengths", "slots"]
"""The kind of invalid table entries."""


@dataclass(frozen=True, eq=False)
class MlaCase:
    """One call: the requests (tokens cached, tokens new), sizes, dtypes, options, layout, values and bad tables."""

    group: str
    batch: tuple[tuple[int, int], ...] = ((5, 3), (0, 2), (9, 1))
    heads: int = 4
    latent: int = 128
    rope: int = 64
    turned: int | None = None
    normed: int | None = None
    q: torch.dtype = BF16
    kv: torch.dtype = BF16
    gamma: torch.dtype = BF16
    cache: torch.dtype = FP8
    freqs: torch.dtype | None = F32
    out: torch.dtype | None = None
    page: int = 4
    style: str = "interleaved"
    scale: ScaleKind = "none"
    index: torch.dtype = I32
    slots: torch.dtype | None = None
    positions: torch.dtype | None = None
    padding: tuple[int, int] = (0, 0)
    layout: MlaLayout = "contiguous"
    values: Values = "normal"
    fault: Fault = ""
    options: dict[str, Any] = field(default_factory=dict)
    op: str = OP

    @property
    def tokens(self) -> int:
        """Tokens of the call, padding included."""
        return sum(new for _, new in self.batch) + sum(self.padding)

    @property
    def interpretable(self) -> bool:
        """See `Check`."""
        return self.group not in GPU_ONLY

    @property
    def name(self) -> str:
        """See `Check`."""
        shapes = f"{self.tokens}x{self.heads}x{self.rope}", f"{self.latent}+{self.rope}", f"pages of {self.page}"
        dtypes = (labelled(label, getattr(self, label)) for label in ("q", "kv", "gamma", "cache", "out"))
        freqs = "no freqs" if self.freqs is None else labelled("freqs", None if self.freqs == F32 else self.freqs)
        indices = (_index_name(label, getattr(self, label)) for label in ("index", "slots", "positions"))
        options = (f"{k}={v}" for k, v in self.options.items())
        columns = labelled("turned", self.turned), labelled("normed", self.normed)
        layout = self.style, f"scale={self.scale}", self.layout, self.values
        padding = labelled("padding", self.padding if any(self.padding) else None)
        fault = self.fault and f"bad {self.fault}"
        return case_name(self.group, *shapes, *dtypes, freqs, *columns, *indices, *options, *layout, padding, fault)


def _index_name(label: str, dtype: torch.dtype | None) -> str:
    if dtype in (None, I32):
        return "" if dtype is None or label == "index" else label
    return f"{label}={str(dtype).removeprefix('torch.')}"


RAGGED: Final = ((0, 0), (7, 4), (3, 0), (0, 0), (12, 1), (0, 5), (1, 0))

POSITIONS: Final = 48
"""Rows of freqs."""
KV_SCALE: Final = 0.0218437
"""Not close to the reciprocal of a small integer: bfloat16 values would have multiples at the ties of fp8."""


# --- inputs ---------------------------------------------------------------------------------------------------------


def inputs(case: MlaCase, device: str, seed: int = 0) -> dict[str, Any]:
    """Tensors and options by their names in the contract; outputs are filled with noise."""
    generator = torch.Generator().manual_seed(seed + case.latent)
    tokens, columns = case.tokens, case.latent + case.rope
    q = torch.randn(tokens, case.heads, case.rope, generator=generator).to(case.q)
    kv = (1.5 * torch.randn(tokens, columns, generator=generator)).to(case.kv)
    if case.values == "special":
        _set_special(q, kv, case.latent)
    found: dict[str, Any] = dict(zip(("q_rope", "kv", "q_rope_output"), _laid_out(case, q, kv, generator), strict=True))
    gamma = 1 + 0.25 * torch.randn(case.latent if case.normed is None else case.normed, generator=generator)
    found["gamma"] = gamma.to(case.gamma)
    if case.freqs is not None:
        width = case.rope if case.turned is None else case.turned + 6
        angle = torch.rand(POSITIONS, (width + 1) // 2, generator=generator) * 6.3
        found["freqs_cis"] = torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)[:, :width].to(case.freqs)
    tables, pages = _tables(case, generator)
    found |= tables
    found |= _cache(case, pages, generator)
    if case.slots is not None:
        free = torch.randperm(pages * case.page, generator=generator)[:tokens]
        free[::3] = torch.tensor([-1, -7, -(2**31)])[torch.arange(free[::3].shape[0]) % 3]
        if case.fault == "slots":
            free[1::3] = pages * case.page + torch.arange(free[1::3].shape[0]) * 1000
        found["slot_mapping"] = free.to(case.slots)
    if case.positions is not None:
        at = torch.randint(-2, POSITIONS + 2, (tokens,), generator=generator)
        found["positions"] = at.to(case.positions)
    if case.scale == "tensor":
        found["kv_scale"] = torch.tensor(KV_SCALE)
    turned = {} if case.turned is None else {"rope_dim": case.turned}
    normed = {} if case.normed is None else {"kv_norm_dim": case.normed}
    return moved(found, device) | turned | normed | case.options | {"rope_style": case.style}


def _set_special(q: Tensor, kv: Tensor, latent: int) -> None:
    set_special(kv, latent - 1)
    kv[8, latent + 1] = torch.nan
    kv[9, latent + 2] = -torch.inf
    kv[10, latent:] = 0.0
    kv[11, :latent] = 0.0
    kv[12] *= 2.0**-40 if kv.dtype != F16 else 1.0
    q[0] = 0.0
    q[2, 1, 4] = torch.nan
    q[3, 0, 3] = torch.inf
    q[4] *= 1e4


def _noise(generator: torch.Generator, *shape: int) -> Tensor:
    """Random bytes."""
    count = math.prod(shape)
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), generator=generator)
    return words.view(torch.uint8)[:count].view(shape)


def _laid_out(case: MlaCase, q: Tensor, kv: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """q, kv and the memory for q's result, which holds noise."""

    def within(t: Tensor, before: int, after: int) -> Tensor:
        *lead, n = t.shape
        noise = _noise(generator, *lead, (before + n + after) * t.element_size()).view(t.dtype)
        return noise[..., before : before + n].copy_(t)

    made = torch.zeros(q.shape, dtype=case.out or q.dtype)
    match case.layout:
        case "slices":
            return within(q, 128, 0), within(kv, 1536, 0), within(made, 512, 0)
        case "misaligned":
            return within(q, 1, 2), within(kv, 3, 0), within(made, 1, 0)
        case "transposed":
            first, last = (within(t.transpose(0, 1), 0, 8).transpose(0, 1) for t in (q, made))
            return first, kv, last
    return q, kv, made


def _tables(case: MlaCase, generator: torch.Generator) -> tuple[dict[str, Any], int]:
    """Offsets, lengths and a shuffled page table; and the number of pages."""
    needed = [-(-(cached + new) // case.page) for cached, new in case.batch]
    pages = sum(needed) + 3
    if case.slots is not None:
        pages = max(pages, -(-2 * case.tokens // case.page))
    order = torch.randperm(pages, generator=generator).tolist()
    width = max(needed, default=0) + 1
    table = torch.randint(
        0, 2**31 - 1, (len(case.batch), width), generator=generator
    )  # unused entries are out of range
    for row, count in zip(table, needed, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)])
    lengths = torch.tensor([cached for cached, _ in case.batch]).long()
    offsets = torch.tensor([0, *(new for _, new in case.batch)]).cumsum(0) + case.padding[0]
    if case.fault == "pages":
        wild = torch.tensor([pages, 2**31 - 1, -1, pages + 7])
        for request, count in enumerate(needed):
            if count:
                table[request, count - 1] = wild[request % 4]
    elif case.fault == "width":
        lengths[1::2] += 2 * width * case.page + 1
        lengths[1] = 2**31 - 4
    elif case.fault == "lengths":
        lengths[1::2] = torch.tensor([-2, -100, -(2**31)])[: lengths[1::2].shape[0]]
    found = {"input_row_offsets": offsets, "cache_lengths": lengths, "lookup_table": table}
    return {name: _as_index(t, case.index) for name, t in found.items()}, pages


def _as_index(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(torch.int32).view(torch.uint32) if dtype == torch.uint32 else values.to(dtype)


def _cache(case: MlaCase, pages: int, generator: torch.Generator) -> dict[str, Any]:
    """Blocks and the tokens' scales, filled with noise; with "slices" in entries that are wider and shared."""
    packed = case.scale == "tile"
    size = DS_MLA_BYTES if packed else (case.latent + case.rope) * case.cache.itemsize
    room = {
        "contiguous": size,
        "transposed": size,
        "slices": (size + 31) & -16,
        "misaligned": size + (4 if packed else 3 * case.cache.itemsize),
    }
    parent = _noise(generator, pages, case.page, room[case.layout])
    if packed:
        return {"blocks": parent[..., :size]}
    found = {"blocks": parent.view(case.cache)[..., : case.latent + case.rope]}
    if case.scale == "token":
        if case.layout == "slices":
            found["per_token_scale"] = parent.view(F32)[..., -1]
        else:
            found["per_token_scale"] = _noise(generator, pages, case.page * 4).view(F32)
    return found


# --- calls ----------------------------------------------------------------------------------------------------------

Verify = Callable[[MlaCase, dict[str, Any], tuple[Tensor, ...]], str | None]
Way = Literal["given", "allocated", "in place"]
_WRITTEN: Final = ("q_rope_output", "blocks", "per_token_scale")


def call(case: MlaCase, arguments: dict[str, Any], way: Way = "given") -> tuple[Tensor, ...]:
    """q_rope_output, the blocks and any scales after a call with copies of the arguments."""
    return call_with(case, moved(arguments), way)


def call_with(case: MlaCase, arguments: dict[str, Any], way: Way = "given") -> tuple[Tensor, ...]:
    """The same after a call with the arguments themselves."""
    given = dict(arguments)
    cache = PagedKVCache(given.pop("blocks"), entry_format=DS_MLA if case.scale == "tile" else "plain")
    cache.cache_lengths, cache.lookup_table = given.pop("cache_lengths"), given.pop("lookup_table")  # unchecked
    out, q = given.pop("q_rope_output"), given.pop("q_rope")
    freqs, offsets = given.pop("freqs_cis", None), given.pop("input_row_offsets")
    if case.slots is not None and (case.positions is not None or case.freqs is None):
        offsets = None
    if way == "allocated":
        given["out_dtype"] = out.dtype
    output = {"given": out, "allocated": None, "in place": q}[way]
    kv, gamma = given.pop("kv"), given.pop("gamma")
    made = fused_rope_rmsnorm_quantization(output, q, kv, offsets, freqs, gamma, cache, **given)
    scale = given.get("per_token_scale")
    return (made, cache.blocks) if scale is None else (made, cache.blocks, scale)


def zeroable(case: MlaCase) -> list[tuple[int, str]]:
    """Position and name of each result that is not empty."""
    return [(i, name) for i, name in enumerate(_WRITTEN) if (i or case.rope) and (i < 2 or case.scale == "token")]


def variants(case: MlaCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[tuple[str, Any]]:
    """Other ways to make the same call: into guarded memory, into an allocated output, and in place."""
    given, wrong = run_once(case, arguments, check=lambda *_: None)
    if wrong is not None:
        raise AssertionError(wrong)
    yield "in guarded memory", given
    yield "when q_rope_output is allocated", call(case, arguments, "allocated")
    if case.out in (None, case.q):
        yield "when q_rope_output is in place", call(case, arguments, "in place")


def run_once(
    case: MlaCase, arguments: dict[str, Any], check: Verify | None = None, guard: int = GUARD
) -> tuple[tuple[Tensor, ...], str | None]:
    """The results of a call into guarded tensors, and what is wrong with them or with the memory around them."""
    results, stored, wrong = run_guarded(arguments, partial(call_with, case), guard)
    return results, wrong or (check or verify)(case, arguments, stored)


# --- verification ---------------------------------------------------------------------------------------------------


def verify(case: MlaCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong: every value lies between bounds, and only entries of tokens were written."""
    host = to_cpu(arguments)
    q, blocks, *scales = (t.cpu() for t in results)
    slots = slots_of(host, blocks)
    wrong = compare.between(q, *_rotated(host, host["q_rope"], slots.position), FP8_FORMATS.get(q.dtype))
    if wrong is not None:
        return f"q: {wrong}"
    wrong = untouched(host, slots, blocks, scales)
    if wrong is not None:
        return wrong
    here = slots.slot >= 0
    entry, written = _entry(host, here, slots.position), slots.slot[here]
    if blocks.dtype == torch.uint8:
        return packed_fault(entry, blocks.flatten(0, 1)[written])
    got = blocks.view(torch.uint8).flatten(0, 1)[written].view(blocks.dtype)
    fmt = FP8_FORMATS.get(blocks.dtype)
    if fmt is not None and (scales or "kv_scale" in host):
        divisor = host.get("kv_scale")
        if scales:
            divisor = scales[0].flatten()[written].unsqueeze(-1)
            low, high = (bounds.largest(t, None) for t in bounds.sizes(entry))
            wrong = bounds.scales(divisor, low, high, None, fmt.max, ScaleRule("row", F32))
            if wrong is not None:
                return wrong
        entry = bounds.product_error(*(_divided(end, divisor) for end in entry))
    wrong = compare.between(got, *entry, fmt)
    return wrong and f"entries: {wrong}"


def packed_fault(entry: Bounds, got: Tensor) -> str | None:
    """None, or what is wrong with entries of the format "fp8_ds_mla": codes, scales, and columns in bfloat16."""
    latent, rope = DS_MLA_COLUMNS
    codes, scales, rest = got.split((latent, latent // DS_MLA_TILE * 4, 2 * rope), -1)
    wrong = entry.part(slice(latent, None)).stored(rest.contiguous().view(torch.bfloat16))
    if wrong is not None:
        return f"entries: {wrong}"
    tiles, stored = entry.part(slice(latent)), scales.contiguous().view(F32)
    low, high = (bounds.largest(t, DS_MLA_TILE) for t in bounds.sizes(tiles))
    wrong = bounds.scales(stored, low, high, None, E4M3FN.max, ScaleRule("group", F32), least=SMALLEST_SCALE)
    if wrong is not None:
        return wrong
    divisor = stored.repeat_interleave(DS_MLA_TILE, -1)
    quotients = bounds.product_error(*(_divided(end, divisor) for end in tiles))
    wrong = compare.between(codes.contiguous().view(E4M3FN.dtype), *quotients, E4M3FN)
    return wrong and f"codes: {wrong}"


def slots_of(host: dict[str, Any], blocks: Tensor) -> mla_cache_reference.Slots:
    """Position and slot per token."""
    tables = host["input_row_offsets"], host["cache_lengths"], host["lookup_table"]
    given = host.get("slot_mapping"), host.get("positions")
    return mla_cache_reference.slots(host["kv"].shape[0], blocks.shape[0], blocks.shape[1], *tables, *given)


def untouched(
    host: dict[str, Any], slots: mla_cache_reference.Slots, blocks: Tensor, scales: list[Tensor]
) -> str | None:
    """None, or which entries were written that belong to no token."""
    entries = blocks.shape[0] * blocks.shape[1]
    free = torch.ones(entries, dtype=torch.bool)
    free[slots.slot[slots.slot >= 0]] = False
    for name, after in zip(_WRITTEN[1:], (blocks, *scales), strict=False):
        before, now = (t.contiguous().view(torch.uint8).view(entries, -1)[free] for t in (host[name], after))
        if not same_bytes(before, now):
            return f"{name}: {int((before != now).any(-1).sum())} entries that belong to no token were written"
    return None


def _divided(end: Tensor, divisor: Any) -> Tensor:
    divisor = divisor.double()
    value = torch.where(divisor == 0, torch.where(end.isnan(), torch.nan, 0.0), end / divisor)
    return torch.where(divisor.isnan(), torch.nan, value)


def _rotated(host: dict[str, Any], heads: Tensor, position: Tensor) -> Bounds:
    """RoPE of [T, H, R]."""
    freqs, dim, values = host.get("freqs_cis"), host.get("rope_dim"), heads.double()
    if freqs is None or dim == 0 or not heads.numel():
        return Bounds(values, values)
    options: dict[str, Any] = {"positions": position, "style": host.get("rope_style", "interleaved"), "dim": dim}

    def turn(t: Tensor) -> qk_norm_reference.Rotated:
        return qk_norm_reference.Rotated(
            *(p.view(t.shape) for p in qk_norm_reference.rotate(t.flatten(1), freqs, t.shape[2], **options))
        )

    found = bounds.rotated(Bounds(values, values), turn)
    if host.get("rounding") == "reference":
        found = found.rounded(heads.dtype)
    still = torch.arange(heads.shape[2]) >= (freqs.shape[1] if dim is None else dim)  # only converted
    return Bounds(*(torch.where(still, values, end) for end in found))


def _entry(host: dict[str, Any], here: Tensor, position: Tensor) -> Bounds:
    """The normed latent, the columns between, and the rotated ones, of the tokens that have a slot."""
    kv, normed, rope = host["kv"][here], host["gamma"].shape[0], host["q_rope"].shape[2]
    latent, between, k = kv.split((normed, kv.shape[1] - normed - rope, rope), -1)
    rs = bounds.reciprocal_rms(latent.double(), host.get("epsilon", 1e-6))
    g = bounds.weight(host["gamma"], host.get("weight_offset", 0.0))
    y = bounds.normed(latent.double(), rs, g, kv.dtype if host.get("rounding") == "reference" else None)
    turned = _rotated(host, k.unsqueeze(1), position[here])
    return Bounds(*(torch.cat((a, between.double(), b.squeeze(1)), -1) for a, b in zip(y, turned, strict=True)))
