"""``y = norm(x) @ weight.T`` with everything before and after it on the CPU, in one parallel region."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from ...cpu.launch import CpuKernels, Field, Layout, address, addresses, integers
from ...cpu.sizes import CHUNK, MAX_BLOCKS, MAX_SLOTS, PREPARED_ROWS, SUM, TILE, row_blocks
from .launch import LinearCall, LinearSpec, changed

SERIAL_BELOW: Final = 131072
"""A call is serial if ``N * K * (1 + M // 8)`` is smaller, as in `gemv_norm`."""


class LinearWork(NamedTuple):
    """How a call is carried out: by ``threads`` threads, on ``panels`` panels of ``blocks`` blocks of ``block`` rows.

    ``slots`` panels are worked on at a time. Each takes ``preparations`` steps that norm and copy rows of x, and ``tiles``
    tiles of columns.
    """

    threads: int
    size: int
    block: int
    blocks: int
    panels: int
    slots: int
    preparations: int
    tiles: int


def layout(spec: LinearSpec) -> Layout:
    """The argument block of a spec's kernel, which `pack` fills."""
    fields = integers("next", "threads", "team", "m", "k", "n", "block", "blocks", "panels", "slots")
    fields += [*addresses("scratch"), *integers("preparations", "tiles")]
    fields += [Field("prepared", MAX_SLOTS), Field("done", MAX_SLOTS)]
    names = ["x", "weight", "out"]
    names += ["weight_scale"] * (spec.weight_scale != "none")
    names += ["residual", "residual_out"] * (spec.residual is not None)
    names += ["add"] * (spec.add is not None)
    for name in names:
        fields += [*addresses(name), *integers(f"{name}.stride")]
    if spec.gamma is not None:
        fields += addresses("gamma")
    if spec.bias is not None:
        fields += addresses("bias")
    return Layout(fields, ("eps", "weight_offset"))


def pack(call: LinearCall, work: LinearWork, scratch: int) -> list[float]:
    """The values of a call's argument block, in the order of `layout`."""
    spec, x, weight, out = call.spec, call.x, call.weight, call.out
    values: list[float] = [0, 0, work.threads, x.shape[0], weight.shape[1], out.shape[1]]
    values += (work.block, work.blocks, work.panels, work.slots, scratch, work.preparations, work.tiles)
    values += [0] * (2 * MAX_SLOTS)
    scale = call.weight_scale if spec.weight_scale != "none" else None
    for tensor in (x, weight, out, scale, call.residual, call.residual_out, call.add):
        if tensor is not None:
            values += (tensor.data_ptr(), tensor.stride(0))
    if spec.gamma is not None:
        values.append(address(call.gamma))
    if spec.bias is not None:
        values.append(address(call.bias))
    return [*values, call.eps, call.weight_offset]


def _work(call: LinearCall) -> LinearWork:
    """Scratch memory has a slot of float32 rows for each panel that is worked on at a time, and every thread's sums."""
    n, k = call.weight.shape
    m, columns = call.out.shape
    block, count = row_blocks(m)
    panels = -(-count // MAX_BLOCKS)
    blocks = -(-count // panels)
    tiles = -(-columns // TILE)
    team = 1 if n * k * (1 + m // 8) < SERIAL_BELOW else min(torch.get_num_threads(), tiles * panels)
    slots = min(panels, MAX_SLOTS, 2 + team // tiles)
    rows = block * blocks
    size = slots * rows * -(-k // CHUNK) * CHUNK + team * rows * TILE * SUM
    return LinearWork(team, size, block, blocks, panels, slots, -(-rows // PREPARED_ROWS), tiles)


def _canonical(spec: LinearSpec) -> LinearSpec:
    """Static weights make no difference on a CPU."""
    return changed(spec, static=False) if spec.static else spec


KERNELS: Final = CpuKernels("linear", layout, _work, pack, writes_block=True, canonical=_canonical)
launch = KERNELS.launch
