"""Programmatic dependent launch: begin while the previous kernel drains, let the next one begin
early.

`wait` returns once every kernel before this one has finished and its writes are visible. Nothing
that another kernel may write is read before it, not even gamma. `launch_dependents` only lets the
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
def launch_dependents(PDL: tl.constexpr):
    """Allow the next kernel to start."""
    if PDL:
        cuda.gdc_launch_dependents()
