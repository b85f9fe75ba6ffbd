"""``python -m tools.bench.latent``: a decode step's attention to latents, beside torch's calls, on a GPU.

One query per sequence, DeepSeek-V3's 128 heads with latents of 512 columns and rotated keys of 64, bfloat16, a mask of zeros
as a static cache has one. "onepass" is q W_K, the attention and W_V, three launches; "torch" the calls that take their
place on other devices. The next columns are the three launches alone. Every call is timed in a CUDA graph over rotating
inputs and weights, in a chain of itself and behind an ordinary kernel: two medians, of which the smaller counts. The floor
reads latents, keys and weights once.

For each, calls are repeated with equal inputs, and every sequence of a batch is compared with a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.suite.timing import Behind
from onepass.models.forwards.latent import latents_by_torch, latents_in_splits
from onepass.ops.head_product.op import head_product
from onepass.ops.latent_attention.op import attend_latents

from .attention import LARGE, Row, run, sized, timed

HEADS, LATENT, ROTATED, NOPE, VALUES = 128, 512, 64, 128, 128
SIZES: Final = tuple((batch, context) for context in (128, 1024, 8192) for batch in (1, 4, 16))
SCALE: Final = (NOPE + ROTATED) ** -0.5
_layers = count()


class Problem:
    """One set of inputs."""

    def __init__(self, batch: int, context: int) -> None:
        make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.weight = make(HEADS * (NOPE + VALUES), LATENT) * LATENT**-0.5
        self.q = make(batch, 1, HEADS, NOPE + ROTATED)
        self.latent, self.k_rot = make(batch, 1, context, LATENT), make(batch, 1, context, ROTATED)
        self.mask = torch.zeros(batch, 1, 1, context, device="cuda", dtype=torch.bfloat16)
        self.attended = make(batch, HEADS, LATENT)

    @property
    def module(self) -> Any:
        """What an attention's forward reads of its module. Every call is another layer, which shares the step's mask."""
        sizes = {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROTATED, "v_head_dim": VALUES, "scaling": SCALE}
        return SimpleNamespace(kv_b_proj=SimpleNamespace(weight=self.weight), layer_idx=next(_layers), **sizes)

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """The weights of keys and values, [heads, K, N]."""
        w_k, w_v = self.weight.view(HEADS, -1, LATENT).split_with_sizes([NOPE, VALUES], dim=1)
        return w_k, w_v.transpose(1, 2)

    def alone(self, sequence: int) -> Problem:
        """One sequence of these inputs."""
        one = object.__new__(Problem)
        one.weight = self.weight
        for name in ("q", "latent", "k_rot", "mask", "attended"):
            setattr(one, name, getattr(self, name)[sequence : sequence + 1])
        return one


def ours(p: Problem) -> Tensor:
    """onepass's three launches."""
    made = latents_in_splits(p.module, p.q, p.latent, p.k_rot, p.mask)
    assert made is not None, "this GPU has no kernels for latents"
    return made


def by_torch(p: Problem) -> Tensor:
    """torch's calls."""
    return latents_by_torch(p.module, p.q, p.latent.squeeze(1), p.k_rot.squeeze(1), p.mask)


def keys(p: Problem) -> Tensor:
    """q W_K alone."""
    return head_product(p.q.flatten(0, 1)[..., :NOPE], p.halves[0])


def attention(p: Problem) -> Tensor:
    """The attention alone."""
    q_rot = p.q[..., NOPE:].transpose(1, 2)
    return attend_latents(p.attended.unsqueeze(2), q_rot, p.latent, p.k_rot, p.mask, SCALE)


def values(p: Problem) -> Tensor:
    """W_V alone."""
    return head_product(p.attended, p.halves[1])


CONTENDERS: Final[dict[str, Callable[[Problem], Tensor]]] = {
    "onepass": ours,
    "torch": by_torch,
    "q W_K": keys,
    "attention": attention,
    "W_V": values,
}


def measured(batch: int, context: int, behind: Behind) -> Row:
    """The row of one size."""
    size = 2 * (batch * context * (LATENT + ROTATED) + HEADS * (NOPE + VALUES) * LATENT)
    problems = [Problem(batch, context) for _ in range(max(2, -(-LARGE // size)))]
    row = timed(sized(batch, context, size), CONTENDERS, problems, behind)
    mine, theirs = ours(problems[0]).float(), by_torch(problems[0]).float()
    row["difference"] = float((mine - theirs).abs().max() / theirs.abs().max())
    return row


if __name__ == "__main__":
    run(__doc__, SIZES, measured)
