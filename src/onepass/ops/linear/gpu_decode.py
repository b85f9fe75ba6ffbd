"""8-bit weights as 16-bit ones, for products of many rows: to decode them once costs less than in every tile."""

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...gpu.chip import Chip
from ...gpu.compile import Build
from ...gpu.launch import SHORT_NAMES, Family
from ...gpu.lib.codes import decode, decode_words
from ...gpu.lib.pdl import launch_dependents, wait
from ...gpu.product_tile import WEIGHTS

ROWS: Final = 8
COLUMNS: Final = 512
WARPS: Final = 4


class DecodeSpec(NamedTuple):
    """Everything except sizes that affects the machine code."""

    weight: torch.dtype
    out: torch.dtype


class DecodeCall(NamedTuple):
    """Codes [N, K] with any row stride, and the contiguous ``out``. Rows of both start on 16 bytes, and 16 divides K."""

    spec: DecodeSpec
    weight: Tensor
    out: Tensor


@triton.jit
def _decode_kernel(weight, out, n, k, stride, TILE: tl.constexpr, MATH: tl.constexpr):
    """A tile of codes."""
    launch_dependents(MATH.pdl)
    across = tl.cdiv(k, TILE.columns)
    block = tl.program_id(0)
    row = (block // across * TILE.rows + tl.arange(0, TILE.rows))[:, None]
    column = (block % across * TILE.columns + tl.arange(0, TILE.columns))[None, :]
    inside = (row < n) & (column < k)
    wait(MATH.pdl)
    codes = tl.load(weight.to(tl.pointer_type(tl.int8)) + row.to(tl.int64) * stride + column, mask=inside, other=0)
    if MATH.hardware:
        values = decode_words(codes, out.dtype.element_ty, MATH.weight)
    else:
        values = decode(codes, out.dtype.element_ty, MATH.weight)
    tl.store(out + row.to(tl.int64) * k + column, values, mask=inside)


class Tile(NamedTuple):
    """Rows and columns of a program."""

    rows: int
    columns: int


class Math(NamedTuple):
    """The kind of codes, and whether the chip's own instructions decode them."""

    weight: str
    hardware: bool
    pdl: bool


TABLE: Final = {
    "weight": "* weight",
    "out": "* out",
    "n": "i32 weight.shape[0]",
    "k": "i32 weight.shape[1]",
    "stride": "i64 weight.stride(0)",
}


def build_for(spec: DecodeSpec, chip: Chip) -> Build:
    """The kernel of a configuration; pure, no GPU needed."""
    math = Math(WEIGHTS[spec.weight], chip.sums_sixteen, chip.has_pdl)
    constants: dict[str, Any] = {"TILE": Tile(ROWS, COLUMNS), "MATH": math}
    divisible = {"weight": 16, "out": 16, "k": 16, "stride": 16}
    name = f"decode {SHORT_NAMES[spec.weight]} to {SHORT_NAMES[spec.out]}"
    return FAMILY.make_build(name, _decode_kernel, chip, spec._asdict(), constants, {}, divisible, WARPS, 0)


FAMILY: Final = Family(
    DecodeCall,
    TABLE,
    lambda call, chip: (),
    lambda spec, facts, chip: None,
    lambda spec, facts, config, chip: build_for(spec, chip),
    lambda call, config: (-(-call.weight.shape[0] // ROWS) * -(-call.weight.shape[1] // COLUMNS),),
    device="weight",
)


def decode_call(weight: Tensor, dtype: torch.dtype) -> DecodeCall:
    """The call that decodes a weight, with memory for its result."""
    return DecodeCall(
        DecodeSpec(weight.dtype, dtype), weight, torch.empty(weight.shape, dtype=dtype, device=weight.device)
    )
