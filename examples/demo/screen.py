"""The demo's console and its timing."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from benchmarks.suite.timing import Load, graph_times, turns

SECONDS = 0.5
"""How long calls on a CPU are measured."""


class Screen:
    """A console, the measured device and its load. Speed-ups are shown only while the machine is quiet."""

    def __init__(self, console: Console, device: str, load: Load | None = None) -> None:
        self.console, self.device = console, device
        self.load = load or Load()
        self.warned = False

    def heading(self, number: int, title: str) -> None:
        """Begin a part."""
        self.console.print()
        self.console.print(Rule(f"[bold]{number}[/]  {title}", align="left", style="cyan"))

    def seconds(self, *calls: Callable[[], object]) -> list[float]:
        """Time each call: the smaller of two medians, on a GPU in a CUDA graph and on a CPU in turns with the others."""
        if self.device == "cuda":
            return [min(graph_times([call])) * 1e-6 for call in calls]
        found, _ = turns({str(i): [call] for i, call in enumerate(calls)}, seconds=SECONDS, attempts=1)
        return [min(us) * 1e-6 for us in found.values()]

    def speedup(self, slow: float, fast: float) -> Text:
        """A table cell: how many times faster, or that the machine is not quiet."""
        if not self.load.quiet():
            return Text("not quiet", style="yellow")
        return Text(f"{slow / fast:.1f}x", style="bold green" if slow > fast else "bold red")

    def warn(self) -> None:
        """Print a banner once if other processes use the cores."""
        if self.warned or self.load.quiet():
            return
        self.warned = True
        text = (
            f"This machine is not quiet: other processes have used {self.load.worst:.0%} of its cores. "
            "Times are unreliable, especially torch's, and no speed-up is claimed."
        )
        self.console.print(Text(text, style="bold yellow"))


def verdict(right: bool) -> Text:
    """A table cell: ok or WRONG."""
    return Text("ok", style="green") if right else Text("WRONG", style="bold red")
