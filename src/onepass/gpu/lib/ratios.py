"""Quotients that are rounded as a division rounds them, without a branch.

The compiler turns a division of float32 numbers into a test and a call for unusual exponents. Between
those tests nothing is reordered, which costs more than the division. float64 has enough exponents and
digits for all float32 numbers: a float64 quotient that is off by no more than its last digit, and
exact where it can be, rounds to the float32 quotient.

``BRANCHLESS``: for NVIDIA chips. Elsewhere these are divisions.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _is_power(number):
    """Whether a positive number is a power of two."""
    return number.hex().startswith("0x1.0000000000000p")


@triton.constexpr_function
def _reciprocal(number):
    return 1.0 / number


@triton.jit
def _refined(a, b, r):
    """``a / b`` in float64, given ``r``, almost ``1 / b``: exact where float64 can represent it."""
    q = a * r
    return tl.fma(tl.fma(-b, q, a), r, q)


@triton.jit
def over(values, DIVISOR: tl.constexpr, BRANCHLESS: tl.constexpr):
    """float32 values divided by a positive constant, which float32 represents."""
    if not BRANCHLESS:
        return tl.div_rn(values, tl.full(values.shape, DIVISOR, tl.float32))
    elif _is_power(DIVISOR):
        return values * _reciprocal(DIVISOR)
    else:
        wide = values.to(tl.float64)
        b = tl.full(values.shape, DIVISOR, tl.float64)
        r = tl.full(values.shape, _reciprocal(DIVISOR), tl.float64)
        return _refined(wide, b, r).to(tl.float32)


@triton.jit
def ratio(a, b, BRANCHLESS: tl.constexpr):
    """``a / b`` of float32 numbers of one shape; NaN where b is 0 or infinite."""
    if not BRANCHLESS:
        return tl.div_rn(a, b)
    else:
        x, y = a.to(tl.float64), b.to(tl.float64)
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f64 $0, $1;", "=d,d", [y], dtype=tl.float64, is_pure=True, pack=1)
        one = tl.full(y.shape, 1.0, tl.float64)
        r = tl.fma(tl.fma(-y, r, one), r, r)
        r = tl.fma(tl.fma(-y, r, one), r, r)
        return _refined(x, y, r).to(tl.float32)


@triton.jit
def ratio_of_any(a, b, BRANCHLESS: tl.constexpr):
    """`ratio` of finite numbers ``a`` by any ``b``: a zero where b is infinite, infinite where b is 0, NaN where either
    is NaN.
    """
    quotient = ratio(a, b, BRANCHLESS)
    if BRANCHLESS:
        bits = b.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        inverse = (bits ^ 0x7F800000).to(tl.float32, bitcast=True)  # of infinity and of 0
        quotient = tl.where((size == 0) | (size == 0x7F800000), a * inverse, quotient)
    return quotient
