"""Compares a tiny model with and without `onepass.patch`."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

import onepass
from onepass.models import NothingPatchedWarning, Patched
from onepass.models.patching.patch import NEXT_LAYER, ROPE_ROUNDS

from .small import build, logits, tokens

TOLERANCE: Final = 5e-6
"""Of the largest logit, in float32, where only the order of sums differs."""
INEXACT: Final = ("mamba",)
"""Models whose own float32 logits are further away from those in float64. They may differ by four times as much."""
PROMPTS: Final = 3
OWN_CODE: Final = "its own code fails"
_EVERYWHERE: Final = {NEXT_LAYER, ROPE_ROUNDS}
"""Reasons that are about every layer, so the table does not repeat them."""


@dataclass(frozen=True)
class Coverage:
    """What `patch` replaced in a model, and what it left: "count x class what" and the reason.

    ``layers`` and ``rotary`` are the decoder layers and rotary embeddings that ``decode=True`` replaces.
    """

    model: str
    norms: int
    additions: int
    heads: int
    left: dict[str, str]
    layers: int
    rotary: int


@dataclass(frozen=True)
class Agreement:
    """How close a patched model is.

    ``error`` is the largest difference of float32 logits, relative to the largest logit, and
    ``limit`` what is allowed. ``equal`` counts the prompts whose bfloat16 logits have the same
    bytes. ``apart`` is the median distance of a token's bfloat16 logits from the model's own,
    relative to how far these are from the model's in float32. ``tokens_equal`` is about models patched with and without
    ``decode=True``. It is None if the model has no head; hidden states are compared then.
    """

    error: float
    limit: float
    bytes_equal: bool
    tokens_equal: bool | None
    equal: int
    apart: float

    def objection(self) -> str:
        """What is wrong; "" if nothing is."""
        if not self.error <= self.limit:
            return f"float32 logits differ by {self.error:.1e} of the largest"
        if self.tokens_equal is False:
            return "generated tokens differ"
        if not self.equal:
            return "no prompt has the same bfloat16 logits"
        return "" if self.apart <= 1 else f"bfloat16 logits are {self.apart:.2f} times as far away as they are inexact"


def patched(model: Any, **options: Any) -> Patched:
    """`onepass.patch` without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingPatchedWarning)
        return onepass.patch(model, **options)


def coverage(handle: Patched, decoding: Patched) -> Coverage:
    """Sum up the reports of a model that was patched without and with ``decode=True``."""
    what = Counter(change.what for change in handle.replaced)
    decoded = Counter(change.what for change in decoding.replaced)
    left = Counter((c.cls, c.what, c.why) for c in handle.left if c.why not in _EVERYWHERE)
    return Coverage(
        type(handle.model).__name__,
        what["norm"],
        what["addition after the attention"],
        what["norms of q and k"],
        {f"{count} x {cls} {part}": why for (cls, part, why), count in left.items()},
        decoded["decode"],
        decoded["decode cosines and sines"],
    )


def why_not_run(architecture: str) -> str:
    """Why the installed transformers cannot run a tiny model without `patch`; "" if it can."""
    import transformers

    if architecture not in transformers.CONFIG_MAPPING:
        return "this release does not have it"
    try:
        model = build(architecture)
        generated(model, tokens())
        for dtype in (torch.float32, torch.bfloat16):
            logits(model.to(dtype), tokens())
    except Exception as error:  # older releases need other configurations
        return f"{OWN_CODE}: {type(error).__name__}: {error}"
    return ""


def compare(architecture: str) -> tuple[Coverage, Agreement]:
    """Build a model, patch it, and compare logits and greedily generated tokens."""
    model = build(architecture)
    ids = tokens()
    expected, expected_tokens = logits(model, ids), generated(model, ids)
    if not float(expected.abs().max()) > 0.05:
        raise RuntimeError(f"{architecture}: the logits are too small to compare")
    with patched(model) as handle:
        got, got_tokens = logits(model, ids), generated(model, ids)
    with patched(model, decode=True) as decoding:
        decoded_tokens = generated(model, ids)
    if not torch.equal(logits(model, ids), expected):
        raise RuntimeError(f"{architecture}: undo did not restore the model")
    error, limit = _distance(got, expected), TOLERANCE
    if architecture in INEXACT:
        limit = 4 * _distance(expected, logits(copy.deepcopy(model).double(), ids))
    tokens_equal = all(torch.equal(each, expected_tokens) for each in (got_tokens, decoded_tokens))
    same = torch.equal(got, expected), tokens_equal if model.can_generate() else None
    return coverage(handle, decoding), Agreement(error, limit, *same, *_in_bfloat16(model))


def _distance(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def _in_bfloat16(model: Any) -> tuple[int, float]:
    """How many prompts have the same bytes, and how far apart the logits of the others are."""
    low = copy.deepcopy(model).to(torch.bfloat16)
    prompts = [tokens(seed=seed) for seed in range(PROMPTS)]
    truth, own = (torch.stack([logits(one, ids).float() for ids in prompts]) for one in (model, low))
    with patched(low):
        got = torch.stack([logits(low, ids).float() for ids in prompts])
    usual, apart = ((found - own).norm(dim=-1).median() for found in (truth, got))
    return sum(map(torch.equal, got, own)), float(apart / usual)


@torch.inference_mode()
def generated(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """Greedily generated tokens, after the prompt; none if the model has no head."""
    if not model.can_generate():
        return ids[:, :0]
    found: Tensor = model.generate(ids, max_new_tokens=5, do_sample=False, **options)
    return found[:, ids.shape[1] :]
