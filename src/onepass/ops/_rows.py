"""From checked tensors to one backend launch: fold the leading dimensions, refuse overlaps, pick the backend."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import Unsupported
from ..formats import SMALLEST_EPS
from ..rows import LEVELS, RowSpec, geometry
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
    scale_ub_tensor: Tensor | None = None,
    min_scale: float = 0.0,
) -> None:
    """One launch of a row kernel over ``x`` [..., N]; nothing is launched when there are no rows."""
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
        raise Unsupported(
            f"{op}: leading dimensions whose strides fold to more than {LEVELS} levels are not supported; "
            f"`x` has shape {list(x.shape)} and strides {list(x.stride())}"
        )
    launch(
        spec, *folded, n, x, gamma, residual, operands, static_scale,
        norm, codes, scale, new_residual, eps, weight_offset, scale_ub, scale_ub_tensor, min_scale,
    )  # fmt: skip
