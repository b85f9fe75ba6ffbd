"""Random calls of the QK-RMSNorm ops: statistics, application, both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from onepass.formats import FLOATS, ROUNDINGS
from onepass.ops.qk_norm import apply_qk_rms_norm, qk_rms_norm, row_mean_of_squares_qk, row_sum_of_squares_qk
from onepass.rope import STYLES, Rope
from onepass.testing import compare, oracle
from onepass.testing.case import on_device, same_bytes
from tools.fuzz import bounds, draw
from tools.fuzz.draw import NORMAL, PLAIN, Place, Values
from tools.fuzz.rms_norm import copied

SUMS, MEANS, APPLY, FUSED = OPS = (
    "row_sum_of_squares_qk",
    "row_mean_of_squares_qk",
    "apply_qk_rms_norm",
    "qk_rms_norm",
)
VALUES = ("values", "gammas", "means", "eps")
"""Fields of a case that choose no machine code."""
_FREQS = 24
"""Rows of freqs."""


@dataclass(frozen=True)
class QkConfiguration:
    """What shapes the machine code; ``head`` and ``dim`` of a rotation, ``widths`` the only ones to be drawn."""

    op: str
    x: torch.dtype = torch.bfloat16
    gamma: torch.dtype = torch.float32
    gamma_k: torch.dtype = torch.float32
    out: torch.dtype | None = None
    rounding: str = "once"
    per_head: bool = False
    style: str = ""
    head: int = 0
    dim: int = 0
    positions: torch.dtype | None = None
    widths: tuple[tuple[int, int], ...] = ()


def configuration(op: str, r: Random, bounded: bool) -> QkConfiguration:
    """Any that the contract allows."""
    c = QkConfiguration(op, r.choice(FLOATS))
    if op in (APPLY, FUSED):
        style = r.choice(("", *STYLES))
        per_head = op == FUSED and r.random() < 0.5
        head = (
            0 if not (style or per_head) else 2 * draw.size(r, 48) if style or r.random() < 0.5 else draw.size(r, 130)
        )
        c = replace(
            c, gamma=(one := r.choice((c.x, *FLOATS))), gamma_k=r.choice((one, one, *FLOATS)),
            out=r.choice((None, None, *FLOATS)), rounding=r.choice(ROUNDINGS),
            per_head=per_head, style=style, head=head, dim=2 * r.randint(1, head // 2) if style else 0,
            positions=r.choice((None, torch.int32, torch.int64)) if style else None,
        )  # fmt: skip
    if bounded:
        long = r.choice(((6144, 1024), (4096, 4096), (8193, 100), (20000, 1000)))
        c = replace(c, widths=(_widths(c, r, 300), _widths(c, r, 3000) if c.head else long))
    return c


def _widths(c: QkConfiguration, r: Random, most: int) -> tuple[int, int]:
    if c.head:
        return c.head * r.randint(1, 5), c.head * r.randint(1, 3)
    return draw.size(r, most), draw.size(r, most)


@dataclass(frozen=True)
class QkCase:
    """One call; ``heads``: q and k are [..., H, D]."""

    config: QkConfiguration
    lead: tuple[int, ...] = (1,)
    nq: int = 1
    nk: int = 1
    eps: float = 1e-6
    offset: float = 0.0
    heads: bool = False
    packed: bool = False
    values: tuple[Values, Values] = (NORMAL, NORMAL)
    gammas: tuple[Values, Values] = (NORMAL, NORMAL)
    means: str = "own"
    places: tuple[Place, Place, Place, Place] = (PLAIN, PLAIN, PLAIN, PLAIN)

    @property
    def op(self) -> str:
        """The op's name."""
        return self.config.op

    def simpler(self) -> Iterator[QkCase]:
        """Cases that differ in one thing, which is simpler."""
        unit = self.config.head or 1
        for lead in ((1,), (2,), self.lead[:-1]):
            yield replace(self, lead=lead)
        for name in ("nq", "nk"):
            n = getattr(self, name) // unit
            for fewer in (1, 2, n // 2, n - 1):
                yield draw.but(self, **{name: unit * max(1, fewer)})
        yield from draw.simpler(self, eps=1e-6, offset=0.0, heads=False, packed=False, means="own")

    def run(self, device: str) -> str | None:
        """None, or what is wrong."""
        return _run(self, device)


def draw_case(c: QkConfiguration, r: Random) -> QkCase:
    """A call with this configuration."""
    lead = draw.lead(r, 9)
    nq, nk = r.choice(c.widths) if c.widths else _widths(c, r, 3000 if r.random() < 0.01 else 200)
    heads = c.per_head and len(lead) in (1, 2) and r.random() < 0.4
    if c.head == nq == nk and 0 in lead:
        lead = (0,)  # [2, 0, D] would be no heads
    return QkCase(
        c, lead, nq, nk, draw.epsilon(r), draw.offset(r), heads, not heads and r.random() < 0.3,
        (draw.values(r), draw.values(r)), (draw.weights(r), draw.weights(r)),
        r.choice(("own", "own", "own", "any", "special")),
        (draw.place(r), draw.place(r), draw.place(r, inputs=False), draw.place(r, inputs=False)),
    )  # fmt: skip


def inputs(case: QkCase) -> dict[str, Any]:
    """Tensors by name, on the CPU."""
    c, found = case.config, dict[str, Any]()
    q, k = (v.make((*case.lead, n), c.x) for v, n in zip(case.values, (case.nq, case.nk), strict=True))
    if case.packed:
        both = case.places[0].put(torch.cat((q, k), -1))
        found["q"], found["k"] = both[..., : case.nq], both[..., case.nq :]
    else:
        if case.heads:
            q, k = (t.unflatten(-1, (-1, c.head)) for t in (q, k))
        found["q"], found["k"] = (p.put(t) for p, t in zip(case.places, (q, k), strict=False))
    if c.op in (SUMS, MEANS):
        return found
    for side, v, n, dtype in zip("qk", case.gammas, (case.nq, case.nk), (c.gamma, c.gamma_k), strict=True):
        found[f"gamma_{side}"] = draw.gamma(v, c.head if c.per_head else n, dtype)
    if c.op == APPLY:
        found["qk_var"] = _means(case, found["q"], found["k"])
    if c.style:
        angle = Values(start=case.values[0].start).make((_FREQS, (c.dim + 1) // 2), torch.float32) * 3
        found["freqs"] = torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)
        if c.positions is not None:
            # some lie outside freqs and take its first or last row
            at = Values(start=case.values[1].start).make((*case.lead, 1), torch.float32)[..., 0] * 12 + 12
            found["positions"] = at.to(c.positions)
    return found


def _means(case: QkCase, q: Tensor, k: Tensor) -> Tensor:
    if case.means == "own":
        sums = torch.cat([bounds.squares(t.double()) / t.shape[-1] for t in (q, k)], -1)
        return sums.float()
    t = Values("spread", start=case.values[0].start).make((*case.lead, 2), torch.float32).abs()
    if case.means == "special" and t.numel():
        special = (0.0, float("inf"), float("nan"), 1e-40, -1.0)
        t.view(-1)[0] = special[case.values[0].start % len(special)]
    return t


def _call(case: QkCase, given: dict[str, Any], out: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    c = case.config
    if c.op in (SUMS, MEANS):
        function = row_sum_of_squares_qk if c.op == SUMS else row_mean_of_squares_qk
        return (function(**given, out=None if out is None else out[0]),)
    given = dict(given)
    freqs, positions = given.pop("freqs", None), given.pop("positions", None)
    options: dict[str, Any] = {"weight_offset": case.offset, "rounding": c.rounding}
    if c.style:
        options["rope"] = Rope(freqs, positions, c.style, c.dim, None if c.per_head else c.head)  # type: ignore[arg-type]
    if c.op == FUSED:
        options |= {"out_dtype": c.out} if out is None else {"out": out}
        return qk_rms_norm(**given, eps=case.eps, per_head=c.per_head, **options)
    made = out or tuple(torch.empty(t.shape, dtype=c.out or c.x, device=t.device) for t in (given["q"], given["k"]))
    apply_qk_rms_norm(made[0], made[1], **given, epsilon=case.eps, **options)
    return made


def _run(case: QkCase, device: str) -> str | None:
    c, host = case.config, inputs(case)
    arguments = {k: on_device(v, device) for k, v in host.items()}
    before = draw.snapshot(arguments)
    results = _call(case, arguments, None)
    rooms = [p.room(t.shape, t.dtype) for p, t in zip(case.places[2:], results, strict=False)]
    again = _call(case, arguments, tuple(on_device(t, device) if device != "cpu" else copied(t) for t in rooms))
    touched = draw.changed(arguments, before)
    if touched is not None:
        return f"{touched} was written"
    for index, (first, second) in enumerate(zip(results, again, strict=True)):
        if not same_bytes(first, second):
            return f"result {index} differs when written into the caller's tensor"
        if draw.spilt(rooms[index], second):
            return f"bytes beside result {index} were written"
    if c.op in (APPLY, FUSED) and c.out in (None, c.x) and not any(p.expanded for p in case.places[:2]):
        fresh = {k: on_device(v, device) if device != "cpu" else copied(v) for k, v in host.items() if k not in "qk"}
        own = _shared_copies(host["q"], host["k"], device)
        others = _call(case, {"q": own[0], "k": own[1], **fresh}, own)
        for index, (first, second) in enumerate(zip(results, others, strict=True)):
            if not same_bytes(first, second):
                return f"result {index} differs in place"
    return verify(case, host, tuple(t.cpu() for t in results))


def _shared_copies(q: Tensor, k: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """Copies with strides kept, in one memory if they were."""
    made: dict[int, Tensor] = {}
    copies = []
    for t in (q, k):
        at = t.untyped_storage().data_ptr()
        if at not in made:
            made[at] = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).clone().to(device)
        copies.append(made[at].as_strided(t.shape, t.stride(), t.storage_offset()))
    return copies[0], copies[1]


def verify(case: QkCase, host: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results."""
    c = case.config
    if c.op in (SUMS, MEANS):
        totals = []
        for side in "qk":
            x = host[side].double()
            total = bounds.squares(x) / (1 if c.op == SUMS else x.shape[-1])
            off = total * compare.FLOAT32_ERROR + bounds.FLOOR * (x.shape[-1] if c.op == SUMS else 2)
            totals.append(bounds.around(total, off))
        low, high = (torch.cat(ends, -1) for ends in zip(*totals, strict=True))
        return compare.between(results[0], low, high)
    for index, side in enumerate("qk"):
        wrong = _verify_side(case, host, side, index, results[index])
        if wrong is not None:
            return f"{side}: {wrong}"
    return None


def _has_heads(case: QkCase) -> bool:
    """Whether the second last dimension counts heads: so it is where q and k have one head each and nothing says otherwise."""
    alone = case.nq == case.nk == case.config.head and len(case.lead) > 1 and case.config.positions is None
    return case.heads or alone


def _verify_side(case: QkCase, host: dict[str, Any], side: str, index: int, actual: Tensor) -> str | None:
    c, x = case.config, host[side]
    if c.per_head and not _has_heads(case):
        x, actual = (t.unflatten(-1, (-1, c.head)) for t in (x, actual))
    h = x.double()
    if c.op == APPLY:
        rs = bounds.root(host["qk_var"][..., index : index + 1].double() + bounds.added(case.eps))
    else:
        rs = bounds.reciprocal_rms(h, case.eps)
    g = bounds.weight(host[f"gamma_{side}"], case.offset)
    y = bounds.normed(h, rs, g, c.x if c.rounding == "hf" else None, given=c.op == APPLY)
    if c.style and actual.numel():

        def turn(t: Tensor) -> oracle.Rotated:
            flat = t.flatten(-2) if c.per_head else t
            turned = oracle.rotate(
                flat, host["freqs"], c.head, positions=host.get("positions"), style=c.style, dim=c.dim
            )
            return oracle.Rotated(*(part.reshape(t.shape) for part in turned))

        y = bounds.rotated(y, turn)
    return y.stored(actual)
