"""Attention to the keys that a query sees, on the CPU, in one launch."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from ...cpu.launch import SERIAL_BELOW, CpuKernels, Field, Layout, address, addresses, integers
from ...cpu.sizes import BLOCK
from .launch import SequenceCall, SequenceRows, SequenceSpec

TOKENS: Final = 4
"""Tokens of a head that a thread takes at a time, at most."""


class SequenceWork(NamedTuple):
    """How a call is carried out: ``items`` tokens of heads of keys, ``chunk`` at a time; each thread has ``own`` numbers."""

    threads: int
    size: int
    chunk: int
    items: int
    own: int


def layout(spec: SequenceSpec) -> Layout:
    """The argument block of a spec's kernel, which `pack` fills."""
    fields = [*integers("next", "threads", "chunk", "items", "own"), *addresses("scratch")]
    fields += [Field("rows", len(SequenceRows._fields)), *addresses("q", "k", "v", "out")]
    if spec.mask != "none":
        fields += addresses("mask")
    return Layout(fields, ("scale", "softcap"))


def pack(call: SequenceCall, work: SequenceWork, scratch: int) -> list[float]:
    """The values of a call's argument block, in the order of `layout`."""
    values: list[float] = [0, 0, work.chunk, work.items, work.own, scratch, *call.rows]
    values += [tensor.data_ptr() for tensor in (call.q, call.k, call.v, call.out)]
    if call.spec.mask != "none":
        values.append(address(call.mask))
    return [*values, call.scale, call.softcap]


def _work(call: SequenceCall) -> SequenceWork:
    """A thread's scratch memory has a query, the entries that it sees, their scores, and what is added to them, in blocks."""
    rows = call.rows
    items = call.q.shape[0] * rows.heads * rows.tokens
    room = (rows.context // BLOCK + 2) * BLOCK
    own = (rows.columns // BLOCK + 1) * BLOCK + (3 + (call.spec.mask == "added")) * room
    total = items * rows.groups * rows.context * (rows.columns + rows.values)
    team = 1 if total < SERIAL_BELOW else min(torch.get_num_threads(), items)
    chunk = min(TOKENS, max(1, items // (4 * team)))
    return SequenceWork(team, team * own, chunk, items, own)


KERNELS: Final = CpuKernels("sequence_attention", layout, _work, pack)
launch = KERNELS.launch
