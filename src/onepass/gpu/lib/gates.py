"""What follows the norm, or x without a norm: a bias, then a gate."""

import triton
import triton.language as tl

from .numbers import convert


@triton.jit
def _sigmoid(x, ASSEMBLY: tl.constexpr):
    """``1 / (1 + exp(-x))``. The divisor is halved 60 times and so is its reciprocal, so that neither is
    too small for instructions that flush to zero. `tl.sigmoid` compiles to twice as many.
    """
    if ASSEMBLY:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [-x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
        halved = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [(1.0 + power) * 2.0**-60], dtype=tl.float32, is_pure=True, pack=1
        )
        return halved * 2.0**-60
    else:
        return tl.sigmoid(x)


@triton.jit
def finish(y, gate, bias, DTYPE: tl.constexpr, TILE: tl.constexpr, MATH: tl.constexpr):
    """``(y + bias) * act(gate)``, either of which may be absent; "hf" rounds both to DTYPE, and without a norm ``act(gate)`` too."""
    if MATH.bias >= 0:
        y += bias.to(tl.float32)
        if MATH.hf:
            y = convert(y, DTYPE, MATH.hw_rounding)
    if MATH.gate >= 0:
        z = gate.to(tl.float32)
        if MATH.activation == "sigmoid":
            factor = _sigmoid(z, TILE.assembly)
        else:
            factor = z * _sigmoid(z, TILE.assembly)
        if MATH.unnormed and MATH.hf:
            factor = convert(factor, DTYPE, MATH.hw_rounding)
        y = y * factor
        if MATH.hf:
            y = convert(y, DTYPE, MATH.hw_rounding)
    return y


@triton.jit
def load_finish(operands, starts, columns, mask, MATH: tl.constexpr):
    """The gate and the bias of some columns; 0 where there is none."""
    gate = 0.0
    bias = 0.0
    if MATH.gate >= 0:
        gate = tl.load(operands[MATH.gate].at + starts[MATH.gate][:, None] + columns[None, :], mask=mask, other=0.0)
    if MATH.bias >= 0:
        bias = tl.load(operands[MATH.bias].at + columns[None, :], mask=mask, other=0.0)
    return gate, bias
