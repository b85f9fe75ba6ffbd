"""A whole run: the checks first, then every workload against its peers, one JSON document in the end."""

from __future__ import annotations

import datetime
import gc
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import onepass

from . import decode_step, gate, gemv, host, mla, qk, rows
from .peers import Peer, chosen, contenders
from .results import STREAM
from .timing import graph_times, turns
from .workload import Call, Family, Problem, Workload, parse_shapes, wanted

FAMILIES: tuple[Family, ...] = (rows.FAMILY, gemv.FAMILY, qk.FAMILY, mla.FAMILY, decode_step.FAMILY)
HOST = "host"
COLD = {"cuda": 300_000_000, "cpu": 200_000_000}
"""Inputs rotate through this many bytes where few sets suffice; an H200's L2 holds 60 MB, a server's last level about as much."""
MOST_SETS = {"cuda": 32, "cpu": 6}
LEAST_COLD_SETS = 6
LARGE = 1_000_000
"""Bytes from which eager torch on a CPU is measured apart from the others."""
PACKAGES = ("liger-kernel", "flashinfer-python", "vllm", "quack-kernels", "transformers", "llvmlite")


@dataclass(frozen=True)
class Plan:
    """What to measure: ops or families by name (all when empty), shapes, peers, where, and for how long (CPU, a row)."""

    device: str
    ops: tuple[str, ...] = ()
    shapes: str = "all"
    peers: str = "all"
    seconds: float = 4.0
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


def run(plan: Plan, watch: Watcher | None = None, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Check, measure, report. Rows of a report from ``before``, which was cut short or had other ops, are kept as they are."""
    watch = watch or Watcher()
    done = [_key(row) for row in before["rows"]] if before else []
    plan = replace(plan)
    object.__setattr__(plan, "workloads", tuple(w for w in plan.workloads if _key(_about(w)) not in done))
    checked = list(dict.fromkeys(op for workload in plan.workloads for op in workload.checked))
    if plan.host:
        measured = [op for family in FAMILIES[:-1] for op in family.ops if op != qk.SUMS]
        checked += [op for op in measured if op not in checked]
    usable = {name: peer for name, peer in plan.chosen.items() if not peer.why_not(plan.device)}
    watch.begin(len(checked) + len(plan.workloads) * (len(usable) + 2) + plan.host)
    report = describe(plan.device)
    if before is not None:
        different = [name for name in ("machine", "torch", "onepass", "device") if before.get(name) != report[name]]
        if different:
            raise ValueError(f"the results to go on with are of another {different[0]}: {before.get(different[0])}")
        report |= before
    report["peers"] = report.get("peers", {}) | {n: peer.why_not(plan.device) for n, peer in plan.chosen.items()}
    report |= {"refused": {}} | {key: report.get(key, kind()) for key, kind in (("checks", dict), ("rows", list))}
    for op in checked:
        watch.step(f"checking {op}")
        results = gate.check([op], plan.device)
        report["checks"][op] = sum(result.passed for result in results[op])
        for name, why in gate.refusals(results).items():
            report["refused"][name] = why
            watch.refused(name, why)
    with torch.inference_mode():
        _measure(plan, usable, report, watch)
    if before is not None:
        in_order(report)
    return report


def in_order(report: dict[str, Any]) -> None:
    """Put rows that were measured in several sittings into the order of one."""
    order = {_key(_about(w)): place for place, w in enumerate(Plan(report["device"]).workloads)}
    report["rows"].sort(key=lambda row: order.get(_key(row), len(order)))


def _measure(plan: Plan, usable: dict[str, Peer], report: dict[str, Any], watch: Watcher) -> None:
    if plan.device == "cuda":
        from . import gpu

        if "ceilings" not in report:
            report["ceilings"], report["clocks"] = gpu.ceilings(), {"before": gpu.clocks()}
    for workload in plan.workloads:
        if any(op in report["refused"] for op in workload.checked):
            for _ in range(len(usable) + 2):
                watch.step(f"{workload.op}: refused")
            continue
        report["rows"].append(measure(workload, plan, usable, report["peers"], watch))
        watch.row(report["rows"][-1], report)
        gc.collect()
    if plan.host:
        watch.step("host time of a call")
        report["host_us"] = host.times(plan.device, lambda op: op in report["refused"])
    if plan.device == "cuda":
        report["clocks"]["after"] = gpu.clocks()


def measure(
    workload: Workload, plan: Plan, usable: dict[str, Peer], notes: dict[str, str], watch: Watcher
) -> dict[str, Any]:
    """One row: two medians of each contender, all in one go on a GPU, in turns on a CPU."""
    device = plan.device
    sets = max(2, min(MOST_SETS[device], -(-COLD[device] // workload.bytes)))
    if workload.cold:
        sets = max(sets, LEAST_COLD_SETS)
    problems = [workload.make(device) for _ in range(sets)]
    calls: dict[str, list[Call]] = {STREAM: _streams(workload, device, sets)}
    calls |= {name: [p.ours[name] for p in problems] for name in problems[0].ours}
    where = f"{workload.op} {'x'.join(map(str, workload.shape))}"
    us: dict[str, list[float]] = {}
    others = 0.0
    if device == "cuda":
        for name, members in calls.items():
            if name in (STREAM, "onepass"):
                watch.step(f"{where}: {name}")
            us[name] = graph_times(members)
    for name, peer in usable.items():
        watch.step(f"{where}: {name}")
        made = _of_peer(name, peer, problems, where, notes)
        if not made:
            continue
        if device == "cuda":
            try:
                us[name] = graph_times(made)
            except Exception as error:
                notes[name] = f"{where}: {_first_line(error)}"
        else:
            calls[name] = made
    if device == "cpu":
        for _ in (STREAM, "onepass"):  # a step each, as on a GPU
            watch.step(f"{where}: taking turns")
        # large eager code walks through so much memory that whoever comes next finds the caches empty: it goes by itself
        eager = ("torch eager", "transformers") if workload.bytes > LARGE else ()
        alone = {name: calls.pop(name) for name in eager if name in calls}
        us, others = turns(calls, seconds=plan.seconds)
        for name, members in alone.items():
            of_peer, more = turns({name: members}, seconds=plan.seconds / 4, least=3)
            us, others = us | of_peer, max(others, more)
    return {
        **_about(workload),
        "sets": sets,
        **({"others": others} if device == "cpu" else {}),
        "us": us,
    }


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
    """A peer's calls, tried once; one that raises is left out and noted."""
    try:
        made = contenders(problems, peer)
        if made:
            made[0]()
        return made
    except Exception as error:
        notes[name] = f"{where}: {_first_line(error)}"
        return []


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def _streams(workload: Workload, device: str, sets: int) -> list[Call]:
    if device == "cuda":
        from . import gpu

        return gpu.calls(workload.stream, workload.bytes, sets)
    from . import streams

    return streams.calls(workload.stream, workload.bytes, sets)


def describe(device: str) -> dict[str, Any]:
    """The machine and the versions."""
    found: dict[str, Any] = {
        "onepass": onepass.__version__,
        "date": datetime.date.today().isoformat(),
        "device": device,
        "machine": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        import triton

        found["triton"] = triton.__version__
    else:
        found["threads"] = torch.get_num_threads()
    found["packages"] = {name: version for name in PACKAGES if (version := _version(name))}
    return found


def cpu_name() -> str:
    """As the kernel has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
