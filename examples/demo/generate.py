"""The first part of the demo: tokens per second of a bfloat16 model without onepass, with it, and with fp8 weights.

The model is a Llama that recites (`recite`), large enough that its weights do not fit into a CPU's caches, or one of yours. On a GPU,
onepass's decode steps are replayed from a CUDA graph.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text
from torch import Tensor

from benchmarks.suite.console import table

from .model import patched
from .recite import Passages
from .screen import Screen, verdict

PROMPT: Final = 16
CHUNK: Final = 8
"""Tokens of a text that run at once. Up to 16 rows run as a decode step."""
NEW_TOKENS: Final = 32
BATCHES: Final = (1, 4)
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EMBEDDING: Final = 64.0
"""How much larger the embedding is than transformers' random one."""
WITHOUT: Final = "without onepass"
BAR: Final = 26
"""Columns of the longest bar: a row has 80."""
STYLES: Final = {WITHOUT: "dim", "with fp8 weights": "bright_green"}
WAYS: Final[dict[str, dict[str, Any]]] = {
    WITHOUT: {},
    "with onepass": {"decode": True},
    "with fp8 weights": {"decode": True, "weights": "fp8"},
}
"""The options of `onepass.patch`, by what the table shows."""
LARGEST_ERROR: Final = {"weights": 0.3, "decode": 0.05}
"""How much logits may differ, as a share of the largest; the first option that a way has counts.

Patched models were within 0.034 of the largest logit (benchmarks/h200/models.json); fp8 weights have 4 significant bits.
"""


@dataclass
class Run:
    """One way with one batch."""

    way: str
    batch: int
    tokens_per_second: float
    same_tokens: int
    """Tokens that are equal to those without onepass, of all sequences, up to the first that differs in each."""
    tokens: int


class Meter:
    """A streamer that moves a bar on, and knows the time of the first and the last token."""

    def __init__(self, progress: Progress, task: Any, batch: int) -> None:
        self.progress, self.task, self.batch = progress, task, batch
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        """Count a token of each sequence. The prompt comes first."""
        self.times.append(time.perf_counter())
        if len(self.times) > 1:
            self.progress.update(self.task, advance=1, rate=f"{self.rate:6.1f} tokens/s" if len(self.times) > 2 else "")

    def end(self) -> None:
        """Nothing is left to do."""

    @property
    def rate(self) -> float:
        """Tokens per second behind the first token, which also takes the prompt."""
        count = len(self.times) - 2
        return self.batch * count / (self.times[-1] - self.times[1])


def load(path: Path | None, device: str) -> Any:
    """The model in bfloat16, ready to generate."""
    import transformers  # not installed with onepass

    transformers.utils.logging.set_verbosity_error()
    make: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    if path is not None:
        return make.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True).eval().to(device)
    with torch.device(device):
        model = make.from_config(transformers.LlamaConfig(**SIZES), dtype=torch.bfloat16).eval()
    with torch.no_grad():  # as large as what the layers add, so that tokens do not depend on roundings alone
        model.get_input_embeddings().weight.mul_(EMBEDDING)
    passages().fit(model)
    return model


def passages() -> Passages:
    """What the model knows, as long as the demo generates."""
    return Passages(PROMPT, NEW_TOKENS)


def agreeing(tokens: Tensor, expected: Tensor) -> int:
    """How many tokens of all sequences are equal up to the first that differs in each."""
    return int((tokens == expected).long().cumprod(1).sum())


def show(path: Path | None, screen: Screen) -> dict[str, Any]:
    """Generate in all ways, compare and time; return what the report contains."""
    model = load(path, screen.device)
    count = sum(p.numel() for p in model.parameters())
    where = f"{torch.get_num_threads()} threads" if screen.device == "cpu" else "CUDA graphs with onepass"
    label = str(path) if path is not None else "random layers, a head that knows four passages"
    screen.console.print(f"{type(model).__name__}: {count / 1e6:.0f} M parameters, bfloat16, {where}\n{label}")
    prompts = passages().ids[:, :PROMPT] if path is None else _random(model)
    runs: list[Run] = []
    errors: dict[str, float] = {}
    forced: dict[str, int] = {}
    problems: dict[str, str] = {}
    columns = (TextColumn("{task.description:28}"), BarColumn(32), TextColumn("{task.fields[rate]}"))
    expected: dict[int, Tensor] = {}
    with Progress(*columns, console=screen.console, transient=True, disable=not screen.console.is_terminal) as progress:
        for way, options in WAYS.items():
            with patched(model, **options) if options else nullcontext((None, "")) as (_, nothing):
                if nothing:
                    problems[way] = f"nothing was measured: {nothing}"
                    continue
                for batch in BATCHES:
                    name = f"{way}, batch {batch}"
                    ids = prompts[:batch].to(model.device)
                    tokens, rate = _generate(model, ids, progress, name, bool(options))
                    same = agreeing(tokens, expected.setdefault(batch, tokens))
                    runs.append(Run(way, batch, rate, same, tokens.numel()))
                text = torch.cat([prompts[:1].to(model.device), expected[BATCHES[0]][:1]], dim=1)
                logits = _logits(model, text)[PROMPT - 1 : -1]
                if not options:
                    plain = logits
                    continue
                errors[way] = float((logits - plain).abs().max() / plain.abs().max())
                forced[way] = int((logits.argmax(-1) == plain.argmax(-1)).sum())
    if path is None:
        _show_text(passages(), expected[BATCHES[0]][0], screen)
    _show_rates(runs, screen)
    for way, error in errors.items():
        words = f"{way}: {forced[way]} of {plain.shape[0]} next tokens, logits within {error:.1%} of the largest"
        screen.console.print(Text.assemble(verdict(_close(way, error)), f"  {words}"), soft_wrap=True)
    for way, problem in problems.items():
        screen.console.print(Text.assemble(verdict(False), f"  {way}: {problem}"), soft_wrap=True)
    right = not problems and all(_close(way, error) for way, error in errors.items())
    return {
        "model": label,
        "parameters": count,
        "fine": right and bool(plain.abs().max() > 0),
        "runs": [asdict(run) for run in runs],
        "problems": problems,
        "largest_difference_of_logits": errors,
        "same_next_token": forced,
        "next_tokens": plain.shape[0],
    }


def _random(model: Any) -> Tensor:
    """Random prompts."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(2, vocabulary, (max(BATCHES), PROMPT), generator=torch.Generator().manual_seed(0))


def _logits(model: Any, text: Tensor) -> Tensor:
    """The logits behind each token of a text, [tokens, vocabulary], in pieces that run as decode steps."""
    found, cache = [], None
    for piece in text.split(CHUNK, dim=1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits[0].float())
    return torch.cat(found)


def _close(way: str, error: float) -> bool:
    limit = next(limit for option, limit in LARGEST_ERROR.items() if option in WAYS[way])
    return error <= limit


def _generate(model: Any, ids: Tensor, progress: Progress, name: str, captured: bool) -> tuple[Tensor, float]:
    """New tokens [batch, NEW_TOKENS], and tokens per second. A first call warms up and is not shown."""
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW_TOKENS}
    if ids.is_cuda and captured:
        from onepass.models import generate  # needs transformers

        options["custom_generate"] = generate
    model.generate(ids, **{**options, "max_new_tokens": NEW_TOKENS if ids.is_cuda else 2})
    meter = Meter(progress, progress.add_task(name, total=NEW_TOKENS, rate=""), ids.shape[0])
    tokens: Tensor = model.generate(ids, **options, streamer=meter)
    return tokens[:, ids.shape[1] :], meter.rate


def _show_text(known: Passages, tokens: Tensor, screen: Screen) -> None:
    """The first prompt, and its continuation."""
    screen.console.print(Text.assemble((known.text(known.ids[0, :PROMPT]), "dim"), " ", (known.text(tokens), "bold")))


def _show_rates(runs: list[Run], screen: Screen) -> None:
    """For each batch a bar per way, next to each other."""
    slow = {run.batch: run.tokens_per_second for run in runs if run.way == WITHOUT}
    for batch in sorted(slow):
        those = [run for run in runs if run.batch == batch]
        fastest = max(run.tokens_per_second for run in those)
        words = "one sequence" if batch == 1 else f"{batch} sequences"
        shown = table(words, "", right=("tokens/s", "speed-up", "same tokens"))
        for run in those:
            bar = Text(
                "━" * max(1, round(BAR * run.tokens_per_second / fastest)), STYLES.get(run.way, "green"), no_wrap=True
            )
            first = run.way == WITHOUT
            speedup = "" if first else screen.speedup(1 / slow[batch], 1 / run.tokens_per_second)
            same = "" if first else f"{run.same_tokens} of {run.tokens}"
            shown.add_row(run.way, bar, f"{run.tokens_per_second:.1f}", speedup, same)
        screen.console.print(shown)
