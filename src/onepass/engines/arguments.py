"""Make errors of functions with another library's interface name that function and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch import SymInt, Tensor, dtype

from ..core.contract import describe
from ..errors import ContractError, Unsupported, renamed

P = ParamSpec("P")
R = TypeVar("R")


def names_of_op(**arguments: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for a function that calls an op. ``arguments``: what the op's arguments are called here.

    An error of the op is raised again as one of the function: ``rms_norm: `gamma` must ...`` becomes
    ``rmsnorm: `weight` must ...``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = function.__name__

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except (ContractError, Unsupported) as error:
                raise renamed(error, own, arguments) from None

        return call

    return decorate


def require_tensors(function: str, **arguments: object) -> None:
    """Raise if one of the arguments is not a tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise ContractError(f"{function}: `{name}` must be a tensor, got {describe(value)}")


def require_counts(function: str, **arguments: object) -> None:
    """Raise if one of the arguments is not an int of at least 1."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, (int, SymInt)) or value < 1:
            raise ContractError(f"{function}: `{name}` must be an int of at least 1, got {describe(value)}")


def require_codes(function: str, dtypes: Iterable[dtype], **argument: object) -> None:
    """Raise if the argument, which receives fp8 codes, is not a tensor of one of these dtypes."""
    ((name, value),) = argument.items()
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise Unsupported(f"{function}: `{name}` must be an fp8 tensor ({', '.join(map(str, dtypes))}), got {kind}")


def one_element(function: str, **argument: object) -> Tensor:
    """The argument as a tensor without dimensions; raise if it is not a tensor of one element."""
    ((name, value),) = argument.items()
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ContractError(f"{function}: `{name}` must be a tensor of one element, got {describe(value)}")
    return value.reshape(())
