"""The contract of `linear`."""

from __future__ import annotations

from ...core.contract import MAX_COLUMNS, ROUNDING, WEIGHT_OFFSET, Arg, Contract, Option, Out, Rule, eps
from ...formats import FLOATS
from . import weight_scale
from .launch import ACTIVATIONS

_OR_FLOAT32 = "(x.dtype, torch.float32)"
_WEIGHTS = "(x.dtype, torch.float8_e4m3fn, torch.int8)"
_DTYPE = "(out_dtype or x.dtype)"

LINEAR = Contract(
    "linear",
    args={
        "x": Arg("... K", "activations", FLOATS),
        "weight": Arg("N K", "one row per column of y; x's dtype, float8_e4m3fn or int8", _WEIGHTS),
        "gamma": Arg("K", "weight of the norm of x; any float dtype", FLOATS, optional=True, sample="gamma"),
        "residual": Arg("... K", "added to x in float32; x's dtype or float32", _OR_FLOAT32, optional=True),
        "bias": Arg("N", "added to y; any float dtype", FLOATS, optional=True),
        **weight_scale.ARGS,
        "add": Arg("... D", "added to the result; x's dtype or float32", _OR_FLOAT32, optional=True),
    },
    options={
        "eps": eps(),
        "weight_offset": WEIGHT_OFFSET,
        "activation": Option(
            "str", None, "act(the first half of y) * the other half; None: y", choices=ACTIVATIONS, optional=True
        ),
        "rounding": ROUNDING,
        "out_dtype": Option("ScalarType", None, "dtype of y; None: x's", choices=FLOATS, optional=True),
        "static_weight": Option("bool", False, "weights may be read before the previous kernel has ended"),
    },
    outs={
        "y": Out("... I", _DTYPE, "the result", "out"),
        "new_residual": Out("... K", "residual.dtype", "x + residual", "residual_out", when="residual is not None"),
    },
    sizes={"I": "N // 2 if activation else N"},
    rules=(
        Rule("K > 0", "x", "have at least one column"),
        Rule("N > 0", "weight", "have at least one row"),
        Rule(f"N <= {MAX_COLUMNS} and K <= {MAX_COLUMNS}", "weight", "have at most 2**24 rows and columns"),
        Rule("activation is None or N % 2 == 0", "weight", "have an even number of rows with an activation"),
        *weight_scale.RULES,
        Rule("add is None or D == I", "add", "have as many columns as the result, I={I}"),
        Rule("out_dtype is None or out_dtype in " + _OR_FLOAT32, "out_dtype", "be x's dtype or float32"),
        Rule(
            "rounding == 'once' or out_dtype is None or out_dtype == x.dtype",
            "out_dtype",
            "be None or x's dtype with rounding='hf', which rounds to x's dtype",
        ),
    ),
    rounding="once: y = round(act(y_gate)*y_up + add), with y = (a @ weight.T)*weight_scale + bias in float32 and a as "
    "rms_norm stores it; hf: y = round(y), y = round(round(act(y_gate))*y_up), y = round(y + add)",
    replaces={"out": ("add",), "residual_out": ("residual",)},
    carried=weight_scale.CARRIED,
    known_as=weight_scale.KNOWN_AS,
)
