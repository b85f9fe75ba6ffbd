"""``python -m tools.bench.linear FILE...``: the tables of `linear` from result files.

It writes linear.md next to the first file, with every row, and with ``--readme PAGE...`` the table of goals
between the markers of those pages. On a GPU the floor of a row is the time to read its weights at `RATE`. On a
CPU it is the measured read, and there are no goals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.suite.linear import BATCH, FP8, FUSED, NORM, NORM_BLOCKS, OP, THEN, weight_bytes
from benchmarks.suite.results import BEST, COMPILED, EAGER, OURS, STREAM, Results, Row, load

from .goals import Goal, goal_table, times, verdicts
from .markdown import filled, linked, page_options, table, write_pages

FILE, MARKER = "linear.md", "linear"
SOURCE = "<!-- made by `python -m tools.bench.linear` from: "
RATE = 4.55
"""TB/s that an H200 reads."""
CUBLAS, SCALED = "cuBLAS", "torch._scaled_mm"
UNMEASURED = "Not measured on a GPU yet."


def floor(row: Row, device: str = "cuda") -> float:
    """Microseconds that reading the weights takes."""
    if device == "cpu":
        return row.floor_us
    return weight_bytes(row.shape[1], row.shape[2], row.kind) / RATE / 1e6


class Sheet:
    """The rows of `linear` in results, and what their goals refer to. Of a row that several files have, the last counts."""

    def __init__(self, results: Results) -> None:
        self.results, self.device = results, results.device
        last = {(row.op, row.shape, row.kind): row for row in results.rows if row.op.split(",")[0] == OP}
        self.rows = list(last.values())
        self._plain = {row.shape: row for row in self.rows if row.op in (OP, BATCH)}

    def share(self, row: Row) -> float:
        """The share of the floor that onepass reaches in a chain."""
        return floor(row, self.device) / row.ours

    def plain(self, row: Row) -> Row:
        """The product of the same size alone with bfloat16 weights, or the row itself if that was not measured."""
        return self._plain.get(row.shape, row)

    def cublas_speed(self, row: Row) -> float | None:
        """The speed of onepass over that of cuBLAS, in a chain."""
        return min(row.us[CUBLAS]) / row.ours if CUBLAS in row.us else None

    def more_than_alone(self, row: Row) -> float | None:
        """Microseconds that a fused call takes longer than the product alone, both behind a kernel."""
        alone = self.plain(row)
        if alone is row or OURS not in alone.behind_us or OURS not in row.behind_us:
            return None
        return row.behind_kernel.ours - alone.behind_kernel.ours


def _of(op: str, *rows: int, kind: str | None = None, size: tuple[int, int] | None = None) -> Callable[[Row], bool]:
    def applies(row: Row) -> bool:
        right = row.op == op and row.m in rows and kind in (None, row.kind)
        return right and size in (None, row.shape[1:])

    return applies


def _ours(sheet: Sheet, row: Row) -> float:
    return row.ours


_FLOOR, _CUBLAS = "at least {:.0%} of the floor", "at least {:.0%} of cuBLAS's speed"


def _floor_goal(what: str, applies: Callable[[Row], bool], limit: float) -> Goal[Sheet]:
    return Goal(what, _FLOOR.format(limit), applies, Sheet.share, limit)


def _cublas_goal(what: str, applies: Callable[[Row], bool], limit: float) -> Goal[Sheet]:
    return Goal(what, _CUBLAS.format(limit), applies, Sheet.cublas_speed, limit)


GOALS = (
    _floor_goal("bf16, M = 1 to 4", _of(OP, 1, 2, 4), 0.88),
    _floor_goal("bf16, M = 8", _of(OP, 8), 0.85),
    _floor_goal("bf16, M = 16", _of(OP, 16), 0.80),
    _cublas_goal("bf16, M = 16", _of(OP, 16), 1.0),
    _cublas_goal("bf16, M = 32 to 256", _of(BATCH, 32, 64, 128, 256), 0.90),
    _cublas_goal("bf16, M = 512 to 8192", _of(BATCH, 512, 2048, 8192), 0.90),
    _floor_goal("fp8, M = 1", _of(FP8, 1), 0.80),
    _floor_goal("fp8, M = 8", _of(FP8, 8), 0.70),
    Goal(
        "2112 x 7168, fp8 blocks, with its norm, M = 1",
        "at most 4.6 us",
        _of(FUSED, 1, kind=NORM_BLOCKS, size=(2112, 7168)),
        _ours,
        4.6,
        unit=" us",
    ),
    Goal(
        "6144 x 4096 with its norm, M = 1, behind a kernel",
        "at most 0.5 us more than alone",
        _of(FUSED, 1, kind=NORM, size=(6144, 4096)),
        Sheet.more_than_alone,
        0.5,
        unit=" us",
    ),
)


def goals(sheet: Sheet) -> str:
    """How many rows reach each goal."""
    return goal_table(GOALS, sheet, sheet.rows)


# --- every row ------------------------------------------------------------------------------------------------------


def _share(sheet: Sheet, row: Row) -> str:
    return f"{sheet.share(row):.0%}" if sheet.results.quiet else ""


def tables(sheet: Sheet) -> str:
    """A table per group: times in a chain and behind a kernel, share of the floor, peers, goals."""
    gpu = sheet.device == "cuda"
    parts = []
    for op in dict.fromkeys(row.op for row in sheet.rows):
        rows = [row for row in sheet.rows if row.op == op]
        peers = ((CUBLAS,), COMPILED, (SCALED,)) if gpu else ((EAGER,), COMPILED)
        heads = ["M x N x K", "onepass", "of the floor", "read of the weights"]
        heads += ["norm, then linear"] if op == FUSED else []
        heads += ["cuBLAS", "torch.compile", SCALED, "goal"] if gpu else ["torch eager", "torch.compile"]
        lines = []
        for row in rows:
            cells = [row.words, f"**{times(row, (OURS,))}**", _share(sheet, row), times(row, (BEST, STREAM))]
            cells += [times(row, (THEN,))] if op == FUSED else []
            cells += [times(sheet.plain(row) if op == FP8 and CUBLAS in names else row, names) for names in peers]
            if gpu:
                cells.append("; ".join(f"{words}: {verdict}" for words, verdict in verdicts(GOALS, sheet, row)))
            lines.append(cells)
        parts += [f"## {op}", "", *table(heads, lines, 1), ""]
    return "\n".join(parts)


def _refusals(sheet: Sheet) -> list[str]:
    """Which peers raised, and what they said: the first row of each message."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sheet.rows:
        for name, why in row.refused.items():
            found.setdefault((name, why), []).append(row)
    lines = [f"- {name}, {len(rows)} rows, first {rows[0].words}: `{why}`" for (name, why), rows in found.items()]
    return ["## Refused", "", *lines, ""] if lines else []


def full(sheet: Sheet, sources: Sequence[str]) -> str:
    """The page of every row."""
    run = sheet.results.runs[0]
    machine = f"{sheet.results.machine}, {run['date']}, torch {run['torch']}"
    if sheet.device == "cpu":
        about = (
            f"{machine}, {run.get('threads', 'unknown')} threads. Microseconds per call. The floor is a measured read."
        )
    else:
        about = (
            f"{machine}, Triton {run.get('triton', 'unknown')}. Microseconds per call back to back / behind an ordinary kernel, "
            f"the smaller of two medians. The floor is the bytes of the weights at {RATE} TB/s. Up to M = 16, weights rotate through "
            f"more than 400 MB; beyond, one set of inputs is used. `{SCALED}` gets rows that are fp8 already, so it does less work, "
            "less accurately. cuBLAS always has bfloat16 weights. `torch.compile` is in its default mode, or max-autotune where that "
            "was measured and is faster."
        )
    parts = [f"{SOURCE}{' '.join(sources)} -->", f"# linear on {sheet.results.machine}", ""]
    parts += [f"**{sheet.results.banner}**", ""] if sheet.results.banner else []
    parts += [about, ""] + (["## Goals", "", goals(sheet), ""] if sheet.device == "cuda" else [])
    return "\n".join([*parts, tables(sheet), *_refusals(sheet)])


def section(sheet: Sheet | None, folder: str) -> str:
    """The text between the markers of a page: the goals, and a link to every row."""
    if sheet is None or not sheet.rows:
        return UNMEASURED
    words = (
        f"{sheet.results.machine}, {sheet.results.runs[0]['date']}: times in a chain unless stated, weights cold up to M = 16. The "
        f"floor is the bytes of the weights at {RATE} TB/s."
    )
    return linked(words, goals(sheet), folder, FILE)


def with_section(text: str, sheet: Sheet | None, folder: str) -> str:
    """A page with the text that it has markers for."""
    return filled(text, {MARKER: section(sheet, folder)})


def main() -> None:
    """Write the page, and the sections of other pages."""
    options = page_options("python -m tools.bench.linear", __doc__)
    sheet = Sheet(load(options.files))
    write_pages(
        options.files,
        options.readme,
        FILE,
        partial(full, sheet),
        lambda text, folder: with_section(text, sheet, folder),
    )
    print(goals(sheet) if sheet.device == "cuda" else tables(sheet))


if __name__ == "__main__":
    main()
