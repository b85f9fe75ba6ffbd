"""SGLang's norms: those of ``sgl_kernel``, and ``fused_inplace_qknorm`` and ``dsv3_fused_a_gemm`` of ``sglang.kernels.ops``.

The first four are FlashInfer's kernels, with the same names, order of arguments and rounding
(`onepass.engines.flashinfer.norm`). `fused_inplace_qknorm` rounds once too: ``x = round((x * rs) * w)`` of each head of q
and k.

Weights may have any float dtype, whatever the input's. ``enable_pdl`` is accepted and ignored.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import ContractError
from ..ops.linear.op import linear
from ..ops.qk_norm.op import qk_rms_norm
from .arguments import names_of_op, require_counts, require_tensors
from .flashinfer.norm import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm
from .vllm import product, weight_of

__all__ = [
    "dsv3_fused_a_gemm",
    "fused_add_rmsnorm",
    "fused_inplace_qknorm",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "rmsnorm",
]


@names_of_op(q_out="q", k_out="k", gamma_q="q_weight", gamma_k="k_weight")
def fused_inplace_qknorm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float = 1e-6, *, head_dim: int = 0
) -> None:
    """Norm every head of ``q`` [tokens, heads, head_dim] and of ``k``, in place and in one launch.

    With ``head_dim``, q and k may also be [tokens, heads * head_dim]. They may be slices of one projection.
    """
    name = "fused_inplace_qknorm"
    require_tensors(name, q=q, k=k, q_weight=q_weight, k_weight=k_weight)
    if head_dim != 0:
        require_counts(name, head_dim=head_dim)
    columns = head_dim or (q.shape[-1] if q.dim() else 1)
    for label, x in (("q", q), ("k", k)):
        if x.dim() < 2 or x.shape[-1] % columns:
            raise ContractError(
                f"{name}: `{label}` must be [tokens, heads, {columns}] or have heads of {columns} columns, "
                f"got {list(x.shape)}"
            )
    for label, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.shape != (columns,):
            raise ContractError(f"{name}: `{label}` must have shape [{columns}], got {list(weight.shape)}")
    qk_rms_norm(q, k, q_weight, k_weight, eps, per_head=True, out=(q, k))


@product
def dsv3_fused_a_gemm(mat_a: Tensor, mat_b: Tensor, output: Tensor | None = None) -> Tensor:
    """``mat_a`` [tokens, K] times ``mat_b`` [K, N], which is the transposed weight; rounded once.

    Any number of tokens and any sizes, bfloat16, float16 or float32. Each row is bit-identical to running it alone.
    """
    return linear(mat_a, weight_of("dsv3_fused_a_gemm", mat_b), out=output)
