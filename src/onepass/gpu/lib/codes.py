"""8-bit weights as the 16-bit operands of tensor cores.

A tensor core's step takes sixteen columns. With 8-bit weights a thread holds four neighbouring columns of each row
(Triton's ``kWidth`` is 4), and Triton gives the first two to one step and the others to the next. Two steps then share
32 columns, and sums would differ from those of a warp group's instructions, which take sixteen neighbours.
`decode_fragments` and `regroup` move pairs between the registers of a thread, so that each step gets neighbours again.
This costs no instruction. Both need operands that come from shared memory in the layout of a product, as aligned ones do,
and rely on the order in which Triton numbers their registers. If that changes, products are wrong and tests fail.
Unaligned operands are loaded element by element, in the order of `regrouped`.
"""

from collections.abc import Sequence

import triton
import triton.language as tl

_E4M3_TO_BF16 = """mov.b32 {{a, b}}, {word}; cvt.rn.f16x2.e4m3x2 h, a; cvt.rn.f16x2.e4m3x2 i, b;
    mov.b32 {{a, b}}, h; mov.b32 {{c, d}}, i;
    cvt.f32.f16 p, a; cvt.f32.f16 q, b; cvt.f32.f16 r, c; cvt.f32.f16 s, d;
    cvt.rn.bf16x2.f32 {low}, q, p; cvt.rn.bf16x2.f32 {high}, s, r;"""
_E4M3_TO_F16 = "mov.b32 {{a, b}}, {word}; cvt.rn.f16x2.e4m3x2 {low}, a; cvt.rn.f16x2.e4m3x2 {high}, b;"
# a code is (128 + its low seven bits) - (128, or 256 for a negative one): each term is a bfloat16
_INT8_TO_BF16 = """prmt.b32 u, {word}, 0, 0x4140; prmt.b32 v, {word}, 0, 0x4342; mov.b32 w, 0x3F803F80;
    and.b32 h, u, 0x007F007F; or.b32 h, h, 0x43004300; and.b32 i, u, 0x00800080; or.b32 i, i, 0xC300C300;
    fma.rn.bf16x2 {low}, h, w, i;
    and.b32 h, v, 0x007F007F; or.b32 h, h, 0x43004300; and.b32 i, v, 0x00800080; or.b32 i, i, 0xC300C300;
    fma.rn.bf16x2 {high}, h, w, i;"""
# a code plus 128 in the last bits of 1024 is a float16; subtract 1152
_INT8_TO_F16 = """mov.b32 w, 0x64806480; xor.b32 u, {word}, 0x80808080; prmt.b32 v, u, 0x64646464, 0x5352;
    prmt.b32 u, u, 0x64646464, 0x5150; sub.rn.f16x2 {low}, u, w; sub.rn.f16x2 {high}, v, w;"""
_TEMPORARIES = ".reg .b16 a, b, c, d; .reg .b32 h, i, u, v, w; .reg .f32 p, q, r, s;"


def _assembly(code: str, pairs: Sequence[tuple[int, int]]) -> tl.constexpr:
    """Decode one word for each entry of ``pairs``, which says where its two pairs of numbers go."""
    words = range(2 * len(pairs), 3 * len(pairs))
    lines = [
        code.format(word=f"${word}", low=f"${low}", high=f"${high}")
        for word, (low, high) in zip(words, pairs, strict=True)
    ]
    return tl.constexpr(f"{{ {_TEMPORARIES} {' '.join(lines)} }}")


_IN_PLACE = ((0, 1),)
_REGROUPED = ((0, 4), (2, 6), (1, 5), (3, 7))
"""Words of a fragment: rows g and g + 8 of sixteen columns, then of the next sixteen. Numbers of even index go to the
first step, the others to the second.
"""
_E4M3_BF16 = _assembly(_E4M3_TO_BF16, _IN_PLACE)
_E4M3_F16 = _assembly(_E4M3_TO_F16, _IN_PLACE)
_INT8_BF16 = _assembly(_INT8_TO_BF16, _IN_PLACE)
_INT8_F16 = _assembly(_INT8_TO_F16, _IN_PLACE)
_E4M3_BF16_REGROUPED = _assembly(_E4M3_TO_BF16, _REGROUPED)
_E4M3_F16_REGROUPED = _assembly(_E4M3_TO_F16, _REGROUPED)
_INT8_BF16_REGROUPED = _assembly(_INT8_TO_BF16, _REGROUPED)
_INT8_F16_REGROUPED = _assembly(_INT8_TO_F16, _REGROUPED)
_REGROUP = tl.constexpr("mov.b32 $0, $4; mov.b32 $2, $5; mov.b32 $1, $6; mov.b32 $3, $7;")


@triton.jit
def decode(codes, DTYPE: tl.constexpr, WEIGHT: tl.constexpr):
    """8-bit codes as DTYPE, exactly, on any chip."""
    if WEIGHT == "int8":
        return codes.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)
    else:  # with float32's exponent bias the value is too small by a factor of 2**120
        code = codes.to(tl.uint8, bitcast=True).to(tl.int32)
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)


@triton.jit
def decode_words(codes, DTYPE: tl.constexpr, WEIGHT: tl.constexpr):
    """The same with the chip's instructions."""
    if DTYPE == tl.bfloat16:
        TO_BF16: tl.constexpr = _INT8_BF16 if WEIGHT == "int8" else _E4M3_BF16
        return tl.inline_asm_elementwise(TO_BF16, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        TO_F16: tl.constexpr = _INT8_F16 if WEIGHT == "int8" else _E4M3_F16
        return tl.inline_asm_elementwise(TO_F16, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def decode_fragments(codes, DTYPE: tl.constexpr, WEIGHT: tl.constexpr):
    """The left side of a batched product, decoded and regrouped."""
    if DTYPE == tl.bfloat16:
        TO_BF16: tl.constexpr = _INT8_BF16_REGROUPED if WEIGHT == "int8" else _E4M3_BF16_REGROUPED
        return tl.inline_asm_elementwise(
            TO_BF16, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=16
        )
    else:
        TO_F16: tl.constexpr = _INT8_F16_REGROUPED if WEIGHT == "int8" else _E4M3_F16_REGROUPED
        return tl.inline_asm_elementwise(
            TO_F16, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [codes], dtype=tl.float16, is_pure=True, pack=16
        )


@triton.jit
def regroup(values):
    """The right side of a batched product with 8-bit weights, of 16-bit numbers."""
    return tl.inline_asm_elementwise(
        _REGROUP, "=&r,=&r,=&r,=&r,r,r,r,r", [values], dtype=values.dtype, is_pure=True, pack=8
    )


@triton.jit
def regrouped(place):
    """The column for each place of an operand, so that each step gets sixteen neighbours."""
    within = place % 32
    return place - within + (within & 2) * 8 + (within >> 2) * 2 + (within & 1)
