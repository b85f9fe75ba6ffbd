"""One elementwise Python function, fused into the load of a kernel on every backend.

    from onepass.prologues import prologue, sigmoid

    @prologue
    def gated(x, gate):
        return x * sigmoid(gate)

`prologue` reads the function's source once, at decoration, and lowers it to a short straight-line program over
float32 values (`Prologue.program`). Each backend prints that program in its own dialect, so the same function is
compiled into the Triton kernel, into the CPU kernel, and evaluated by the float64 oracle. All arithmetic is float32
and IEEE (``maximum`` and ``minimum`` propagate NaN, as torch's do).

A body is assignments to local names and one final ``return``. It may use its parameters, numbers (also global or
closure numbers, frozen at decoration), ``+ - * /``, comparisons, ``and or not``, ``a if c else b`` and the helper
functions below. Anything else is a `ContractError` at decoration that names the line.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from .errors import ContractError

MAX_OPERANDS: Final = 4


def exp(x: Tensor) -> Tensor:
    """``e**x``."""
    return torch.exp(x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm."""
    return torch.log(x)


def sqrt(x: Tensor) -> Tensor:
    """Square root."""
    return torch.sqrt(x)


def rsqrt(x: Tensor) -> Tensor:
    """``1 / sqrt(x)``."""
    return torch.rsqrt(x)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return torch.tanh(x)


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``."""
    return torch.sigmoid(x)


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""
    return x * torch.sigmoid(x)


def maximum(a: Tensor, b: Tensor | float) -> Tensor:
    """The larger; NaN if either is."""
    return torch.maximum(a, torch.as_tensor(b, dtype=a.dtype, device=a.device))


def minimum(a: Tensor, b: Tensor | float) -> Tensor:
    """The smaller; NaN if either is."""
    return torch.minimum(a, torch.as_tensor(b, dtype=a.dtype, device=a.device))


def where(condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """``a`` where the condition holds, else ``b``."""
    return torch.where(condition, a, b)


_UNARY: Final = {exp: "exp", log: "log", sqrt: "sqrt", rsqrt: "rsqrt", tanh: "tanh", sigmoid: "sigmoid", abs: "abs"}
_BINARY: Final = {maximum: "maximum", minimum: "minimum"}
_AST_BINARY: Final = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_AST_COMPARE: Final = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
_AST_BOOL: Final = {ast.And: "and", ast.Or: "or"}
_BOOLEAN: Final = frozenset({*_AST_COMPARE.values(), "and", "or", "not"})

OPCODES: Final = frozenset(
    {"const", "neg", "not", "where", *_UNARY.values(), *_BINARY.values(), *_AST_BINARY.values()}
    | {*_AST_COMPARE.values(), *_AST_BOOL.values()}
)
"""Every operation a dialect must print."""

Dialect = Mapping[str, str]
"""Operation -> format string over its argument names, e.g. ``{"add": "({0} + {1})"}``."""


@dataclass(frozen=True)
class Instruction:
    """``name = op(args)``: SSA over float32 values; ``const`` has one argument, the number's repr."""

    name: str
    op: str
    args: tuple[str, ...]


@dataclass(frozen=True)
class Prologue:
    """A lowered elementwise function; call it on tensors to evaluate it with torch, in their dtype."""

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
        """The function's text in ``dialect``: a ``def`` of ``function`` with the parameters in order."""
        lines = [f"def {function}({', '.join(self.parameters)}):"]
        lines += [f"    {i.name} = {dialect[i.op].format(*i.args)}" for i in self.program]
        return "\n".join([*lines, f"    return {self.result}", ""])

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Evaluate with torch, as the oracle does."""
        scope: dict[str, Any] = {"torch": torch}
        exec(self.source("evaluate", _TORCH), scope)
        result: Tensor = scope["evaluate"](*tensors)
        return result


_TORCH: Final[Dialect] = {
    "const": "torch.tensor({0}, dtype=torch.float32)",
    "neg": "-{0}",
    "not": "~{0}",
    "where": "torch.where({0}, {1}, {2})",
    **{op: "torch." + op + "({0})" for op in _UNARY.values()},
    **{op: "torch." + op + "({0}, {1})" for op in _BINARY.values()},
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
}

_registry: dict[str, Prologue] = {}


def find(key: str) -> Prologue:
    """The registered prologue of that key."""
    if key not in _registry:
        raise ContractError(f"prologue {key!r} is not registered in this process; import the module that decorates it")
    return _registry[key]


def prologue(function: Callable[..., Any]) -> Prologue:
    """Decorate an elementwise function of ``x`` and up to four more tensors so that kernels can fuse it."""
    lowered = _Lowering(function).run()
    _registry[lowered.key] = lowered
    return lowered


class _Lowering:
    """Walks the function's syntax tree once, emitting instructions."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.label = getattr(function, "__qualname__", repr(function))
        self.program: list[Instruction] = []
        self.names: dict[str, str] = {}
        self.booleans: set[str] = set()
        self.constants: dict[str, str] = {}

    def fail(self, why: str, node: ast.AST | None = None) -> NoReturn:
        where_ = f" (line {node.lineno})" if isinstance(node, (ast.expr, ast.stmt)) else ""
        raise ContractError(f"prologue `{self.label}`{where_}: {why}")

    def run(self) -> Prologue:
        definition = self._definition()
        arguments = definition.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
            self.fail("takes plain positional parameters only", definition)
        parameters = tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args))
        if not 1 <= len(parameters) <= 1 + MAX_OPERANDS:
            self.fail(f"takes x and at most {MAX_OPERANDS} more tensors, got {len(parameters)} parameters", definition)
        self.names = {p: f"p{i}" for i, p in enumerate(parameters)}
        body = definition.body
        if ast.get_docstring(definition) is not None:
            body = body[1:]
        if not body or not isinstance(body[-1], ast.Return) or body[-1].value is None:
            self.fail("must end with `return <expression>`", definition)
        for statement in body[:-1]:
            self._assign(statement)
        result = self._float(body[-1].value)
        name = f"{self.function.__module__}.{self.label}"
        return Prologue(
            name,
            tuple(self.names[p] for p in parameters),
            tuple(self.program),
            result,
            inspect.getdoc(self.function) or "",
        )

    def _definition(self) -> ast.FunctionDef:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(self.function)))
        except (OSError, TypeError, SyntaxError) as error:
            self.fail(f"its source cannot be read ({error}); define it with `def` in a file or notebook cell")
        definition = tree.body[0]
        if not isinstance(definition, ast.FunctionDef):
            self.fail("must be a plain `def` function")
        return definition

    def _assign(self, statement: ast.stmt) -> None:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                result = self._expression(value)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                operation = _AST_BINARY.get(type(op)) or self.fail(
                    f"operator {type(op).__name__} is not elementwise", statement
                )
                result = self._emit(operation, self._name(name, statement), self._float(value))
            case _:
                self.fail(
                    f"only `name = expression` and a final return are allowed, got {type(statement).__name__}",
                    statement,
                )
        self.names[name] = result

    def _emit(self, op: str, *args: str) -> str:
        name = f"v{len(self.program)}"
        self.program.append(Instruction(name, op, args))
        if op in _BOOLEAN:
            self.booleans.add(name)
        return name

    def _constant(self, value: float) -> str:
        if not math.isfinite(value):
            text = f"float('{value}')"
        else:
            text = repr(float(torch.tensor(value, dtype=torch.float32)))
        if text not in self.constants:
            self.constants[text] = self._emit("const", text)
        return self.constants[text]

    def _resolve(self, node: ast.expr) -> Any:
        """The Python object that a name or dotted name means where the function was defined."""
        if isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            return getattr(owner, node.attr, None)
        if isinstance(node, ast.Name):
            closure = inspect.getclosurevars(self.function)
            for scope in (closure.nonlocals, closure.globals, closure.builtins):
                if node.id in scope:
                    return scope[node.id]
        return None

    def _name(self, name: str, node: ast.AST) -> str:
        if name not in self.names:
            self.fail(f"`{name}` is used before it is assigned", node)
        return self.names[name]

    def _float(self, node: ast.expr) -> str:
        value = self._expression(node)
        if value in self.booleans:
            self.fail("a comparison is not a number; use where(c, a, b) or `a if c else b`", node)
        return value

    def _boolean(self, node: ast.expr) -> str:
        value = self._expression(node)
        if value not in self.booleans:
            self.fail("a condition must be a comparison", node)
        return value

    def _expression(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.Constant(value=bool()):
                self.fail("True and False are not numbers here", node)
            case ast.Constant(value=int() | float() as number):
                return self._constant(float(number))
            case ast.Name() | ast.Attribute():
                found = self._resolve(node)
                if isinstance(found, (int, float)) and not isinstance(found, bool):
                    return self._constant(float(found))
                self.fail(f"`{ast.unparse(node)}` is neither a parameter, a local, nor a number", node)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._emit("neg", self._float(operand))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._float(operand)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._emit("not", self._boolean(operand))
            case ast.BinOp(left=left, op=op, right=right):
                operation = _AST_BINARY.get(type(op)) or self.fail(
                    f"operator {type(op).__name__} is not supported; use + - * /", node
                )
                return self._emit(operation, self._float(left), self._float(right))
            case ast.BoolOp(op=op, values=values):
                result = self._boolean(values[0])
                for value in values[1:]:
                    result = self._emit(_AST_BOOL[type(op)], result, self._boolean(value))
                return result
            case ast.Compare():
                return self._comparison(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._emit("where", self._boolean(test), self._float(body), self._float(orelse))
            case ast.Call():
                return self._call(node)
        self.fail(f"{type(node).__name__} is not an elementwise expression", node)

    def _comparison(self, node: ast.Compare) -> str:
        terms = [self._float(term) for term in (node.left, *node.comparators)]
        result = ""
        for op, left, right in zip(node.ops, terms, terms[1:], strict=False):
            operation = _AST_COMPARE.get(type(op)) or self.fail(
                f"comparison {type(op).__name__} is not supported", node
            )
            part = self._emit(operation, left, right)
            result = self._emit("and", result, part) if result else part
        return result

    def _call(self, node: ast.Call) -> str:
        target = self._resolve(node.func)
        if node.keywords:
            self.fail("helper functions take positional arguments only", node)
        arity = 1 if target in _UNARY or target is silu else 2 if target in _BINARY else 3 if target is where else 0
        if not arity:
            self.fail(
                f"`{ast.unparse(node.func)}` is not one of onepass's helper functions ({', '.join(_HELPERS)})", node
            )
        if len(node.args) != arity:
            self.fail(f"`{ast.unparse(node.func)}` takes {arity} arguments, got {len(node.args)}", node)
        if target is where:
            return self._emit(
                "where", self._boolean(node.args[0]), self._float(node.args[1]), self._float(node.args[2])
            )
        values = [self._float(a) for a in node.args]
        if target is silu:
            return self._emit("mul", values[0], self._emit("sigmoid", values[0]))
        return self._emit(_UNARY.get(target) or _BINARY[target], *values)


_HELPERS: Final = ("abs", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "silu", "maximum", "minimum", "where")


@prologue
def add(x, other):  # type: ignore[no-untyped-def]
    """``x + other``: a residual whose sum is not wanted back."""
    return x + other


@prologue
def silu_and_mul(x, gate):  # type: ignore[no-untyped-def]
    """``silu(gate) * x``: a gated MLP's activation."""
    return silu(gate) * x


@prologue
def dequantize(x, scale):  # type: ignore[no-untyped-def]
    """``x * scale``, with ``scale`` [..., 1] per row."""
    return x * scale
