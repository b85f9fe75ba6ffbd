"""Programmatic dependent launch: begin while the previous kernel drains, let the next one begin
early.

`wait` returns once every kernel before this one has finished and its writes are visible. Nothing
that another kernel may write is read before it, not even gamma. The exceptions are weights of float32 products
(`weight_stream`) and weights that the caller calls static (`product`). `launch_dependents` only lets the
next kernel be set up sooner; that kernel reads after its own wait.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait(PDL: tl.constexpr):
    """Block until the preceding kernels are done."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def waited(at, PDL: tl.constexpr):
    """0. Where ``at`` is 0, it is computed after `wait`, so a load from an address that it is added to comes after the wait.

    Triton moves the first loads of a loop in front of it, in their order. It does so with this too, because it claims
    to have no side effects.
    """
    if PDL:
        zero = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p griddepcontrol.wait; mov.u32 $0, 0; }",
            "=r,r",
            [at],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return tl.multiple_of(zero, 128)
    else:
        return 0


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Allow the next kernel to start."""
    if PDL:
        cuda.gdc_launch_dependents()
