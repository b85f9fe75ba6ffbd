"""Cases for every GPU configuration that published models need, and the calls that determine those configurations.

A case has few rows: the tiles of all batch regimes are checked anyway (`tests.oracle.batch_regime`). A call has as many
rows as models have and is never launched: it only yields the machine code that it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from onepass.formats import FLOATS
from onepass.kvcache import PagedKVCache
from onepass.ops.gemv_norm.op import gemv_and_partial_norm
from onepass.ops.mla_cache.op import fused_rope_rmsnorm_quantization
from onepass.ops.rms_norm.op import rms_norm, rms_norm_fused_fp8
from tests.gemv_norm import checks as gemv_norm
from tests.mla_cache.checks import FP8, MlaCase
from tests.oracle.case import Case, Check
from tests.qk_cache.checks import QkCacheCase
from tests.qk_norm import checks as qk_norm
from tests.qk_norm.checks import APPLY, FUSED, MEANS, QkCase, Turn
from tools.evidence import attentions
from tools.evidence.published import FAMILIES, Latent, Model, Published

if TYPE_CHECKING:
    from onepass.gpu.chip import Chip
    from onepass.gpu.compile import Build

BF16, F16, F32 = FLOATS
GROUP: Final = "families"
ROWS: Final = 2
TOKENS: Final = (1, 16, 300, 4096)
"""Rows of a call: a decode step of one sequence and of a batch, a short prompt, a long one. A streaming batch is added."""
_STREAMING: Final = 1 << 28
"""Bytes of x that exceed every cache."""
RANKS: Final = (2, 4, 8)
"""Numbers of ranks that split whole projections of q and k."""
GEMV_ROWS: Final = (1, 2, 4, 8, 16)
STEPS: Final = ((1, 1), (16, 16), (64, 64), (300, 1), (4096, 1))
"""Tokens and requests of MLA's cache write: three decode steps, two prompts."""

FP8_FORMS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"group_size": 128},
    {"group_size": 128, "scale_format": "ue8m0"},
    {"static_scale": True},
)
"""A scale per row, per group of 128 columns, the same as powers of two, and one that is given."""


# --- rows -----------------------------------------------------------------------------------------------------------


def _row_work(family: Published) -> Iterator[Case]:
    """Norms of hidden states: with the model's rounding and "once", with and without a residual, and quantized to fp8."""
    offset: dict[str, Any] = {"weight_offset": family.weight_offset} if family.weight_offset else {}
    for model in family.models:
        lead, n, x = (ROWS,), model.hidden, model.dtype
        for residual in (None, x):
            for rounding in dict.fromkeys((family.rounding, "once")):
                options = {"rounding": rounding, **offset}
                yield Case("rms_norm", GROUP, lead, n, x, residual=residual, options=options)
            for form in FP8_FORMS:
                if n % form.get("group_size", 1) == 0:
                    options = {**form, **offset}
                    yield Case("rms_norm_fused_fp8", GROUP, lead, n, x, residual=residual, options=options)


def _narrow_work(family: Published) -> Iterator[Case]:
    """Separate norms of heads, projections and latents: `patch` with ``fuse=False``, or many tokens of MLA."""
    offset: dict[str, Any] = {"weight_offset": family.weight_offset} if family.weight_offset else {}
    for model in family.models:
        found = []
        if family.norms == "heads":
            found += [Case("rms_norm", GROUP, (2, ROWS), model.head_dim, layout=layout) for layout in _HEAD_LAYOUTS]
        elif family.norms == "whole":
            found += [Case("rms_norm", GROUP, (ROWS,), h * model.head_dim) for h in (model.heads, model.kv_heads)]
        if model.latent is not None:
            found += [Case("rms_norm", GROUP, (ROWS,), n, layout="sliced") for n in model.latent[:2] if n]
        for case in found:
            for rounding in dict.fromkeys((family.rounding, "once")):
                yield replace(case, options={"rounding": rounding, **offset})


_HEAD_LAYOUTS: Final = ("contiguous", "transposed")
"""Adjacent heads in memory; or, as in Gemma 3, [heads, tokens, D] of [tokens, heads, D]."""


def _row_calls(case: Case) -> Iterator[Callable[[], Any]]:
    options = dict(case.options)
    static = options.pop("static_scale", False)
    function = rms_norm if case.op == "rms_norm" else rms_norm_fused_fp8
    streaming = _STREAMING // (case.n * case.x.itemsize)
    for rows in (*TOKENS, streaming):
        x = _rows_of(case, rows)
        given: dict[str, Any] = {"residual": _rows_of(case, rows)} if case.residual is not None else {}
        if static:
            given["static_scale"] = torch.empty(1)
        yield partial(function, x, torch.empty(case.n, dtype=case.x), **given, **options)


def _rows_of(case: Case, rows: int) -> Tensor:
    if case.layout == "sliced":
        return torch.empty(rows, case.n + 64, dtype=case.x)[:, : case.n]
    if case.layout == "transposed":
        return torch.empty(rows, 2, case.n, dtype=case.x).transpose(0, 1)
    return torch.empty(rows, case.n, dtype=case.x)


# --- q and k --------------------------------------------------------------------------------------------------------


def _qk_work(family: Published) -> Iterator[QkCase]:
    """Norms of q and k in one launch, with and without rotation, contiguous and packed; and their two halves on ranks."""
    offset: dict[str, Any] = {"weight_offset": family.weight_offset} if family.weight_offset else {}
    for model in family.models if family.norms else ():
        nq, nk, head = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.head_dim
        per_head = head if family.norms == "heads" else 0
        turn = Turn("half", family.rotated or head, head, torch.int64)
        for rounding in dict.fromkeys((family.rounding, "once")):
            options = {"rounding": rounding, **offset}
            for turned in (None, turn):
                for layout in ("contiguous", "packed"):
                    ways: dict[str, Any] = {"turn": turned, "layout": layout, "options": options}
                    yield QkCase(FUSED, GROUP, (ROWS,), nq, nk, gamma=BF16, head=per_head, **ways)
            for ranks in RANKS if family.norms == "whole" else ():
                yield QkCase(APPLY, GROUP, (ROWS,), nq // ranks, nk // ranks, gamma=BF16, options=options)
        for ranks in RANKS if family.norms == "whole" else ():
            yield QkCase(MEANS, GROUP, (ROWS,), nq // ranks, nk // ranks)


def _qk_calls(case: QkCase) -> Iterator[Callable[[], Any]]:
    for tokens in TOKENS:
        if case.layout == "packed":
            q, k, _ = torch.empty(tokens, case.nq + 2 * case.nk, dtype=case.x).split([case.nq, case.nk, case.nk], -1)
        else:
            q, k = (torch.empty(tokens, n, dtype=case.x) for n in (case.nq, case.nk))
        given: dict[str, Any] = {"q": q, "k": k, **case.options}
        if case.op in (APPLY, FUSED):
            widths = (case.head, case.head) if case.head else (case.nq, case.nk)
            given |= {f"gamma_{side}": torch.empty(n, dtype=case.gamma) for side, n in zip("qk", widths, strict=True)}
        if case.op == APPLY:
            given["qk_var"] = torch.empty(tokens, 2)
        if case.turn is not None:
            given["freqs"] = torch.empty(4096, case.turn.dim)
            given["positions"] = torch.empty(tokens, dtype=torch.int64)
        yield partial(qk_norm.call, case, given)


# --- projections and MLA --------------------------------------------------------------------------------------------


def _gemv_work(model: Model, latent: Latent) -> Iterator[gemv_norm.Case]:
    """The projections to MLA's latents, separate as in `patch`, and in one matrix."""
    shapes: list[tuple[int, tuple[int, ...]]] = [(latent.kv + latent.rope, (latent.kv,))]
    if latent.q:
        both = latent.q + latent.kv + latent.rope
        shapes += [(latent.q, (latent.q,)), (both, (latent.q,)), (both, (latent.q, latent.kv))]
    for n, widths in shapes:
        for m in GEMV_ROWS:
            yield gemv_norm.Case(GROUP, m, n, model.hidden, widths)


def _gemv_calls(case: gemv_norm.Case) -> Iterator[Callable[[], Any]]:
    for m in range(case.m // 2 + 1, case.m + 1):
        act, weight = (torch.empty(rows, case.k, dtype=case.act) for rows in (m, case.n))
        gammas = [torch.empty(width, dtype=case.act) for width in case.widths]
        yield partial(gemv_and_partial_norm, act, weight, gammas[0], segments=gammas[1:])


def _mla_work(latent: Latent) -> Iterator[MlaCase]:
    """The cache write: as in `patch`, with page tables to fp8, and with slots; all heads, and those of one of eight ranks."""
    i64 = torch.int64
    forms: tuple[dict[str, Any], ...] = (
        {"cache": BF16, "positions": i64, "page": 64},
        {"cache": BF16, "positions": i64, "page": 100},
        {"cache": FP8, "page": 64},
        {"cache": FP8, "page": 64, "scale": "token"},
        {"cache": FP8, "page": 64, "scale": "tensor"},
        {"cache": BF16, "page": 64, "slots": i64, "positions": i64},
        {"cache": FP8, "page": 64, "slots": i64, "positions": i64, "scale": "tensor"},
    )
    for heads in dict.fromkeys((latent.heads, 16)):
        for form in forms:
            for tokens, requests in STEPS:
                # the number of programs follows the next power of two
                fewest = tokens if tokens < 1024 else tokens // 2 + 1
                batch = tuple((5 + i % 60, fewest // requests) for i in range(requests))
                yield MlaCase(GROUP, batch, heads, latent.kv, latent.rope, **form)


def _mla_calls(case: MlaCase) -> Iterator[Callable[[], Any]]:
    requests = len(case.batch)
    tokens = 4096 if case.tokens > 1024 else case.tokens
    q = torch.empty(tokens, case.heads, 128 + case.rope, dtype=case.q)[..., 128:]
    kv = torch.empty(tokens, case.latent + case.rope, dtype=case.kv)
    cache = PagedKVCache(torch.empty(8, case.page, case.latent + case.rope, dtype=case.cache))
    cache.cache_lengths = torch.zeros(requests, dtype=case.index)
    cache.lookup_table = torch.zeros(requests, 64, dtype=case.index)
    given: dict[str, Any] = {}
    if case.positions is not None:
        given["positions"] = torch.empty(tokens, dtype=case.positions)
    if case.slots is not None:
        given["slot_mapping"] = torch.empty(tokens, dtype=case.slots)
    if case.scale == "tensor":
        given["kv_scale"] = torch.empty(())
    if case.scale == "token":
        given["per_token_scale"] = torch.empty(8, case.page)
    offsets = None if case.slots is not None else torch.empty(requests + 1, dtype=case.index)
    freqs, gamma = torch.empty(4096, case.rope), torch.empty(case.latent, dtype=case.gamma)
    yield lambda: fused_rope_rmsnorm_quantization(q, q, kv, offsets, freqs, gamma, cache, **given)


# --- all ------------------------------------------------------------------------------------------------------------


def _work() -> Iterator[Check]:
    for family in FAMILIES:
        yield from _row_work(family)
        yield from _narrow_work(family)
        yield from _qk_work(family)
        for model in family.models:
            if model.latent is not None:
                yield from _gemv_work(model, model.latent)
                yield from _mla_work(model.latent)
    yield from attentions.work(GROUP)


WORK: Final[tuple[Check, ...]] = tuple({(case.op, case.name): case for case in _work()}.values())
"""Everything that the published models call, once each."""


def calls(case: Check) -> Iterator[Callable[[], Any]]:
    """The calls that a case stands for, with as many rows as models have. Their tensors are uninitialized: never launch them."""
    if isinstance(case, Case):
        return _row_calls(case)
    if isinstance(case, QkCase):
        return _qk_calls(case)
    if isinstance(case, gemv_norm.Case):
        return _gemv_calls(case)
    if isinstance(case, MlaCase):
        return _mla_calls(case)
    if isinstance(case, QkCacheCase):
        return attentions.calls(case)
    raise TypeError(f"no calls for a case of type {type(case).__name__}")


@cache
def needed(chip: Chip) -> dict[str, dict[str, Build]]:
    """The configurations that each case needs on ``chip``, by its op and name; half a second, and no GPU."""
    from tools.evidence import records

    return {
        f"{case.op} {case.name}": {build.name: build for call in calls(case) for build in records.builds_of(call, chip)}
        for case in WORK
    }


def least_cases(chip: Chip) -> list[Check]:
    """A minimal set of cases that covers all configurations."""
    found = needed(chip)
    names = {case: found[f"{case.op} {case.name}"].keys() for case in WORK}
    times = Counter(name for case in WORK for name in names[case])
    kept = []
    for case in sorted(WORK, key=lambda case: len(names[case])):  # those with few first: others may cover them
        if all(times[name] > 1 for name in names[case]):
            times.subtract(names[case])
        else:
            kept.append(case)
    return sorted(kept, key=WORK.index)
