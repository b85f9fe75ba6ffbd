"""From validated q and k to backend launches: fold the leading dimensions, find the heads, select the backend.

If the leading dimensions fold to more levels than a kernel supports, it is launched once per index of
one of them.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from ...core.backend import Family
from ...core.contract import Contract
from ...core.debug import debugging
from ...core.layout import Geometry, geometry, smallest_dimension
from ...formats import SMALLEST_EPS
from .spec import TENSORS, WITH_HEADS, QkCall, QkRows

_family = Family("qk_norm")
_ONE: Final = (1, 1)
_NO_STEPS: Final[tuple[int, ...]] = (0,) * len(WITH_HEADS)


def run_qk(contract: Contract, call: QkCall, head: int) -> None:
    """Run a kernel over q and k, in one launch if their rows allow it. Without tokens nothing is launched.

    ``head``: 0 for rows [..., N], the width of rows that are adjacent in [..., N], or -1 for rows of [..., H, D].
    """
    q, k, freqs, positions = call.q, call.k, call.freqs, call.positions
    launch = _family.launch(q)
    if not q.numel():
        return
    call = call._replace(eps=max(call.eps, SMALLEST_EPS), eps_k=max(call.eps_k, SMALLEST_EPS))
    if freqs is not None and positions is not None and debugging():
        check_positions(contract, positions, "freqs", freqs.shape[0])
    with_heads: list[Tensor | None] = [q, k, call.q_out, call.k_out]
    scales: list[Tensor | None] = [call.q_scale_out, call.k_scale_out]
    if head >= 0 and q.dim() == 2:  # nothing to fold
        tensors = (*with_heads, call.stats, positions, *scales)
        strides = [(0, 0, 0) if t is None else (t.stride(0), 0, 0) for t in tensors]
        tokens, nq = q.shape
        nk = k.shape[1]
        adjacent = (head, head, head, head, 1, 1)
        per_head = ((nq // head, nk // head), (head, head), adjacent) if head else (_ONE, (nq, nk), _NO_STEPS)
        launch(call._replace(rows=QkRows(Geometry(tokens, 1, 1), strides, *per_head, tokens)))
        return
    heads, steps = _ONE, _NO_STEPS
    if head > 0:
        heads, steps = (q.shape[-1] // head, k.shape[-1] // head), (head, head, head, head, 1, 1)
    elif head < 0:
        heads = (q.shape[-2], k.shape[-2])
        steps = tuple([0 if t is None else t.stride(-2) for t in (*with_heads, *scales)])
        with_heads = [None if t is None else t.select(-2, 0) for t in with_heads]
        scales = [None if t is None else t.select(-2, 0) for t in scales]
    first, second, *_ = with_heads
    assert first is not None and second is not None
    widths = (head, head) if head > 0 else (first.shape[-1], second.shape[-1])
    sequence = first.shape[-2] if first.dim() > 1 else 1
    rows = [*with_heads, call.stats, None if positions is None else positions.unsqueeze(-1), *scales]
    if first.dim() == 1:
        rows = [None if t is None else t.unsqueeze(0) for t in rows]
    folded = geometry(rows)
    if folded is not None:
        launch(call._replace(rows=QkRows(*folded, heads, widths, steps, sequence)))
        return
    # the last leading dimension is kept: without positions its index is the token's position
    dim = smallest_dimension(first.shape[:-2])
    parted = {name: t for name in TENSORS if (t := getattr(call, name)) is not None}
    for i in range(first.shape[dim]):
        run_qk(contract, call._replace(**{name: t.select(dim, i) for name, t in parted.items()}), head)


def check_positions(contract: Contract, positions: Tensor, table: str, limit: int) -> None:
    """Read the positions on the host, which waits for the device; for debugging only."""
    least, most = (int(v) for v in positions.aminmax())
    if least < 0 or most >= limit:
        contract.fail("positions", f"lie within the {limit} rows of {table}", f"{least} to {most}")
