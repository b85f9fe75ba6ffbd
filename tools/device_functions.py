"""``python -m tools.device_functions``: shortcuts of device functions next to what they replace, on an NVIDIA GPU.

- ``over``: division by a constant, for all float32 numbers that are finite and not negative;
- ``ratio``: division of random numbers, of all magnitudes, with subnormal quotients and with few digits;
- ``ratio_of_any``: the same, and by zeros, infinities and NaN;
- ``int8`` and ``e2m1``: codes of all 2**32 numbers;
- ``sigmoid``: the gate's activation, for all 2**32 numbers.

Prints how many results differ, and exits with 1 if any does.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.formats import QUANT_FORMATS
from onepass.gpu.chip import current_chip
from onepass.gpu.lib.gates import _sigmoid
from onepass.gpu.lib.numbers import encode, encode_e2m1_pairs, encode_int8, quant
from onepass.gpu.lib.ratios import over, ratio, ratio_of_any
from tools import compact

BLOCK: Final = 1024
SPAN: Final = 1 << 28
"""Numbers of one launch."""
EDGES: Final = "zeros and infinities"
CONSTANTS: Final = (6.0, 127.0, 240.0, 448.0, 57344.0, 100.0, 4.0, 256.0)


@triton.jit
def _numbers(start, SIZE: tl.constexpr):
    """The floats whose bits are ``start`` and what follows, by program."""
    return (start + tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.float32, bitcast=True)


@triton.jit
def _differ(a, b):
    """How many results have other bits; one NaN is as good as another."""
    same = (a.to(tl.int32, bitcast=True) == b.to(tl.int32, bitcast=True)) | ((a != a) & (b != b))
    return tl.sum(tl.where(same, 0, 1))


@triton.jit
def _over_kernel(start, wrong, DIVISOR: tl.constexpr, SIZE: tl.constexpr):
    x = _numbers(start, SIZE)
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    tl.atomic_add(wrong, _differ(over(x, DIVISOR, True), tl.div_rn(x, tl.full(x.shape, DIVISOR, tl.float32))))


@triton.jit
def _ratio_kernel(a, b, wrong, ANY: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x, y = tl.load(a + at), tl.load(b + at)
    found = ratio_of_any(x, y, True) if ANY else ratio(x, y, True)
    tl.atomic_add(wrong, _differ(found, tl.div_rn(x, y)))


@triton.jit
def _int8_kernel(start, wrong, QUANT: tl.constexpr, SIZE: tl.constexpr):
    x = _numbers(start, SIZE)
    tl.atomic_add(wrong, tl.sum((encode_int8(x, QUANT.max) != encode(x, QUANT)).to(tl.int32)))


@triton.jit
def _e2m1_kernel(start, wrong, QUANT: tl.constexpr, SIZE: tl.constexpr):
    """A group with a NaN has a factor that is NaN."""
    low, high = tl.split(tl.reshape(_numbers(start, SIZE), (SIZE // 2, 2)))
    factor = tl.where((low == low) & (high == high), 1.0, float("nan"))
    low, high = low * factor, high * factor
    want = (encode(low, QUANT) | (encode(high, QUANT) << 4)).to(tl.uint8)
    tl.atomic_add(wrong, tl.sum((encode_e2m1_pairs(low, high, factor) != want).to(tl.int32)))


@triton.jit
def _sigmoid_kernel(start, wrong, SIZE: tl.constexpr):
    x = _numbers(start, SIZE)
    tl.atomic_add(wrong, _differ(x * _sigmoid(x, True), x * tl.sigmoid(x)))


def _count(launch: Callable[[Tensor], None]) -> int:
    wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
    launch(wrong)
    return int(wrong)


def _over_all(kernel: Any, first: int, *constants: Any) -> int:
    """How many results differ over the numbers whose bits are ``first`` to 2**31 - 1."""

    def launch(wrong: Tensor) -> None:
        for start in range(first, 1 << 31, SPAN):
            kernel[(SPAN // BLOCK,)](start, wrong, *constants, BLOCK)

    return _count(launch)


def _bits(count: int) -> Tensor:
    words = torch.randint(-(1 << 31), 1 << 31, (count,), device="cuda", dtype=torch.int64)
    drawn = words.to(torch.int32).view(torch.float32)
    return torch.where(drawn.isfinite(), drawn, torch.ones_like(drawn))


def _pairs(count: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Numerators, and divisors that are neither zero nor infinite except in `EDGES`."""
    small, few = torch.randint(1, 1 << 24, (2, count), device="cuda").float()
    few = few.remainder(1 << 12) + 1
    any_, other = _bits(count), _bits(count)
    nonzero = torch.where(other == 0, torch.ones_like(other), other)
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan], device="cuda")
    return {
        EDGES: (any_, edges.repeat(count // len(edges) + 1)[:count].contiguous()),
        "any": (any_, nonzero),
        "subnormal quotients": (small * 2.0**-149, few),
        "few digits": (few.flip(0), few),
    }


def found(numbers: int) -> dict[str, int]:
    """How many results differ, by name."""
    chip = current_chip(torch.cuda.current_device())
    int8, e2m1 = (tl.constexpr(quant(QUANT_FORMATS[name].codes, chip)) for name in ("int8", "nvfp4"))
    whole = -(1 << 31)
    results = {f"over {constant:g}": _over_all(_over_kernel, 0, constant) for constant in CONSTANTS}
    for name, (a, b) in _pairs(numbers).items():

        def launch(wrong: Tensor, any_: bool, a: Tensor = a, b: Tensor = b) -> None:
            _ratio_kernel[(numbers // BLOCK,)](a, b, wrong, any_, BLOCK)

        if name != EDGES:
            results[f"ratio, {name}"] = _count(partial(launch, any_=False))
        results[f"ratio of any, {name}"] = _count(partial(launch, any_=True))
    results["int8"] = _over_all(_int8_kernel, whole, int8)
    results["e2m1"] = _over_all(_e2m1_kernel, whole, e2m1)
    results["sigmoid"] = _over_all(_sigmoid_kernel, whole)
    return results


def main() -> None:
    """Compare, print, and write a file if asked."""
    parser = argparse.ArgumentParser(prog="python -m tools.device_functions", description=__doc__)
    parser.add_argument("--numbers", type=int, default=1 << 26, help="random quotients of each kind (default 2**26)")
    parser.add_argument("--json", type=Path, help="write results here")
    options = parser.parse_args()
    results = found(options.numbers // BLOCK * BLOCK)
    for name, wrong in results.items():
        print(f"{name}: {wrong} differ")
    if options.json:
        machine = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        options.json.write_text(compact.dumps({**machine, "differ": results}))
    raise SystemExit(1 if any(results.values()) else 0)


if __name__ == "__main__":
    main()
