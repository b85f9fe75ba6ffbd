"""From a validated call to launches: fold the leading dimensions into rows of one stride, select the backend.

If they do not fold, the kernel is launched once per index of one of them.
"""

from __future__ import annotations

from torch import Tensor

from ...core.backend import Family
from ...core.layout import geometry, smallest_dimension
from ...formats import SMALLEST_EPS
from .spec import LinearCall

_family = Family("linear")


def run_linear(call: LinearCall) -> None:
    """Run a kernel over the rows of ``x`` [..., K], in one launch if they allow it. Without rows nothing is launched."""
    x = call.x
    if x.numel() == 0:
        return
    if x.dim() == 1:
        call = _with_rows(call, [None if t is None else t.unsqueeze(0) for t in _rows(call)])
    elif x.dim() > 2:
        rows = _rows(call)
        folded = geometry(rows)
        if folded is None or folded[0].n1 * folded[0].n2 > 1:
            dim = smallest_dimension(x.shape[:-1])
            for i in range(x.shape[dim]):
                run_linear(_with_rows(call, [None if t is None else t.select(dim, i) for t in rows]))
            return
        count, steps = folded[0].rows, folded[1]
        call = _with_rows(
            call,
            [
                None if t is None else t.as_strided((count, t.shape[-1]), (step[0], 1))
                for t, step in zip(rows, steps, strict=True)
            ],
        )
    _family.launch(x)(call._replace(eps=max(call.eps, SMALLEST_EPS)))


def _rows(call: LinearCall) -> list[Tensor | None]:
    """The tensors that have a row for each row of x."""
    return [call.x, call.residual, call.add, call.out, call.residual_out]


def _with_rows(call: LinearCall, rows: list[Tensor | None]) -> LinearCall:
    """The same call on other rows, in the order of `_rows`."""
    x, residual, add, out, residual_out = rows
    assert x is not None and out is not None
    return call._replace(x=x, residual=residual, add=add, out=out, residual_out=residual_out)
