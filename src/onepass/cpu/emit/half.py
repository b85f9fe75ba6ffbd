"""float16 on CPUs that cannot convert it: the conversions of a module rewritten as integer arithmetic.

Without an instruction for it (F16C on x86) LLVM calls ``__extendhfsf2`` and ``__truncsfhf2``, which no library of the process need
have. The functions here give the bytes that F16C gives, NaN payloads included, and are vectors like the code around them.
"""

from __future__ import annotations

import re
from typing import Final

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
"""A module that converts both ways. Its assembly calls a library where the CPU has no instruction for it."""
LIBRARY: Final = ("__extendhfsf2", "__truncsfhf2", "__gnu_h2f_ieee", "__gnu_f2h_ieee")

_WIDEN: Final = """
define private {f32} @{name}({f16} %value) alwaysinline {{
  %half = bitcast {f16} %value to {i16}
  %bits = zext {i16} %half to {i32}
  %size = and {i32} %bits, {c:7fff}
  %sign_bit = and {i32} %bits, {c:8000}
  %sign = shl {i32} %sign_bit, {c:10}
  %place = shl {i32} %size, {c:d}
  %normal = add {i32} %place, {c:38000000}
  %raised = add {i32} %place, {c:38800000}
  %above = bitcast {i32} %raised to {f32}
  %base = bitcast {i32} {c:38800000} to {f32}
  %small = fsub {f32} %above, %base
  %subnormal = bitcast {f32} %small to {i32}
  %infinite = or {i32} %place, {c:7f800000}
  %nan = or {i32} %infinite, {c:400000}
  %is_small = icmp ult {i32} %size, {c:400}
  %is_large = icmp ugt {i32} %size, {c:7bff}
  %is_nan = icmp ugt {i32} %size, {c:7c00}
  %finite = select {i1} %is_small, {i32} %subnormal, {i32} %normal
  %number = select {i1} %is_large, {i32} %infinite, {i32} %finite
  %found = select {i1} %is_nan, {i32} %nan, {i32} %number
  %signed = or {i32} %found, %sign
  %result = bitcast {i32} %signed to {f32}
  ret {f32} %result
}}
"""
"""A subnormal is 2**-14 more, less 2**-14: exact, and float32 is never subnormal on the way."""

_NARROW: Final = """
define private {f16} @{name}({f32} %value) alwaysinline {{
  %bits = bitcast {f32} %value to {i32}
  %size = and {i32} %bits, {c:7fffffff}
  %upper = lshr {i32} %bits, {c:10}
  %sign = and {i32} %upper, {c:8000}
  %place = lshr {i32} %size, {c:d}
  %odd = and {i32} %place, {c:1}
  %even = add {i32} %size, {c:c8000fff}
  %rounded = add {i32} %even, %odd
  %normal = lshr {i32} %rounded, {c:d}
  %number = bitcast {i32} %size to {f32}
  %one_half = bitcast {i32} {c:3f000000} to {f32}
  %raised = fadd {f32} %number, %one_half
  %raised_bits = bitcast {f32} %raised to {i32}
  %subnormal = sub {i32} %raised_bits, {c:3f000000}
  %payload = and {i32} %place, {c:3ff}
  %nan = or {i32} %payload, {c:7e00}
  %is_small = icmp ult {i32} %size, {c:38800000}
  %is_large = icmp ugt {i32} %size, {c:477fffff}
  %is_nan = icmp ugt {i32} %size, {c:7f800000}
  %finite = select {i1} %is_small, {i32} %subnormal, {i32} %normal
  %limited = select {i1} %is_large, {i32} {c:7c00}, {i32} %finite
  %found = select {i1} %is_nan, {i32} %nan, {i32} %limited
  %signed = or {i32} %found, %sign
  %short = trunc {i32} %signed to {i16}
  %result = bitcast {i16} %short to {f16}
  ret {f16} %result
}}
"""
"""Above 2**-14 half a step less one, and one more where the last bit is odd, round to nearest even, up to infinity. Below, the steps
are those of float32 at 0.5, so that its adder rounds; a subnormal float32, which a thread may take for zero, is less than half a step."""


def in_software(text: str) -> str:
    """An LLVM module with every conversion from and to float16 done by integer arithmetic."""
    needed: dict[str, str] = {}

    def call(found: re.Match[str]) -> str:
        vector = re.match(r"<(\d+) x", found["source"])
        lanes = int(vector[1]) if vector else 0
        name = f"onepass_{'widen' if found['how'] == 'fpext' else 'narrow'}_{lanes}"
        needed[name] = _defined(_WIDEN if found["how"] == "fpext" else _NARROW, name, lanes)
        return f"call {found['target']} @{name}({found['source']} {found['value']})"

    rewritten = _CONVERSION.sub(call, text)
    return rewritten + "".join(needed.values())


def _defined(template: str, name: str, lanes: int) -> str:
    def constant(found: re.Match[str]) -> str:
        value = int(found[1], 16)
        return f"splat (i32 {value})" if lanes else str(value)

    types = {"f32": "float", "f16": "half", "i16": "i16", "i32": "i32", "i1": "i1"}
    if lanes:
        types = {short: f"<{lanes} x {element}>" for short, element in types.items()}
    return re.sub(r"\{c:([0-9a-f]+)\}", constant, template).format(name=name, **types)
