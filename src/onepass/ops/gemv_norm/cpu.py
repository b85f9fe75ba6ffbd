"""``y = act @ weight.T`` and the norm of its segments on the CPU, in one parallel region."""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch

from ...cpu.launch import CpuKernels, Field, Layout, address, addresses, integers
from ...cpu.sizes import CHUNK, TILE, row_blocks
from .launch import MAX_ROWS, GemvCall, GemvSpec, tiles

SERIAL_BELOW: Final = 131072
"""Weights below which waking other threads costs more than it saves: with two threads 192 rows of 1024 gain, 96 do
not."""


@cache
def _parts(n: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    """First tile, first column and end of each segment and of the tail; then the number of tiles."""
    parts: list[int] = []
    tile = begin = 0
    for count, width in zip(tiles(n, widths, TILE), (*widths, n - sum(widths)), strict=True):
        parts += [tile, begin, begin + width]
        tile, begin = tile + count, begin + width
    return (*parts, tile)


def trace_blocks(act: torch.dtype, weight: torch.dtype, m: int, n: int, k: int, widths: tuple[int, ...]) -> int:
    """The number of blocks of a trace: one per tile, whatever the dtypes and M."""
    return sum(tiles(n, widths, TILE))


class GemvWork(NamedTuple):
    """How a call is carried out: its `_parts`, and the size and number of blocks of rows."""

    threads: int
    size: int
    parts: tuple[int, ...]
    block: int
    blocks: int


def layout(spec: GemvSpec) -> Layout:
    """The argument block of a spec's kernel, which `pack` fills."""
    segments = range(len(spec.gammas))
    fields = [*integers("next", "threads", "team", "m", "k", "block", "blocks"), *addresses("scratch")]
    fields.append(Field("parts", 3 * len(segments) + 4))
    for name in ("act", "weight", *(f"normed{i}" for i in segments), "y", "unnormed"):
        fields += [*addresses(name), *integers(f"{name}.stride")]
    fields += addresses(*(f"gamma{i}" for i in segments))
    if spec.weight_scale != "none":
        fields += [*addresses("weight_scale"), *integers("weight_scale.stride")]
    if spec.fp8 is not None:
        fields += [*addresses("scale"), *integers("scale.stride")]
    fields += [*addresses("counter"), *integers(*(f"counter{i}" for i in segments))]
    if spec.traced:
        fields += addresses("trace", "units")
    return Layout(fields, ("eps",))


def pack(call: GemvCall, work: GemvWork, scratch: int) -> list[float]:
    """The values of a call's argument block, in the order of `layout`."""
    spec, act, weight = call.spec, call.act, call.weight
    values: list[float] = [0, 0, work.threads, act.shape[0], weight.shape[1], work.block, work.blocks, scratch]
    values += work.parts
    for tensor in (act, weight, *call.normed, call.y, call.unnormed):
        values += (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0))
    values += [gamma.data_ptr() for gamma in call.gammas]
    if spec.weight_scale != "none" and call.weight_scale is not None:
        values += (call.weight_scale.data_ptr(), call.weight_scale.stride(0))
    if spec.fp8 is not None and call.scale is not None:
        values += (call.scale.data_ptr(), call.scale.stride(0))
    values += (address(call.counter), *[0] * len(call.gammas))
    if spec.traced:
        values += (address(call.trace), address(call.units))
    values.append(call.eps)
    return values


def _work(call: GemvCall) -> GemvWork:
    """Scratch memory holds ``act`` as float32."""
    n, k = call.weight.shape
    parts = _parts(n, call.widths)
    block, blocks = row_blocks(call.act.shape[0])
    team = 1 if n * k < SERIAL_BELOW else min(torch.get_num_threads(), parts[-1])
    return GemvWork(team, block * blocks * -(-k // CHUNK) * CHUNK, parts, block, blocks)


KERNELS: Final = CpuKernels("gemv_norm", layout, _work, pack, prepares=True, writes_block=True)


def launch(call: GemvCall) -> None:
    """Run the kernel of ``call.spec``. A product without norms may have more rows than one kernel call can take."""
    if call.act.shape[0] > MAX_ROWS and call.unnormed is not None:
        for rows, out in zip(call.act.split(MAX_ROWS), call.unnormed.split(MAX_ROWS), strict=True):
            KERNELS.launch(call._replace(act=rows, unnormed=out))
    else:
        KERNELS.launch(call)
