"""The calls of both writes to a KV cache that `onepass check` makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from ..formats import E4M3FN, FLOATS, FP8_FORMATS
from ..kvcache import DS_MLA, DS_MLA_BYTES, DS_MLA_COLUMNS, PagedKVCache
from ..ops.mla_cache import reference as mla_cache
from ..ops.mla_cache.op import fused_rope_rmsnorm_quantization
from ..ops.qk_cache import reference as qk_cache
from ..ops.qk_cache.op import qk_norm_rope_cache
from ..ops.qk_norm.reference import from_pairs, pairs, rotate, token_angles
from ..ops.rms_norm.reference import divided
from ..rope import Rope
from .call import ERROR, Case, Expected, Random, bf16, case, f16, f32, scaled_rows
from .qk_norm import norm_of, positions, table, turned

BF16, F16, F32 = FLOATS
FP8, FNUZ = FP8_FORMATS
I32, I64 = torch.int32, torch.int64
_PAGE: Final = 4
_SCALES: Final = {"k": torch.tensor(0.0218437), "v": torch.tensor(0.0317519)}
"""Not close to the reciprocal of a small integer: bfloat16 values would have multiples at the ties of fp8."""
_ROUNDED: Final = ("hf", "hf_rope", "reference")


# --- q, k and v -----------------------------------------------------------------------------------------------------


def _write_qkv(q_out: torch.dtype | None = None, **arguments: Any) -> tuple[Tensor, ...]:
    q, k, cache = arguments["q"], arguments["k"], arguments.get("k_cache")
    outs = [torch.empty(t.shape, dtype=q_out or t.dtype, device=t.device) for t in (q, k)]
    if cache is not None:
        written = (cache, arguments.get("v_cache"), *arguments.get("scale_out", ()))
        return qk_norm_rope_cache(**arguments, out=outs[0])[0], *(t for t in written if t is not None)
    qk_norm_rope_cache(**arguments, out=(outs[0], outs[1]))
    return tuple(outs)


def _slots(dtype: torch.dtype, pages: int, page: int, *lead: int) -> Tensor:
    """A slot for each token, in any order; every third one lies outside the cache."""
    count = torch.Size(lead).numel()
    slots = torch.randperm(pages * page, generator=torch.Generator().manual_seed(count))[:count]
    slots[::3] = torch.tensor([-1, pages * page, -(2**31)])[torch.arange(-(-count // 3)) % 3]
    return slots.view(lead).to(dtype)


def _qkv(
    group: str,
    draw: Any = bf16,
    lead: tuple[int, ...] = (5,),
    gamma: Any = "x",
    *,
    layout: str = "NHD",
    cache: torch.dtype | None = BF16,
    rope: Any = True,
    whole: bool = False,
    page: int = _PAGE,
    index: torch.dtype = I64,
    scale: str = "",
    own: bool = False,
    keys: bool = False,
    memory: Any = "contiguous",
    heads: tuple[int, int] = (4, 2),
    head: int = 64,
    start: Any = None,
    **options: Any,
) -> Case:
    """A case of ``heads`` heads of q and k with ``head`` columns; ``gamma``: what draws q's and k's, "x" as x, or None.

    ``scale``: "k", "v", "kv", in capitals for a scale per head; ``own``: scales of entries; ``keys``: a cache of keys alone.
    """
    q, k, v = (draw(*lead, count, head, layout=memory) for count in (*heads, heads[1]))
    arguments: dict[str, Any] = {"q": q, "k": k}
    if gamma is not None:
        draws = (draw, draw) if gamma == "x" else gamma
        for name, one, count in zip("qk", draws, heads, strict=True):
            arguments[f"gamma_{name}"] = one(head * count if whole else head)
    if whole:
        arguments["per_head"] = False
    if rope is not None:
        arguments["rope"] = Rope(table(40, head), positions(I64, *lead)) if rope is True else rope
    if cache is not None:
        entries = lead[-1] + 3 if layout == "dense" else page
        pages = lead[0] if layout == "dense" else 2 * (-(-torch.Size(lead).numel() // page)) + 1
        shape = (pages, heads[1], entries, head) if layout != "NHD" else (pages, entries, heads[1], head)
        stored = BF16 if cache in FP8_FORMATS else cache
        memories = {f"{name}_cache": Random(stored, shape) for name in "kv"}
        arguments |= {"v": v, **memories, "layout": layout}
        if cache in FP8_FORMATS:
            arguments |= {name: Random(cache, shape) for name in memories}
        if keys:
            del arguments["v"], arguments["v_cache"]
        if own:
            arguments["scale_out"] = [f32(*shape[:-1]), None if keys else f32(*shape[:-1])]
        if layout == "dense":
            arguments |= {} if start is None else {"start": start}
        else:
            arguments["slots"] = _slots(index, pages, page, *lead)
    for name in scale:
        by_head = 1.0 + torch.arange(heads[1]) if name.isupper() else 1.0
        arguments[f"{name.lower()}_scale"] = _SCALES[name.lower()] * by_head
    return case("qk_norm_rope_cache", group, **arguments, **options)


def _pair(dtype: torch.dtype, style: Any, dim: int, *lead: int) -> Rope:
    angles = table(lead[-1], dim).view(lead[-1], dim // 2, 2).expand(*lead, dim // 2, 2)
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in angles.unbind(-1))
    return Rope(style=style, cos=cos, sin=sin)


def _sections(style: Any = "contiguous") -> dict[str, Any]:
    return {"sections": (12, 10, 10), "section_style": style}


def _starts(dtype: torch.dtype, *values: int) -> Tensor:
    return torch.tensor(values, dtype=dtype)


QKV_CASES: Final[tuple[Case, ...]] = (
    _qkv("model", bf16, (3,), heads=(16, 8), head=256, weight_offset=1.0),
    _qkv("dtypes", bf16, gamma=(f32, f32), q_out=F16),
    _qkv("dtypes", bf16, gamma=(bf16, f32), q_out=F32, eps=1e-3),
    _qkv("dtypes", f16, cache=F16, rounding="hf"),
    _qkv("dtypes", f16, gamma=(f32, f32), q_out=BF16),
    _qkv("dtypes", f32, (4,), cache=F32, memory="misaligned"),
    _qkv("whole", f16, cache=F16, whole=True, rope=_pair(F16, "half", 64, 5)),
    _qkv("whole", bf16, gamma=(bf16, f32), whole=True),
    _qkv("fp8", bf16, gamma=None, cache=FP8, scale="k"),
    _qkv("fp8", bf16, gamma=None, cache=FNUZ, scale="v"),
    *(
        _qkv("fp8", bf16, (2, 3), cache=cache, layout=layout, whole=True, scale="kv")
        for cache in (FP8, FNUZ)
        for layout in ("HND", "dense")
    ),
    _qkv("rope", bf16, (2, 3), gamma=None, rope=_pair(F32, "half", 64, 1, 3)),
    _qkv("rope", bf16, (2, 3), rope=_pair(BF16, "interleaved", 32, 2, 3), layout="dense", rounding="hf_rope"),
    _qkv("rope", bf16, rope=Rope(table(40, 32), None, "interleaved", 32)),
    _qkv("rope", bf16, rope=Rope(table(40, 64), positions(I32, 5))),
    _qkv("paged", bf16, (3, 4), memory="transposed", rope=None),
    _qkv("paged", bf16, (9,), layout="HND", page=1, index=I32),
    _qkv("dense", bf16, (2, 3), layout="dense", start=2),
    _qkv("dense", bf16, (2, 3), layout="dense", start=_starts(I32, 1)),
    _qkv("dense", bf16, (2, 3), layout="dense", start=_starts(I64, -2, 4)),
    _qkv("no cache", bf16, (2, 3), cache=None, q_out=F32),
    *(
        _qkv("mrope", bf16, (2, 3), rope=Rope(table(40, 64), positions(index, 3, 2, 3), **_sections(style)))
        for index, style in ((I64, "contiguous"), (I32, "interleaved"))
    ),
    _qkv(
        "mrope",
        bf16,
        gamma=None,
        cache=None,
        rounding="hf",
        rope=Rope(table(40, 64), positions(I64, 3, 5), **_sections()),
    ),
    _qkv("norm of v", bf16, (2, 3), norm_v=True, layout="dense", rounding="hf_rope", weight_offset=1.0),
    _qkv("norm of v", f32, gamma=None, norm_v=True, cache=F32, eps=1e-3),
    _qkv("norm of v", f16, norm_v=True, cache=F16, rounding="hf", memory="misaligned"),
    _qkv("scales", bf16, cache=FP8, scale="KV"),
    _qkv("scales", bf16, (2, 3), gamma=None, cache=FNUZ, scale="Kv", layout="HND"),
    _qkv("scales", bf16, cache=FP8, own=True, norm_v=True),
    _qkv("scales", f32, (2, 3), cache=FNUZ, own=True, whole=True, layout="dense"),
    _qkv("keys alone", bf16, cache=FP8, own=True, keys=True, heads=(4, 1), head=128),
    _qkv("keys alone", bf16, (2, 3), gamma=None, keys=True, layout="dense"),
)


def _verify_qkv(host: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[Expected | str]:
    error = ERROR + (4 * torch.finfo(host["q"].dtype).eps if host.get("rounding") in _ROUNDED else 0.0)
    q, k = _exact(host, "q"), _exact(host, "k")
    yield Expected("q", results[0], q, error)
    if "k_cache" not in host:
        yield Expected("k", results[1], k, error)
        return
    lead = host["q"].shape[:-2]
    names = [name for name in "kv" if f"{name}_cache" in host]
    caches = {name: (k if name == "k" else _exact_v(host), results[1 + i]) for i, name in enumerate(names)}
    for name, (exact, after) in caches.items():
        before, now = (t if host["layout"] == "NHD" else t.transpose(1, 2) for t in (host[f"{name}_cache"], after))
        if host["layout"] == "dense":
            start = host.get("start", 0)
            starts = start.tolist() if isinstance(start, Tensor) else [start]
            page, entry = qk_cache.dense(starts, lead[0], lead[1], now.shape[1])
        else:
            page, entry = qk_cache.paged(host["slots"], now.shape[0], now.shape[1])
        here, scale = page >= 0, host.get(f"{name}_scale")
        values, at = exact.flatten(0, len(lead) - 1)[here], (page[here], entry[here])
        if "scale_out" in host:
            index = names.index(name)
            old, own = host["scale_out"][index], results[1 + len(names) + index]
            old, own = (t if host["layout"] == "NHD" else t.transpose(1, 2) for t in (old, own))
            yield from _others_unchanged(f"{name}_scale_out", old, own, at)
            scale, fmt = own[at], FP8_FORMATS[after.dtype]
            yield Expected(f"{name}_scale_out", scale, values.abs().amax(-1) / fmt.max, error)
        values = values if scale is None else divided(values, scale.unsqueeze(-1) if scale.dim() else scale)
        yield from _entries(f"{name}_cache", before, now, at, values, error)


def _exact_v(host: dict[str, Any]) -> Tensor:
    """v, normed if the call asks for it."""
    v: Tensor = host["v"]
    if not host.get("norm_v"):
        return v.double()
    y = norm_of({}, v, torch.ones(v.shape[-1]), host.get("eps", 1e-6))
    return y.to(v.dtype).double() if host.get("rounding") in _ROUNDED else y


def _exact(host: dict[str, Any], name: str) -> Tensor:
    """q or k, normed and rotated."""
    x: Tensor = host[name]
    y, rounding, rope = x.double(), host.get("rounding", "once"), host.get("rope")
    if f"gamma_{name}" in host:
        rows = x if host.get("per_head", True) else x.flatten(-2)
        y = norm_of(host, rows, host[f"gamma_{name}"], host.get("eps", 1e-6)).view(x.shape)
    if rope is None:
        return y
    if rope.sections is not None:
        assert rope.freqs is not None and rope.positions is not None
        rows = qk_cache.section_table(rope.freqs, rope.positions, rope.sections, rope.section_style)
        rope = Rope(rows, torch.arange(len(rows)).view(x.shape[:-2]), rope.style)
    if rope.cos is not None and rope.sin is not None:
        lead, half = x.shape[:-2], rope.cos.shape[-1] // 2
        angles = [t[..., :half].float().expand(*lead, half) for t in (rope.cos, rope.sin)]
        at = torch.arange(lead.numel()).view(lead)
        rope = Rope(torch.stack(angles, -1).flatten(-2).reshape(-1, 2 * half), at, rope.style, 2 * half)
    return _stepwise(y, rope, x.dtype) if rounding in _ROUNDED else turned(y, rope, True)


def _stepwise(y: Tensor, rope: Rope, dtype: torch.dtype) -> Tensor:
    """``y`` rotated as transformers does: angles, products and sums are rounded."""

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).double()

    assert rope.freqs is not None
    dim = rope.dim or rope.freqs.shape[1]
    cos, sin = (rounded(t).unsqueeze(-2) for t in token_angles(rope.freqs, y.shape[:-2], rope.positions, dim))
    y = rounded(y)
    a, b = pairs(y[..., :dim], rope.style)
    first, second = rounded(a * cos) - rounded(b * sin), rounded(b * cos) + rounded(a * sin)
    return torch.cat((rounded(from_pairs(first, second, rope.style)), y[..., dim:]), -1)


def _entries(
    name: str, before: Tensor, after: Tensor, at: Any, values: Tensor, error: float
) -> Iterator[Expected | str]:
    """What was written to entries [page, entry] of a cache, and that nothing else was."""
    yield from _others_unchanged(name, before, after, at)
    entries = _bytes(after)[at].view(after.dtype).squeeze(-1)
    yield Expected(name, entries, values, error, FP8_FORMATS.get(after.dtype))


def _others_unchanged(name: str, before: Tensor, after: Tensor, at: Any) -> Iterator[str]:
    others = torch.ones(after.shape[:2], dtype=torch.bool)
    others[at] = False
    if not torch.equal(_bytes(before)[others], _bytes(after)[others]):
        yield f"{name}: entries that belong to no token were written"


def _bytes(cache: Tensor) -> Tensor:
    """Entries as bytes, since fp8 tensors cannot be indexed."""
    return cache.unsqueeze(-1).contiguous().view(torch.uint8)


# --- latents --------------------------------------------------------------------------------------------------------


def _write_latents(q_out: torch.dtype | None = None, **arguments: Any) -> tuple[Tensor, ...]:
    rest = {"freqs_cis": None, **arguments}
    q, kv, offsets, blocks = (rest.pop(name) for name in ("q", "kv", "offsets", "blocks"))
    cache = PagedKVCache(blocks, entry_format=DS_MLA if blocks.dtype == torch.uint8 else "plain")
    cache.cache_lengths, cache.lookup_table = rest.pop("lengths"), rest.pop("table")  # unchecked: some are invalid
    out = fused_rope_rmsnorm_quantization(None, q, kv, offsets, k_cache=cache, out_dtype=q_out or q.dtype, **rest)
    return (out, blocks, *([rest["per_token_scale"]] if "per_token_scale" in rest else []))


def _latents(
    group: str,
    q: Any = bf16,
    kv: Any = bf16,
    gamma: Any = bf16,
    cache: torch.dtype | None = FP8,
    *,
    latent: int = 128,
    normed: int | None = None,
    page: int = _PAGE,
    index: torch.dtype = I32,
    scale: str = "",
    ragged: bool = False,
    freqs: torch.dtype | None = F32,
    memory: Any = "contiguous",
    slots: torch.dtype | None = None,
    at: torch.dtype | None = None,
    bad: str = "",
    **options: Any,
) -> Case:
    """A case of some requests with tokens in the cache and new ones. Without ``cache`` entries are packed."""
    cached, new = ((0, 7, 3, 12, 0, 1), (0, 4, 0, 1, 5, 0)) if ragged else ((5, 0, 9), (3, 2, 1))
    tokens, needed = sum(new), [-(-(a + b) // page) for a, b in zip(cached, new, strict=True)]
    pages, width = sum(needed) + 3 + tokens // page, max(needed) + 1
    pool = torch.randperm(pages, generator=torch.Generator().manual_seed(pages)).tolist()
    rows = [[pool.pop() for _ in range(count)] + [2**30] * (width - count) for count in needed]
    lengths = torch.tensor(cached)
    if bad == "width":
        lengths[1] = 2 * width * page + 1
    elif bad == "lengths":
        lengths[1] = -100
    tables = {"offsets": torch.tensor([0, *new]).cumsum(0), "lengths": lengths, "table": torch.tensor(rows)}
    arguments: dict[str, Any] = {
        "q": q(tokens, 4, 64, layout=memory),
        "kv": kv(tokens, latent + 64, layout="sliced" if memory == "transposed" else memory),
        "gamma": gamma(normed or latent),
    }
    arguments["blocks"] = Random(cache or torch.uint8, (pages, page, latent + 64 if cache else DS_MLA_BYTES))
    arguments |= {
        name: t.to(torch.int32).view(index) if index == torch.uint32 else t.to(index) for name, t in tables.items()
    }
    if freqs is not None:
        arguments["freqs_cis"] = table(40, 64).to(freqs)
    if slots is not None:
        arguments["slot_mapping"] = _slots(slots, pages, page, tokens)
    if at is not None:
        arguments["positions"] = positions(at, tokens)
    arguments |= {"kv_scale": _SCALES["k"]} if scale == "tensor" else {}
    arguments |= {"per_token_scale": f32(pages, page)} if scale == "token" else {}
    arguments |= {} if normed is None else {"kv_norm_dim": normed}
    return case("fused_rope_rmsnorm_quantization", group, **arguments, **options)


LATENT_CASES: Final[tuple[Case, ...]] = (
    _latents("dtypes", f16, f16, f16),
    _latents("dtypes", f32, bf16, f32, BF16, q_out=FNUZ),
    _latents("dtypes", f32, bf16, f32, BF16, q_out=BF16, epsilon=1e-5),
    _latents("dtypes", f32, bf16, f32, BF16, q_out=F16),
    _latents("dtypes", freqs=BF16),
    _latents("dtypes", freqs=F16),
    _latents("part", cache=FNUZ, latent=256, normed=200, scale="tensor", rounding="reference"),
    _latents("part", bf16, f32, f32, F32, latent=512, normed=384, rope_style="half"),
    _latents("part", bf16, f16, bf16, F16, latent=160, normed=128, slots=I64, memory="sliced"),
    _latents("no rope", f32, scale="token", freqs=None, q_out=FP8, rope_dim=0),
    _latents("packed", cache=None, latent=512, page=64, ragged=True, slots=I64, at=I64, memory="misaligned"),
    _latents("packed", cache=None, latent=512, page=5, memory="transposed", rope_dim=0),
    _latents("reference", bf16, bf16, f32, F32, q_out=F32, rounding="reference", weight_offset=1.0),
    _latents("ragged", ragged=True, index=torch.uint32),
    _latents("slots", page=5, ragged=True, scale="token", slots=I32, at=I32),
    _latents("bad tables", ragged=True, scale="token", index=I64, bad="width"),
    _latents("bad tables", ragged=True, scale="token", bad="lengths"),
)
CASES: Final[tuple[Case, ...]] = (*QKV_CASES, *LATENT_CASES)
FUNCTIONS: Final = {
    "qk_norm_rope_cache": _write_qkv,
    "fused_rope_rmsnorm_quantization": _write_latents,
}


def verify(op: str, host: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[Expected | str]:
    """q, and the caches: the entries of the tokens, and that no other was written."""
    return _verify_qkv(host, results) if op == "qk_norm_rope_cache" else _verify_latents(host, results)


def _verify_latents(host: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[Expected | str]:
    q, blocks, kv, gamma, rounding = host["q"], results[1], host["kv"], host["gamma"], host.get("rounding", "once")
    names = ("offsets", "lengths", "table", "slot_mapping", "positions")
    position, slot = mla_cache.slots(kv.shape[0], blocks.shape[0], blocks.shape[1], *map(host.get, names))
    error = ERROR + (4 * torch.finfo(kv.dtype).eps if rounding in _ROUNDED else 0.0)

    def rotated(heads: Tensor, rows: Tensor) -> Tensor:
        if host.get("freqs_cis") is None or host.get("rope_dim") == 0:
            return heads.double()
        options: dict[str, Any] = {"style": host.get("rope_style", "interleaved"), "positions": rows}
        y = rotate(heads.flatten(1), host["freqs_cis"], heads.shape[2], **options).y.view(heads.shape)
        return y.to(heads.dtype).double() if rounding == "reference" else y

    yield Expected("q", results[0], rotated(q, position), error, FP8_FORMATS.get(results[0].dtype))
    here = slot >= 0
    at = slot[here] // blocks.shape[1], slot[here] % blocks.shape[1]
    latent, between, k = kv[here].split((len(gamma), kv.shape[1] - len(gamma) - q.shape[2], q.shape[2]), -1)
    norm = norm_of(host, latent, gamma, host.get("epsilon", 1e-6))
    values = torch.cat((norm, between.double(), rotated(k.unsqueeze(1), position[here]).squeeze(1)), -1)
    if blocks.dtype == torch.uint8:
        yield from _packed(host["blocks"], blocks, at, values, error)
        return
    scale = host.get("kv_scale")
    if "per_token_scale" in host:
        before, after = host["per_token_scale"], results[2]
        scale, amax = after[at].unsqueeze(-1), values.abs().amax(-1, keepdim=True)
        yield from _entries(
            "per_token_scale", before, after, at, amax.squeeze(-1) / FP8_FORMATS[blocks.dtype].max, error
        )
    values = values if scale is None else divided(values, scale)
    yield from _entries("blocks", host["blocks"], blocks, at, values, error)


def _packed(before: Tensor, after: Tensor, at: Any, values: Tensor, error: float) -> Iterator[Expected | str]:
    """Entries of the format "fp8_ds_mla": codes, a scale for each 128 of them, and columns in bfloat16."""
    latent, rope = DS_MLA_COLUMNS
    yield from _others_unchanged("blocks", before, after, at)
    codes, scales, rest = (t.contiguous() for t in after[at].split((latent, latent // 128 * 4, 2 * rope), -1))
    tiles = (-1, 128)
    exact = values[:, :latent].unflatten(-1, tiles)
    yield from scaled_rows("codes", codes.unflatten(-1, tiles), scales.view(F32), exact, E4M3FN, error)
    yield Expected("rotated columns", rest.view(BF16), values[:, latent:], error)
