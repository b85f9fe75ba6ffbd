"""``python -m tools.sanitize``: compute-sanitizer's four tools over small cases of every kernel family.

The cases are few small ones that have every group of every op, and every word in the names of all configurations of
small cases: kinds of tiles, formats of codes and scales, layouts, dtypes, options (`chosen`). A plain run compiles
their kernels. Then processes under memcheck, racecheck, initcheck and synccheck share the cases. What counts is what
the tools print: each case has its own section of their output, and a process without the summary that a tool prints at
its end is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, prod
from pathlib import Path
from typing import Any, Final

import torch

from onepass.formats import E4M3FN
from onepass.testing.runner import Result, matches
from tests.linear import checks as linear
from tests.matrix import select
from tests.oracle.case import Check
from tests.oracle.runner import run_case, running_on
from tools import compact
from tools.evidence.chips import DEFAULT, MACHINES, Machine
from tools.evidence.proof import builds

PARTS: Final = {"racecheck": 7, "memcheck": 4, "initcheck": 3, "synccheck": 2}
"""Processes of each tool on 16 cores: 317 cases took racecheck 89 s, the others 38, 33 and 22."""
LARGEST: Final = 1 << 23
"""Elements, or products of a matrix product, up to which a case is small."""
MORE: Final[tuple[Check, ...]] = tuple(
    linear.Case("tiles", m, n, 272, weight=weight, scale=scale, gamma=torch.bfloat16)
    for m, n in ((70, 144), (300, 96))
    for weight, scale in ((E4M3FN.dtype, "row"), (E4M3FN.dtype, "block"), (torch.int8, "row"))
)
"""Products of 8-bit weights in tiles for many rows, beside those of the matrix."""
_PLACES: Final = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
_TILE: Final = re.compile(r"cube|flat|\d+x\d+x\d+(?=/)")
_BEGIN, _END = "SANITIZED-BEGIN ", "SANITIZED-END "
_REPORT: Final = re.compile(r"^========= (?=\S)(?!COMPUTE-SANITIZER|Saved |Host Frame|Device Frame|.*SUMMARY:)")
_SUMMARY: Final = re.compile(
    r"^========= (?:ERROR SUMMARY: (?P<errors>\d+) errors?|RACECHECK SUMMARY: (?P<hazards>\d+) hazards? displayed)"
)


@dataclass
class Section:
    """What one tool said about one case. ``reports`` counts errors, hazards and warnings."""

    tool: str
    op: str
    case: str
    passed: bool = False
    message: str = "not finished"
    reports: int = 0
    kinds: list[str] = field(default_factory=list)
    """The first lines of its reports, each once."""

    def add(self, line: str) -> None:
        """Count a report."""
        self.reports += 1
        kind = re.sub(r"0x[0-9a-f]+|\[.*\]", "", line.removeprefix("========= ")).strip()
        if kind not in self.kinds and len(self.kinds) < 5:
            self.kinds.append(kind)


@dataclass
class Part:
    """What one process printed: its cases, the number in the tool's own summary, and reports outside of any case."""

    tool: str
    sections: list[Section] = field(default_factory=list)
    summary: int | None = None
    elsewhere: int = 0
    seconds: float = 0.0
    tail: str = ""

    @property
    def reported(self) -> int:
        """Errors and hazards: what the summary counts, or the sections, whichever is more."""
        return max(self.summary or 0, self.elsewhere + sum(section.reports for section in self.sections))


def words(build: str) -> set[str]:
    """What a configuration's name tells about its machine code, without numbers; of products also weights, scales and tile.

    >>> sorted(words("linear weight=e4m3fn scale=block cube 16x8x128/4w/s5g8m p4"))
    ['linear #x#x#/#w/s#g#m', 'linear cube', 'linear linear', 'linear p#', 'linear scale=block', 'linear weight=e#m#fn', \
'linear weight=e4m3fn scale=block cube 16x8x128']
    """
    kernel, *_ = parts = build.split()
    found = {f"{kernel} {re.sub('[0-9]+', '#', part)}" for part in parts}
    tile = _TILE.findall(build)
    of_product = [*(part for part in parts if part.startswith(("weight=", "scale="))), *tile]
    return found | ({" ".join((kernel, *of_product))} if "weight=" in build else set())


def elements(name: str) -> int:
    """The elements, or the products of a matrix product, that a case's name tells of.

    >>> elements("large: 2048x7168 bf16"), elements("rows: 1x48x160 bf16")
    (14680064, 7680)
    """
    shapes = [[int(number) for number in shape.split("x")] for shape in re.findall(r"\d+(?:x\d+)+", name)]
    return max((prod(shape) for shape in shapes), default=0)


def small(cases: Iterable[Check]) -> dict[str, Check]:
    """Cases without large tensors, by op and name."""
    few = (case for case in cases if case.group != "large" and elements(case.name) <= LARGEST)
    return {f"{case.op} {case.name}": case for case in few}


def chosen(cases: Mapping[str, Check], builds: Mapping[str, Iterable[str]]) -> list[str]:
    """The names of few cases that together have every word of the configurations of all, and every group of every op.

    ``builds`` has the configurations of each case by name.
    """
    told = {name: {f"{case.op}: {case.group}"} for name, case in cases.items()}
    for name, found in told.items():
        found.update(word for build in builds.get(name, ()) for word in words(build))
    missing = set().union(*told.values()) if told else set()
    taken = []
    while missing:
        best = max(told, key=lambda name: (len(told[name] & missing), -elements(name)))
        taken.append(best)
        missing -= told[best]
    return taken


def configurations(cases: Mapping[str, Check], machine: Machine) -> dict[str, list[str]]:
    """The configurations of each case: those that it proved, or for the others what they would launch."""
    found: dict[str, list[str]] = {}
    for build, proof in json.loads(machine.evidence.read_text())["builds"].items():
        for name in proof["cases"]:
            found.setdefault(name, []).append(build)
    rest = {name: case for name, case in cases.items() if name not in found}
    return found | {name: [build.name for build in builds(case, machine.chip)] for name, case in rest.items()}


def read(tool: str, lines: Iterable[str]) -> Part:
    """The sections of a process's output. Each begins and ends with a line of ours; between them are the tool's reports."""
    part, section = Part(tool), None
    tail: list[str] = []
    for line in lines:
        tail = [*tail[-19:], line.rstrip()]
        if line.startswith(_BEGIN):
            section = Section(tool, **json.loads(line.removeprefix(_BEGIN)))
            part.sections.append(section)
        elif line.startswith(_END) and section is not None:
            ended = json.loads(line.removeprefix(_END))
            section.passed, section.message = ended["passed"], ended["message"]
            section = None
        elif summary := _SUMMARY.match(line):
            part.summary = (part.summary or 0) + int(summary["errors"] or summary["hazards"] or 0)
        elif _REPORT.match(line):
            if part.sections:  # a report may come after the end of its case
                part.sections[-1].add(line)
            else:
                part.elsewhere += 1
    part.tail = "\n".join(tail)
    return part


def report(parts: Sequence[Part], machine: str) -> dict[str, Any]:
    """A run as plain data: a line per case and tool, and for each tool what it found."""
    tools = {}
    for tool in PARTS:
        mine = [part for part in parts if part.tool == tool]
        sections = [section for part in mine for section in part.sections]
        tools[tool] = {
            "cases": len(sections),
            "failed": sum(not section.passed for section in sections),
            "reported": sum(part.reported for part in mine),
            "processes": len(mine),
            "without_summary": sum(part.summary is None for part in mine),
            "seconds": round(max((part.seconds for part in mine), default=0.0), 1),
        }
    return {
        "machine": machine,
        "torch": torch.__version__,
        "tools": tools,
        "sections": [asdict(section) for part in parts for section in part.sections],
        "tails": [part.tail for part in parts if part.summary is None or part.reported],
    }


def clean(found: dict[str, Any]) -> bool:
    """Whether every tool ran cases, finished, and found nothing."""
    bad = ("failed", "reported", "without_summary")
    return all(tool["cases"] and not any(tool[key] for key in bad) for tool in found["tools"].values())


def text(found: dict[str, Any]) -> str:
    """A line per case and tool, then a line per tool."""
    lines = [f"{found['machine']}, torch {found['torch']}", ""]
    for row in found["sections"]:
        state = "passed" if row["passed"] else f"FAILED ({row['message']})"
        lines.append(f"{row['tool']:10} {row['reports']} reports, {state}: {row['op']} {row['case']}")
        lines += [f"{'':10} {kind}" for kind in row["kinds"]]
    lines.append("")
    for tool, row in found["tools"].items():
        lines.append(
            f"{tool:10} {row['cases']} cases, {row['failed']} failed, {row['reported']} errors or hazards in {row['seconds']:.0f} s"
            f" ({row['processes']} processes, {row['without_summary']} without the tool's summary)"
        )
    return "\n".join([*lines, *found["tails"]]) + "\n"


def sanitizer() -> str:
    """The path of compute-sanitizer."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(_PLACES))
    if found is None:
        raise SystemExit("compute-sanitizer was not found")
    return found


def _work(names: Path, share: str, device: str) -> int:
    """Run a share of the listed cases between lines that `read` looks for."""
    mine, of = map(int, share.split("/"))
    wanted = set(json.loads(names.read_text())[mine::of])
    torch.set_num_threads(1)
    with running_on(device):
        for case in (*select(device=device), *MORE):
            if f"{case.op} {case.name}" not in wanted:
                continue
            print(_BEGIN + json.dumps({"op": case.op, "case": case.name}), flush=True)
            result = run_case(case, device)
            if device == "cuda":
                result = _waited(result)
            print(_END + json.dumps({"passed": result.passed, "message": result.message}), flush=True)
    return 0


def _waited(result: Result) -> Result:
    """The result, after the GPU has finished: what a tool reports then belongs to this case."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        message = str(error).splitlines()[0]
        return Result(result.op, result.case, result.device, False, message, result.seconds)
    return result


def _run(commands: Sequence[tuple[str, list[str]]], deadline: float, environment: dict[str, str]) -> list[Part]:
    """Run all at once. A process that runs at the deadline is ended, and what it printed counts."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, (tool, command) in enumerate(commands):
            file = Path(folder) / f"{number}.txt"
            with file.open("w") as out:
                process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
            running.append((tool, file, process))
        start, ended = time.perf_counter(), dict[int, float]()
        while len(ended) < len(running):
            for number, (_, _, process) in enumerate(running):
                if number not in ended and process.poll() is not None:
                    ended[number] = time.perf_counter() - start
                elif number not in ended and time.perf_counter() > deadline:
                    process.kill()
                    process.wait()
                    ended[number] = time.perf_counter() - start
            time.sleep(0.05)
        parts = []
        for number, (tool, file, _) in enumerate(running):
            with file.open(errors="replace") as lines:
                part = read(tool, lines)
            part.seconds = ended[number]
            parts.append(part)
    return parts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--chip", choices=tuple(MACHINES), default=DEFAULT, help="whose configurations are covered")
    add("--match", default="", help="only cases whose op and name contain this; a|b: this or that")
    add("--all", action="store_true", help="all small cases that match, not the fewest")
    add("--tool", action="append", choices=tuple(PARTS), default=[], help="default: all four")
    add("--jobs", type=int, default=16, help="processes of the plain run")
    add("--limit", type=float, default=inf, help="seconds after which what runs is ended")
    add("--list", action="store_true", help="print the cases and end; needs no GPU")
    add("--plain", action="store_true", help="only the run that compiles")
    add("--device", choices=("cpu", "cuda"), default="cuda", help=argparse.SUPPRESS)
    add("--json", type=Path, help="write the results here")
    add("--text", type=Path, help="write a line per case and tool here")
    add("--names", type=Path, help=argparse.SUPPRESS)  # a file with the cases of a process
    add("--share", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Choose, compile, run; the exit status is 1 unless every tool finished and found nothing."""
    options = _options()
    if options.share:
        return _work(options.names, options.share, options.device)
    deadline = time.perf_counter() + options.limit
    cases = {
        name: case for name, case in small((*select(device="cuda"), *MORE)).items() if matches(name, options.match)
    }
    names = list(cases) if options.all else chosen(cases, configurations(cases, MACHINES[options.chip]))
    if options.list:
        print("\n".join(names))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "names.json"
        listed.write_text(json.dumps(names))
        work = [sys.executable, "-m", "tools.sanitize", f"--device={options.device}", f"--names={listed}"]
        plain = [("plain", [*work, f"--share={share}/{options.jobs}"]) for share in range(options.jobs)]
        first = _run(plain, deadline, dict(os.environ))
        failed = [section for part in first for section in part.sections if not section.passed]
        ran = sum(len(part.sections) for part in first)
        print(
            f"plain: {ran} of {len(names)} cases, {len(failed)} failed, {max(p.seconds for p in first):.0f} s",
            flush=True,
        )
        for section in failed:
            print(f"FAILED {section.op} {section.case}: {section.message}")
        if options.plain:
            return 1 if failed or ran < len(names) else 0
        tools = {tool: parts for tool, parts in PARTS.items() if not options.tool or tool in options.tool}
        commands = [
            (tool, [sanitizer(), "--tool", tool, *work, f"--share={share}/{parts}"])
            for tool, parts in tools.items()
            for share in range(parts)
        ]
        # torch must not pool memory: a tool sees the borders of allocations only
        parts = _run(commands, deadline, {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    found = report(parts, machine)
    found["tools"] = {tool: row for tool, row in found["tools"].items() if tool in tools}
    if options.json:
        reported = [section for section in found["sections"] if section["reports"] or not section["passed"]]
        options.json.write_text(compact.dumps({**found, "sections": reported}))
    if options.text:
        options.text.write_text(text(found))
    print("\n".join(text(found).splitlines()[-len(tools) :] if clean(found) else text(found).splitlines()[-60:]))
    return 0 if clean(found) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
