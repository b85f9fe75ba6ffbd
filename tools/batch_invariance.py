"""``python -m tools.batch_invariance``: how many prompts decode to the same bytes alone and in batches.

A model with random bfloat16 weights decodes prompts greedily, each alone and then in batches of several
sizes. A prompt is equal if the logits of its prompt's last token and of every new token have the same bytes
as alone. A batch of one is a second run alone, which shows whether results are the same from run to run at all.
Prompts have equal lengths, so that nothing is padded. Ways:

- ``unpatched``: transformers and torch;
- ``decode``: ``onepass.patch(model, decode=True)``;
- ``invariant``: the same with ``batch_invariant=True``;
- ``invariant-rows`` and ``unpatched-rows``: with the attention that torch chooses, called for each sequence alone. What still
  differs in ``invariant-rows`` differs from run to run: on a GPU, cuDNN's attention to a thousand tokens or more.

Results are written after each way and length, and merged into the file that ``--json`` names.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import onepass
from tools.bench import common
from tools.bench.limits import deadline_after, over, until
from tools.bench.markdown import table
from tools.bench.ways import first_line

BATCHES: Final = (1, 2, 4, 8, 16)
TOKENS: Final = 16
PROMPTS: Final = {"cuda": 1000, "cpu": 32}
CONTEXTS: Final = {"cuda": [64, 1024], "cpu": [32]}
_SMALL: Final[dict[str, Any]] = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024}
_SMALL_HEADS: Final = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
ROWS: Final = "sdpa_per_sequence"
"""The name under which transformers knows the attention of one sequence at a time."""


class Way(NamedTuple):
    """The options of `onepass.patch`, or none, and whether each sequence's attention is a call of its own."""

    title: str
    options: dict[str, Any]
    rows: bool = False

    @property
    def promised(self) -> bool:
        """Whether all prompts must have equal bytes."""
        return "batch_invariant" in self.options and not self.rows


_INVARIANT: Final = {"decode": True, "batch_invariant": True}
WAYS: Final = {
    "unpatched": Way("unpatched", {}),
    "unpatched-rows": Way("unpatched, attention per sequence", {}, rows=True),
    "decode": Way("`decode=True`", {"decode": True}),
    "invariant": Way("`decode=True, batch_invariant=True`", _INVARIANT),
    "invariant-rows": Way("the same, attention per sequence", _INVARIANT, rows=True),
}


def per_sequence(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
    """transformers' attention with torch's kernels, called for each sequence of a batch alone."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found = []
    for row in range(q.shape[0]):
        own = slice(row, row + 1)
        of_row = None if mask is None else mask[own]
        found.append(sdpa_attention_forward(module, q[own], k[own], v[own], of_row, **options)[0])
    return torch.cat(found), None


@contextmanager
def attention(model: Any, rows: bool) -> Iterator[None]:
    """Let a model attend to each sequence alone, if asked."""
    if not rows:
        yield
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ROWS, per_sequence)
    AttentionMaskInterface.register(ROWS, sdpa_mask)
    before = model.config._attn_implementation
    model.config._attn_implementation = ROWS
    try:
        yield
    finally:
        model.config._attn_implementation = before


def decoded(model: Any, prompts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Greedy tokens [batch, tokens], and the logits they were chosen from [batch, tokens, vocabulary]."""
    ids, cache = prompts, None
    chosen, logits = [], []
    for _ in range(tokens):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logits.append(out.logits[:, -1])
        ids = logits[-1].argmax(-1, keepdim=True)
        chosen.append(ids)
    return torch.cat(chosen, 1), torch.stack(logits, 1)


def digests(logits: Tensor) -> Tensor:
    """One number per sequence that depends on every byte of its logits and on their order."""
    words = logits.contiguous().view(torch.int16).flatten(1).long()
    # Odd weights, so that a change of one value always changes the sum. Sums wrap around.
    weights = torch.arange(words.shape[1], device=words.device) * 2654435761 * 2 + 1
    return (words * weights).sum(1)


class Decoder:
    """Decodes batches of one shape: tokens and digests of each sequence.

    On a GPU all steps, prompt included, are recorded in one CUDA graph and replayed: the launches are those of the eager
    loop, without Python between them. A model that cannot be recorded is called.
    """

    def __init__(self, model: Any, like: Tensor, tokens: int) -> None:
        self.model, self.tokens = model, tokens
        self.ids = like.clone()
        self.found: tuple[Tensor, Tensor] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.why = ""
        if like.device.type == "cuda":
            try:
                self.graph = self._recorded()
            except RuntimeError as error:
                self.why = first_line(error)

    def _recorded(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._decoded()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.found = self._decoded()
        return graph

    def _decoded(self) -> tuple[Tensor, Tensor]:
        chosen, logits = decoded(self.model, self.ids, self.tokens)
        return chosen, digests(logits)

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens and digests of a batch."""
        self.ids.copy_(ids)
        if self.graph is None:
            return self._decoded()
        self.graph.replay()
        assert self.found is not None
        return self.found[0].clone(), self.found[1].clone()


def run(model: Any, prompts: Tensor, batch: int, tokens: int) -> tuple[Tensor, Tensor, str]:
    """The tokens and the digests of all prompts, in batches of a size, and why nothing was recorded.

    The last batch is filled with the first prompts.
    """
    missing = -len(prompts) % batch
    filled = torch.cat([prompts, prompts[:missing]])
    decoder = Decoder(model, filled[:batch], tokens)
    parts = [decoder(part) for part in filled.split(batch)]
    found = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return found[0][: len(prompts)], found[1][: len(prompts)], decoder.why


def measure(
    model: Any, prompts: Tensor, way: Way, batches: tuple[int, ...], tokens: int, deadline: float | None = None
) -> dict[str, Any]:
    """How many prompts have the bytes, and the tokens, that they have alone."""
    start = time.perf_counter()
    row: dict[str, Any] = {"way": way.title, "context": prompts.shape[1], "prompts": len(prompts), "tokens": tokens}
    row |= {"equal": {}, "equal_tokens": {}}
    try:
        with ExitStack() as stack:
            stack.enter_context(until(deadline))
            if way.options:
                stack.enter_context(onepass.patch(model, **way.options))
            stack.enter_context(attention(model, way.rows))
            alone, bytes_alone, row["not_recorded"] = run(model, prompts, 1, tokens)
            row["distinct_tokens"] = len(alone.unique())
            for batch in batches:
                chosen, found, _ = run(model, prompts, batch, tokens)
                row["equal"][str(batch)] = int((found == bytes_alone).sum())
                row["equal_tokens"][str(batch)] = int((chosen == alone).all(1).sum())
    except Exception as error:  # the other ways continue
        row["failed"] = first_line(error)
    return {**row, "seconds": time.perf_counter() - start}


def markdown(report: dict[str, Any]) -> str:
    """The table of a report."""
    rows = report["rows"]
    batches = sorted({int(batch) for row in rows for batch in row["equal"]})
    heads = ["model", "context", "way", *(f"batch {batch}" for batch in batches)]
    lines = []
    for row in rows:
        cells = []
        for batch in map(str, batches):
            if batch in row["equal"]:
                cells.append(f"{row['equal'][batch]} ({row['equal_tokens'][batch]})")
            else:
                cells.append("failed" if "failed" in row else "")
        lines.append([row["model"], str(row["context"]), row["way"], *cells])
    tokens, prompts = rows[0]["tokens"], rows[0]["prompts"]
    return "\n".join(
        [
            f"Prompts of {prompts} that decode {tokens} tokens with the same logits, to the byte, in a batch as alone; in brackets "
            f"those with the same tokens. Random bfloat16 weights, {report['machine']}, torch {report['torch']}.",
            "",
            *table(heads, lines, 3),
        ]
    )


def merge(rows: list[dict[str, Any]], new: dict[str, Any]) -> None:
    """Add a row, in place of one of the same model, way and length."""
    same = ("model", "way", "context")
    rows[:] = [row for row in rows if any(row[key] != new[key] for key in same)] + [new]


def known(rows: list[dict[str, Any]], model: str, way: Way, context: int) -> bool:
    """Whether a report has this row, and it did not fail."""
    asked = (model, way.title, context)
    return any((row["model"], row["way"], row["context"]) == asked and "failed" not in row for row in rows)


def main() -> None:
    """Measure, print the table, write files if asked; exit status 1 if a way failed, or an invariant one is not."""
    parser = common.parser("batch_invariance", __doc__, 4)
    parser.prog = "python -m tools.batch_invariance"
    parser.add_argument("--way", nargs="+", choices=tuple(WAYS), default=tuple(WAYS), help="default: all")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, help="batch sizes (default: 1 2 4 8 16)")
    parser.add_argument("--prompts", type=int, help="how many (default 1000; CPU: 32)")
    parser.add_argument("--context", type=int, nargs="+", help="tokens of a prompt (default 64 1024; CPU: 32)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"new tokens (default {TOKENS})")
    parser.add_argument("--limit", type=float, help="start nothing after this many seconds, and interrupt what runs")
    parser.add_argument("--resume", action="store_true", help="measure only what the --json file does not have")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    options = parser.parse_args()
    count, contexts = options.prompts or PROMPTS[options.device], options.context or CONTEXTS[options.device]
    deadline = deadline_after(options.limit)
    report: dict[str, Any] = {**common.head(options.device), "rows": []}
    if options.json and options.json.exists():
        report["rows"] = json.loads(options.json.read_text())["rows"]
    fine = True
    with torch.inference_mode():
        for name in common.chosen(options.model or ["qwen3-8b"]):
            title, config, sizes = common.sized(name, options.layers)
            if options.device == "cpu":
                title, sizes = f"{title}, small", {**sizes, **_SMALL, **_SMALL_HEADS}
            model = common.build(config, sizes, options.device)
            for context in contexts:
                generator = torch.Generator().manual_seed(0)
                prompts = torch.randint(2, model.config.vocab_size, (count, context), generator=generator)
                for way in (WAYS[name] for name in options.way):
                    if over(deadline) or (options.resume and known(report["rows"], title, way, context)):
                        continue
                    given = prompts.to(options.device)
                    found = measure(model, given, way, tuple(options.batch), options.tokens, deadline)
                    row = {"model": title, **found}
                    print(json.dumps(row), flush=True)
                    held = all(equal == count for equal in row["equal"].values())
                    fine = fine and "failed" not in row and (held or not way.promised)
                    merge(report["rows"], row)
                    common.write(report, options.json)
            del model
    print(markdown(report))
    if options.markdown:
        options.markdown.write_text(markdown(report) + "\n")
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
