"""The ``onepass`` command: ``onepass check | env | invariance | source | trace``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .cli import check, env, invariance, source, trace
from .cli.common import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="onepass", description="Fused RMSNorm-family kernels for LLM inference.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"onepass {__version__}")
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for command in (check, invariance, trace, source, env):
        command.add(commands)
    return run(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
