"""A whole run: the checks first, then every workload against its peers, one JSON document in the end."""

from __future__ import annotations

import datetime
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from . import decode_step, gate, gemv_norm, host, mla_cache
from . import qk_norm as qk
from . import rms_norm as rows
from .machine import describe
from .peers import Peer, chosen, contenders, disagreement
from .results import BEST, STREAM
from .timing import Behind, graph_times, turns
from .workload import Call, Family, Problem, Workload, parse_shapes, wanted

FAMILIES: tuple[Family, ...] = (rows.FAMILY, gemv_norm.FAMILY, qk.FAMILY, mla_cache.FAMILY, decode_step.FAMILY)
HOST = "host"
COLD = {"cuda": 300_000_000, "cpu": 200_000_000}
"""Inputs rotate through this many bytes where few sets suffice; an H200's L2 holds 60 MB, a server's last level about as much."""
MOST_SETS = {"cuda": 32, "cpu": 6}
LEAST_COLD_SETS = 6
LARGE = 1_000_000
"""Bytes from which eager torch on a CPU is measured apart from the others."""


@dataclass(frozen=True)
class Plan:
    """What to measure: ops or families by name (all when empty), shapes, peers, where, and for how long (CPU, per row).

    ``behind``: on a GPU every call is also timed behind an ordinary kernel. ``limit``: seconds after which nothing new begins.
    """

    device: str
    ops: tuple[str, ...] = ()
    shapes: str = "all"
    peers: str = "all"
    seconds: float = 4.0
    behind: bool = True
    limit: float | None = None
    workloads: tuple[Workload, ...] = field(init=False)
    chosen: dict[str, Peer] = field(init=False)
    host: bool = field(init=False)

    def __post_init__(self) -> None:
        names = [*(family.name for family in FAMILIES), HOST, *(op for family in FAMILIES for op in family.ops)]
        unknown = [op for op in self.ops if op not in names]
        if unknown:
            raise ValueError(f"no op {unknown[0]!r}; there are {', '.join(dict.fromkeys(names))}")
        given = parse_shapes(self.shapes)
        object.__setattr__(self, "workloads", tuple(_workloads(self.ops, self.shapes, given, self.device)))
        object.__setattr__(self, "chosen", chosen(self.peers))
        object.__setattr__(self, "host", HOST in self.ops or not (self.ops or given or self.shapes == "prefill"))
        if not self.workloads and not self.host:
            raise ValueError(f"no op that was asked for takes the shape {self.shapes}")


def _workloads(ops: Sequence[str], which: str, given: list[tuple[int, ...]] | None, device: str) -> Iterator[Workload]:
    for family in FAMILIES:
        for op in family.ops:
            if ops and op not in ops and family.name not in ops:
                continue
            if given is not None:
                shapes = given
            else:
                shapes = [shape for shape in family.shapes[op, device] if wanted(which, shape[0])]
            for shape in shapes:
                yield from family.workloads(op, shape)


class Watcher:
    """Is told how a run goes; does nothing by itself."""

    def begin(self, total: int) -> None:
        """Before anything: how many steps there will be."""

    def step(self, what: str) -> None:
        """A step begins: the checks of an op, or a contender of a row."""

    def row(self, row: dict[str, Any], report: dict[str, Any]) -> None:
        """A row is done; the report holds it already."""

    def refused(self, op: str, why: str) -> None:
        """An op failed a check and will not be measured."""


class _Clock:
    """How long a run has taken, and on whom."""

    def __init__(self, limit: float | None) -> None:
        self.start, self.limit = time.perf_counter(), limit
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.stopped = False

    def time_is_up(self) -> bool:
        """Whether the limit has passed; remembered, because then something was left out."""
        self.stopped = self.stopped or (self.limit is not None and time.perf_counter() - self.start > self.limit)
        return self.stopped

    def spend(self, name: str, work: Callable[[], Any]) -> Any:
        """Do something on somebody's account."""
        begin = time.perf_counter()
        try:
            return work()
        finally:
            self.spent[name] += time.perf_counter() - begin


def run(plan: Plan, watch: Watcher | None = None, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Check, measure, report. What a report from ``before``, which was cut short or had other ops, has measured is kept."""
    watch = watch or Watcher()
    clock = _Clock(plan.limit)
    usable = {name: peer for name, peer in plan.chosen.items() if not peer.why_not(plan.device)}
    done = {_key(row): row for row in before["rows"]} if before else {}
    left = tuple(w for w in plan.workloads if not _complete(done.get(_key(_about(w))), plan, usable))
    plan = replace(plan)
    object.__setattr__(plan, "workloads", left)
    checked = list(dict.fromkeys(op for workload in plan.workloads for op in workload.checked))
    if plan.host:
        measured = [op for family in FAMILIES[:-1] for op in family.ops if op != qk.SUMS]
        checked += [op for op in measured if op not in checked]
    watch.begin(len(checked) + len(plan.workloads) * (len(usable) + 2) + plan.host)
    report = describe(plan.device)
    if before is not None:
        different = [name for name in ("machine", "torch", "onepass", "device") if before.get(name) != report[name]]
        if different:
            raise ValueError(f"the results to go on with are of another {different[0]}: {before.get(different[0])}")
        report |= {**before, "packages": {**before.get("packages", {}), **report["packages"]}}
    report["peers"] = report.get("peers", {}) | {n: peer.why_not(plan.device) for n, peer in plan.chosen.items()}
    report |= {"refused": {}} | {key: report.get(key, kind()) for key, kind in (("checks", dict), ("rows", list))}
    sitting: dict[str, Any] = {"began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    report["sittings"] = [*report.get("sittings", []), sitting]
    for op in checked:
        watch.step(f"checking {op}")
        results = clock.spend("checks", partial(gate.check, [op], plan.device))
        report["checks"][op] = sum(result.passed for result in results[op])
        for name, why in gate.refusals(results).items():
            report["refused"][name] = why
            watch.refused(name, why)
    with torch.inference_mode():
        _measure(plan, usable, report, watch, clock)
    sitting |= {"seconds": {name: round(seconds, 1) for name, seconds in clock.spent.items()}}
    if clock.stopped:
        sitting["stopped"] = f"after its limit of {plan.limit:g} s; --resume measures the rest"
    if before is not None:
        in_order(report)
    return report


def _complete(row: Mapping[str, Any] | None, plan: Plan, usable: Mapping[str, Peer]) -> bool:
    """Whether a row has nothing left to measure. On a CPU contenders take turns, so a row is whole or not there."""
    if row is None or plan.device == "cpu":
        return row is not None
    maps = [row["us"], *([row.get("behind_us", {})] if plan.behind else [])]
    wanted = {"onepass", *usable} - set(row.get("without", ()))
    return all(wanted <= set(found) for found in maps)


def in_order(report: dict[str, Any]) -> None:
    """Put rows that were measured in several sittings into the order of one."""
    order = {_key(_about(w)): place for place, w in enumerate(Plan(report["device"]).workloads)}
    report["rows"].sort(key=lambda row: order.get(_key(row), len(order)))


def _measure(plan: Plan, usable: dict[str, Peer], report: dict[str, Any], watch: Watcher, clock: _Clock) -> None:
    behind = None
    if plan.device == "cuda":
        from . import gpu

        if "ceilings" not in report:
            report["ceilings"], report["clocks"] = clock.spend(
                "ceilings", lambda: (gpu.ceilings(), {"before": gpu.clocks()})
            )
        behind = Behind() if plan.behind else None
    found = {_key(row): row for row in report["rows"]}
    # those who take long to get ready come last, so that a run that is cut short has every row
    for slow in (False, True) if any(peer.slow for peer in usable.values()) else (False,):
        now = {name: peer for name, peer in usable.items() if peer.slow == slow}
        for workload in plan.workloads:
            if any(op in report["refused"] for op in workload.checked):
                for _ in range(len(now) + 2 * (not slow)):
                    watch.step(f"{workload.op}: refused")
                continue
            if clock.time_is_up():
                break
            row = found.get(_key(_about(workload)))
            if row is None:
                row = found[_key(_about(workload))] = {**_about(workload), "us": {}}
                report["rows"].append(row)
            measure(workload, plan, now, row, report["peers"], watch, clock, behind, ours=not slow)
            watch.row(row, report)
            gc.collect()
        if plan.host and not slow and not clock.time_is_up():
            watch.step("host time of a call")
            report["host_us"] = clock.spend("host", partial(host.times, plan.device, report["refused"].__contains__))
    if plan.device == "cuda":
        report["clocks"]["after"] = gpu.clocks()


def measure(
    workload: Workload,
    plan: Plan,
    usable: Mapping[str, Peer],
    row: dict[str, Any],
    notes: dict[str, str],
    watch: Watcher,
    clock: _Clock,
    behind: Behind | None = None,
    ours: bool = True,
) -> None:
    """Fill in a row: two medians of each contender that it has not got, one after the other on a GPU, in turns on a CPU."""
    device = plan.device
    sets = max(2, min(MOST_SETS[device], -(-COLD[device] // workload.bytes)))
    if workload.cold:
        sets = max(sets, LEAST_COLD_SETS)
    row["sets"] = sets
    problems = [workload.make(device) for _ in range(sets)]
    where = f"{workload.op} {'x'.join(map(str, workload.shape))}"
    mine = {name: [p.ours[name] for p in problems] for name in problems[0].ours} if ours else {}
    if device == "cuda":
        _on_gpu(workload, row, mine, {n: (p, problems) for n, p in usable.items()}, notes, watch, clock, behind, where)
        return
    calls: dict[str, list[Call]] = {STREAM: _streams(workload, sets), **mine}
    for name, peer in usable.items():
        watch.step(f"{where}: {name}")
        made = clock.spend(name, partial(_of_peer, name, peer, problems, where, notes))
        if made:
            calls[name] = made
    for _ in (STREAM, "onepass"):  # a step each, as on a GPU
        watch.step(f"{where}: taking turns")
    # large eager code walks through so much memory that whoever comes next finds the caches empty: it goes by itself
    eager = ("torch eager", "transformers") if workload.bytes > LARGE else ()
    alone = {name: calls.pop(name) for name in eager if name in calls}
    us, others = clock.spend("turns", lambda: turns(calls, seconds=plan.seconds))
    for name, members in alone.items():
        of_peer, more = turns({name: members}, seconds=plan.seconds / 4, least=3)
        us, others = us | of_peer, max(others, more)
    row |= {"others": others, "us": us}


def _on_gpu(
    workload: Workload,
    row: dict[str, Any],
    mine: Mapping[str, list[Call]],
    peers: Mapping[str, tuple[Peer, list[Problem]]],
    notes: dict[str, str],
    watch: Watcher,
    clock: _Clock,
    behind: Behind | None,
    where: str,
) -> None:
    """The ceiling, our calls, the peers; each in a chain of its own and behind an ordinary kernel."""
    from . import gpu

    pairs: dict[str, list[float]] = row.setdefault("behind_us", {}) if behind is not None else {}
    if mine:
        watch.step(f"{where}: {BEST}")
        if BEST not in row["us"]:
            found = clock.spend(BEST, lambda: gpu.best_stream(workload.stream, workload.bytes, row["sets"]))
            row["us"][BEST], row["tile"] = found[0], found[1]._asdict()
        watch.step(f"{where}: onepass")

    def missing(name: str) -> bool:
        if name in row.get("without", ()):
            return False
        return name not in row["us"] or (behind is not None and name not in pairs)

    def time_it(name: str, members: list[Call]) -> None:
        if name not in row["us"]:
            row["us"][name] = graph_times(members)
        if behind is not None and name not in pairs:
            pairs[name] = behind.times(members)

    for name, members in mine.items():
        if missing(name):
            clock.spend("onepass", partial(time_it, name, members))
    for name, (peer, problems) in peers.items():
        watch.step(f"{where}: {name}")
        if not missing(name):
            continue
        said = notes.get(name)
        made = clock.spend(name, partial(_of_peer, name, peer, problems, where, notes))
        if not made:
            if notes.get(name) == said:
                row.setdefault("without", []).append(name)  # not its work
            continue
        try:
            clock.spend(name, partial(time_it, name, made))
        except Exception as error:
            notes[name] = f"{where}: {_first_line(error)}"


def _about(workload: Workload) -> dict[str, Any]:
    """What a row says of its workload."""
    return {
        "op": workload.op,
        "shape": list(workload.shape),
        **workload.about,
        "dtype": "bfloat16",
        "bytes": workload.bytes,
        "stream": workload.stream,
    }


def _key(row: dict[str, Any]) -> str:
    """What makes two rows the same measurement."""
    return repr([(key, row.get(key)) for key in ("op", "shape", "with", "normed", "latent", "cache", "dtype")])


def _of_peer(name: str, peer: Peer, problems: list[Problem], where: str, notes: dict[str, str]) -> list[Call]:
    """A peer's calls, tried once; one that raises, or a library whose result is another than torch's, is left out and noted."""
    try:
        made = contenders(problems, peer)
        if made:
            first = made[0]()
            wrong = disagreement(first, problems[0].composed(*problems[0].arguments)) if peer.module else ""
            if wrong:
                notes[name] = f"{where}: {wrong}"
                return []
        return made
    except Exception as error:
        notes[name] = f"{where}: {_first_line(error)}"
        return []


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def _streams(workload: Workload, sets: int) -> list[Call]:
    from . import streams

    return streams.calls(workload.stream, workload.bytes, sets)
