"""QK-RMSNorm on the CPU: q and k in one launch."""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

from ...core.layout import LEVELS
from ...cpu.launch import CpuKernels, Field, Layout, address, addresses, integers, share
from ...cpu.sizes import BLOCK
from .launch import TENSORS, WITH_HEADS, QkCall, QkSpec


class QkWork(NamedTuple):
    """How a call is carried out. Threads take ``chunk`` tokens at a time, and have ``room`` for a head."""

    threads: int
    size: int
    chunk: int
    room: int


@cache
def _present(spec: QkSpec) -> tuple[tuple[int, int], ...]:
    """The tensors that a kernel has: their indices in `TENSORS` and in `WITH_HEADS`, the latter -1 if not there."""
    absent = {
        "q_out": not spec.applies,
        "k_out": not spec.applies,
        "stats": spec.stage == "fused",
        "positions": spec.rope is None or spec.rope.positions is None,
        "q_scale_out": spec.scale != "row",
        "k_scale_out": spec.scale != "row",
    }
    names = [(i, name) for i, name in enumerate(TENSORS) if not absent.get(name, False)]
    return tuple((i, WITH_HEADS.index(name) if name in WITH_HEADS else -1) for i, name in names)


def layout(spec: QkSpec) -> Layout:
    """The argument block of a spec's kernel, which `pack` fills."""
    fields = integers("next", "threads", "chunk", "tokens", "n1", "n2")
    for side in ("q", "k"):
        fields += integers(f"{side}.n", f"{side}.heads")
        if spec.gamma is not None:
            fields += addresses(f"gamma_{side}")
    for index, head in _present(spec):
        name = TENSORS[index]
        fields += [Field(name, address=True), Field(f"{name}.strides", LEVELS)]
        if head >= 0:
            fields += integers(f"{name}.step")
    if spec.scale == "tensor":
        fields += addresses("q_scale", "k_scale")
    if spec.rope is not None:
        fields += [*addresses("freqs"), *integers("freqs.stride", "limit", "sequence")]
        fields += [*addresses("scratch"), *integers("room")]
    return Layout(fields, ("eps", "weight_offset", "eps_k") if spec.two_eps else ("eps", "weight_offset"))


def pack(call: QkCall, work: QkWork, scratch: int) -> list[float]:
    """The values of a call's argument block, in the order of `layout`."""
    spec, rows, freqs = call.spec, call.rows, call.freqs
    values: list[float] = [0, 0, work.chunk, *rows.geom]
    for side, gamma in enumerate((call.gamma_q, call.gamma_k)):
        values += (rows.widths[side], rows.heads[side])
        if spec.gamma is not None:
            values.append(address(gamma))
    tensors = (call.q, call.k, call.q_out, call.k_out, call.stats, call.positions, call.q_scale_out, call.k_scale_out)
    for index, head in _present(spec):
        values.append(address(tensors[index]))
        values += rows.strides[index]
        if head >= 0:
            values.append(rows.steps[head])
    if spec.scale == "tensor":
        values += (address(call.q_scale), address(call.k_scale))
    if freqs is not None:
        values += (freqs.data_ptr(), freqs.stride(0), freqs.shape[0], rows.sequence, scratch, work.room)
    values += (call.eps, call.weight_offset)
    if spec.two_eps:
        values.append(call.eps_k)
    return values


def _work(call: QkCall) -> QkWork:
    """Scratch memory has room for a head per thread, if heads are rotated."""
    rope, rows = call.spec.rope, call.rows
    (q_heads, k_heads), (q_width, k_width) = rows.heads, rows.widths
    threads, chunk = share(rows.geom[0], q_heads * q_width + k_heads * k_width)
    room = 0 if rope is None else rope.head_dim + BLOCK
    return QkWork(threads, room * threads, chunk, room)


KERNELS: Final = CpuKernels("qk_norm", layout, _work, pack)
launch = KERNELS.launch
