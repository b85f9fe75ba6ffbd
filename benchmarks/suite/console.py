"""Tables, progress bars and consoles of rich, for the suite and the demo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .lines import WIDTH


def table(*left: str, right: tuple[str, ...] = (), **options: Any) -> Table:
    """A table without lines; the columns named in ``right`` are aligned to the right."""
    shown = Table(*left, **{"box": None, "pad_edge": False, **options})
    for name in right:
        shown.add_column(name, justify="right", no_wrap=True)
    return shown


def wide_console() -> Console:
    """A console as wide as the terminal. Elsewhere it has `WIDTH` columns, unless COLUMNS says otherwise."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def progress_bar(console: Console, **options: Any) -> Progress:
    """A progress bar with an estimate of the time left, as wide as the console. It disappears at the end."""
    times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left"))
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), *times)
    # The period makes the estimate follow the whole run: single steps differ too much.
    return Progress(*columns, console=console, transient=True, expand=True, speed_estimate_period=3600.0, **options)


@contextmanager
def live(console: Console, *parts: Any) -> Iterator[None]:
    """Update ``parts`` in a terminal while they grow; elsewhere print the first of them at the end."""
    if console.is_terminal:
        with Live(Group(*parts), console=console, refresh_per_second=8):
            yield
    else:
        yield
        console.print(parts[0])
