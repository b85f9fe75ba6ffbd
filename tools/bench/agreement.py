"""``python -m tools.bench.agreement``: how often the logits of a patched model are the model's own to the byte.

Models of `bench.models` with random bfloat16 weights, patched with rounding="model", read prompts of 1, 8 and 128 random tokens.
For each length it counts prompts all of whose logits are equal to the byte, equal logits, and positions whose most likely
token is the same. For the cause it feeds each norm's own input, recorded in the unpatched model, to the model's code and to
`rms_norm`: how many results differ, in how many rows the float32 mean of squares differs, and how many results differ still
when the model's code is given onepass's mean. On a CPU sizes are smaller; nothing here depends on speed.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass.integrations.forwards import NormCall
from tools.bench.models import MODELS, build, sized

LENGTHS = (1, 8, 128)
PROMPTS = 5
_SMALL = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
_SMALL_KV = {"DeepSeek-V3": 8, "OLMo-2 7B": 8}


def prompts(model: Any, length: int, count: int, device: str) -> list[Tensor]:
    """Random token numbers, a prompt each."""
    generator = torch.Generator().manual_seed(length)
    high = model.config.vocab_size
    return [torch.randint(2, high, (1, length), generator=generator).to(device) for _ in range(count)]


def same_bytes(got: Tensor, expected: Tensor) -> Tensor:
    """Where 16-bit values have the same bits: zeros of another sign do not."""
    return got.view(torch.int16) == expected.view(torch.int16)


def agreement(model: Any, length: int, count: int, device: str) -> dict[str, Any]:
    """Prompts, logits and most likely tokens that are the unpatched model's."""
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


def own_norm(x: Tensor, weight: Tensor, how: NormCall, mean: Tensor) -> Tensor:
    """What the families' norms compute, from a given mean of squares."""
    scaled = x.float() * torch.rsqrt(mean + how.eps)
    if how.rounding == "hf":
        return weight * scaled.to(x.dtype)
    return (scaled * (weight.float() + how.weight_offset)).to(x.dtype)


def causes(model: Any, length: int, count: int, device: str) -> dict[str, Any]:
    """Each norm alone, on the inputs that it has in the unpatched model."""
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
        ours = onepass.rms_norm(
            rows, norm.weight, how.eps, weight_offset=how.weight_offset, rounding=how.rounding
        )  # fmt: skip
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
    """Measure, print as it goes, write JSON after each model if asked; exit status 1 where most likely tokens differ much."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.agreement", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument(
        "--models",
        default="",
        help="models whose name contains one of these, separated by commas; others in the file stay",
    )
    parser.add_argument(
        "--layers", type=int, default=16, help="decoder layers (default 16; DeepSeek-V3 has 3 dense ones)"
    )
    options = parser.parse_args()
    import transformers

    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "models": [],
    }
    if (
        options.models and options.json and options.json.exists()
    ):  # some models anew: the others stay as they were measured
        report["models"] = json.loads(options.json.read_text())["models"]
    fine = True
    for name in MODELS:
        if not any(part in name for part in options.models.split(",")):
            continue
        title, config, sizes = sized(name, options.layers)
        with torch.inference_mode():
            small = {} if options.device == "cuda" else {**_SMALL, "num_key_value_heads": _SMALL_KV.get(name, 2)}
            model = build(config, {**sizes, **small}, options.device)
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
            fine = fine and part["equal_argmax"] > 0.9 and part["largest_logit"] > 0
        print(
            f"{'':28} norms alone: {norms['differ']} of {norms['values']} values differ, given the mean "
            f"{norms['differ_given_the_mean']}; means differ in {norms['means_differ'] / norms['rows']:.0%} of rows",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        del model
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
