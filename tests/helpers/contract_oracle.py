"""An independent reading of a `Contract`, to test the code that `onepass.core.check` generates.

`faults` examines every argument and continues after a fault, where validation stops at the first. It shares no code with
validation or with `onepass.core.memory`: shapes are matched symbol by symbol, memory is compared address by address.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from onepass.core.contract import Arg, Contract, Option, Out

_TYPES: dict[str, tuple[type, ...]] = {
    "float": (numbers.Real,),
    "int": (int,),
    "bool": (bool,),
    "str": (str,),
    "ScalarType": (torch.dtype,),
}
_UNKNOWN = object()
"""The value of an expression over a faulty argument."""


def faults(contract: Contract, arguments: Mapping[str, Any], *, grad: bool = True) -> list[str]:
    """The arguments that violate the contract, in its order; empty for a legal call.

    ``arguments`` has every name of the contract, outputs by their argument names. ``grad``: whether gradients are recorded.
    """
    reading = _Reading(contract, arguments, grad)
    reading.read()
    return list(dict.fromkeys(reading.found))


def option_is_legal(option: Option, name: str, value: object) -> bool:
    """Whether an option's declaration permits a value."""
    if value is None:
        return option.optional
    if not isinstance(value, _TYPES[option.type]):
        return False
    if isinstance(value, bool) and option.type != "bool":
        return False
    if option.type == "float":
        try:
            value = float(value)  # type: ignore[arg-type]
        except OverflowError:
            return False
    if option.choices and value not in option.choices:
        return False
    return not option.where or bool(eval(_code(option.where), {"inf": math.inf, name: value}))


@cache
def _code(expression: str) -> CodeType:
    return compile(expression, "<contract>", "eval")


class _Reading:
    """One call, the symbols that its shapes bind, and the faults found so far."""

    def __init__(self, contract: Contract, arguments: Mapping[str, Any], grad: bool) -> None:
        self.contract = contract
        self.grad = grad
        self.names: dict[str, Any] = {"torch": torch, "inf": math.inf, **contract.scope, **arguments}
        self.values = arguments
        self.device: torch.device | None = None
        self.found: list[str] = []
        self.written: list[tuple[str, Tensor]] = []
        self.only_read: list[tuple[str, Tensor]] = []

    def read(self) -> None:
        contract = self.contract
        for name, option in contract.options.items():
            if not option_is_legal(option, name, self.values[name]):
                self.found.append(name)
        for name, arg in contract.args.items():
            self._argument(name, arg)
        for symbol, expression in contract.sizes.items():
            self._bind(symbol, self._evaluate(expression))
        for rule in contract.rules:
            if not self._evaluate(f"bool({rule.condition})"):
                self.found.append(rule.argument)
        for out in contract.outs.values():
            self._output(out)
        if not self.found:
            self.found += self._sharing()

    def _evaluate(self, expression: str) -> Any:
        """The value of an expression; after a fault it may be undefined."""
        try:
            return eval(_code(expression), self.names)
        except Exception:
            if not self.found:
                raise
            return _UNKNOWN

    def _bind(self, symbol: str, value: Any) -> None:
        if value is not _UNKNOWN:
            self.names[symbol] = value

    def _argument(self, name: str, arg: Arg) -> None:
        value = self.values[name]
        if arg.many:
            self._list(name, arg, value)
            return
        if value is None and arg.optional:
            for symbol in arg.dims.split():
                if symbol.isidentifier():
                    self.names.setdefault(symbol, None)
            return
        if not self._is_legal(value, arg.dims, self._dtypes(arg.dtypes), arg.layout):
            self.found.append(name)
        elif arg.mutable:
            self.written.append((name, value))
        else:
            self.only_read.append((name, value))

    def _list(self, name: str, arg: Arg, value: object) -> None:
        if not isinstance(value, (list, tuple)):
            self.found.append(name)
            return
        for item in value:
            shapes = arg.dims.split("|")
            if any(self._is_legal(item, dims, self._dtypes(arg.dtypes), arg.layout, bind=False) for dims in shapes):
                self.only_read.append((name, item))
            else:
                self.found.append(name)

    def _output(self, out: Out) -> None:
        value = self.values[out.argument]
        when = self._evaluate(f"bool({out.when})")
        dtypes: Any = self._dtypes(f"({out.dtype},)") if when is True else _UNKNOWN
        if value is None:
            if dtypes is not _UNKNOWN:
                self.names[out.argument] = torch.empty(0, dtype=dtypes[0])  # other dtypes may follow it
            return
        if when is not _UNKNOWN and not when:
            self.found.append(out.argument)
            return
        layout = "any" if out.make else "rows"
        if self._is_legal(value, out.dims, dtypes, layout):
            self.written.append((out.argument, value))
        else:
            self.found.append(out.argument)

    def _dtypes(self, dtypes: tuple[torch.dtype, ...] | str) -> Any:
        found = self._evaluate(dtypes) if isinstance(dtypes, str) else dtypes
        known = found is not _UNKNOWN and all(isinstance(dtype, torch.dtype) for dtype in found)
        return found if known else _UNKNOWN

    def _is_legal(self, value: object, dims: str, dtypes: Any, layout: str, bind: bool = True) -> bool:
        if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided:
            return False
        # also binds sizes, whatever else is wrong
        fits = any(self._fits(value.shape, shape.split(), bind) for shape in dims.split("|"))
        if dtypes is not _UNKNOWN and value.dtype not in dtypes:
            return False
        if self.device is None:
            self.device = value.device
        elif value.device != self.device:
            return False
        if value.requires_grad and self.grad:
            return False
        if not fits:
            return False
        steps = value.stride()
        if layout == "dense":
            return value.is_contiguous()
        contiguous = layout != "rows" or steps[-1] == 1 or value.shape[-1] == 1
        return contiguous and not value.is_neg()

    def _fits(self, shape: Sequence[int], tokens: list[str], bind: bool) -> bool:
        """Match a shape with symbols, binding those that are new."""
        if not tokens:
            return math.prod(shape) == 1
        if tokens[0].startswith("*"):  # a whole shape, which is known unless something else is wrong
            known = self.names.get(tokens[0][1:])
            return known is None or tuple(shape) == tuple(known)
        if "..." in tokens:
            fixed, first = len(tokens) - 1, tokens.index("...")
            if len(shape) < fixed:
                return False
            cut = len(shape) - fixed + first
            parts: list[tuple[str, Any]] = [*zip(tokens[:first], shape[:first], strict=True)]
            parts += [("lead", tuple(shape[first:cut])), *zip(tokens[first + 1 :], shape[cut:], strict=True)]
        elif len(shape) != len(tokens):
            return False
        else:
            parts = list(zip(tokens, shape, strict=True))
        for symbol, size in parts:
            whole, _, by = symbol.partition("/")
            known = int(symbol) if symbol.isdigit() else self.names.get(whole)
            if by and known is not None:
                known = divmod(known, int(by))
                size = (size, 0)
            if known is not None and known != size:
                return False
        if bind:
            self.names.update({symbol: size for symbol, size in parts if not symbol.isdigit()})
        return True

    def _sharing(self) -> Iterator[str]:
        """Outputs whose elements overlap each other or another tensor."""
        replaces = self.contract.replaces
        for index, (name, out) in enumerate(self.written):
            if out.is_meta:
                continue
            mine = addresses(out)
            if mine.unique().numel() != mine.numel():
                yield name
            for other_name, other in self.only_read:
                may_be = replaces is None or other_name in replaces.get(name, ())
                if _meet(mine, other) and not (may_be and _facts(out) == _facts(other)):
                    yield name
            for other_name, other in self.written[:index]:
                if _meet(mine, other):
                    yield from (name, other_name)


def _meet(mine: Tensor, other: Tensor) -> bool:
    """Whether a tensor uses one of these addresses."""
    memory = other.untyped_storage()
    begin = memory.data_ptr()
    near = mine[(mine >= begin) & (mine < begin + memory.nbytes())]
    return bool(near.numel()) and bool(torch.isin(near, addresses(other)).any())


def _facts(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def addresses(tensor: Tensor) -> Tensor:
    """The address of every byte of a tensor, once per element that it belongs to."""
    at = torch.tensor(tensor.data_ptr())
    size = tensor.element_size()
    for count, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = at.unsqueeze(-1) + torch.arange(count) * stride * size
    return (at.unsqueeze(-1) + torch.arange(size)).flatten()
