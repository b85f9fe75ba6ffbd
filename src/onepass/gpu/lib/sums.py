"""Sums in a stated order, whatever the layout."""

import triton
import triton.language as tl


@triton.jit
def add_pairs(values):
    """Add the two elements of the last dimension."""
    even, odd = tl.split(values)
    return even + odd


@triton.jit
def add_four(values, A: tl.constexpr, B: tl.constexpr):
    """``[A, B, 4]`` to ``[A, B]`` as ``(v0 + v1) + (v2 + v3)``."""
    return add_pairs(add_pairs(tl.reshape(values, (A, B, 2, 2))))


@triton.jit
def add_from_left(values, A: tl.constexpr, B: tl.constexpr, COUNT: tl.constexpr):
    """``[A, B, COUNT]`` to ``[A, B]``: the first plus the second, plus the third, and so on."""
    parts = (values,)
    for i in tl.static_range(5):
        if COUNT >> (i + 1) > 0:
            halves = ()
            for j in tl.static_range(1 << i):
                grouped = tl.permute(tl.reshape(parts[j], (A, B, 2, COUNT >> (i + 1))), (0, 1, 3, 2))
                low, high = tl.split(grouped)
                halves = halves + (low, high)
            parts = halves
    total = tl.reshape(parts[0], (A, B)) + 0.0  # no negative zeros
    for j in tl.static_range(1, COUNT):
        total += tl.reshape(parts[j], (A, B))
    return total
