"""The row ops on a CPU, taking turns with a memory stream of the same size and with torch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

import onepass

from ..contract import moved_bytes
from ..cpu import _compile, _function, _parallel, _vec
from ..ops import _rows
from .peers import PEERS, Problem
from .timing import interleaved_times

SHAPES = ((4096, 4096), (4096, 7168), (64, 4096), (1, 4096))
_CHUNK = 65536


@cache
def _stream() -> Any:
    """A kernel that reads two bytes and writes one for each element, on as many threads as join in."""
    module = ir.Module(name="stream")
    f = _function.Function(module, "stream", 1)
    builder = f.builder
    block = f.parameters[0]
    chunk, total, source, target = (_vec.Int(builder, f.load(block + 8 * i, _vec.I64, lanes=0)) for i in range(1, 5))
    take, work, done = (builder.append_basic_block() for _ in range(3))
    builder.branch(take)
    builder.position_at_end(take)
    first = _vec.Int(builder, builder.atomic_rmw("add", f.pointer(block), chunk.ir, "monotonic"))
    builder.cbranch((first < total).ir, work, done)
    builder.position_at_end(work)
    with f.loop(first, (first + chunk).min(total), 2 * _vec.LANES) as at:
        for half in (0, _vec.LANES):
            words = f.load(source + (at + half) * 2, _vec.I16)
            f.store(builder.trunc(words, ir.VectorType(_vec.I8, _vec.LANES)), target + at + half)
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()
    return _compile.link(_compile.compile_ir(str(module), *_compile.host()), "stream")


def stream(source: Tensor, target: Tensor) -> None:
    """Read ``source`` (16 bit, a multiple of 64 elements) and write ``target`` (8 bit) as fast as memory allows."""
    block = struct.pack("=5q", 0, _CHUNK, source.numel(), source.data_ptr(), target.data_ptr())
    _parallel.run(_stream()["stream"], block, torch.get_num_threads())


def rows(peers: bool = True) -> Iterator[dict[str, Any]]:
    """fp8 row quantization of bfloat16: microseconds of onepass, the stream and the peers, in turns."""
    for m, n in SHAPES:
        gamma = torch.randn(n).bfloat16()
        problem = Problem(torch.randn(m, n).bfloat16(), gamma, 1e-6, True)
        out, scale = torch.empty(m, n, dtype=torch.float8_e4m3fn), torch.empty(m, 1)
        sink = torch.empty(m, n, dtype=torch.uint8)
        calls: dict[str, Callable[[], object]] = {
            "stream": partial(stream, problem.x, sink),
            "onepass": partial(onepass.rms_norm_fused_fp8, problem.x, gamma, out=out, scale_output=scale),
        }
        for name in ("torch.compile", "torch eager") if peers else ():
            call = PEERS[name](problem)
            if call is not None:
                calls[name] = call
        times = interleaved_times(calls, rounds=25 if m > 64 else 400)
        yield {
            "op": "rms_norm_fused_fp8",
            "shape": [m, n],
            "dtype": "bfloat16",
            "bytes": moved_bytes([problem.x, gamma, out, scale]),
            "us": times,
        }


def overhead() -> dict[str, float]:
    """Microseconds of a whole eager call at 1 x 4096, allocation included, and of its parts; torch's ops beside it."""
    x, gamma = torch.randn(1, 4096).bfloat16(), torch.randn(4096).bfloat16()
    out, scale = torch.empty(1, 4096, dtype=torch.float8_e4m3fn), torch.empty(1, 1)
    eager = PEERS["torch eager"](Problem(x, gamma, 1e-6, True))
    calls: dict[str, Callable[[], object]] = {
        "rms_norm_fused_fp8": lambda: onepass.rms_norm_fused_fp8(x, gamma),
        "rms_norm_fused_fp8, no kernel": lambda: _unlaunched(lambda: onepass.rms_norm_fused_fp8(x, gamma)),
        "rms_norm": lambda: onepass.rms_norm(x, gamma),
        "its two allocations": lambda: (torch.empty_like(out), torch.empty_like(scale)),
        "F.rms_norm": lambda: torch.nn.functional.rms_norm(x, (4096,), gamma, 1e-6),
        "torch eager fp8": eager or (lambda: None),
    }
    return {name: _best(call) for name, call in calls.items()}


def _unlaunched(call: Callable[[], object]) -> None:
    """A call whose kernel does nothing."""
    found = _rows._launch._found
    saved = found["cpu"]
    found["cpu"] = _nothing
    call()
    found["cpu"] = saved


def _nothing(*_: object) -> None:
    return None


def _best(call: Callable[[], object], rounds: int = 300, inner: int = 200) -> float:
    """The quietest of many short rounds: what the code costs, not what the machine was doing."""
    return min(interleaved_times({"": call}, rounds=1, inner=inner)[""] for _ in range(rounds))
