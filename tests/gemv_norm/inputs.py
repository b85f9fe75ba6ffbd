"""Valid calls of `gemv_and_partial_norm` and its forms with the caller's scratch."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

import onepass
from onepass import gemv_and_partial_norm
from onepass.core.contract import Contract
from onepass.formats import E4M3FN, FP8_FORMATS
from onepass.ops.gemv_norm.contract import PLAIN_GEMV, UNFUSED, UNFUSED_WITH_SCRATCH
from onepass.ops.gemv_norm.launch import MAX_ROWS
from onepass.ops.gemv_norm.op import GEMV, GEMV_WITH_SCRATCH
from onepass.testing.tensors import same_bytes
from onepass.trace import TraceBuf
from tests.inputs import FP8, Arguments, Build, Form, Rows, Tensors, both, sampled_arguments, writing
from tests.linear.inputs import public_scale, split_scale


def gemv_arguments(contract: Contract, device: str = "cpu", **changes: Any) -> Arguments:
    sizes = {"M": 3, "N": 40, "K": 32, "W0": 24, "W1": 8, "S": 40, "C": 2, "E": 48, "B": 3}
    optional = ("gamma1", "weight_scale", "trace", "units")
    values = sampled_arguments(contract, sizes, (), device, optional, eps=0.5, **changes)
    for name in ("finish_counter", "trace", "units"):
        if name in values:
            values[name].zero_()
    return values


def unfused_arguments(device: str = "cpu") -> Arguments:
    """The public function allocates both outputs."""
    return {**gemv_arguments(UNFUSED, device), "normed_output": None, "y_scratch": None}


Three = tuple[Tensor, Tensor, Tensor]


def inputs(m: int = 3, n: int = 50, k: int = 64, width: int = 30, dtype: torch.dtype = torch.bfloat16) -> Three:
    """act, weight and gamma."""
    act, weight, gamma = torch.randn(m, k), torch.randn(n, k), 1 + 0.25 * torch.randn(width)
    return act.to(dtype), weight.to(dtype), gamma.to(dtype)


def all_same(a: Any, b: Any) -> bool:
    return all(same_bytes(x, y) for x, y in zip(a, b, strict=True))


BY_CONTRACT: dict[str, Build] = {
    "gemv": partial(gemv_arguments, PLAIN_GEMV, weight=FP8),
    GEMV.name: partial(gemv_arguments, GEMV),
    GEMV_WITH_SCRATCH.name: partial(gemv_arguments, GEMV_WITH_SCRATCH),
}

# --- calls of the public functions ----------------------------------------------------------------------------------


class RawTrace(TraceBuf):
    """Returns whatever it was constructed with."""

    def __init__(self, trace: Any, units: Any) -> None:
        self.pair = trace, units

    def store(self, offset: int, ts: int) -> None:
        raise AssertionError("only kernels write here")

    def tensors(self) -> tuple[Any, Any]:
        return self.pair


def _further(values: Arguments, name: str) -> list[Any]:
    """The values of several numbered arguments as a list, up to the last that is not None."""
    numbered = [values.pop(f"{name}{i}") for i in (1, 2, 3)]
    while numbered and numbered[-1] is None:
        numbered.pop()
    return numbered


def _out(values: Arguments) -> list[Any]:
    """The outputs in order, without absent ones; None means one to allocate."""
    values = dict(values)
    scale = [] if values["scale_output"] is None else [values["scale_output"]]
    return [values["normed_output"], *scale, *_further(values, "normed_output"), values["unnormed_output"]]


def call_gemv(values: Arguments) -> Any:
    values = public_scale(values)
    segments = _further(values, "gamma")
    out = _out(values)
    inputs = {name: values[name] for name in ("act", "weight", "gamma", "weight_scale", "eps", "normed_dtype")}
    return gemv_and_partial_norm(**inputs, segments=segments, out=None if all(t is None for t in out) else out)


def call_scratch(values: Arguments) -> Any:
    values = public_scale(values)
    del values["normed_dtype"]
    trace = RawTrace(values.pop("trace"), values.pop("units"))
    further, outputs = _further(values, "gamma"), _further(values, "normed_output")
    return onepass.gemv_and_partial_norm_with_scratch(
        **values, trace_buf=trace, segments=further, segment_outputs=outputs
    )


def call_unfused(values: Arguments) -> Any:
    values = public_scale(values)
    inputs = {name: values[name] for name in ("act", "weight", "gamma", "weight_scale", "eps")}
    return gemv_and_partial_norm(**inputs, fused=False)


def call_unfused_scratch(values: Arguments) -> Any:
    return onepass.gemv_and_partial_norm_unfused_with_scratch(**public_scale(values))


def codes_of(values: Arguments) -> Arguments:
    """With the caller's scratch, the codes have the output's dtype."""
    out = values["normed_output"]
    dtype = out.dtype if isinstance(out, Tensor) and out.dtype in FP8_FORMATS else None
    return {**split_scale(values), "normed_dtype": dtype}


def lacks_scratch(values: Arguments) -> list[str]:
    """Codes come with a scale, and every segment with an output."""
    segments, outputs = (len(_further(dict(values), name)) for name in ("gamma", "normed_output"))
    scale = codes_of(values)["normed_dtype"] is None or values["scale_output"] is not None
    return [] if scale and segments == outputs else ["scale_output", "segment_outputs"]


def lacks_outputs(values: Arguments) -> list[str]:
    """``out`` has one element per output, or is None."""
    out = _out(values)
    needed = 2 + len(_further(dict(values), "gamma")) + (values["normed_dtype"] is not None)
    return [] if all(t is None for t in out) or len(out) == needed else ["out"]


_ALLOCATING: dict[str, Any] = {"derived": split_scale, "own_rules": lacks_outputs}
FORMS: list[Form] = [
    *both("gemv", GEMV, partial(gemv_arguments, GEMV), call_gemv, **_ALLOCATING),
    writing("gemv, codes", GEMV, partial(gemv_arguments, GEMV, normed_dtype=FP8, weight=FP8), call_gemv, **_ALLOCATING),
    writing(
        "gemv, scratch",
        GEMV_WITH_SCRATCH,
        partial(gemv_arguments, GEMV_WITH_SCRATCH),
        call_scratch,
        derived=codes_of,
        fixed=("normed_dtype",),
        required=("normed_output", "unnormed_output", "normed_output1"),
        volatile=("trace", "units"),
        own_rules=lacks_scratch,
    ),
    Form(
        "gemv, unfused",
        GEMV.name,
        UNFUSED,
        unfused_arguments,
        call_unfused,
        derived=split_scale,
        fixed=("normed_output", "y_scratch"),
    ),
    writing(
        "gemv, unfused with scratch",
        UNFUSED_WITH_SCRATCH,
        partial(gemv_arguments, UNFUSED_WITH_SCRATCH, weight=FP8),
        call_unfused_scratch,
        derived=split_scale,
        required=("normed_output", "y_scratch"),
    ),
]

# --- any number of rows ---------------------------------------------------------------------------------------------


def _gemv(t: Tensors, **options: Any) -> list[Tensor]:
    return list(gemv_and_partial_norm(t["act"], t["weight"], t["gamma"], **options))


_GEMV: dict[str, Any] = {"rows": {"act": 0}, "shared": {"gamma": (40,), "weight": (70, 0)}, "shared_out": 2000}
_FP8_WEIGHT = {"weight": E4M3FN.dtype}
ROWS: Final = (
    Rows("gemv_and_partial_norm", call=_gemv, most=MAX_ROWS, **_GEMV),
    Rows(
        "gemv_and_partial_norm, fp8 weights and result",
        call=partial(_gemv, normed_dtype=E4M3FN.dtype),
        most=MAX_ROWS,
        own=_FP8_WEIGHT,
        **_GEMV,
    ),
    Rows(
        "gemv_and_partial_norm, two launches, fp8 weights", call=partial(_gemv, fused=False), own=_FP8_WEIGHT, **_GEMV
    ),
)
