"""How times are measured.

On a GPU, a CUDA graph chains many calls over rotating inputs, so that launch gaps count and large
inputs are cold in L2; the result is the median of repeated replays, measured twice. In such a chain
a kernel with programmatic launch overlaps the previous call. Every call is therefore also timed
behind an ordinary kernel: a graph of (kernel, call) pairs, less the same graph of the kernel alone.

On a CPU, the contenders take turns, round after round, over rotating inputs, so that a slow moment
of the machine affects all of them. A turn is one call, or several if calls are short. The results are
the medians of each half of the rounds. A measurement is repeated if other processes used the cores
meanwhile.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

Call = Callable[[], object]


CHAIN_US, REPLAYS = 2000.0, 15
"""How long a graph of one contender's calls should take, and how often it is replayed for each of its two medians."""
PAIRS_US, PAIR_REPLAYS = 800.0, 9
"""The same for calls behind an ordinary kernel; shorter, because every contender is timed this way too."""
ALONE = 100
"""Ordinary kernels in the graph that times them alone."""
SHORT_US, IN_A_ROW = 100.0, 20
"""On a CPU, a turn of contenders that take less than this on average is so many calls in a row, as in a tight loop."""
BUSY = 0.1
"""The share of all cores that other processes may use during a measurement."""


def graph_times(calls: Sequence[Call], *, chain_us: float = CHAIN_US, replays: int = REPLAYS) -> list[float]:
    """Microseconds per call in a graph that chains ``calls`` over and over: two medians, the second a fresh measurement."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(work: Callable[[], object]) -> float:
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def once() -> None:
        for call in calls:
            call()

    medians = []
    with torch.cuda.stream(stream):
        once()
        torch.cuda.synchronize()
        guess = min(max(timed(once) / len(calls), 1.0), 400.0)
        rounds = max(1, min(400, int(chain_us / guess)) // len(calls))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                once()
        for _ in range(2):
            for _ in range(3):
                graph.replay()
            samples = [timed(graph.replay) / (rounds * len(calls)) for _ in range(replays)]
            medians.append(statistics.median(samples))
    return medians


class Behind:
    """Times calls behind an ordinary kernel: (kernel, call) pairs in a graph, less the kernel alone.

    The kernel is one of torch's, launched without programmatic launch, on a tensor that nobody else
    uses. The difference is what a call adds to a stream of other kernels: its work, its launch and
    the part of its start that could not overlap. The kernel alone is timed right after the pairs, in
    a chain of at least `ALONE`. Timed once at the start of a run, in a chain whose length was guessed
    from one call, it came out about 3 us too long.
    """

    def __init__(self, device: str = "cuda", columns: int = 7168) -> None:
        self.row = torch.zeros(columns, dtype=torch.bfloat16, device=device)

    def kernel(self) -> object:
        """The ordinary kernel: one row plus one, in place."""
        return self.row.add_(1)

    def times(self, calls: Sequence[Call]) -> list[float]:
        """Microseconds that each call adds behind the kernel: two medians."""

        def pair(call: Call) -> Call:
            return lambda: (self.kernel(), call())

        pairs, alone = (
            graph_times(chain, chain_us=PAIRS_US, replays=PAIR_REPLAYS)
            for chain in ([pair(call) for call in calls], [self.kernel] * ALONE)
        )
        return [us - min(alone) for us in pairs]


def turns(
    calls: Mapping[str, Sequence[Call]],
    *,
    seconds: float = 4.0,
    least: int = 5,
    most: int = 300,
    attempts: int = 4,
    pause: float = 4.0,
) -> tuple[dict[str, list[float]], float]:
    """Two medians per contender in microseconds per call, and the share of the cores that other processes used.

    While that share exceeds `BUSY` the measurement is repeated after a pause; the quietest one counts.
    """
    for members in calls.values():
        members[0]()  # compiles, wakes threads
    best: tuple[dict[str, list[float]], float] = {}, math.inf
    for attempt in range(attempts):
        if attempt:
            time.sleep(pause)
        before = _clocks()
        start = time.perf_counter()
        for members in calls.values():
            members[-1]()
        once = max(time.perf_counter() - start, 1e-9)
        inner = IN_A_ROW if once * 1e6 < SHORT_US * len(calls) else 1
        rounds = max(least, min(most, int(seconds / 2 / inner / once)))
        found = alternate(calls, rounds, inner)
        best = min(best, (found, others(before, _clocks())), key=lambda item: item[1])
        if best[1] <= BUSY:
            break
    return best


def alternate(
    calls: Mapping[str, Sequence[Call]],
    rounds: int,
    inner: int = 1,
    reduce: Callable[[list[float]], float] = statistics.median,
    wait: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Two times per contender, each reduced from ``rounds`` samples of ``inner`` calls; contenders alternate."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(2):
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for i in range(rounds):
            # Neighbours use different inputs, so that none finds its own in a cache because another has read them.
            for place, (name, members) in enumerate(calls.items(), i):
                call = members[place % len(members)]
                if wait is not None:
                    wait()
                start = time.perf_counter()
                for _ in range(inner):
                    call()
                samples[name].append((time.perf_counter() - start) / inner * 1e6)
        for name, found in samples.items():
            times[name].append(reduce(found))
    return times


def _clocks() -> tuple[float, float, float]:
    """Seconds of wall time, of work on all cores, and of this process's work. Unknown work of other processes counts as zero."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
        user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields)
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        busy = time.process_time()
    return time.perf_counter(), busy, time.process_time()


def others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """The share of all cores that other processes used between two readings; clocks are too coarse for under half a second."""
    wall, busy, own = (b - a for a, b in zip(before, after, strict=True))
    return 0.0 if wall < 0.5 else max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))


class Load:
    """Watches whether other processes use this machine; remembers the worst reading."""

    def __init__(self, wait: float = 0.6) -> None:
        self.before = _clocks()
        self.worst = 0.0
        if wait:
            time.sleep(wait)

    def quiet(self) -> bool:
        """Whether other processes never used more than `BUSY` of all cores. Readings under half a second apart are ignored."""
        now = _clocks()
        if now[0] - self.before[0] >= 0.5:
            self.worst = max(self.worst, others(self.before, now))
            self.before = now
        return self.worst <= BUSY
