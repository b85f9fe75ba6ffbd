"""What `gemv_and_partial_norm` and its forms take and return."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract.declaration import Arg, Contract, Option, Out, Rule
from ..formats import FLOATS, FP8_FORMATS
from ..specs.gemv_norm import MAX_ROWS, MAX_SEGMENTS, tiles
from ..trace import GEMV_TRACE_EVENTS_PER_BLOCK

FURTHER = range(1, MAX_SEGMENTS)


def blocks_of(act: Tensor, weight: Tensor, widths: tuple[int, ...]) -> int:
    """Blocks of a launch, which a trace has slots for."""
    m, k = act.shape
    if act.device.type == "cpu":
        from ..cpu.arguments import TILE as columns

        return sum(tiles(weight.shape[0], widths, columns))
    from ..triton.gemv_norm_config import blocks

    return blocks(act.dtype, weight.dtype, m, weight.shape[0], k, widths)


_ARGS = {
    "act": Arg("M K", "activations", FLOATS),
    "weight": Arg("N K", "one row a column of y; act's dtype or float8_e4m3fn", "(act.dtype, torch.float8_e4m3fn)"),
    "gamma": Arg("W0", "weight of the first segment's norm; any float dtype", FLOATS, sample="gamma"),
    **{
        f"gamma{i}": Arg(f"W{i}", f"weight of segment {i}'s norm; any float dtype", FLOATS, optional=True, sample="gamma")
        for i in FURTHER
    },
    "weight_scale": Arg("S", "factor of all weights, or of each row", (torch.float32,), optional=True, sample="positive"),
}  # fmt: skip
_EPS = Option("float", 1e-6, "added to the mean of squares", where="0 <= eps <= 3.4e38")
_OPTIONS = {
    "eps": _EPS,
    "normed_dtype": Option(
        "ScalarType",
        None,
        "fp8 format of the first segment; None: act's dtype",
        choices=tuple(FP8_FORMATS),
        optional=True,
    ),
}
_SIZES = {"T": "N - W0 - (W1 or 0) - (W2 or 0) - (W3 or 0)"}
_RULES = (
    Rule(f"M <= {MAX_ROWS}", "act", f"have at most {MAX_ROWS} rows (fused=False takes any number)"),
    Rule("K > 0", "act", "have at least one column"),
    Rule("W0 > 0", "gamma", "have at least one element"),
    *(Rule(f"W{i} is None or W{i} > 0", f"gamma{i}", "have at least one element") for i in FURTHER),
    Rule("T >= 0", "gamma", "have, with further segments, no more elements than weight has rows"),
    *(
        Rule(f"gamma{i} is None or gamma{i - 1} is not None", f"gamma{i}", f"be None without gamma{i - 1}")
        for i in FURTHER
        if i > 1
    ),
    Rule("weight_scale is None or S == 1 or S == N", "weight_scale", "have one element, or one for each row of weight"),
    Rule("N <= 16777216 and K <= 16777216", "weight", "have at most 2**24 rows and columns"),
)
_OUTS = {
    "normed": Out("M W0", "(normed_dtype or act.dtype)", "norm of the first segment", "normed_output"),
    "scale": Out(
        "M 1", "torch.float32", "scale of each row of normed", "scale_output", when="normed_dtype is not None"
    ),
    **{
        f"normed{i}": Out(
            f"M W{i}", "act.dtype", f"norm of segment {i}", f"normed_output{i}", when=f"gamma{i} is not None"
        )
        for i in FURTHER
    },
    "unnormed": Out("M T", "act.dtype", "the other columns", "unnormed_output"),
}
_ROUNDING = "once: y in float32, normed = round((y*rs)*gamma), unnormed = round(y)"

_CARRIED = {"segments": tuple(f"gamma{i}" for i in FURTHER)}

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
)

GEMV_WITH_SCRATCH = Contract(
    "gemv_and_partial_norm_with_scratch",
    args={
        **_ARGS,
        "finish_counter": Arg(
            "C", "zero before the first call; zero again when a call is done", (torch.int32,), layout="dense", mutable=True,
            debugged=True,
        ),
        "trace": Arg("E", "receives time stamps", (torch.int64, torch.uint64), optional=True, layout="dense", mutable=True),
        "units": Arg("B", "receives each block's multiprocessor or thread", (torch.int32,), optional=True, layout="dense", mutable=True),
    },
    options=_OPTIONS,
    outs=_OUTS,
    sizes=_SIZES,
    rules=(
        *_RULES,
        Rule("C >= segments(W1, W2, W3)", "finish_counter", "have an element for each segment"),
        Rule(
            f"trace is None or E >= {GEMV_TRACE_EVENTS_PER_BLOCK} * blocks(act, weight, W0, W1, W2, W3)",
            "trace", f"have {GEMV_TRACE_EVENTS_PER_BLOCK} slots for every block (gemv_trace_blocks counts them)",
        ),
        Rule("units is None or B >= blocks(act, weight, W0, W1, W2, W3)", "units", "have an element for every block"),
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
)  # fmt: skip

PLAIN_GEMV = Contract(
    "gemv",
    args={name: _ARGS[name] for name in ("act", "weight", "weight_scale")},
    options={},
    outs={"y": Out("M N", "act.dtype", "act @ weight.T", "y_scratch")},
    rules=(_RULES[1], *_RULES[-2:]),
    rounding="once: y = round((act @ weight.T) * weight_scale)",
    replaces={},
)


def _two_launches_contract(name: str, given: bool) -> Contract:
    """What both launches together ask of their arguments; with outputs only if the caller has ``given`` them."""
    contract = Contract(
        name,
        args={name: _ARGS[name] for name in ("act", "weight", "gamma", "weight_scale")},
        options={"eps": _EPS},
        outs={
            "normed": Out("M W0", "act.dtype", "norm of the first columns", "normed_output", when=str(given)),
            "y": Out("M N", "act.dtype", "act @ weight.T", "y_scratch", when=str(given)),
        },
        sizes={"T": "N - W0"},
        rules=tuple(rule for rule in _RULES if rule.argument in ("gamma", "weight_scale") or rule.condition == "K > 0"),
        rounding="y to act's dtype, then normed",
        replaces={},
    )
    _ = contract.prepare  # made now: a compiler that traces a call must not meet the making
    return contract


UNFUSED = _two_launches_contract("gemv_and_partial_norm", False)
UNFUSED_WITH_SCRATCH = _two_launches_contract("gemv_and_partial_norm_unfused_with_scratch", True)
