"""``onepass invariance``: which logits and tokens of a model depend on more than their own sequence."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..models import patch
from .common import Commands, UsageError, add_device, at_least, table

DTYPES: Final = ("bfloat16", "float16", "float32")
SHORTEST: Final = 3
Row: TypeAlias = tuple[Tensor, Tensor]
"""The logits of tokens, and the tokens that are chosen."""


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
        "--batches", type=number, nargs="+", default=[2, 8, 16], metavar="N", help="sizes of batches; default 2 8 16"
    )
    option("--chunks", type=number, nargs="+", default=[7, 16], metavar="N", help="sizes of chunks; default 7 16")
    option("--dtype", choices=DTYPES, default=DTYPES[0], help="dtype of the model; default bfloat16")
    add_device(parser)
    parser.set_defaults(run=invariance, parser=parser)


def invariance(options: argparse.Namespace) -> int:
    """Count equal logits and tokens, print a table; 1 if the patched model's logits differ."""
    model = _model(options.model, getattr(torch, options.dtype)).to(options.device).eval()
    generator = torch.Generator().manual_seed(1)
    words = model.get_input_embeddings().num_embeddings
    lengths = torch.randint(SHORTEST, options.longest + 1, (options.prompts,), generator=generator).tolist()
    prompts = [torch.randint(1, words, (n,), generator=generator).to(options.device) for n in lengths]
    count = len(prompts)
    print(
        f"{type(model).__name__}, {options.dtype}, {options.device}: {count} prompts, {min(lengths)} to {max(lengths)} tokens"
    )
    with torch.inference_mode():
        before = _counts(model, prompts, options)
        with patch(model, decode=True, batch_invariant=True):
            after = _counts(model, prompts, options)
    rows: list[tuple[str, ...]] = [(f"equal, of {count}", "unpatched: logits", "tokens", "patched: logits", "tokens")]
    rows += [(name, *map(str, (*before[name], *after[name]))) for name in before]
    print(table(rows, right=(1, 2, 3, 4)))
    return int(any(equal < count for equal, _ in after.values()))


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


def _counts(model: Any, prompts: list[Tensor], options: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """How many prompts have the logits and tokens that they have alone, by what is compared."""
    new: int = options.new
    alone = [_decoded(model, [prompt], new)[0] for prompt in prompts]
    whole = [_prefilled(model, prompt, len(prompt)) for prompt in prompts]
    found = {}
    for size in options.batches:
        batches = [_decoded(model, prompts[i : i + size], new) for i in range(0, len(prompts), size)]
        found[f"in batches of {size}"] = _equal(alone, [row for batch in batches for row in batch])
    for size in options.chunks:
        found[f"prompts in chunks of {size}"] = _equal(whole, [_prefilled(model, prompt, size) for prompt in prompts])
    sequences = [torch.cat((prompt, tokens[:-1])) for prompt, (_, tokens) in zip(prompts, alone, strict=True)]
    again = [_prefilled(model, tokens, len(tokens)) for tokens in sequences]
    found["prefilled and decoded"] = _equal(alone, [(logits[-new:], tokens[-new:]) for logits, tokens in again])
    return found


def _equal(rows: list[Row], others: list[Row]) -> tuple[int, int]:
    same: Callable[[Tensor, Tensor], bool] = torch.equal
    pairs = list(zip(rows, others, strict=True))
    return sum(same(a[0], b[0]) for a, b in pairs), sum(same(a[1], b[1]) for a, b in pairs)


def _decoded(model: Any, prompts: list[Tensor], new: int) -> list[Row]:
    """Greedy tokens behind each prompt of a batch, which is padded on the left, and their logits."""
    width = max(map(len, prompts))
    ids = torch.stack([pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([pad(torch.ones_like(prompt), (width - len(prompt), 0)) for prompt in prompts])
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
    return list(zip(torch.stack(out.logits, 1), out.sequences[:, width:], strict=True))


def _prefilled(model: Any, prompt: Tensor, size: int) -> Row:
    """The logits of all tokens of a prompt, in chunks, and the likeliest next tokens."""
    past, parts = None, []
    for chunk in prompt[None].split(size, 1):
        out = model(chunk, past_key_values=past, use_cache=True)
        past = out.past_key_values
        parts.append(out.logits[0])
    logits = torch.cat(parts)
    return logits, logits.argmax(-1)
