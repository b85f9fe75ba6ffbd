"""The ceilings of a GPU, measured in the same run: copy and read rates, an empty kernel, streams of any size, clocks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from .timing import graph_times
from .workload import Call, Stream


@triton.jit
def _copy_kernel(source, target, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < n), mask=place < n)


@triton.jit
def _read_kernel(source, target, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(source + place, mask=place < n, other=0), 0)
    if total == 123456789:
        tl.store(target, total)


@triton.jit
def _stream_kernel(
    source, target, n, KIND: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, PROGRAMMATIC: tl.constexpr
):
    """Move ``n`` elements: copy them, write half of their bytes, or only read them.

    With programmatic launch it loads before the previous kernel has ended, which no op may do with its
    inputs, and lets the next one start at once (EARLY) or after the loads.
    """
    if PROGRAMMATIC and EARLY:
        cuda.gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    found = tl.load(source + place, mask=inside, other=0, eviction_policy="evict_first")
    if PROGRAMMATIC and not EARLY:
        cuda.gdc_launch_dependents()
    if KIND == "read":
        total = tl.sum(found, 0)
        if PROGRAMMATIC:
            cuda.gdc_wait()
        if total == 123456789:
            tl.store(target, total)
    else:
        if PROGRAMMATIC:
            cuda.gdc_wait()
        tl.store(target + place, found.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _empty_kernel(target):
    tl.static_assert(True)


def _streaming(kernel: Any, source: Tensor, target: Tensor, block: int) -> Callable[[], object]:
    n = source.numel()
    return lambda: kernel[(triton.cdiv(n, block),)](source, target, n, block, num_warps=block // 512)


def ceilings() -> dict[str, float]:
    """Copy and read bandwidth (TB/s, best of several block sizes) and the time of an empty kernel in a chain (us)."""
    results: dict[str, float] = {}
    for label, size in (("copy 2 GiB", 1 << 30), ("copy 128 MiB", 64 << 20), ("read 1 GiB", 1 << 30)):
        reads = label.startswith("read")
        pair = [torch.randint(0, 100, (size // 4,), dtype=torch.int32, device="cuda") for _ in range(2)]
        times = []
        for block in (1024, 2048, 4096):
            kernel = _read_kernel if reads else _copy_kernel
            times += graph_times([_streaming(kernel, a, b, block) for a, b in (pair, pair[::-1])])
        results[f"{label} TB/s"] = size * (1 if reads else 2) / min(times) / 1e6
    flag = torch.zeros(1, device="cuda")
    results["empty kernel us"] = min(graph_times([lambda: _empty_kernel[(1,)](flag)]))
    return results


class Tile(NamedTuple):
    """How a stream is split: bytes that one program loads, its warps, and when it lets the next kernel start."""

    bytes: int
    warps: int
    early: bool


TILES = tuple(
    Tile(size, warps, early)
    for size, warps in ((4096, 2), (8192, 4), (16384, 8), (32768, 8))
    for early in (True, False)
)
"""The fastest of these at a size is its ceiling. Large copies need different tiles from small ones."""
_TRIAL: Any = {"chain_us": 500.0, "replays": 5}


Pair = tuple[Tensor, Tensor]


def length(kind: Stream, size: int) -> int:
    """Elements of a stream that moves ``size`` bytes: a multiple of 16.

    Triton vectorizes loads only for such lengths. A copy of 5 more elements took three times as long
    (65 us instead of 22 for 88 MB).
    """
    return max(16, size // {"copy": 8, "halve": 3, "read": 4}[kind] // 16 * 16)


def pairs(kind: Stream, size: int, sets: int) -> list[Pair]:
    """Inputs and outputs of ``sets`` streams that each move ``size`` bytes.

    "copy" writes what it reads, "halve" writes half of it, "read" writes nothing.
    """
    n = length(kind, size)
    words = torch.int16 if kind == "halve" else torch.int32
    written = torch.int8 if kind == "halve" else words
    sources = [torch.randint(0, 100, (n,), dtype=words, device="cuda") for _ in range(sets)]
    return [(s, torch.empty(1 if kind == "read" else n, dtype=written, device="cuda")) for s in sources]


def calls(kind: Stream, tensors: Sequence[Pair], tile: Tile) -> list[Call]:
    """One stream per pair."""
    programmatic = torch.cuda.get_device_capability() >= (9, 0)
    more = {"launch_pdl": True} if programmatic else {}

    def one(source: Tensor, target: Tensor) -> Call:
        n, block = source.numel(), tile.bytes // source.element_size()
        grid = (triton.cdiv(n, block),)
        return lambda: _stream_kernel[grid](
            source, target, n, kind, block, tile.early, programmatic, num_warps=tile.warps, **more
        )

    return [one(*pair) for pair in tensors]


def best_stream(kind: Stream, size: int, sets: int) -> tuple[list[float], Tile]:
    """The fastest stream of a size in a chain of itself: its two medians, and its tile. The two best of a short trial compete."""
    tensors = pairs(kind, size, sets)
    trials = {tile: min(graph_times(calls(kind, tensors, tile), **_TRIAL)) for tile in TILES}
    tiles = sorted(trials, key=lambda tile: trials[tile])[:2]
    measured = {tile: graph_times(calls(kind, tensors, tile)) for tile in tiles}
    best = min(measured, key=lambda tile: min(measured[tile]))
    return measured[best], best


_CLOCKS = {
    "clocks.sm": "SM MHz",
    "clocks.mem": "memory MHz",
    "temperature.gpu": "temperature C",
    "power.draw": "power W",
}


def clocks() -> dict[str, float]:
    """What nvidia-smi reports of the first visible GPU while it copies; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    copy = calls("copy", pairs("copy", 1 << 30, 1), TILES[2])[0]
    for _ in range(4000):  # about a second of work, queried meanwhile
        copy()
    uuid = str(torch.cuda.get_device_properties().uuid)
    command = ["nvidia-smi", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader,nounits", f"--id=GPU-{uuid}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    torch.cuda.synchronize()
    return parse_clocks(done.stdout) if done.returncode == 0 else {}


def parse_clocks(line: str) -> dict[str, float]:
    """``1980, 3201, 40, 210.5`` by name; what a GPU does not report is left out."""
    found = {}
    for name, value in zip(_CLOCKS.values(), line.strip().split(","), strict=False):
        try:
            found[name] = float(value)
        except ValueError:
            continue
    return found
