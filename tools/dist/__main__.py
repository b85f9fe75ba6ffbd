"""``python -m tools.dist``: the sharded norms on real ranks of this machine, checked and timed.

``--device cuda --ranks 2`` puts two ranks on one GPU, where Gloo adds their sums. If each rank has a GPU, NCCL does. Under
``torchrun -m tools.dist --device cuda`` the ranks are torchrun's, on any number of hosts.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d

from onepass import dist
from onepass.ops.qk_norm.op import apply_qk_rms_norm, qk_rms_norm, row_sum_of_squares_qk
from tools import compact
from tools.dist.cases import CHECKS, EPS, problem, shares
from tools.dist.compiled import CAPTURED, COMPILED
from tools.dist.ranks import Place, joined, launch, under_torchrun

ROWS = (1, 32, 512, 4096)
"""Rows of the timed calls: decoding one sequence, a batch, a small and a large prompt."""

ROUNDS = 7
"""Contenders take turns and their best rounds count, since other processes may use the machine."""

ALL = CHECKS | COMPILED | CAPTURED


def applicable(device: str, backend: str, size: int) -> list[str]:
    """Names of the checks that such ranks can run."""
    return [*CHECKS, *COMPILED, *(CAPTURED if device == "cuda" and (size == 1 or backend == "nccl") else ())]


def run_checks(place: Place, names: list[str]) -> dict[str, str]:
    """What is wrong with each check, by name; "" if nothing. An exception is a failure, and the next check runs."""
    found = {}
    for name in names:
        with torch.inference_mode():
            try:
                found[name] = ALL[name](place) or ""
            except Exception as error:
                at = traceback.extract_tb(error.__traceback__)[-1]
                found[name] = f"{type(error).__name__}: {str(error).strip()[:3000]} ({at.name}:{at.lineno})"
    return found


def time_calls(place: Place, rows: tuple[int, ...] = ROWS) -> list[dict[str, Any]]:
    """Microseconds of MiniMax-M2's q and k norm (6144 and 1024 columns, bfloat16) by number of rows: the best round's median.

    ``local``: sums and norm with nothing sent. ``all_reduce``: the collective alone. ``call``: `dist.qk_rms_norm`.
    ``reproducible``: the same, gathering. ``gather_projections``: what the sums replace, every rank collecting all columns of q
    and k and norming whole rows.
    """
    found = []
    with torch.inference_mode():
        for m in rows:
            repeats = 50 if m <= 32 else 20 if m <= 512 else 5
            calls = _calls(place, m)
            rounds = [{name: _median_us(place, call, repeats) for name, call in calls.items()} for _ in range(ROUNDS)]
            found.append({"rows": m, **{name: min(times[name] for times in rounds) for name in calls}})
    return found


def _calls(place: Place, m: int) -> dict[str, Callable[[], object]]:
    """What is timed, on ``m`` rows."""
    world: Any = c10d.group.WORLD
    q_widths, k_widths = (shares(n, place.size, 128) for n in (6144, 1024))
    p = problem(place, (m,), q_widths, k_widths, torch.bfloat16)
    q, k, gamma_q, gamma_k = (t.contiguous() for t in p.local)
    made = dist.plan(world, q.shape[-1], k.shape[-1])
    outs = torch.empty_like(q), torch.empty_like(k)
    means = made.divide(row_sum_of_squares_qk(q, k))
    # gathering needs equal parts, as wide as the widest rank's
    part = torch.zeros(m, max(q_widths) + max(k_widths), dtype=q.dtype, device=place.device)
    whole = [torch.empty_like(part) for _ in range(place.size)]

    def local() -> None:
        row_sum_of_squares_qk(q, k)
        apply_qk_rms_norm(*outs, gamma_q, gamma_k, means, q, k, EPS)

    def call(reproducible: bool = False) -> None:
        dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, plan=made, out=outs, reproducible=reproducible)

    def gather() -> None:
        c10d.all_gather(whole, part)
        qk_rms_norm(p.q, p.k, p.gamma_q, p.gamma_k, EPS)

    return {
        "local": local,
        "all_reduce": lambda: c10d.all_reduce(means),
        "call": call,
        "reproducible": lambda: call(True),
        "gather_projections": gather,
    }


def _median_us(place: Place, call: Callable[[], object], repeats: int) -> float:
    """The median over repeats of the slowest rank's time."""
    for _ in range(2):
        call()
    times = []
    c10d.barrier()
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        times.append(time.perf_counter() - begin)
    everyone: list[list[float]] = [[] for _ in range(place.size)]
    c10d.all_gather_object(everyone, times)
    slowest = [max(of_one) for of_one in zip(*everyone, strict=True)]
    median: float = statistics.median(slowest)
    return round(median * 1e6, 1)


def work(place: Place, names: list[str], timed: bool) -> dict[str, Any]:
    """One rank's share."""
    return {"checks": run_checks(place, names), "times": time_calls(place) if timed else []}


def main() -> int:
    """Run the checks on some ranks; the exit status is 1 if one fails on any."""
    parser = argparse.ArgumentParser(prog="python -m tools.dist", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="how many to start on this machine (torchrun has its own)")
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), help="default: nccl where every rank has a GPU, else gloo"
    )
    parser.add_argument("--match", default="", help="run only checks whose name contains this")
    parser.add_argument("--no-times", action="store_true", help="measure nothing")
    parser.add_argument("--json", type=Path, help="write results and times here")
    parser.add_argument("--seconds", type=float, default=300, help="end everything after this time")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")

    def chosen(backend: str, size: int) -> list[str]:
        return [name for name in applicable(options.device, backend, size) if options.match in name]

    if under_torchrun():
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        with joined(options.device, options.backend or _backend(options.device, local)) as place:
            mine = work(place, chosen(place.backend, place.size), not options.no_times)
            everyone: list[Any] = [None] * place.size
            c10d.all_gather_object(everyone, mine)
            return _tell(options, place.backend, everyone) if place.rank == 0 else int(_failures(everyone) != {})
    from tools.dist.__main__ import work as importable  # ranks cannot import this module under the name __main__

    backend = options.backend or _backend(options.device, options.ranks)
    limits = {"seconds": options.seconds, "collective_seconds": 60}
    work_of_ranks = (chosen(backend, options.ranks), not options.no_times)
    reports = launch(importable, options.ranks, *work_of_ranks, device=options.device, backend=backend, **limits)
    broken = {f"rank {r.rank}": r.error for r in reports if r.value is None}
    return _tell(options, backend, [r.value for r in reports if r.value is not None], broken, options.ranks)


def _backend(device: str, ranks_here: int) -> str:
    return "nccl" if device == "cuda" and ranks_here <= torch.cuda.device_count() else "gloo"


def _failures(everyone: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The messages of the ranks on which each check failed."""
    found: dict[str, dict[str, str]] = {}
    for rank, one in enumerate(everyone):
        for name, message in one["checks"].items():
            if message:
                found.setdefault(name, {})[f"rank {rank}"] = message
    return found


def _tell(
    options: argparse.Namespace,
    backend: str,
    everyone: list[dict[str, Any]],
    broken: dict[str, str] | None = None,
    size: int | None = None,
) -> int:
    """Print and write the results."""
    failures = _failures(everyone)
    names = list(everyone[0]["checks"]) if everyone else []
    passed = not failures and not broken and bool(names)
    ranks = size or len(everyone)
    for name in names:
        print(f"{'FAIL' if name in failures else 'pass'} {name}")
        for rank, message in failures.get(name, {}).items():
            print(f"     {rank}: {message}")
    for rank, error in (broken or {}).items():
        print(f"FAIL {rank} did not finish: {error}")
    times = everyone[0]["times"] if everyone else []
    if times:
        print("microseconds, MiniMax-M2's q and k (6144 and 1024 columns, bfloat16):")
        print("  " + "  ".join(times[0]))
        for line in times:
            print("  " + "  ".join(str(value).rjust(len(key)) for key, value in line.items()))
    if options.json:
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": torch.cuda.get_device_name() if options.device == "cuda" else _cpu(),
            "torch": torch.__version__,
            "ranks": ranks,
            "backend": backend,
            "device": options.device,
            "passed": passed,
            "checks": {name: failures.get(name, {}) for name in names},
            "broken": broken or {},
            "times_us": times,
        }
        options.json.write_text(compact.dumps(record))
    done = f"{len(names) - len(failures)} of {len(names)} checks on {ranks} ranks"
    print(f"{'PASS' if passed else 'FAIL'}: {done} ({backend}, {options.device})")
    return 0 if passed else 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores, {model}"


if __name__ == "__main__":
    sys.exit(main())
