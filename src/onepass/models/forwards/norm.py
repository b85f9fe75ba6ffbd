"""Norms, and which modules a forward may skip."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, cast, overload

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ...errors import ContractError
from ...formats import Rounding
from ...nn.norm import gamma_of
from ...ops.gemv_norm.launch import MAX_ROWS
from ...ops.rms_norm.launch import GateActivation
from ...ops.rms_norm.op import layer_norm, rms_norm, rms_norm_add_rms_norm

FUSED_ROWS: Final = MAX_ROWS
"""The op's limit; up to this many tokens one launch is faster (docs/performance.md)."""


class NormRecord(NamedTuple):
    """How a norm is computed."""

    eps: float
    weight_offset: float
    rounding: Rounding


class OtherNormRecord(NamedTuple):
    """How a norm of another kind is computed; see `forms.OtherNorm`. ``gate`` is "" if there is none."""

    eps: float
    rounding: Rounding
    centered: bool
    weighted: bool
    gate: Literal["", "after", "before"]
    groups: int
    squeezes: bool
    gate_activation: GateActivation = "silu"
    weight_offset: float = 0.0
    same_dtype: bool = False


class NormModule(nn.Module):
    """What is read of a patched norm."""

    weight: Tensor
    _onepass: NormRecord


class OtherNormModule(nn.Module):
    """What is read of a patched norm of another kind."""

    weight: Tensor
    _onepass: OtherNormRecord


def quiet(module: nn.Module) -> bool:
    """Whether no hook of the module's own would run.

    Backward hooks do not count. Without gradients torch does not run them, and with gradients a patched model raises.
    """
    return not module._forward_hooks and not module._forward_pre_hooks


def no_global_hooks() -> bool:
    """Whether torch has no hooks for all modules."""
    return not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks


def is_own(module: nn.Module, function: object = None) -> bool:
    """Whether a call of the module would run this function, or its class's forward, and nothing else."""
    forward = module.__dict__.get("forward")
    return quiet(module) and (forward is None or (function is not None and getattr(forward, "func", None) is function))


def is_plain(norm: nn.Module) -> bool:
    """Whether a call of the norm would run `norm_forward` and nothing else."""
    return getattr(norm.forward, "func", None) is norm_forward and quiet(norm) and no_global_hooks()


def refuse_gradient(module: nn.Module, *tensors: Tensor | None) -> None:
    """Raise if autograd would record the call: the kernels have no backward."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise ContractError(
            f"{type(module).__name__}: this module was patched by onepass.patch, whose kernels have no backward, and was "
            "called with gradients enabled: call the model under torch.inference_mode() or torch.no_grad(), or restore "
            "its own code with handle.undo()"
        )


def norm_forward(self: NormModule, x: Tensor | None = None, /, **named: Tensor) -> Tensor:
    """``y = norm(x)``. The argument's name differs between families, so any name is accepted."""
    if x is None:
        (x,) = named.values()
    return add_norm(self, x)


def other_norm_forward(self: OtherNormModule, *args: Tensor | None, **named: Tensor | None) -> Tensor:
    """``norm(x)`` or ``norm(x, gate)``. The name of x differs between families, that of the gate does not."""
    record = self._onepass
    gate = named.pop("gate", None)
    x, *rest = (*args, *named.values())
    gate = rest[0] if rest else gate
    token = record.squeezes and x is not None and x.dim() == 3 and x.shape[1] == 1
    if x is None or (gate is not None and (gate.shape != x.shape or (token and record.gate == "after"))):
        return cast(Tensor, type(self).forward(self, x, gate))
    gamma = gamma_of(self.weight) if record.weighted else None
    if gamma is not None and not _takes(record, gamma, x):
        return cast(Tensor, type(self).forward(self, x, *[gate] * (gate is not None)))
    refuse_gradient(self, x, gamma, gate)
    x = x if x.stride(-1) == 1 else x.contiguous()
    if record.centered:
        return layer_norm(x, gamma, eps=record.eps)
    if gate is not None and gate.stride(-1) != 1:
        gate = gate.contiguous()
    if record.groups > 1:
        gate, gamma = (None if t is None else t.unflatten(-1, (record.groups, -1)) for t in (gate, gamma))
        x = x.unflatten(-1, (record.groups, -1))
    y = rms_norm(
        x,
        gamma,
        record.eps,
        gate=gate,
        rounding=record.rounding,
        weight_offset=record.weight_offset,
        gate_order=record.gate or "after",
        gate_activation=record.gate_activation,
    )
    y = y if record.groups == 1 else y.flatten(-2)
    return y.squeeze(1) if token else y


def _takes(record: OtherNormRecord, gamma: Tensor, x: Tensor) -> bool:
    """Whether an op computes what the model does with this weight: not if it is broadcast, or decides the dtype."""
    if gamma.dim() == 2 and gamma.shape != x.shape[-2:]:
        return False
    return gamma.dtype == x.dtype or not record.same_dtype


@overload
def add_norm(norm: NormModule, x: Tensor) -> Tensor: ...


@overload
def add_norm(norm: NormModule, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...


def add_norm(norm: NormModule, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """``norm(x)``, or with a residual ``(norm(x + residual), x + residual)``, in one launch.

    Rows that are not contiguous are copied. Models norm such rows after a convolution.
    """
    eps, weight_offset, rounding = norm._onepass
    gamma = gamma_of(norm.weight)
    if x.stride(-1) != 1:
        x = x.contiguous()
    refuse_gradient(norm, x, gamma, residual)
    if residual is None:
        return rms_norm(x, gamma, eps, weight_offset=weight_offset, rounding=rounding)
    return rms_norm(x, gamma, eps, residual=residual, weight_offset=weight_offset, rounding=rounding)


def post_add_norm(
    norm: NormModule, post: NormModule, x: Tensor, residual: Tensor, scale: float, round_sum: bool | None
) -> tuple[Tensor, Tensor]:
    """``(norm(h), h)`` with ``h = residual + post(x) * scale``, in one launch. Both norms have the same record."""
    eps, weight_offset, rounding = norm._onepass
    gammas = gamma_of(post.weight), gamma_of(norm.weight)
    x = x if x.stride(-1) == 1 else x.contiguous()
    refuse_gradient(norm, x, *gammas, residual)
    return rms_norm_add_rms_norm(
        x,
        *gammas,
        eps,
        residual=residual,
        branch_scale=scale,
        weight_offset=weight_offset,
        rounding=rounding,
        round_sum=round_sum,
    )
