"""`model.generate` as users call it: microseconds per token with several caches, patched and not, and captured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass

from .limits import over, until
from .steps import PROMPT, wait
from .ways import BASELINE, WAYS, Models, first_line

NEW_TOKENS = 64


SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}


class Form(NamedTuple):
    """A call of `generate`: the name of a way to patch, whether its cache is static, the step captured, tokens drawn or streamed."""

    way: str
    static: bool = False
    captured: bool = False
    sampled: bool = False
    streamed: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of the call."""
        options: dict[str, Any] = {"cache_implementation": "static"} if self.static else {}
        options |= SAMPLING if self.sampled else {"do_sample": False}
        options |= {"streamer": Streamer()} if self.streamed else {}
        return options | ({"custom_generate": onepass.models.generate} if self.captured else {})


class Streamer:
    """Takes tokens as transformers' streamers do: the prompt first, then the tokens of each step."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.ended = False

    def put(self, tokens: Tensor) -> None:
        """Take the tokens of a step."""
        self.tokens.append(tokens)

    def end(self) -> None:
        """There are no more."""
        self.ended = True

    def check(self, found: Tensor) -> None:
        """Raise unless the streamed tokens are those that `generate` returned."""
        got = torch.cat([tokens.cpu().reshape(len(found), -1) for tokens in self.tokens], dim=1)
        if not self.ended or not torch.equal(got, found.cpu()):
            raise AssertionError("the streamer did not get the tokens that generate() returned")


FORMS: dict[str, tuple[str, Form]] = {
    "dynamic": (BASELINE, Form("eager")),
    "dynamic-patched": ("patched", Form("patched")),
    "dynamic-decode": ("decode", Form("decode")),
    "static": ("static cache, compiled by transformers", Form("eager", static=True)),
    "captured": ("captured", Form("eager", captured=True)),
    "captured-decode": ("captured, decode", Form("decode", captured=True)),
    "captured-fp8": ("captured, decode, fp8", Form("fp8", captured=True)),
    "sampled": ("sampled", Form("eager", sampled=True)),
    "captured-sampled": ("captured, decode, sampled", Form("decode", captured=True, sampled=True)),
    "captured-streamed": ("captured, decode, streamed", Form("decode", captured=True, streamed=True)),
}
"""What ``--generate`` names: the title of each form, and the form."""


def generating(
    models: Models,
    batch: int,
    device: str,
    repeats: int,
    new_tokens: int = NEW_TOKENS,
    names: Iterable[str] = (),
    deadline: float | None = None,
) -> dict[str, Any]:
    """Microseconds per token of each form that did not fail: the time of a call, prompt included, by its new tokens.

    The median of a few calls, after two that warm up. ``same_tokens`` is the share of tokens that the unpatched model
    generates too. Forms that draw tokens have none, but the same seed must draw the same tokens again.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, models.model.config.vocab_size, (batch, PROMPT), generator=generator).to(device)
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens}
    row: dict[str, Any] = {"batch": batch, "prompt": PROMPT, "new_tokens": new_tokens, "us_per_token": {}}
    row |= {"medians": {}, "same_tokens": {}, "warm_up_s": {}, "failed": {}}
    wanted = ["dynamic", *(name for name in FORMS if name != "dynamic" and (not names or name in names))]
    expected: Tensor | None = None
    for title, form in (FORMS[name] for name in wanted):
        torch._dynamo.reset()
        if over(deadline):
            break
        try:
            with until(deadline):
                model, _ = models.of(WAYS[form.way])
                start = time.perf_counter()
                for _ in range(2):
                    before = call(model, ids, {**asked, **form.options}, device)[0]
                row["warm_up_s"][title] = time.perf_counter() - start
                timed = [call(model, ids, {**asked, **form.options}, device) for _ in range(2 * repeats)]
            new, samples = timed[-1][0], [seconds / new_tokens * 1e6 for _, seconds in timed]
            if form.sampled and not torch.equal(new, before):
                raise AssertionError("the same seed drew other tokens")
        except Exception as error:  # the other forms continue
            row["failed"][title] = first_line(error)
            continue
        expected = new if expected is None else expected
        if not form.sampled:
            row["same_tokens"][title] = float((new == expected).float().mean())
        row["medians"][title] = [statistics.median(half) for half in (samples[:repeats], samples[repeats:])]
        row["us_per_token"][title] = statistics.median(samples)
    return row


def call(model: Any, ids: Tensor, options: dict[str, Any], device: str) -> tuple[Tensor, float]:
    """The new tokens, and the seconds of the call."""
    torch.manual_seed(0)
    wait(device)
    start = time.perf_counter()
    found: Tensor = model.generate(ids, **options)
    wait(device)
    seconds = time.perf_counter() - start
    if "streamer" in options:
        options["streamer"].check(found)
    return found[:, ids.shape[1] :], seconds
