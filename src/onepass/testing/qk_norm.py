"""Cases of the QK-RMSNorm ops, and what the oracle says of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..formats import FLOATS
from ..ops.qk_norm import apply_qk_rms_norm, qk_rms_norm, row_mean_of_squares_qk, row_sum_of_squares_qk
from ..rope import Rope
from . import compare, oracle
from .case import INTERPRETED_COLUMNS, Values, lay_out, on_device, poison, same_bytes, short_dtype

BF16, F16, F32 = FLOATS
SUMS, MEANS, APPLY, FUSED = "row_sum_of_squares_qk", "row_mean_of_squares_qk", "apply_qk_rms_norm", "qk_rms_norm"
POSITIONS = 40
"""Rows of freqs."""

QkLayout = Literal["contiguous", "packed", "misaligned", "transposed", "reversed", "expanded", "heads"]
"""packed: slices of one qkv tensor; heads: [..., H, D] stored as [..., H, tokens, D]."""


@dataclass(frozen=True)
class Turn:
    """A rotation: style, columns that turn, columns of a head, dtype of positions (None: the token's index)."""

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
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def interpretable(self) -> bool:
        """Whether Triton's interpreter gets through it in seconds."""
        return self.group not in ("large", "families") and max(self.nq, self.nk) <= INTERPRETED_COLUMNS

    @property
    def name(self) -> str:
        """Readable and unique within the op."""
        lead = "x".join(map(str, self.lead)) or "one"
        parts = [f"{lead}x({self.nq}+{self.nk})", short_dtype(self.x)]
        if self.op in (APPLY, FUSED):
            other = f",{short_dtype(self.gamma_k)}" if self.gamma_k is not None else ""
            parts.append(f"gamma={short_dtype(self.gamma)}{other}")
        if self.out is not None:
            parts.append(f"out={short_dtype(self.out)}")
        if self.head:
            parts.append(f"head={self.head}")
        if self.turn is not None:
            parts.append(f"rope={self.turn}")
        parts += [f"{k}={v}" for k, v in self.options.items()]
        parts += [part for part in (self.layout, self.values) if part not in ("contiguous", "normal")]
        return f"{self.group}: {' '.join(parts)}"


WIDTHS = {
    "short": ((1, 1), (31, 33), (127, 129), (200, 512)),
    "model": ((6144, 1024), (4096, 4096), (1536, 256), (896, 128)),
    "odd": ((1025, 4097), (7919, 13)),
    "wide": ((12288, 1024), (16384, 2048), (20000, 1000), (1000, 131072)),
}
"""model: MiniMax-M2 is 6144 + 1024, of eight ranks 1536 + 256 is one of four; OLMo-2 is 4096 + 4096."""


def _common_cases(op: str) -> Iterator[QkCase]:
    for group, widths in WIDTHS.items():
        for nq, nk in widths:
            yield QkCase(op, group, (5,), nq, nk)
    for layout in ("packed", "misaligned", "transposed", "expanded"):
        for nq, nk in ((200, 512), (6144, 1024)):
            yield QkCase(op, "layouts", (3, 4), nq, nk, layout=layout)
    yield QkCase(op, "layouts", (3, 4), 20000, 1000, layout="misaligned")
    yield QkCase(op, "layouts", (2, 3, 4), 200, 512, layout="transposed")
    yield QkCase(op, "levels", (2, 3, 2, 3), 200, 512, layout="reversed")
    yield QkCase(op, "ranks", (), 200, 512)
    yield QkCase(op, "ranks", (2, 1, 3, 2), 200, 512)
    yield QkCase(op, "empty", (0,), 200, 512)
    yield QkCase(op, "large", (1024,), 6144, 1024)
    for x in FLOATS:
        yield QkCase(op, "values", (9,), 640, 128, x, values="special")
    yield QkCase(op, "values", (9,), 20000, 1000, values="special")


def _stats_cases(op: str) -> Iterator[QkCase]:
    yield from _common_cases(op)
    for x in FLOATS:
        yield QkCase(op, "dtypes", (4,), 640, 128, x)


def _norm_cases(op: str) -> Iterator[QkCase]:
    yield from _common_cases(op)
    for x in FLOATS:
        for gamma in dict.fromkeys((x, F32)):
            for rounding in ("once", "hf"):
                yield QkCase(op, "dtypes", (3,), 640, 128, x, gamma, options={"rounding": rounding})
        for gamma in FLOATS:
            if gamma not in (x, F32):
                for rounding in ("once", "hf"):
                    yield QkCase(op, "gammas", (3,), 640, 128, x, gamma, options={"rounding": rounding})
                yield QkCase(op, "gammas", (5,), 6144, 1024, x, gamma, turn=Turn("half", 64, 128, torch.int64))
        yield QkCase(op, "gammas", (3,), 640, 128, x, BF16, gamma_k=F16)
        yield QkCase(op, "gammas", (3, 4), 20000, 200, x, x, gamma_k=F32 if x != F32 else BF16, layout="misaligned")
        for out in FLOATS:
            if out != x:
                yield QkCase(op, "dtypes", (3,), 640, 128, x, out=out)
    yield QkCase(op, "dtypes", (3,), 640, 128, BF16, out=F32, options={"rounding": "hf"})
    yield QkCase(op, "options", (4,), 640, 128, options={"weight_offset": 1.0})
    yield QkCase(op, "options", (4,), 640, 128, options={"eps": 1e-3})
    yield QkCase(op, "options", (9,), 640, 128, options={"eps": 0.0}, values="special")
    for style in ("half", "interleaved"):
        yield QkCase(op, "rope", (5,), 6144, 1024, turn=Turn(style, 64, 128, torch.int64))
        yield QkCase(op, "rope", (2, 3), 512, 128, turn=Turn(style, 64, 128))
        yield QkCase(op, "rope", (2, 3), 480, 96, F16, turn=Turn(style, 40, 96, torch.int32), layout="packed")
        yield QkCase(op, "rope", (2, 3), 240, 80, F32, F32, turn=Turn(style, 80, 80, torch.int32), layout="misaligned")
        yield QkCase(op, "rope", (3,), 512, 128, turn=Turn(style, 128, 128, torch.int32), options={"rounding": "hf"})
        yield QkCase(op, "rope", (3,), 20160, 192, turn=Turn(style, 64, 96, torch.int32))
        yield QkCase(op, "rope", (3,), 256, 128, F32, turn=Turn(style, 2, 128, torch.int64), out=BF16)
        yield QkCase(op, "rope", (9,), 512, 128, turn=Turn(style, 64, 128), values="special")
    yield QkCase(op, "rope", (), 512, 128, turn=Turn("half", 64, 128))
    for positions in (None, torch.int64):
        turn = Turn("half", 64, 128, positions)
        yield QkCase(op, "levels", (2, 3, 2, 2, 3), 512, 128, turn=turn, layout="reversed")


def _head_cases() -> Iterator[QkCase]:
    op = FUSED
    for x in FLOATS:
        for rounding in ("once", "hf"):
            yield QkCase(op, "heads", (7,), 4 * 128, 2 * 128, x, x, head=128, options={"rounding": rounding})
        for gamma in FLOATS:
            if gamma not in (x, F32):
                turn = Turn("half", 128, 128, torch.int64)
                yield QkCase(op, "heads", (7,), 4 * 128, 2 * 128, x, gamma, head=128, turn=turn)
    yield QkCase(op, "heads", (7,), 4 * 128, 2 * 128, BF16, BF16, gamma_k=F32, head=128, layout="packed")
    for d in (1, 33, 64, 96, 1100):
        yield QkCase(op, "heads", (3,), 5 * d, d, head=d)
    yield QkCase(op, "heads", (5,), 4096, 1024, gamma=BF16, head=128, layout="packed")
    yield QkCase(op, "heads", (2, 3), 4 * 64, 2 * 64, head=64, layout="heads")
    yield QkCase(op, "heads", (2, 3), 4 * 64, 2 * 64, head=64, layout="transposed")
    yield QkCase(op, "levels", (2, 3, 2, 3), 4 * 64, 2 * 64, head=64, layout="reversed")
    yield QkCase(op, "heads", (4,), 4 * 64, 2 * 64, head=64, options={"weight_offset": 1.0, "eps": 1e-5}, out=F32)
    yield QkCase(op, "heads", (9,), 4 * 96, 96, head=96, values="special")
    yield QkCase(op, "heads", (2,), 2 * 20000, 20000, head=20000)
    for style in ("half", "interleaved"):
        turn = Turn(style, 128, 128, torch.int64)
        yield QkCase(op, "heads", (5,), 4096, 1024, gamma=BF16, head=128, turn=turn, layout="packed")
        yield QkCase(op, "heads", (2, 5), 4 * 96, 96, head=96, turn=Turn(style, 48, 96))
        yield QkCase(
            op, "heads", (2, 3), 4 * 64, 2 * 64, head=64, turn=Turn(style, 64, 64, torch.int32), layout="heads"
        )
        yield QkCase(
            op, "heads", (3,), 4 * 64, 64, gamma=BF16, head=64, turn=Turn(style, 64, 64), options={"rounding": "hf"}
        )
    turn = Turn("half", 128, 128, torch.int64)
    yield QkCase(op, "large", (2048,), 4096, 1024, gamma=BF16, head=128, turn=turn, layout="packed")


CASES = (*_stats_cases(SUMS), *_stats_cases(MEANS), *_norm_cases(APPLY), *_norm_cases(FUSED), *_head_cases())


# --- inputs ---------------------------------------------------------------------------------------------------------


def inputs(case: QkCase, device: str, seed: int = 0) -> dict[str, Any]:
    """Tensors and options by the names of `qk_rms_norm`; ``qk_var`` where statistics are given."""
    generator = torch.Generator().manual_seed(seed + case.nq)
    q, k = (torch.randn(*case.lead, n, generator=generator).to(case.x) for n in (case.nq, case.nk))
    if case.values == "special":
        _set_special(q)
        _set_special(k)
        k = k.roll(1, 0)
    found: dict[str, Any] = {"q": q, "k": k}
    if case.op in (APPLY, FUSED):
        widths = (case.head, case.head) if case.head else (case.nq, case.nk)
        dtypes = (case.gamma, case.gamma_k or case.gamma)
        for name, n, dtype in zip(("gamma_q", "gamma_k"), widths, dtypes, strict=True):
            found[name] = (1 + 0.25 * torch.randn(n, generator=generator)).to(dtype)
    if case.op == APPLY:
        found["qk_var"] = torch.cat([oracle.mean_of_squares(t) for t in (q, k)], -1).float()
    found["q"], found["k"] = _laid_out(case, q, k)
    if case.turn is not None:
        angle = torch.rand(POSITIONS, case.turn.dim // 2, generator=generator) * 6.3
        found["freqs"] = torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)
        if case.turn.positions is not None:
            # some lie outside freqs and take its first or last row
            found["positions"] = torch.randint(-2, POSITIONS + 2, case.lead, generator=generator).to(
                case.turn.positions
            )
    return {name: on_device(t, device) for name, t in found.items()} | case.options


def _set_special(x: Tensor) -> None:
    x[0] = 0.0
    x[1] = -0.0
    x[2, 5] = torch.nan
    x[3, 7] = torch.inf
    x[4, x.shape[1] - 1] = -torch.inf
    x[5] *= 1e-3
    x[6] *= 1e4
    x[7] = 0.0
    x[7, 3] = -2.0


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


# --- calls ----------------------------------------------------------------------------------------------------------


def call(case: QkCase, arguments: dict[str, Any], out: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """The public function's results as a tuple, in ``out`` where given."""
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
            given["out"] = out
        elif case.out is not None:
            given["out_dtype"] = case.out
        return qk_rms_norm(per_head=bool(case.head), **given)
    q, k = given["q"], given["k"]
    made = out or tuple(
        torch.empty_like(t, dtype=case.out or t.dtype, memory_format=torch.contiguous_format) for t in (q, k)
    )
    given["epsilon"] = given.pop("eps", 1e-6)
    apply_qk_rms_norm(made[0], made[1], **given)
    return made


def zeroable(case: QkCase) -> list[tuple[int, str]]:
    """Position and name of each result."""
    return [(0, "out")] if case.op in (SUMS, MEANS) else [(0, "q_out"), (1, "k_out")]


def verify(case: QkCase, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results."""
    host = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in arguments.items()}
    results = tuple(t.cpu() for t in results)
    means = [oracle.mean_of_squares(host[side]) for side in "qk"]
    if case.op in (SUMS, MEANS):
        counts = [n if case.op == SUMS else 1 for n in (case.nq, case.nk)]
        return compare.floats(results[0], torch.cat([m * n for m, n in zip(means, counts, strict=True)], -1))
    for index, side in enumerate("qk"):
        mean = host["qk_var"][..., index : index + 1] if case.op == APPLY else None
        wrong = _verify_norm(case, host, side, mean, results[index])
        if wrong is not None:
            return f"{side}: {wrong}"
    return None


def _verify_norm(case: QkCase, host: dict[str, Any], side: str, mean: Tensor | None, actual: Tensor) -> str | None:
    x, hf = host[side], host.get("rounding") == "hf"
    if case.head and case.layout != "heads":
        x, actual = (t.unflatten(-1, (-1, case.head)) for t in (x, actual))
    options = {"weight_offset": host.get("weight_offset", 0.0), "rounding": host.get("rounding", "once")}
    mean = oracle.mean_of_squares(x) if mean is None else mean
    exact = oracle.apply_rms_norm(x, host[f"gamma_{side}"], mean, host.get("eps", 1e-6), **options)
    error, size = compare.FLOAT32_ERROR, None
    if case.turn is not None:
        flat, turned = (exact.flatten(-2) if case.head else exact), case.turn
        turned_exact = oracle.rotate(
            flat, host["freqs"], turned.head, positions=host.get("positions"), style=turned.style, dim=turned.dim
        )
        exact, size = (t.reshape(exact.shape) for t in turned_exact)
        if hf:  # what is rotated was rounded, and may have been the other way
            error += 2 * torch.finfo(x.dtype).eps
    elif hf and actual.dtype == torch.float32:
        actual = actual.to(x.dtype)  # what is stored is a number of x's dtype
    return compare.floats(actual, exact, ulps=2 if hf else 1, share=0.998 if hf else 0.999, error=error, size=size)


def run(case: QkCase, device: str, seed: int = 0) -> str | None:
    """Run a case, again into poisoned outputs and, where it can be, in place; None, or what is wrong."""
    arguments = inputs(case, device, seed)
    results = call(case, arguments)
    wrong = verify(case, arguments, results)
    if wrong is not None:
        return wrong
    again = tuple(poison(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)) for t in results)
    ways = {"written into the caller's tensor": call(case, arguments, again)}
    if case.op in (APPLY, FUSED) and case.out is None and case.layout != "expanded":
        fresh = inputs(case, device, seed)
        ways["in place"] = call(case, fresh, (fresh["q"], fresh["k"]))
    for how, others in ways.items():
        for index, (first, second) in enumerate(zip(results, others, strict=True)):
            if not same_bytes(first, second):
                return f"result {index} differs when {how}"
    return None
