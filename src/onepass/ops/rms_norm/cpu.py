"""RMSNorm rows on the CPU: normalize, add, quantize."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import torch

from ...core.layout import LEVELS, TILE_BYTES
from ...cpu.launch import (
    CHUNK,
    CHUNKS_PER_THREAD,
    CpuKernels,
    Field,
    Layout,
    address,
    addresses,
    describe,
    integers,
    scratch,
)
from ...cpu.sizes import BLOCK
from .launch import RowCall, RowSpec

__all__ = ["KERNELS", "describe", "launch", "scratch"]

_EXPENSIVE: Final = frozenset({"exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "div"})
"""Operations that take longer than storing and loading a float32."""


SERIAL_BELOW: Final = 65536
"""Elements of inputs below which waking other threads costs more than it saves. A parallel region of two threads that
are awake takes 0.7 us, and 16 rows of 4096 take 6 us on one thread; threads that sleep take several times as long."""
FAR: Final = {"norm": 1, "new_residual": 2}
"""The bits of outputs that bypass the caches. An output larger than the caches is not in them when it is read again. Stored
as usual, its lines are read first: three transfers per element of x and y instead of two."""
USUAL_CACHE: Final = 32 << 20
TAKES: Final = 4
"""A thread that would take rows fewer times than this takes them at once."""


@cache
def keeps_h(spec: RowSpec) -> bool:
    """Whether ``h`` is saved in scratch memory after the statistics, because computing it again would take longer.

    After a post-norm it is, unless it is rounded: then it is stored as the new residual, and read from there. Without a norm
    it is the product with a gate, which a static scale needs once.
    """
    if spec.post is not None and not spec.round_sum:
        return True
    if spec.unnormed:
        return spec.gate >= 0 and spec.scale is not None and spec.scale.kind != "static"
    return spec.prologue is not None and any(i.op in _EXPENSIVE for i in spec.prologue.program)


class RowWork(NamedTuple):
    """How a call is carried out. Threads take ``chunk`` rows at a time. ``far``: the bits of `FAR`."""

    threads: int
    size: int
    chunk: int
    far: int


_TENSORS: Final = ("x", "residual", "norm", "codes", "scale", "new_residual")
"""Those of `RowCall.rows` that precede operands."""


@cache
def _present(spec: RowSpec) -> tuple[tuple[int, str], ...]:
    """The tensors of rows that a kernel has: their indices in `RowCall.rows`, and their names."""
    operands = [f"operand{i}" for i in range(len(spec.operands))]
    absent = {
        "residual": spec.residual is None,
        "norm": spec.norm is None,
        "codes": spec.fp8 is None,
        "scale": spec.scale is None or spec.scale.kind == "static",
        "new_residual": spec.residual is None,
        "row_gamma": not spec.per_row,
        "rstd": not spec.rstd,
    }
    names = enumerate((*_TENSORS, *operands, "row_gamma", "rstd"))
    return tuple((i, name) for i, name in names if not absent.get(name, False))


def layout(spec: RowSpec) -> Layout:
    """The argument block of a spec's kernel, which `pack` fills."""
    rule = spec.scale
    fields = integers("next", "threads", "chunk", "rows", "n1", "n2", "n")
    if spec.gamma is not None and not spec.per_row:
        fields += addresses("gamma")
    if spec.post is not None:
        fields += addresses("gamma_post")
    fields += addresses("scratch")
    if spec.fp8 is None:
        fields += integers("far")
    for _, name in _present(spec):
        fields += [Field(name, address=True), Field(f"{name}.strides", LEVELS)]
    if rule is not None and rule.kind == "group":
        fields += integers("scale.group")
    if rule is not None and (rule.kind == "static" or rule.has_global):
        fields += addresses("static_scale")
    if rule is not None and rule.bound_in_memory:
        fields += addresses("scale_ub_tensor")
    least = rule is not None and rule.has_least
    further = [name for name, present in (("min_scale", least), ("branch_scale", spec.scaled)) if present]
    return Layout(fields, ("eps", "weight_offset", "scale_ub", *further))


def pack(call: RowCall, work: RowWork, scratch: int) -> list[float]:
    """The values of a call's argument block, in the order of `layout`."""
    spec, rule, tensors, strides = call.spec, call.spec.scale, call.rows, call.strides
    values: list[float] = [0, 0, work.chunk, *call.geom, call.n]
    if spec.gamma is not None and not spec.per_row:
        values.append(address(call.gamma))
    if spec.post is not None:
        values.append(address(call.gamma_post))
    values.append(scratch)
    if spec.fp8 is None:
        values.append(work.far)
    for index, _ in _present(spec):
        values.append(address(tensors[index]))
        values += strides[index]
    if rule is not None:
        if rule.kind == "group":
            scale = None if rule.packing == "128x4" else call.scale
            values.append(TILE_BYTES if scale is None else scale.stride(-1))
        if rule.kind == "static" or rule.has_global:
            values.append(address(call.static_scale))
        if rule.bound_in_memory:
            values.append(address(call.scale_ub_tensor))
    values += (call.eps, call.weight_offset, call.scale_ub)
    if rule is not None and rule.has_least:
        values.append(call.min_scale)
    if spec.scaled:
        values.append(call.branch_scale)
    return values


@cache
def _inputs(spec: RowSpec) -> int:
    """Tensors that are read row by row."""
    return 1 + (spec.residual is not None) + sum(operand.kind == "full" for operand in spec.operands)


def split(rows: int, columns: int, inputs: int) -> tuple[int, int]:
    """The number of threads for these rows, and the number of rows that a thread takes at a time."""
    if rows <= 1 or rows * columns * inputs < SERIAL_BELOW:
        return 1, 1
    count = torch.get_num_threads()
    chunk = max(1, CHUNK // columns, rows // (count * CHUNKS_PER_THREAD))
    threads = min(count, -(-rows // chunk))
    each = -(-rows // threads)
    return threads, each if each < TAKES * chunk else chunk


@cache
def cache_size() -> int:
    """Bytes of the largest cache, as Linux reports it, or `USUAL_CACHE`."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 0) if text[:-1].isdigit() else 0)
    return max([*sizes, 0]) or USUAL_CACHE


def _far(call: RowCall) -> int:
    """Outputs that bypass the caches: they are larger than all caches, and not read before they are written."""
    inputs = [call.x.data_ptr(), 0 if call.residual is None else call.residual.data_ptr()]
    outs = {"norm": call.norm, "new_residual": call.new_residual}
    chosen = [name for name, t in outs.items() if t is not None and t.data_ptr() not in inputs]
    return sum(FAR[name] for name in chosen)


def _work(call: RowCall) -> RowWork:
    """Scratch memory has a row for the weights and, to save ``h``, one per thread."""
    spec, n, rows = call.spec, call.n, call.geom[0]
    threads, chunk = split(rows, n, _inputs(spec))
    saved = threads if keeps_h(spec) else 0
    far = _far(call) if spec.fp8 is None and rows * n * 2 >= cache_size() else 0
    return RowWork(threads, (n + BLOCK) * (saved + 1), chunk, far)


KERNELS: Final = CpuKernels("rms_norm", layout, _work, pack, prepares=True)
launch = KERNELS.launch
