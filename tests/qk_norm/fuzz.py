"""Random calls of the QK-RMSNorm ops: statistics, application, both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from onepass.formats import FLOATS, FP8_FORMATS, ROUNDINGS
from onepass.ops.qk_norm.op import apply_qk_rms_norm, qk_rms_norm, row_mean_of_squares_qk, row_sum_of_squares_qk
from onepass.rope import STYLES, Rope
from onepass.testing.tensors import moved, same_bytes
from tests.oracle import bounds
from tests.qk_norm import checks as qk_norm
from tests.qk_norm.checks import APPLY, FUSED, MEANS, SUMS, Turn, verify_call
from tools.fuzz import draw
from tools.fuzz.draw import NORMAL, PLAIN, Place, Values
from tools.fuzz.steps import InSteps, Steps

OPS = qk_norm.OPS
VALUES = ("values", "gammas", "means", "eps", "eps_k", "scales")
"""Fields of a case that do not affect machine code."""
_FREQS = 24
"""Rows of freqs."""


@dataclass(frozen=True)
class QkConfiguration:
    """What determines the machine code. ``head`` and ``dim`` are of a rotation, ``widths`` lists the widths to draw from."""

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
    given_scales: bool = False
    two_eps: bool = False
    widths: tuple[tuple[int, int], ...] = ()


def configuration(op: str, r: Random, bounded: bool) -> QkConfiguration:
    """A random configuration that the contract allows."""
    c = QkConfiguration(op, r.choice(FLOATS))
    if op in (APPLY, FUSED):
        style = r.choice(("", *STYLES))
        per_head = op == FUSED and r.random() < 0.5
        head = (
            0 if not (style or per_head) else 2 * draw.size(r, 48) if style or r.random() < 0.5 else draw.size(r, 130)
        )
        gamma = r.choice((c.x, *FLOATS))
        c = replace(
            c,
            gamma=gamma,
            gamma_k=r.choice((gamma, gamma, *FLOATS)),
            out=r.choice((None, None, *FLOATS, *FP8_FORMATS)),
            rounding=r.choice(ROUNDINGS),
            per_head=per_head,
            style=style,
            head=head,
            dim=2 * r.randint(1, head // 2) if style else 0,
            positions=r.choice((None, torch.int32, torch.int64)) if style else None,
        )
        given = c.out in FP8_FORMATS and (op == APPLY or r.random() < 0.4)
        c = replace(c, given_scales=given, two_eps=r.random() < 0.25)
    if bounded:
        long = r.choice(((6144, 1024), (4096, 4096), (8193, 100), (20000, 1000)))
        c = replace(c, widths=(_widths(c, r, 300), _widths(c, r, 3000) if c.head else long))
    return c


def _widths(c: QkConfiguration, r: Random, most: int) -> tuple[int, int]:
    if c.head:
        return c.head * r.randint(1, 5), c.head * r.randint(1, 3)
    return draw.size(r, most), draw.size(r, most)


@dataclass(frozen=True)
class QkCase(InSteps):
    """One call; ``heads``: q and k are [..., H, D]."""

    config: QkConfiguration
    lead: tuple[int, ...] = (1,)
    nq: int = 1
    nk: int = 1
    eps: float = 1e-6
    eps_k: float = 1e-6
    scales: tuple[float, float] = (1.0, 1.0)
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
        """Cases that are simpler in one respect."""
        unit = self.config.head or 1
        for lead in ((1,), (2,), self.lead[:-1]):
            yield replace(self, lead=lead)
        for name in ("nq", "nk"):
            n = getattr(self, name) // unit
            for fewer in (1, 2, n // 2, n - 1):
                yield draw.but(self, **{name: unit * max(1, fewer)})
        yield from draw.simpler(self, eps=1e-6, offset=0.0, heads=False, packed=False, means="own")

    def steps(self, device: str) -> Steps:
        """What `run` does."""
        return _steps(self, device)

    @property
    def elements(self) -> int:
        """How much there is to verify."""
        return math.prod(self.lead) * (self.nq + self.nk)


def draw_case(c: QkConfiguration, r: Random) -> QkCase:
    """A call with this configuration."""
    lead = draw.lead(r, 9)
    nq, nk = r.choice(c.widths) if c.widths else _widths(c, r, 3000 if r.random() < 0.01 else 200)
    heads = c.per_head and len(lead) in (1, 2) and r.random() < 0.4
    if c.head == nq == nk and 0 in lead:
        lead = (0,)  # [2, 0, D] would have no heads
    return QkCase(
        c,
        lead,
        nq,
        nk,
        eps=draw.epsilon(r),
        eps_k=draw.epsilon(r),
        scales=(draw_scale(r), draw_scale(r)),
        offset=draw.offset(r),
        heads=heads,
        packed=not heads and r.random() < 0.3,
        values=(draw.values(r), draw.values(r)),
        gammas=(draw.weights(r), draw.weights(r)),
        means=r.choice(("own", "own", "own", "any", "special")),
        places=(draw.place(r), draw.place(r), draw.place(r, inputs=False), draw.place(r, inputs=False)),
    )


def draw_scale(r: Random) -> float:
    """A given scale: usually one that uses the codes, sometimes an extreme one."""
    return r.choice((r.uniform(0.002, 0.1), r.uniform(0.002, 0.1), 0.0, 1e-30, 1e30, float("nan")))


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
    if c.given_scales:
        found["q_scale"], found["k_scale"] = (torch.tensor(scale) for scale in case.scales)
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
        options |= {"out_dtype": c.out} if out is None else {"out": out[:2], "scale_out": out[2:] or None}
        options["eps_k"] = case.eps_k if c.two_eps else None
        return qk_rms_norm(**given, eps=case.eps, per_head=c.per_head, **options)
    made = out or tuple(torch.empty(t.shape, dtype=c.out or c.x, device=t.device) for t in (given["q"], given["k"]))
    options["epsilon_k"] = case.eps_k if c.two_eps else None
    apply_qk_rms_norm(made[0], made[1], **given, epsilon=case.eps, **options)
    return made


def _steps(case: QkCase, device: str) -> Steps:
    c, host = case.config, inputs(case)
    arguments = {k: draw.on_device(v, device) for k, v in host.items()}
    before = draw.snapshot(host)
    results = _call(case, arguments, None)
    rooms = [p.room(t.shape, t.dtype) for p, t in zip(case.places[2:] * 2, results, strict=False)]
    again = _call(case, arguments, tuple(draw.fresh(t, device) for t in rooms))
    others: tuple[Tensor, ...] = ()
    if c.op in (APPLY, FUSED) and c.out in (None, c.x) and not any(p.expanded for p in case.places[:2]):
        fresh = moved(host, device)
        others = _call(case, fresh, (fresh["q"], fresh["k"]))
    inside = draw.named(arguments)
    seen, results, again, others = yield inside.values(), results, again, others
    touched = draw.changed(dict(zip(inside, seen, strict=True)), before)
    if touched is not None:
        return f"{touched} was written"
    for index, (first, second) in enumerate(zip(results, again, strict=True)):
        if not same_bytes(first, second):
            return f"result {index} differs when written into the caller's tensor"
        if draw.spilt(rooms[index], second):
            return f"bytes beside result {index} were written"
    for index, (first, second) in enumerate(zip(results, others, strict=False)):
        if not same_bytes(first, second):
            return f"result {index} differs in place"
    return verify(case, host, results)


def verify(case: QkCase, host: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results."""
    c = case.config
    options = {"eps": case.eps, "weight_offset": case.offset, "rounding": c.rounding}
    options |= {"eps_k": case.eps_k} if c.two_eps else {}
    split = c.head if c.per_head and not _has_heads(case) else 0
    turn = Turn(c.style, c.dim, c.head, c.positions) if c.style else None
    return verify_call(c.op, host | options, results, c.per_head, split, turn)


def _has_heads(case: QkCase) -> bool:
    """Whether the second-last dimension counts heads, which is also the default if q and k have one head each."""
    alone = case.nq == case.nk == case.config.head and len(case.lead) > 1 and case.config.positions is None
    return case.heads or alone
