"""Styles for `torch.distributed.tensor.parallel.parallelize_module`.

OLMo-2's attention calls ``q_norm(q_proj(x))`` and then ``k_norm(k_proj(x))``: two modules, each
with statistics over its whole projection. `QKNormParallel` shards one norm, so an attention needs
two all-reduces. `QKAttentionParallel` shards the attention and needs one: a hook after ``q_proj``
also runs ``k_proj``, norms both results together, and keeps the normed k until the attention calls
``k_proj``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, Final, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from ..core.contract import describe, require_bool
from ..errors import ContractError
from ..formats import Rounding
from ._norm import qk_rms_norm, rms_norm
from ._plan import QKNormPlan, plan

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


@dataclass(frozen=True)
class _Sharding:
    """What a sharded norm needs besides its weight."""

    plan: QKNormPlan
    eps: float
    options: dict[str, Any]


class QKNormParallel(ParallelStyle):
    """Shard an RMSNorm over a projection's output, with statistics over all ranks, in one all-reduce per call.

    The module needs a ``weight`` [N] and an epsilon named ``variance_epsilon`` or ``eps``. Its forward takes this rank's
    columns, as `ColwiseParallel` returns them, or a DTensor sharded on the last dimension, and returns the same kind. There
    is no backward: call it under ``torch.inference_mode()`` or ``torch.no_grad()``.

    Args:
        eps: The epsilon; None: the module's.
        weight_offset: As in `rms_norm`.
        rounding: As in `rms_norm`.
        reproducible: As in `qk_rms_norm`.

    >>> import torch, onepass
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> mesh = torch.distributed.init_device_mesh("cpu", (1,))
    >>> norm = parallelize_module(torch.nn.RMSNorm(2, eps=1e-6), mesh, onepass.dist.QKNormParallel())
    >>> with torch.inference_mode():
    ...     norm(torch.tensor([[3.0, 4.0]]))
    tensor([[0.8485, 1.1314]])
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        *,
        eps: float | None = None,
        weight_offset: float = 0.0,
        rounding: Rounding = "once",
        reproducible: bool = False,
    ) -> None:
        super().__init__()
        require_bool(type(self).__name__, "reproducible", reproducible)
        self.eps = eps
        self.options = {"weight_offset": weight_offset, "rounding": rounding, "reproducible": reproducible}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 1 or getattr(module, "bias", None) is not None:
            raise ContractError(
                f"QKNormParallel: the module must be an RMSNorm with a weight [N] and no bias, got {describe(module)}"
            )
        eps = self.eps
        if eps is None:
            eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
        if not isinstance(eps, float):
            raise ContractError(
                f"QKNormParallel: `eps` must be given, because the module has none, got {describe(eps)}"
            )
        sharded = distribute_tensor(weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
        module.register_parameter("weight", nn.Parameter(sharded, requires_grad=weight.requires_grad))
        norm_plan = plan(device_mesh, sharded.to_local().shape[0], counts=(weight.shape[0],))
        module._onepass_sharding = _Sharding(norm_plan, eps, self.options)  # type: ignore[assignment]
        module.forward = MethodType(_norm_forward, module)
        return module


def _norm_forward(norm: Any, x: Tensor) -> Tensor:
    sharding: _Sharding = norm._onepass_sharding
    if isinstance(x, DTensor):
        return rms_norm(x, norm.weight, sharding.eps, **sharding.options)
    return rms_norm(x, norm.weight.to_local(), sharding.eps, plan=sharding.plan, **sharding.options)


class QKAttentionParallel(ParallelStyle):
    """Shard an attention that norms whole q and k projections, with **one** all-reduce for both.

    The module must have ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` (linear) and ``q_norm``, ``k_norm`` (RMSNorm), and its
    forward must call ``q_norm(q_proj(x))`` and ``k_norm(k_proj(x))`` with the same x, as Hugging Face's Olmo2Attention does.
    `ColwiseParallel` and `RowwiseParallel` shard the projections; the number of heads must be a multiple of the number of
    ranks.

    Args:
        weight_offset: As in `rms_norm`.
        rounding: As in `rms_norm`.
        reproducible: As in `qk_rms_norm`.

    >>> import torch, onepass
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> class Attention(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
    ...             setattr(self, name, torch.nn.Linear(4, 4, bias=False))
    ...         self.q_norm, self.k_norm = torch.nn.RMSNorm(4, eps=1e-6), torch.nn.RMSNorm(4, eps=1e-6)
    ...
    ...     def forward(self, x):
    ...         q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
    ...         return self.o_proj(torch.nn.functional.scaled_dot_product_attention(q, k, self.v_proj(x)))
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> mesh, attention, x = torch.distributed.init_device_mesh("cpu", (1,)), Attention(), torch.ones(1, 3, 4)
    >>> with torch.inference_mode():
    ...     whole = attention(x)
    ...     sharded = parallelize_module(attention, mesh, onepass.dist.QKAttentionParallel())(x)
    >>> torch.allclose(whole, sharded, atol=1e-6)
    True
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, *, weight_offset: float = 0.0, rounding: Rounding = "once", reproducible: bool = False) -> None:
        super().__init__()
        self.norm = QKNormParallel(weight_offset=weight_offset, rounding=rounding, reproducible=reproducible)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        missing = [name for name in _ATTENTION if not isinstance(getattr(module, name, None), nn.Module)]
        if missing:
            raise ContractError(
                f"QKAttentionParallel: the module must have {', '.join(_ATTENTION)}, got no {', '.join(missing)}"
            )
        styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in _ATTENTION[:3]}
        styles |= {"o_proj": RowwiseParallel(), "q_norm": self.norm, "k_norm": self.norm}
        parallelize_module(module, device_mesh, styles, src_data_rank=self.src_data_rank)
        _Pair(module, device_mesh)
        return module


class _Pair:
    """Norms q and k together in a forward that norms them one after the other."""

    def __init__(self, attention: Any, mesh: DeviceMesh) -> None:
        self.k_proj, self.q_norm, self.k_norm = attention.k_proj, attention.q_norm, attention.k_norm
        self.mesh = mesh
        q, k = self.q_norm._onepass_sharding, self.k_norm._onepass_sharding
        if q.eps != k.eps:
            raise ContractError(
                f"QKAttentionParallel: q_norm and k_norm must have the same eps, got {q.eps} and {k.eps}"
            )
        self.sharding: _Sharding = q
        self.plan = plan(mesh, *q.plan.widths, *k.plan.widths, counts=(*q.plan.totals, *k.plan.totals))
        self.k: Tensor | None = None
        """The normed k, from ``q_proj`` until the attention calls ``k_proj``."""
        self.q_normed = self.k_normed = False
        """Whether the next input of ``q_norm`` (``k_norm``) is already normed."""
        self.project_k = self.k_proj.forward
        attention.q_proj.register_forward_hook(self.after_q_proj)
        self.k_proj.forward = self.give_k
        self.q_norm.forward = self.norm_q
        self.k_norm.forward = self.norm_k

    def after_q_proj(self, _: nn.Module, inputs: tuple[Any, ...], q: Tensor) -> Tensor:
        self.k = None
        k = self.k_proj(inputs[0])
        weights = self.q_norm.weight.to_local(), self.k_norm.weight.to_local()
        q, self.k = qk_rms_norm(q, k, *weights, self.sharding.eps, plan=self.plan, **self.sharding.options)
        self.q_normed = True
        return q

    def give_k(self, x: Tensor) -> Tensor:
        if self.k is None:
            self.k_normed = False
            return cast(Tensor, self.project_k(x))
        k, self.k, self.k_normed = self.k, None, True
        # a hook of ColwiseParallel expects a DTensor
        wrapped: Tensor = DTensor.from_local(k, self.mesh, [Shard(-1)], run_check=False)
        return wrapped

    def norm_q(self, x: Tensor) -> Tensor:
        normed, self.q_normed = self.q_normed, False
        return x if normed else _norm_forward(self.q_norm, x)

    def norm_k(self, x: Tensor) -> Tensor:
        normed, self.k_normed = self.k_normed, False
        return x if normed else _norm_forward(self.k_norm, x)
