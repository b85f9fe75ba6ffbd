"""``python -m tools.bench.models``: one decode step of patched transformers models, captured in a CUDA graph and replayed.

Large models have the layer sizes of well-known ones and few layers, small models all of theirs; weights are random, in
bfloat16, with a static cache. The step is captured in the ways that ``--contender`` names (default: all but the slow ones). The
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import common, generating, parallel
from .limits import deadline_after, over, until
from .steps import LENGTH, Size, agrees, floor_of, measure, prepared
from .ways import BASELINE, NAMES, WAYS, Models, Way, chosen, first_line

BATCHES = {"cuda": (1, 4, 8, 16), "cpu": (1, 4)}
LONG_CONTEXT, LONG_BATCHES = 4096, (1, 8)
"""The second context of whole models, and its batch sizes."""
CONTENDERS = {"cuda": None, "cpu": ("compile", "decode", "fp8")}
LAYERS = 8
REPLAYS = 15
THREADS = 2
"""Threads of a CPU."""


def merged(report: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """The report, with the rows that a file has. Its machine must be the same."""
    if path is None or not path.exists():
        return report
    old = json.loads(path.read_text())
    if old["machine"] != report["machine"]:
        raise SystemExit(f"{path} was measured on {old['machine']}, this is {report['machine']}")
    return {**old, **report, "rows": old["rows"], "generated": old.get("generated", [])}


def key_of(row: dict[str, Any]) -> tuple[str, Size]:
    """What a row is about."""
    return row["model"], Size(row["batch"], row.get("context", LENGTH))


def add(rows: list[dict[str, Any]], new: dict[str, Any]) -> None:
    """Merge a row into the row of the same model and size, if there is one. What was measured again is replaced."""
    for old in rows:
        if key_of(old) == key_of(new):
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
    floors = {name: floor_of(row, name) for name in us}
    shares = {name: f"  {floor / us[name]:4.0%} of the floor" for name, floor in floors.items() if floor}
    words = [f"  {name:40} {time:9.1f}  {plain / time:5.2f}x{shares.get(name, '')}" for name, time in us.items()]
    words += [f"  {name:40} failed: {error}" for name, error in row["failed"].items()]
    return "\n".join(words)


def shown(row: dict[str, Any]) -> str:
    """The table of one row: microseconds, the speed-up over the baseline, and the share of the floor."""
    title = f"{row['model']}, batch {row['batch']}, context {key_of(row)[1].context}: one decode step, us"
    floors = [floor for name in (BASELINE, WAYS["fp8"].name) if (floor := floor_of(row, name))]
    title += "; floor {:.0f}, with fp8 weights {:.0f}".format(*floors) if floors else ""
    return f"{title}\n{_times(row, row['us'])}"


def shown_generated(row: dict[str, Any]) -> str:
    """The table of `generate`: microseconds per token, and the tokens per second of all sequences."""
    title = f"{row['model']}, batch {row['batch']}: generate(), us per token, {row['new_tokens']} tokens"
    rates = (f"{name} {row['batch'] * 1e6 / us:.1f}" for name, us in row["us_per_token"].items())
    return f"{title}\n{_times(row, row['us_per_token'])}\n  tokens/s: {', '.join(rates)}"


def sizes_of(name: str, batches: Sequence[int], contexts: Sequence[int] | None) -> list[Size]:
    """The sizes to measure: of whole models also some with a long context, unless ``contexts`` are named."""
    long = (LONG_CONTEXT,) if name in common.WHOLE_MODELS else ()
    sizes = [Size(batch, context) for context in contexts or (LENGTH, *long) for batch in batches]
    return [size for size in sizes if contexts or size.context == LENGTH or size.batch in LONG_BATCHES]


def missing(ways: tuple[Way, ...], rows: list[dict[str, Any]], title: str, size: Size) -> tuple[Way, ...]:
    """The ways that a report has no time for, and the baseline if there are any."""
    known = [row["us"] for row in rows if key_of(row) == (title, size)]
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
        cuda = self.device == "cuda" or options.tiny
        usual = (*common.MODELS, *common.WHOLE_MODELS) if cuda else tuple(common.CPU_MODELS)
        self.names = common.chosen(options.model, usual, common.MORE_MODELS if cuda else common.WHOLE_MODELS)
        self.batches = tuple(options.batch or BATCHES[self.device])
        self.tables: list[str] = []
        self.fine = True

    def sized(self, name: str) -> tuple[str, str, dict[str, Any]]:
        """A model's title, configuration and sizes."""
        title, config, sizes = common.sized(name, 2 if self.options.tiny else self.options.layers)
        return title, config, common.tiny(sizes) if self.options.tiny else sizes

    def ways(self, title: str, size: Size, latent: bool) -> tuple[Way, ...]:
        """The ways to measure, with ``--resume`` those that the file does not have."""
        ways = chosen(self.options.contender or CONTENDERS[self.device], latent)
        return missing(ways, self.report["rows"], title, size) if self.options.resume else ways

    def keep(self, row: dict[str, Any], part: str = "rows") -> None:
        """Print a row and write it."""
        if part == "rows":
            self.fine = agrees(row, NAMES) and self.fine
        self.tables.append(shown(row) if part == "rows" else shown_generated(row))
        print(self.tables[-1], flush=True)
        add(self.report[part], row)
        common.write(self.report, self.options.json)

    def model(self, name: str) -> None:
        """Measure one model in every size. An error ends this model, and the others continue."""
        title, config, sizes = self.sized(name)
        latent = "kv_lora_rank" in sizes
        measured = [] if self.options.no_steps else sizes_of(name, self.batches, self.options.context)
        wanted = {size: ways for size in measured if (ways := self.ways(title, size, latent))}
        if not wanted and self.options.generate is None:
            return
        try:
            with until(self.deadline):
                models = Models(common.build(config, sizes, self.device))
            if self.options.turn is not None:
                self._in_turn(title, models, wanted)
                return
            for size, ways in wanted.items():
                if not over(self.deadline):
                    settings = (self.device, self.options.replays, ways, self.options.tiny, self.deadline)
                    self.keep({"model": title, **measure(models, size, *settings)})
            for batch in self.batches if self.options.generate is not None else ():
                self._generate(title, models, batch)
        except Exception as error:
            self.fine = False
            print(f"{title}: failed: {first_line(error)}", flush=True)

    def _generate(self, title: str, models: Models, batch: int) -> None:
        if not over(self.deadline):
            repeats, tokens = (1, 2) if self.options.tiny else (3, generating.NEW_TOKENS)
            asked = (repeats, tokens, self.options.generate, self.deadline)
            self.keep({"model": title, **generating.generating(models, batch, self.device, *asked)}, "generated")

    def _in_turn(self, title: str, models: Models, wanted: dict[Size, tuple[Way, ...]]) -> None:
        """Prepare all rows, then wait for the turn to measure them."""
        ways = tuple(way for way in WAYS.values() if any(way in some for some in wanted.values()))
        rows = prepared(models, list(wanted), self.device, ways, self.options.tiny, self.deadline)
        parallel.wait_for_turn(self.options.turn)
        for row in rows:
            self.keep({"model": title, **row.measured(self.options.replays)})

    def workers(self) -> None:
        """Let other processes prepare the rows, and each measure in its turn."""
        jobs = parallel.jobs(self.names, self.batches, self.options.workers)
        line = [f"--device={self.device}", f"--layers={self.options.layers}", f"--replays={self.options.replays}"]
        line += ["--tiny"] if self.options.tiny else []
        line += ["--contender", *self.options.contender] if self.options.contender else []
        line += ["--context", *map(str, self.options.context)] if self.options.context else []
        if self.options.resume and self.options.json and self.options.json.exists():
            line += ["--resume"]
        for job, found in parallel.run(jobs, self.options.workers, line, self.deadline, self.options.json):
            title = self.sized(job.model)[0]
            for row in found["rows"]:
                if row["model"] == title and row["batch"] in job.batches:
                    self.keep(row)
        measured = {key_of(row) for row in self.report["rows"] if row["us"]}
        every = {name: sizes_of(name, self.batches, self.options.context) for name in self.names}
        keys = ((self.sized(name)[0], size) for name, sizes in every.items() for size in sizes)
        self.fine = self.fine and measured.issuperset(keys)


def main() -> None:
    """Measure every model, print tables, write JSON if asked; exit status 1 if a patched step failed or disagrees."""
    parser = common.parser("models", __doc__, LAYERS)
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes (default: 1 4 8 16; CPU: 1 4)")
    parser.add_argument(
        "--context", type=int, nargs="+", help="entries of caches (default: 128; whole models: also 4096)"
    )
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
