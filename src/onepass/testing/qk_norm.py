"""The calls of the norms of q and k that `onepass check` makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from ..formats import FLOATS, FP8_FORMATS
from ..ops.qk_norm import reference
from ..ops.qk_norm.op import apply_qk_rms_norm, qk_rms_norm, row_mean_of_squares_qk, row_sum_of_squares_qk
from ..ops.rms_norm.reference import divided, rms_norm
from ..rope import Rope
from .call import ERROR, Case, Expected, Random, bf16, case, f16, f32, scaled_rows
from .tensors import Layout

BF16, F16, F32 = FLOATS
FP8, FNUZ = FP8_FORMATS
_SCALES: Final[dict[str, Any]] = {"q_scale": torch.tensor(0.0218437), "k_scale": torch.tensor(0.0071093)}


def table(rows: int, dim: int) -> Tensor:
    """The cosines and sines of each position, as `Rope` has them."""
    angle = torch.arange(rows)[:, None] * 10000.0 ** -(torch.arange(dim // 2) * 2 / dim)
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)


def positions(dtype: torch.dtype, *lead: int) -> Tensor:
    """Rows of a table of 40; some lie outside and use its first or last one."""
    return (torch.arange(torch.Size(lead).numel()) * 17 % 44 - 2).view(lead).to(dtype)


_TABLE: Final = Rope(table(40, 128))
"""Rotates each token by its index."""


def _apply(epsilon: float = 1e-6, q_out: torch.dtype | None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
    """The op's results in tensors of the dtype ``q_out``."""
    q, k = (torch.empty(t.shape, dtype=q_out or t.dtype, device=t.device) for t in (arguments["q"], arguments["k"]))
    apply_qk_rms_norm(q, k, epsilon=epsilon, **arguments)
    return q, k


FUNCTIONS: Final = {
    "row_sum_of_squares_qk": row_sum_of_squares_qk,
    "row_mean_of_squares_qk": row_mean_of_squares_qk,
    "apply_qk_rms_norm": _apply,
    "qk_rms_norm": qk_rms_norm,
}


def _norm(op: str, group: str, q: Random, k: Random, gammas: tuple[Any, Any] | None = None, **more: Any) -> Case:
    """A case whose gammas have q's dtype, unless passed, and as many elements as a row, or as a head."""
    gamma_q, gamma_k = gammas or (Random(q.dtype, q.shape[-1:]), Random(q.dtype, k.shape[-1:]))
    if op == "apply_qk_rms_norm":
        more["qk_var"] = f32(*q.shape[:-1], 2, positive=True)
    return case(op, group, q=q, k=k, gamma_q=gamma_q, gamma_k=gamma_k, **more)


def _rows(
    draw: Callable[..., Random], lead: tuple[int, ...], columns: tuple[int, int], layout: Layout
) -> tuple[Random, Random]:
    """q and k with these columns."""
    return draw(*lead, columns[0], layout=layout), draw(*lead, columns[1], layout=layout)


CASES: Final[tuple[Case, ...]] = (
    *(
        case(op, group, q=q, k=k)
        for op in ("row_sum_of_squares_qk", "row_mean_of_squares_qk")
        for group, q, k in (
            ("layouts", *_rows(bf16, (3, 4), (200, 512), "transposed")),
            ("layouts", *_rows(bf16, (2, 3, 2, 3), (200, 512), "reversed")),
            ("layouts", *_rows(bf16, (3, 4), (200, 512), "expanded")),
            ("values", f16(9, 640, special=True), f16(9, 128)),
            ("values", f32(9, 640), f32(9, 128, special=True)),
        )
    ),
    _norm("apply_qk_rms_norm", "dtypes", bf16(3, 640), bf16(3, 128), (f32(640), f32(128)), q_out=F16),
    _norm("apply_qk_rms_norm", "dtypes", bf16(3, 640), bf16(3, 128), q_out=F32, rounding="hf", epsilon_k=1e-3),
    _norm("apply_qk_rms_norm", "dtypes", f16(3, 640), f16(3, 128), rounding="once", weight_offset=1.0, epsilon=1e-5),
    _norm("apply_qk_rms_norm", "codes", bf16(3, 640), bf16(3, 128), q_out=FP8, **_SCALES),
    _norm("apply_qk_rms_norm", "wide", *_rows(f16, (3, 4), (20000, 200), "misaligned"), (f16(20000), f32(200))),
    _norm(
        "apply_qk_rms_norm",
        "rope",
        *_rows(f32, (2, 3), (240, 80), "misaligned"),
        (f32(240), bf16(80)),
        rope=Rope(table(40, 80), positions(torch.int32, 2, 3), "half", head_dim=80),
    ),
    _norm("qk_rms_norm", "dtypes", f16(3, 640), f16(3, 128), (bf16(640), f16(128)), eps=1e-5, eps_k=0.5),
    _norm(
        "qk_rms_norm",
        "rope",
        f32(3, 256),
        f32(3, 128),
        out_dtype=BF16,
        rope=Rope(table(40, 2), positions(torch.int64, 3), "interleaved", 2, 128),
    ),
    _norm("qk_rms_norm", "heads", bf16(7, 4, 128), bf16(7, 2, 128), (bf16(128), f32(128)), per_head=True, rope=_TABLE),
    _norm(
        "qk_rms_norm",
        "heads",
        bf16(2, 3, 4, 64, layout="transposed"),
        bf16(2, 3, 2, 64, layout="transposed"),
        (f32(64), f32(64)),
        per_head=True,
        weight_offset=1.0,
        out_dtype=F32,
        rounding="hf",
    ),
    _norm("qk_rms_norm", "codes", f16(3, 640), f16(3, 128), out_dtype=FNUZ, rounding="hf"),
    _norm("qk_rms_norm", "codes", bf16(5, 32, 128), bf16(5, 8, 128), per_head=True, out_dtype=FP8, **_SCALES),
)


def verify(op: str, host: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[Expected]:
    """The statistics of both rows, or their norms, rotated and quantized as asked."""
    rows = {name: host[name].double() for name in "qk"}
    if op.startswith("row_"):
        exact = [x.square().sum(-1, keepdim=True) for x in rows.values()]
        if op == "row_mean_of_squares_qk":
            exact = [total / x.shape[-1] for total, x in zip(exact, rows.values(), strict=True)]
        yield Expected("out", results[0], torch.cat(exact, -1), 1e-6)
        return
    for index, (name, x) in enumerate(rows.items()):
        y, error = normed(host, name, index, x)
        fmt, scale = FP8_FORMATS.get(results[index].dtype), host.get(f"{name}_scale")
        if fmt is None or scale is not None:
            yield Expected(name, results[index], y if scale is None else divided(y, scale), error, fmt)
        else:
            yield from scaled_rows(name, results[index], results[2 + index], y, fmt, error)


def normed(host: dict[str, Any], name: str, index: int, x: Tensor) -> tuple[Tensor, float]:
    """The exact norm of q or k, rotated, and the relative error that roundings on the way may leave."""
    eps = host.get("eps", host.get("epsilon", 1e-6))
    if name == "k" and (own := host.get("eps_k", host.get("epsilon_k"))) is not None:
        eps = own
    gamma, dtype, hf = host[f"gamma_{name}"], host[name].dtype, host.get("rounding") == "hf"
    error = ERROR + (2 * torch.finfo(dtype).eps if hf else 0.0)
    if "qk_var" in host:
        a = x * (host["qk_var"][..., index : index + 1].double() + eps).rsqrt()
        a = a.to(dtype).double() if hf else a
        y = a * (gamma.double() + host.get("weight_offset", 0.0))
        y = y.to(dtype).double() if hf else y
    else:
        y = norm_of(host, host[name], gamma, eps)
    rope = host.get("rope")
    return (y if rope is None else turned(y, rope, host.get("per_head", False))), error


def norm_of(host: dict[str, Any], x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """The norm of the rows of x, rounded as the call asks."""
    rounding = "hf" if host.get("rounding") in ("hf", "reference") else "once"
    return rms_norm(x, gamma, eps, weight_offset=host.get("weight_offset", 0.0), rounding=rounding).y


def turned(y: Tensor, rope: Rope, heads: bool) -> Tensor:
    """``y`` rotated; ``heads``: its heads have a dimension."""
    assert rope.freqs is not None
    flat, head = (y.flatten(-2), y.shape[-1]) if heads else (y, rope.head_dim or y.shape[-1])
    return reference.rotate(flat, rope.freqs, head, positions=rope.positions, style=rope.style, dim=rope.dim).y.view(
        y.shape
    )
