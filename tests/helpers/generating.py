"""Prompts, and the tokens that transformers' loop and `onepass.models.generate` make of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import onepass

OURS = onepass.models.generate


def prompts(batch: int = 3, length: int = 12, seed: int = 1) -> dict[str, Tensor]:
    """Random prompts, of which all but the first are padded on the left."""
    ids = torch.randint(12, 120, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 2 * row + 1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def both(model: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """The tokens of transformers' loop and ours."""
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(**inputs, **options), model.generate(**inputs, **options, custom_generate=OURS)
