"""``onepass invariance``: which logits and tokens of a model depend on more than their own sequence."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..models import patch, score
from .common import Commands, Progress, UsageError, add_device, at_least, cannot_write, label, table, version

DTYPES: Final = ("bfloat16", "float16", "float32")
SHORTEST: Final = 3
Row: TypeAlias = tuple[bytes, bytes]
"""Digests of the logits of tokens, and of the tokens that are chosen."""
Counts: TypeAlias = dict[str, tuple[int, int | None]]
"""How many prompts keep their logits and their tokens, by what is compared; no tokens are chosen for scores."""


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    words = "count logits and tokens of a model that depend on the batch, on chunks, or on decoding"
    description = (
        f"C{words[1:]}: greedy generation of prompts of mixed lengths, unpatched and patched with batch_invariant=True. "
        "The exit status is 1 if logits of the patched model differ."
    )
    parser = commands.add_parser("invariance", help=words, description=description, allow_abbrev=False)
    option, number = parser.add_argument, at_least(1)
    what = "a folder of a model, or a config of transformers: then weights are random"
    option("--model", required=True, metavar="PATH", help=what)
    option("--prompts", type=number, default=16, metavar="N", help="how many prompts; default 16")
    longest = "tokens of the longest prompt; default 90"
    option("--longest", type=at_least(SHORTEST), default=90, metavar="N", help=longest)
    option("--new", type=number, default=8, metavar="N", help="tokens to generate; default 8")
    option(
        "--batches", type=number, nargs="*", default=[2, 8, 16], metavar="N", help="sizes of batches; default 2 8 16"
    )
    option("--chunks", type=number, nargs="*", default=[7, 16], metavar="N", help="sizes of chunks; default 7 16")
    option("--dtype", choices=DTYPES, default=DTYPES[0], help="dtype of the model; default bfloat16")
    option("--patched-only", action="store_true", help="leave out the unpatched model")
    option("--json", default="", metavar="FILE", help="also write the counts here")
    option("--markdown", default="", metavar="FILE", help="also write a page with the table here")
    add_device(parser)
    parser.set_defaults(run=invariance, parser=parser)


def invariance(options: argparse.Namespace) -> int:
    """Count equal logits and tokens, print a table; 1 if the patched model's logits differ."""
    model = _model(options.model, getattr(torch, options.dtype)).to(options.device).eval()
    prompts = _prompts(model, options)
    lengths = [len(prompt) for prompt in prompts]
    report: dict[str, Any] = {"model": type(model).__name__, "dtype": options.dtype, "device": options.device}
    report |= {"prompts": len(prompts), "shortest": min(lengths), "longest": max(lengths), "new": options.new}
    print(_heading(report), flush=True)
    with torch.inference_mode():
        unpatched = None if options.patched_only else _Comparison(model, prompts, options).counts()[0]
        with patch(model, decode=True, batch_invariant=True):
            patched, digest = _Comparison(model, prompts, options).counts()
    report |= {"unpatched": unpatched, "patched": patched, "digest": digest, "machine": label(options.device)}
    report |= {"torch": torch.__version__, "transformers": version("transformers")}
    print(table(rows(report), right=(1, 2, 3, 4)))
    print(f"digest of the patched model's logits: {digest}")
    for name, text in ((options.json, json.dumps(report, indent=1) + "\n"), (options.markdown, page(report))):
        if name:
            _write(name, text, "--json" if name == options.json else "--markdown")
    return int(any(logits < len(prompts) for logits, _ in patched.values()))


def _write(name: str, text: str, option: str) -> None:
    try:
        Path(name).write_text(text)
    except OSError as error:
        raise cannot_write(name, error, option) from None


# --- reports --------------------------------------------------------------------------------------------------------


def _heading(report: dict[str, Any]) -> str:
    lengths = f"{report['prompts']:,} prompts, {report['shortest']:,} to {report['longest']:,} tokens"
    return f"{report['model']}, {report['dtype']}, {report['device']}: {lengths}"


def rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The counts of a report as a table whose first row is its head."""

    def cells(counts: Counts | None, name: str) -> tuple[str, str]:
        logits, tokens = (None, None) if counts is None else counts[name]
        return "-" if logits is None else f"{logits:,}", "-" if tokens is None else f"{tokens:,}"

    head = (f"equal, of {report['prompts']:,}", "unpatched: logits", "tokens", "patched: logits", "tokens")
    names = report["patched"]
    return [head, *((name, *cells(report["unpatched"], name), *cells(report["patched"], name)) for name in names)]


def page(report: dict[str, Any]) -> str:
    """A page in Markdown about one model."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows(report))
    versions = f"torch {report['torch']}, transformers {report['transformers']}"
    lines = [
        f"# {_heading(report)}",
        "",
        f"{report['machine']}; {versions}; {report['new']} greedy tokens per prompt.",
        "",
    ]
    lines += ["Prompts that keep every bit of their logits, and their tokens, compared with the same prompt alone:", ""]
    return "\n".join([*lines, head, "|---|---:|---:|---:|---:|", *body, ""])


# --- models and prompts ---------------------------------------------------------------------------------------------


def _model(path: str, dtype: torch.dtype) -> Any:
    """The model of a folder that has weights, or one with random weights."""
    try:
        import transformers
    except ImportError:
        raise UsageError("the command needs transformers: pip install transformers") from None
    auto: Any = transformers.AutoModelForCausalLM
    place = Path(path)
    if not place.exists():
        raise UsageError(f"argument --model: there is no {path}")
    if place.is_dir() and any(f for kind in ("*.safetensors", "*.bin") for f in place.glob(kind)):
        return auto.from_pretrained(path, dtype=dtype)
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"argument --model: no config of a model in {path}: {error}") from None
    torch.manual_seed(0)
    return auto.from_config(config, dtype=dtype)


def _prompts(model: Any, options: argparse.Namespace) -> list[Tensor]:
    """Random tokens. Short prompts are as many as long ones on a scale of logarithms; the last is the longest."""
    generator = torch.Generator().manual_seed(1)
    words = model.get_input_embeddings().num_embeddings
    shares = torch.rand(options.prompts, generator=generator)
    lengths = (SHORTEST * (options.longest / SHORTEST) ** shares).round().int().tolist()
    lengths[-1] = options.longest
    return [torch.randint(1, words, (n,), generator=generator).to(options.device) for n in lengths]


# --- what is compared -----------------------------------------------------------------------------------------------


class _Alone(NamedTuple):
    """A prompt by itself: what it generates, with the scores of these tokens, and the logits of its own tokens."""

    generated: Row
    scores: bytes
    prompt: Row
    sequence: Tensor
    """The prompt and the tokens it generates."""


def _digest(*tensors: Tensor) -> bytes:
    """A digest of every bit of some tensors."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        state.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return state.digest()


def _row(logits: Tensor) -> Row:
    return _digest(logits.float()), _digest(logits.argmax(-1))


def _padded(sequences: Sequence[Tensor], left: bool) -> tuple[Tensor, Tensor]:
    """A batch of sequences and its mask."""
    width = max(map(len, sequences))
    sides = [(width - len(s), 0) if left else (0, width - len(s)) for s in sequences]
    ids = [pad(s, side) for s, side in zip(sequences, sides, strict=True)]
    mask = [pad(torch.ones_like(s), side) for s, side in zip(sequences, sides, strict=True)]
    return torch.stack(ids), torch.stack(mask)


class _Comparison:
    """Each prompt alone, next to the same prompt in batches, in chunks, prefilled, and scored."""

    def __init__(self, model: Any, prompts: list[Tensor], options: argparse.Namespace) -> None:
        self.model, self.prompts, self.new = model, prompts, options.new
        self.batches, self.chunks = options.batches, options.chunks
        self.progress = Progress(len(prompts) * (1 + 3 * len(self.batches)))

    def counts(self) -> tuple[Counts, str]:
        """The counts, and a digest of all logits of the prompts alone."""
        alone, equal = [], dict.fromkeys(self._names(), 0)
        chosen = dict.fromkeys(equal, 0)
        for prompt in self.prompts:
            alone.append(self._alone(prompt))
            for name, ours, row in self._single(prompt, alone[-1]):
                equal[name] += ours[0] == row[0]
                chosen[name] += ours[1] == row[1]
            self.progress.step()
        for size in self.batches:
            for first in range(0, len(self.prompts), size):
                for name, ours, row in self._batch(alone[first : first + size], first, size):
                    equal[name] += ours[0] == row[0]
                    chosen[name] += ours[1] == row[1]
        digest = hashlib.blake2b(b"".join(a.generated[0] + a.prompt[0] for a in alone), digest_size=16).hexdigest()
        return {name: (equal[name], None if name.startswith("scored") else chosen[name]) for name in equal}, digest

    def _names(self) -> Iterator[str]:
        """The names of all comparisons, in the order of the table."""
        for words in ("generated in batches of", "prompts in right-padded batches of"):
            yield from (f"{words} {size}" for size in self.batches)
        yield from (f"prompts in chunks of {size}" for size in self.chunks)
        yield "prefilled and decoded"
        yield from (f"scored in batches of {size}, and decoded" for size in self.batches)

    def _alone(self, prompt: Tensor) -> _Alone:
        logits, tokens = self._generated([prompt])[0]
        chances = torch.log_softmax(logits, -1).gather(1, tokens[:, None]).flatten()
        return _Alone(_row(logits), _digest(chances), self._prefilled(prompt), torch.cat((prompt, tokens)))

    def _single(self, prompt: Tensor, alone: _Alone) -> Iterator[tuple[str, Row, Row]]:
        """Comparisons of one prompt with itself."""
        for size in self.chunks:
            yield f"prompts in chunks of {size}", alone.prompt, self._prefilled(prompt, size)
        yield "prefilled and decoded", alone.generated, self._prefilled(alone.sequence[:-1], last=self.new)

    def _batch(self, alone: list[_Alone], first: int, size: int) -> Iterator[tuple[str, Row, Row]]:
        """Comparisons of the prompts of a batch with each of them alone."""
        prompts = self.prompts[first : first + len(alone)]
        for a, (logits, _) in zip(alone, self._generated(prompts), strict=True):
            yield f"generated in batches of {size}", a.generated, _row(logits)
        self._steps(alone)
        ids, mask = _padded(prompts, left=False)
        logits = self.model(ids, attention_mask=mask).logits
        for a, row, prompt in zip(alone, logits, prompts, strict=True):
            yield f"prompts in right-padded batches of {size}", a.prompt, _row(row[: len(prompt)])
        self._steps(alone)
        ids, mask = _padded([a.sequence for a in alone], left=True)
        scores = score(self.model, ids, attention_mask=mask)[:, -self.new :]
        for a, row in zip(alone, scores, strict=True):
            yield f"scored in batches of {size}, and decoded", (a.scores, b""), (_digest(row), b"")
        self._steps(alone)

    def _steps(self, prompts: Sequence[object]) -> None:
        for _ in prompts:
            self.progress.step()

    def _generated(self, prompts: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The logits of greedy tokens behind each prompt of a batch, which is padded on the left, and the tokens."""
        ids, mask = _padded(prompts, left=True)
        options = {"max_new_tokens": self.new, "min_new_tokens": self.new, "do_sample": False, "pad_token_id": 0}
        out = self.model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
        return list(zip(torch.stack(out.logits, 1), out.sequences[:, ids.shape[1] :], strict=True))

    def _prefilled(self, ids: Tensor, size: int = 0, last: int = 0) -> Row:
        """The logits of the ``last`` tokens (0: all) of a sequence, which is fed in chunks, and the likeliest next tokens."""
        past, parts = None, []
        for chunk in ids[None].split(size or len(ids), 1):
            out = self.model(chunk, past_key_values=past, use_cache=True)
            past = out.past_key_values
            parts.append(out.logits[0])
        return _row(torch.cat(parts)[-last:])
