"""Functions that kernels cannot fuse with Python's meaning raise at decoration, naming the line."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import onepass
from onepass import prologues
from onepass.prologues import exp, prologue
from tests.prologues.reference import define, direct

LARGE = 10**400
FINITE = 1e39
TABLE = [1.0]


def refused(source: str, line: int, **names: Any) -> str:
    """The error message, which must name the cell and the line."""
    function = define(source, exp=exp, where=prologues.where, **names)
    with pytest.raises(onepass.ContractError) as caught:
        prologue(function)
    message = str(caught.value)
    assert f"cell {function.__code__.co_filename.split()[-1]}, line {line})" in message, message
    assert message.startswith(f"prologue `{function.__qualname__}` (") and len(message) < 400
    return message


@pytest.mark.parametrize("operator", "+-*/")
def test_arithmetic_with_a_condition(operator: str) -> None:
    message = refused(f"def f(x):\n    c = x > 0\n    c {operator}= x\n    return x\n", 3)
    assert "a comparison is not a number" in message
    refused(f"def f(x):\n    c = x > 0\n    x {operator}= c\n    return x\n", 3)
    refused(f"def f(x):\n    c = x > 0\n    return x {operator} c\n", 3)
    refused("def f(x):\n    x = x > 0\n    return x\n", 3)


@pytest.mark.parametrize(
    "number", ["1e39", "-1e39", "9" * 400, "9" * 5000, "1e-50", "-4e-46", "340282356779733661637539395458142568448"]
)
def test_numbers_that_float32_cannot_hold(number: str) -> None:
    try:
        message = refused(f"def f(x):\n    y = x\n    return y * {number}\n", 3)
    except SyntaxError:  # Python itself may refuse to read thousands of digits
        assert len(number) > 4300
        return
    assert "is beyond float32" in message or "is 0 in float32" in message


def test_global_numbers_that_float32_cannot_hold() -> None:
    assert "is beyond float32" in refused("def f(x):\n    return x * LARGE\n", 2, LARGE=LARGE)
    assert "1e+39 is beyond float32" in refused("def f(x):\n    return x * FINITE\n", 2, FINITE=FINITE)
    assert "digits is beyond float32" in refused("def f(x):\n    return x * LARGE\n", 2, LARGE=10**5000)


def test_limits_of_float32_are_accepted() -> None:
    fused = prologue(define("def f(x):\n    return -math.inf * x - 1.4e-45 if x > 1 else 3.4028235677973362e38\n"))
    assert fused(torch.zeros(1)).item() == torch.finfo(torch.float32).max
    assert fused(torch.full((1,), 2.0)).item() == -math.inf
    assert math.copysign(1, prologue(define("def f(x):\n    return ZERO\n", ZERO=-0.0))(torch.ones(1)).item()) == -1


def test_function_is_too_long_or_too_deep() -> None:
    assert "more than 1000 operations" in refused("def f(x):\n    return " + " + ".join(["x"] * 2000) + "\n", 2)
    assert "more than 1000 operations" in refused("def f(x):\n" + "    x += x\n" * 5000 + "    return x\n", 1002)
    assert "nested at most 100 deep" in refused("def f(x):\n    return " + "-" * 500 + "x\n", 2)
    assert "nested at most 100 deep" in refused("def f(x):\n    return " + "exp(" * 150 + "x" + ")" * 150 + "\n", 2)
    assert "nested at most 100 deep" in refused("def f(x):\n    return " + "x if x > 0 else " * 400 + "x\n", 2)
    assert "nested too deeply" in refused("def f(x):\n    return G" + ".real" * 2000 + "\n", 1, G=1.0)


def test_source_that_cannot_be_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    function = define("def f(x):\n    return x\n")
    for error in (RecursionError(), MemoryError()):

        def parse(_: str, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("onepass.prologues.lowering.ast.parse", parse)
            with pytest.raises(onepass.ContractError, match=r"prologue `f` .*line 1\)"):
                prologue(function)


def test_a_long_sum_works() -> None:
    source = "def f(x, y):\n    return " + " - ".join(["x", "y * 0.5"] * 200) + "\n"
    function = define(source)
    given = torch.randn(8), torch.randn(8)
    assert torch.equal(prologue(function)(*given), direct(function, *given))


@pytest.mark.parametrize(
    ("source", "line", "why"),
    [
        ("def f(x, exp):\n    return exp(x)\n", 2, "`exp` is a local here, not a function"),
        ("def f(x):\n    exp = x\n    return exp(x)\n", 3, "`exp` is a local here, not a function"),
        ("def f(x):\n    y = exp(x)\n    exp = y\n    return y\n", 2, "`exp` is a local here, not a function"),
        ("def f(x, math):\n    return x * math.pi\n", 2, "`math.pi` is neither"),
        ("def f(x, torch):\n    return torch.exp(x)\n", 2, "`torch.exp` is not one of"),
        ("def f(x):\n    y = HALF * x\n    HALF = y\n    return HALF\n", 2, "`HALF` is used before it is assigned"),
        ("def f(x):\n    y = math.HALF if x > 0 else HALF\n    HALF = x\n    return y\n", 2, "`math.HALF` is neither"),
        ("def f(x):\n    pi = math.pi * pi\n    return pi\n", 2, "`pi` is used before it is assigned"),
        ("def f(x):\n    return TABLE(x)\n", 2, "`TABLE` is not one of"),
        ("def f(x):\n    return x * TABLE\n", 2, "`TABLE` is neither"),
        ("def f(x):\n    return x * FLAG\n", 2, "`FLAG` is neither"),
        ("def f(x):\n    return tanh(x)\n", 2, "`tanh` is not one of"),
        ("def f(x):\n    return x.abs()\n", 2, "`x.abs` is not one of"),
        ("def f(x):\n    return exp(x=x)\n", 2, "positional arguments only"),
        ("def f(x):\n    return exp(*x)\n", 2, "Starred is not"),
        ("def f(x):\n    def g(y):\n        return y\n    return g(x)\n", 2, "got FunctionDef"),
        ("def f(x):\n    return (lambda y: y)(x)\n", 2, "is not one of"),
        ("def f(x):\n    return (y := x) + y\n", 2, "NamedExpr is not"),
        ("def f(x):\n    if x > 0:\n        x = -x\n    return x\n", 2, "got If"),
        ("def f(x):\n    x[0] = 1.0\n    return x\n", 2, "to local names"),
        ("def f(x):\n    x.data = x\n    return x\n", 2, "to local names"),
        ("def f(x):\n    x, y = x\n    return x\n", 2, "to local names"),
        ("def f(x):\n    x, *y = x, x\n    return x\n", 2, "to local names"),
        ("def f(x):\n    a = b, c = x, x\n    return a\n", 2, "Tuple is not an elementwise"),
        ("def f(x):\n    a, b = c = x, x\n    return a\n", 2, "got Assign"),
        ("def f(x):\n    y: float\n    return x\n", 2, "got AnnAssign"),
        ("def f(x):\n    global HALF\n    return x\n", 2, "got Global"),
        ("def f(x):\n    del x\n    return 1.0\n", 2, "got Delete"),
        ("def f(x):\n    x **= 2\n    return x\n", 2, "operator Pow"),
        ("def f(x):\n    return x in x\n", 2, "comparison In"),
        ("def f(x):\n    return 0 if x is x else 1\n", 2, "comparison Is"),
        ("def f(x):\n    return ~x\n", 2, "UnaryOp is not"),
        ("def f(x):\n    return 1j * x\n", 2, "Constant is not"),
        ("def f(x):\n    return x if True else -x\n", 2, "True and False"),
        ("def f(x):\n    return x and x > 0\n", 2, "a condition must be a comparison"),
        ("def f(x):\n    return not x > 0\n", 2, "a comparison is not a number"),
        ("def f(x, *, y):\n    return x\n", 1, "plain positional parameters"),
        ("def f(x, y=1.0, /):\n    return x\n", 1, "plain positional parameters"),
        ("def f(*x):\n    return x\n", 1, "plain positional parameters"),
        ("def f():\n    return 1.0\n", 1, "got 0 parameters"),
        ("async def f(x):\n    return x\n", 1, "plain `def`"),
        ("f = lambda x: x\n", 1, "plain `def`"),
        ("def g(): return lambda x: x\nf = g()\n", 1, "plain `def`"),
        ("def f(x):\n    yield x\n", 1, "must end with"),
        ("def f(x):\n    pass\n", 1, "must end with"),
    ],
)
def test_unsupported_syntax(source: str, line: int, why: str) -> None:
    message = refused(source, line, TABLE=TABLE, FLAG=True, HALF=0.5, pi=3.0, tanh=math.tanh)
    assert why in message


def test_a_wrapped_function() -> None:
    def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(x):  # type: ignore[no-untyped-def]
            return 2 * function(x)

        return wrapper

    def plain(x):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(onepass.ContractError, match="wrapped by another decorator"):
        prologue(doubled(plain))
    with pytest.raises(onepass.ContractError, match="its source cannot be read"):
        prologue(functools.partial(plain))


def test_a_closure_variable_without_a_value() -> None:
    def plain(x):  # type: ignore[no-untyped-def]
        return x * later

    with pytest.raises(onepass.ContractError, match="`later` is neither"):
        prologue(plain)
    later = 1.0


def test_a_docstring_that_is_less_indented() -> None:
    source = 'def make():\n    def f(x):\n        """First\nsecond\n        """\n        return 2 * x\n    return f\nf = make()\n'
    assert prologue(define(source))(torch.ones(1)).item() == 2.0
    message = refused(source.replace("2 * x", "2 ** x"), 6)
    assert "operator Pow" in message


def test_globals_and_closures_are_frozen_at_decoration(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 2.0

    def scaled(x):  # type: ignore[no-untyped-def]
        return x * factor + SHIFT

    fused = prologue(scaled)
    factor = 3.0
    monkeypatch.setitem(globals(), "SHIFT", 100.0)
    monkeypatch.setitem(globals(), "exp", None)
    x = torch.tensor([[1.0, 2.0]])
    assert torch.equal(fused(x), torch.tensor([[3.0, 5.0]]))
    residual = onepass.rms_norm_fused_fp8(x, torch.ones(2), residual=torch.zeros(1, 2), prologue=fused)[2]
    assert torch.equal(residual, torch.tensor([[3.0, 5.0]]))
    again = prologue(scaled)
    assert torch.equal(again(x), torch.tensor([[103.0, 106.0]])) and again.key != fused.key


SHIFT = 1.0


def test_the_evaluated_source_is_in_tracebacks() -> None:
    import traceback

    with pytest.raises(RuntimeError) as caught:
        prologues.add(torch.ones(2), torch.ones(3))
    assert "v0 = p0 + p1" in "".join(traceback.format_tb(caught.value.__traceback__))
