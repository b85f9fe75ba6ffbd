"""Experts, and the routers that choose them, with bits that do not depend on other tokens. On a CPU alone.

Torch's products sum in an order that depends on the number of rows, and its sigmoids round differently at the end of a
tensor. So experts call `linear`, and a router takes one token at a time, with `linear` for its product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...formats import Rounding
from ...ops.linear.launch import Activation
from ...ops.linear.op import linear as multiply
from .norm import refuse_gradient


class ExpertsRecord(NamedTuple):
    """Experts whose weights are stored together: gate and up [E, 2 * I, K], down [E, K, I]."""

    activation: Activation
    rounding: Rounding


class RouterRecord(NamedTuple):
    """A router, whose forward takes tokens [M, K] and returns tensors of M rows."""


class ExpertsModule(nn.Module):
    """What is read of patched experts."""

    gate_up_proj: Tensor
    down_proj: Tensor
    num_experts: int
    _onepass: ExpertsRecord


class _Products(TorchFunctionMode):
    """`torch.nn.functional.linear` is onepass's."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        return _product(*args, **(kwargs or {}))


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return multiply(input.contiguous(), weight, bias=bias)


def experts_forward(self: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The sum of each token's experts times their weights, in the order of the experts."""
    if not hidden_states.is_cpu:
        return cast(Tensor, type(self).forward(self, hidden_states, top_k_index, top_k_weights))
    refuse_gradient(self, hidden_states, self.gate_up_proj, self.down_proj)
    activation, rounding = self._onepass
    total = torch.zeros_like(hidden_states)
    for expert in top_k_index.unique().tolist():
        if expert == self.num_experts:  # stands for no expert
            continue
        token, place = torch.where(top_k_index == expert)
        a = multiply(hidden_states[token], self.gate_up_proj[expert], activation=activation, rounding=rounding)
        y = multiply(a, self.down_proj[expert]) * top_k_weights[token, place, None]
        total.index_add_(0, token, y.to(total.dtype))
    return total


def router_forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The router's own forward, token by token."""
    own = type(self).forward
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    if not rows.is_cpu or not len(rows):
        return cast("tuple[Tensor, ...]", own(self, hidden_states, *args, **kwargs))
    refuse_gradient(self, rows, *self._parameters.values())
    with _Products():
        tokens = [own(self, row, *args, **kwargs) for row in rows.split(1)]
    return tuple(map(torch.cat, zip(*tokens, strict=True)))
