"""Compile the fast path in C next to its sources: ``python -m onepass.core.build``.

Installing the package does the same where it finds a compiler. This is for a checkout that is used
without installing it, and for packages that were installed without a compiler. The module has Python's stable ABI, so
one file serves Python 3.11 and all later versions.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
NAME = "_native.abi3.so"


def digest() -> str:
    """What identifies the sources; the module has that of the sources it was compiled from. "" if they are not here."""
    state = hashlib.sha256()
    paths = [path for path in sorted((HERE / "csrc").glob("*")) if path.suffix in (".c", ".h")]
    for path in paths:
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()[:16] if paths else ""


def macros() -> dict[str, str]:
    """The definitions that all of it is compiled with."""
    return {"Py_LIMITED_API": "0x030B0000", "SOURCES_DIGEST": f'"{digest()}"'}


def compiler() -> list[str]:
    """The command of the C compiler."""
    import shlex  # not for `import onepass`, which may import this module
    import sysconfig

    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def build(target: Path, *further: str) -> None:
    """Compile to ``target``, with ``further`` options. A FileNotFoundError says what is missing."""
    import sysconfig

    command = compiler()
    include = Path(sysconfig.get_paths()["include"])
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no C compiler: {command[0]}")
    if not (include / "Python.h").exists():
        raise FileNotFoundError(f"Python's headers are not installed: {include / 'Python.h'}")
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
        *(f"-D{name}={value}" for name, value in macros().items()),
    ]
    try:
        subprocess.run([*command, *options, *further, f"-I{include}", *sources, "-o", str(unfinished)], check=True)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m onepass.core.build", description="Compile the fast path in C.")
    parser.add_argument("--out", type=Path, default=HERE / NAME, help="the file to write (default: %(default)s)")
    target: Path = parser.parse_args().out
    try:
        build(target)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"not built, so eager calls are made in Python: {error}") from None
    print(target)


if __name__ == "__main__":
    main()
