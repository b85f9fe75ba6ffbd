"""Cases for the write of k and v of published attentions, and the calls that determine their configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch

from onepass.ops.qk_cache.op import qk_norm_rope_cache
from onepass.rope import Rope
from tests.qk_cache.checks import BF16, FP8, Angles, QkCacheCase
from tools.evidence.published import ATTENTIONS, Attention

PAGED: Final[tuple[tuple[int], ...]] = ((1,), (16,), (64,), (300,))
"""Tokens of three decode steps and of a prompt, with slots in pages of 16."""
DENSE: Final[tuple[tuple[int, int], ...]] = ((1, 1), (16, 1), (64, 1), (1, 16), (1, 64), (1, 300), (2, 300))
"""Sequences and tokens with a static cache. In the last, one row of angles serves both sequences."""


def work(group: str) -> Iterator[QkCacheCase]:
    """The model's rounding and "once": to pages by slots, also as fp8, and to a static cache with transformers' angles."""
    for attention in ATTENTIONS:
        case = partial(_case, group, attention)
        for rounding in (attention.rounding, "once"):
            for lead in PAGED:
                yield case(lead, rounding=rounding, page=16)
            for tokens in DENSE:
                pair = Angles(attention.rotated, attention.style, None, BF16, shared=tokens[0] == 2)
                yield case(tokens, rounding=rounding, angles=pair, layout="dense", start="one")
        for lead in PAGED:
            yield case(lead, cache=FP8, scale="kv", page=16)


def _case(group: str, attention: Attention, lead: tuple[int, ...], **form: Any) -> QkCacheCase:
    offset = {"weight_offset": attention.weight_offset} if attention.weight_offset else {}
    form = {"angles": Angles(attention.rotated, attention.style), **form}
    sizes = attention.heads, attention.kv_heads, attention.head_dim
    return QkCacheCase(group, lead, *sizes, norm=attention.norm, memory="packed", options=offset, **form)


def calls(case: QkCacheCase) -> Iterator[Callable[[], Any]]:
    """Calls with the slices of one projection, as models make them; never launched."""
    d, q_heads, k_heads, turn = case.head, case.q_heads, case.k_heads, case.angles
    assert turn is not None and case.cache is not None
    tokens = [case.lead] if case.lead != (300,) else [case.lead, (4096,)]
    for lead in tokens:
        packed = torch.empty(*lead, q_heads + 2 * k_heads, d, dtype=case.x)
        q, k, v = packed.split((q_heads, k_heads, k_heads), -2)
        given: dict[str, Any] = {"rounding": case.rounding, "layout": case.layout, **case.options}
        if case.norm != "none":
            widths = (d, d) if case.norm == "head" else (q_heads * d, k_heads * d)
            given |= {f"gamma_{side}": torch.empty(n, dtype=case.gamma) for side, n in zip("qk", widths, strict=True)}
            given["per_head"] = case.norm == "head"
        if turn.pair is not None:
            rows = (1, *lead[1:]) if turn.shared else lead
            angles = [torch.empty(*rows, turn.dim, dtype=turn.pair) for _ in range(2)]
            given["rope"] = Rope(style=turn.style, cos=angles[0], sin=angles[1])  # type: ignore[arg-type]
        else:
            positions = torch.empty(lead, dtype=turn.positions)
            given["rope"] = Rope(torch.empty(4096, turn.dim), positions, turn.style)  # type: ignore[arg-type]
        if case.layout == "dense":
            shape = (lead[0], k_heads, lead[1] + 8, d)
            given["start"] = torch.empty(1, dtype=case.index)
        else:
            shape = (8, case.page, k_heads, d)
            given["slots"] = torch.empty(lead, dtype=case.slots)
        caches = [torch.empty(shape, dtype=case.cache) for _ in range(2)]
        given |= {f"{name}_scale": torch.empty(()) for name in case.scale}
        yield partial(qk_norm_rope_cache, q, k, v, *caches, **given)
