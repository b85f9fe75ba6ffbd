"""From the source of one elementwise Python function to a short straight-line program.

`onepass.prologues` documents what a function may contain. Everything else raises a `ContractError` at
decoration that names the line. Names are looked up once, as Python would at that moment: locals and
parameters first, then the closure, the module's globals and the builtins.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from types import FunctionType
from typing import Any, Final, NamedTuple, NoReturn

import torch

from ..errors import ContractError

MAX_OPERANDS: Final = 4
MAX_OPERATIONS: Final = 1000
"""Compiling longer programs takes minutes: they are unrolled for every column that a thread holds."""
MAX_DEPTH: Final = 100
"""Deepest nesting of expressions, which keeps the lowering far from Python's recursion limit."""

BINARY: Final = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
COMPARE: Final = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
BOOLEAN: Final = {ast.And: "and", ast.Or: "or"}
_CONDITIONS: Final = frozenset({*COMPARE.values(), *BOOLEAN.values(), "not"})


class Instruction(NamedTuple):
    """``name = op(args)``: SSA over float32 values; ``const`` has one argument, the number's repr."""

    name: str
    op: str
    args: tuple[str, ...]


class Helper(NamedTuple):
    """A function that a body may call, the operation of the same name, and its number of arguments."""

    function: Callable[..., Any]
    op: str
    arity: int


class Lowered(NamedTuple):
    """The parameters' names in order, the program, and the name of its result."""

    parameters: tuple[str, ...]
    program: tuple[Instruction, ...]
    result: str


def label(function: Any) -> str:
    """The function's name in messages."""
    return str(getattr(function, "__qualname__", None) or repr(function))


def lower(function: Any, helpers: tuple[Helper, ...]) -> Lowered:
    """The program of ``function``, which may call ``helpers``."""
    lowering = _Lowering(function, helpers)
    try:
        return lowering.run()
    except RecursionError:
        lowering.fail("its expressions are nested too deeply; assign parts of them to local names")


class _Lowering:
    """Walks the function's syntax tree once, emitting instructions."""

    def __init__(self, function: Any, helpers: tuple[Helper, ...]) -> None:
        self.function = function
        self.helpers = helpers
        self.file, self.first = "", 0
        self.program: list[Instruction] = []
        self.locals: frozenset[str] = frozenset()
        """Parameters and assigned names. As in Python, they are local in the whole body."""
        self.values: dict[str, str] = {}
        """The current value of each local; parameters are initialized."""
        self.conditions: set[str] = set()
        self.constants: dict[str, str] = {}
        self.depth = 0

    def fail(self, why: str, node: ast.AST | None = None) -> NoReturn:
        line = node.lineno if isinstance(node, (ast.expr, ast.stmt)) else 1
        where = f" ({self.file}, line {self.first + line - 1})" if self.file else ""
        raise ContractError(f"prologue `{label(self.function)}`{where}: {why}")

    # --- the function ---

    def run(self) -> Lowered:
        definition = self._definition()
        arguments = definition.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
            self.fail("takes plain positional parameters only", definition)
        named = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        if not 1 <= len(named) <= 1 + MAX_OPERANDS:
            self.fail(f"takes x and at most {MAX_OPERANDS} more tensors, got {len(named)} parameters", definition)
        parameters = tuple(f"p{i}" for i in range(len(named)))
        self.values = dict(zip(named, parameters, strict=True))
        body = definition.body
        if ast.get_docstring(definition) is not None:
            body = body[1:]
        if not body or not isinstance(body[-1], ast.Return) or body[-1].value is None:
            self.fail("must end with `return <expression>`", definition)
        self.locals = frozenset(named).union(*(_assigned(statement) for statement in body))
        for statement in body[:-1]:
            self._assign(statement)
        result = self._float(body[-1].value)
        return Lowered(parameters, tuple(self.program), result)

    def _definition(self) -> ast.FunctionDef:
        if not isinstance(self.function, FunctionType):
            self.fail("its source cannot be read; define it with `def` in a file or notebook cell")
        if hasattr(self.function, "__wrapped__"):
            self.fail("is wrapped by another decorator, which would have no effect; decorate the plain function")
        try:
            lines, self.first = inspect.getsourcelines(self.function)
            self.file = PurePath(self.function.__code__.co_filename).name
            text = "".join(lines)
            indented = text[:1].isspace()
            tree = ast.parse("if 1:\n" + text if indented else text)
        except (OSError, TypeError, SyntaxError, MemoryError, ValueError) as error:
            self.fail(f"its source cannot be read ({error}); define it with `def` in a file or notebook cell")
        if indented:
            self.first -= 1
        definition = tree.body[0].body[0] if isinstance(tree.body[0], ast.If) and indented else tree.body[0]
        code = self.function.__code__
        if not isinstance(definition, ast.FunctionDef):
            self.fail("must be a plain `def` function", definition)
        count = len(definition.args.posonlyargs) + len(definition.args.args)
        if definition.name != code.co_name or count != code.co_argcount:
            self.fail("must be a plain `def` function on its own lines", definition)
        return definition

    # --- statements ---

    def _assign(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=targets, value=value):
                assigned = [(target, self._values(target, value)) for target in targets[:1]]
                assigned += [(target, self._same(target, assigned[0][1], statement)) for target in targets[1:]]
                for target, values in assigned:
                    self.values.update(zip(_names(target), values, strict=True))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.values[name] = self._expression(value)
            case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                operation = BINARY.get(type(op)) or self.fail(
                    f"operator {type(op).__name__} is not supported; use += -= *= /=", statement
                )
                left = self._number(self._local(name, target), target)
                self.values[name] = self._emit(operation, left, self._float(value), node=statement)
            case _:
                self._fail_statement(statement)

    def _fail_statement(self, statement: ast.stmt) -> NoReturn:
        self.fail(
            f"only assignments to local names and a final return are allowed, got {type(statement).__name__}", statement
        )

    def _values(self, target: ast.expr, value: ast.expr) -> list[str]:
        """The new values of a target's names, computed before any of them is assigned."""
        names = _names(target)
        if isinstance(target, ast.Name):
            return [self._expression(value)]
        if not names or not isinstance(value, ast.Tuple) or len(value.elts) != len(names):
            self.fail("assign only to local names: `name = expression` or `a, b = first, second`", target)
        return [self._expression(item) for item in value.elts]

    def _same(self, target: ast.expr, values: list[str], statement: ast.stmt) -> list[str]:
        """The first target's values for another target, as in ``a = b = x``."""
        if len(_names(target)) != len(values):
            self._fail_statement(statement)
        return values

    # --- values ---

    def _emit(self, op: str, *args: str, node: ast.AST | None = None) -> str:
        if len(self.program) == MAX_OPERATIONS:
            self.fail(f"has more than {MAX_OPERATIONS} operations", node)
        name = f"v{len(self.program)}"
        self.program.append(Instruction(name, op, args))
        if op in _CONDITIONS:
            self.conditions.add(name)
        return name

    def _constant(self, number: float, node: ast.expr) -> str:
        """A number rounded to float32. Those that float32 cannot represent are rejected."""
        try:
            value = float(number)
        except OverflowError:
            value = math.nan  # an int beyond all floats
        single = float(torch.tensor(value, dtype=torch.float32))
        if number == number and (value != value or (math.isinf(single) and not math.isinf(value))):
            self.fail(f"{_shown(number)} is beyond float32, whose largest number is 3.4e38", node)
        if single == 0 and value != 0:
            self.fail(f"{_shown(number)} is 0 in float32, whose smallest positive number is 1.4e-45", node)
        if single == 0 and math.copysign(1, value) < 0:
            return self._emit("neg", self._constant(0.0, node), node=node)
        text = repr(single) if math.isfinite(single) else f"float('{single}')"
        if text not in self.constants:
            self.constants[text] = self._emit("const", text, node=node)
        return self.constants[text]

    def _resolve(self, node: ast.expr) -> Any:
        """The Python object that a name or dotted name refers to in the function's scope, or None."""
        if isinstance(node, ast.Attribute):
            return getattr(self._resolve(node.value), node.attr, None)
        if not isinstance(node, ast.Name) or node.id in self.locals:
            return None
        code = self.function.__code__
        if node.id in code.co_freevars:
            try:
                return self.function.__closure__[code.co_freevars.index(node.id)].cell_contents
            except ValueError:  # not assigned yet
                return None
        scope: Mapping[str, Any] = self.function.__globals__
        return scope[node.id] if node.id in scope else getattr(builtins, node.id, None)

    def _local(self, name: str, node: ast.expr) -> str:
        if name not in self.values:
            self.fail(f"`{name}` is used before it is assigned", node)
        return self.values[name]

    def _number(self, value: str, node: ast.expr) -> str:
        if value in self.conditions:
            self.fail("a comparison is not a number; use where(c, a, b) or `a if c else b`", node)
        return value

    def _float(self, node: ast.expr) -> str:
        return self._number(self._expression(node), node)

    def _condition(self, node: ast.expr) -> str:
        value = self._expression(node)
        if value not in self.conditions:
            self.fail("a condition must be a comparison", node)
        return value

    def _expression(self, node: ast.expr) -> str:
        if self.depth == MAX_DEPTH:
            self.fail(
                f"expressions may be nested at most {MAX_DEPTH} deep; assign parts of this one to local names", node
            )
        self.depth += 1
        value = self._lowered(node)
        self.depth -= 1
        return value

    def _lowered(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name) if name in self.locals:
                return self._local(name, node)
            case ast.Constant(value=bool()):
                self.fail("True and False are not numbers here", node)
            case ast.Constant(value=int() | float() as number):
                return self._constant(number, node)
            case ast.Name() | ast.Attribute():
                constant = self._resolve(node)
                if isinstance(constant, (int, float)) and not isinstance(constant, bool):
                    return self._constant(constant, node)
                self.fail(f"`{ast.unparse(node)}` is neither a parameter, a local, nor a number", node)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._emit("neg", self._float(operand), node=node)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._float(operand)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._emit("not", self._condition(operand), node=node)
            case ast.BinOp():
                return self._arithmetic(node)
            case ast.BoolOp(op=op, values=values):
                result = self._condition(values[0])
                for value in values[1:]:
                    result = self._emit(BOOLEAN[type(op)], result, self._condition(value), node=value)
                return result
            case ast.Compare():
                return self._comparison(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._emit("where", self._condition(test), self._float(body), self._float(orelse), node=node)
            case ast.Call():
                return self._call(node)
        self.fail(f"{type(node).__name__} is not an elementwise expression", node)

    def _arithmetic(self, node: ast.BinOp) -> str:
        """``a + b - c ...``, from the left: a long sum is a chain of left operands, which does not count as nesting."""
        chain = [node]
        while isinstance(chain[-1].left, ast.BinOp):
            chain.append(chain[-1].left)
        result = self._float(chain[-1].left)
        for part in reversed(chain):
            operation = BINARY.get(type(part.op)) or self.fail(
                f"operator {type(part.op).__name__} is not supported; use + - * /", part
            )
            result = self._emit(operation, result, self._float(part.right), node=part)
        return result

    def _comparison(self, node: ast.Compare) -> str:
        terms = [self._float(term) for term in (node.left, *node.comparators)]
        result = ""
        for op, left, right in zip(node.ops, terms, terms[1:], strict=False):
            operation = COMPARE.get(type(op)) or self.fail(f"comparison {type(op).__name__} is not supported", node)
            part = self._emit(operation, left, right, node=node)
            result = self._emit("and", result, part, node=node) if result else part
        return result

    def _call(self, node: ast.Call) -> str:
        name = ast.unparse(node.func)
        if isinstance(node.func, ast.Name) and name in self.locals:
            self.fail(f"`{name}` is a local here, not a function", node)
        target = self._resolve(node.func)
        helper = next((h for h in self.helpers if h.function is target), None)
        if helper is None:
            names = ", ".join(h.op for h in self.helpers)
            self.fail(f"`{name}` is not one of onepass's helper functions ({names})", node)
        if node.keywords:
            self.fail("helper functions take positional arguments only", node)
        if len(node.args) != helper.arity:
            self.fail(f"`{name}` takes {helper.arity} arguments, got {len(node.args)}", node)
        if helper.op == "where":
            first, *rest = node.args
            return self._emit("where", self._condition(first), *[self._float(a) for a in rest], node=node)
        values = [self._float(a) for a in node.args]
        if helper.op == "silu":
            return self._emit("mul", values[0], self._emit("sigmoid", values[0], node=node), node=node)
        return self._emit(helper.op, *values, node=node)


def _names(target: ast.expr) -> list[str]:
    """The names of a target ``a`` or ``a, b``; empty for anything else."""
    items = target.elts if isinstance(target, ast.Tuple) else [target]
    names = [item.id for item in items if isinstance(item, ast.Name)]
    return names if len(names) == len(items) else []


def _assigned(statement: ast.stmt) -> Iterator[str]:
    """Every name that a statement binds."""
    return (n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _shown(number: float) -> str:
    """A number as a message shows it; Python cannot print very long ones."""
    try:
        text = repr(number)
    except ValueError:
        return "an integer of thousands of digits"
    return text if len(text) <= 40 else f"{text[:12]}... ({len(text)} digits)"
