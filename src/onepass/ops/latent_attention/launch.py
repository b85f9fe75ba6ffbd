"""What one launch of a decode step's attention to latents computes, and where its tensors are.

All heads of queries share one head of keys: a latent and a rotated key per entry. The queries of a sequence, heads times
tokens, are the *rows* of a product. Splits and masks are those of `ops.attention.launch`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from torch import Tensor

from ..attention.launch import AttentionSpec

PIECES: Final = 4
"""Pieces of a score: the columns of a latent and of a rotated key, padded with zeros, are cut into this many. It defines
the result."""
BLOCK: Final = 32
"""Entries whose powers are relative to the same score. It defines the result."""
MAX_LATENT: Final = 512
"""Maximum number of columns of a latent."""
MAX_ROTATED: Final = 64
"""Maximum number of columns of a rotated key."""


class LatentRows(NamedTuple):
    """Sizes, then strides in elements. ``heads``, of keys, is 1, and ``groups`` are the heads of queries."""

    batch: int
    heads: int
    groups: int
    tokens: int
    context: int
    columns: int
    rotated: int
    splits: int
    q_batch: int
    q_head: int
    q_token: int
    q_rot_batch: int
    q_rot_head: int
    q_rot_token: int
    latent_batch: int
    latent_entry: int
    k_rot_batch: int
    k_rot_entry: int
    mask_batch: int
    mask_token: int


class LatentCall(NamedTuple):
    """One call: its spec, tensors and numbers, all validated.

    ``out`` is contiguous, [batch, tokens, heads of q, columns]. The launch adds ``sums``, ``tops`` and ``counter``.
    """

    spec: AttentionSpec
    q: Tensor
    q_rot: Tensor
    latent: Tensor
    k_rot: Tensor
    mask: Tensor | None
    out: Tensor
    scale: float
    rows: LatentRows
    sums: Tensor | None = None
    tops: Tensor | None = None
    counter: Tensor | None = None

    @property
    def device(self) -> int:
        """The number of the GPU that the tensors are on, or -1."""
        return self.q.get_device()
