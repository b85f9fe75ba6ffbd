"""MLA's cache write on the CPU."""

from __future__ import annotations

from typing import Final

import torch

from ...cpu.launch import CpuKernels, Field, Layout, Work, address, integers, share
from .launch import MlaCall, MlaRows, MlaSpec, MlaTensors, mla_spec

INDICES: Final = ("offsets", "lengths", "table", "slots", "positions")
_WIDTHS: Final = {torch.int64: 0, torch.int32: 1, torch.uint32: 2}


def layout(spec: MlaSpec) -> Layout:
    """The argument block, which `pack` fills.

    The same for every spec: the kernel checks which index tensors exist and how wide their elements are.
    """
    fields = [*integers("next", "chunk", "steps"), Field("rows", len(MlaRows._fields))]
    fields += [Field(f"{name}.at", address=True) for name in MlaTensors._fields]
    fields += integers(*(f"{name}.width" for name in INDICES))
    return Layout(fields, ("eps", "weight_offset"))


def pack(call: MlaCall, work: Work, scratch: int) -> list[float]:
    """The values of a call's argument block, in the order of `layout`."""
    t = call.tensors
    values: list[float] = [0, work.chunk, call.rows.requests.bit_length(), *call.rows]
    values += [address(tensor) for tensor in t]
    indices = (t.offsets, t.lengths, t.table, t.slots, t.positions)
    values += [0 if tensor is None else _WIDTHS[tensor.dtype] for tensor in indices]
    values += (call.eps, call.weight_offset)
    return values


def _work(call: MlaCall) -> Work:
    rows = call.rows
    threads, chunk = share(rows.tokens, (rows.heads + 1) * rows.rope + rows.latent)
    return Work(threads, 0, chunk)


def _canonical(spec: MlaSpec) -> MlaSpec:
    """Index tensors do not affect the code. Specs without a rotation share the code of an arbitrary one."""
    style = spec.style if spec.freqs is not None else "interleaved"
    outputs = {"style": style, "scale": spec.scale, "rounding": spec.rounding}
    return mla_spec(spec.q, spec.q_out, spec.kv, spec.gamma, spec.cache, spec.freqs or torch.float32, **outputs)


KERNELS: Final = CpuKernels("mla_cache", layout, _work, pack, canonical=_canonical)
launch = KERNELS.launch
