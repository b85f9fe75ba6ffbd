"""Valid calls of `qk_norm_rope_cache`."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from onepass import Rope, qk_norm_rope_cache
from onepass.formats import E4M3FN
from onepass.ops.qk_cache.op import QK_NORM_ROPE_CACHE, _per_token
from tests.inputs import BF16, Arguments, Build, Form, Rows, Tensors, angles, positions, sampled_arguments, writing

_TABLE, _PAIR = ("freqs", "positions"), ("cos", "sin")
_SECTIONS, _OWN = ("height", "width", "section_style"), ("own_scales", "k_scale_out", "v_scale_out")


def paged_arguments(device: str = "cpu") -> Arguments:
    """A paged fp8 cache, and angles from a table."""
    sizes = {"Hq": 3, "Hk": 2, "D": 16, "V": 8, "Gq": 16, "Gk": 16, "P": 4, "R": 16, "C": 8, "F": 2}
    sizes |= {"A0": 4, "A1": 3, "A2": 2}
    optional = ("v", "gamma_q", "gamma_k", *_TABLE, "k_cache", "v_cache", "slots", "k_scale", "v_scale")
    options = {"eps": 0.5, "weight_offset": 1.0, "layout": "NHD", "dim": 8}
    return sampled_arguments(QK_NORM_ROPE_CACHE, sizes, (2, 3), device, optional, **options)


def dense_arguments(device: str = "cpu") -> Arguments:
    """A dense bfloat16 cache, and angles as a pair."""
    sizes = {"Hq": 3, "Hk": 2, "D": 16, "V": 8, "Gq": 16, "Gk": 16, "P": 4, "R": 16, "C": 8, "F": 2}
    sizes |= {"A0": 2, "A1": 2, "A2": 5}
    optional = ("v", "gamma_q", "gamma_k", *_PAIR, "k_cache", "v_cache", "starts")
    options = {"eps": 0.5, "weight_offset": 1.0, "layout": "dense", "dim": None, "k_cache": BF16, "v_cache": BF16}
    return sampled_arguments(QK_NORM_ROPE_CACHE, sizes, (2, 3), device, optional, **options)


def sections_arguments(device: str = "cpu") -> Arguments:
    """Three positions per token, a norm of v, and a scale for each head of an entry."""
    values = paged_arguments(device)
    rows = torch.tensor([[[0, 1, 2], [3, 2, 1]], [[1, 1, 0], [2, 2, 3]], [[3, 0, 1], [0, 2, 2]]], device=device)
    options = {"height": 1, "width": 1, "norm_v": True, "own_scales": True}
    return values | {"positions": rows, "k_scale": None, "v_scale": None, **options}


BY_CONTRACT: dict[str, Build] = {QK_NORM_ROPE_CACHE.name: paged_arguments}


def call_qk_cache(values: Arguments) -> Any:
    values = dict(values)
    freqs, positions, cos, sin, style, dim = (values.pop(n) for n in (*_TABLE, *_PAIR, "style", "dim"))
    height, width, section_style = (values.pop(n) for n in _SECTIONS)
    values["rope"] = Rope(freqs, positions, style, dim, cos=cos, sin=sin)
    if height or width:  # of the four pairs that rotate
        values["rope"] = Rope(
            freqs, positions, style, dim, None, cos, sin, (4 - height - width, height, width), section_style
        )
    own, *scales = (values.pop(n) for n in _OWN)
    if own:
        values["scale_out"] = tuple(scales)
    starts, first = values.pop("starts"), values.pop("first")
    return qk_norm_rope_cache(
        start=first if starts is None else starts, out=(values.pop("q_out"), values.pop("k_out")), **values
    )


def as_stored(values: Arguments) -> Arguments:
    """A start that is no tensor is a number, one of no dimension is one for all, and one sequence's angles serve all."""
    starts = values["starts"]
    if starts is not None and not isinstance(starts, Tensor):
        values, starts = values | {"first": starts}, None
    if isinstance(starts, Tensor) and starts.layout is torch.strided and not starts.is_nested and starts.dim() == 0:
        starts = starts.view(1)
    return values | {"starts": starts} | {name: _per_token(values[name], values["q"]) for name in _PAIR}


_write_form = partial(writing, contract=QK_NORM_ROPE_CACHE, call=call_qk_cache, derived=as_stored)
FORMS: list[Form] = [
    _write_form("cache write, paged", build=paged_arguments, fixed=("first", *_PAIR, *_SECTIONS, *_OWN)),
    _write_form("cache write, dense", build=dense_arguments, fixed=("first", "dim", *_TABLE, *_SECTIONS, *_OWN)),
    _write_form(
        "cache write, three positions and scales of entries",
        build=sections_arguments,
        fixed=("first", "dim", *_PAIR, *_SECTIONS, "own_scales"),
        required=_OWN[1:],
    ),
]

# --- any number of rows ---------------------------------------------------------------------------------------------


def _write(t: Tensors, layout: Any, cache: torch.dtype, **options: Any) -> list[Tensor]:
    """q and the entries of k and v in token order; slots run backwards. k and v are the columns after q's."""
    count, device = t["q"].shape[0], t["q"].device
    heads = [t[name].unflatten(1, (-1, 32)) for name in ("q", "k", "v")]
    pages = -(-count // 4) + 1
    shape = (pages, 4, 3, 32) if layout == "NHD" else (pages, 3, 4, 32)
    caches = [torch.zeros(shape, device=device).to(cache) for _ in range(2)]
    slots = torch.arange(count, device=device).flip(0) + 3
    rope = Rope(angles(t["q"]), positions(t), "half", 32)
    q, _ = qk_norm_rope_cache(*heads, *caches, rope=rope, slots=slots, layout=layout, **options)
    ordered = (c if layout == "NHD" else c.transpose(1, 2) for c in caches)
    return [q, *(c.contiguous().view(torch.uint8).flatten(0, 1)[slots].flatten(1) for c in ordered)]


def _write_with_scales(t: Tensors) -> list[Tensor]:
    """The same with three positions per token, a norm of v, and a scale for each head of an entry."""
    count, device = t["q"].shape[0], t["q"].device
    q, k, v = (t[name].unflatten(1, (-1, 32)) for name in ("q", "k", "v"))
    pages = -(-count // 4) + 1
    caches = [torch.zeros(pages, 4, 3, 32, device=device).to(E4M3FN.dtype) for _ in range(2)]
    scales = torch.zeros(pages, 4, 3, device=device), torch.zeros(pages, 4, 3, device=device)
    slots, at = torch.arange(count, device=device).flip(0) + 3, positions(t)
    rope = Rope(angles(t["q"]), torch.stack((at, at // 2, at // 3)), sections=(6, 5, 5), section_style="interleaved")
    norms: dict[str, Any] = {"gamma_q": t["gamma"], "gamma_k": t["gamma_k"], "norm_v": True}
    q, _ = qk_norm_rope_cache(q, k, v, *caches, rope=rope, slots=slots, scale_out=scales, **norms)
    return [q, *(c.view(torch.uint8).flatten(0, 1)[slots].flatten(1) for c in (*caches, *scales))]


ROWS: Final = (
    Rows(
        "qk_norm_rope_cache",
        {"q": 160, "k": 96, "v": 96},
        {"gamma": (32,), "gamma_k": (32,)},
        lambda t: _write(t, "NHD", t["q"].dtype, gamma_q=t["gamma"], gamma_k=t["gamma_k"], rounding="hf"),
    ),
    Rows(
        "qk_norm_rope_cache, whole rows to fp8",
        {"q": 160, "k": 96, "v": 96},
        {"gamma": (160,), "gamma_k": (96,)},
        lambda t: _write(t, "HND", E4M3FN.dtype, gamma_q=t["gamma"], gamma_k=t["gamma_k"], per_head=False),
    ),
    Rows(
        "qk_norm_rope_cache, three positions and scales of entries",
        {"q": 160, "k": 96, "v": 96},
        {"gamma": (32,), "gamma_k": (32,)},
        _write_with_scales,
    ),
)
