"""Cases of the QK-RMSNorm ops: inputs, calls and verification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from onepass.formats import E4M3FN, E4M3FNUZ, FLOATS, FP8_FORMATS, ScaleRule
from onepass.ops.qk_norm import reference as qk_norm_reference
from onepass.ops.qk_norm.op import apply_qk_rms_norm, qk_rms_norm, row_mean_of_squares_qk, row_sum_of_squares_qk
from onepass.rope import Rope
from onepass.testing import compare
from onepass.testing.tensors import lay_out, moved, set_special, short_dtype
from tests.oracle import bounds
from tests.oracle.case import GPU_ONLY, INTERPRETED_COLUMNS, Values, case_name, labelled
from tests.oracle.interpreter import interpreting
from tests.oracle.memory import poisoned_like, to_cpu

BF16, F16, F32 = FLOATS
FP8, FNUZ = E4M3FN.dtype, E4M3FNUZ.dtype
GIVEN_SCALES = (0.0218437, 0.0071093)
"""Of q and of k. Not close to the reciprocals of small integers: bfloat16 values would have multiples at the ties of fp8."""
SUMS, MEANS, APPLY, FUSED = OPS = (
    "row_sum_of_squares_qk",
    "row_mean_of_squares_qk",
    "apply_qk_rms_norm",
    "qk_rms_norm",
)
POSITIONS = 40
"""Rows of freqs."""

QkLayout = Literal["contiguous", "packed", "misaligned", "transposed", "reversed", "expanded", "heads"]
"""packed: slices of one qkv tensor; heads: [..., H, D] stored as [..., H, tokens, D]."""


@dataclass(frozen=True)
class Turn:
    """A rotation: style, columns that turn, columns per head, dtype of positions (None: the token's index)."""

    style: str
    dim: int
    head: int
    positions: torch.dtype | None = None

    def __str__(self) -> str:
        at = f"@{short_dtype(self.positions)}" if self.positions else ""
        return f"{self.style}:{self.dim}/{self.head}{at}"


@dataclass(frozen=True, eq=False)
class QkCase:
    """One call: shapes, dtypes, heads, rotation, options, memory layout and the kind of values."""

    op: str
    group: str
    lead: tuple[int, ...]
    nq: int
    nk: int
    x: torch.dtype = BF16
    gamma: torch.dtype = F32
    gamma_k: torch.dtype | None = None
    out: torch.dtype | None = None
    head: int = 0
    turn: Turn | None = None
    layout: QkLayout = "contiguous"
    values: Values = "normal"
    given_scales: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def interpretable(self) -> bool:
        """See `Check`."""
        return self.group not in GPU_ONLY and max(self.nq, self.nk) <= INTERPRETED_COLUMNS

    @property
    def name(self) -> str:
        """See `Check`."""
        shape = f"{'x'.join(map(str, self.lead)) or 'one'}x({self.nq}+{self.nk})"
        other = f",{short_dtype(self.gamma_k)}" if self.gamma_k is not None else ""
        gamma = f"gamma={short_dtype(self.gamma)}{other}" if self.op in (APPLY, FUSED) else ""
        out, head, rope = labelled("out", self.out), labelled("head", self.head or None), labelled("rope", self.turn)
        options = (f"{k}={v}" for k, v in self.options.items())
        facts = (gamma, out, "given scales" if self.given_scales else "", head, rope, *options)
        return case_name(self.group, shape, short_dtype(self.x), *facts, self.layout, self.values)


I32, I64 = torch.int32, torch.int64


# --- inputs and calls -----------------------------------------------------------------------------------------------


def inputs(case: QkCase, device: str, seed: int = 0) -> dict[str, Any]:
    """Tensors and options by the names of `qk_rms_norm`; ``qk_var`` where statistics are given."""
    generator = torch.Generator().manual_seed(seed + case.nq)
    q, k = (torch.randn(*case.lead, n, generator=generator).to(case.x) for n in (case.nq, case.nk))
    if case.values == "special":
        set_special(q)
        set_special(k)
        k = k.roll(1, 0)
    found: dict[str, Any] = {"q": q, "k": k}
    if case.op in (APPLY, FUSED):
        widths = (case.head, case.head) if case.head else (case.nq, case.nk)
        dtypes = (case.gamma, case.gamma_k or case.gamma)
        for name, n, dtype in zip(("gamma_q", "gamma_k"), widths, dtypes, strict=True):
            found[name] = (1 + 0.25 * torch.randn(n, generator=generator)).to(dtype)
    if case.op == APPLY:
        found["qk_var"] = torch.cat([qk_norm_reference.mean_of_squares(t) for t in (q, k)], -1).float()
    found["q"], found["k"] = _laid_out(case, q, k)
    if case.turn is not None:
        angle = torch.rand(POSITIONS, case.turn.dim // 2, generator=generator) * 6.3
        found["freqs"] = torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)
        if case.turn.positions is not None:
            # some lie outside freqs and use its first or last row
            at = torch.randint(-2, POSITIONS + 2, case.lead, generator=generator)
            found["positions"] = at.to(case.turn.positions)
    if case.given_scales:
        found["q_scale"], found["k_scale"] = (torch.tensor(scale) for scale in GIVEN_SCALES)
    return moved(found, device) | case.options


def _laid_out(case: QkCase, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    if case.layout == "packed":
        qkv = torch.cat([q, k, k], -1)
        return qkv[..., : case.nq], qkv[..., case.nq : case.nq + case.nk]
    if case.layout == "heads":
        return _apart(q, case.head), _apart(k, case.head)
    if case.layout == "contiguous":
        return q, k
    return lay_out(q, case.layout), lay_out(k, case.layout)


def _apart(t: Tensor, head: int) -> Tensor:
    """[..., H, D], heads before tokens in memory."""
    heads: Tensor = t.unflatten(-1, (-1, head))
    return heads.transpose(-3, -2).contiguous().transpose(-3, -2)


def call(case: QkCase, arguments: dict[str, Any], out: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """The public function's results as a tuple, written to ``out`` if given."""
    given = dict(arguments)
    if case.op in (SUMS, MEANS):
        function = row_sum_of_squares_qk if case.op == SUMS else row_mean_of_squares_qk
        return (function(**given, out=None if out is None else out[0]),)
    freqs, positions = given.pop("freqs", None), given.pop("positions", None)
    if case.turn is not None:
        head = None if case.head else case.turn.head
        given["rope"] = Rope(freqs, positions, case.turn.style, case.turn.dim, head)  # type: ignore[arg-type]
    if case.op == FUSED:
        if out is not None:
            given["out"] = out[:2]
            given["scale_out"] = out[2:] or None
        elif case.out is not None:
            given["out_dtype"] = case.out
        return qk_rms_norm(per_head=bool(case.head), **given)
    q, k = given["q"], given["k"]
    made = out or tuple(torch.empty(t.shape, dtype=case.out or t.dtype, device=t.device) for t in (q, k))
    given["epsilon"] = given.pop("eps", 1e-6)
    given |= {"epsilon_k": given.pop("eps_k")} if "eps_k" in given else {}
    apply_qk_rms_norm(made[0], made[1], **given)
    return made


def zeroable(case: QkCase) -> list[tuple[int, str]]:
    """Position and name of each result."""
    if case.op in (SUMS, MEANS):
        return [(0, "out")]
    names = ("q_out", "k_out", "q_scale_out", "k_scale_out")
    own = case.out in FP8_FORMATS and not case.given_scales
    return list(enumerate(names if own else names[:2]))


def variants(case: QkCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[tuple[str, Any]]:
    """Other ways to make the same call: into poisoned outputs and, where possible, in place."""
    if not interpreting():  # there the first call was the same launch into poisoned memory
        yield "when written into the caller's tensor", call(case, arguments, tuple(map(poisoned_like, results)))
    if case.op in (APPLY, FUSED) and case.out is None and case.layout != "expanded":
        fresh = moved(arguments)
        yield "in place", call(case, fresh, (fresh["q"], fresh["k"]))


# --- verification ---------------------------------------------------------------------------------------------------


def verify(case: QkCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results."""
    host = to_cpu(arguments)
    split = case.head if case.layout != "heads" else 0
    return verify_call(case.op, host, tuple(t.cpu() for t in results), bool(case.head), split, case.turn)


def verify_call(
    op: str, host: dict[str, Any], results: tuple[Tensor, ...], per_head: bool, split: int, turn: Turn | None
) -> str | None:
    """The same for any call: every value lies between bounds. ``split``: columns per head, if heads have no dimension."""
    if op in (SUMS, MEANS):
        totals = []
        for x in (host["q"].double(), host["k"].double()):
            total = bounds.squares(x) / (1 if op == SUMS else x.shape[-1])
            off = total * bounds.FLOAT32_ERROR + bounds.FLOOR * (x.shape[-1] if op == SUMS else 2)
            totals.append(bounds.around(total, off))
        low, high = (torch.cat(ends, -1) for ends in zip(*totals, strict=True))
        return compare.between(results[0], low, high)
    for index, (side, actual) in enumerate(zip("qk", results, strict=False)):
        x, eps = host[side], host.get("eps", 1e-6)
        if side == "k" and host.get("eps_k") is not None:
            eps = host["eps_k"]
        if split:
            x, actual = (t.unflatten(-1, (-1, split)) for t in (x, actual))
        rs = bounds.reciprocal_rms(x.double(), eps)
        if op == APPLY:
            rs = bounds.root(host["qk_var"][..., index : index + 1].double() + bounds.added(eps))
        g = bounds.weight(host[f"gamma_{side}"], host.get("weight_offset", 0.0))
        hf = host.get("rounding") == "hf"
        y = bounds.normed(x.double(), rs, g, x.dtype if hf else None, overflow=op == APPLY)
        if turn is not None and actual.numel():
            y = bounds.rotated(y, partial(_rotated, host, per_head, turn))
        if actual.dtype in FP8_FORMATS:
            own = results[index + 2] if len(results) > 2 else None
            scale = host[f"{side}_scale"] if own is None else own.reshape(*x.shape[:-1], 1)
            rounded = x.dtype if hf and turn is not None else None
            wrong = code_fault(y if rounded is None else y.rounded(rounded), actual, scale, own is not None)
        else:
            wrong = y.stored(actual)
        if wrong is not None:
            return f"{side}: {wrong}"
    return None


def code_fault(y: bounds.Bounds, codes: Tensor, scale: Tensor, own: bool) -> str | None:
    """None, or what is wrong with codes of ``y / scale``, and with each row's ``own`` scale."""
    fmt = FP8_FORMATS[codes.dtype]
    if own:
        low, high = (bounds.largest(t, None) for t in bounds.sizes(y))
        wrong = bounds.scales(scale, low, high, None, fmt.max, ScaleRule("row", F32))
        if wrong is not None:
            return wrong
    divisor = scale.double()
    ends = []
    for end in y:
        value = torch.where(divisor == 0, torch.where(end.isnan(), torch.nan, 0.0), end / divisor)
        ends.append(torch.where(divisor.isnan(), torch.nan, value))
    return compare.between(codes, *bounds.product_error(*ends), fmt)


def _rotated(host: dict[str, Any], per_head: bool, turn: Turn, t: Tensor) -> qk_norm_reference.Rotated:
    flat, at = t.flatten(-2) if per_head else t, host.get("positions")
    found = qk_norm_reference.rotate(flat, host["freqs"], turn.head, positions=at, style=turn.style, dim=turn.dim)
    return qk_norm_reference.Rotated(*(part.reshape(t.shape) for part in found))
