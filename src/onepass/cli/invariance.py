"""``onepass invariance``: how many rows change with the batch, for every contender on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..bench import machine
from ..bench.invariance import OURS, ROWS, SPLITS, Outcome, document, run
from ..bench.results import write
from .common import DeviceOption, cannot_write, choose_device, live, table


def invariance(
    device: DeviceOption = "",
    rows: Annotated[int, typer.Option(help="Rows of the whole batch.", min=2)] = ROWS,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Count the rows whose bytes change when the batch is split: torch, transformers, installed peers and onepass.

    Takes one to two minutes, most of it for torch.compile.
    """
    chosen = choose_device(device)
    console = Console()
    sizes = [size for size in SPLITS if size < rows] + [rows]
    title = f"{machine.label(chosen)}: rows of {rows} that change in batches of"
    shown = table(
        "work",
        "contender",
        right=(*map(str, sizes), "largest change"),
        title=title,
        title_justify="left",
        padding=(0, 2),
    )
    outcomes: list[Outcome] = []
    with live(console, shown):
        for outcome in run(chosen, rows):
            outcomes.append(outcome)
            name = Text(outcome.name, "bold" if outcome.name == OURS else "")
            if outcome.failed:
                shown.add_row(outcome.work, name, *[""] * len(sizes), Text(outcome.failed, "dim"))
                continue
            counts = [Text(str(count), "red" if count else "green") for count in outcome.changed.values()]
            shown.add_row(outcome.work, name, *counts, f"{max(outcome.largest.values()):.3g}")
    if json_file is not None:
        try:
            write(document(chosen, outcomes, rows), json_file)
        except OSError as error:
            raise cannot_write(json_file, error, "--json") from error
    if any(sum(o.changed.values()) for o in outcomes if o.name == OURS):
        raise typer.Exit(1)
