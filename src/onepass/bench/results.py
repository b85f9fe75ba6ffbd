"""Files of results, read and put side by side: one run or several, of this format or of those before it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .peers import PEERS

OURS = "onepass"
STREAM = "memory stream"
_OLD_STREAMS = ("copy of as many bytes", "read of the weights", "stream", "copy")
"""What the memory stream was called in older files."""
WAYS = ("norm, then onepass", "statistics, then application")
"""Other ways to use onepass; not peers."""
COMPILED = ("torch.compile", "torch.compile max")
EAGER = "torch eager"
_READING = ("gemv_and_partial_norm", "row_mean_of_squares_qk", "row_sum_of_squares_qk")
SMALL = 4_000_000
"""Bytes up to which a low share of the ceiling is put down to latency."""


@dataclass(frozen=True)
class Row:
    """An op at a shape. ``us`` has one or two medians a contender; the smaller one is its time."""

    op: str
    words: str
    m: int
    columns: str
    bytes: int
    us: Mapping[str, tuple[float, ...]]
    floor_us: float
    """What the bytes take at the rate of the ceiling: a large copy or read on a GPU, a stream of the same size on a CPU."""
    run: int = 0

    @property
    def ours(self) -> float:
        """Microseconds of onepass."""
        return min(self.us[OURS])

    @property
    def share(self) -> float:
        """Of the ceiling."""
        return self.floor_us / self.ours

    @property
    def share_words(self) -> str:
        """``93%``, or ``latency`` where a call is too small for its bytes to matter."""
        return f"{self.share:.0%}" if self.share > 0.3 or self.bytes > SMALL else "latency"

    @property
    def peers(self) -> dict[str, float]:
        """Microseconds of everybody else but the stream and our other ways."""
        return {name: min(us) for name, us in self.us.items() if name not in (OURS, STREAM, *WAYS)}

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
        """Its name."""
        return str(self.runs[0]["machine"])

    @property
    def ops(self) -> list[str]:
        """In the order they were measured."""
        return list(dict.fromkeys(row.op for row in self.rows))

    @property
    def contenders(self) -> list[str]:
        """Everybody who was measured: onepass, the peers in their order, our other ways, the stream."""
        seen = {name for row in self.rows for name in row.us}
        return [name for name in (OURS, *PEERS, *WAYS, STREAM) if name in seen]

    def of(self, op: str) -> list[Row]:
        """The rows of an op."""
        return [row for row in self.rows if row.op == op]

    def main(self, op: str) -> list[Row]:
        """The rows with the columns that most numbers of rows were measured with, by number of rows."""
        groups: dict[str, list[Row]] = {}
        for row in self.of(op):
            groups.setdefault(row.columns, []).append(row)
        return sorted(max(groups.values(), key=lambda rows: len(list(rows))), key=lambda row: row.m)

    def speedup(self, names: Sequence[str]) -> float | None:
        """The geometric mean, over rows, of how many times longer the fastest of these takes."""
        logs = [math.log(best / row.ours) for row in self.rows if (best := row.best(names)) is not None]
        return math.exp(sum(logs) / len(logs)) if logs else None

    @property
    def behind(self) -> list[tuple[Row, str, float]]:
        """Where a peer is ahead: the row, the fastest peer and its time."""
        found = []
        for row in self.rows:
            name, us = min(row.peers.items(), key=lambda item: item[1], default=("", math.inf))
            if us < row.ours:
                found.append((row, name, us))
        return found


def shape_words(row: Mapping[str, Any]) -> tuple[str, str]:
    """The rows and the columns in words: ``16`` and ``7168``, ``7168, residual``, ``(6144 + 1024)``, ``2112 x 7168, 1536 normed``,
    ``128 heads, fp8``.
    """
    rows, *columns = row["shape"]
    if "latent" in row:
        return str(rows), f"{columns[0]} heads{', ' + row['cache'] if 'cache' in row else ''}"
    if "normed" in row:
        return str(rows), f"{columns[0]} x {columns[1]}, {row['normed']} normed"
    if not columns:
        return f"batch {rows}", ""
    more = f", {row['with']}" if "with" in row else ""
    return str(rows), f"{columns[0]}{more}" if len(columns) == 1 else f"({' + '.join(map(str, columns))})"


def _times(us: Any) -> tuple[float, ...]:
    return tuple(us) if isinstance(us, list) else (us,)


def _floor(row: Mapping[str, Any], report: Mapping[str, Any], us: Mapping[str, tuple[float, ...]]) -> float:
    if report["device"] == "cpu":
        return min(us.get(STREAM, us[OURS]))
    reads = row["stream"] == "read" if "stream" in row else row["op"] in _READING
    return float(row["bytes"] / report["ceilings"]["read 1 GiB TB/s" if reads else "copy 2 GiB TB/s"] / 1e6)


def _row(row: Mapping[str, Any], report: Mapping[str, Any], run: int) -> Row:
    m, columns = shape_words(row)
    us = {STREAM if name in _OLD_STREAMS else name: _times(times) for name, times in row["us"].items()}
    words = f"{m} x {columns}" if columns else m
    return Row(row["op"], words, row["shape"][0], columns, row["bytes"], us, _floor(row, report, us), run)


def of_reports(reports: Iterable[dict[str, Any]]) -> Results:
    """Several documents as one."""
    runs: list[dict[str, Any]] = []
    rows: list[Row] = []
    host: dict[str, tuple[float, ...]] = {}
    for number, given in enumerate(reports):
        report = {"device": "cpu" if "threads" in given else "cuda", **given}
        rows += [_row(row, report, number) for row in report.get("rows", ())]
        host |= {
            name.removeprefix("onepass."): _times(us)
            for name, us in (report.get("host_us") or report.get("overhead_us") or {}).items()
        }
        runs.append({key: value for key, value in report.items() if key != "rows"})
    return Results(tuple(runs), tuple(rows), host)


def of_report(report: dict[str, Any]) -> Results:
    """One document."""
    return of_reports([report])


def load(paths: Iterable[Path]) -> Results:
    """Files, in this order; ValueError where one is none of ours."""
    reports = []
    for path in paths:
        try:
            report = json.loads(path.read_text())
            of_report(report)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no file of results: {error!r}") from error
        reports.append(report)
    return of_reports(reports)


def write(report: Mapping[str, Any], path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(report, indent=1) + "\n")
