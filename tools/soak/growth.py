"""Eager calls whose shapes and options change at every call: ``python -m tools.soak.growth --calls 1000000``.

What is remembered of calls must stay bounded, and the memory of the process flat. Both paths of eager calls are run, each
in a process of its own: with the extension in C, and with ``ONEPASS_NATIVE=0``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

import onepass
from benchmarks.suite import machine
from onepass.core import native
from onepass.core import op as registration
from onepass.core.op import MAX_REMEMBERED
from onepass.nn import RMSNorm
from tools import compact
from tools.soak.watch import MIB, Reading, read

WARM_UP: Final = 0.5
"""The share of calls after which memory must not grow. Before, tables fill, kernels are compiled, and the pieces of memory
between plans that are freed and made settle. A leak goes on in the second half."""
ALLOWED: Final = 8.0
"""MiB by which it may grow nevertheless: 25 bytes for each of 330,000 plans."""
ENTRIES: Final = 32
"""Entries by which other caches may grow: kernels of shapes that are first met late."""
SAMPLES: Final = 20
COLUMNS: Final = 64
ROWS: Final = 2000


def _calls(device: str, r: Random) -> Iterator[Callable[[], Any]]:
    """An endless sequence of calls. Each is made three times, so that it is recorded and repeated; then others follow."""
    x, h, out = (torch.randn(ROWS * COLUMNS, device=device).bfloat16() for _ in range(3))
    gammas = [torch.ones(n, device=device, dtype=torch.bfloat16) for n in range(1, COLUMNS + 1)]
    modules = [RMSNorm(n, device=device, dtype=torch.bfloat16).requires_grad_(False) for n in range(1, COLUMNS + 1)]
    weight = torch.randn(32, COLUMNS, device=device).bfloat16()
    while True:
        n, m = r.randint(1, COLUMNS), int(r.triangular(1, ROWS, 1))
        rows, residual, given = (t[: m * n].view(m, n) for t in (x, h, out))
        gamma, eps = gammas[n - 1], r.randint(1, 20_000) * 1e-9
        few = x[: min(m, 64) * COLUMNS].view(-1, COLUMNS)
        # fmt: off
        calls: tuple[Callable[[], Any], ...] = (
            lambda: onepass.rms_norm(rows, gamma),                                           # noqa: B023
            lambda: onepass.rms_norm(rows, gamma, eps),                                      # noqa: B023
            lambda: onepass.rms_norm(given, gamma, residual=residual, out=given, residual_out=residual),  # noqa: B023
            lambda: onepass.rms_norm_fused_fp8(rows, gamma),                                 # noqa: B023
            lambda: modules[n - 1](rows),                                                    # noqa: B023
            lambda: onepass.linear(few, weight[: 1 + n // 2]),                               # noqa: B023
        )
        # fmt: on
        for call in calls:
            yield from (call, call, call)


def remembered(reading: Reading) -> dict[str, int]:
    """What is remembered: calls in C and combinations of options, the most of any op; and the entries of all other caches."""
    tables = [op.table.counts()["entries"] for op in registration.ops if op.table is not None]
    return {
        "calls in C": max(tables, default=0),
        "options": reading.options,
        "other entries": reading.entries,
    }


@torch.inference_mode()
def measure(calls: int, device: str) -> dict[str, Any]:
    """Make the calls; read memory and what is remembered at regular intervals."""
    torch.set_num_threads(1)
    start, samples = time.perf_counter(), list[dict[str, Any]]()
    for index, call in enumerate(_calls(device, Random(21)), start=1):
        call()
        if index % max(1, calls // SAMPLES) == 0:
            reading = read(device)
            sizes = {"MiB": reading.resident} | ({"GPU MiB": reading.allocated} if device == "cuda" else {})
            samples.append(
                {"calls": index, **{name: round(size / MIB, 1) for name, size in sizes.items()}, **remembered(reading)}
            )
        if index >= calls:
            break
    later = [sample for sample in samples if sample["calls"] >= WARM_UP * calls]
    grown = {name: round(later[-1][name] - later[0][name], 1) for name in ("MiB", "GPU MiB") if name in later[0]}
    most = {name: max(sample[name] for sample in samples) for name in ("calls in C", "options")}
    entries = later[-1]["other entries"] - later[0]["other entries"]
    return {
        "path in C": native.describe(),
        "calls": calls,
        "seconds": round(time.perf_counter() - start, 1),
        "repeated in C": sum(op.table.counts()["hits"] for op in registration.ops if op.table is not None),
        "most remembered": most,
        "grown in the second half": {**grown, "other entries": entries},
        "samples": samples,
        "passed": max(most.values()) <= MAX_REMEMBERED and max(grown.values()) <= ALLOWED and entries <= ENTRIES,
    }


def _in_process(options: argparse.Namespace, native_path: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.soak.growth", f"--calls={options.calls}", f"--device={options.device}"]
    done = subprocess.run(
        [*command, "--one"], env={**os.environ, "ONEPASS_NATIVE": native_path}, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.soak.growth", description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000, help="by each path")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.calls, options.device)))
        return 0
    paths = {name: _in_process(options, value) for name, value in (("C", "1"), ("Python", "0"))}
    found = {**machine.describe(options.device), "paths": paths}
    if options.json:
        options.json.write_text(compact.dumps(found))
    for name, path in paths.items():
        kept, grown = path["most remembered"], path["grown in the second half"]
        print(f"{name}: {path['calls']} calls in {path['seconds']:.0f} s, remembered {kept}, grown {grown}")
    used = paths["C"]["path in C"] == "on"
    if not used:
        print(f"the path in C: {paths['C']['path in C']}")
    return 0 if used and all(path["passed"] for path in paths.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
