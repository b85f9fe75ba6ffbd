"""``python -m onepass.bench``: times the row ops and their peers, prints a table, writes JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from itertools import chain
from pathlib import Path
from typing import Any

import torch

FAMILIES = ("rows", "gemv", "qk", "mla")


def main() -> None:
    """Measure on the chosen device, print as it goes, write JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m onepass.bench", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--only", choices=FAMILIES, help="this family of ops alone")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else _cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    with torch.inference_mode():
        if options.device == "cuda":
            _gpu(report, not options.no_peers, options.only)
        else:
            _cpu(report, not options.no_peers, options.only)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def _gpu(report: dict[str, Any], peers: bool, only: str | None) -> None:
    import triton

    from . import gemv, gpu, mla, qk
    from .report import shape_words

    report["triton"] = triton.__version__
    report["ceilings"] = gpu.ceilings()
    print(report["ceilings"], flush=True)
    report["rows"] = []
    copy = report["ceilings"]["copy 2 GiB TB/s"]
    families = dict(zip(FAMILIES, (gpu, gemv, qk, mla), strict=True))
    for row in chain.from_iterable(f.rows(peers) for name, f in families.items() if only in (None, name)):
        report["rows"].append(row)
        floor = row["bytes"] / copy / 1e6
        times = "  ".join(f"{name} {min(us):.2f}" for name, us in row["us"].items())
        print(f"{row['op']:22} {shape_words(row):>22} floor {floor:7.2f}  {times}", flush=True)
    if only in (None, "rows"):
        report["host_us"] = gpu.host_rows()
        print(report["host_us"], flush=True)


def _cpu(report: dict[str, Any], peers: bool, only: str | None) -> None:
    from . import cpu, cpu_gemv, cpu_mla
    from .report import shape_words

    report["threads"] = torch.get_num_threads()
    report["rows"] = []
    families = {"rows": cpu.rows, "gemv": cpu_gemv.rows, "mla": cpu_mla.rows}
    for row in chain.from_iterable(f(peers) for name, f in families.items() if only in (None, name)):
        report["rows"].append(row)
        times = "  ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
        print(f"{row['op']:22} {shape_words(row):>22} {times}", flush=True)
    if only in (None, "rows"):
        report["overhead_us"] = cpu.overhead()
        print(report["overhead_us"], flush=True)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
