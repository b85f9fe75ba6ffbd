"""How times are taken.

On a GPU: a CUDA graph chains many calls over rotating inputs, so that launch gaps count and large inputs are cold in
L2; the median of repeated replays, taken twice. On a CPU: the contenders take turns, round after round, and each
reports its median, so that a slow moment of the machine hits them all.
"""

from __future__ import annotations

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


def host_time(call: Call, *, count: int = 2000) -> float:
    """Microseconds the host spends on one eager call, the GPU's work overlapping; the best of five rounds."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count // 5):
            call()
        best = min(best, (time.perf_counter() - start) / (count // 5))
    torch.cuda.synchronize()
    return best * 1e6


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
