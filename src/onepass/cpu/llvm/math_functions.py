"""exp, log, tanh, erf, sigmoid and rsqrt in float32: within 4 ulp, and correct at 0, infinity, NaN and overflow.

The polynomials are those of the Cephes library (Stephen L. Moshier), evaluated with fused multiply-adds.
"""

from __future__ import annotations

from typing import Final

from .emit import Float

_ROUND: Final = 1.5 * 2.0**23
"""After this is added to a small number, the low mantissa bits are that number rounded to an integer."""
_ROUND_BITS: Final = 0x4B400000
_LOG2_E: Final = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_SQRT_HALF_BITS: Final = 0x3F3504F3

_EXP: Final = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG: Final = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
_TANH: Final = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)

_ERF_NEAR: Final = (-5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1)
_ERF_FAR: Final = (
    *(-1.72853470e-5, 3.83197126e-4, -3.88396438e-3, 2.42546219e-2),
    *(-1.06777877e-1, -6.34846687e-1, -1.28717512e-1),
)


def _polynomial(x: Float, coefficients: tuple[float, ...]) -> Float:
    """Horner's rule, highest power first."""
    result = x.number(coefficients[0])
    for coefficient in coefficients[1:]:
        result = result.fma(x, coefficient)
    return result


def exp(x: Float) -> Float:
    """``e**x = 2**n * e**r`` with ``n = round(x / ln 2)`` and ``|r| <= ln 2 / 2``."""
    x = (x > 89.0).where(x.number(89.0), x)  # e**89 overflows to infinity
    x = (x < -104.0).where(x.number(-104.0), x)  # e**-104 rounds to 0
    shifted = x.fma(_LOG2_E, _ROUND)
    n = shifted - _ROUND
    r = n.fma(-_LN2_LOW, n.fma(-_LN2_HIGH, x))
    mantissa = _polynomial(r, _EXP).fma(r * r, r) + 1.0
    # 2**n as two factors: both are normal even if the product is subnormal or infinite.
    whole = shifted.bits() - _ROUND_BITS + 256
    half = whole >> 1
    first, second = (half - 128 + 127) << 23, (whole - half - 128 + 127) << 23
    return mantissa * first.float() * second.float()


def log(x: Float) -> Float:
    """``log(2**e * m) = e * ln 2 + log(m)`` with ``m`` in ``[sqrt(1/2), sqrt(2))``."""
    tiny = x < 2.0**-126
    bits = tiny.where(x * 2.0**24, x).bits()
    shifted = bits - _SQRT_HALF_BITS  # exponent field counts from sqrt(1/2); wraps below it
    e = shifted.shift_signed(23).to_float() - tiny.where(x.number(24.0), 0.0)
    f = ((shifted & 0x7FFFFF) + _SQRT_HALF_BITS).float() - 1.0
    square = f * f
    tail = (_polynomial(f, _LOG) * f).fma(square, e * _LN2_LOW)
    result = e.fma(_LN2_HIGH, square.fma(-0.5, tail) + f)
    result = x.eq(float("inf")).where(x, result)
    result = x.eq(0.0).where(x.number(float("-inf")), result)
    return (x < 0.0).where(x.number(float("nan")), x.is_nan().where(x, result))


def tanh(x: Float) -> Float:
    """``x + x**3 * P(x**2)`` near 0, elsewhere ``1 - 2 / (exp(2|x|) + 1)`` with the sign of ``x``."""
    a = abs(x)
    square = x * x
    near = (_polynomial(square, _TANH) * square).fma(x, x)
    far = x.number(1.0) - x.number(2.0) / (exp(a + a) + 1.0)
    far = (far.bits() | (x.bits() & 0x80000000)).float()
    return (a < 0.625).where(near, far)


def erf(x: Float) -> Float:
    """``x + x * P(x**2)`` near 0, elsewhere ``1 - exp(Q(|x|))`` with the sign of ``x``."""
    a = abs(x)
    near = _polynomial(x * x, _ERF_NEAR).fma(x, x)
    far = x.number(1.0) - exp(_polynomial(a, _ERF_FAR).fma(a, -a))
    far = (far.bits() | (x.bits() & 0x80000000)).float()
    return (a > 0.927734375).where(far, near)


def sigmoid(x: Float) -> Float:
    """``1 / (1 + exp(-x))``, computed from ``exp(-|x|)``, which never overflows."""
    e = exp(-abs(x))
    return (x < 0.0).where(e, 1.0) / (e + 1.0)


def rsqrt(x: Float) -> Float:
    """``1 / sqrt(x)``."""
    return x.number(1.0) / x.sqrt()


def maximum(a: Float, b: Float) -> Float:
    """The larger; NaN if either is."""
    return ((a > b) | a.is_nan()).where(a, b)


def minimum(a: Float, b: Float) -> Float:
    """The smaller; NaN if either is."""
    return ((a < b) | a.is_nan()).where(a, b)
