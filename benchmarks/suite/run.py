"""A whole run: checks first, then every workload against its peers, and one JSON document at the end."""

from __future__ import annotations

import datetime
import gc
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from onepass.testing.runner import Result
from tests.matrix import select
from tests.oracle.case import Check
from tests.oracle.runner import MODULES, run_cases

from . import decode_step, gemv_norm, host, linear, mla_cache, qk_cache, qk_norm, rms_norm, rms_norm_quant
from .machine import describe
from .peers import Peer, chosen, disagreement
from .results import BEST, OURS, STREAM
from .timing import Behind, graph_times, turns
from .workload import Call, Family, Problem, Workload, parse_shapes, wanted

FAMILIES: tuple[Family, ...] = tuple(
    module.FAMILY for module in (rms_norm, rms_norm_quant, gemv_norm, linear, qk_norm, mla_cache, qk_cache, decode_step)
)
Calls = Mapping[str, list[Call]]
"""Calls on all sets of inputs, by contender."""
Lazy = Mapping[str, Callable[[], list[Call]]]
HOST = "host"
COLD = {"cuda": 300_000_000, "cpu": 200_000_000}
"""Bytes that inputs rotate through where a few sets suffice. An H200's L2 and a server's last-level cache hold about 60 MB."""
COLD_WEIGHTS = {"cuda": 420_000_000, "cpu": 200_000_000}
"""The same for weights, of which the next call must find nothing in a cache."""
MOST_SETS = {"cuda": 32, "cpu": 6}
LEAST_COLD_SETS = 6
LARGE = 1_000_000
"""Bytes from which eager torch on a CPU is measured separately."""
MOST_CASES = 10
"""Cases that an op must pass before it is measured, one per group."""


@dataclass(frozen=True)
class Plan:
    """What to measure: ops or families by name (all when empty), shapes, peers, where, and for how long (CPU, per row).

    ``behind``: on a GPU every call is also timed behind an ordinary kernel. ``limit``: seconds after which nothing new starts.
    ``match``: only the workloads whose `Workload.where` contains this expression. ``slow``: the same
    for the workloads at which slow peers are measured. By default these are the workloads marked ``slow``.
    """

    device: str
    ops: tuple[str, ...] = ()
    shapes: str = "all"
    peers: str = "all"
    seconds: float = 4.0
    behind: bool = True
    limit: float | None = None
    match: str = ""
    slow: str | None = None
    workloads: tuple[Workload, ...] = field(init=False)
    chosen: dict[str, Peer] = field(init=False)
    host: bool = field(init=False)

    def __post_init__(self) -> None:
        names = [*(family.name for family in FAMILIES), HOST, *(op for family in FAMILIES for op in family.ops)]
        unknown = [op for op in self.ops if op not in names]
        if unknown:
            raise ValueError(f"no op {unknown[0]!r}; choose from {', '.join(dict.fromkeys(names))}")
        given = parse_shapes(self.shapes)
        for pattern in (self.match, self.slow or ""):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        found = tuple(w for w in self._workloads(given) if re.search(self.match, w.where))
        object.__setattr__(self, "workloads", found)
        object.__setattr__(self, "chosen", chosen(self.peers))
        object.__setattr__(self, "host", HOST in self.ops or not (self.ops or given or self.shapes == "prefill"))
        if not self.workloads and not self.host:
            matching = f" and matches {self.match!r}" if self.match else ""
            shapes = f"none of the chosen ops supports the shape {self.shapes}{matching}"
            raise ValueError(f"{shapes}; supported: {self._forms()}")

    def peers_of(self, workload: Workload, peers: Mapping[str, Peer]) -> dict[str, Peer]:
        """Those of the peers that are measured at a workload: slow ones only at some."""
        slow = workload.slow if self.slow is None else re.search(self.slow, workload.where) is not None
        return {name: peer for name, peer in peers.items() if slow or not peer.slow}

    def _forms(self) -> str:
        """Which shapes the chosen ops have: ``rms_norm: MxN; qk: MxNqxNk``."""
        forms = []
        for family in FAMILIES:
            names = [op for op in family.ops if op in self.ops]
            if family.name in self.ops or not self.ops:
                names = [family.name]
            forms += [f"{', '.join(names)}: {family.form}"] if names else []
        return "; ".join(forms)

    def _workloads(self, given: list[tuple[int, ...]] | None) -> Iterator[Workload]:
        for family in FAMILIES:
            for op in family.ops:
                if self.ops and op not in self.ops and family.name not in self.ops:
                    continue
                usual = [shape for shape in family.shapes[op, self.device] if wanted(self.shapes, shape[0])]
                for shape in usual if given is None else given:
                    yield from family.workloads(op, shape)


class Watcher:
    """Follows a run; does nothing by itself."""

    def begin(self, total: int) -> None:
        """Before the first of ``total`` steps."""

    def step(self, what: str) -> None:
        """A step begins: the checks of an op, or a contender of a row."""

    def row(self, row: dict[str, Any], report: dict[str, Any]) -> None:
        """A row was measured; the report contains it already."""

    def refused(self, op: str, why: str) -> None:
        """An op failed a check and will not be measured."""


def cases(op: str) -> list[Check]:
    """The first case of each group, without the large ones."""
    groups: dict[str, Check] = {}
    for case in select([op]):
        groups.setdefault(case.group, case)
    return [case for name, case in groups.items() if name not in ("large", "empty")][:MOST_CASES]


def check(op: str, device: str) -> list[Result]:
    """Run the op's cases: an op that fails one is not measured."""
    return run_cases(cases(op), device)


def sets_of(workload: Workload, device: str) -> int:
    """How many sets of inputs a workload rotates through."""
    size, least = (COLD_WEIGHTS, LEAST_COLD_SETS) if workload.cold else (COLD, 2)
    enough = -(-size[device] // (workload.reads or workload.bytes))
    return workload.sets or max(least, min(MOST_SETS[device], enough))


def run(plan: Plan, watch: Watcher | None = None, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Check, measure, report. ``before`` is a report to continue: what it has measured stays."""
    return Run(plan, watch or Watcher(), before).go()


class Run:
    """One run: its report so far, and the time it has spent on each task."""

    def __init__(self, plan: Plan, watch: Watcher, before: dict[str, Any] | None) -> None:
        self.plan, self.watch, self.before = plan, watch, before
        self.start, self.stopped = time.perf_counter(), False
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.usable = {name: peer for name, peer in plan.chosen.items() if not peer.why_not(plan.device)}
        done = {_key(row): row for row in before["rows"]} if before else {}
        self.workloads = [w for w in plan.workloads if not self._complete(w, done.get(_key(_about(w))))]
        self.behind: Behind | None = None
        self.streams: dict[tuple[Any, ...], Any] = {}

    def _complete(self, workload: Workload, row: Mapping[str, Any] | None) -> bool:
        """Whether nothing of a row is missing. On a CPU contenders take turns, so a row is complete or absent."""
        if row is None or self.plan.device == "cpu":
            return row is not None
        maps = [row["us"], *([row.get("behind_us", {})] if self.plan.behind else [])]
        needed = {OURS, *self.plan.peers_of(workload, self.usable)} - set(row.get("without", ()))
        return all(needed <= set(found) for found in maps)

    def time_is_up(self) -> bool:
        """Whether the limit has passed; remembered, because then something was left out."""
        limit = self.plan.limit
        self.stopped = self.stopped or (limit is not None and time.perf_counter() - self.start > limit)
        return self.stopped

    def spend(self, name: str, work: Callable[[], Any]) -> Any:
        """Do ``work`` and add its time to what ``name`` has spent."""
        begin = time.perf_counter()
        try:
            return work()
        finally:
            self.spent[name] += time.perf_counter() - begin

    def go(self) -> dict[str, Any]:
        """Check, measure, report."""
        device = self.plan.device
        checked = list(dict.fromkeys(op for workload in self.workloads for op in workload.checked))
        if self.plan.host:
            checked += [op for op in MODULES if op != qk_norm.SUMS and op not in checked]
        steps = sum(len(self.plan.peers_of(workload, self.usable)) + 2 for workload in self.workloads)
        self.watch.begin(len(checked) + steps + self.plan.host)
        report = self.report = describe(device)
        if self.before is not None:
            self._continue(self.before)
        report["peers"] = report.get("peers", {}) | {n: peer.why_not(device) for n, peer in self.plan.chosen.items()}
        report |= {"refused": {}} | {key: report.get(key, kind()) for key, kind in (("checks", dict), ("rows", list))}
        session: dict[str, Any] = {"began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        report["sessions"] = [*report.pop("sittings", []), *report.get("sessions", []), session]
        for op in checked:
            self._check(op)
        with torch.inference_mode():
            self._measure_all()
        session |= {"seconds": {name: round(seconds, 1) for name, seconds in self.spent.items()}}
        if self.stopped:
            session["stopped"] = f"after its limit of {self.plan.limit:g} s; --resume measures the rest"
        if self.before is not None:
            in_order(report)
        return report

    def _continue(self, before: dict[str, Any]) -> None:
        report = self.report
        for name in ("machine", "torch", "onepass", "device"):
            if before.get(name) != report[name]:
                raise ValueError(f"the results to resume have a different {name}: {before.get(name)}")
        report |= {**before, "packages": {**before.get("packages", {}), **report["packages"]}}

    def _check(self, op: str) -> None:
        self.watch.step(f"checking {op}")
        results: list[Result] = self.spend("checks", lambda: check(op, self.plan.device))
        self.report["checks"][op] = sum(result.passed for result in results)
        failed = [f"{result.case}: {result.message}" for result in results if not result.passed]
        if failed:
            self.report["refused"][op] = failed[0]
            self.watch.refused(op, failed[0])

    def _measure_all(self) -> None:
        report, device = self.report, self.plan.device
        if device == "cuda":
            from . import gpu  # needs Triton

            if "ceilings" not in report:
                measured = self.spend("ceilings", lambda: (gpu.ceilings(), {"before": gpu.clocks()}))
                report["ceilings"], report["clocks"] = measured
            self.behind = Behind() if self.plan.behind else None
        rows = {_key(row): row for row in report["rows"]}
        # Peers that take long to prepare come last, so that a run that is cut short has every row.
        for slow in (False, True) if any(peer.slow for peer in self.usable.values()) else (False,):
            some = {name: peer for name, peer in self.usable.items() if peer.slow == slow}
            for workload in self.workloads:
                peers = self.plan.peers_of(workload, some)
                if slow and not peers:
                    continue
                if any(op in report["refused"] for op in workload.checked):
                    for _ in range(len(peers) + 2 * (not slow)):
                        self.watch.step(f"{workload.op}: refused")
                    continue
                if self.time_is_up():
                    break
                about = _about(workload)
                if _key(about) not in rows:
                    rows[_key(about)] = {**about, "us": {}}
                    report["rows"].append(rows[_key(about)])
                row = rows[_key(about)]
                self.measure(workload, row, peers, ours=not slow)
                self.watch.row(row, report)
                gc.collect()
            if self.plan.host and not slow and not self.time_is_up():
                self.watch.step("host time per call")
                skip = report["refused"].__contains__
                report["host_us"] = self.spend("host", partial(host.times, device, skip))
        if device == "cuda":
            report["clocks"]["after"] = gpu.clocks()

    def measure(self, workload: Workload, row: dict[str, Any], peers: Mapping[str, Peer], ours: bool) -> None:
        """Fill in two medians per contender that a row lacks, one after the other on a GPU, in turns on a CPU."""
        device = self.plan.device
        row["sets"] = sets_of(workload, device)
        problems = workload.problems(device, row["sets"])
        mine = {name: [p.ours[name] for p in problems] for name in problems[0].ours} if ours else {}
        calls = {name: partial(self._calls_of, name, peer, problems, workload.where) for name, peer in peers.items()}
        (self._on_gpu if device == "cuda" else self._on_cpu)(workload, row, mine, calls)

    def _on_cpu(self, workload: Workload, row: dict[str, Any], mine: Calls, peers: Lazy) -> None:
        from . import streams  # needs llvmlite

        calls = {STREAM: streams.calls(workload.stream, workload.reads or workload.bytes, row["sets"]), **mine}
        calls |= {name: made for name, make in peers.items() if (made := make())}
        for _ in (STREAM, OURS):  # one step each, as on a GPU
            self.watch.step(f"{workload.where}: taking turns")
        # Large eager code evicts everything from the caches, so it is measured separately.
        eager = ("torch eager", "transformers") if workload.bytes > LARGE else ()
        alone = {name: calls.pop(name) for name in eager if name in calls}
        us, others = self.spend("turns", lambda: turns(calls, seconds=self.plan.seconds))
        for name, members in alone.items():
            more, during = turns({name: members}, seconds=self.plan.seconds / 4, least=3)
            us, others = us | more, max(others, during)
        row |= {"others": others, "us": us}

    def _on_gpu(self, workload: Workload, row: dict[str, Any], mine: Calls, peers: Lazy) -> None:
        """The ceiling, our calls, the peers; each in a chain of its own and behind an ordinary kernel."""
        where, behind, us = workload.where, self.behind, row["us"]
        pairs: dict[str, list[float]] = row.setdefault("behind_us", {}) if behind is not None else {}
        if mine:
            self.watch.step(f"{where}: {BEST}")
            if BEST not in us:
                found = self.spend(BEST, partial(self._best_stream, workload, row["sets"]))
                us[BEST], row["tile"] = found[0], found[1]._asdict()
            self.watch.step(f"{where}: {OURS}")

        def missing(name: str) -> bool:
            if name in row.get("without", ()):
                return False
            return name not in us or (behind is not None and name not in pairs)

        def time_it(name: str, members: list[Call]) -> None:
            if name not in us:
                us[name] = graph_times(members)
            if behind is not None and name not in pairs:
                pairs[name] = behind.times(members)

        for name, members in mine.items():
            if missing(name):
                self.spend(OURS, partial(time_it, name, members))
        problem_of = self.report["peers"]
        for name, make in peers.items():
            if not missing(name):
                self.watch.step(f"{where}: {name}")
                continue
            earlier = problem_of.get(name)
            made = make()
            if made:
                try:
                    self.spend(name, partial(time_it, name, made))
                except Exception as error:
                    problem_of[name] = f"{where}: {_first_line(error)}"
            elif problem_of.get(name) == earlier:
                row.setdefault("without", []).append(name)  # it does not do this work
            if problem_of.get(name) != earlier:
                row.setdefault("refused", {})[name] = problem_of[name].removeprefix(f"{where}: ")

    def _best_stream(self, workload: Workload, sets: int) -> Any:
        """The ceiling. Workloads that read the same weights share it."""
        from . import gpu  # needs Triton

        key = (workload.stream, workload.reads, sets)
        if key not in self.streams or not workload.reads:
            self.streams[key] = gpu.best_stream(workload.stream, workload.reads or workload.bytes, sets)
        return self.streams[key]

    def _calls_of(self, name: str, peer: Peer, problems: list[Problem], where: str) -> list[Call]:
        """A peer's calls. One that raises, or a library whose result differs from torch's, is reported and left out."""
        self.watch.step(f"{where}: {name}")

        def attempt() -> tuple[list[Call], str]:
            made = peer.calls(problems)
            first = made[0]() if made else None
            if not made or not peer.module:
                return made, ""
            return made, disagreement(first, problems[0].composed(*problems[0].arguments))

        try:
            made, wrong = self.spend(name, attempt)
        except Exception as error:
            wrong = _first_line(error)
        if wrong:
            self.report["peers"][name] = f"{where}: {wrong}"
            return []
        return list(made)


def in_order(report: dict[str, Any]) -> None:
    """Sort rows that were measured in several sessions into the order of a single one."""
    order = {_key(_about(w)): place for place, w in enumerate(Plan(report["device"]).workloads)}
    report["rows"].sort(key=lambda row: order.get(_key(row), len(order)))


def _about(workload: Workload) -> dict[str, Any]:
    """How a row describes its workload."""
    about = {"op": workload.op, "shape": list(workload.shape), **workload.about}
    return {**about, "dtype": "bfloat16", "bytes": workload.bytes, "stream": workload.stream}


def _key(row: dict[str, Any]) -> str:
    """What makes two rows the same measurement."""
    return repr([(key, row.get(key)) for key in ("op", "shape", "with", "normed", "latent", "cache", "dtype")])


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
