"""Cases of the attention of decode steps to latents. Only GPUs and the interpreter have the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from onepass.ops.latent_attention import reference
from onepass.ops.latent_attention.op import attend_latents
from onepass.testing.tensors import moved, short_dtype
from tests.attention.checks import BF16, Mask, bounds, mask_of, same_results
from tests.oracle.case import GPU_ONLY, Values, case_name
from tests.oracle.memory import to_cpu

OP: Final = "attend_latents"
OPS: Final = (OP,)
_TENSORS: Final = ("q", "q_rot", "latent", "k_rot")


@dataclass(frozen=True, eq=False)
class LatentCase:
    """One call: sequences, heads, tokens, entries, columns of latents and of rotated keys, dtype, mask, values and memory."""

    group: str
    batch: int = 2
    heads: int = 5
    tokens: int = 1
    context: int = 70
    columns: tuple[int, int] = (64, 16)
    x: torch.dtype = BF16
    mask: Mask = "each"
    values: Values = "normal"
    part: bool = False
    """Whether latents and keys are the first entries of longer caches."""
    op: str = OP

    @property
    def interpretable(self) -> bool:
        """See `Check`."""
        return self.group not in (*GPU_ONLY, "columns")

    @property
    def name(self) -> str:
        """See `Check`."""
        columns = f"{self.columns[0]}+{self.columns[1]}"
        shape = f"{self.batch}x{self.heads}x{self.tokens}x{self.context}x{columns}"
        mask = f"mask={self.mask}"
        return case_name(self.group, shape, short_dtype(self.x), mask, self.values, "part" * self.part)


DEEPSEEK: Final = (512, 64)
"""Columns of a latent and of a rotated key in DeepSeek-V2 and -V3."""


def inputs(case: LatentCase, device: str, seed: int = 0) -> dict[str, Any]:
    """Tensors and options by the names of `attend_latents`' arguments. ``q_rot`` is part of wider heads, as in a model."""
    generator = torch.Generator().manual_seed(seed + case.context)
    wide, narrow = case.columns
    lead = case.batch, case.tokens, case.heads
    q = torch.randn(*lead, wide, generator=generator).to(case.x)
    q_rot = torch.randn(*lead, 32 + narrow, generator=generator).to(case.x)[..., 32:]
    room = case.context + 24 if case.part else case.context
    latent, k_rot = (torch.randn(case.batch, 1, room, n, generator=generator).to(case.x) for n in case.columns)
    if case.values == "special":
        q[0, :, 1, 3] = torch.nan  # all scores of one head
        q[1] *= 60.0  # one entry has nearly all the weight
        k_rot[2, :, 5] = torch.nan
        latent[3, :, 7] = torch.inf
    found = {"q": q.transpose(1, 2), "q_rot": q_rot.transpose(1, 2)}
    found |= {"latent": latent[:, :, : case.context], "k_rot": k_rot[:, :, : case.context]}
    if case.mask != "none":
        found["mask"] = mask_of(case, generator)
    return moved(found, device) | {"scale": (wide + narrow) ** -0.5}


def call(case: LatentCase, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The result of a call."""
    q, q_rot, latent, k_rot = (arguments[name] for name in _TENSORS)
    return (attend_latents(q, q_rot, latent, k_rot, arguments.get("mask"), arguments["scale"]),)


def zeroable(case: LatentCase) -> list[tuple[int, str]]:
    """Position and name of each result."""
    return [(0, "out")]


def variants(case: LatentCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[tuple[str, Any]]:
    """Other calls that must give the same bytes, also for some heads alone."""
    yield from same_results(partial(call, case), arguments, ("q", "q_rot"), ("latent", "k_rot"))
    if not case.batch:
        return
    cut, heads = case.heads // 3, {name: arguments[name] for name in ("q", "q_rot")}
    parts = [call(case, arguments | {name: t[:, some] for name, t in heads.items()})[0]
             for some in (slice(0, cut), slice(cut, None))]  # fmt: skip
    yield "for some heads alone", (torch.cat(parts, 2),)


def verify(case: LatentCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong: every value lies between bounds of the exact result."""
    host = to_cpu(arguments)
    q, q_rot, latent, k_rot = (host[name] for name in _TENSORS)
    scores = reference.scores(q, q_rot, latent, k_rot, host["scale"])
    sizes = reference.scores(q.abs(), q_rot.abs(), latent.abs(), k_rot.abs(), host["scale"])
    return bounds(scores, sizes, host.get("mask"), latent.double(), case.x).stored(results[0].cpu())
