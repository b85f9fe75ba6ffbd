"""Styles for `torch.distributed.tensor.parallel.parallelize_module`: sharded norms, and a whole attention with one collective.

OLMo-2's attention calls ``q_norm(q_proj(x))`` and then ``k_norm(k_proj(x))``: two modules, each with statistics over the
whole projection. `QKNormParallel` shards one norm, so an attention does two all-reduces. `QKAttentionParallel` shards
the attention and makes it one: the hook after ``q_proj`` also runs ``k_proj``, norms both results together, and hands the
second one over when the attention asks for it.
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

from ..contract.declaration import (describe, require_bool)
from ..errors import ContractError
from ..formats import Rounding
from ._norm import (qk_rms_norm, rms_norm)
from ._plan import (QKNormPlan, plan)

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


@dataclass(frozen=True)
class _Sharding:
    """What a sharded norm needs besides its weight."""

    plan: QKNormPlan
    eps: float
    options: dict[str, Any]


class QKNormParallel(ParallelStyle):
    """Shard an RMSNorm over a projection's output: the weight along its one dimension, the statistics across ranks.

    The module needs a ``weight`` [N] and its epsilon as ``variance_epsilon`` or ``eps`` (else give ``eps``). Its forward takes
    this rank's columns, as `ColwiseParallel` hands them on, or a DTensor sharded on the last dimension, and returns
    the like. One all-reduce a call. There is no backward: call it under ``torch.inference_mode()`` or
    ``no_grad()``.
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
            raise ContractError(f"QKNormParallel: `eps` must be given, as the module has none, got {describe(eps)}")
        sharded = distribute_tensor(weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
        module.register_parameter("weight", nn.Parameter(sharded, requires_grad=weight.requires_grad))
        made = plan(device_mesh, sharded.to_local().shape[0], counts=(weight.shape[0],))
        module._onepass_sharding = _Sharding(made, eps, self.options)  # type: ignore[assignment]
        module.forward = MethodType(_norm_forward, module)
        return module


def _sharding(norm: nn.Module) -> _Sharding:
    return cast(_Sharding, norm._onepass_sharding)


def _local_weight(norm: nn.Module) -> Tensor:
    local: Tensor = cast(DTensor, norm.weight).to_local()
    return local


def _norm_forward(norm: nn.Module, x: Tensor) -> Tensor:
    how = _sharding(norm)
    if isinstance(x, DTensor):
        return rms_norm(x, cast(Tensor, norm.weight), how.eps, **how.options)
    return rms_norm(x, _local_weight(norm), how.eps, plan=how.plan, **how.options)


class QKAttentionParallel(ParallelStyle):
    """Shard an attention that norms its whole q and k projections, with **one** all-reduce for both norms.

    For modules with ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` (linear) and ``q_norm``, ``k_norm`` (RMSNorm), whose forward
    calls ``q_norm(q_proj(x))`` and ``k_norm(k_proj(x))`` with the same x, as Hugging Face's Olmo2Attention does. The
    projections are sharded as `ColwiseParallel` and `RowwiseParallel` do it; heads must divide by the number of ranks.
    """

    def __init__(self, *, weight_offset: float = 0.0, rounding: Rounding = "once", reproducible: bool = False) -> None:
        super().__init__()
        self.norm = QKNormParallel(weight_offset=weight_offset, rounding=rounding, reproducible=reproducible)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        missing = [name for name in _ATTENTION if not isinstance(getattr(module, name, None), nn.Module)]
        if missing:
            raise ContractError(
                f"QKAttentionParallel: the module must have {', '.join(_ATTENTION)}, got none called {', '.join(missing)}"
            )
        styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in _ATTENTION[:3]}
        styles |= {"o_proj": RowwiseParallel(), "q_norm": self.norm, "k_norm": self.norm}
        parallelize_module(module, device_mesh, styles, src_data_rank=self.src_data_rank)
        _Pair(module, device_mesh)
        return module


class _Pair:
    """Norms q and k together in a forward that asks for them one after the other."""

    def __init__(self, attention: nn.Module, mesh: DeviceMesh) -> None:
        q_proj, self.k_proj, self.q_norm, self.k_norm = (
            cast(nn.Module, getattr(attention, name)) for name in ("q_proj", "k_proj", "q_norm", "k_norm")
        )
        self.mesh = mesh
        q, k = _sharding(self.q_norm), _sharding(self.k_norm)
        if q.eps != k.eps:
            raise ContractError(f"QKAttentionParallel: q_norm and k_norm must have one eps, got {q.eps} and {k.eps}")
        self.how = q
        self.plan = plan(mesh, *q.plan.widths, *k.plan.widths, counts=(*q.plan.totals, *k.plan.totals))
        self.k: Tensor | None = None
        """k, normed, from ``q_proj`` until the attention calls ``k_proj``."""
        self.q_normed = self.k_normed = False
        """Whether what comes next to ``q_norm`` (``k_norm``) is normed already."""
        self.project_k = self.k_proj.forward
        q_proj.register_forward_hook(self.after_q_proj)
        self.k_proj.forward = self.give_k
        self.q_norm.forward = self.norm_q
        self.k_norm.forward = self.norm_k

    def after_q_proj(self, _: nn.Module, inputs: tuple[Any, ...], q: Tensor) -> Tensor:
        self.k = None
        k = self.k_proj(inputs[0])
        weights = _local_weight(self.q_norm), _local_weight(self.k_norm)
        q, self.k = qk_rms_norm(q, k, *weights, self.how.eps, plan=self.plan, **self.how.options)
        self.q_normed = True
        return q

    def give_k(self, x: Tensor) -> Tensor:
        if self.k is None:
            self.k_normed = False
            return cast(Tensor, self.project_k(x))
        k, self.k, self.k_normed = self.k, None, True
        # a hook of ColwiseParallel waits for a DTensor
        wrapped: Tensor = DTensor.from_local(k, self.mesh, [Shard(-1)], run_check=False)
        return wrapped

    def norm_q(self, x: Tensor) -> Tensor:
        if self.q_normed:
            self.q_normed = False
            return x
        return _norm_forward(self.q_norm, x)

    def norm_k(self, x: Tensor) -> Tensor:
        if self.k_normed:
            self.k_normed = False
            return x
        return _norm_forward(self.k_norm, x)
