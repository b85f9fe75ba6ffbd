"""What MLA's cache write is checked with, called with, and held to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import Tensor

from ..formats import FP8_FORMATS, ScaleRule
from ..kvcache import PagedKVCache
from ..ops.mla_cache import fused_rope_rmsnorm_quantization
from . import compare, oracle_mla
from .case import same_bytes
from .mla_cache_inputs import CASES, F16, F32, OP, MlaCase
from .oracle import quantization_step

__all__ = ["CASES", "OP", "call", "inputs", "run", "run_once", "verify", "zeroable"]

POSITIONS: Final = 48
"""Rows of freqs."""
KV_SCALE: Final = 0.0218437
"""No near reciprocal of a small integer, of which bfloat16 values have multiples at the very ties of fp8."""
GUARD: Final = 4096
"""Bytes of a pattern around every buffer; a multiple of any alignment."""


# --- inputs ---------------------------------------------------------------------------------------------------------


def inputs(case: MlaCase, device: str, seed: int = 0) -> dict[str, Any]:
    """Tensors and options by their names in the contract; what is written is full of noise."""
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
    found |= _tables(case, generator)
    pages = found.pop("pages")
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
    kv[0] = 0.0
    kv[1] = -0.0
    kv[2, 5] = torch.nan
    kv[3, 7] = torch.inf
    kv[4, latent - 1] = -torch.inf
    kv[5] *= 1e-3
    kv[6] *= 1e4
    kv[7] = 0.0
    kv[7, 3] = -2.0
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
    """q, kv and room for q's result, which is noise."""

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


def _tables(case: MlaCase, generator: torch.Generator) -> dict[str, Any]:
    """Offsets, lengths and a table of pages in disorder, and how many pages there are."""
    needed = [-(-(cached + new) // case.page) for cached, new in case.batch]
    pages = sum(needed) + 3
    if case.slots is not None:
        pages = max(pages, -(-2 * case.tokens // case.page))
    order = torch.randperm(pages, generator=generator).tolist()
    width = max(needed, default=0) + 1
    table = torch.randint(0, 2**31 - 1, (len(case.batch), width), generator=generator)  # what nobody needs is wild
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
    return {n: _as_index(t, case.index) for n, t in found.items()} | {"pages": pages}


def _as_index(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(torch.int32).view(torch.uint32) if dtype == torch.uint32 else values.to(dtype)


def _cache(case: MlaCase, pages: int, generator: torch.Generator) -> dict[str, Any]:
    """Blocks, and the tokens' scales, full of noise; with "slices" in entries that are wider and shared."""
    size = (case.latent + case.rope) * case.cache.itemsize
    room = {
        "contiguous": size,
        "transposed": size,
        "slices": (size + 31) & -16,
        "misaligned": size + 3 * case.cache.itemsize,
    }
    parent = _noise(generator, pages, case.page, room[case.layout])
    found = {"blocks": parent.view(case.cache)[..., : case.latent + case.rope]}
    if case.scale == "token":
        if case.layout == "slices":
            found["per_token_scale"] = parent.view(F32)[..., -1]
        else:
            found["per_token_scale"] = _noise(generator, pages, case.page * 4).view(F32)
    return found


def moved(arguments: dict[str, Any], device: str | None = None, guard: int = 0) -> dict[str, Any]:
    """Copies on a device (None: where they are) with strides, offsets and shared memory kept.

    ``guard``: so many bytes of a pattern before and after the memory of each.
    """
    copies: dict[int, Tensor] = {}
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            found[name] = value
            continue
        storage = value.untyped_storage()
        if storage.data_ptr() not in copies:
            whole = _bytes(value)
            edge = torch.full((guard,), 0xA5, dtype=torch.uint8, device=whole.device)
            copies[storage.data_ptr()] = torch.cat((edge, whole, edge)).to(device or whole.device)
        copy = copies[storage.data_ptr()]
        empty = torch.empty(0, dtype=value.dtype, device=copy.device)
        offset = value.storage_offset() + guard // value.element_size()
        found[name] = empty.set_(copy.untyped_storage(), offset, value.shape, value.stride())
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """All memory that a tensor is in."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


# --- calls ----------------------------------------------------------------------------------------------------------

Verify = Callable[[MlaCase, dict[str, Any], tuple[Tensor, ...]], str | None]
Way = Literal["given", "allocated", "in place"]
_WRITTEN: Final = ("q_rope_output", "blocks", "per_token_scale")


def call(case: MlaCase, arguments: dict[str, Any], way: Way = "given") -> tuple[Tensor, ...]:
    """What a call with copies of the arguments leaves in q_rope_output, the blocks and, if it has them, the scales."""
    return _call(case, moved(arguments), way)


def _call(case: MlaCase, arguments: dict[str, Any], way: Way) -> tuple[Tensor, ...]:
    given = dict(arguments)
    cache = PagedKVCache(given.pop("blocks"))
    cache.cache_lengths, cache.lookup_table = given.pop("cache_lengths"), given.pop("lookup_table")  # unchecked
    out = given.pop("q_rope_output")
    freqs, offsets = given.pop("freqs_cis", None), given.pop("input_row_offsets")
    if case.slots is not None and (case.positions is not None or case.freqs is None):
        offsets = None
    if way == "allocated":
        given["q_dtype"] = out.dtype
    made = fused_rope_rmsnorm_quantization(
        {"given": out, "allocated": None, "in place": given["q_rope"]}[way],
        given.pop("q_rope"), given.pop("kv"), offsets, freqs, given.pop("gamma"), cache, **given,
    )  # fmt: skip
    scale = given.get("per_token_scale")
    return (made, cache.blocks) if scale is None else (made, cache.blocks, scale)


def zeroable(case: MlaCase) -> list[tuple[int, str]]:
    """Position and name of each result that is not empty."""
    return [(i, name) for i, name in enumerate(_WRITTEN) if (i or case.rope) and (i < 2 or case.scale == "token")]


def verify(case: MlaCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results.

    "reference" rounds on the way, and a value near the middle between two numbers may fall either way: so every value has bounds.
    """
    if arguments.get("rounding") == "reference":
        from tools.fuzz import mla_cache  # draws calls of the op whose cases are here

        return mla_cache.verify(case, arguments, results)
    host = moved(arguments, "cpu")
    q, blocks, *scales = (t.cpu() for t in results)
    place = places(case, host, blocks)
    exact = oracle_mla.mla_rope_norm(
        host["q_rope"], host["kv"], host["gamma"], host.get("freqs_cis"), place.position, host.get("epsilon", 1e-6),
        style=case.style, dim=case.turned, weight_offset=host.get("weight_offset", 0.0),
    )  # fmt: skip
    wrong = _close(q, exact.q.y, exact.q.size)
    if wrong is not None:
        return f"q: {wrong}"
    wrong = beside(case, host, place, blocks, scales)
    if wrong is not None:
        return wrong
    written = place.slot[place.slot >= 0]
    got = blocks.view(torch.uint8).flatten(0, 1)[written].view(case.cache)
    here = place.slot >= 0
    entry, size = exact.entry.y[here], exact.entry.size[here]
    if case.scale != "none":
        divisor = torch.tensor(KV_SCALE).double()
        if scales:
            stored = scales[0].flatten()[written].unsqueeze(-1)
            step = quantization_step(entry, FP8_FORMATS[case.cache].max)
            rule = ScaleRule("row", F32)
            doubt = 2 * compare.FLOAT32_ERROR  # the error of a pair, relative to its larger one
            wrong = compare.scales(stored, step, rule, error=doubt)
            if wrong is not None:
                return wrong
            entry = torch.where(stored.isnan(), torch.nan, entry)
            divisor = stored.double()
        entry, size = oracle_mla.divided(entry, divisor), oracle_mla.divided(size, divisor)
    wrong = _close(got, entry, size)
    return None if wrong is None else f"entries: {wrong}"


def places(case: MlaCase, host: dict[str, Any], blocks: Tensor) -> oracle_mla.Places:
    """Where the tokens' entries lie."""
    return oracle_mla.places(
        case.tokens, blocks.shape[0], blocks.shape[1], offsets=host["input_row_offsets"], lengths=host["cache_lengths"],
        table=host["lookup_table"], slots=host.get("slot_mapping"), positions=host.get("positions"),
    )  # fmt: skip


def beside(
    case: MlaCase, host: dict[str, Any], place: oracle_mla.Places, blocks: Tensor, scales: list[Tensor]
) -> str | None:
    """None, or which entries changed that are no token's."""
    entries = blocks.shape[0] * blocks.shape[1]
    untouched = torch.ones(entries, dtype=torch.bool)
    untouched[place.slot[place.slot >= 0]] = False
    for name, after in zip(_WRITTEN[1:], (blocks, *scales), strict=False):
        before, now = (t.contiguous().view(torch.uint8).view(entries, -1)[untouched] for t in (host[name], after))
        if not same_bytes(before, now):
            return f"{name}: {int((before != now).any(-1).sum())} entries of no token were written"
    return None


def _close(actual: Tensor, exact: Tensor, size: Tensor) -> str | None:
    error, share = compare.FLOAT32_ERROR * size, None if actual.dtype == F32 else 0.998
    return compare.stored(actual, exact, error, FP8_FORMATS.get(actual.dtype), share=share)


def run_once(
    case: MlaCase, arguments: dict[str, Any], check: Verify | None = None, guard: int = GUARD
) -> tuple[tuple[Tensor, ...], str | None]:
    """The results of a call into given tensors, and None or what is wrong with them or with the memory around them."""
    given = moved(arguments, guard=guard)
    memory = {t.untyped_storage().data_ptr(): _bytes(t) for t in given.values() if isinstance(t, Tensor)}
    before = {at: t.clone() for at, t in memory.items()}
    results = _call(case, given, "given")
    ours = {at: torch.zeros_like(t) for at, t in memory.items()}
    for t in results:
        mine = torch.empty(0, dtype=t.dtype, device=t.device).set_(
            ours[t.untyped_storage().data_ptr()].untyped_storage(), t.storage_offset(), t.shape, t.stride()
        )
        mine.unsqueeze(-1).view(torch.uint8).fill_(1)
    for at, now in memory.items():
        if torch.equal(now, before[at]):
            continue
        spilt = (now != before[at]) & (ours[at] == 0)
        if spilt.any():
            return results, f"{int(spilt.sum())} bytes beside the outputs were written"
    return results, (check or verify)(case, arguments, results)


def run(case: MlaCase, device: str, seed: int = 0) -> str | None:
    """Run a case in each form, nothing written but what should be; None, or what is wrong."""
    arguments = inputs(case, device, seed)
    results, wrong = run_once(case, arguments)
    if wrong is not None:
        return wrong
    ways: list[Way] = ["allocated"]
    if case.out in (None, case.q):
        ways.append("in place")
    for way in ways:
        for name, first, second in zip(_WRITTEN, results, call(case, arguments, way), strict=False):
            if not same_bytes(first, second):
                return f"{name} differs when q_rope_output is {way}"
    return None
