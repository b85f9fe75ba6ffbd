"""The arithmetic behind device functions that replace divisions and encodings (`gpu.lib.ratios`, `gpu.lib.numbers`).

A GPU runs them over all numbers (`python -m tools.device_functions`). Here Python's exact fractions follow the same steps.
"""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from onepass.formats import QUANT_FORMATS
from onepass.testing.compare import encoded


def single(value: Fraction) -> float:
    """A fraction as the nearest float32. float() rounds to float64 first, which must not round twice."""
    wide = float(value)
    if Fraction(wide) == value or abs(wide) == float("inf"):
        return torch.tensor(wide, dtype=torch.float64).float().item()
    # Move the last digit of an inexact float64 away from a tie of float32: to odd.
    bits = int(torch.tensor(wide, dtype=torch.float64).view(torch.int64))
    if abs(Fraction(wide)) > abs(value):
        bits -= 1
    return torch.tensor(bits | 1, dtype=torch.int64).view(torch.float64).float().item()


def refined(a: float, b: float, error: float) -> float:
    """`ratios._refined`: float64 steps, from a reciprocal that is off by a relative error."""
    r = float(Fraction(1) / Fraction(b) * (1 + Fraction(error)))
    q = a * r
    rest = float(Fraction(a) - Fraction(b) * Fraction(q))
    return torch.tensor(float(Fraction(q) + Fraction(rest) * Fraction(r)), dtype=torch.float64).float().item()


def drawn(dice: random.Random, low: int, high: int) -> float:
    """A float32 of 24 random digits."""
    number = dice.randrange(1 << 23, 1 << 24) * 2.0 ** (dice.randint(low, high) - 23)
    return torch.tensor(number, dtype=torch.float64).float().item()


@pytest.mark.parametrize("error", [0.0, 2.0**-52, -(2.0**-52)])
def test_a_float64_quotient_rounds_like_the_division(error: float) -> None:
    dice = random.Random(1)
    for _ in range(2000):
        a, b = drawn(dice, -126, 120), drawn(dice, -126, 120)
        assert refined(a, b, error) == single(Fraction(a) / Fraction(b)), (a, b)


def test_ties_of_subnormal_quotients_go_to_even() -> None:
    """A quotient of few digits may lie in the middle of two subnormal numbers."""
    dice = random.Random(2)
    for _ in range(2000):
        b = float(dice.randrange(1, 1 << 10, 2))
        half = dice.randrange(1, 1 << 12) * 2 + 1
        a = b * half * 2.0**-150  # 22 digits at most
        assert refined(a, b, 2.0**-52) == single(Fraction(a) / Fraction(b)) == (half + half // 2 % 2) // 2 * 2.0**-149


def test_the_least_of_three_lines_is_the_code_of_e2m1() -> None:
    """Each line is rounded once, by an addition of 2**23."""
    values = torch.arange(0, 1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    generator = torch.Generator().manual_seed(3)
    near = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 2.0, 4.0, 6.0, 7.0])
    steps = torch.arange(-3, 4, dtype=torch.int32)
    ties = (near.view(torch.int32)[:, None] + steps).view(torch.float32).flatten()
    values = torch.cat([values[values.isfinite()], ties, -ties, 8 * torch.randn(20000, generator=generator)])
    size, big = values.abs().double(), 2.0**23
    lines = torch.stack([(2 * size + big).float(), (size + (big + 2)).float(), (size / 2 + (big + 4)).float()])
    codes = (lines.amin(0).clamp(max=big + 7) - big).to(torch.uint8)
    assert torch.equal(codes, encoded(values, QUANT_FORMATS["nvfp4"].codes) & 0x7F)
