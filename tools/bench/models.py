"""``python -m tools.bench.models``: one decode step of patched transformers models, captured in a CUDA graph and replayed.

Models have the layer sizes of well-known ones, few layers and random weights, in bfloat16 with a
static cache. The step is captured in the ways that ``--contender`` names (default: all but the slow ones). The
baseline is "unpatched": transformers' own code, not compiled, in a CUDA graph. Replays are compared with
the unpatched model's eager step, then timed in turns, twice. ``--generate`` also times `model.generate`, with the
forms it names or with all. What fails is recorded with the first line of its error. Results are
written after each row, and merged into the rows that the file has. With ``--resume`` only what the file
does not have is measured.

``--limit`` ends the program after so many seconds with what it has. torch.compile takes most of the time, and one core.
With ``--workers`` several processes build, patch, compile and capture rows at the same time. Then each measures its rows
while all others wait. Kernels that max-autotune chooses are chosen while other processes use the GPU now and then.

On a CPU (``--device cpu``) the model is a Llama of 16 layers, 1024 wide, and steps are called. ``--tiny``
uses small sizes and only traces for torch.compile; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from . import common, generating, parallel
from .limits import deadline_after, over, until
from .steps import agrees, measure, prepared
from .ways import BASELINE, NAMES, WAYS, Models, Way, chosen, first_line

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
    """The table of `generate`: microseconds per token, and the tokens per second of all sequences."""
    title = f"{row['model']}, batch {row['batch']}: generate(), us per token, {row['new_tokens']} tokens"
    rates = (f"{name} {row['batch'] * 1e6 / us:.1f}" for name, us in row["us_per_token"].items())
    return f"{title}\n{_times(row, row['us_per_token'])}\n  tokens/s: {', '.join(rates)}"


def missing(ways: tuple[Way, ...], rows: list[dict[str, Any]], title: str, batch: int) -> tuple[Way, ...]:
    """The ways that a report has no time for, and the baseline if there are any."""
    known = [row["us"] for row in rows if (row["model"], row["batch"]) == (title, batch)]
    left = [way for way in ways if not any(way.name in us for us in known)]
    return tuple(way for way in ways if left and (way in left or way.name == BASELINE))


class Run:
    """One call of the program: what it was asked for, and what it found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, options.device
        self.deadline = deadline_after(options.limit)
        where = "in a CUDA graph" if self.device == "cuda" else f"called, on {THREADS} threads"
        baseline = f"transformers' own code, not compiled, {where}"
        head = {**common.head(self.device), "baseline": baseline, "rows": [], "generated": []}
        self.report = merged(head, options.json)
        self.names = common.chosen(options.model, "cuda" if options.tiny else self.device)
        self.batches = tuple(options.batch or BATCHES[self.device])
        self.tables: list[str] = []
        self.fine = True

    def sized(self, name: str) -> tuple[str, str, dict[str, Any]]:
        """A model's title, configuration and sizes."""
        title, config, sizes = common.sized(name, 2 if self.options.tiny else self.options.layers)
        return title, config, {**sizes, **_TINY} if self.options.tiny else sizes

    def ways(self, title: str, batch: int, latent: bool) -> tuple[Way, ...]:
        """The ways to measure, with ``--resume`` those that the file does not have."""
        ways = chosen(self.options.contender or CONTENDERS[self.device], latent)
        return missing(ways, self.report["rows"], title, batch) if self.options.resume else ways

    def keep(self, row: dict[str, Any], part: str = "rows") -> None:
        """Print a row and write it."""
        if part == "rows":
            self.fine = agrees(row, NAMES) and self.fine
        self.tables.append(shown(row) if part == "rows" else shown_generated(row))
        print(self.tables[-1], flush=True)
        add(self.report[part], row)
        common.write(self.report, self.options.json)

    def model(self, name: str) -> None:
        """Measure one model with every batch size. An error ends this model, and the others continue."""
        title, config, sizes = self.sized(name)
        latent = "kv_lora_rank" in sizes
        wanted = {batch: self.ways(title, batch, latent) for batch in self.batches}
        steps = () if self.options.no_steps else [batch for batch in self.batches if wanted[batch]]
        if not steps and self.options.generate is None:
            return
        try:
            with until(self.deadline):
                models = Models(common.build(config, sizes, self.device))
            if self.options.turn is not None:
                self._in_turn(title, models, list(steps), wanted)
                return
            for batch in self.batches:
                self._batch(title, models, batch, wanted[batch] if batch in steps else ())
        except Exception as error:
            self.fine = False
            print(f"{title}: failed: {first_line(error)}", flush=True)

    def _batch(self, title: str, models: Models, batch: int, ways: tuple[Way, ...]) -> None:
        options = self.options
        if ways and not over(self.deadline):
            row = measure(models, batch, self.device, options.replays, ways, options.tiny, self.deadline)
            self.keep({"model": title, **row})
        if options.generate is not None and not over(self.deadline):
            repeats, tokens = (1, 2) if options.tiny else (3, generating.NEW_TOKENS)
            asked = (repeats, tokens, options.generate, self.deadline)
            self.keep({"model": title, **generating.generating(models, batch, self.device, *asked)}, "generated")

    def _in_turn(self, title: str, models: Models, batches: list[int], wanted: dict[int, tuple[Way, ...]]) -> None:
        """Prepare all rows, then wait for the turn to measure them."""
        ways = tuple(way for way in WAYS.values() if any(way in wanted[batch] for batch in batches))
        rows = prepared(models, batches, self.device, ways, self.options.tiny, self.deadline)
        parallel.wait_for_turn(self.options.turn)
        for row in rows:
            self.keep({"model": title, **row.measured(self.options.replays)})

    def workers(self) -> None:
        """Let other processes prepare the rows, and each measure in its turn."""
        jobs = parallel.jobs(self.names, self.batches, self.options.workers)
        line = [f"--device={self.device}", f"--layers={self.options.layers}", f"--replays={self.options.replays}"]
        line += ["--tiny"] if self.options.tiny else []
        line += ["--contender", *self.options.contender] if self.options.contender else []
        if self.options.resume and self.options.json and self.options.json.exists():
            line += ["--resume"]
        for job, found in parallel.run(jobs, self.options.workers, line, self.deadline, self.options.json):
            title = self.sized(job.model)[0]
            for row in found["rows"]:
                if row["model"] == title and row["batch"] in job.batches:
                    self.keep(row)
        measured = {(row["model"], row["batch"]) for row in self.report["rows"] if row["us"]}
        titles = {self.sized(name)[0] for name in self.names}
        self.fine = self.fine and all((title, batch) in measured for title in titles for batch in self.batches)


def main() -> None:
    """Measure every model, print tables, write JSON if asked; exit status 1 if a patched step failed or disagrees."""
    parser = common.parser("models", __doc__, LAYERS)
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes (default: 1 4 8 16; CPU: 1 4)")
    parser.add_argument("--contender", nargs="+", choices=tuple(WAYS), help="ways to run a step")
    names = tuple(generating.FORMS)
    parser.add_argument("--generate", nargs="*", choices=names, help="also time generate(): these forms, or all")
    parser.add_argument("--no-steps", action="store_true", help="do not time decode steps")
    parser.add_argument("--replays", type=int, default=REPLAYS, help=f"samples per median (default {REPLAYS})")
    parser.add_argument("--limit", type=float, help="start nothing after this many seconds, and interrupt what runs")
    parser.add_argument("--resume", action="store_true", help="measure only what the --json file does not have")
    parser.add_argument("--workers", type=int, default=0, help="prepare steps in this many processes (default: here)")
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="small sizes, nothing compiled: a test of this program")
    options = parser.parse_args()
    if options.workers and options.generate is not None:
        parser.error("--workers measures steps only; generate() needs a quiet host")
    if options.device == "cpu":
        torch.set_num_threads(THREADS)
    run = Run(options)
    with torch.no_grad():
        if options.workers:
            run.workers()
        else:
            for name in run.names:
                if not over(run.deadline):
                    run.model(name)
                    torch._dynamo.reset()
    print("\n" + "\n\n".join(run.tables))
    raise SystemExit(0 if run.fine else 1)


if __name__ == "__main__":
    main()
