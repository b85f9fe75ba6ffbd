"""A prologue computes what its Python function computes: the function itself is evaluated, not the lowered program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.prologues import maximum, prologue, silu, where
from tests.helpers.interpreting import interpret
from tests.prologues.reference import define, direct, elements, random_source, same_numbers

HALF = 0.5


def swap(x, y):  # type: ignore[no-untyped-def]
    t = x
    x = y
    y = t
    return x - 0.5 * y


def swap_at_once(x, y):  # type: ignore[no-untyped-def]
    x, y = y, x
    return x - 0.5 * y


def assigned(x, y):  # type: ignore[no-untyped-def]
    x = x + y
    return x * x


def augmented(x, y):  # type: ignore[no-untyped-def]
    x += y
    x *= 2
    x -= 0.5
    x /= y
    return x


def annotated(x, y):  # type: ignore[no-untyped-def]
    x: Tensor = maximum(y, x)  # type: ignore[no-redef]
    return x + y


def operand_only(x, y):  # type: ignore[no-untyped-def]
    y = silu(y)
    return x * y


def rotated(x, y, z):  # type: ignore[no-untyped-def]
    x, y, z = z, x, y
    x, y, z = z, x, y
    return x + 2 * y - 4 * z


def in_a_row(x, y):  # type: ignore[no-untyped-def]
    a = b = x - y
    a += b
    return a * b


def flags(x, y):  # type: ignore[no-untyped-def]
    c = x > y
    d = not c
    c = c or y == 0
    c = c and -4 < x <= y + 1 != 2
    x = x if d else y
    return x if c else -x


def signs(x, y):  # type: ignore[no-untyped-def]
    return -x if y > 0 else x * -0.0


def generated_names(torch, tl, mask, h, p0):  # type: ignore[no-untyped-def]
    v0 = tl + torch
    q0, at0, columns = mask, h, p0
    p0 = v0 * columns
    return p0 - q0 + at0 * 2


def helpers_hidden(tanh, exp):  # type: ignore[no-untyped-def]
    larger = where(tanh > exp, tanh, exp)
    exp = larger - tanh
    return exp * larger


def unused(x, y, z):  # type: ignore[no-untyped-def]
    return y + HALF


def result_is_a_parameter(x, y):  # type: ignore[no-untyped-def]
    x = y
    return x


ROOT = Path(__file__).parents[2]
FUNCTIONS: list[Callable[..., Any]] = [
    swap, swap_at_once, assigned, augmented, annotated, operand_only, rotated, in_a_row, flags, signs, generated_names,
    helpers_hidden, unused, result_is_a_parameter,
]  # fmt: skip
EXACT = [f for f in FUNCTIONS if f is not operand_only]


def arguments(function: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
    return list(elements(function.__code__.co_argcount, dtype, seed=1))


def kernel(fused: onepass.Prologue, x: Tensor, *operands: Tensor) -> Tensor:
    """The kernel's result: with a residual of -0 the new residual is the prologue's value."""
    residual = torch.full_like(x, -0.0)
    results = onepass.rms_norm_fused_fp8(
        x, torch.ones(x.shape[-1]), residual=residual, prologue=fused, prologue_args=operands
    )
    return results[2]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_program_matches_the_function(function: Callable[..., Any]) -> None:
    fused, given = prologue(function), arguments(function, torch.float64)
    expected = direct(function, *given)
    assert same_numbers(direct(fused, *given), expected)
    torch.testing.assert_close(fused(*given), expected, equal_nan=True)
    assert expected.nan_to_num().unique().numel() > 4


@pytest.mark.sampled(3)  # some functions stay
@pytest.mark.parametrize("function", EXACT, ids=lambda f: f.__name__)
def test_cpu_kernel_matches_the_function(function: Callable[..., Any]) -> None:
    given = arguments(function, torch.float32)
    assert same_numbers(kernel(prologue(function), *given), direct(function, *given))


@pytest.mark.parametrize("seed", range(150))
def test_random_functions(seed: int) -> None:
    source, count = random_source(seed)
    function = define(source, HALF=HALF)
    given = list(elements(count, torch.float64, seed))
    assert same_numbers(direct(prologue(function), *given), direct(function, *given)), source


@pytest.mark.sampled(4)  # some functions stay
@pytest.mark.parametrize("seed", range(12))
def test_random_functions_in_the_cpu_kernel(seed: int) -> None:
    source, count = random_source(seed, exact=True)
    function = define(source, HALF=HALF)
    given = list(elements(count, torch.float32, seed))
    assert same_numbers(kernel(prologue(function), *given), direct(function, *given)), source


@pytest.mark.sampled(3)  # some functions stay
@pytest.mark.slow
def test_triton_source_matches_the_function() -> None:
    pytest.importorskip("triton")
    assert interpret("-m", "tests.prologues.interpreter_worker") == f"{len(EXACT) + 8} compared\n"
