"""What a process holds (memory, descriptors, threads, onepass's caches) and how long steps take, per quarter of a run."""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
from array import array
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from onepass.core import op as registration
from onepass.core.op import MAX_REMEMBERED

QUARTERS: Final = 4
KEPT: Final = 4000
"""Step times sampled per quarter, in an array: a list of floats would itself count as growth."""
MIB: Final = 2**20


class Reading(NamedTuple):
    """One reading, in bytes and counts; without a GPU its bytes are 0."""

    resident: int
    blocks: int
    descriptors: int
    threads: int
    allocated: int
    reserved: int
    options: int
    entries: int


GROWTH: Final[dict[str, tuple[str, dict[str, int]]]] = {
    "resident": ("resident memory", {"cpu": 16 * MIB, "cuda": 64 * MIB}),
    "blocks": ("Python's memory blocks", {"cpu": 60_000, "cuda": 600_000}),
    "allocated": ("allocated GPU memory", {"cpu": 0, "cuda": 2 * MIB}),
    "reserved": ("reserved GPU memory", {"cpu": 0, "cuda": 64 * MIB}),
    "entries": ("kernels, plans and other entries that onepass keeps", {"cpu": 32, "cuda": 32}),
}
"""What may grow, and by how much, from the median of the first quarter after the warm-up to that of the last.

Host memory varies by the size of `MAX_REMEMBERED` combinations of options.
"""
CONSTANT: Final = {"descriptors": "file descriptors", "threads": "threads"}
BOUNDED: Final = {"options": "combinations of options"}


def read(device: str) -> Reading:
    """Take a reading after a garbage collection."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    cuda = device == "cuda"
    return Reading(
        pages * os.sysconf("SC_PAGE_SIZE"),
        sys.getallocatedblocks(),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        torch.cuda.memory_allocated() if cuda else 0,
        torch.cuda.memory_reserved() if cuda else 0,
        *remembered(),
    )


def remembered() -> tuple[int, int]:
    """The most option combinations of an op, and the entries of all other caches."""
    entries = 0
    options = max(len(op.specs) for op in registration.ops)
    for name, module in list(sys.modules.items()):
        if name.startswith("onepass.") and ".testing" not in name:
            for held, value in list(vars(module).items()):
                for cache in (value, getattr(value, "kernels", None), getattr(value, "plans", None)):
                    if isinstance(cache, dict) and not held.startswith("__"):
                        entries += len(cache)
                if hasattr(value, "cache_info") and getattr(value, "__module__", "") == name:
                    entries += value.cache_info().currsize
    return options, entries


class Watch:
    """Readings and step times by quarter; ``quarter`` is None during warm-up."""

    def __init__(self, device: str, look: Callable[[str], Reading] = read) -> None:
        self.device, self._look = device, look
        self.start = look(device)
        self.last = self.start
        self.readings: list[list[Reading]] = [[] for _ in range(QUARTERS)]
        self.times: dict[str, list[array[float]]] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._random = random.Random(0)

    def look(self, quarter: int | None) -> Reading:
        """Take a reading."""
        self.last = self._look(self.device)
        if quarter is not None:
            self.readings[quarter].append(self.last)
        return self.last

    def time(self, name: str, quarter: int | None, seconds: float) -> None:
        """Record a step's time."""
        if quarter is None:
            return
        kept = self.times.setdefault(name, [array("d") for _ in range(QUARTERS)])[quarter]
        count = self._counts[name, quarter] = self._counts.get((name, quarter), 0) + 1
        if len(kept) < KEPT:
            kept.append(seconds)
        elif (at := self._random.randrange(count)) < KEPT:
            kept[at] = seconds

    def medians(self) -> dict[str, list[float]]:
        """Median seconds of a step in each quarter that has any."""
        return {name: [statistics.median(q) for q in quarters if q] for name, quarters in self.times.items()}

    def growth(self) -> dict[str, float]:
        """The growth of each reading's median from the first quarter to the last."""
        first, last = self.readings[0], self.readings[-1]
        if not first or not last:
            return {}
        return {
            name: statistics.median(getattr(r, name) for r in last) - statistics.median(getattr(r, name) for r in first)
            for name in Reading._fields
        }

    def faults(self) -> list[str]:
        """What grew beyond its bound, or changed although it must not."""
        grown = self.growth()
        if not grown:
            return ["no readings in the first and the last quarter: the run was too short"]
        found = [
            f"{what} grew by {grown[name]:.0f}, at most {most[self.device]} is allowed"
            for name, (what, most) in GROWTH.items()
            if grown[name] > most[self.device]
        ]
        after = [r for quarter in self.readings for r in quarter]
        for name, what in CONSTANT.items():
            values = sorted({getattr(r, name) for r in after})
            if len(values) > 1:
                found.append(f"the number of {what} was {values[0]} to {values[-1]} after the warm-up")
        for name, what in BOUNDED.items():
            most = max(getattr(r, name) for r in after)
            if most > MAX_REMEMBERED:
                found.append(f"{most} {what} are remembered, at most {MAX_REMEMBERED} may be")
        return found
