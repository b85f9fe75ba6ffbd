"""What a GPU can do at best, measured in the same run: copy and read rates, an empty kernel, streams of any size, clocks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

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
def _early_read_kernel(source, target, n, BLOCK: tl.constexpr):
    """A read that may begin before its predecessor has ended."""
    cuda.gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(source + place, mask=place < n, other=0, eviction_policy="evict_first"), 0)
    cuda.gdc_wait()
    if total == 123456789:
        tl.store(target, total)


@triton.jit
def _empty_kernel(target):
    tl.static_assert(True)


def _streaming(kernel: Any, source: Tensor, target: Tensor, block: int) -> Callable[[], object]:
    n = source.numel()
    return lambda: kernel[(triton.cdiv(n, block),)](source, target, n, block, num_warps=block // 512)


def ceilings() -> dict[str, float]:
    """Copy and read bandwidth (TB/s, best of several block sizes) and an empty kernel in a chain (us), here and now."""
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


def calls(kind: Stream, size: int, sets: int) -> list[Call]:
    """Streams that move ``size`` bytes in all, over ``sets`` pieces of memory: a copy, or a read that starts early."""
    if kind != "read":
        pairs = [torch.randint(0, 100, (2, max(1, size // 8)), dtype=torch.int32, device="cuda") for _ in range(sets)]
        return [partial(_copied, pair) for pair in pairs]
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    words = [torch.randint(0, 100, (max(1, size // 4),), dtype=torch.int32, device="cuda") for _ in range(sets)]
    early = torch.cuda.get_device_capability() >= (9, 0)
    return [partial(_read_early if early else _read, source, flag) for source in words]


def _copied(pair: Tensor) -> None:
    n = pair.shape[1]
    _copy_kernel[(triton.cdiv(n, 2048),)](pair[0], pair[1], n, 2048, num_warps=4)


def _read(words: Tensor, flag: Tensor) -> None:
    n = words.numel()
    _read_kernel[(triton.cdiv(n, 2048),)](words, flag, n, 2048, num_warps=4)


def _read_early(words: Tensor, flag: Tensor) -> None:
    n = words.numel()
    _early_read_kernel[(triton.cdiv(n, 8192),)](words, flag, n, 8192, num_warps=8, launch_pdl=True)


_CLOCKS = {
    "clocks.sm": "SM MHz",
    "clocks.mem": "memory MHz",
    "temperature.gpu": "temperature C",
    "power.draw": "power W",
}


def clocks() -> dict[str, float]:
    """What nvidia-smi says of the first visible GPU while it copies; nothing where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    copy = calls("copy", 1 << 30, 1)[0]
    for _ in range(4000):  # about a second of work, asked about meanwhile
        copy()
    uuid = str(torch.cuda.get_device_properties().uuid)
    command = ["nvidia-smi", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader,nounits", f"--id=GPU-{uuid}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    torch.cuda.synchronize()
    return parse_clocks(done.stdout) if done.returncode == 0 else {}


def parse_clocks(line: str) -> dict[str, float]:
    """``1980, 3201, 40, 210.5`` by name; what a GPU does not tell is left out."""
    found = {}
    for name, value in zip(_CLOCKS.values(), line.strip().split(","), strict=False):
        try:
            found[name] = float(value)
        except ValueError:
            continue
    return found
