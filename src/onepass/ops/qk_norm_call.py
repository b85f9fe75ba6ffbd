"""From checked q and k to a backend launch: fold the leading dimensions, find the heads, pick the backend.

Leading dimensions that fold to more levels than a kernel has are several launches: one for each index of a dimension.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from ..contract.declaration import Contract
from ..fastpath.debug import debugging
from ..formats import SMALLEST_EPS
from ..specs.layout import Geometry, geometry, smallest_dimension
from ..specs.qk_norm import QkCall, QkRows
from .dispatch import Launch

_launch = Launch("qk_norm")
_ONE: Final = (1, 1)
_NO_STEPS: Final = (0, 0, 0, 0)


def run_qk(contract: Contract, call: QkCall, head: int) -> None:
    """Run a kernel over q and k, in one launch if their rows allow it; nothing is launched when there are no tokens.

    ``head`` 0: a row is [..., N]. Above 0: rows of that many columns lie side by side in [..., N]. -1: in [..., H, D].
    """
    q, k, q_out, k_out = call.q, call.k, call.q_out, call.k_out
    stats, freqs, positions = call.stats, call.freqs, call.positions
    launch = _launch.on(q)
    if not q.numel():
        return
    call = call._replace(eps=max(call.eps, SMALLEST_EPS))
    if freqs is not None and positions is not None and debugging():
        _check_positions(contract, positions, freqs.shape[0])
    if head >= 0 and q.dim() == 2:  # nothing to fold
        strides = [(0, 0, 0) if t is None else (t.stride(0), 0, 0) for t in (q, k, q_out, k_out, stats, positions)]
        tokens, nq = q.shape
        nk = k.shape[1]
        per_head = ((nq // head, nk // head), (head, head), (head,) * 4) if head else (_ONE, (nq, nk), _NO_STEPS)
        rows = QkRows(Geometry(tokens, 1, 1), strides, *per_head, tokens)
        launch(call._replace(rows=rows))
        return
    heads, steps = _ONE, _NO_STEPS
    tensors: list[Tensor | None] = [q, k, q_out, k_out]
    if head:
        if head > 0:
            heads, steps = (q.shape[-1] // head, k.shape[-1] // head), (head,) * 4
        else:
            heads = (q.shape[-2], k.shape[-2])
            steps = tuple(0 if t is None else t.stride(-2) for t in tensors)  # type: ignore[assignment]
            tensors = [None if t is None else t.select(-2, 0) for t in tensors]
    first, second, *_ = tensors
    assert first is not None and second is not None
    widths = (head, head) if head > 0 else (first.shape[-1], second.shape[-1])
    sequence = first.shape[-2] if first.dim() > 1 else 1
    tensors += [stats, None if positions is None else positions.unsqueeze(-1)]
    if first.dim() == 1:
        tensors = [None if t is None else t.unsqueeze(0) for t in tensors]
    folded = geometry(tensors)
    if folded is None:
        # the last leading dimension stays: without positions its index is the token's position
        dim = smallest_dimension(first.shape[:-2])
        for i in range(first.shape[dim]):
            parts = [None if t is None else t.select(dim, i) for t in (q, k, q_out, k_out, stats, positions)]
            one, other, q_part, k_part, part, at = parts
            assert one is not None and other is not None
            run_qk(
                contract,
                call._replace(q=one, k=other, q_out=q_part, k_out=k_part, stats=part, positions=at),
                head,
            )
        return
    rows = QkRows(*folded, heads, widths, steps, sequence)
    launch(call._replace(rows=rows))


def _check_positions(contract: Contract, positions: Tensor, limit: int) -> None:
    """Read the positions on the host, which waits for the device: for debugging only."""
    least, most = (int(v) for v in positions.aminmax())
    if least < 0 or most >= limit:
        contract.fail("positions", f"lie within the {limit} rows of freqs", f"{least} to {most}")
