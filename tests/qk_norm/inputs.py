"""Valid calls of `qk_rms_norm` and of its two halves."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from onepass import Rope, apply_qk_rms_norm, qk_rms_norm, row_mean_of_squares_qk, row_sum_of_squares_qk
from onepass.core.contract import Contract
from onepass.formats import E4M3FN, FP8_FORMATS
from onepass.ops.qk_norm.contract import QK_RMS_NORM_HEADS
from onepass.ops.qk_norm.op import (
    APPLY_QK_RMS_NORM,
    QK_RMS_NORM,
    ROW_MEAN_OF_SQUARES_QK,
    ROW_SUM_OF_SQUARES_QK,
    _has_heads,
)
from tests.inputs import (
    BF16,
    FP8,
    Arguments,
    Build,
    Form,
    Rows,
    Tensors,
    angles,
    both,
    positions,
    sampled_arguments,
    writing,
)


def qk_arguments(contract: Contract, device: str = "cpu", **changes: Any) -> Arguments:
    sizes = {"Nq": 48, "Nk": 16, "Gq": 48, "Gk": 16, "Hq": 3, "Hk": 2, "D": 16, "P": 4, "R": 16}
    optional = ("freqs", "positions") if "freqs" in contract.args else ()
    options = {"weight_offset": 1.0, "dim": 8, "head_dim": 16} if optional else {}
    options |= {name: 0.5 for name in ("eps_k", "epsilon_k") if name in contract.options}
    return sampled_arguments(contract, sizes, (2, 3), device, optional, **(options | changes))


def heads_arguments(device: str = "cpu") -> Arguments:
    """The public function's arguments with a dimension of heads, and outputs."""
    heads = qk_arguments(QK_RMS_NORM_HEADS, device, eps=0.0, weight_offset=0.0) | {"per_head": True}
    in_order = {name: heads.get(name) for name in (*QK_RMS_NORM.args, *QK_RMS_NORM.options)}
    outs = {name: torch.zeros(2, 3, n, 16, dtype=BF16, device=device) for name, n in (("q_out", 3), ("k_out", 2))}
    return {**in_order, **outs, "q_scale_out": None, "k_scale_out": None}


_CONTRACTS = (ROW_SUM_OF_SQUARES_QK, ROW_MEAN_OF_SQUARES_QK, APPLY_QK_RMS_NORM, QK_RMS_NORM, QK_RMS_NORM_HEADS)
BY_CONTRACT: dict[str, Build] = {contract.name: partial(qk_arguments, contract) for contract in _CONTRACTS}

# --- calls of the public functions ----------------------------------------------------------------------------------


def call_sums(values: Arguments) -> Any:
    return row_sum_of_squares_qk(**values)


def call_means(values: Arguments) -> Any:
    return row_mean_of_squares_qk(**values)


def _rope(values: Arguments) -> Arguments:
    parts = [values.pop(name) for name in ("freqs", "positions", "style", "dim", "head_dim")]
    absent = all(part is None for part in (*parts[:2], *parts[3:])) and isinstance(parts[2], str) and parts[2] == "half"
    return values | {"rope": None if absent else Rope(*parts)}


def call_apply(values: Arguments) -> Any:
    return apply_qk_rms_norm(**_rope(dict(values)))


def call_qk(values: Arguments) -> Any:
    values = _rope(dict(values))
    for name in ("out", "scale_out"):
        pair = values.pop(f"q_{name}", None), values.pop(f"k_{name}", None)
        values[name] = None if pair[0] is pair[1] is None else pair
    return qk_rms_norm(**values)


def qk_dtype(values: Arguments) -> Arguments:
    """Codes may be requested by the output's dtype alone."""
    out = values["q_out"]
    codes = values["out_dtype"] is None and isinstance(out, Tensor) and out.dtype in FP8_FORMATS
    return values | {"out_dtype": out.dtype} if codes else values


def qk_contract(values: Arguments) -> Contract:
    heads = values["per_head"] is True and _has_heads(*(values[n] for n in ("q", "k", "gamma_q", "positions")))
    return QK_RMS_NORM_HEADS if heads else QK_RMS_NORM


_QK_FORM: dict[str, Any] = {"contract_of": qk_contract, "derived": qk_dtype}
FORMS: list[Form] = [
    *both("sums", ROW_SUM_OF_SQUARES_QK, partial(qk_arguments, ROW_SUM_OF_SQUARES_QK), call_sums),
    *both("means", ROW_MEAN_OF_SQUARES_QK, partial(qk_arguments, ROW_MEAN_OF_SQUARES_QK), call_means),
    writing(
        "apply",
        APPLY_QK_RMS_NORM,
        partial(qk_arguments, APPLY_QK_RMS_NORM, epsilon=0.5),
        call_apply,
        required=("q_out", "k_out"),
    ),
    *both("qk", QK_RMS_NORM, partial(qk_arguments, QK_RMS_NORM, eps=0.5), call_qk, **_QK_FORM),
    writing("qk, codes", QK_RMS_NORM, partial(qk_arguments, QK_RMS_NORM, eps=0.5, out_dtype=FP8), call_qk, **_QK_FORM),
    Form("qk, heads", QK_RMS_NORM.name, QK_RMS_NORM, heads_arguments, call_qk, **_QK_FORM),
]

# --- any number of rows ---------------------------------------------------------------------------------------------


def _apply(t: Tensors) -> list[Tensor]:
    outs = torch.empty_like(t["q"].contiguous()), torch.empty_like(t["k"].contiguous())
    apply_qk_rms_norm(*outs, t["gamma"], t["gamma_k"], t["var"].abs(), t["q"], t["k"], 1e-6)
    return list(outs)


def _per_head(t: Tensors) -> list[Tensor]:
    rope = Rope(angles(t["q"]), positions(t), "half", 32)
    gamma = t["gamma_k"]
    return list(qk_rms_norm(t["h"], t["k"], gamma, gamma, rope=rope, per_head=True, rounding="hf"))


def _qk_codes(t: Tensors) -> list[Tensor]:
    """Codes and the scale of each head."""
    rope = Rope(angles(t["q"]), positions(t), "interleaved", 32)
    gamma = t["gamma_k"]
    return list(qk_rms_norm(t["h"], t["k"], gamma, gamma, rope=rope, per_head=True, out_dtype=E4M3FN.dtype, eps_k=0.01))


_QK, _GAMMAS = {"q": 0, "k": 96}, {"gamma": (0,), "gamma_k": (96,)}
ROWS: Final = (
    Rows("row_sum_of_squares_qk", _QK, {}, lambda t: [row_sum_of_squares_qk(t["q"], t["k"])]),
    Rows("row_mean_of_squares_qk", _QK, {}, lambda t: [row_mean_of_squares_qk(t["q"], t["k"])]),
    Rows("apply_qk_rms_norm", {**_QK, "var": 2}, _GAMMAS, _apply, own={"var": torch.float32}),
    Rows("qk_rms_norm", _QK, _GAMMAS, lambda t: list(qk_rms_norm(t["q"], t["k"], t["gamma"], t["gamma_k"]))),
    Rows("qk_rms_norm, heads and RoPE", {**_QK, "h": 480}, {"gamma_k": (96,)}, _per_head),
    Rows("qk_rms_norm, codes of heads", {**_QK, "h": 480}, {"gamma_k": (96,)}, _qk_codes),
)
