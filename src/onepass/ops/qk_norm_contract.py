"""What the QK-RMSNorm ops take and return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contract.declaration import Arg, Contract, Option, Out, Rule
from ..formats import FLOATS, ROUNDINGS
from ..rope import STYLES
from ..specs.qk_norm import MAX_HEAD

_Q = Arg("... Nq", "queries", FLOATS)


def _heads_hint(known: dict[str, Any], k: Tensor) -> str:
    """Advice where q and k differ in the second last dimension alone, as [B, H, D] of different numbers of heads do."""
    lead, columns = list(known.get("...", ())), known.get("Nq")
    if lead and [*lead[:-1], columns] == [*k.shape[:-2], *k.shape[-1:]] and k.dim() == len(lead) + 1:
        return f"if the second last dimension counts heads, pass per_head=True and gammas of {columns} elements"
    return ""


_K = Arg("... Nk", "keys; q's dtype and leading shape", "(q.dtype,)")
_K_OR_HEADS = Arg("... Nk", "keys; q's dtype and leading shape", "(q.dtype,)", hint=_heads_hint)
_FREQS = Arg("P R", "rope: cos and sin of each position, interleaved", (torch.float32,), optional=True)
_INTEGERS = (torch.int32, torch.int64)
_POSITIONS = Arg("...", "rope: the row of freqs of each token", _INTEGERS, optional=True, layout="any", sample="index")
_EPS = Option("float", 1e-6, "added to the mean of squares", where="0 <= eps <= 3.4e38")
_OFFSET = Option("float", 0.0, "added to gamma in float32", where="-3.4e38 <= weight_offset <= 3.4e38")
_ROUNDING = Option("str", "once", "where values are rounded", choices=ROUNDINGS)
_STYLE = Option("str", "half", "rope: which columns are a pair", choices=STYLES)
_DIM = Option("int", None, "rope: columns of a head that turn; None: freqs' width", where="dim > 0", optional=True)
_HEAD = Option("int", None, "rope: columns of a head", where="head_dim > 0", optional=True)
_DTYPE = Option("ScalarType", None, "dtype of the results; None: that of out, or q's", choices=FLOATS, optional=True)
_COLUMNS = (
    Rule("0 < Nq <= 16777216", "q", "have 1 to 2**24 columns"),
    Rule("0 < Nk <= 16777216", "k", "have 1 to 2**24 columns"),
)
_ROPE = {"freqs": _FREQS, "positions": _POSITIONS}
_SIZES = {"E": "0 if freqs is None else R if dim is None else dim"}
_ROPE_RULES = (
    Rule("freqs is None or P > 0", "freqs", "have at least one row"),
    Rule("freqs is not None or positions is None", "positions", "come with freqs"),
    Rule(f"freqs is None or (0 < D <= {MAX_HEAD} and D % 2 == 0)", "head_dim", f"be even and at most {MAX_HEAD} with a rotation"),
    Rule("E % 2 == 0 and (freqs is None or E <= R)", "dim", "be even and at most freqs' width"),
    Rule("E <= D or freqs is None", "dim", "be at most head_dim"),
)  # fmt: skip
_ROTATED = Rule(
    "freqs is None or (Nq % D == 0 and Nk % D == 0)",
    "head_dim",
    "divide the columns of q and of k, Nq={Nq} and Nk={Nk}",
)
_ROUNDS = "once: y = round(rope((x*rs)*(gamma+offset))); hf: y = round(rope(round(round(x*rs)*(gamma+offset))))"


def _dtype_of(out: Tensor | None, q: Tensor) -> torch.dtype:
    """The dtype of the caller's output where it is one that results can have."""
    return out.dtype if isinstance(out, Tensor) and out.dtype in FLOATS else q.dtype


_IN_PLACE: dict[str, tuple[str, ...]] = {"q_out": ("q",), "k_out": ("k",)}
_SCOPE = {"dtype_of": _dtype_of}
_STATS = "float32, added in an order that depends on the number of columns alone (on a CPU: and on the dtype)"

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
        "gamma_q": Arg("Nq", "weight of q; any float dtype", FLOATS, sample="gamma"),
        "gamma_k": Arg("Nk", "weight of k; any float dtype", FLOATS, sample="gamma"),
        "qk_var": Arg("... 2", "mean of squares of q's row, and of k's", (torch.float32,), sample="positive"),
        **_ROPE,
    },
    options={
        "epsilon": Option("float", 1e-6, "added to the mean of squares", where="0 <= epsilon <= 3.4e38"),
        "weight_offset": _OFFSET,
        "rounding": _ROUNDING,
        "style": _STYLE,
        "dim": _DIM,
        "head_dim": _HEAD,
    },
    sizes={"D": "head_dim or 0", **_SIZES},
    outs={
        "q_out": Out("... Nq", "dtype_of(q_out, q)", "the norm of q; any float dtype", "q_out"),
        "k_out": Out("... Nk", "q_out.dtype", "the norm of k; q_out's dtype", "k_out"),
    },
    rules=(*_COLUMNS, *_ROPE_RULES, _ROTATED),
    replaces=_IN_PLACE,
    scope=_SCOPE,
    rounding=_ROUNDS,
    carried={"rope": ("freqs", "positions", "style", "dim", "head_dim")},
)

QK_RMS_NORM = Contract(
    "qk_rms_norm",
    args={
        "q": _Q,
        "k": _K_OR_HEADS,
        "gamma_q": Arg("Gq", "weight of q, or of each of its heads; any float dtype", FLOATS, sample="gamma"),
        "gamma_k": Arg("Gk", "weight of k, or of each of its heads; any float dtype", FLOATS, sample="gamma"),
        **_ROPE,
    },
    options={
        "eps": _EPS,
        "weight_offset": _OFFSET,
        "rounding": _ROUNDING,
        "out_dtype": _DTYPE,
        "per_head": Option("bool", False, "norm every head by itself; gammas have one head's columns"),
        "style": _STYLE,
        "dim": _DIM,
        "head_dim": _HEAD,
    },
    sizes={"D": "head_dim or (Gq if per_head else 0)", **_SIZES},
    outs={
        "q_out": Out("... Nq", "out_dtype or dtype_of(q_out, q)", "the norm of q", "q_out"),
        "k_out": Out("... Nk", "q_out.dtype", "the norm of k", "k_out"),
    },
    rules=(
        *_COLUMNS,
        Rule("Gq > 0 and Nq % Gq == 0 if per_head else Gq == Nq", "gamma_q", "have q's number of columns, Nq={Nq} (per_head: divide it)"),
        Rule("Gk == Gq if per_head else Gk == Nk", "gamma_k", "have k's number of columns, Nk={Nk} (per_head: gamma_q's)"),
        Rule("not per_head or Nk % Gq == 0", "k", "have whole heads of gamma_q's length"),
        Rule("not per_head or D == Gq", "head_dim", "be gamma_q's length with per_head"),
        *_ROPE_RULES,
        _ROTATED,
    ),
    replaces=_IN_PLACE,
    scope=_SCOPE,
    rounding=_ROUNDS,
    carried={"rope": ("freqs", "positions", "style", "dim", "head_dim"), "out": ("q_out", "k_out"), "group": ()},
)  # fmt: skip

# q [..., Hq, D] and k [..., Hk, D]: heads with a stride of their own
QK_RMS_NORM_HEADS = Contract(
    "qk_rms_norm_heads",
    args={
        "q": Arg("... Hq D", "queries", FLOATS),
        "k": Arg("... Hk D", "keys", "(q.dtype,)"),
        "gamma_q": Arg("D", "weight of q's heads; any float dtype", FLOATS, sample="gamma"),
        "gamma_k": Arg("D", "weight of k's heads; any float dtype", FLOATS, sample="gamma"),
        **_ROPE,
    },
    options={"eps": _EPS, "weight_offset": _OFFSET, "rounding": _ROUNDING, "out_dtype": _DTYPE, "style": _STYLE,
             "dim": _DIM, "head_dim": _HEAD},
    sizes=_SIZES,
    outs={
        "q_out": Out("... Hq D", "out_dtype or dtype_of(q_out, q)", "the norm of q", "q_out"),
        "k_out": Out("... Hk D", "q_out.dtype", "the norm of k", "k_out"),
    },
    rules=(
        Rule("0 < D <= 16777216", "q", "have 1 to 2**24 columns"),
        Rule("Hq > 0", "q", "have at least one head"),
        Rule("Hk > 0", "k", "have at least one head"),
        Rule("head_dim is None or head_dim == D", "head_dim", "be q's last dimension with per_head"),
        *_ROPE_RULES,
    ),
    replaces=_IN_PLACE,
    scope=_SCOPE,
    rounding=_ROUNDS,
)  # fmt: skip
