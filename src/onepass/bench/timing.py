"""How times are taken.

On a GPU: a CUDA graph chains many calls over rotating inputs, so that launch gaps count and large inputs are cold in
L2; the median of repeated replays, taken twice. On a CPU: the contenders take turns, round after round, over rotating
inputs, so that a slow moment of the machine hits them all; the median of each half of the rounds. A measurement during
which somebody else had the cores is taken again.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]


def graph_times(calls: Sequence[Call], *, chain_us: float = 2000.0, replays: int = 15) -> list[float]:
    """Microseconds a call in a graph that chains ``calls`` over and over: two medians, the second a fresh measurement."""
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


BUSY = 3.0
"""A median this many times the quickest call says that somebody else had the cores."""


def turns(
    calls: Mapping[str, Sequence[Call]],
    *,
    seconds: float = 4.0,
    least: int = 5,
    most: int = 300,
    attempts: int = 4,
    pause: float = 3.0,
) -> tuple[dict[str, list[float]], float]:
    """Microseconds a call, contenders taking turns: the medians of two halves of the time, and how busy the machine was.

    That is the largest ratio of a contender's median to its quickest call; while it is over `BUSY` the measurement is taken
    again after a pause, and the quietest of all attempts is what counts.
    """
    for members in calls.values():
        members[0]()  # compiles, wakes threads
    best: tuple[dict[str, list[float]], float] = {}, math.inf
    for attempt in range(attempts):
        if attempt:
            time.sleep(pause)
        found = _turns(calls, seconds, least, most)
        best = min(best, found, key=lambda item: item[1])
        if best[1] <= BUSY:
            break
    return best


def _turns(
    calls: Mapping[str, Sequence[Call]], seconds: float, least: int, most: int
) -> tuple[dict[str, list[float]], float]:
    start = time.perf_counter()
    for members in calls.values():
        members[-1]()
    rounds = max(least, min(most, int(seconds / 2 / max(time.perf_counter() - start, 1e-9))))
    medians: dict[str, list[float]] = {name: [] for name in calls}
    quickest = dict.fromkeys(calls, math.inf)
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
            quickest[name] = min(quickest[name], *times)
    return medians, max(max(us) / quickest[name] for name, us in medians.items())


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
