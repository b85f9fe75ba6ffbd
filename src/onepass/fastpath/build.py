"""Compile the fast path in C next to its sources: ``python -m onepass.fastpath.build``.

Installing the package does the same where it finds a compiler. This is for a checkout that is used
without installing it, and for packages that were installed without a compiler. The module has Python's stable ABI, so
one file serves Python 3.11 and all later versions.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
NAME = "_native.abi3.so"


def build(target: Path) -> None:
    """Compile to ``target``, whose folder must exist. Raises if there is no compiler, or if it fails."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    include = sysconfig.get_paths()["include"]
    sources = sorted(str(path) for path in (HERE / "csrc").glob("*.c"))
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    options = [
        "-O2",
        "-Wall",
        "-Wextra",
        "-std=c11",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-pthread",
        "-DPy_LIMITED_API=0x030B0000",
    ]
    try:
        subprocess.run([*compiler, *options, f"-I{include}", *sources, "-o", str(unfinished)], check=True)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m onepass.fastpath.build", description="Compile the fast path in C.")
    parser.add_argument("--out", type=Path, default=HERE / NAME, help="the file to write (default: %(default)s)")
    target: Path = parser.parse_args().out
    build(target)
    print(target)


if __name__ == "__main__":
    main()
