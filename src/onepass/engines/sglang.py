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
    """``x = round((x * rs) * weight)`` of every head of q and of k, in place and in one launch.

    Args:
        q: [tokens, heads, head_dim], or with ``head_dim`` also [tokens, heads * head_dim]. May be a slice of a projection.
        k: The same for k.
        q_weight: [head_dim] of any float dtype.
        k_weight: The same for k.
        eps: Added to the mean of squares.
        head_dim: Columns of a head; 0: those of q's last dimension.

    Rounding:
        Once.

    >>> import torch
    >>> from onepass.engines import sglang
    >>> q, k = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.0, 2.0]]])
    >>> sglang.fused_inplace_qknorm(q, k, torch.ones(2), torch.ones(2), eps=0.0)
    >>> q, k
    (tensor([[[0.8485, 1.1314]]]), tensor([[[0.0000, 1.4142]]]))
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
    """``round(mat_a @ mat_b)``, for any number of tokens and any sizes.

    Args:
        mat_a: [tokens, K], bfloat16, float16 or float32.
        mat_b: [K, N], the transpose of a contiguous weight, in mat_a's dtype.
        output: Receives the result.

    Returns:
        [tokens, N] in mat_a's dtype.

    Rounding:
        Once. Each row is bit-identical to running it alone.
    """
    return linear(mat_a, weight_of("dsv3_fused_a_gemm", mat_b), out=output)
