"""``python -m tools.soak``: patched models and single ops decode for minutes while requests come and go.

With torch and a backend installed the ops run; with transformers the models too.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from tools import compact
from tools.soak.batch import Churn
from tools.soak.layer import Layer
from tools.soak.watch import MIB, QUARTERS, Watch

WARM: Final = 0.1
"""Fraction of a run after which readings and times count."""
CHECKED: Final = 8
"""On average one step in this many is checked fully; some checks apply to every step."""
SLOWER: Final = 1.5
"""How much longer the median step of the last quarter may take than that of the first."""
MIN_STEPS: Final = 200
"""Steps per quarter that this comparison needs."""
MOST_FAULTS: Final = 20
PACKAGES: Final = ("torch", "triton", "transformers", "llvmlite")


class Engine(Protocol):
    """A model, or a layer of ops, that decodes."""

    name: str
    churn: Churn
    tokens: int
    compared: int
    """Steps of ops, or logits of a model's tokens, that were compared with the expected values."""

    def step(self, check: bool) -> list[str]:
        """Run one step; what was found wrong."""


def engines(seed: int, device: str, models: bool = True) -> list[Engine]:
    """The ops, and the models where transformers is installed."""
    found: list[Engine] = [Layer(seed, device)]
    if models:
        from tools.soak.models import FAMILIES, Model

        found += [Model(family, seed, device) for family in FAMILIES]
    return found


class Soak:
    """One run: every engine takes a step in turn until ``progress()`` is 1."""

    def __init__(self, running: list[Engine], device: str, seed: int, watch: Watch | None = None) -> None:
        self.engines, self.device = running, device
        self.watch = watch or Watch(device)
        self.steps = {e.name: 0 for e in running}
        self.faults: list[str] = []
        self._random = torch.Generator().manual_seed(seed)

    def run(
        self, progress: Callable[[], float], every: float = 5.0, say: Callable[[str], None] = lambda line: None
    ) -> None:
        """Decode; a reading every ``every`` seconds. Ends early after `MOST_FAULTS` faults or an error."""
        begin = shown = time.perf_counter()
        with torch.inference_mode():
            while (done := progress()) < 1 and len(self.faults) < MOST_FAULTS:
                quarter = None if done < WARM else int((done - WARM) / (1 - WARM) * QUARTERS)
                for engine in self.engines:
                    if not self._step(engine, quarter, say):
                        return
                now = time.perf_counter()
                if now - shown >= every:
                    shown = now
                    reading = self.watch.look(quarter)
                    say(
                        f"{now - begin:6.0f} s: {sum(self.steps.values())} steps, {sum(e.compared for e in self.engines)} compared, "
                        f"{len(self.faults)} faults, {reading.resident / MIB:.0f} MiB resident"
                        + (f", {reading.allocated / MIB:.1f} MiB on the GPU" if self.device == "cuda" else "")
                    )
        for fault in [*self.watch.faults(), *self._slower()]:
            self._note(fault, say)

    def _step(self, engine: Engine, quarter: int | None, say: Callable[[str], None]) -> bool:
        """One step; False if it raised an error, after which the engine's state is unknown."""
        check = bool(torch.randint(CHECKED, (1,), generator=self._random) == 0)
        begin = self._clock()
        try:
            wrong = engine.step(check)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self._note(
                f"{engine.name}, step {self.steps[engine.name]}: {type(error).__name__}: {error} ({place.name})", say
            )
            return False
        if not check:
            self.watch.time(engine.name, quarter, self._clock() - begin)
        self.steps[engine.name] += 1
        for fault in wrong:
            self._note(f"{engine.name}, step {self.steps[engine.name] - 1}: {fault}", say)
        return True

    def _clock(self) -> float:
        """On a CPU the process time, which other load does not affect; on a GPU the time until the step is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def _slower(self) -> list[str]:
        found = []
        for name, medians in self.watch.medians().items():
            enough = all(len(q) >= MIN_STEPS for q in self.watch.times[name])
            if enough and medians[-1] > SLOWER * medians[0]:
                found.append(f"{name}: steps took {medians[-1] / medians[0]:.2f} times as long in the last quarter")
        return found

    def _note(self, fault: str, say: Callable[[str], None]) -> None:
        self.faults.append(fault)
        say(f"FAULT {fault}")

    def report(self) -> dict[str, Any]:
        """As plain data."""
        churns = [e.churn for e in self.engines]
        return {
            "steps": self.steps,
            "compared": {e.name: e.compared for e in self.engines},
            "tokens": sum(e.tokens for e in self.engines),
            "requests": {
                what: sum(getattr(c, what) for c in churns) for what in ("begun", "served", "cancelled", "evicted")
            },
            "steps_at_fixed_addresses": sum(getattr(e, "replayed", 0) for e in self.engines),
            "largest_difference_of_logits": {e.name: e.worst for e in self.engines if hasattr(e, "worst")},
            "faults": self.faults,
            "start": self.watch.start._asdict(),
            "end": self.watch.last._asdict(),
            "growth_after_warm_up": self.watch.growth(),
            "median_step_us_by_quarter": {
                name: [round(1e6 * s, 1) for s in medians] for name, medians in self.watch.medians().items()
            },
        }


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions() -> dict[str, str]:
    installed = {name: metadata.version(name) for name in PACKAGES if util.find_spec(name) is not None}
    return {"python": platform.python_version(), **installed}


def _table(report: dict[str, Any]) -> str:
    lines = [f"{'':12} {'steps':>8} {'compared':>8}   median step by quarter, us"]
    for name, steps in report["steps"].items():
        times = "  ".join(f"{us:8.0f}" for us in report["median_step_us_by_quarter"].get(name, []))
        lines.append(f"{name:12} {steps:8} {report['compared'][name]:8}   {times}")
    lines.append(f"{'':12} {'start':>12} {'end':>12} {'growth after warm-up':>22}")
    for name, start in report["start"].items():
        grown = report["growth_after_warm_up"].get(name, float("nan"))
        lines.append(f"{name:12} {start:12} {report['end'][name]:12} {grown:22.0f}")
    requests = ", ".join(f"{n} {what}" for what, n in report["requests"].items())
    lines.append(f"{report['tokens']} tokens; requests: {requests}; {len(report['faults'])} faults")
    return "\n".join(lines)


def main() -> int:
    """Run; the exit status is 1 if there was a fault."""
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--steps", type=int, help="steps of each loop, instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between readings")
    parser.add_argument("--json", type=Path, help="write the report here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = util.find_spec("transformers") is not None
    if not models:
        print("transformers is not installed: only the ops run")
    soak = Soak(engines(options.seed, options.device, models), options.device, options.seed)
    begin = time.perf_counter()
    seconds: float = 60 * options.minutes
    steps: int | None = options.steps

    def say(line: str) -> None:
        print(line, flush=True)

    def progress() -> float:
        if steps is not None:
            return min(soak.steps.values()) / max(1, steps)
        return (time.perf_counter() - begin) / seconds

    soak.run(progress, options.every, say)
    report = {
        "device": options.device,
        "machine": _machine(options.device),
        "versions": _versions(),
        "date": datetime.date.today().isoformat(),
        "seed": options.seed,
        "minutes": round((time.perf_counter() - begin) / 60, 2),
        "threads": options.threads,
        "nice": os.nice(0),
        "models": models,
        **soak.report(),
    }
    if options.json:
        options.json.write_text(compact.dumps(report))
    say(_table(report))
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
