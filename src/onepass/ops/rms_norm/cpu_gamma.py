"""How the rows of a norm get ``gamma + weight_offset``."""

from __future__ import annotations

from typing import Any

import torch

from ...cpu.llvm.bits import load_row
from ...cpu.llvm.function import Arguments, Function
from ...cpu.llvm.loops import each_block
from ...cpu.llvm.vec import Bool, Int
from .spec import RowSpec


def is_paired(spec: RowSpec) -> bool:
    """Whether the kernel holds columns in paired order."""
    return spec.x == torch.bfloat16


def prepare_gamma(module: Any, spec: RowSpec, offsets: dict[str, int]) -> Function:
    """Write ``gamma + weight_offset`` as float32, in the order of the lanes, to scratch memory in whole blocks.

    Nothing is written if gamma is 1, if each row has its own, or if rows read it themselves.
    """
    f = Function(module, "prepare", 1)
    args, dtype = Arguments(f, offsets), spec.gamma
    if dtype is None or spec.per_row or reads_gamma(spec):
        f.builder.ret_void()
        return f
    gamma, weights, offset = args.integer("gamma"), args.integer("scratch"), args.number("weight_offset")

    def body(at: Int, mask: Bool | None) -> None:
        g = load_row(f, dtype, gamma + at * dtype.itemsize, mask, is_paired(spec)) + offset
        f.store(g.ir, weights + at * 4)

    each_block(f, f.index(0), args.integer("n"), body)
    f.builder.ret_void()
    return f


def reads_gamma(spec: RowSpec) -> bool:
    """Whether rows read a gamma of all rows itself: half the bytes, for an addition. Codes need it twice and gain nothing."""
    return spec.gamma == torch.bfloat16 and spec.fp8 is None and not spec.per_row
