"""Modules whose ``weight`` holds 8-bit codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

INTEGERS: Final = {1: torch.uint8, 4: torch.int32}
"""By size in bytes: integers, which ``Module.to(dtype)`` does not convert."""


class CodesModule(nn.Module):
    """A module whose codes survive ``to(dtype)``, ``half()`` and the like.

    These convert every floating-point parameter, which includes fp8 codes and scales. Here ``weight`` and
    ``weight_scale`` keep their dtypes and only move, as long as there is a ``weight_scale``. Pickles store them as integers,
    because torch cannot read pickled tensors of 8-bit floats.
    """

    def __getstate__(self) -> dict[str, Any]:
        parameters, dtypes = dict(self._parameters), {}
        for name, parameter in self._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.element_size() == 1:
                dtypes[name] = parameter.dtype
                parameters[name] = nn.Parameter(parameter.view(torch.uint8), requires_grad=False)
        return {**self.__dict__, "_parameters": parameters, "_float8": dtypes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        dtypes = state.pop("_float8", {})
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, dtype in dtypes.items():
            codes = self._parameters[name]
            assert codes is not None
            self._parameters[name] = nn.Parameter(codes.view(dtype), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scale = self._parameters.get("weight_scale")
        kept = () if scale is None else (self._parameters["weight"], scale)

        def moved(tensor: Tensor) -> Tensor:
            if not any(tensor is parameter for parameter in kept):
                return fn(tensor)
            integers = tensor.view(INTEGERS[tensor.element_size()])
            moved_codes = fn(integers)
            if moved_codes.dtype is not integers.dtype:  # Module.type converts integers too
                moved_codes = integers.to(moved_codes.device)
            return moved_codes.view(tensor.dtype)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self
