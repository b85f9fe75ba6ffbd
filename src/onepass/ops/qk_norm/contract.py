"""The contracts of the QK-RMSNorm ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.contract import (
    ROUNDING,
    WEIGHT_OFFSET,
    Arg,
    Contract,
    Option,
    Out,
    Rule,
    columns,
    eps,
    eps_of_k,
    output_dtype,
)
from ...formats import FLOATS, FP8_FORMATS
from ...rope import STYLES
from .launch import MAX_HEAD


def _heads_hint(symbols: dict[str, Any], k: Tensor) -> str:
    """Advice if q and k differ only in the second-to-last dimension, as [B, H, D] with different head counts do."""
    lead, width = list(symbols.get("...", ())), symbols.get("Nq")
    if lead and [*lead[:-1], width] == [*k.shape[:-2], *k.shape[-1:]] and k.dim() == len(lead) + 1:
        return f"if the second-to-last dimension counts heads, pass per_head=True and gammas of {width} elements"
    return ""


def _gamma(dims: str, doc: str) -> Arg:
    return Arg(dims, f"weight of {doc}; any float dtype", FLOATS, sample="gamma")


_Q = Arg("... Nq", "queries", FLOATS)
_K = Arg("... Nk", "keys; q's dtype and leading shape", "(q.dtype,)")
_K_OR_HEADS = Arg("... Nk", "keys; q's dtype and leading shape", "(q.dtype,)", hint=_heads_hint)
_INTEGERS = (torch.int32, torch.int64)
_ROPE = {
    "freqs": Arg("P R", "rope: cos and sin of each position, interleaved", (torch.float32,), optional=True),
    "positions": Arg("...", "rope: each token's row of freqs", _INTEGERS, optional=True, layout="any", sample="index"),
}
_ROPE_OPTIONS = {
    "style": Option("str", "half", "rope: which columns form a pair", choices=STYLES),
    "dim": Option("int", None, "rope: rotated columns per head; None: freqs' width", where="dim > 0", optional=True),
    "head_dim": Option("int", None, "rope: columns per head", where="head_dim > 0", optional=True),
}
_OUTPUTS = (*FLOATS, *FP8_FORMATS)
_DTYPE = Option("ScalarType", None, "dtype of the results; None: that of out, or q's", choices=_OUTPUTS, optional=True)
_NORM_OPTIONS = {
    "eps": eps(),
    "weight_offset": WEIGHT_OFFSET,
    "rounding": ROUNDING,
    "out_dtype": _DTYPE,
    "eps_k": eps_of_k("eps_k", "eps"),
}


def _scale(side: str, without: str = "each row has its own scale") -> Arg:
    doc = f"what an fp8 {side} is divided by; None: {without}"
    return Arg("", doc, (torch.float32,), optional=True, layout="any", sample="positive")


_SCALES = {"q_scale": _scale("q"), "k_scale": _scale("k")}
_GIVEN_SCALES = {f"{side}_scale": _scale(side, f"{side}_out is not fp8") for side in "qk"}
_CODES = "out_dtype in FP8"
_OWN_SCALES = f"q_scale is None and {_CODES}"
_BOTH_SCALES = Rule("(q_scale is None) == (k_scale is None)", "k_scale", "be given with q_scale, or both be None")
_SCALE_RULES = (
    _BOTH_SCALES,
    Rule(f"q_scale is None or {_CODES}", "q_scale", "be None unless the results are fp8"),
)


def _scale_out(side: str, dims: str) -> Out:
    doc = f"scale of each row of {side}, or of each head"
    return Out(dims, "torch.float32", doc, f"{side}_scale_out", when=_OWN_SCALES)


_COLUMNS = (columns("Nq", "q"), columns("Nk", "k"))
_SIZES = {"E": "0 if freqs is None else R if dim is None else dim"}
_EVEN_HEADS = f"freqs is None or (0 < D <= {MAX_HEAD} and D % 2 == 0)"
_ROPE_RULES = (
    Rule("freqs is None or P > 0", "freqs", "have at least one row"),
    Rule("freqs is not None or positions is None", "positions", "come with freqs"),
    Rule(_EVEN_HEADS, "head_dim", f"be even and at most {MAX_HEAD} with a rotation"),
    Rule("E % 2 == 0 and (freqs is None or E <= R)", "dim", "be even and at most freqs' width"),
    Rule("E <= D or freqs is None", "dim", "be at most head_dim"),
)
_GAMMA_FITS = "Gq > 0 and Nq % Gq == 0 if per_head else Gq == Nq"
_WHOLE_HEADS = "freqs is None or (Nq % D == 0 and Nk % D == 0)"
_ROTATED = Rule(_WHOLE_HEADS, "head_dim", "divide the columns of q and of k, Nq={Nq} and Nk={Nk}")
_ROUNDS = "once: y = round(rope((x*rs)*(gamma+offset))); hf: y = round(rope(round(round(x*rs)*(gamma+offset))))"
_ROUNDS_CODES = f"{_ROUNDS}; fp8: code = round(y/scale), with a float32 y (hf: y in x's dtype)"
_IN_PLACE: dict[str, tuple[str, ...]] = {"q_out": ("q",), "k_out": ("k",)}
_FUSED_IN_PLACE = {**_IN_PLACE, "q_scale_out": (), "k_scale_out": ()}
_SCOPE = output_dtype(FLOATS)
_FUSED_SCOPE = {**_SCOPE, "FP8": tuple(FP8_FORMATS)}
_APPLIED_SCOPE = {"dtype_of": _SCOPE["dtype_of"], "code_dtype_of": output_dtype(tuple(FP8_FORMATS))["dtype_of"]}
_APPLIED_DTYPE = "(dtype_of if q_scale is None else code_dtype_of)(q_out, q)"
_STATS = "float32, summed in an order that depends only on the number of columns (and, on a CPU, on the dtype)"

ROW_SUM_OF_SQUARES_QK = Contract(
    "row_sum_of_squares_qk",
    args={"q": _Q, "k": _K},
    options={},
    outs={"sums": Out("... 2", "torch.float32", "sum of squares of q's row, and of k's", "out")},
    replaces={},
    rules=_COLUMNS,
    rounding=_STATS,
)

ROW_MEAN_OF_SQUARES_QK = Contract(
    "row_mean_of_squares_qk",
    args={"q": _Q, "k": _K},
    options={},
    outs={"qk_var": Out("... 2", "torch.float32", "mean of squares of q's row, and of k's", "out")},
    replaces={},
    rules=_COLUMNS,
    rounding=f"{_STATS}; the mean is the sum divided by N, correctly rounded",
)

APPLY_QK_RMS_NORM = Contract(
    "apply_qk_rms_norm",
    args={
        "q": _Q,
        "k": _K,
        "gamma_q": _gamma("Nq", "q"),
        "gamma_k": _gamma("Nk", "k"),
        "qk_var": Arg("... 2", "mean of squares of q's row, and of k's", (torch.float32,), sample="positive"),
        **_ROPE,
        **_GIVEN_SCALES,
    },
    options={
        "epsilon": eps("epsilon"),
        "weight_offset": WEIGHT_OFFSET,
        "rounding": ROUNDING,
        "epsilon_k": eps_of_k("epsilon_k", "epsilon"),
        **_ROPE_OPTIONS,
    },
    sizes={"D": "head_dim or 0", **_SIZES},
    outs={
        "q_out": Out("... Nq", _APPLIED_DTYPE, "the norm of q; any float dtype, or with q_scale fp8", "q_out"),
        "k_out": Out("... Nk", "q_out.dtype", "the norm of k; q_out's dtype", "k_out"),
    },
    rules=(
        *_COLUMNS,
        *_ROPE_RULES,
        _ROTATED,
        _BOTH_SCALES,
        Rule(f"q_scale is None or {_APPLIED_DTYPE} != q.dtype", "q_scale", "be None unless q_out is fp8"),
    ),
    replaces=_IN_PLACE,
    scope=_APPLIED_SCOPE,
    rounding=_ROUNDS_CODES,
    carried={"rope": (*_ROPE, *_ROPE_OPTIONS)},
)

QK_RMS_NORM = Contract(
    "qk_rms_norm",
    args={
        "q": _Q,
        "k": _K_OR_HEADS,
        "gamma_q": _gamma("Gq", "q, or of each of its heads"),
        "gamma_k": _gamma("Gk", "k, or of each of its heads"),
        **_ROPE,
        **_SCALES,
    },
    options={
        **_NORM_OPTIONS,
        "per_head": Option("bool", False, "norm each head separately; gammas have one head's columns"),
        **_ROPE_OPTIONS,
    },
    sizes={
        "D": "head_dim or (Gq if per_head else 0)",
        **_SIZES,
        "Hq": "Nq // Gq if per_head and Gq else 1",
        "Hk": "Nk // Gq if per_head and Gq else 1",
    },
    outs={
        "q_out": Out("... Nq", "out_dtype or dtype_of(q_out, q)", "the norm of q", "q_out"),
        "k_out": Out("... Nk", "q_out.dtype", "the norm of k", "k_out"),
        "q_scales": _scale_out("q", "... Hq"),
        "k_scales": _scale_out("k", "... Hk"),
    },
    rules=(
        *_COLUMNS,
        Rule(_GAMMA_FITS, "gamma_q", "have q's number of columns, Nq={Nq} (per_head: divide it)"),
        Rule(
            "Gk == Gq if per_head else Gk == Nk", "gamma_k", "have k's number of columns, Nk={Nk} (per_head: gamma_q's)"
        ),
        Rule("not per_head or Nk % Gq == 0", "k", "have whole heads of gamma_q's length"),
        Rule("not per_head or D == Gq", "head_dim", "be gamma_q's length with per_head"),
        *_ROPE_RULES,
        _ROTATED,
        *_SCALE_RULES,
    ),
    replaces=_FUSED_IN_PLACE,
    scope=_FUSED_SCOPE,
    rounding=_ROUNDS_CODES,
    carried={
        "rope": (*_ROPE, *_ROPE_OPTIONS),
        "out": ("q_out", "k_out"),
        "scale_out": ("q_scale_out", "k_scale_out"),
        "group": (),
    },
)

# q [..., Hq, D] and k [..., Hk, D]: heads have a separate stride
QK_RMS_NORM_HEADS = Contract(
    "qk_rms_norm_heads",
    args={
        "q": Arg("... Hq D", "queries", FLOATS),
        "k": Arg("... Hk D", "keys", "(q.dtype,)"),
        "gamma_q": _gamma("D", "q's heads"),
        "gamma_k": _gamma("D", "k's heads"),
        **_ROPE,
        **_SCALES,
    },
    options={**_NORM_OPTIONS, **_ROPE_OPTIONS},
    sizes=_SIZES,
    outs={
        "q_out": Out("... Hq D", "out_dtype or dtype_of(q_out, q)", "the norm of q", "q_out"),
        "k_out": Out("... Hk D", "q_out.dtype", "the norm of k", "k_out"),
        "q_scales": _scale_out("q", "... Hq 1"),
        "k_scales": _scale_out("k", "... Hk 1"),
    },
    rules=(
        columns("D", "q"),
        Rule("Hq > 0", "q", "have at least one head"),
        Rule("Hk > 0", "k", "have at least one head"),
        Rule("head_dim is None or head_dim == D", "head_dim", "be q's last dimension with per_head"),
        *_ROPE_RULES,
        *_SCALE_RULES,
    ),
    replaces=_FUSED_IN_PLACE,
    scope=_FUSED_SCOPE,
    rounding=_ROUNDS_CODES,
    form_of="qk_rms_norm",
)
