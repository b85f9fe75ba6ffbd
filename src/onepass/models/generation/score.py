"""`score`: log-probabilities of given tokens."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from ...errors import ContractError

ROWS: Final = 256
"""Tokens whose logits are made float32 at a time."""


@torch.no_grad()
def score(model: nn.Module, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """The log-probability of each next token: ``scores[:, t] = log_softmax(logits[:, t].float(), -1)[ids[:, t + 1]]``.

    The model runs once, over whole sequences. Positions are counted from a sequence's first token.

    On a CPU, after ``onepass.patch(model, decode=True, batch_invariant=True)``, scores are bit-identical to
    ``log_softmax(logits.float(), -1)`` in the steps of `generate`, greedy or sampled, whatever the batch in which the tokens
    were generated. docs/numerics.md lists what is not covered.

    Args:
        model: A causal language model of transformers, patched or not.
        ids: [batch, tokens], any integer dtype.
        attention_mask: [batch, tokens], 1 where a token counts. Sequences may be padded on either side. None: all count.

    Returns:
        float32 [batch, tokens - 1]. Entries of padding, and of a sequence's first token after padding, are 0.

    Raises:
        ContractError: If the shape or the dtype of an argument is wrong.

    >>> import onepass, torch, transformers
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> ids = torch.tensor([[5, 9, 11, 3], [7, 8, 0, 0]])
    >>> with onepass.patch(model, decode=True, batch_invariant=True):
    ...     scores = onepass.models.score(model, ids, attention_mask=(ids > 0).long())
    ...     alone = onepass.models.score(model, torch.tensor([[7, 8]]))
    >>> scores.shape, torch.equal(scores[1:, :1], alone)
    (torch.Size([2, 3]), True)
    """
    if ids.dim() != 2:
        raise ContractError(f"score: `ids` must have shape [batch, tokens], got {list(ids.shape)}")
    if ids.is_floating_point() or ids.dtype is torch.bool:
        raise ContractError(f"score: `ids` must be an integer tensor, got {ids.dtype}")
    options: dict[str, Any] = {"use_cache": False}
    counted = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        counted = _counted(ids, attention_mask)
        positions = (counted.cumsum(1) - 1).clamp(min=0)
        options |= {"attention_mask": counted.long(), "position_ids": positions}
    logits: Tensor = model(ids, **options).logits[:, :-1]
    rows, wanted = logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1, 1).long()
    parts = [
        torch.log_softmax(some.float(), -1).gather(1, own)
        for some, own in zip(rows.split(ROWS), wanted.split(ROWS), strict=True)
    ]
    scores = torch.cat(parts).view(logits.shape[:2]) if parts else logits.new_zeros(logits.shape[:2]).float()
    return scores.masked_fill(~(counted[:, 1:] & counted[:, :-1]), 0.0)


def _counted(ids: Tensor, mask: Tensor) -> Tensor:
    """Which tokens count."""
    if mask.shape != ids.shape:
        what = f"{list(ids.shape)}, got {list(mask.shape)}"
        raise ContractError(f"score: `attention_mask` must have the shape of `ids`, {what}")
    counted = mask.bool()
    starts = counted.clone()
    starts[:, 1:] &= ~counted[:, :-1]
    if bool((starts.sum(1) > 1).any()):
        raise ContractError("score: a row of `attention_mask` must have one run of ones")
    return counted
