"""vLLM's `RMSNorm` layer in batch-invariant mode; imports vLLM.

With ``VLLM_BATCH_INVARIANT=1`` the layer's GPU forward does not call vLLM's IR ops. It rounds once, and adds the
residual as its CUDA kernel does::

    without a residual   y = round((x * rs) * weight)
    with one             h = round(x + residual);  y = round((h * rs) * weight),  rs from the rounded h

Each row is bit-identical to running it alone, here too. Everything else is inherited from vLLM's class.
"""

from __future__ import annotations

from torch import Tensor
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm

from ..ops.rms_norm.op import rms_norm

__all__ = ["OnepassRMSNorm", "register"]


class OnepassRMSNorm(RMSNorm):  # type: ignore[misc]
    """vLLM's RMSNorm with onepass on a GPU."""

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm; with a residual both tensors are overwritten, as vLLM does."""
        if self.variance_size_override is not None:  # vLLM refuses it in this mode
            refused: Tensor | tuple[Tensor, Tensor] = super().forward_cuda(x, residual)
            return refused
        has_weight = self.pass_weight if residual is None else self.pass_weight_add
        gamma = self.weight.data if has_weight else None
        if residual is None:
            return rms_norm(x, gamma, self.variance_epsilon)
        return rms_norm(
            x, gamma, self.variance_epsilon, residual=residual, round_sum=True, out=x, residual_out=residual
        )


def register() -> None:
    """Let vLLM create this layer wherever a model asks for `RMSNorm`. Another plugin's layer stays."""
    if "RMSNorm" not in op_registry_oot:
        CustomOp.register_oot(name="RMSNorm")(OnepassRMSNorm)
        OnepassRMSNorm.name = RMSNorm.name  # options such as custom_ops=["+rms_norm"] then apply to it
