"""``onepass demo | check | bench | invariance | trace | source | env``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from .. import __version__
from . import bench, check, demo, env, invariance, source, trace
from .common import INSTALL

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Fused RMSNorm-family kernels for LLM inference. Start with [bold]onepass demo[/], "
    f"which needs transformers ({escape(INSTALL)}).",
)
for command in (demo.demo, check.check, bench.bench, invariance.invariance, source.source, env.env):
    app.command()(command)
app.add_typer(trace.app, name="trace")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"onepass {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that need no command."""


def main() -> None:
    """Run the ``onepass`` command."""
    app()


if __name__ == "__main__":
    main()
