"""``python -m tools.bench.agreement``: how often the logits of a patched model are bit-identical to the model's own.

The models of `tools.bench.common` with random bfloat16 weights, patched with rounding="hf", read
prompts of 1, 8 and 128 random tokens. For each length it counts the prompts whose logits are all
bit-identical, the bit-identical logits, and the positions whose most likely token is the same. To
find the cause it feeds each norm's own input, recorded in the unpatched model, to the model's code
and to `rms_norm`, and counts how many results differ, in how many rows the float32 mean of squares
differs, and how many results still differ when the model's code is given onepass's mean. Sizes are
smaller on a CPU. Nothing here depends on speed.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass.models.forwards.norm import NormRecord

from . import common

LAYERS = 16
LENGTHS = (1, 8, 128)
PROMPTS = 5
_SMALL = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
_SMALL_KV = {"DeepSeek-V3": 8, "OLMo-2 7B": 8}


def small_sizes(name: str) -> dict[str, Any]:
    """The sizes of a model that differ on a CPU."""
    return {**_SMALL, "num_key_value_heads": _SMALL_KV.get(name, 2)}


def prompts(model: Any, length: int, count: int, device: str) -> list[Tensor]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(length)
    high = model.config.vocab_size
    return [torch.randint(2, high, (1, length), generator=generator).to(device) for _ in range(count)]


def same_bytes(got: Tensor, expected: Tensor) -> Tensor:
    """Where 16-bit values have the same bits; zeros of different sign differ."""
    return got.view(torch.int16) == expected.view(torch.int16)


def agreement(model: Any, length: int, count: int, device: str) -> dict[str, Any]:
    """How many prompts, logits and most likely tokens equal those of the unpatched model."""
    equal_prompts = equal_last = equal_tokens = equal_logits = logits = 0
    largest = difference = 0.0
    for ids in prompts(model, length, count, device):
        expected = model(ids, use_cache=False).logits
        with onepass.patch(model, strict=True):
            got = model(ids, use_cache=False).logits
        same = same_bytes(got, expected)
        equal_prompts += bool(same.all())
        equal_logits += int(same.sum())
        logits += same.numel()
        likely = (got.argmax(-1) == expected.argmax(-1))[0]
        equal_tokens += int(likely.sum())
        equal_last += bool(likely[-1])
        largest = max(largest, float(expected.float().abs().max()))
        difference = max(difference, float((got.float() - expected.float()).abs().max()))
    return {
        "tokens": length,
        "prompts": count,
        "equal_prompts": equal_prompts,
        "equal_logits": equal_logits / logits,
        "equal_next_token": equal_last,
        "equal_argmax": equal_tokens / (count * length),
        "largest_logit": largest,
        "max_difference": difference,
    }


def own_norm(x: Tensor, weight: Tensor, how: NormRecord, mean: Tensor) -> Tensor:
    """What the norms of the families compute from a given mean of squares."""
    scaled = x.float() * torch.rsqrt(mean + how.eps)
    if how.rounding == "hf":
        return weight * scaled.to(x.dtype)
    return (scaled * (weight.float() + how.weight_offset)).to(x.dtype)


def causes(model: Any, length: int, count: int, device: str) -> dict[str, Any]:
    """Compare each norm alone, on its inputs in the unpatched model."""
    counts = dict.fromkeys(("values", "differ", "differ_given_the_mean", "rows", "means_differ", "own_code_differs"), 0)
    recorded: list[tuple[Any, Tensor, Tensor]] = []

    def record(module: Any, args: tuple[Tensor], output: Tensor) -> None:
        recorded.append((module, args[0].clone(), output.clone()))

    with onepass.patch(model, strict=True) as handle:
        norms = [model.get_submodule(change.where) for change in handle.replaced if change.what == "norm"]
        calls = {norm: norm._onepass for norm in norms}
    hooks = [norm.register_forward_hook(record) for norm in norms]
    for ids in prompts(model, length, count, device):
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    for norm, x, result in recorded:
        how = calls[norm]
        rows, own = (t.reshape(-1, x.shape[-1]) for t in (x, result))
        options: dict[str, Any] = {"weight_offset": how.weight_offset, "rounding": how.rounding}
        ours = onepass.rms_norm(rows, norm.weight, how.eps, **options)
        theirs = rows.float().pow(2).mean(-1, keepdim=True)
        mean = onepass.row_mean_of_squares_qk(rows, rows)[:, :1]
        again = own_norm(rows, norm.weight, how, theirs)
        counts["values"] += rows.numel()
        counts["rows"] += rows.shape[0]
        counts["differ"] += int((~same_bytes(ours, own)).sum())
        counts["means_differ"] += int((mean != theirs).sum())
        counts["own_code_differs"] += int((~same_bytes(again, own)).sum())
        counts["differ_given_the_mean"] += int((~same_bytes(own_norm(rows, norm.weight, how, mean), ours)).sum())
    return {"tokens": length, "prompts": count, **counts}


def main() -> None:
    """Measure, print progress, write JSON after each model if asked; exit status 1 if most likely tokens differ much."""
    options = common.parser("agreement", __doc__, LAYERS).parse_args()
    report: dict[str, Any] = {**common.head(options.device), "models": []}
    if options.model and options.json and options.json.exists():  # keep the models that are not measured again
        report["models"] = json.loads(options.json.read_text())["models"]
    agreed = True
    for name in common.chosen(options.model):
        title, config, sizes = common.sized(name, options.layers)
        if options.device == "cpu":
            sizes |= small_sizes(name)
        with torch.inference_mode():
            model = common.build(config, sizes, options.device)
            lengths = [agreement(model, length, PROMPTS, options.device) for length in LENGTHS]
            norms = causes(model, LENGTHS[-1], PROMPTS, options.device)
        row = {"model": title, "hidden": model.config.hidden_size, "lengths": lengths, "norms": norms}
        report["models"] = [other for other in report["models"] if other["model"] != title] + [row]
        for part in lengths:
            print(
                f"{title:28} {part['tokens']:4} tokens: {part['equal_prompts']} of {part['prompts']} prompts equal, "
                f"{part['equal_logits']:.2%} of logits, argmax {part['equal_argmax']:.2%}, "
                f"next token {part['equal_next_token']} of {part['prompts']}",
                flush=True,
            )
            agreed = agreed and part["equal_argmax"] > 0.9 and part["largest_logit"] > 0
        print(
            f"{'':28} norms alone: {norms['differ']} of {norms['values']} values differ, given the mean "
            f"{norms['differ_given_the_mean']}; means differ in {norms['means_differ'] / norms['rows']:.0%} of rows",
            flush=True,
        )
        common.write(report, options.json)
        del model
    raise SystemExit(0 if agreed else 1)


if __name__ == "__main__":
    main()
