"""Small mistakes in a Python source: each changes one node of its syntax tree and names the bytes it replaces.

Not mutated: docstrings and the documentation in contracts, type annotations and aliases, imports, ``__all__``, overloads
and error texts. Generated code is mutated too: conditions in contracts, which are strings, are parsed and changed like
other expressions; in lines that a generator writes, words are swapped.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final


def _swaps(text: str) -> dict[Any, Any]:
    """``"Lt LtE"`` and so on: each class of `ast` and what replaces it."""
    return {getattr(ast, a): getattr(ast, b) for a, b in (pair.split() for pair in text.split(", "))}


_COMPARE: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = _swaps(
    "Lt LtE, LtE Lt, Gt GtE, GtE Gt, Eq NotEq, NotEq Eq, Is IsNot, IsNot Is, In NotIn, NotIn In"
)
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = _swaps(
    "Add Sub, Sub Add, Mult FloorDiv, FloorDiv Mult, Div Mult, Mod FloorDiv, Pow Mult, LShift RShift, RShift LShift, "
    "BitAnd BitOr, BitOr BitAnd"
)
_OPTIONS: Final = {
    "once": "hf", "hf": "once", "float": "ue8m0", "ue8m0": "float", "row": "column", "column": "row",
    "group": "static", "static": "group", "rows": "any", "any": "rows", "dense": "rows", "cpu": "cuda", "cuda": "cpu",
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "shl": "and", "and": "shl",
    "fptrunc": "fpext", "fpext": "fptrunc", "True": "False", "False": "True",
}  # fmt: skip
"""Options and instructions, each with a plausible replacement; any other word gets an extra letter."""
_WORDS: Final = (
    (" != ", " == "), (" == ", " != "), (" < ", " <= "), (" <= ", " < "), (" >= ", " > "), (" > ", " >= "),
    (" and ", " or "), (" or ", " and "), (" is not None", " is None"), (" is None", " is not None"),
    ("if not ", "if "), ("and not ", "and "), (" not in ", " in "), (" - ", " + "), (" + ", " - "), ("icmp eq", "icmp ne"),
    (" add ", " sub "), (" sub ", " add "), ("[-1]", "[0]"), ("(-1)", "(0)"), ("(0)", "(-1)"), ("[0]", "[1]"), ("[1]", "[0]"),
)  # fmt: skip
"""Words in generated code, and their mistaken replacements."""
_DOCUMENTED: Final = {"Arg": 1, "Option": 2, "Out": 2, "Rule": 2}
"""Which positional argument of a part of a contract is documentation."""


@dataclass(frozen=True)
class Mutant:
    """Bytes ``start`` to ``end`` of a file replaced; ``line`` to ``last`` are those of the code that was there.

    ``within`` is the text of the first of these lines and ``column`` where in it the code begins.
    """

    file: str
    line: int
    last: int
    within: str
    column: int
    start: int
    end: int
    operator: str
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        """The changed source."""
        return source[: self.start] + self.after.encode() + source[self.end :]

    def valid(self, source: bytes) -> bool:
        """Whether the changed source compiles, and to something else."""
        try:
            return ast.dump(ast.parse(self.apply(source))) != ast.dump(ast.parse(source))
        except SyntaxError:
            return False

    @property
    def key(self) -> str:
        """Its key in the explained list; no line number, since edits above would change it."""
        return f"{self.file}: {self.within} @{self.column}: {self.after}"

    def __str__(self) -> str:
        """For the log."""
        before, after = (" ".join(code.split()) for code in (self.before, self.after))
        return f"{self.file}:{self.line}: {self.within}: {before} => {after}"


class _Walker(ast.NodeVisitor):
    """Yields the mutants of one file in the order of its code."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.anchor: ast.AST | None = None  # the f-string we are in: nodes in it have no positions
        self.names: list[set[str]] = []

    # --- what is left alone ---

    def visit_Import(self, node: ast.Import) -> None:
        """Skip imports."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Skip imports."""

    def visit_Assign(self, node: ast.Assign) -> None:
        """``__all__`` and type aliases stay; a name that was bound before may keep its old value."""
        target = node.targets[0]
        if isinstance(target, ast.Name) and (
            target.id == "__all__" or (target.id[0].isupper() and _is_type(node.value))
        ):
            return
        known = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        if self.names and (not isinstance(target, ast.Name) or known & self.names[-1]):
            self.delete(node)
        if self.names:
            self.names[-1] |= known
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Only the value."""
        if self.names and isinstance(node.target, ast.Name):
            self.names[-1].add(node.target.id)
        if node.value is not None:
            self.child(node, "value", node.value)

    def visit_arguments(self, node: ast.arguments) -> None:
        """Defaults, not annotations."""
        for field in ("defaults", "kw_defaults"):
            for index, value in enumerate(getattr(node, field)):
                if value is not None:
                    self.child(getattr(node, field), index, value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """The body and the defaults."""
        if any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list):
            return
        self.visit(node.args)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.names.append({a.arg for a in arguments})
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Fields' defaults and methods."""
        self.names.append(set())
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def visit_Raise(self, node: ast.Raise) -> None:
        """Whether it is raised, not its text."""
        self.delete(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Docstrings stay."""
        if isinstance(node.value, ast.Constant):
            return
        if not isinstance(node.value, ast.Yield):
            self.delete(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Its arguments, but for documentation, types and texts of errors."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        self.visit(node.func)
        for index, value in enumerate(node.args):
            said = name in ("fail", "refuse_gradient", "ContractError", "Unsupported") and _is_text(value)
            if (
                not said
                and index != _DOCUMENTED.get(name, -1)
                and not (name in ("cast", "isinstance") and _is_type(value))
            ):
                self.child(node.args, index, value)
        for keyword in node.keywords:
            if not (keyword.arg == "doc" or (name == "Contract" and keyword.arg == "rounding")):
                self.child(keyword, "value", keyword.value)

    # --- what is changed ---

    def generic_visit(self, node: ast.AST) -> None:
        """Every child, with its variants."""
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, ast.AST):
                        self.child(value, index, item)
            elif isinstance(value, ast.AST):
                self.child(node, field, value)

    def child(self, owner: Any, place: Any, node: ast.AST) -> None:
        """Record the variants of ``node``, ``owner``'s field or item ``place``, and visit its children."""
        outer = self.anchor
        if isinstance(node, ast.JoinedStr) and outer is None:
            self.anchor = node
        for operator, changed in _variants(node):
            self.replace(operator, owner, place, node, changed)
        self.visit(node)
        self.anchor = outer

    def replace(self, operator: str, owner: Any, place: Any, node: ast.AST, changed: ast.AST) -> None:
        """Record ``changed`` in place of ``node``: by itself, or as the f-string that contains it."""
        if self.anchor is None or self.anchor is node:
            self.note(operator, node, changed)
            return
        _put(owner, place, changed)
        self.note(operator, self.anchor, self.anchor)
        _put(owner, place, node)

    def force(self, owner: Any, place: Any, test: ast.expr, values: tuple[bool, ...] = (True, False)) -> None:
        """A condition that is always true, always false, or inverted."""
        for value in values:
            self.replace("condition forced", owner, place, test, ast.Constant(value))
        self.replace("condition negated", owner, place, test, ast.UnaryOp(ast.Not(), test))

    def visit_If(self, node: ast.If) -> None:
        """Its condition and children."""
        self.force(node, "test", node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Its condition and children."""
        self.force(node, "test", node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        """Its condition and children."""
        self.force(node, "test", node.test, (False,))
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """Its conditions and children."""
        for index, test in enumerate(node.ifs):
            self.force(node.ifs, index, test)
        self.generic_visit(node)

    def note(self, operator: str, old: Any, new: ast.AST) -> None:
        """Record a mutant."""
        try:
            text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(new)))
        except ValueError:  # an f-string with quotes that cannot be written down
            return
        if isinstance(new, ast.expr) and not isinstance(new, (ast.Name, ast.Constant, ast.JoinedStr, ast.Slice)):
            text = f"({text})"
        start = self.starts[old.lineno - 1] + old.col_offset
        end = self.starts[old.end_lineno - 1] + old.end_col_offset
        before = self.source[start:end].decode()
        line = self.source[self.starts[old.lineno - 1] : self.starts[old.lineno]].decode()
        column = old.col_offset - (len(line) - len(line.lstrip()))
        self.found.append(
            Mutant(self.file, old.lineno, old.end_lineno, line.strip(), column, start, end, operator, before, text)
        )

    def delete(self, node: ast.stmt) -> None:
        """A removed statement."""
        self.note("statement deleted", node, ast.Pass())

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Removed, or with the opposite operation."""
        self.delete(node)
        other = _ARITHMETIC.get(type(node.op))
        if other is not None:
            self.note("arithmetic", node, ast.AugAssign(node.target, other(), node.value))
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        """Without its value."""
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.note("return dropped", node, ast.Return(ast.Constant(None)))
        else:
            self.delete(node)
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        """Removed."""
        self.delete(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        """Removed."""
        self.delete(node)

    def run(self) -> list[Mutant]:
        """All mutants, without duplicates."""
        for statement in ast.parse(self.source).body:
            self.visit(statement)
        unique = {(m.start, m.end, m.after): m for m in self.found}
        return list(unique.values())


def _put(owner: Any, place: Any, node: ast.AST) -> None:
    if isinstance(place, int):
        owner[place] = node
    else:
        setattr(owner, place, node)


def _is_type(node: ast.expr) -> bool:
    """Whether an expression reads as a type: ``Callable[..., None]``, ``A | B``, ``Literal["x"]``, ``(int, float)``."""
    if isinstance(node, ast.Subscript):
        return _is_type(node.value)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitOr) and _is_type(node.left) and _is_type(node.right)
    if isinstance(node, ast.Tuple):
        return all(_is_type(item) for item in node.elts)
    if isinstance(node, ast.Constant):
        return node.value is None
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "a")
    return name[:1].isupper() or name in ("bool", "bytes", "dict", "float", "int", "list", "str", "tuple")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The mistakes that can be made at one node."""
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            ops = [*node.ops]
            ops[index] = _COMPARE[type(op)]()
            yield "comparison", ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BinOp) and not _is_type(node):
        other = _ARITHMETIC.get(type(node.op))
        if other is not None:
            yield "arithmetic", ast.BinOp(node.left, other(), node.right)
    elif isinstance(node, ast.BoolOp):
        yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        for index in range(len(node.values)):
            rest = [value for i, value in enumerate(node.values) if i != index]
            yield "condition forced", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.UnaryOp):
        if isinstance(node.op, (ast.Not, ast.USub)):
            yield "negation dropped", node.operand
    elif isinstance(node, ast.Slice):
        if node.lower is not None:
            yield "slice shifted", ast.Slice(_plus(node.lower, 1), node.upper, node.step)
        if node.upper is not None:
            yield "slice shifted", ast.Slice(node.lower, _plus(node.upper, -1), node.step)
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node.value)


def _plus(node: ast.expr, number: int) -> ast.expr:
    return ast.BinOp(node, ast.Add() if number > 0 else ast.Sub(), ast.Constant(abs(number)))


def _other_constants(value: object) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(value, bool):
        yield "constant", ast.Constant(not value)
    elif isinstance(value, int):
        yield "constant", ast.Constant({0: 1, 1: 0}.get(value, value + 1))
    elif isinstance(value, float):
        yield "constant", ast.Constant(value * 2 if value else 1.0)
    elif isinstance(value, str):
        yield from _other_strings(value)


def _other_strings(value: str) -> Iterator[tuple[str, ast.AST]]:
    if value in _OPTIONS:
        yield "option swapped", ast.Constant(_OPTIONS[value])
    elif re.fullmatch(r"\w+", value):
        yield "option swapped", ast.Constant(value + "x")
    elif re.search(r"[A-Za-z]", value) and "fail" not in value and "\n" not in value:
        yield from _other_code(value)
    if "\n" in value:
        for word, other in _WORDS:
            for hit in re.finditer(re.escape(word), value):
                yield "generated code", ast.Constant(value[: hit.start()] + other + value[hit.end() :])


def _other_code(value: str) -> Iterator[tuple[str, ast.AST]]:
    """Strings that parse as expressions are mutated as such, others by swapping words."""
    try:
        expression = ast.parse(value, mode="eval").body
    except SyntaxError:
        for word, other in _WORDS:
            for hit in re.finditer(re.escape(word), value):
                yield "generated code", ast.Constant(value[: hit.start()] + other + value[hit.end() :])
        return
    holder = ast.Expression(expression)
    places: list[tuple[Any, Any, ast.AST]] = [(holder, "body", expression)]
    for node in ast.walk(holder):
        for field, below in ast.iter_fields(node):
            if isinstance(below, list):
                places += [(below, i, item) for i, item in enumerate(below) if isinstance(item, ast.AST)]
            elif isinstance(below, ast.AST) and node is not holder:
                places.append((node, field, below))
    for owner, place, node in places:
        for operator, changed in _variants(node):
            _put(owner, place, changed)
            yield f"{operator}, generated code", ast.Constant(ast.unparse(ast.fix_missing_locations(holder)))
            _put(owner, place, node)


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Every mutant of a source file."""
    return _Walker(file, source).run()
