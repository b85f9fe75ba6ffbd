"""``onepass bench``: the benchmarks with a progress bar and tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..bench.baseline import Comparison, compare
from ..bench.lines import Lines
from ..bench.results import CEILINGS, OURS, WAYS, Results, Row, load, of_report, plain, write
from ..bench.run import Plan, Watcher, run
from ..bench.words import BEHIND, ahead_words


class _Bar(Watcher):
    """A progress bar; what is refused is said at once."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task: TaskID = progress.add_task("")

    def begin(self, total: int) -> None:
        self.progress.update(self.task, total=total, completed=-1)

    def step(self, what: str) -> None:
        self.progress.update(self.task, advance=1, description=f"{what:<58.58}")

    def refused(self, op: str, why: str) -> None:
        self.progress.console.print(
            Text.assemble(("REFUSED ", "bold red"), (f"{op} ", "bold"), f"fails a check\n        {why}")
        )


def bench(
    op: list[str], device: str, shapes: str, peers: str, to: Path | None, html: Path | None, baseline: Path | None
) -> bool:
    """Run, show, write; whether nothing was refused."""
    for path, option in ((to, "--json"), (html, "--html")):
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"there is no directory {path.parent}", param_hint=option)
    old = _load(baseline) if baseline is not None else None
    plan = _plan(op, device, shapes, peers)
    console = Console()
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            report = run(plan, _Bar(progress))
    else:
        report = run(plan, Lines(to))
        console.print()
    results = of_report(report)
    _show(results, report, console)
    if to is not None:
        write(report, to)
        console.print(f"results: {to}", highlight=False)
    if html is not None:
        from ..bench.page import html as page

        html.write_text(page(results))
        console.print(f"page: {html}", highlight=False)
    if old is not None:
        _show_changes(compare(old, results), console)
    return not report["refused"]


def _load(path: Path) -> Results:
    """A baseline, or one line on stderr and exit status 2."""
    try:
        return load([path])
    except (OSError, ValueError) as error:
        print(f"onepass bench: --baseline: {plain(str(error), 2000)}", file=sys.stderr)
        raise typer.Exit(2) from None


def _plan(op: list[str], device: str, shapes: str, peers: str) -> Plan:
    try:
        return Plan(device, tuple(op), shapes, peers)
    except ValueError as error:
        text = str(error)
        option = "--op" if text.startswith("no op") else "--peers" if text.startswith("no peer") else "--shapes"
        raise typer.BadParameter(text, param_hint=option) from error


def _show(results: Results, report: dict[str, Any], console: Console) -> None:
    if results.banner:
        console.print(Text(results.banner, "bold yellow"))
        console.print()
    pairs = results.behind_kernel
    hidden = 0
    for op in results.ops:
        hidden = max(hidden, _print_table(op, results.of(op), results, console))
        if op in pairs.ops:
            hidden = max(hidden, _print_table(f"{op}, {BEHIND.lower()}", pairs.of(op), pairs, console, shares=False))
        console.print()
    if hidden:
        said = f"{hidden} column{'s are' if hidden > 1 else ' is'} left out to fit {console.width} columns; --html and --json have all"
        console.print(Text(said, "dim"), soft_wrap=True)
    if results.host:
        table = Table("host time of a call", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("us", justify="right")
        for name, us in results.host.items():
            table.add_row(name, f"{min(us):.2f}")
        console.print(table)
        console.print()
    if results.rows and not results.banner:
        console.print(Text(ahead_words(results)), soft_wrap=True)
    skipped = ", ".join(f"{name} ({why})" for name, why in report["peers"].items() if why)
    if skipped:
        console.print(Text(f"left out: {skipped}", "dim"), soft_wrap=True)
    for op, why in report["refused"].items():
        console.print(Text.assemble(("refused ", "bold red"), (op, "bold"), f": {why}"), soft_wrap=True)


GAP = 2


def _print_table(title: str, rows: list[Row], results: Results, console: Console, shares: bool = True) -> int:
    """A table of as many columns as fit, those that matter least left out; how many were."""
    others = [n for n in results.contenders if n != OURS and any(n in row.us for row in rows)]
    columns: dict[str, list[Text]] = {
        "shape": [Text(row.words) for row in rows],
        "bytes": [Text(f"{row.bytes / 1e6:.2f} MB") for row in rows],
        "us": [Text(f"{row.ours:.2f}", "bold") for row in rows],
    }
    if shares and results.quiet:
        columns["of the ceiling"] = [Text(row.share_words) for row in rows]
    for n in others:
        columns[n] = [_versus(min(row.us[n]), row.ours, n, results.quiet) if n in row.us else Text() for row in rows]
    total = len(columns)
    widths = {name: max(len(name), *(cell.cell_len for cell in cells)) for name, cells in columns.items()}
    ceilings, peers = [n for n in others if n in CEILINGS], [n for n in others if n not in CEILINGS]
    expendable = [*reversed(peers[1:]), *ceilings, "bytes", "of the ceiling", *peers[:1]]
    while expendable and sum(widths[name] + GAP for name in columns) - GAP > console.width:
        columns.pop(expendable.pop(0), None)
    table = Table(
        title=Text(title, "bold"), title_justify="left", box=None, pad_edge=False, padding=(0, GAP, 0, 0)
    )  # fmt: skip
    for name in columns:
        table.add_column(Text(name), justify="left" if name == "shape" else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    console.print(table)
    return total - len(columns)


def _versus(us: float, ours: float, name: str, quiet: bool) -> Text:
    if not quiet:
        return Text(f"{us:.2f}")
    style = "dim" if name in (*CEILINGS, *WAYS) else "red" if us < ours else "green"
    return Text.assemble(f"{us:.2f} ", (f"{us / ours:.2f}x", style))


def _show_changes(found: Comparison, console: Console) -> None:
    """What got faster or slower beyond the noise. Words may come from a file, so none of them is markup."""
    for warning in found.warnings:
        console.print(Text(f"note: {warning}", "yellow"), soft_wrap=True)
    table = Table("", "op", "shape", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("was, us", "is, us", "change", "noise", "drift"):
        table.add_column(name, justify="right", no_wrap=True)
    for verdict, style in (("slower", "bold red"), ("faster", "bold green")):
        for c in found.of(verdict):
            numbers = (f"{c.old_us:.2f}", f"{c.new_us:.2f}", f"{c.change:+.1%}", f"{c.noise:.1%}", f"{c.drift:+.1%}")
            table.add_row(Text(verdict, style), Text(c.op), Text(c.words), *numbers)
    if table.row_count:
        console.print(table)
    same = f"{len(found.of('same'))} of {len(found.changes)} rows are the same within the noise"
    console.print(Text(f"{same}; only in the baseline: {found.only_old}, only now: {found.only_new}"), soft_wrap=True)
