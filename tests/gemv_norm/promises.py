"""Promises of the GEMV: bytes depend on the row alone, streams do not interfere, graphs replay, kernels wait for inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from onepass.formats import E4M3FN, FLOATS
from onepass.ops.gemv_norm.op import gemv_and_partial_norm
from onepass.ops.linear.op import linear
from onepass.ops.rms_norm.op import rms_norm
from onepass.testing.tensors import same_bytes
from tests.linear.promises import weights_of

Promise = Callable[[], str | None]

LAUNCHES = 100_000
STREAMS = 4


def promises(device: str) -> Iterator[tuple[str, Promise]]:
    """Name and test of every promise that can be tested on ``device``."""
    for dtype in FLOATS:
        for k in (512, 3584, 1001):
            label = f"K = {k}, {str(dtype).removeprefix('torch.')}"
            yield f"a row alone is the row in a batch: gemv, {label}", partial(_batch, device, k, dtype, None)
            yield f"alignment changes no bit: gemv, {label}", partial(_alignment, device, k, dtype)
    yield (
        "a row alone is the row in a batch: gemv, fp8 weights",
        partial(_batch, device, 3072, torch.bfloat16, E4M3FN.dtype),
    )
    for kind in ("fp8 row", "fp8 block", "fp8 ue8m0", "int8 row"):
        for n, k in ((300, 1001), (2112, 1536), (4500, 264))[: 1 if kind == "fp8 ue8m0" else 3]:
            label = f"{kind} scales, N = {n}, K = {k}"
            yield f"a row alone is the row in a batch: gemv, {label}", partial(_scaled, device, n, k, kind)
    yield "a thousand repeats change no bit: gemv", lambda: _repeats(device)
    if device == "cuda":
        yield f"gemv: {LAUNCHES} launches over {STREAMS} streams, none wrong", _streams
        yield "gemv: two graphs replayed at once do not share a counter", _graphs
        yield "gemv: act is read after the kernel that writes it", _chain


def _inputs(
    device: str, m: int, n: int, k: int, dtype: torch.dtype, weight: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    act = torch.randn(m, k, device=device).to(dtype)
    gammas = [torch.randn(w, device=device).to(dtype) for w in (n // 2, n // 4)]
    return act, torch.randn(n, k, device=device).to(weight or dtype), gammas[0], gammas[1:]


def _batch(device: str, k: int, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> str | None:
    act, weight, gamma, more = _inputs(device, 16, 100, k, dtype, weight_dtype)
    whole = gemv_and_partial_norm(act, weight, gamma, segments=more)
    for m in range(1, 17):
        for begin in (0, 16 - m):
            part = gemv_and_partial_norm(act[begin : begin + m], weight, gamma, segments=more)
            for index, (few, all_) in enumerate(zip(part, whole, strict=True)):
                if not same_bytes(few, all_[begin : begin + m]):
                    return f"result {index} of rows {begin} to {begin + m} differs from the whole batch's"
    return None


def _scaled(device: str, n: int, k: int, kind: str) -> str | None:
    """Rows alone and in batches, in one launch and in two; on a CPU, also the product of `linear`."""
    weight, scale = weights_of(device, n, k, kind, torch.bfloat16)
    act, gamma = torch.randn(16, k, device=device).bfloat16(), torch.randn(n // 2, device=device).bfloat16()
    product = gemv_and_partial_norm(act, weight, gamma, weight_scale=scale)[1]
    if device == "cpu":
        product = linear(act, weight, weight_scale=scale)[:, n // 2 :]
    for fused in (True, False):
        whole = gemv_and_partial_norm(act, weight, gamma, weight_scale=scale, fused=fused)
        if not same_bytes(whole[1], product):
            return f"the columns without a norm differ from the product (fused={fused})"
        for m in (1, 7, 8, 16) if fused else (1, 9):
            part = gemv_and_partial_norm(act[:m], weight, gamma, weight_scale=scale, fused=fused)
            for index, (few, all_) in enumerate(zip(part, whole, strict=True)):
                if not same_bytes(few, all_[:m]):
                    return f"result {index} of {m} rows differs from the whole batch's (fused={fused})"
    return None


def _alignment(device: str, k: int, dtype: torch.dtype) -> str | None:
    act, weight, gamma, more = _inputs(device, 5, 60, k, dtype)
    expected = gemv_and_partial_norm(act, weight, gamma, segments=more)
    for shift in (1, 3, 8):
        moved = torch.empty(5 * k + 16, device=device, dtype=dtype)[shift : shift + 5 * k].view(5, k).copy_(act)
        apart = torch.empty(60, k + shift, device=device, dtype=dtype)[:, :k].copy_(weight)
        for label, a, w in (("act moved", moved, weight), ("rows of weight apart", act, apart)):
            for index, (one, other) in enumerate(
                zip(gemv_and_partial_norm(a, w, gamma, segments=more), expected, strict=True)
            ):
                if not same_bytes(one, other):
                    return f"result {index} differs with {label} by {shift} elements"
    return None


def _repeats(device: str) -> str | None:
    act, weight, gamma, more = _inputs(device, 3, 700, 1024, torch.bfloat16)
    first = gemv_and_partial_norm(act, weight, gamma, segments=more)
    for repeat in range(1000):
        again = gemv_and_partial_norm(act, weight, gamma, segments=more)
        if not all(same_bytes(a, b) for a, b in zip(first, again, strict=True)):
            return f"repeat {repeat} differs"
    return None


def _streams() -> str | None:
    """Random shapes on several streams at once; every output is poisoned before its launch and compared after it."""
    chance = random.Random(0)
    problems = []
    for _ in range(64):
        m, n, k = chance.randint(1, 16), chance.randint(4, chance.choice((600, 6000))), 16 * chance.randint(1, 64)
        act, weight, gamma, more = _inputs("cuda", m, n, k, torch.bfloat16)
        expected = gemv_and_partial_norm(act, weight, gamma, segments=more)
        outs = [[torch.empty_like(t) for t in expected] for _ in range(STREAMS)]
        problems.append((act, weight, gamma, more, expected, outs))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    for launch in range(LAUNCHES):
        place = launch % STREAMS
        act, weight, gamma, more, expected, outs = problems[chance.randrange(len(problems))]
        mine = outs[place]
        with torch.cuda.stream(streams[place]):
            torch._foreach_zero_(mine)
            gemv_and_partial_norm(act, weight, gamma, segments=more, out=mine)
            for got, right in zip(mine, expected, strict=True):
                if got.numel():
                    wrong[place].add_((got != right).sum())
    torch.cuda.synchronize()
    total = sum(int(count) for count in wrong)
    return f"{total} values differ" if total else None


def _graphs() -> str | None:
    """Two captured chains of calls, replayed on two streams at once, on new inputs each time."""
    sets = [_inputs("cuda", 2, 300, 2048, torch.bfloat16) for _ in range(2)]
    for act, weight, gamma, more in sets:
        gemv_and_partial_norm(act, weight, gamma, segments=more)
    torch.cuda.synchronize()
    graphs, results = [], []
    for act, weight, gamma, more in sets:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append([gemv_and_partial_norm(act, weight, gamma, segments=more) for _ in range(20)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(20):
        for act, *_rest in sets:
            act.copy_(torch.randn_like(act))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for (act, weight, gamma, more), chain in zip(sets, results, strict=True):
            expected = gemv_and_partial_norm(act, weight, gamma, segments=more)
            for call in chain:
                if not all(same_bytes(a, b) for a, b in zip(call, expected, strict=True)):
                    return "a replay differs from an eager call"
    return None


def _chain() -> str | None:
    """A norm writes act, the GEMV reads it, and the next norm reads what the GEMV wrote, launch upon launch."""
    x, weight, gamma, more = _inputs("cuda", 1, 2112, 7168, torch.bfloat16)
    before = torch.randn(7168, device="cuda").bfloat16()
    act = torch.full_like(x, torch.nan)
    for repeat in range(200):
        x.copy_(torch.randn_like(x))
        rms_norm(x, before, out=act)
        got = gemv_and_partial_norm(act, weight, gamma, segments=more)
        after = rms_norm(got[0], gamma)
        torch.cuda.synchronize()
        expected = gemv_and_partial_norm(rms_norm(x, before), weight, gamma, segments=more)
        torch.cuda.synchronize()
        if not all(same_bytes(a, b) for a, b in zip(got, expected, strict=True)):
            return f"repeat {repeat}: the GEMV did not wait for act"
        if not same_bytes(after, rms_norm(expected[0], gamma)):
            return f"repeat {repeat}: the next kernel did not wait for the GEMV"
        act.fill_(torch.nan)
    return None
