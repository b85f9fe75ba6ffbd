"""``onepass bench``: the benchmarks with a progress bar and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .bench.baseline import Comparison, compare
from .bench.results import OURS, STREAM, WAYS, Results, load, of_report, write
from .bench.run import Plan, Watcher, run


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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        report = run(plan, _Bar(progress))
    results = of_report(report)
    _show(results, report, console)
    if to is not None:
        write(report, to)
        console.print(f"results: {to}", highlight=False)
    if html is not None:
        from .bench.page import html as page

        html.write_text(page(results))
        console.print(f"page: {html}", highlight=False)
    if old is not None:
        _show_changes(compare(old, results), console)
    return not report["refused"]


def _load(path: Path) -> Results:
    try:
        return load([path])
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--baseline") from error


def _plan(op: list[str], device: str, shapes: str, peers: str) -> Plan:
    try:
        return Plan(device, tuple(op), shapes, peers)
    except ValueError as error:
        text = str(error)
        option = "--op" if text.startswith("no op") else "--peers" if text.startswith("no peer") else "--shapes"
        raise typer.BadParameter(text, param_hint=option) from error


def _show(results: Results, report: dict[str, Any], console: Console) -> None:
    for op in results.ops:
        rows = results.of(op)
        others = [n for n in results.contenders if n != OURS and any(n in row.us for row in rows)]
        table = Table(
            title=op, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
        )
        table.add_column("shape", no_wrap=True)
        for name in ("bytes", "us", "of the ceiling", *others):
            table.add_column(name, justify="right")
        for row in rows:
            cells = [_versus(min(row.us[n]), row.ours, n) if n in row.us else Text() for n in others]
            size = f"{row.bytes / 1e6:.2f} MB"
            table.add_row(row.words, size, Text(f"{row.ours:.2f}", "bold"), row.share_words, *cells)
        console.print(table)
        console.print()
    if results.host:
        table = Table("host time of a call", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("us", justify="right")
        for name, us in results.host.items():
            table.add_row(name, f"{min(us):.2f}")
        console.print(table)
        console.print()
    skipped = ", ".join(f"{name} ({why})" for name, why in report["peers"].items() if why)
    if skipped:
        console.print(f"left out: {skipped}", style="dim", highlight=False, soft_wrap=True)
    for op, why in report["refused"].items():
        console.print(Text.assemble(("refused ", "bold red"), (op, "bold"), f": {why}"), soft_wrap=True)


def _versus(us: float, ours: float, name: str) -> Text:
    style = "dim" if name in (STREAM, *WAYS) else "red" if us < ours else "green"
    return Text.assemble(f"{us:.2f} ", (f"{us / ours:.2f}x", style))


def _show_changes(found: Comparison, console: Console) -> None:
    """What got faster or slower beyond the noise."""
    for warning in found.warnings:
        console.print(f"note: {warning}", style="yellow", highlight=False)
    table = Table("", "op", "shape", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("was, us", "is, us", "change", "noise", "drift"):
        table.add_column(name, justify="right")
    for verdict, style in (("slower", "bold red"), ("faster", "bold green")):
        for c in found.of(verdict):
            numbers = (f"{c.old_us:.2f}", f"{c.new_us:.2f}", f"{c.change:+.1%}", f"{c.noise:.1%}", f"{c.drift:+.1%}")
            table.add_row(Text(verdict, style), c.op, c.words, *numbers)
    if table.row_count:
        console.print(table)
    same = f"{len(found.of('same'))} of {len(found.changes)} rows are the same within the noise"
    console.print(f"{same}; only in the baseline: {found.only_old}, only now: {found.only_new}", highlight=False)
