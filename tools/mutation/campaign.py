"""Mutation testing: does some test fail when the library is wrong in a small way?

    python -m tools.mutation --sample 300 --seed 1 --json benchmarks/cpu/mutation.json
    python -m tools.mutation --again benchmarks/cpu/mutation.json      # its survivors only
    python -m tools.mutation --only memory.py --sample 20

The package and its tests are copied to a temporary directory and changed there, one mutant at a time. Each mutant runs, in
its own process, the tests that reach its lines, quick ones first, until one fails. Which tests reach which lines is measured
once (``--measured FILE`` keeps it). Mutants of files that affect CPU kernels have their own kernel cache.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest

from tools import compact
from tools.mutation.mutants import Mutant, mutants
from tools.mutation.plugins import IMPORT, Measure, RunChosen

ROOT: Final = Path(__file__).parents[2]
EXPLAINED: Final = Path(__file__).parent / "explained.json"
TARGETS: Final = ("ops", "cpu", "formats.py", "core")
TESTS: Final = (
    "tests/core",
    "tests/nn",
    "tests/prologues",
    "tests/testing",
    "tests/trace",
    "tests/test_kvcache.py",
    "tests/test_weights.py",
    "tests/cpu",
    "tests/gemv_norm/test_cpu.py",
    "tests/linear/test_cpu.py",
    "tests/rms_norm/test_cpu.py",
    "tests/rms_norm/test_cpu_far_outputs.py",
    "tests/all_ops/test_bad_input.py",
    "tests/gpu/test_dispatch.py",
    "tests/system/test_imports.py",
    "tests/all_ops/test_cases.py",
    "tests/gemv_norm/test_op.py",
    "tests/gemv_norm/test_compile.py",
    "tests/gemv_norm/test_refusals.py",
    "tests/linear/test_op.py",
    "tests/linear/test_torch.py",
    "tests/qk_norm/test_op.py",
    "tests/mla_cache/test_op.py",
    "tests/mla_cache/test_refusals.py",
    "tests/qk_cache/test_op.py",
    "tests/qk_cache/test_options.py",
    "tests/all_ops/test_gradients.py",
    "tests/all_ops/test_compile.py",
    "tests/tools/test_fuzz.py",
    "tests/tools/test_properties.py",
    "tests/tools/test_determinism.py",
    "tests/system/test_docs.py",
    "src/onepass/ops",
)
"""Test files that need neither a model, a GPU's compiler nor minutes."""
SWIFT: Final = "not large and not thousand and not inductor and not aot_eager"
"""Selects tests that take less than ten seconds (pytest's ``-k``)."""
COLD: Final = ("cpu/", "ops/", "formats.py")
"""Files that affect CPU kernels."""


@dataclass
class Outcome:
    """The outcome of a mutant: killed (by a test, at import, a crash, a hang) or survived (or no test reaches it)."""

    mutant: Mutant
    verdict: str
    by: str = ""
    tests: int = 0
    seconds: float = 0.0
    reason: str = ""

    @property
    def killed(self) -> bool:
        """Whether anything detected it."""
        return self.verdict not in ("survived", "not covered")


@dataclass
class Measured:
    """Which test runs which lines, and in how many seconds."""

    seconds: dict[str, float]
    lines: dict[str, dict[str, set[int]]]
    imported: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Read what `Measure` wrote."""
        known = json.loads(path.read_text())
        lines = {test: {f: set(found) for f, found in entry["lines"].items()} for test, entry in known.items()}
        return cls({test: entry["seconds"] for test, entry in known.items()}, lines, lines.pop(IMPORT))

    def order(self, mutant: Mutant, source: bytes) -> tuple[list[str], bool]:
        """Tests for a mutant, likely and quick ones first, and whether its lines are run at all."""
        wanted, static = _statement(source, mutant)
        direct = [t for t, files in self.lines.items() if files.get(mutant.file, set()) & wanted]
        at_import = static or bool(self.imported.get(mutant.file, set()) & wanted)
        beside = [t for t, files in self.lines.items() if mutant.file in files]
        others = list(self.lines) if at_import else []
        order = dict.fromkeys([*self._turns(direct), *self._turns(beside), *self._turns(others)])
        return list(order), at_import or bool(direct)

    def _turns(self, tests: Iterable[str]) -> list[str]:
        """Quick tests of many functions first: the n-th test of a function counts n times its duration."""
        functions: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda t: self.seconds[t]):
            functions[test.split("[")[0]].append(test)
        turns = [
            (turn * (self.seconds[t] + 0.05), t) for found in functions.values() for turn, t in enumerate(found, 1)
        ]
        return [test for _, test in sorted(turns)]


def _statement(source: bytes, mutant: Mutant) -> tuple[set[int], bool]:
    """The lines of the smallest statement around a mutant (of its head, if it has a body), and whether it runs at import."""
    best, static = range(mutant.line, mutant.last + 1), True
    smallest = math.inf
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= mutant.line <= (node.end_lineno or 0):
            static = False
        if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            end = (
                (body[0].lineno - 1 if body[0].lineno > node.lineno else node.lineno) if body else node.end_lineno or 0
            )
            if mutant.line <= end and end - node.lineno < smallest:
                smallest, best = end - node.lineno, range(node.lineno, end + 1)
    return set(best), static


class Tree:
    """A copy of what tests need, in which one file is changed at a time."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "tree"
        self.scratch = directory
        # cached kernels are named by their source, so mutants of other files cannot corrupt them
        self.warm = directory / "kernels"
        self.root.mkdir()
        for path in ROOT.iterdir():
            if path.name in ("src", "tests"):
                shutil.copytree(path, self.root / path.name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            elif path.name not in (".git", ".venv"):
                (self.root / path.name).symlink_to(path)
        self.package = self.root / "src" / "onepass"
        self.sources = {file: (self.package / file).read_bytes() for file in self.files()}

    def files(self) -> list[str]:
        """The files to be mutated: no GPU kernels, since no GPU runs the tests."""
        found = [self.package / t for t in TARGETS]
        files = [f for t in found for f in (sorted(t.rglob("*.py")) if t.is_dir() else [t])]
        return [str(f.relative_to(self.package)) for f in files if not f.name.startswith("gpu")]

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Apply one mutant; remove bytecode of the module, which is only matched by size and time."""
        path = self.package / mutant.file
        path.write_bytes(mutant.apply(self.sources[mutant.file]))
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()
        try:
            yield
        finally:
            path.write_bytes(self.sources[mutant.file])

    def enter(self, kernels: Path, *, write_bytecode: bool) -> None:
        """Let this process run tests in the copy and write nothing elsewhere."""
        home = self.scratch / "home"
        home.mkdir(exist_ok=True)
        os.chdir(self.root)
        sys.dont_write_bytecode = not write_bytecode
        sys.path.insert(0, str(self.root / "src"))
        folders = {"HOME": home, "TMPDIR": home, "XDG_CACHE_HOME": home / "cache", "ONEPASS_TEST_CACHE": kernels}
        folders["PYTHONPATH"] = self.root / "src"
        os.environ |= {name: str(folder) for name, folder in folders.items()} | {"PYTHONDONTWRITEBYTECODE": "1"}
        tempfile.tempdir = None


def _pytest(arguments: list[str], plugin: object, log: Path) -> int:
    options = ["-n0", "-p", "no:cacheprovider", "-q", "-m", "not slow", "-k", SWIFT]
    with log.open("w") as stream, redirect_stdout(stream), redirect_stderr(stream):
        return int(pytest.main([*options, *arguments], plugins=[plugin]))


def _child(work: Any) -> tuple[int, str]:
    """Run ``work(stream)`` in a forked process; its status and output."""
    end, begin = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.close(end)
        status = 70
        try:
            with os.fdopen(begin, "w") as stream:
                status = work(stream)
        finally:
            os._exit(status)
    os.close(begin)
    with os.fdopen(end) as stream:
        output = stream.read()
    _, status = os.waitpid(pid, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it started and left running
    return status, output


def _changed(path: Path) -> float:
    return max(file.stat().st_mtime for file in (path, *path.glob("*.py")))


def measure(tree: Tree, kept: Path) -> None:
    """Run the unchanged tests once: all, or those in files newer than an earlier measurement."""
    known: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    since = kept.stat().st_mtime if known else 0.0
    files = [file for file in TESTS if _changed(ROOT / file) > since]
    if not files:
        return

    def work(stream: Any) -> int:
        tree.enter(tree.warm, write_bytecode=True)
        plugin = Measure(tree.package, tree.files())
        status = _pytest(files, plugin, tree.scratch / "measure.log")
        stream.write(json.dumps(plugin.known()))
        return status

    status, output = _child(work)
    print((tree.scratch / "measure.log").read_text()[-600:], flush=True)
    if status:
        sys.exit("the tests fail without any mutant")
    old = {test: entry for test, entry in known.items() if not test.startswith((*files, IMPORT))}
    new = json.loads(output)
    for file, lines in known.get(IMPORT, {"lines": {}})["lines"].items():
        new[IMPORT]["lines"][file] = sorted({*lines, *new[IMPORT]["lines"].get(file, ())})
    kept.write_text(json.dumps(old | new))


def evaluate(tree: Tree, mutant: Mutant, measured: Measured, budget: float) -> Outcome:
    """Run a mutant's tests until one fails, in ``budget`` seconds of them."""
    order, covered = measured.order(mutant, tree.sources[mutant.file])
    if not covered:
        return Outcome(mutant, "not covered")
    expected = 0.0
    chosen: list[str] = []
    for test in order:
        expected += measured.seconds[test] + 0.002
        if chosen and expected > budget:
            break
        chosen.append(test)
    cold = tree.scratch / "cold"
    kernels = cold if mutant.file.startswith(COLD) else tree.warm

    def work(stream: Any) -> int:
        tree.enter(kernels, write_bytecode=False)
        plugin = RunChosen(chosen, measured.seconds, 2 * budget, stream)
        files = list(dict.fromkeys(test.split("::")[0] for test in chosen))
        return _pytest(files, plugin, tree.scratch / "mutant.log")

    begun = time.monotonic()
    with tree.changed(mutant):
        status, output = _child(work)
    shutil.rmtree(cold, ignore_errors=True)
    seconds = round(time.monotonic() - begun, 2)
    events = [json.loads(line) for line in output.splitlines() if line.endswith("}")]
    hung = "Timeout" in (tree.scratch / "mutant.log").read_text()
    verdict, by = decide(status, events, hung)
    return Outcome(mutant, verdict, by, sum("ran" in event for event in events), seconds)


def decide(status: int, events: list[dict[str, str]], hung: bool) -> tuple[str, str]:
    """The verdict and the test that reached it, from the process's status and output.

    A run that runs out of time ends with an error from pytest but decides nothing: the mutant survives.
    """
    failed = next((event["failed"] for event in events if "failed" in event), "")
    running = next((event["running"] for event in reversed(events) if "running" in event), "")
    if failed:
        return "killed", failed
    if status == 0 or any("stopped" in event for event in events):
        return "survived", ""
    if not running:
        return "killed at import", ""
    return "killed by a hang" if hung else "killed by a crash", running


def draw(tree: Tree, number: int, seed: int, only: str) -> tuple[list[Mutant], dict[str, int]]:
    """A sample proportional to the mutants per file, at least two each; and the number of mutants per file."""
    chance = random.Random(seed)
    everything = {file: mutants(file, tree.sources[file]) for file in tree.sources if only in file}
    counts = {file: len(found) for file, found in everything.items() if found}
    total = sum(counts.values())
    drawn: list[Mutant] = []
    for file, count in counts.items():
        share = min(count, max(2, round(number * count / total)))
        source = tree.sources[file]
        drawn += islice((m for m in chance.sample(everything[file], count) if m.valid(source)), share)
    chance.shuffle(drawn)
    return drawn, counts


def summary(outcomes: list[Outcome], counts: dict[str, int]) -> dict[str, Any]:
    """Scores per file and in total, without explained survivors, with a 95 % Wilson interval."""
    rows: dict[str, Any] = {}
    for file in [*counts, "all"]:
        sampled = [o for o in outcomes if file in (o.mutant.file, "all")]
        explained = sum(bool(o.reason) and not o.killed for o in sampled)
        killed, of = sum(o.killed for o in sampled), len(sampled) - explained
        rows[file] = {
            "mutants": sum(counts.values()) if file == "all" else counts[file],
            "sampled": len(sampled),
            "killed": killed,
            "explained": explained,
            "score": round(killed / of, 4) if of else None,
            "interval": _interval(killed, of),
        }
    return rows


def _interval(killed: int, of: int) -> list[float]:
    if not of:
        return [0.0, 1.0]
    z, p = 1.96, killed / of
    middle, width = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return [round((middle + sign * width) / (1 + z * z / of), 4) for sign in (-1, 1)]


def survivors(tree: Tree, earlier: dict[str, Any]) -> list[Mutant]:
    """The current mutants that match the survivors of an earlier result; those in files that are gone are skipped."""
    found = []
    for old in earlier["survivors"]:
        if old["file"] in tree.sources:
            same = [m for m in mutants(old["file"], tree.sources[old["file"]]) if m.key == old["mutant"]]
            found += sorted(same, key=lambda m: abs(m.line - old["line"]))[:1]
    return found


def as_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome in a result file."""
    mutant = outcome.mutant
    fields = {
        "mutant": mutant.key,
        "was": mutant.before,
        "file": mutant.file,
        "line": mutant.line,
        "operator": mutant.operator,
    }
    rest = {"verdict": outcome.verdict, "by": outcome.by, "tests": outcome.tests, "reason": outcome.reason}
    return fields | {name: value for name, value in rest.items() if value}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=300, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=25.0, help="seconds of tests per mutant")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this many minutes")
    parser.add_argument(
        "--skip", type=int, default=0, help="leave out the first mutants drawn, to continue an earlier run"
    )
    parser.add_argument("--only", default="", help="only files whose name contains this")
    parser.add_argument("--goal", type=float, default=0.85)
    parser.add_argument("--measured", type=Path, help="keep the lines that tests run in this file")
    parser.add_argument("--again", type=Path, help="run only the survivors of this result again")
    parser.add_argument("--json", type=Path, help="write the result")
    return parser.parse_args()


def main() -> None:
    """Sample, run, report; fails below ``--goal``."""
    arguments = _arguments()
    begun = time.monotonic()
    for module in ("torch", "llvmlite.binding", "llvmlite.ir", "hypothesis", "numpy"):  # once, for every process below
        import_module(module)
    explained = {each["mutant"]: each["why"] for each in json.loads(EXPLAINED.read_text())}
    with tempfile.TemporaryDirectory(prefix="onepass-mutation-") as directory:
        tree = Tree(Path(directory))
        kept = arguments.measured or Path(directory) / "measured.json"
        tree.warm = kept.with_suffix(".kernels").absolute()
        measure(tree, kept)
        measured = Measured.read(kept)
        print(f"{len(measured.lines)} tests, measured in {time.monotonic() - begun:.0f} s", flush=True)
        for file in ("core/memory.py", "ops/rms_norm/cpu_kernel.py"):
            nothing = Mutant(file, 1, 1, "", 0, 0, 0, "none", "", "")
            if evaluate(tree, nothing, measured, arguments.budget).killed:
                sys.exit(f"a test fails without a change: {(tree.scratch / 'mutant.log').read_text()[-2000:]}")
        drawn, counts = draw(tree, arguments.sample, arguments.seed, arguments.only)
        drawn = drawn[arguments.skip :]
        if arguments.again:
            drawn = survivors(tree, json.loads(arguments.again.read_text()))
        outcomes: list[Outcome] = []
        for number, mutant in enumerate(drawn, 1):
            if time.monotonic() - begun > 60 * arguments.minutes:
                break
            outcome = evaluate(tree, mutant, measured, arguments.budget)
            outcome.reason = "" if outcome.killed else explained.get(mutant.key, "")
            outcomes.append(outcome)
            print(
                f"{number}/{len(drawn)} {outcome.verdict} in {outcome.seconds} s and {outcome.tests} tests: {str(mutant)[:240]}; "
                f"{outcome.by or outcome.reason}",
                flush=True,
            )
    rows = summary(outcomes, counts)
    for name, row in rows.items():
        print(f"{name:28} {row}")
    if arguments.json:
        result = {
            "seed": arguments.seed,
            "sample": len(outcomes),
            "budget_s": arguments.budget,
            "seconds": round(time.monotonic() - begun),
            "scores": rows,
            "survivors": [as_json(o) for o in outcomes if not o.killed],
            "killed": [as_json(o) for o in outcomes if o.killed],
        }
        arguments.json.write_text(compact.dumps(result))
    score = rows["all"]["score"]
    if score is None or score < arguments.goal:
        sys.exit(f"the score is below {arguments.goal}")
