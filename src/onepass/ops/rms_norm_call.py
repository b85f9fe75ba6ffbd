"""From a validated call to a backend launch: fold the leading dimensions, pick the backend.

Leading dimensions that fold to more levels than a kernel has take several launches: one for each index of a dimension.
"""

from __future__ import annotations

from torch import Tensor

from ..formats import SMALLEST_EPS
from ..specs.layout import Geometry, geometry, smallest_dimension
from ..specs.rms_norm import RowCall
from .dispatch import Launch

_launch = Launch("rms_norm")
_ROW_SCALE = (1, 0, 0)


def run_rows(call: RowCall) -> None:
    """Run a row kernel over ``x`` [..., N], in one launch if its rows allow it; without rows nothing is launched."""
    launch = _launch.on(call.x)
    n = call.x.shape[-1]
    call = call._replace(eps=max(call.eps, SMALLEST_EPS), n=n)
    if call.x.dim() == 1:
        call = _with_rows(call, [None if t is None else t.unsqueeze(0) for t in _row_tensors(call)])
    total = call.x.numel()
    if total == 0:
        return
    rows = _row_tensors(call)
    if not call.operands and all(t is None or t.is_contiguous() for t in rows):
        step, scale = (n, 0, 0), call.scale
        scale_step = _ROW_SCALE if scale is None else (scale.shape[-1], 0, 0)
        launch(call._replace(geom=Geometry(total // n, 1, 1), strides=(step, step, step, step, scale_step, step)))
        return
    folded = geometry(rows)
    if folded is not None:
        launch(call._replace(geom=folded[0], strides=folded[1]))
        return
    dim = smallest_dimension(call.x.shape[:-1])
    for i in range(call.x.shape[dim]):
        run_rows(_with_rows(call, [None if t is None else t.select(dim, i) for t in rows]))


def _row_tensors(call: RowCall) -> list[Tensor | None]:
    """The tensors that have a row for each row of x: None for an operand that has one value per column."""
    kinds = [operand.kind for operand in call.spec.operands]
    operands = [None if kind == "column" else t for t, kind in zip(call.operands, kinds, strict=True)]
    return [*call.rows[:6], *operands]


def _with_rows(call: RowCall, rows: list[Tensor | None]) -> RowCall:
    """The same call on other row tensors, in the order of `_row_tensors`."""
    x, residual, norm, codes, scale, new_residual, *others = rows
    assert x is not None
    operands = [t if other is None else other for t, other in zip(call.operands, others, strict=True)]
    return call._replace(
        x=x, residual=residual, norm=norm, codes=codes, scale=scale, new_residual=new_residual, operands=operands
    )
