"""Prologues: supported syntax, its meaning, and errors that name the line of what is not supported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import onepass
from onepass import prologues
from onepass.prologues import exp, log, maximum, minimum, prologue, rsqrt, sigmoid, silu, sqrt, tanh, where
from tools.ulps import floats

SHIFT = 0.25


@prologue
def all_helpers(x, a):  # type: ignore[no-untyped-def]
    """Every helper once."""
    t = tanh(x) + sigmoid(a) * silu(x)
    t += sqrt(abs(a)) - rsqrt(1.0 + x * x)
    u: torch.Tensor = exp(minimum(x, 2)) / log(3.0 + abs(a))
    t = maximum(t, -1.5) + where(x > a, u, -u)
    return t * SHIFT if (0 < x <= 1.5 and not a == 0) or a != a or x >= 4 else t - math.pi  # noqa: SIM201


@prologue
def halves(x):  # type: ignore[no-untyped-def]
    """No operand."""
    return +x / 2


@prologue
def constant(x):  # type: ignore[no-untyped-def]
    """Ignores x."""
    return 3.0


def reference(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    t = torch.tanh(x) + torch.sigmoid(a) * torch.nn.functional.silu(x)
    t = t + a.abs().sqrt() - (1 + x * x).rsqrt()
    u = torch.exp(x.clamp(max=2)) / torch.log(3 + a.abs())
    t = t.clamp(min=-1.5) + torch.where(x > a, u, -u)
    return torch.where((x > 0) & (x <= 1.5) & ~(a == 0) | (a != a) | (x >= 4), t * SHIFT, t - math.pi)


def test_evaluates_as_written() -> None:
    x, a = torch.randn(1000, dtype=torch.float64), torch.randn(1000, dtype=torch.float64)
    # pi is a float32 constant in the kernel
    torch.testing.assert_close(all_helpers(x, a), reference(x, a), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fused", [all_helpers, halves, constant], ids=lambda p: p.name)
def test_compiles_into_the_cpu_kernel(fused: onepass.Prologue) -> None:
    x, a = torch.randn(20, 257), torch.randn(20, 257)
    arguments = [a] if len(fused.parameters) == 2 else []
    _, _, norm = onepass.rms_norm_fused_fp8(
        x, torch.ones(257), prologue=fused, prologue_args=arguments, return_norm=True
    )
    h = fused(x.double(), *(t.double() for t in arguments)).expand(20, 257)
    exact = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    # sums that nearly cancel (t - pi) keep the absolute error of their terms, a few float32 steps of about 4
    assert ((norm.double() - exact).abs() <= 1e-6 * exact.abs() + 1e-6).all()
    assert floats(torch.zeros_like(norm), exact) is not None


@prologue
def edges(x, a):  # type: ignore[no-untyped-def]
    """Every comparison, each with its own digit."""
    low = where(x < a, 1.0, 2.0) + where(x <= a, 10.0, 20.0) + where(x > a, 100.0, 200.0)
    return low + where(x >= a, 1000.0, 2000.0) + where(x == a, 4000.0, 0.0) + where(x != a, 8000.0, 0.0)


def test_comparisons_of_equal_values() -> None:
    x = torch.tensor([[-1.0, 0.0, 1.0, 4.0, torch.inf]])
    a = torch.tensor([[0.0, 0.0, 0.0, 4.0, torch.inf]])
    expected = torch.tensor([[10211.0, 5212.0, 9122.0, 5212.0, 5212.0]])
    assert torch.equal(edges(x.double(), a.double()).float(), expected)
    _, _, norm = onepass.rms_norm_fused_fp8(x, torch.ones(5), prologue=edges, prologue_args=[a], return_norm=True)
    assert floats(norm, expected.double() / expected.double().square().mean().sqrt()) is None


def test_equal_functions_have_equal_keys() -> None:
    def make(value: float) -> onepass.Prologue:
        @prologue
        def scaled(x):  # type: ignore[no-untyped-def]
            return x * value

        return scaled

    assert make(2.0).key == make(2.0).key != make(3.0).key
    assert make(2.0)(torch.ones(1)).item() == 2.0


def test_nan_propagates_through_maximum() -> None:
    @prologue
    def positive(x):  # type: ignore[no-untyped-def]
        return maximum(x, 0.0)

    x = torch.randn(2, 64)
    x[1, 3] = torch.nan
    _, scale = onepass.rms_norm_fused_fp8(x, torch.ones(64), prologue=positive)
    assert scale[0].isfinite().all() and scale[1].isnan().all()


def loops(x):  # type: ignore[no-untyped-def]
    for _ in range(3):
        x = x + 1
    return x


def power(x):  # type: ignore[no-untyped-def]
    return x**2


def unknown_function(x):  # type: ignore[no-untyped-def]
    return math.erf(x)


def unknown_name(x):  # type: ignore[no-untyped-def]
    return x + undefined  # type: ignore[name-defined]  # noqa: F821


def too_early(x):  # type: ignore[no-untyped-def]
    y += x  # type: ignore[name-defined]  # noqa: F821
    return y  # type: ignore[name-defined]


def branch(x):  # type: ignore[no-untyped-def]
    if x > 0:
        return x
    return -x


def no_return(x):  # type: ignore[no-untyped-def]
    x = x + 1


def compares(x):  # type: ignore[no-untyped-def]
    return x > 0


def condition(x):  # type: ignore[no-untyped-def]
    return where(x, x, x)


def default(x, y=1.0):  # type: ignore[no-untyped-def]
    return x + y


def five_more(x, a, b, c, d, e):  # type: ignore[no-untyped-def]
    return x + a + b + c + d + e


def wrong_arity(x):  # type: ignore[no-untyped-def]
    return exp(x, x)  # type: ignore[call-arg]


def boolean(x):  # type: ignore[no-untyped-def]
    return x + True


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (loops, "only assignments to local names and a final return are allowed, got For"),
        (power, "operator Pow"),
        (unknown_function, "`math.erf` is not one of onepass's helper functions"),
        (unknown_name, "`undefined` is neither"),
        (too_early, "`y` is used before"),
        (branch, "got If"),
        (no_return, "must end with `return"),
        (compares, "a comparison is not a number"),
        (condition, "a condition must be a comparison"),
        (default, "plain positional parameters"),
        (five_more, "at most 4 more tensors"),
        (wrong_arity, "takes 1 arguments, got 2"),
        (boolean, "True and False are not numbers"),
        (len, "its source cannot be read"),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_rejected_at_decoration(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(onepass.ContractError) as caught:
        prologue(function)
    assert why in str(caught.value)
    assert str(caught.value).startswith(f"prologue `{function.__name__}`")


def test_every_dialect_prints_every_operation() -> None:
    pytest.importorskip("triton")
    from onepass.gpu.prologue import DIALECT

    assert set(DIALECT) == prologues.OPCODES
    used = {i.op for i in all_helpers.program}
    assert used == prologues.OPCODES


def test_unregistered_key_is_explained() -> None:
    with pytest.raises(onepass.ContractError, match="import the module that decorates it"):
        prologues.find("nowhere.nothing:000000000000")
