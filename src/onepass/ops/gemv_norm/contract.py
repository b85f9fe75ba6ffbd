"""The contracts of `gemv_and_partial_norm` and its variants."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.backend import tiles_for
from ...core.contract import MAX_COLUMNS, Arg, Contract, Option, Out, Rule, eps
from ...formats import FLOATS, FP8_FORMATS
from ...trace import GEMV_TRACE_EVENTS_PER_BLOCK as _EVENTS
from ..linear import weight_scale
from .launch import MAX_ROWS, MAX_SEGMENTS

FURTHER = range(1, MAX_SEGMENTS)


def blocks_of(act: Tensor, weight: Tensor, widths: tuple[int, ...]) -> int:
    """The number of blocks of a launch, each of which has slots in a trace."""
    m, k = act.shape
    blocks: int = tiles_for("gemv_norm", act).trace_blocks(act.dtype, weight.dtype, m, weight.shape[0], k, widths)
    return blocks


def _gamma(i: int, which: str) -> Arg:
    return Arg(f"W{i}", f"weight of {which}'s norm; any float dtype", FLOATS, optional=i > 0, sample="gamma")


_WEIGHTS = "(act.dtype, torch.float8_e4m3fn, torch.int8)"
_ARGS = {
    "act": Arg("M K", "activations", FLOATS),
    "weight": Arg("N K", "one row per column of y; act's dtype, float8_e4m3fn or int8", _WEIGHTS),
    "gamma": _gamma(0, "the first segment"),
    **{f"gamma{i}": _gamma(i, f"segment {i}") for i in FURTHER},
    **weight_scale.ARGS,
}
_CODES = Option(
    "ScalarType", None, "fp8 format of the first segment; None: act's dtype", tuple(FP8_FORMATS), optional=True
)
_OPTIONS = {"eps": eps(), "normed_dtype": _CODES}
_SIZES = {"T": "N - W0 - (W1 or 0) - (W2 or 0) - (W3 or 0)"}
_COLUMNS = Rule("K > 0", "act", "have at least one column")
_LIMIT = Rule(f"N <= {MAX_COLUMNS} and K <= {MAX_COLUMNS}", "weight", "have at most 2**24 rows and columns")
_RULES = (
    Rule(f"M <= {MAX_ROWS}", "act", f"have at most {MAX_ROWS} rows (fused=False takes any number)"),
    _COLUMNS,
    Rule("W0 > 0", "gamma", "have at least one element"),
    *(Rule(f"W{i} is None or W{i} > 0", f"gamma{i}", "have at least one element") for i in FURTHER),
    Rule("T >= 0", "gamma", "have at most as many elements, further segments included, as weight has rows"),
    *(
        Rule(f"gamma{i} is None or gamma{i - 1} is not None", f"gamma{i}", f"be None without gamma{i - 1}")
        for i in FURTHER[1:]
    ),
    *weight_scale.RULES,
    _LIMIT,
)
_CODED = "normed_dtype is not None"
_OUTS = {
    "normed": Out("M W0", "(normed_dtype or act.dtype)", "norm of the first segment", "normed_output"),
    "scale": Out("M 1", "torch.float32", "scale of each row of normed", "scale_output", when=_CODED),
    **{
        f"normed{i}": Out(f"M W{i}", "act.dtype", f"norm of segment {i}", f"normed_output{i}", f"gamma{i} is not None")
        for i in FURTHER
    },
    "unnormed": Out("M T", "act.dtype", "the other columns", "unnormed_output"),
}
_ROUNDING = "once: y in float32, normed = round((y*rs)*gamma), unnormed = round(y)"
_SEGMENTS = {"segments": tuple(f"gamma{i}" for i in FURTHER)}
_CARRIED = {**_SEGMENTS, **weight_scale.CARRIED}

GEMV = Contract(
    "gemv_and_partial_norm",
    _ARGS,
    _OPTIONS,
    _OUTS,
    _ROUNDING,
    sizes=_SIZES,
    rules=_RULES,
    replaces={},
    carried={**_CARRIED, "fused": (), "out": tuple(out.argument for out in _OUTS.values())},
    known_as=weight_scale.KNOWN_AS,
)

_COUNTER = "zero before the first call; zero again after each call"
_UNITS = "receives each block's multiprocessor or thread"
_I32, _I64 = (torch.int32,), (torch.int64, torch.uint64)
_SLOTS = f"have {_EVENTS} slots per block (gemv_trace_blocks counts them)"
_BLOCKS = "blocks(act, weight, W0, W1, W2, W3)"

GEMV_WITH_SCRATCH = Contract(
    "gemv_and_partial_norm_with_scratch",
    args={
        **_ARGS,
        "finish_counter": Arg("C", _COUNTER, _I32, layout="dense", mutable=True, debugged=True),
        "trace": Arg("E", "receives timestamps", _I64, optional=True, layout="dense", mutable=True),
        "units": Arg("B", _UNITS, _I32, optional=True, layout="dense", mutable=True),
    },
    options=_OPTIONS,
    outs=_OUTS,
    sizes=_SIZES,
    rules=(
        *_RULES,
        Rule("C >= segments(W1, W2, W3)", "finish_counter", "have one element per segment"),
        Rule(f"trace is None or E >= {_EVENTS} * {_BLOCKS}", "trace", _SLOTS),
        Rule(f"units is None or B >= {_BLOCKS}", "units", "have one element per block"),
    ),
    scope={
        "segments": lambda *further: 1 + sum(w is not None for w in further),
        "blocks": lambda act, weight, *widths: blocks_of(act, weight, tuple(w for w in widths if w is not None)),
    },
    rounding=_ROUNDING,
    replaces={},
    in_place=True,
    carried={
        **_CARRIED,
        "segment_outputs": tuple(f"normed_output{i}" for i in FURTHER),
        "normed_output": ("normed_output", "normed_dtype"),
        "trace_buf": ("trace", "units"),
    },
    known_as=weight_scale.KNOWN_AS,
)

PLAIN_GEMV = Contract(
    "gemv",
    args={name: _ARGS[name] for name in ("act", "weight", *weight_scale.ARGS)},
    options={},
    outs={"y": Out("M N", "act.dtype", "act @ weight.T", "y_scratch")},
    rules=(_COLUMNS, *weight_scale.RULES, _LIMIT),
    rounding="once: y = round((act @ weight.T) * weight_scale)",
    replaces={},
    carried=weight_scale.CARRIED,
    known_as=weight_scale.KNOWN_AS,
    form_of="gemv_and_partial_norm",
)


def _two_launches_contract(name: str, with_outputs: bool, form_of: str = "") -> Contract:
    """What both launches together require, including outputs if the caller has them (``with_outputs``)."""
    return Contract(
        name,
        args={name: _ARGS[name] for name in ("act", "weight", "gamma", *weight_scale.ARGS)},
        options={"eps": eps()},
        outs={
            "normed": Out("M W0", "act.dtype", "norm of the first columns", "normed_output", when=str(with_outputs)),
            "y": Out("M N", "act.dtype", "act @ weight.T", "y_scratch", when=str(with_outputs)),
        },
        sizes={"T": "N - W0"},
        rules=(_COLUMNS, *(rule for rule in _RULES if rule.argument == "gamma"), *weight_scale.RULES),
        rounding="y to act's dtype, then normed",
        replaces={},
        carried=weight_scale.CARRIED,
        known_as=weight_scale.KNOWN_AS,
        form_of=form_of,
    )


UNFUSED = _two_launches_contract("gemv_and_partial_norm_unfused", False, "gemv_and_partial_norm")
UNFUSED_WITH_SCRATCH = _two_launches_contract("gemv_and_partial_norm_unfused_with_scratch", True)
