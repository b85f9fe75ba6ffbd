"""Cases of the attention of decode steps: inputs, calls and verification. Only GPUs and the interpreter have the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from onepass.ops.attention import reference
from onepass.ops.attention.launch import SPLIT
from onepass.ops.attention.op import attend
from onepass.testing.tensors import moved, short_dtype
from tests.oracle.bounds import Bounds
from tests.oracle.case import GPU_ONLY, Values, case_name
from tests.oracle.memory import to_cpu

OP: Final = "attend"
OPS: Final = (OP,)
BF16, F16 = torch.bfloat16, torch.float16

Mask = Literal["none", "zeros", "each", "shared", "padded"]
"""No mask; one of zeros; any entries of each sequence, also added numbers; one for all sequences; or entries in front and
behind, as prompts of different lengths have in a static cache. With the last, one query has no entry."""


@dataclass(frozen=True, eq=False)
class AttentionCase:
    """One call: sequences, heads of q and of k, tokens, entries, columns, dtype, mask, values and memory."""

    group: str
    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    tokens: int = 1
    context: int = 70
    columns: int = 64
    x: torch.dtype = BF16
    mask: Mask = "each"
    values: Values = "normal"
    part: bool = False
    """Whether keys and values are the first entries of longer caches."""
    op: str = OP

    @property
    def interpretable(self) -> bool:
        """See `Check`."""
        return self.group not in (*GPU_ONLY, "columns")

    @property
    def name(self) -> str:
        """See `Check`."""
        heads = f"{self.heads[0]}+{self.heads[1]}"
        shape = f"{self.batch}x{heads}x{self.tokens}x{self.context}x{self.columns}"
        mask = f"mask={self.mask}"
        return case_name(self.group, shape, short_dtype(self.x), mask, self.values, "part" * self.part)


def inputs(case: AttentionCase, device: str, seed: int = 0) -> dict[str, Any]:
    """Tensors and options by the names of `attend`'s arguments."""
    generator = torch.Generator().manual_seed(seed + case.context)
    heads, keys = case.heads
    q = torch.randn(case.batch, case.tokens, heads, case.columns, generator=generator).to(case.x).transpose(1, 2)
    room = case.context + 24 if case.part else case.context
    k, v = (torch.randn(case.batch, keys, room, case.columns, generator=generator).to(case.x) for _ in range(2))
    if case.values == "special":
        q[1] *= 60.0  # one entry has nearly all the weight
        k[2, :, 5] = torch.nan
        k[3, :, 7] = torch.inf
    found = {"q": q, "k": k[:, :, : case.context], "v": v[:, :, : case.context]}
    if case.mask != "none":
        found["mask"] = mask_of(case, generator)
    return moved(found, device) | {"scale": case.columns**-0.5}


class Masked(Protocol):
    """What of a case its mask depends on."""

    @property
    def batch(self) -> int:
        """Sequences."""

    @property
    def tokens(self) -> int:
        """Tokens of each."""

    @property
    def context(self) -> int:
        """Entries."""

    @property
    def x(self) -> torch.dtype:
        """The dtype of everything."""

    @property
    def mask(self) -> Mask:
        """The kind of mask."""


def mask_of(case: Masked, generator: torch.Generator) -> Tensor:
    """The mask of a case that has one."""
    shape = (1 if case.mask == "shared" else case.batch, 1, case.tokens, case.context)
    if case.mask == "zeros":
        return torch.zeros(shape, dtype=case.x)
    if case.mask == "padded":
        entry, sequence = torch.arange(case.context), torch.arange(case.batch).view(-1, 1, 1, 1)
        last = case.context * 3 // 4 + torch.arange(case.tokens).view(-1, 1)
        allowed = (entry >= sequence * 7) & (entry <= last)
        allowed[0, :, 0] = False
        return torch.log(allowed).to(case.x)
    numbers = torch.randn(shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.6, numbers, -torch.inf).to(case.x)


def call(case: AttentionCase, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The result of a call."""
    q, k, v, scale = (arguments[name] for name in ("q", "k", "v", "scale"))
    return (attend(q, k, v, arguments.get("mask"), scale),)


def zeroable(case: AttentionCase) -> list[tuple[int, str]]:
    """Position and name of each result."""
    return [(0, "out")]


def variants(case: AttentionCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[tuple[str, Any]]:
    """Other calls that must give the same bytes."""
    return same_results(partial(call, case), arguments, ("q",), ("k", "v"))


def same_results(
    call: Callable[[dict[str, Any]], tuple[Tensor, ...]],
    arguments: dict[str, Any],
    queries: tuple[str, ...],
    caches: tuple[str, ...],
) -> Iterator[tuple[str, Any]]:
    """Again, for each sequence, with a mask of zeros, for each token, and in longer ``caches`` whose rest is masked."""
    mask: Tensor | None = arguments.get("mask")
    batch, _, tokens, _ = arguments["q"].shape
    yield "in another run", call(arguments)
    if not batch:
        return

    def of(value: Any, b: int) -> Any:
        return value[b : b + 1] if isinstance(value, Tensor) and len(value) > 1 else value

    alone = [call({name: of(value, b) for name, value in arguments.items()})[0] for b in range(batch)]
    yield "for each sequence alone", (torch.cat(alone),)
    if mask is None:
        zeros = arguments["q"].new_zeros(batch, 1, 1, arguments[caches[0]].shape[2])
        yield "with a mask of zeros", call(arguments | {"mask": zeros})
        return
    several = (*queries, "mask")
    steps = [call(arguments | {name: arguments[name][:, :, t : t + 1] for name in several})[0] for t in range(tokens)]
    yield "for each token alone", (torch.cat(steps, 1),)
    more = 2 * SPLIT + 5
    longer = {}
    for name in caches:
        rest = torch.ones_like(arguments[name][:, :, :1]).expand(-1, -1, more, -1)
        longer[name] = torch.cat((arguments[name], rest), 2)
    hidden = mask.new_full((*mask.shape[:-1], more), -torch.inf)
    yield "in a longer cache", call(arguments | longer | {"mask": torch.cat((mask, hidden), -1)})


def verify(case: AttentionCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong: every value lies between bounds of the exact result."""
    host = to_cpu(arguments)
    q, k, scale = host["q"], host["k"], host["scale"]
    scores, sizes = reference.scores(q, k, scale), reference.scores(q.abs(), k.abs(), scale)
    v = host["v"].double().repeat_interleave(case.heads[0] // case.heads[1], 1)
    return bounds(scores, sizes, host.get("mask"), v, case.x).stored(results[0].cpu())


def bounds(scores: Tensor, sizes: Tensor, mask: Tensor | None, v: Tensor, dtype: torch.dtype) -> Bounds:
    """The bounds [batch, tokens, heads, columns] of an attention with these exact scores [batch, heads, tokens, context].

    ``sizes`` are the sums of the magnitudes that a score is the sum of. Each power is rounded once, which moves a value by
    at most the roundoff of its weighted distance from the result. A score's error, in float32, changes its power by a
    factor. Sums are float32.
    """
    powers = reference.weights(scores, mask)
    if mask is not None:
        sizes = torch.where(mask.isinf(), 0.0, sizes + (scores + mask.double()).abs())
    out = powers @ v
    roundoff = torch.finfo(dtype).eps / 2
    error = 2 * roundoff + 2.0**-18 + 2 * 2.0**-20 * sizes.amax(-1, keepdim=True)
    spread = powers @ v.abs() * error
    if dtype == F16:  # powers below the smallest number of the dtype are lost
        spread += (powers > 0).sum(-1, keepdim=True) * 2.0**-24 * v.abs().amax((-1, -2), keepdim=True)
    return Bounds(*(t.transpose(1, 2) for t in (out - spread, out + spread)))
