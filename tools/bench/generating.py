"""`model.generate` as users call it: microseconds per token with several caches, patched and not, and captured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass

from .steps import PROMPT, wait
from .ways import BASELINE, WAYS, Models, first_line

NEW_TOKENS = 64


class Form(NamedTuple):
    """A call of `generate`: the name of a way to patch, and whether its cache is static and the step captured."""

    way: str
    static: bool = False
    captured: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of the call."""
        options: dict[str, Any] = {"cache_implementation": "static"} if self.static else {}
        return options | ({"custom_generate": onepass.integrations.generate} if self.captured else {})


FORMS: dict[str, tuple[str, Form]] = {
    "dynamic": (BASELINE, Form("eager")),
    "dynamic-patched": ("patched", Form("patched")),
    "dynamic-decode": ("decode", Form("decode")),
    "static": ("static cache, compiled by transformers", Form("eager", static=True)),
    "captured": ("captured", Form("eager", captured=True)),
    "captured-decode": ("captured, decode", Form("decode", captured=True)),
    "captured-fp8": ("captured, decode, fp8", Form("fp8", captured=True)),
}
"""What ``--generate`` names: the title of each form, and the form."""


def generating(
    models: Models, batch: int, device: str, repeats: int, new_tokens: int = NEW_TOKENS, names: Iterable[str] = ()
) -> dict[str, Any]:
    """Microseconds per token of each form that did not fail: the time of a call, prompt included, by its new tokens.

    The median of a few calls, after two that warm up. ``same_tokens`` is the share of tokens that the unpatched model
    generates too.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, models.model.config.vocab_size, (batch, PROMPT), generator=generator).to(device)
    call: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "do_sample": False}
    row: dict[str, Any] = {"batch": batch, "prompt": PROMPT, "new_tokens": new_tokens, "us_per_token": {}}
    row |= {"medians": {}, "same_tokens": {}, "warm_up_s": {}, "failed": {}}
    wanted = ["dynamic", *(name for name in FORMS if name != "dynamic" and (not names or name in names))]
    expected: Tensor | None = None
    for title, form in (FORMS[name] for name in wanted):
        torch._dynamo.reset()
        try:
            model, _ = models.of(WAYS[form.way])
            start = time.perf_counter()
            for _ in range(2):
                found: Tensor = model.generate(ids, **call, **form.options)
                wait(device)
            row["warm_up_s"][title] = time.perf_counter() - start
            samples = []
            for _ in range(2 * repeats):
                start = time.perf_counter()
                found = model.generate(ids, **call, **form.options)
                wait(device)
                samples.append((time.perf_counter() - start) / new_tokens * 1e6)
        except Exception as error:  # the other forms continue
            row["failed"][title] = first_line(error)
            continue
        new = found[:, PROMPT:]
        expected = new if expected is None else expected
        row["same_tokens"][title] = float((new == expected).float().mean())
        row["medians"][title] = [statistics.median(half) for half in (samples[:repeats], samples[repeats:])]
        row["us_per_token"][title] = statistics.median(samples)
    return row
