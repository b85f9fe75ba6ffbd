"""float16 on CPUs that cannot convert it: the conversions of a module rewritten as integer arithmetic.

Without an instruction for it (F16C on x86) LLVM calls ``__extendhfsf2`` and ``__truncsfhf2``, which the process may not
have. The functions here give the same bytes as F16C, NaN payloads included, and work on whole vectors.
"""

from __future__ import annotations

import re
from typing import Final

from llvmlite import ir

from .emit import F16, F32, I16, I32, Float, Int, type_of

_TYPE: Final = r"<\d+ x (?:half|float)>|half|float"
_CONVERSION: Final = re.compile(
    rf"\b(?P<how>fpext|fptrunc) (?P<source>{_TYPE}) (?P<value>%\S+) to (?P<target>{_TYPE})(?=\s|$)"
)
PROBE: Final = """
define float @probe(ptr %from, ptr %to) {
  %value = load half, ptr %from
  %wide = fpext half %value to float
  %sum = fadd float %wide, %wide
  %narrow = fptrunc float %sum to half
  store half %narrow, ptr %to
  ret float %sum
}
"""
"""A module that converts both ways. Its assembly calls a library if the CPU has no instruction for it."""
LIBRARY: Final = ("__extendhfsf2", "__truncsfhf2", "__gnu_h2f_ieee", "__gnu_f2h_ieee")


def _widened(bits: Int) -> Int:
    """The bits of the float32 of a float16. Subnormals are exact: 2**-14 is added, then subtracted."""
    size = bits & 0x7FFF
    sign = (bits & 0x8000) << 16
    shifted = size << 13
    subnormal = ((shifted + 0x38800000).float() - size.number(0x38800000).float()).bits()
    infinite = shifted | 0x7F800000
    finite = (size < 0x400).where(subnormal, shifted + 0x38000000)
    number = (size > 0x7BFF).where(infinite, finite)
    return (size > 0x7C00).where(infinite | 0x400000, number) | sign


def _narrowed(bits: Int) -> Int:
    """The bits of the nearest float16 of a float32, ties to even.

    Above 2**-14, half a step less one is added, and one more if the last bit is odd. Below, the steps are those of
    float32 at 0.5, so that adding 0.5 rounds. A subnormal float32, which a thread may flush to zero, is below half a step.
    """
    size = bits & 0x7FFFFFFF
    sign = (bits >> 16) & 0x8000
    shifted = size >> 13
    normal = (size + 0xC8000FFF + (shifted & 1)) >> 13
    subnormal = (size.float() + 0.5).bits() - 0x3F000000
    finite = (size < 0x38800000).where(subnormal, normal)
    number = (size > 0x477FFFFF).where(size.number(0x7C00), finite)
    return (size > 0x7F800000).where((shifted & 0x3FF) | 0x7E00, number) | sign


def in_software(text: str) -> str:
    """An LLVM module with all conversions from and to float16 done by integer arithmetic."""
    needed: dict[str, str] = {}

    def call(match: re.Match[str]) -> str:
        vector = re.match(r"<(\d+) x", match["source"])
        lanes = int(vector[1]) if vector else 0
        widens = match["how"] == "fpext"
        name = f"onepass_{'widen' if widens else 'narrow'}_{lanes}"
        needed[name] = _definition(name, widens, lanes)
        return f"call {match['target']} @{name}({match['source']} {match['value']})"

    rewritten = _CONVERSION.sub(call, text)
    return rewritten + "".join(needed.values())


def _definition(name: str, widens: bool, lanes: int) -> str:
    half, single = type_of(F16, lanes), type_of(F32, lanes)
    kind = ir.FunctionType(single, [half]) if widens else ir.FunctionType(half, [single])
    function = ir.Function(ir.Module(), kind, name)
    function.linkage = "private"
    function.attributes.add("alwaysinline")
    builder = ir.IRBuilder(function.append_basic_block())
    if widens:
        word = builder.zext(builder.bitcast(function.args[0], type_of(I16, lanes)), type_of(I32, lanes))
        builder.ret(_widened(Int(builder, word)).float().ir)
    else:
        word = _narrowed(Float(builder, function.args[0]).bits()).ir
        builder.ret(builder.bitcast(builder.trunc(word, type_of(I16, lanes)), half))
    return f"\n{function}"
