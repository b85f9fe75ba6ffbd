"""Time stamps inside a kernel. Without TRACED they add nothing to the machine code."""

import triton
import triton.language as tl
from triton.language.extra import cuda

EVENTS = tl.constexpr(16)


@triton.jit
def stamp(trace, block, ROLE: tl.constexpr, after, TRACED: tl.constexpr):
    """Store the time in ns in the block's slot ROLE, once ``after`` (a number) is known."""
    if TRACED:
        bits = after.to(tl.int32, bitcast=after.dtype == tl.float32)
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer; // $1", "=l,r", [bits], dtype=tl.int64, is_pure=False, pack=1
        )
        tl.store(trace + block * EVENTS + ROLE, now)


@triton.jit
def name_unit(units, block, TRACED: tl.constexpr):
    """Store the number of the multiprocessor that runs the block."""
    if TRACED and units is not None:
        tl.store(units + block, cuda.smid())
