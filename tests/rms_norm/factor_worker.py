"""Run with TRITON_INTERPRET=1: prints a line for every group whose factor on an NVIDIA GPU is not IEEE's, and a count.

The interpreter has no PTX. Of the instructions that `gpu.lib.groups` needs here there is one, a reciprocal.
"""

from __future__ import annotations

from itertools import product
from math import inf, nan
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from onepass.formats import QUANT_FORMATS, ScaleRule
from onepass.gpu.chip import INTERPRETER
from onepass.gpu.lib.groups import _group_factor, _scales
from onepass.gpu.lib.numbers import quant
from tests.oracle.bounds import multiplier
from tests.oracle.interpreter import quick_interpreter

AMAX = (0.0, 1e-40, 2.0**-20, 0.75, 6.0, 3e38, inf, nan)
OVERALL = (1.0, -2.0, 37.5, 1e-40, 3e38, 0.0, -0.0, inf, -inf, nan)
ROW_FACTORS = (1.0, 0.75, 2.0**-60, nan)


class Way(NamedTuple):
    """How codes are made."""

    normed: bool
    divide: bool
    least: float | None


WAYS = (
    Way(False, False, None),
    Way(False, False, 0.25),
    Way(True, False, 0.25),
    Way(True, True, None),
    Way(True, True, 0.25),
)


@triton.jit
def _kernel(amax, row_factor, overall, scale, factor, least, QUANT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    limits = (3.4028234663852886e38, least, tl.load(overall))
    s, numerator = _scales(tl.load(amax + at), tl.load(row_factor + at), limits, QUANT, tl.float32, True, True)
    tl.store(scale + at, s)
    tl.store(factor + at, _group_factor(numerator, s, limits, QUANT, True))


def _reciprocal(
    self: Any, assembly: str, constraints: str, values: list[Any], types: Any, pure: bool, pack: int
) -> SimpleNamespace:
    """What `create_inline_asm` returns, for the reciprocal of a float64."""
    assert assembly.startswith("rcp.approx.ftz.f64"), assembly
    (handle,) = values
    with np.errstate(divide="ignore"):
        result = interpreter.TensorHandle(1.0 / handle.data, handle.dtype)
    return SimpleNamespace(get_result=lambda _: result)


def expected(scale: Tensor, row_factor: Tensor, overall: float, way: Way) -> Tensor:
    """What values are multiplied by, or divided by, by float32's own divisions."""
    applied = torch.where(scale == 0, 0.0, scale / overall)
    if way.divide:
        return torch.where(applied == 0, inf, applied)
    numerator = torch.where(row_factor.isnan(), nan, 1.0) if way.normed else row_factor
    return multiplier(numerator, applied.double()).float()


def wrong(way: Way, overall: float) -> list[str]:
    """The groups with another factor than expected."""
    rule = ScaleRule("group", torch.float8_e4m3fn, 16, divides=way.divide, has_global=True)
    constants = quant(QUANT_FORMATS["nvfp4"].codes, INTERPRETER, rule, None, way.normed)
    amax, row_factor = torch.tensor(list(product(AMAX, ROW_FACTORS))).T.contiguous()
    scale, factor = torch.empty_like(amax), torch.empty_like(amax)
    _kernel[(1,)](amax, row_factor, torch.tensor([overall]), scale, factor, way.least, constants, len(amax))
    want = expected(scale, row_factor, overall, way)
    same = (factor.view(torch.int32) == want.view(torch.int32)) | (factor.isnan() & want.isnan())
    shown = zip(amax.tolist(), row_factor.tolist(), scale.tolist(), factor.tolist(), want.tolist(), strict=True)
    return [
        f"{way} global_scale {overall}: amax {a}, row {r}, scale {s}: {got}, expected {right}"
        for (a, r, s, got, right), equal in zip(shown, same.tolist(), strict=True)
        if not equal
    ]


def main() -> None:
    """Try every way with every global scale."""
    lines = [line for way, overall in product(WAYS, OVERALL) for line in wrong(way, overall)]
    print(*lines, f"{len(WAYS) * len(OVERALL) * len(AMAX) * len(ROW_FACTORS)} tried", sep="\n")


if __name__ == "__main__":
    interpreter.InterpreterBuilder.create_inline_asm = _reciprocal
    with quick_interpreter():
        main()
