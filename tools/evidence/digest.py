"""A digest of all that a kernel is compiled from: its source and that of everything it calls, without a compiler.

Triton's own key contains line numbers, so it changes when code above moves. This one is made from syntax trees: comments,
docstrings, layout, line numbers and the names of modules do not count.
"""

import ast
import hashlib
import inspect
from types import ModuleType
from typing import Any, Final

import triton.language as tl
from triton.runtime.jit import JITCallable

from onepass.gpu.compile import Build

_UNREAD: Final = ("ctx", "kind", "type_comment")
"""Fields of syntax trees that do not matter."""
_PLAIN: Final = (int, float, str, bytes, bool, type(None), tl.dtype)


class SourceDigests:
    """Digests of kernel sources. Each instance reads a function once, so a new instance sees changes."""

    def __init__(self) -> None:
        self._trees: dict[int, tuple[str, list[Any]]] = {}
        self._digests: dict[int, str] = {}
        self._texts: dict[int, str] = {}
        self._alive: list[Any] = []  # keeps ids unique

    def of(self, kernel: Any) -> str:
        """The digest of a jitted function and all it calls."""
        found = self._digests.get(id(kernel))
        if found is None:
            reached: dict[int, str] = {}
            self._reach(kernel, reached)
            found = self._digests[id(kernel)] = _hash("\n".join(sorted(reached.values())))
        return found

    def value(self, value: Any) -> str:
        """A constant as text; functions by their digest."""
        if isinstance(value, tl.constexpr):
            return f"constexpr({self.value(value.value)})"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self.value, value))})"
        if isinstance(value, _PLAIN):
            return repr(value)
        if _is_function(value):
            return f"function {self.of(value)}"
        raise TypeError(
            f"a kernel's source digest has no rule for a constant of type {type(value).__name__}: {value!r}"
        )

    def _reach(self, function: Any, reached: dict[int, str]) -> None:
        if id(function) in reached:
            return
        text, called = self._read(function)
        reached[id(function)] = text
        for other in called:
            self._reach(other, reached)

    def _read(self, function: Any) -> tuple[str, list[Any]]:
        """A function's own text (syntax tree, decorator, constants), and the functions it names."""
        found = self._trees.get(id(function))
        if found is not None:
            return found
        plain = function.fn if isinstance(function, JITCallable) else function
        tree = _tree(function)
        scope = {**plain.__globals__, **inspect.getclosurevars(plain).nonlocals}
        parts = [type(function).__name__, repr(getattr(function, "noinline", None))]
        called: list[Any] = []
        for name, value in sorted(_named(tree, scope).items()):
            if _is_function(value):
                called.append(value)
                parts.append(f"{name}: {_hash(self._text(value))}")
            elif not _is_part_of_triton(value):
                parts.append(f"{name} = {self.value(value)}")
        parts.append(self._text(function))
        self._alive.append(function)
        self._trees[id(function)] = " ".join(parts), called
        return self._trees[id(function)]

    def _text(self, function: Any) -> str:
        """A function's syntax tree as text, without docstrings."""
        text = self._texts.get(id(function))
        if text is None:
            tree = _tree(function)
            _drop_docstrings(tree)
            text = self._texts[id(function)] = _dumped(tree)
            self._alive.append(function)
        return text


def _tree(function: Any) -> ast.Module:
    """The syntax tree of a function, jitted or plain."""
    source = function.src if isinstance(function, JITCallable) else inspect.getsource(function)
    return ast.parse(inspect.cleandoc("\n" + source))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _is_part_of_triton(value: Any) -> bool:
    """Whether this belongs to Triton, which its version covers."""
    if isinstance(value, ModuleType):
        return value.__name__.split(".")[0] == "triton"
    return str(getattr(value, "__module__", "")).split(".")[0] in ("triton", "builtins") and not isinstance(
        value, (tl.constexpr, *_PLAIN)
    )


def _is_function(value: Any) -> bool:
    """A function of ours, jitted or plain."""
    return (isinstance(value, JITCallable) or inspect.isfunction(value)) and not _is_part_of_triton(value)


def _named(tree: ast.AST, scope: dict[str, Any]) -> dict[str, Any]:
    """The objects of ``scope`` that a function names, also as attributes of modules other than Triton's."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope and not isinstance(scope[node.id], ModuleType):
            found[node.id] = scope[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = scope.get(node.value.id)
            if isinstance(module, ModuleType) and not _is_part_of_triton(module):
                found[f"{node.value.id}.{node.attr}"] = getattr(module, node.attr)
    return found


def _drop_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]


def _dumped(node: Any) -> str:
    """A syntax tree as text, equal in all Python versions: `ast.dump` differs between 3.12 and 3.13."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _UNREAD)
        body = ", ".join(f"{name}={_dumped(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({body})"
    if isinstance(node, list):
        return f"[{', '.join(map(_dumped, node))}]"
    return repr(node)


def source_digest(build: Build, setting: str, digests: SourceDigests) -> str:
    """The digest of all that a build is compiled from; ``setting`` names the compiler, the chip and the options."""
    constants = " ".join(f"{name}={digests.value(value)}" for name, value in build.constants)
    whole = (setting, digests.of(build.kernel), repr(build.signature), constants, repr(build.divisible))
    return _hash("\n".join(whole))
