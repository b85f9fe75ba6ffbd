"""How times are taken.

On a GPU: a CUDA graph chains many calls over rotating inputs, so that launch gaps count and large inputs are cold in
L2; the median of repeated replays, taken twice. In such a chain a kernel with programmatic launch overlaps the call before
it. So every call is also timed behind an ordinary kernel: a graph of (kernel, call) pairs, less the same graph of the
kernel alone. On a CPU: the contenders take turns, round after round, over rotating
inputs, so that a slow moment of the machine hits them all; the median of each half of the rounds. A measurement during
which others had the cores is taken again.
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
"""The same for calls behind an ordinary kernel. Less, because every contender is measured this way too."""
ALONE = 100
"""Ordinary kernels in the graph that times them alone."""


def graph_times(calls: Sequence[Call], *, chain_us: float = CHAIN_US, replays: int = REPLAYS) -> list[float]:
    """Microseconds per call in a graph that chains ``calls`` over and over: two medians, the second a fresh measurement."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    medians = []
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        begin.record()
        for call in calls:
            call()
        end.record()
        torch.cuda.synchronize()
        guess = min(max(begin.elapsed_time(end) * 1e3 / len(calls), 1.0), 400.0)
        rounds = max(1, min(400, int(chain_us / guess)) // len(calls))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        for _ in range(2):
            for _ in range(3):
                graph.replay()
            samples = []
            for _ in range(replays):
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                samples.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
            medians.append(statistics.median(samples))
    return medians


class Behind:
    """Times calls behind an ordinary kernel: (kernel, call) pairs in a graph, less the kernel alone.

    The kernel is one of torch's, launched without programmatic launch, on a tensor that nobody else uses. What is left after
    the subtraction is what a call adds to a stream of other people's kernels: its work, its launch and whatever of its start
    could not overlap. The kernel alone is timed right after the pairs, in a chain of at least `ALONE`. Timed once at the start of
    a run, in a chain as long as a guess from one call made it, it came out about 3 us too long.
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

        pairs = self._times([pair(call) for call in calls])
        alone = min(self._times([self.kernel] * ALONE))
        return [us - alone for us in pairs]

    @staticmethod
    def _times(calls: Sequence[Call]) -> list[float]:
        return graph_times(calls, chain_us=PAIRS_US, replays=PAIR_REPLAYS)


BUSY = 0.1
"""The share of all cores that others may have during a measurement."""


def turns(
    calls: Mapping[str, Sequence[Call]],
    *,
    seconds: float = 4.0,
    least: int = 5,
    most: int = 300,
    attempts: int = 4,
    pause: float = 4.0,
) -> tuple[dict[str, list[float]], float]:
    """Microseconds a call, contenders taking turns: the medians of two halves of the time; and the share of cores others had.

    While that is over `BUSY` the measurement is taken again after a pause; the one with the least counts.
    """
    for members in calls.values():
        members[0]()  # compiles, wakes threads
    best: tuple[dict[str, list[float]], float] = {}, math.inf
    for attempt in range(attempts):
        if attempt:
            time.sleep(pause)
        before = _clocks()
        found = _turns(calls, seconds, least, most)
        best = min(best, (found, others(before, _clocks())), key=lambda item: item[1])
        if best[1] <= BUSY:
            break
    return best


def _turns(calls: Mapping[str, Sequence[Call]], seconds: float, least: int, most: int) -> dict[str, list[float]]:
    start = time.perf_counter()
    for members in calls.values():
        members[-1]()
    rounds = max(least, min(most, int(seconds / 2 / max(time.perf_counter() - start, 1e-9))))
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(2):
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for i in range(rounds):
            # each on other inputs than those before it: nobody finds them in a cache because somebody else has read them
            for place, (name, members) in enumerate(calls.items(), i):
                call = members[place % len(members)]
                start = time.perf_counter()
                call()
                samples[name].append((time.perf_counter() - start) * 1e6)
        for name, times in samples.items():
            medians[name].append(statistics.median(times))
    return medians


def _clocks() -> tuple[float, float, float]:
    """Seconds: by the wall, of all cores' work, of this process's work. Where the system does not tell, others have none."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
        user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields)
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        busy = time.process_time()
    return time.perf_counter(), busy, time.process_time()


def others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """The share of all cores that other processes had between two readings; clocks tick too seldom for less than half a second."""
    wall, busy, own = (b - a for a, b in zip(before, after, strict=True))
    return 0.0 if wall < 0.5 else max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))


class Load:
    """Whether this machine is the process's own: asked again and again, it remembers the worst answer."""

    def __init__(self, wait: float = 0.6) -> None:
        self.before = _clocks()
        self.worst = 0.0
        if wait:
            time.sleep(wait)

    def quiet(self) -> bool:
        """Whether others have had no more than `BUSY` of all cores. Readings closer than half a second tell nothing."""
        now = _clocks()
        if now[0] - self.before[0] >= 0.5:
            self.worst = max(self.worst, others(self.before, now))
            self.before = now
        return self.worst <= BUSY


def interleaved_times(calls: Mapping[str, Call], *, rounds: int = 30, inner: int = 1) -> dict[str, float]:
    """Microseconds a call: each contender ``inner`` times in turn, for ``rounds`` rounds; medians."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(inner):
                call()
            samples[name].append((time.perf_counter() - start) / inner * 1e6)
    return {name: statistics.median(times) for name, times in samples.items()}
