"""Codes of int8 and e2m1 on NVIDIA chips, in fewer instructions than `numbers.encode` compiles to, with the same results."""

import triton
import triton.language as tl


@triton.constexpr_function
def _int8(limit):
    """PTX: $0 has the codes of $1 to $4. NaN converts to 0, and the last two instructions saturate to -128 and 127."""
    code = [".reg .f32 v<4>;", ".reg .b32 n<4>, t;"]
    for i in range(4):
        code += [f"max.NaN.f32 v{i}, ${i + 1}, {-float(limit)!r};"]
        if limit < 127:
            code += [f"min.NaN.f32 v{i}, v{i}, {float(limit)!r};"]
        code += [f"cvt.rni.s32.f32 n{i}, v{i};"]
    code += ["cvt.pack.sat.s8.s32.b32 t, n3, n2, 0;", "cvt.pack.sat.s8.s32.b32 $0, n1, n0, t;"]
    return "{" + " ".join(code) + "}"


@triton.jit
def encode_int8(values, LIMIT: tl.constexpr):
    """Codes of at most LIMIT; NaN is 0."""
    return tl.inline_asm_elementwise(_int8(LIMIT), "=r,f,f,f,f", [values], dtype=tl.int8, is_pure=True, pack=4)


@triton.constexpr_function
def _e2m1():
    """PTX: byte i of $0 has the codes of the i-th of the first four operands, and of the second four in its high half.

    Codes are a concave function of the numbers, in three straight parts: 2v, v + 2 and v / 2 + 4, rounded to integers.
    So the code is the least of the three. Adding 2**23 leaves the integer in the low bits of a sum. The third four
    operands are the limits of these sums. They are also the results for NaN.
    """
    code = [".reg .f32 a, p, q;", ".reg .b32 t<8>, b<4>, w, u, s;"]
    for i in range(8):
        code += [f"abs.f32 a, ${i + 1};"]
        code += ["fma.rn.f32 p, a, 0f40000000, 0f4B000000;", "add.rn.f32 q, a, 0f4B000002;", "min.f32 p, p, q;"]
        code += ["fma.rn.f32 q, a, 0f3F000000, 0f4B000004;", "min.f32 p, p, q;"]
        code += [f"min.f32 p, p, ${9 + i % 4};", f"mov.b32 t{i}, p;"]
    code += [f"mad.lo.u32 b{i}, t{i + 4}, 16, t{i};" for i in range(4)]
    code += ["prmt.b32 w, b0, b1, 0x0040;", "prmt.b32 u, b2, b3, 0x0040;", "prmt.b32 w, w, u, 0x5410;"]
    for first, mask in ((1, "0x08080808"), (5, "0x80808080")):  # selectors of 8 and more repeat a byte's sign
        names = [f"${first + i}" for i in range(4)]
        code += [f"mov.b32 t{i}, {name};" for i, name in enumerate(names)]
        code += ["prmt.b32 u, t0, t1, 0x00FB;", "prmt.b32 s, t2, t3, 0x00FB;", "prmt.b32 u, u, s, 0x5410;"]
        code += [f"and.b32 u, u, {mask};", "or.b32 w, w, u;"]
    return "{" + " ".join([*code, "mov.b32 $0, w;"]) + "}"


@triton.jit
def encode_e2m1_pairs(low, high, factor):
    """Bytes of two codes each, of numbers that were multiplied by ``factor``; 0 where the factor is NaN."""
    limit = tl.broadcast_to(tl.where(factor == factor, 8388615.0, 8388608.0), low.shape)
    return tl.inline_asm_elementwise(
        _e2m1(), "=r,f,f,f,f,f,f,f,f,f,f,f,f", [low, high, limit], dtype=tl.uint8, is_pure=True, pack=4
    )
