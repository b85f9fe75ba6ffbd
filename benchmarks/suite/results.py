"""Result files, read and combined: one run or several, of this format or of earlier ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import gemv_norm, linear, qk_cache, qk_norm, rms_norm
from .document import document
from .peers import LINEAR, PEERS
from .timing import BUSY

OURS = "onepass"
STREAM = "memory stream"
"""The ceiling on a CPU: it moves as many bytes and takes turns with the rest."""
BEST = "best copy"
"""The ceiling on a GPU: the fastest of several copies (or reads) of the same size, with programmatic launch."""
_OLD_STREAMS = ("copy of as many bytes", "read of the weights", "stream", "copy")
"""Names of the memory stream in older files."""
CEILINGS = (STREAM, BEST)
WAYS = (
    rms_norm.IN_PLACE,
    rms_norm.SEPARATE,
    rms_norm.TWO,
    linear.THEN,
    gemv_norm.SEPARATE,
    qk_norm.HALVES,
    qk_norm.SEPARATE,
    qk_cache.SEPARATE,
)
"""Other ways to use onepass; not peers."""
COMPILED = ("torch.compile", "torch.compile max")
EAGER = "torch eager"
_READING = ("gemv_and_partial_norm", "row_mean_of_squares_qk", "row_sum_of_squares_qk")
SMALL = 4_000_000
"""Bytes up to which a low share of the ceiling is attributed to latency."""
HUGE = 1 << 27
"""Bytes from which the rate of a 2 GiB copy is a ceiling too: far more than the L2 holds, so that only the rate matters."""


@dataclass(frozen=True)
class Row:
    """An op at a shape. ``us`` has one or two medians per contender; the smaller one is its time."""

    op: str
    words: str
    m: int
    columns: str
    bytes: int
    us: Mapping[str, tuple[float, ...]]
    floor_us: float
    """The ceiling's time: the best copy or stream of this size. Without one, and for huge rows, the bytes at a large copy's rate."""
    run: int = 0
    behind_us: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """The same contenders behind an ordinary kernel, where that was measured."""
    others: float = 0.0
    """The share of all cores that other processes used meanwhile."""
    shape: tuple[int, ...] = ()
    kind: str = ""
    """What distinguishes rows of one op and shape."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why a peer has no time here, if it raised."""

    @property
    def ours(self) -> float:
        """Microseconds of onepass."""
        return min(self.us[OURS])

    @property
    def share(self) -> float:
        """The share of the ceiling that onepass reaches."""
        return self.floor_us / self.ours

    @property
    def share_words(self) -> str:
        """``93%``; ``latency`` where a call is too small for its bytes to matter and no copy of its size was measured."""
        known = BEST in self.us or self.share > 0.3 or self.bytes > SMALL
        return f"{self.share:.0%}" if known else "latency"

    @property
    def peers(self) -> dict[str, float]:
        """Microseconds of all contenders but onepass and the ceilings."""
        return {name: min(us) for name, us in self.us.items() if name not in (OURS, *CEILINGS, *WAYS)}

    @property
    def behind_kernel(self) -> Row:
        """The same row with the times behind an ordinary kernel. Only where they were measured."""
        return replace(self, us=self.behind_us, behind_us={})

    def best(self, names: Sequence[str]) -> float | None:
        """The fastest of these, if one was measured."""
        return min((min(self.us[name]) for name in names if name in self.us), default=None)

    @property
    def key(self) -> tuple[str, str]:
        """What makes rows of two files the same."""
        return self.op, self.words


@dataclass(frozen=True)
class Results:
    """All rows of one or several runs; ``runs`` are the documents without their rows."""

    runs: tuple[dict[str, Any], ...]
    rows: tuple[Row, ...]
    host: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return str(self.runs[0]["device"])

    @property
    def machine(self) -> str:
        """The machine's name."""
        return str(self.runs[0]["machine"])

    @property
    def ops(self) -> list[str]:
        """All ops, in the order in which they were measured."""
        return list(dict.fromkeys(row.op for row in self.rows))

    @property
    def contenders(self) -> list[str]:
        """All contenders that were measured: onepass, the peers in their order, other ways to use onepass, the ceilings."""
        seen = {name for row in self.rows for name in row.us}
        return [name for name in (OURS, *PEERS, *WAYS, *CEILINGS) if name in seen]

    @property
    def quiet(self) -> bool:
        """Whether other processes left the cores alone; if not, nothing is claimed from the times."""
        return self.disturbance <= BUSY

    @property
    def disturbance(self) -> float:
        """The largest share of all cores that other processes used during a row."""
        return max((row.others for row in self.rows), default=0.0)

    @property
    def measured(self) -> list[str]:
        """The peers with a time in some row."""
        return [name for name in self.contenders if name in PEERS]

    @property
    def absent(self) -> dict[str, str]:
        """The peers without a time in any row, and why; "" if the run did not try. Without peers that have none of these ops."""
        reasons = {name: why for run in self.runs for name, why in (run.get("peers") or {}).items()}
        ops = {op.split(",")[0] for op in self.ops}
        could = [n for n, peer in PEERS.items() if not peer.ops or ops & {op.split(",")[0] for op in peer.ops}]
        return {n: reasons.get(n, "") for n in could if n not in self.measured}

    @property
    def peer_words(self) -> str:
        """Which peers a claim is about: ``Peers: torch.compile, torch eager. Not measured: vLLM (not installed).``"""
        reasons: dict[str, list[str]] = {}
        for name, why in self.absent.items():
            reasons.setdefault(why, []).append(name)
        absent = "; ".join(", ".join(names) + (f" ({why})" if why else "") for why, names in reasons.items())
        without = f" Not measured: {absent}." if absent else ""
        return f"Peers: {', '.join(self.measured) or 'none'}.{without}"

    def of(self, op: str) -> list[Row]:
        """The rows of an op."""
        return [row for row in self.rows if row.op == op]

    def series(self, op: str) -> list[list[Row]]:
        """The rows of an op by columns, each series sorted by number of rows."""
        groups: dict[str, list[Row]] = {}
        for row in self.of(op):
            groups.setdefault(row.columns, []).append(row)
        return [sorted(rows, key=lambda row: row.m) for rows in groups.values()]

    def main(self, op: str) -> list[Row]:
        """The longest series of an op."""
        return max(self.series(op), key=len)

    def speedup(self, names: Sequence[str]) -> float | None:
        """The geometric mean, over rows, of how many times longer the fastest of these takes."""
        logs = [math.log(best / row.ours) for row in self.rows if (best := row.best(names)) is not None]
        return math.exp(sum(logs) / len(logs)) if logs else None

    @property
    def behind(self) -> list[tuple[Row, str, float]]:
        """Where a peer is faster: the row, the fastest peer and its time."""
        found = []
        for row in self.rows:
            name, us = min(row.peers.items(), key=lambda item: item[1], default=("", math.inf))
            if us < row.ours:
                found.append((row, name, us))
        return found

    @property
    def behind_kernel(self) -> Results:
        """The rows that were also measured behind an ordinary kernel, with those times."""
        return replace(self, rows=tuple(row.behind_kernel for row in self.rows if OURS in row.behind_us))

    @property
    def has_best(self) -> bool:
        """Whether rows have the best copy of their size as their ceiling."""
        return any(BEST in row.us for row in self.rows)

    @property
    def banner(self) -> str:
        """What replaces claims if the machine was not quiet; empty if it was."""
        if self.quiet:
            return ""
        return (
            f"This machine was not quiet: other processes had up to {self.disturbance:.0%} of its cores. "
            "Times are shown as measured; nothing is claimed from them."
        )


def shape_words(row: Mapping[str, Any]) -> tuple[str, str]:
    """The rows and the columns in words: ``16`` and ``7168``, ``7168, residual``, ``(6144 + 1024)``, ``2112 x 7168, 1536 normed``,
    ``128 heads, fp8``, ``32 + 8 heads of 128, fp8``, ``2112 x 7168, fp8 rows``.
    """
    rows, *columns = row["shape"]
    if "latent" in row:
        return str(rows), f"{columns[0]} heads{', ' + row['cache'] if 'cache' in row else ''}"
    if "cache" in row:
        return str(rows), f"{columns[0]} + {columns[1]} heads of {columns[2]}, {row['cache']}"
    more = f", {row['with']}" if "with" in row else ""
    if "normed" in row:
        return str(rows), f"{columns[0]} x {columns[1]}, {row['normed']} normed{more}"
    if not columns:
        return f"batch {rows}", ""
    if row.get("op", "").split(",")[0] == LINEAR:
        return str(rows), f"{' x '.join(map(str, columns))}{more}"
    return str(rows), f"{columns[0]}{more}" if len(columns) == 1 else f"({' + '.join(map(str, columns))})"


def _times(us: Any) -> tuple[float, ...]:
    return tuple(us) if isinstance(us, list) else (us,)


def _floor(row: Mapping[str, Any], report: Mapping[str, Any], us: Mapping[str, tuple[float, ...]]) -> float:
    if report["device"] == "cpu":
        return min(us.get(STREAM, us[OURS]))
    reads = row["stream"] == "read" if "stream" in row else row["op"] in _READING
    if BEST in us and (row["bytes"] <= HUGE or "ceilings" not in report):
        return min(us[BEST])
    rate = report["ceilings"]["read 1 GiB TB/s" if reads else "copy 2 GiB TB/s"]
    return float(min([*us.get(BEST, ()), row["bytes"] / rate / 1e6]))


def row_of(row: Mapping[str, Any], report: Mapping[str, Any], run: int = 0) -> Row:
    """A row of a document."""
    m, columns = shape_words(row)
    us = {STREAM if name in _OLD_STREAMS else name: _times(times) for name, times in row["us"].items()}
    # This is a difference of two times: where it is not positive it is only noise.
    behind = {name: found for name, times in row.get("behind_us", {}).items() if min(found := _times(times)) > 0}
    words, floor = f"{m} x {columns}" if columns else m, _floor(row, report, us)
    head = row["op"], words, row["shape"][0], columns, row["bytes"], us, floor, run, behind, row.get("others", 0.0)
    return Row(*head, tuple(row["shape"]), row.get("with", ""), row.get("refused", {}))


def of_reports(reports: Iterable[dict[str, Any]]) -> Results:
    """Several documents as one."""
    runs: list[dict[str, Any]] = []
    rows: list[Row] = []
    host: dict[str, tuple[float, ...]] = {}
    for number, given in enumerate(reports):
        report = {"device": "cpu" if "threads" in given else "cuda", **given}
        rows += [row_of(row, report, number) for row in report.get("rows", ())]
        times = report.get("host_us") or report.get("overhead_us") or {}
        host |= {name.removeprefix("onepass."): _times(us) for name, us in times.items()}
        runs.append({key: value for key, value in report.items() if key != "rows"})
    return Results(tuple(runs), tuple(rows), host)


def of_report(report: dict[str, Any]) -> Results:
    """One document."""
    return of_reports([report])


def load(paths: Iterable[Path]) -> Results:
    """Read files in this order; raises a one-line ValueError if one is not a result file."""
    return of_reports([document(path) for path in paths])


def write(report: Mapping[str, Any], path: Path) -> None:
    """Write JSON with a line per item, and per row of a table among these, as `tools.compact` does."""
    texts = []
    for key, value in report.items():
        text = json.dumps(value)
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        if any(isinstance(item, Mapping | list | tuple) for item in items):
            pairs = isinstance(value, Mapping)
            rows = [json.dumps({name: value[name]})[1:-1] if pairs else json.dumps(name) for name in value]
            text = f"{text[0]}\n" + ",\n".join(f"  {row}" for row in rows) + f"\n {text[-1]}"
        texts.append(f" {json.dumps(key)}: {text}")
    path.write_text("{\n" + ",\n".join(texts) + "\n}\n", encoding="utf-8")
