"""``python -m benchmarks``: speed against peers, with a progress bar and tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from onepass.cli.common import UsageError, add_device
from onepass.cli.common import run as run_command

from .baseline import Comparison, compare
from .console import progress_bar, table, wide_console
from .document import plain
from .lines import Lines
from .page import html as page
from .results import CEILINGS, OURS, WAYS, Results, Row, load, of_report, write
from .run import FAMILIES, Plan, Watcher, run
from .words import BEHIND, ahead_words

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 1 if an op was refused."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure speed against peers and the memory ceiling. An op that fails a check is not measured, and "
        "the exit status is 1.",
        allow_abbrev=False,
    )
    option = parser.add_argument
    names = f"only this op, or {', '.join(family.name for family in FAMILIES)}, host; repeatable"
    option("--op", action="append", default=[], metavar="NAME", help=names)
    add_device(parser)
    option("--shapes", default="all", metavar="WORD|MxN,...", help="decode, prefill, all, or shapes such as 64x4096")
    option("--peers", default="all", metavar="NAMES", help="all, none, or parts of names such as compile,liger")
    option("--json", type=_file, metavar="FILE", help="write results here")
    option("--html", type=_file, metavar="FILE", help="write a page with plots here")
    option("--baseline", type=Path, metavar="FILE", help="show what changed since this result file")
    parser.set_defaults(run=bench, parser=parser)
    return run_command(parser, arguments)


def _file(text: str) -> Path:
    """A file that can be written as far as its directory is concerned."""
    if not Path(text).parent.is_dir():
        raise UsageError(f"there is no directory {Path(text).parent}")
    return Path(text)


def bench(options: argparse.Namespace) -> int:
    """Run the plan, print and write the results; 1 if an op was refused."""
    try:
        old = load([options.baseline]) if options.baseline is not None else None
    except (OSError, ValueError) as error:  # one line: the file may hold anything
        print(f"python -m benchmarks: --baseline: {plain(str(error), 2000)}", file=sys.stderr)
        return 2
    plan = _plan(options)
    console = wide_console()
    if console.is_terminal:
        with progress_bar(console) as progress:
            report = run(plan, _Bar(progress))
    else:
        report = run(plan, Lines(options.json))
        console.print()
    results = of_report(report)
    _show(results, report, console)
    if options.json is not None:
        write(report, options.json)
        console.print(f"results: {options.json}", highlight=False)
    if options.html is not None:
        options.html.write_text(page(results))
        console.print(f"page: {options.html}", highlight=False)
    if old is not None:
        _show_changes(compare(old, results), console)
    return 1 if report["refused"] else 0


def _plan(options: argparse.Namespace) -> Plan:
    try:
        return Plan(options.device, tuple(options.op), options.shapes, options.peers)
    except ValueError as error:
        text = str(error)
        option = "--op" if text.startswith("no op") else "--peers" if text.startswith("no peer") else "--shapes"
        raise UsageError(f"argument {option}: {text}") from error


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
