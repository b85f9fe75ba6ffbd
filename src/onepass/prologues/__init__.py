"""An elementwise Python function, fused into the load of a kernel on every backend::

    from onepass.prologues import prologue, sigmoid

    @prologue
    def gated(x, gate):
        return x * sigmoid(gate)

`prologue` reads the function's source once, at decoration, and lowers it to a short straight-line program over float32
values (`Prologue.program`). Each backend prints that program in its own dialect, so the same function is compiled into
the Triton kernel and the CPU kernel, and evaluated by the float64 oracle. All arithmetic is float32 and IEEE (``maximum``
and ``minimum`` propagate NaN, as torch's do).

A body consists of assignments to local names (``=``, ``+=``, ``a, b = b, a``; parameters may be assigned too) and one
final ``return``. It may use its parameters, numbers, ``+ - * /``, comparisons, ``and or not``, ``a if c else b`` and the
helper functions below. Anything else raises a `ContractError` at decoration that names the line. Names stand for
numbers, one per element: ``x += y`` rebinds ``x`` and changes no other name.

**Globals and closure variables are frozen at decoration.** A number from the module or an enclosing function becomes a
constant of the program. To use another value later, decorate the function again, or pass the number as an operand.
Numbers are rounded to float32. Those that float32 cannot represent (``1e39``, ``1e-50``) are rejected, but ``math.inf``
and ``math.nan`` are allowed.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.check import run_source
from ..errors import ContractError
from .lowering import BINARY, BOOLEAN, COMPARE, MAX_OPERANDS, Helper, Instruction, label, lower

__all__ = [
    "MAX_OPERANDS",
    "OPCODES",
    "Dialect",
    "Instruction",
    "Operand",
    "OperandKind",
    "Prologue",
    "find",
    "prologue",
]
__all__ += ["add", "dequantize", "sigmoid_and_mul", "silu_and_mul"]
__all__ += ["exp", "log", "maximum", "minimum", "rsqrt", "sigmoid", "silu", "sqrt", "tanh", "where"]

OperandKind = Literal["full", "column", "row", "group"]
Number = Tensor | float
"""What helpers accept if a function is called directly, without a kernel: tensors, or numbers of the body."""


class Operand(NamedTuple):
    """A tensor that a prologue takes besides x.

    Args:
        kind: "full" [..., N], "column" [N], "row" [..., 1] or "group" [..., N / group].
        dtype: Its dtype.
        group: Columns per element of a "group".
    """

    kind: OperandKind
    dtype: torch.dtype
    group: int = 0


def _tensor(value: Number, like: Number = 0.0) -> Tensor:
    """Convert a number to the dtype of ``like`` if that is a tensor, else to float32."""
    if isinstance(value, Tensor):
        return value
    if isinstance(like, Tensor):
        return torch.tensor(value, dtype=like.dtype, device=like.device)
    return torch.tensor(value, dtype=torch.float32)


def exp(x: Number) -> Tensor:
    """``e**x``."""
    return torch.exp(_tensor(x))


def log(x: Number) -> Tensor:
    """Natural logarithm."""
    return torch.log(_tensor(x))


def sqrt(x: Number) -> Tensor:
    """Square root."""
    return torch.sqrt(_tensor(x))


def rsqrt(x: Number) -> Tensor:
    """``1 / sqrt(x)``."""
    return torch.rsqrt(_tensor(x))


def tanh(x: Number) -> Tensor:
    """Hyperbolic tangent."""
    return torch.tanh(_tensor(x))


def sigmoid(x: Number) -> Tensor:
    """``1 / (1 + exp(-x))``."""
    return torch.sigmoid(_tensor(x))


def silu(x: Number) -> Tensor:
    """``x * sigmoid(x)``."""
    return x * torch.sigmoid(_tensor(x))


def maximum(a: Number, b: Number) -> Tensor:
    """The larger; NaN if either is."""
    return torch.maximum(_tensor(a, b), _tensor(b, a))


def minimum(a: Number, b: Number) -> Tensor:
    """The smaller; NaN if either is."""
    return torch.minimum(_tensor(a, b), _tensor(b, a))


def where(condition: Tensor | bool, a: Number, b: Number) -> Tensor:
    """``a`` where the condition holds, else ``b``."""
    return torch.where(torch.as_tensor(condition), _tensor(a, b), _tensor(b, a))


_HELPERS: Final = (
    *(Helper(f, f.__name__, 1) for f in (abs, exp, log, sqrt, rsqrt, tanh, sigmoid, silu)),
    *(Helper(f, f.__name__, 2) for f in (maximum, minimum)),
    Helper(where, "where", 3),
)
_UNARY: Final = tuple(h.op for h in _HELPERS if h.arity == 1 and h.op != "silu")
_BINARY: Final = tuple(h.op for h in _HELPERS if h.arity == 2)

OPCODES: Final = frozenset(
    {"const", "neg", "not", "where", *_UNARY, *_BINARY, *BINARY.values(), *COMPARE.values(), *BOOLEAN.values()}
)
"""Every operation that a dialect must print."""

Dialect = Mapping[str, str]
"""Operation -> format string over its argument names, e.g. ``{"add": "({0} + {1})"}``."""


@dataclass(frozen=True)
class Prologue:
    """A lowered elementwise function. Call it on tensors to evaluate it with torch, in their dtype.

    Attributes:
        name: Module and name of the function.
        parameters: Names of its parameters, x first.
        program: Its instructions.
        result: Name of the value that it returns.
        doc: Docstring of the function.
        key: Name plus a hash of the program: equal keys compute the same function.
    """

    name: str
    parameters: tuple[str, ...]
    program: tuple[Instruction, ...]
    result: str
    doc: str = field(compare=False, default="")
    key: str = field(init=False, compare=False)
    """Name plus a hash of the program: equal keys compute the same function."""

    def __post_init__(self) -> None:
        digest = hashlib.sha256(repr((self.parameters, self.program, self.result)).encode()).hexdigest()
        object.__setattr__(self, "key", f"{self.name}:{digest[:12]}")

    def source(self, function: str, dialect: Dialect) -> str:
        """The function's source in a dialect.

        Args:
            function: Name of the function.
            dialect: A format string for each operation.

        Returns:
            A ``def`` with the parameters in order.
        """
        lines = [f"def {function}({', '.join(self.parameters)}):"]
        lines += [f"    {i.name} = {dialect[i.op].format(*i.args)}" for i in self.program]
        return "\n".join([*lines, f"    return {self.result}", ""])

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Evaluate with torch, as the oracle does."""
        result: Tensor = _evaluator(self)(*tensors)
        return result


_INFIX: Final = dict(
    add="+", sub="-", mul="*", div="/", lt="<", le="<=", gt=">", ge=">=", eq="==", ne="!=", **{"and": "&", "or": "|"}
)
_TORCH: Final[Dialect] = {
    "const": "torch.tensor({0}, dtype=torch.float32)",
    "neg": "-{0}",
    "not": "~{0}",
    "where": "torch.where({0}, {1}, {2})",
    **{op: "torch." + op + "({0})" for op in _UNARY},
    **{op: "torch." + op + "({0}, {1})" for op in _BINARY},
    **{op: "{0} " + sign + " {1}" for op, sign in _INFIX.items()},
}

_registry: dict[str, Prologue] = {}


def find(key: str) -> Prologue:
    """The registered prologue with a key.

    Args:
        key: `Prologue.key`.

    Returns:
        The prologue.

    Raises:
        ContractError: If no imported module has decorated it.
    """
    if key not in _registry:
        raise ContractError(f"prologue {key!r} is not registered in this process; import the module that decorates it")
    return _registry[key]


@cache
def _evaluator(prologue: Prologue) -> Callable[..., Tensor]:
    """The program as a Python function over tensors."""
    scope: dict[str, Any] = {"torch": torch}
    run_source([prologue.source("evaluate", _TORCH)], f"prologue {prologue.key}", scope)
    evaluate: Callable[..., Tensor] = scope["evaluate"]
    return evaluate


def prologue(function: Callable[..., Any]) -> Prologue:
    """Decorate an elementwise function so that kernels can fuse it: ``h = function(x, *prologue_args) + residual``.

    The source is read now, once. Globals and closure variables that it uses are frozen at their current values.

    Args:
        function: A function of ``x`` and up to four more tensors.

    Returns:
        The lowered function.

    Raises:
        ContractError: If the function uses what a prologue cannot contain.

    >>> import torch, onepass
    >>> @onepass.prologue
    ... def halved(x):
    ...     return x * 0.5
    >>> x, gamma = torch.tensor([[6.0, -8.0]]), torch.ones(2)
    >>> codes, scale, norm = onepass.rms_norm_fused_fp8(x, gamma, 0.0, prologue=halved, return_norm=True)
    >>> norm
    tensor([[ 0.8485, -1.1314]])
    >>> halved(x)
    tensor([[ 3., -4.]])
    """
    parameters, program, result = lower(function, _HELPERS)
    name = f"{function.__module__}.{label(function)}"
    lowered = Prologue(name, parameters, program, result, inspect.getdoc(function) or "")
    _registry[lowered.key] = lowered
    return lowered


@prologue
def add(x, other):  # type: ignore[no-untyped-def]
    """``x + other``: a residual whose sum is not returned."""
    return x + other


@prologue
def silu_and_mul(x, gate):  # type: ignore[no-untyped-def]
    """``silu(gate) * x``: a gated MLP's activation."""
    return silu(gate) * x


@prologue
def sigmoid_and_mul(x, gate):  # type: ignore[no-untyped-def]
    """``sigmoid(gate) * x``: a gated attention's output."""
    return sigmoid(gate) * x


@prologue
def dequantize(x, scale):  # type: ignore[no-untyped-def]
    """``x * scale``, with ``scale`` [..., 1] per row or [..., N / group] per group of 32, 64, 128 or 256 columns.

    ``x`` may be fp8 or int8, so that a quantized activation is dequantized, normed and quantized again in one read:

    >>> import torch, onepass
    >>> x = torch.arange(-64, 64, dtype=torch.int8).view(1, 128)
    >>> scale = torch.tensor([[0.5, 0.25]])
    >>> codes, s = onepass.rms_norm_fused_fp8(
    ...     x, torch.ones(128), prologue=onepass.prologues.dequantize, prologue_args=[scale]
    ... )
    >>> (codes.float() * s)[0, :2]
    tensor([-2.1755, -2.1755])
    """
    return x * scale
