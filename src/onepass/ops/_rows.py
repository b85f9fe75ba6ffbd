"""From checked tensors to a backend launch: fold the leading dimensions, pick the backend.

Leading dimensions that fold to more levels than a kernel has are several launches: one for each index of a dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..formats import SMALLEST_EPS
from ..rows import RowSpec, geometry, smallest_dimension
from ._launch import Launch

_launch = Launch("rms_norm")
_ROW_SCALE = (1, 0, 0)


def run_rows(
    op: str,
    spec: RowSpec,
    x: Tensor,
    gamma: Tensor,
    residual: Tensor | None,
    operands: Sequence[Tensor],
    static_scale: Tensor | None,
    norm: Tensor | None,
    codes: Tensor | None,
    scale: Tensor | None,
    new_residual: Tensor | None,
    eps: float,
    weight_offset: float,
    scale_ub: float,
    scale_ub_tensor: Tensor | None,
    min_scale: float,
) -> None:
    """Run a row kernel over ``x`` [..., N], in one launch if its rows allow it; nothing is launched when there are no rows."""
    launch = _launch.on(x)
    if x.dim() == 1:
        x = x.unsqueeze(0)
        residual, norm, codes, scale, new_residual = (
            None if t is None else t.unsqueeze(0) for t in (residual, norm, codes, scale, new_residual)
        )
        operands = [t.unsqueeze(0) if o.kind != "column" else t for t, o in zip(operands, spec.operands, strict=True)]
    eps = max(eps, SMALLEST_EPS)
    total, n = x.numel(), x.shape[-1]
    if total == 0:
        return
    if (
        not operands
        and x.is_contiguous()
        and (codes is None or codes.is_contiguous())
        and (scale is None or scale.is_contiguous())
        and (norm is None or norm.is_contiguous())
        and (residual is None or residual.is_contiguous())
        and (new_residual is None or new_residual.is_contiguous())
    ):
        step = (n, 0, 0)
        launch(
            spec, (total // n, 1, 1), (step, step, step, step, _ROW_SCALE if scale is None else (scale.shape[-1], 0, 0), step), n,
            x, gamma, residual, operands, static_scale, norm, codes, scale, new_residual, eps, weight_offset, scale_ub,
            scale_ub_tensor, min_scale,
        )  # fmt: skip
        return
    rows: list[Tensor | None] = [x, residual, norm, codes, scale, new_residual]
    for operand, tensor in zip(spec.operands, operands, strict=True):
        rows.append(tensor if operand.kind != "column" else None)
    folded = geometry(rows)
    if folded is None:
        dim = smallest_dimension(x.shape[:-1])
        for i in range(x.shape[dim]):
            parts = [None if t is None else t.select(dim, i) for t in rows]
            row, added, normed, coded, scaled, sums, *others = parts
            given = [t if part is None else part for t, part in zip(operands, others, strict=True)]
            assert row is not None
            run_rows(
                op, spec, row, gamma, added, given, static_scale, normed, coded, scaled, sums, eps, weight_offset, scale_ub,
                scale_ub_tensor, min_scale,
            )  # fmt: skip
        return
    launch(
        spec, *folded, n, x, gamma, residual, operands, static_scale,
        norm, codes, scale, new_residual, eps, weight_offset, scale_ub, scale_ub_tensor, min_scale,
    )  # fmt: skip
