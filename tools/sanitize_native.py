"""The fast path in C under AddressSanitizer and UndefinedBehaviorSanitizer: ``python -m tools.sanitize_native``.

The extension is compiled once more, into a temporary folder. Every Python process that is started with `environment` loads
that one instead of the one next to its sources. The first report ends a process with a status other than 0.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from onepass.core import build

FLAGS: Final = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TESTS: Final = (
    "tests/core/test_native.py",
    "tests/core/test_native_launches.py",
    "tests/all_ops/test_native.py",
    "tests/all_ops/test_written.py",
)
SKIPPED: Final = "not it_is_built and not grow_memory"
"""Tests that build another extension, or that are about the size of the process: a sanitizer keeps memory that was freed."""
LOAD: Final = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("onepass.core._native", {path!r})
module = sys.modules["onepass.core._native"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""


def compile_into(folder: Path, *further: str) -> None:
    """Compile the extension with the sanitizers, with ``further`` options. A FileNotFoundError says what is missing."""
    target = folder / build.NAME
    build.build(target, *FLAGS, *further)
    (folder / "sitecustomize.py").write_text(LOAD.format(path=str(target)))


def _library(name: str) -> str:
    ask = [build.compiler()[0], f"-print-file-name={name}"]
    asked = subprocess.run(ask, capture_output=True, text=True, check=True)
    return str(Path(asked.stdout.strip()).resolve())


def environment(folder: Path) -> dict[str, str]:
    """The environment of processes that load the extension in ``folder``."""
    # libstdc++ too: AddressSanitizer looks for its functions when the process starts, and Python does not link it
    preloaded = [_library(name) for name in ("libasan.so", "libstdc++.so.6")]
    added = {
        "LD_PRELOAD": " ".join(preloaded),
        "PYTHONPATH": str(folder),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep memory until the process ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return {name: value for name, value in os.environ.items() if name != "ONEPASS_NATIVE"} | added


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.sanitize_native", description=__doc__)
    parser.add_argument("--calls", type=int, default=400, help="calls that the fuzzer compares (default: %(default)s)")
    options = parser.parse_args()
    tests = ["pytest", "-n0", "-p", "no:cacheprovider", "-m", "not full", "-k", SKIPPED, *TESTS]
    calls = ["tools.fuzz.paths", "--calls", str(options.calls), "--configurations", "1"]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        try:
            compile_into(Path(name))
        except FileNotFoundError as error:
            print(f"not run: eager calls are made in Python here, because {error}")
            return 0
        running = [
            subprocess.Popen([sys.executable, "-m", *what], env=environment(Path(name))) for what in (tests, calls)
        ]
        failed = [process.wait() for process in running]
    print(
        f"address and undefined behaviour: {'FAILED' if any(failed) else 'clean'} in {time.perf_counter() - start:.0f} s"
    )
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
