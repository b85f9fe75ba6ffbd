"""``python -m tools.bench.models``: one decode step of patched transformers models, captured in a CUDA graph and replayed.

Models have the layer sizes of well-known ones, few layers and random weights, in bfloat16 with a
static cache. The step is captured in the ways that ``--contender`` names (default: all but the slow ones). The
baseline is "unpatched": transformers' own code, not compiled, in a CUDA graph. Replays are compared with
the unpatched model's eager step, then timed in turns, twice. ``--generate`` also times `model.generate`, with the
forms it names or with all. What fails is recorded with the first line of its error. Results are
written after each row, and merged into the rows that the file has.

On a CPU (``--device cpu``) the model is a Llama of 16 layers, 1024 wide, and steps are called. ``--tiny``
uses small sizes and only traces for torch.compile; its times mean nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from . import common, generating
from .steps import agrees, measure
from .ways import BASELINE, NAMES, WAYS, Models, chosen

BATCHES = {"cuda": (1, 4, 8, 16), "cpu": (1, 4)}
CONTENDERS = {"cuda": None, "cpu": ("compile", "decode", "fp8")}
LAYERS = 8
REPLAYS = 15
THREADS = 2
"""Threads of a CPU."""
_TINY = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256}


def merged(report: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """The report, with the rows that a file has. Its machine must be the same."""
    if path is None or not path.exists():
        return report
    old = json.loads(path.read_text())
    if old["machine"] != report["machine"]:
        raise SystemExit(f"{path} was measured on {old['machine']}, this is {report['machine']}")
    return {**old, **report, "rows": old["rows"], "generated": old.get("generated", [])}


def add(rows: list[dict[str, Any]], new: dict[str, Any]) -> None:
    """Merge a row into the row of the same model and batch, if there is one. What was measured again is replaced."""
    for old in rows:
        if (old["model"], old["batch"]) == (new["model"], new["batch"]):
            again = {*new["failed"], *new.get("us", ()), *new.get("us_per_token", ())}
            for key, value in new.items():
                if isinstance(value, dict):
                    others = {name: entry for name, entry in old.get(key, {}).items() if name not in again}
                    old[key] = {**others, **value}
                else:
                    old[key] = value
            return
    rows.append(new)


def _times(row: dict[str, Any], us: dict[str, float]) -> str:
    plain = us.get(BASELINE, float("nan"))
    words = [f"  {name:40} {time:9.1f}  {plain / time:5.2f}x" for name, time in us.items()]
    words += [f"  {name:40} failed: {error}" for name, error in row["failed"].items()]
    return "\n".join(words)


def shown(row: dict[str, Any]) -> str:
    """The table of one row: microseconds, the speed-up over the baseline, and the share of the floor."""
    floor = row.get("floor") or {}
    title = f"{row['model']}, batch {row['batch']}: one decode step, us"
    title += f"; floor {floor['']:.0f}, with fp8 weights {floor['fp8']:.0f}" if floor else ""
    return f"{title}\n{_times(row, row['us'])}"


def shown_generated(row: dict[str, Any]) -> str:
    """The table of `generate`: microseconds per token."""
    title = f"{row['model']}, batch {row['batch']}: generate(), us per token, {row['new_tokens']} tokens"
    return f"{title}\n{_times(row, row['us_per_token'])}"


def main() -> None:
    """Measure every model, print tables, write JSON if asked; exit status 1 if a patched step disagrees."""
    parser = common.parser("models", __doc__, LAYERS)
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes (default: 1 4 8 16; CPU: 1 4)")
    parser.add_argument("--contender", nargs="+", choices=tuple(WAYS), help="ways to run a step")
    names = tuple(generating.FORMS)
    parser.add_argument("--generate", nargs="*", choices=names, help="also time generate(): these forms, or all")
    parser.add_argument("--no-steps", action="store_true", help="do not time decode steps")
    parser.add_argument("--replays", type=int, default=REPLAYS, help=f"samples per median (default {REPLAYS})")
    parser.add_argument("--tiny", action="store_true", help="small sizes, nothing compiled: a test of this program")
    options = parser.parse_args()
    device = options.device
    if device == "cpu":
        torch.set_num_threads(THREADS)
    where = "in a CUDA graph" if device == "cuda" else f"called, on {THREADS} threads"
    baseline = f"transformers' own code, not compiled, {where}"
    head = {**common.head(device), "baseline": baseline, "rows": [], "generated": []}
    report = merged(head, options.json)
    repeats, new_tokens = (1, 2) if options.tiny else (3, generating.NEW_TOKENS)
    agreed, tables = True, []
    with torch.no_grad():
        for name in common.chosen(options.model, "cuda" if options.tiny else device):
            title, config, sizes = common.sized(name, 2 if options.tiny else options.layers)
            made = common.build(config, {**sizes, **_TINY} if options.tiny else sizes, device)
            models = Models(made)
            ways = chosen(
                options.contender or CONTENDERS[device], hasattr(getattr(made, "config", None), "kv_lora_rank")
            )
            for batch in options.batch or BATCHES[device]:
                if not options.no_steps:
                    row = {"model": title, **measure(models, batch, device, options.replays, ways, options.tiny)}
                    agreed = agrees(row, NAMES) and agreed
                    tables.append(shown(row))
                    print(tables[-1], flush=True)
                    add(report["rows"], row)
                    common.write(report, options.json)
                if options.generate is not None:
                    found = generating.generating(models, batch, device, repeats, new_tokens, options.generate)
                    row = {"model": title, **found}
                    tables.append(shown_generated(row))
                    print(tables[-1], flush=True)
                    add(report["generated"], row)
                    common.write(report, options.json)
            del made, models
            torch._dynamo.reset()
    print("\n" + "\n\n".join(tables))
    raise SystemExit(0 if agreed else 1)


if __name__ == "__main__":
    main()
