"""``onepass bench``: speed against peers, with a progress bar and tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ..bench.baseline import Comparison, compare
from ..bench.document import plain
from ..bench.lines import Lines
from ..bench.page import html as page
from ..bench.results import CEILINGS, OURS, WAYS, Results, Row, load, of_report, write
from ..bench.run import FAMILIES, Plan, Watcher, run
from ..bench.words import BEHIND, ahead_words
from .common import DeviceOption, choose_device, progress_bar, table, wide_console

GAP = 2
"""Spaces between columns."""


class _Bar(Watcher):
    """Shows a progress bar, and refusals as they happen."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("")

    def begin(self, total: int) -> None:
        self.progress.update(self.task, total=total, completed=-1)

    def step(self, what: str) -> None:
        self.progress.update(self.task, advance=1, description=f"{what:<40.40}")

    def refused(self, op: str, why: str) -> None:
        self.progress.console.print(
            Text.assemble(("REFUSED ", "bold red"), (f"{op} ", "bold"), f"fails a check\n        {why}")
        )


def bench(
    op: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only this op, or {', '.join(family.name for family in FAMILIES)}, host; repeatable.", metavar="NAME"
        ),
    ] = None,
    device: DeviceOption = "",
    shapes: Annotated[
        str, typer.Option(help="decode, prefill, all, or shapes such as 64x4096.", metavar="WORD|MxN,...")
    ] = "all",
    peers: Annotated[
        str, typer.Option(help="all, none, or parts of names such as compile,liger.", metavar="NAMES")
    ] = "all",
    to: Annotated[Path | None, typer.Option("--json", help="Write results here.", metavar="FILE")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots here.", metavar="FILE")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Show what changed since this result file.", metavar="FILE")
    ] = None,
) -> None:
    """Measure speed against peers and the memory ceiling. An op that fails a check is not measured, and the exit status is 1."""
    chosen = choose_device(device)
    for path, option in ((to, "--json"), (html, "--html")):
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"there is no directory {path.parent}", param_hint=option)
    old = _load(baseline) if baseline is not None else None
    plan = _plan(op or [], chosen, shapes, peers)
    console = wide_console()
    if console.is_terminal:
        with progress_bar(console) as progress:
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
        html.write_text(page(results))
        console.print(f"page: {html}", highlight=False)
    if old is not None:
        _show_changes(compare(old, results), console)
    raise typer.Exit(1 if report["refused"] else 0)


def _load(path: Path) -> Results:
    """Read a baseline; a bad one is one line on stderr and exit status 2."""
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
    def dim(text: str) -> None:
        console.print(Text(text, "dim"))

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
        columns = f"{hidden} column{'s are' if hidden > 1 else ' is'}"
        dim(f"{columns} left out to fit {console.width} columns; --html and --json have all")
    if results.host:
        shown = table("host time per call", right=("us",), padding=(0, GAP, 0, 0))
        for name, us in results.host.items():
            shown.add_row(name, f"{min(us):.2f}")
        console.print(shown)
        console.print()
    if results.rows and not results.banner:
        console.print(Text(ahead_words(results)))
    skipped = ", ".join(f"{name} ({why})" for name, why in report["peers"].items() if why)
    if skipped:
        dim(f"left out: {skipped}")
    for op, why in report["refused"].items():
        console.print(Text.assemble(("refused ", "bold red"), (op, "bold"), f": {why}"))


def _print_table(title: str, rows: list[Row], results: Results, console: Console, shares: bool = True) -> int:
    """Print as many columns as fit, dropping the least important first; return how many were dropped."""
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
    shown = table(title=Text(title, "bold"), title_justify="left", padding=(0, GAP, 0, 0))
    for name in columns:
        shown.add_column(Text(name), justify="left" if name == "shape" else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        shown.add_row(*cells)
    console.print(shown)
    return total - len(columns)


def _versus(us: float, ours: float, name: str, quiet: bool) -> Text:
    if not quiet:
        return Text(f"{us:.2f}")
    style = "dim" if name in (*CEILINGS, *WAYS) else "red" if us < ours else "green"
    return Text.assemble(f"{us:.2f} ", (f"{us / ours:.2f}x", style))


def _show_changes(found: Comparison, console: Console) -> None:
    """Print what got faster or slower beyond the noise. Strings may come from a file, so none is parsed as markup."""
    for warning in found.warnings:
        console.print(Text(f"note: {warning}", "yellow"))
    shown: Table = table("", "op", "shape", right=("was, us", "is, us", "change", "noise", "drift"))
    for verdict, style in (("slower", "bold red"), ("faster", "bold green")):
        for c in found.of(verdict):
            numbers = (f"{c.old_us:.2f}", f"{c.new_us:.2f}", f"{c.change:+.1%}", f"{c.noise:.1%}", f"{c.drift:+.1%}")
            shown.add_row(Text(verdict, style), Text(c.op), Text(c.words), *numbers)
    if shown.row_count:
        console.print(shown)
    console.print(Text(found.summary))
