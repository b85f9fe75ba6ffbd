"""From a validated call to backend launches: fold the leading dimensions, select the backend.

If the leading dimensions fold to more levels than a kernel supports, it is launched once per index of
one of them.
"""

from __future__ import annotations

from torch import Tensor

from ...core.backend import Family
from ...core.layout import Geometry, geometry, smallest_dimension
from ...errors import Unsupported
from ...formats import SMALLEST_EPS
from .spec import RowCall

_family = Family("rms_norm")
_ROW_SCALE = (1, 0, 0)
_SCALE, _OPERANDS = 4, 6
"""The indices of scale and of the first operand among a call's row tensors: x, residual, norm, codes, scale, ..."""


def run_rows(call: RowCall) -> None:
    """Run a row kernel over ``x`` [..., N], in one launch if its rows allow it. Without rows nothing is launched."""
    launch = _family.launch(call.x)
    if call.x.dim() == 1:
        call = _with_rows(call, [None if t is None else t.unsqueeze(0) for t in _row_tensors(call)])
    x, scale = call.x, None if _tiled(call) else call.scale
    n, total = x.shape[-1], x.numel()
    if total == 0:
        return
    rows = _row_tensors(call)
    eps = max(call.eps, SMALLEST_EPS)
    if not call.operands and all(t is None or t.is_contiguous() for t in rows):
        step = (n, 0, 0)
        scale_step = _ROW_SCALE if scale is None else (scale.shape[-1], 0, 0)
        code_step = step if call.codes is None else (call.codes.shape[-1], 0, 0)
        strides = (step, step, step, code_step, scale_step, step, step, _ROW_SCALE)
        launch(call._replace(eps=eps, n=n, geom=Geometry(total // n, 1, 1), strides=strides))
        return
    folded = geometry(rows)
    if folded is not None:
        launch(call._replace(eps=eps, n=n, geom=folded[0], strides=folded[1]))
        return
    if _tiled(call):
        raise Unsupported("rms_norm_fused_quant: `scale_layout` '128x4' needs rows that fold to three strides")
    dim = smallest_dimension(x.shape[:-1])
    for i in range(x.shape[dim]):
        run_rows(_with_rows(call, [None if t is None else t.select(dim, i) for t in rows]))


def _row_tensors(call: RowCall) -> list[Tensor | None]:
    """The tensors that have a row for each row of x, with None for operands that have one value per column."""
    rows: list[Tensor | None] = [*call.rows]
    for i, operand in enumerate(call.spec.operands, start=_OPERANDS):
        if operand.kind == "column":
            rows[i] = None
    if _tiled(call):
        rows[_SCALE] = None
    return rows


def _tiled(call: RowCall) -> bool:
    """Whether scales are in tiles, which rows of x find by their number."""
    return call.spec.scale is not None and call.spec.scale.packing == "128x4"


def _with_rows(call: RowCall, rows: list[Tensor | None]) -> RowCall:
    """The same call on other row tensors, in the order of `_row_tensors`."""
    x, residual, norm, codes, scale, new_residual, *others, row_gamma, rstd = rows
    assert x is not None
    operands = [t if other is None else other for t, other in zip(call.operands, others, strict=True)]
    if _tiled(call):
        scale = call.scale
    call = call._replace(x=x, residual=residual, operands=operands, row_gamma=row_gamma)
    return call._replace(norm=norm, codes=codes, scale=scale, new_residual=new_residual, rstd=rstd)
