"""What a module's forward does, as a fingerprint that does not depend on names of models.

Two forwards have the same fingerprint if their code is the same, and that of everything they reach:
methods of their class, properties, ``super()``, functions and constants of their module, closures.
Annotations, docstrings, comments, layout and decorators do not count, nor do the names of the
functions and methods that are reached. Modules, classes and torch's functions count by name.

A forward that is wrapped by other code has no fingerprint, unless transformers wraps it to rename
arguments or for gradient checkpointing.

Fingerprints are the same on every Python from 3.11 on.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn

_IGNORED: Final = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}
_RENAMING: Final = "transformers.utils.deprecation"
"""A module whose decorators only rename deprecated arguments."""
_CHECKPOINTING: Final = {"self.gradient_checkpointing", "self.training"}
_seen: Final[WeakKeyDictionary[FunctionType, tuple[CodeType, tuple[str | _Reference, ...]]]] = WeakKeyDictionary()
"""What was parsed before. Not by code object, because those of different source may be equal."""


class NotComparable(Exception):
    """Some code that a forward reaches cannot be read. The message is the reason, as in a report."""


@dataclass(frozen=True)
class Code:
    """What a class's forward does.

    ``module`` is the Python module whose names the forward uses, "" if it cannot be imported.
    ``methods`` are the methods and properties of its class that it uses.
    """

    fingerprint: str
    module: str
    methods: frozenset[str]


@dataclass(frozen=True)
class _Reference:
    """A name that has to be looked up: of the first parameter ("self"), "super" or a "global"."""

    kind: str
    name: str


def code_of(cls: type[nn.Module], called: frozenset[str] = frozenset()) -> Code:
    """The code of a class's forward. Raises `NotComparable` if it cannot be read.

    ``called`` are names that count by name only. The caller runs the module's own functions and
    methods of these names, so what they do may differ.
    """
    reader = _Reader(cls, called)
    digest = _digest(reader.read(cls.forward, method=True))
    names = _function(cls.forward).__globals__
    module = str(names.get("__name__"))
    importable = vars(sys.modules.get(module, object)) is names
    return Code(digest, module if importable else "", frozenset(reader.methods))


def fingerprint_of(function: object) -> str:
    """The fingerprint of a function, without that of a class. Raises `NotComparable` if it cannot be read."""
    return _digest(_Reader(nn.Module, frozenset()).read(_called_by(function)))


def _digest(parts: Iterator[str]) -> str:
    try:
        return hashlib.sha256("".join(parts).encode()).hexdigest()[:12]
    except RecursionError:
        raise NotComparable("it is nested too deeply") from None


class _Reader:
    """Writes a function and all that it reaches, each once. Functions and methods are numbered."""

    def __init__(self, cls: type[nn.Module], called: frozenset[str]) -> None:
        self.cls = cls
        self.called = called
        self.methods: set[str] = set()
        self.numbers: dict[int, int] = {}

    def read(self, value: object, method: bool = False) -> Iterator[str]:
        """A function's code, or only its number if it was written before."""
        function = _function(value)
        seen = id(function) in self.numbers
        yield f"@{self.numbers.setdefault(id(function), len(self.numbers))}"
        if not seen:
            for part in _parsed(function):
                yield from (part,) if isinstance(part, str) else self.resolve(part, function, method)

    def resolve(self, reference: _Reference, function: FunctionType, method: bool) -> Iterator[str]:
        """What a name stands for."""
        name = reference.name
        if name in self.called:
            yield name
        elif reference.kind == "global":
            yield from self.value(name, _looked_up(name, function), function)
        elif not method:  # the first parameter of a function that is not a method
            yield f".{name}"
        else:
            yield from self.attribute(reference, function)

    def attribute(self, reference: _Reference, function: FunctionType) -> Iterator[str]:
        """What ``self.name`` or ``super().name`` stands for. Attributes of instances count by name."""
        name = reference.name
        classes = self.cls.__mro__
        if reference.kind == "super":
            defined_in = _looked_up("__class__", function)  # a subclass may only wrap what it inherits
            if defined_in not in classes:
                raise NotComparable(f"{function.__name__} belongs to another class")
            classes = classes[classes.index(defined_in) + 1 :]
        definer = next((cls for cls in classes if name in vars(cls)), None)
        if definer is None or definer is nn.Module or definer is object:
            yield f"{reference.kind}.{name}"
            return
        value = vars(definer)[name]
        if isinstance(value, staticmethod | classmethod):
            yield f"{type(value).__name__} "
            value = value.__func__
        if isinstance(value, property):
            yield "property "
            value = value.fget
        if callable(value):
            self.methods.add(name)
            yield from self.read(value, method=True)
        else:
            yield _constant(name, value, definer.__module__)

    def value(self, name: str, value: object, function: FunctionType) -> Iterator[str]:
        """What a global name stands for."""
        value = _called_by(value)
        module = str(getattr(value, "__module__", ""))
        torchs = module.partition(".")[0] == "torch"
        if isinstance(value, ModuleType):
            yield f"module {value.__name__}"
        elif isinstance(value, FunctionType) and not torchs:
            yield from self.read(value)
        elif isinstance(value, FunctionType | BuiltinFunctionType | type):
            yield f"{module}.{value.__qualname__}"
        else:
            yield _constant(name, value, function.__module__)


def _constant(name: str, value: object, module: str) -> str:
    """A constant by its value, any other object by its name and the module that uses it."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return f"{module}.{name}"


def _looked_up(name: str, function: FunctionType) -> object:
    if name in function.__code__.co_freevars:
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
        try:
            return cell.cell_contents
        except ValueError:
            raise NotComparable(f"{name} has no value yet") from None
    if name in function.__globals__:
        return function.__globals__[name]
    return getattr(builtins, name, None)


def _called_by(value: object) -> object:
    """The function that a module of Hugging Face's ``kernels`` calls, whose decorators make modules of functions."""
    wraps = type(value).__qualname__.endswith("_create_func_module.<locals>.Func")
    if wraps and isinstance(value, nn.Module) and "forward" not in vars(value):
        return _looked_up("func", type(value).forward)  # type: ignore[arg-type]
    return value


def _function(value: object) -> FunctionType:
    """The function itself, without transformers' decorators that change nothing here."""
    while isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        module = str(value.__globals__.get("__name__"))
        own = module.startswith("transformers.") and vars(sys.modules.get(module, object)) is value.__globals__
        if not own or not (module == _RENAMING or _only_checkpoints(value)):
            raise NotComparable(f"{value.__name__} is wrapped by code of {module}")
        value = value.__wrapped__
    if not isinstance(value, FunctionType):
        raise NotComparable(f"{getattr(value, '__name__', value)} is a {type(value).__name__}, not a function")
    return value


def _only_checkpoints(wrapper: FunctionType) -> bool:
    """Whether a wrapper only passes its arguments on, unless the module is trained with gradient checkpointing::

        def wrapper(self, *args, **kwargs):
            name = ...  # any number of these, without calls but of type()
            if self.gradient_checkpointing and self.training and ...:
                ...
            return forward(self, *args, **kwargs)

    `layer_forward` leaves such training to the class's own forward.
    """
    definition = _definition(wrapper.__code__)
    *before, last = definition.body
    match last:
        case ast.Return(value=ast.Call(func=ast.Name(id=name))):
            inner = _looked_up(name, wrapper) is wrapper.__wrapped__  # type: ignore[attr-defined]
            passes = ast.unparse(last) == f"return {name}({ast.unparse(definition.args)})"
        case _:
            return False
    plain = ast.unparse(definition.args) == "self, *args, **kwargs"
    return inner and passes and plain and all(_does_nothing(part, {"self", "args", "kwargs", name}) for part in before)


def _does_nothing(statement: ast.stmt, fixed: set[str]) -> bool:
    """Whether a statement has no effect outside of training with gradient checkpointing, but on names that are not fixed."""
    match statement:
        case ast.If(test=ast.BoolOp(op=ast.And(), values=values), orelse=[]):
            return set(map(ast.unparse, values[:2])) == _CHECKPOINTING
        case ast.Assign(targets=[ast.Name(id=target)], value=value):
            parts = [part for part in ast.walk(value) if isinstance(part, ast.Call | ast.NamedExpr | ast.Await)]
            calls = all(isinstance(part, ast.Call) and ast.unparse(part.func) == "type" for part in parts)
            return target not in fixed and calls
    return False


def _parsed(function: FunctionType) -> tuple[str | _Reference, ...]:
    """A function's code as text, with the names that have to be looked up."""
    code, parts = _seen.get(function, (None, ()))
    if code is not function.__code__:
        parts = tuple(_parse(function.__code__))
        _seen[function] = function.__code__, parts
    return parts


def _parse(code: CodeType) -> Iterator[str | _Reference]:
    definition = _definition(code)
    definition.name, definition.decorator_list = "", []  # what decorators made is what was looked up
    parameters = [*definition.args.posonlyargs, *definition.args.args]
    return _Writer(_locals(code), parameters[0].arg if parameters else "").write(definition)


def _definition(code: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The syntax tree of a function."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError, ValueError, tokenize.TokenError):
        raise NotComparable(f"the source of {code.co_name} is not available") from None
    definition = tree.body[0] if tree.body else None
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef) or definition.name != code.co_name:
        raise NotComparable(f"the source of {code.co_name} is not a function definition")
    return definition


def _locals(code: CodeType) -> frozenset[str]:
    nested = (_locals(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset({*code.co_varnames, *code.co_cellvars}).union(*nested)


class _Writer:
    """Writes a syntax tree as text. `ast.dump` and `ast.unparse` depend on Python's version."""

    def __init__(self, names: frozenset[str], this: str) -> None:
        self.locals = names
        self.this = this

    def write(self, node: ast.AST) -> Iterator[str | _Reference]:
        match node:
            case ast.Constant():
                yield repr(node.value)
            case ast.Name() if node.id not in self.locals:
                yield _Reference("global", node.id)
            case ast.Attribute(value=ast.Name(id=this)) if this == self.this:
                yield from (f"{this}.", _Reference("self", node.attr))
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[])):
                yield _Reference("super", node.attr)
            case ast.AnnAssign(value=ast.expr() as value):
                yield from self.write(ast.Assign(targets=[node.target], value=value))
            case _:
                yield from self.fields(node)

    def fields(self, node: ast.AST) -> Iterator[str | _Reference]:
        yield f"{type(node).__name__}("
        for name, value in ast.iter_fields(node):
            if name in _IGNORED or value is None or value == []:
                continue
            yield f"{name}="
            if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
            if isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty strings
                value = [part for part in value if not (isinstance(part, ast.Constant) and part.value == "")]
            yield from self.items(value)
        yield ")"

    def items(self, value: Any) -> Iterator[str | _Reference]:
        if isinstance(value, list):
            yield "["
            for item in value:
                if isinstance(item, ast.AnnAssign) and item.value is None:
                    continue
                yield from self.items(item)
                yield ","
            yield "]"
        elif isinstance(value, ast.AST):
            yield from self.write(value)
        else:
            yield repr(value)
