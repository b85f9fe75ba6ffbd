"""A valid call of every op in each of its forms: for tests of bad input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass.core import op as registration
from onepass.core.contract import Contract
from onepass.formats import FP8_FORMATS, QUANT_FORMATS, QUANT_SCALE_FORMATS
from onepass.ops.gemv_norm import contract as gemv_norm_contract
from onepass.ops.gemv_norm import op as gemv_norm
from onepass.ops.linear.op import LINEAR
from onepass.ops.mla_cache import op as mla_cache
from onepass.ops.qk_cache import op as qk_cache
from onepass.ops.qk_norm import op as qk
from onepass.ops.qk_norm.contract import QK_RMS_NORM_HEADS
from onepass.ops.rms_norm import op as rows
from onepass.ops.rms_norm.finish import LAYER_NORM
from onepass.trace import TraceBuf
from tests.helpers.contract_oracle import faults
from tests.helpers.valid_calls import (
    BF16,
    FP8,
    Arguments,
    blocks_arguments,
    copied,
    fp8_arguments,
    gated_arguments,
    gemv_arguments,
    heads_arguments,
    layer_arguments,
    layer_heads_arguments,
    linear_arguments,
    mla_arguments,
    names,
    norm_arguments,
    packed_arguments,
    public_bound,
    public_gamma,
    qk_arguments,
    qk_cache_arguments,
    quant_arguments,
    split_both,
    split_gamma,
    static_arguments,
    vllm_arguments,
    with_outputs,
)

Call = Callable[[Arguments], Any]


@dataclass(frozen=True)
class Subject:
    """A form of an op: its contract, a valid call's arguments by the contract's names, and how to call it with them."""

    name: str
    op: str
    contract: Contract
    good: Callable[[], Arguments]
    call: Call
    required: tuple[str, ...] = ()
    """Outputs that this form does not allocate."""
    fixed: tuple[str, ...] = ()
    """Names of the contract that are not arguments of this form."""
    volatile: tuple[str, ...] = ()
    """Arguments that two equal calls fill differently."""
    tensors_only: bool = False
    contract_of: Callable[[Arguments], Contract] | None = None
    own_rules: Callable[[Arguments], list[str]] = field(default=lambda arguments: [])
    """Arguments that the public function rejects although the contract allows them."""
    derived: Callable[[Arguments], Arguments] = field(default=lambda arguments: arguments)

    def wrong(self, changes: Mapping[str, Any]) -> set[str]:
        """The names that an error about the changed call may mention; empty for a legal call."""
        arguments = self.derived({**self.good_values, **changes})
        contract = self.contract if self.contract_of is None else self.contract_of(arguments)
        found = faults(contract, {name: arguments[name] for name in names(contract)})
        found += [name for name in self.required if arguments[name] is None]
        found += self.own_rules(arguments)
        carriers = [p for p, carried in self.contract.carried.items() if set(carried) & set(found)]
        return {*found, *carriers}

    def __post_init__(self) -> None:
        object.__setattr__(self, "good_values", self.good())

    good_values: Arguments = field(init=False, repr=False)

    def takes(self, changes: Mapping[str, Any]) -> bool:
        """Whether a call of this form can have such changes."""
        if any(name in self.fixed for name in changes):
            return False
        if self.tensors_only:
            many = [name for name, arg in self.contract.args.items() if arg.many]
            return all(_dispatchable(value, name in many) for name, value in changes.items())
        # the public function takes an object instead of a key
        return "prologue" not in changes or not isinstance(changes["prologue"], (str, type(None)))


def _dispatchable(value: object, many: bool) -> bool:
    """Whether torch passes a value to our implementation unchanged."""
    if many:
        return isinstance(value, (list, tuple)) and all(_dispatchable(item, False) for item in value)
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_neg()


# --- calls by the contract's names ----------------------------------------------------------------------------------


class RawTrace(TraceBuf):
    """Returns whatever it was given."""

    def __init__(self, trace: Any, units: Any) -> None:
        self.pair = trace, units

    def store(self, offset: int, ts: int) -> None:
        raise AssertionError("only kernels write here")

    def tensors(self) -> tuple[Any, Any]:
        return self.pair


def call_norm(given: Arguments) -> Any:
    return onepass.rms_norm(**public_gamma(given))


def call_layer(given: Arguments) -> Any:
    return onepass.layer_norm(**public_gamma(given))


def call_fp8(given: Arguments, op: Callable[..., Any] = onepass.rms_norm_fused_fp8) -> Any:
    key = given["prologue"]
    if isinstance(key, str):
        key = onepass.prologues.find(key) if key else None
    bound, given = public_bound(given), {k: v for k, v in public_gamma(given).items() if k != "scale_ub_tensor"}
    return op(**{**given, "prologue": key, "scale_ub": bound})


def call_quant(given: Arguments) -> Any:
    return call_fp8(given, onepass.rms_norm_fused_quant)


def with_defaults(given: Arguments) -> Arguments:
    """The contract's arguments: None stands for what the format implies."""
    given = split_both(given)
    found = QUANT_FORMATS.get(given["format"]) if isinstance(given["format"], str) else None
    if found is None:
        return given
    if given["group_size"] is None:
        given = given | {"group_size": found.groups[0]}
    if given["scale_format"] is None:
        given = given | {"scale_format": found.scales[0]}
    if given["scales_dtype"] is None:
        packed = given["scale_layout"] == "column_packed"
        dtypes = QUANT_SCALE_FORMATS[given["scale_format"]].dtypes if given["scale_format"] in found.scales else (None,)
        given = given | {"scales_dtype": torch.int32 if packed else dtypes[0]}
    return given


def public_scale(given: Arguments) -> Arguments:
    """The public function's arguments: one ``weight_scale`` of either kind."""
    scale = given["block_scale"] if given["weight_scale"] is None else given["weight_scale"]
    return {name: value for name, value in given.items() if name != "block_scale"} | {"weight_scale": scale}


def split_scale(given: Arguments) -> Arguments:
    """The contract's two arguments for the public function's ``weight_scale``: blocks have two dimensions."""
    scale, weight = public_scale(given)["weight_scale"], given["weight"]
    if not isinstance(scale, Tensor) or scale.is_nested or scale.layout is not torch.strided or scale.dim() != 2:
        return given | {"weight_scale": scale, "block_scale": None}
    rows = len(weight) if isinstance(weight, Tensor) and not weight.is_nested and weight.dim() else 0
    if tuple(scale.shape) == (rows, 1) and scale.dtype is not torch.float8_e8m0fnu:
        return given | {"weight_scale": scale.squeeze(1), "block_scale": None}
    return given | {"weight_scale": None, "block_scale": scale}


def call_linear(given: Arguments) -> Any:
    return onepass.linear(**public_scale(given))


def _further(given: Arguments, name: str) -> list[Any]:
    """The values of several numbered arguments as a list, up to the last that is not None."""
    found = [given.pop(f"{name}{i}") for i in (1, 2, 3)]
    while found and found[-1] is None:
        found.pop()
    return found


def call_gemv(given: Arguments) -> Any:
    given = public_scale(given)
    segments = _further(given, "gamma")
    out = _out(given)
    inputs = {name: given[name] for name in ("act", "weight", "gamma", "weight_scale", "eps", "normed_dtype")}
    return onepass.gemv_and_partial_norm(**inputs, segments=segments, out=None if all(t is None for t in out) else out)


def _out(given: Arguments) -> list[Any]:
    """The outputs in order, without absent ones; None means one to allocate."""
    given = dict(given)
    scale = [] if given["scale_output"] is None else [given["scale_output"]]
    return [given["normed_output"], *scale, *_further(given, "normed_output"), given["unnormed_output"]]


def call_scratch(given: Arguments) -> Any:
    given = public_scale(given)
    del given["normed_dtype"]
    trace = RawTrace(given.pop("trace"), given.pop("units"))
    further, outputs = _further(given, "gamma"), _further(given, "normed_output")
    return onepass.gemv_and_partial_norm_with_scratch(
        **given, trace_buf=trace, segments=further, segment_outputs=outputs
    )


def codes_of(given: Arguments) -> Arguments:
    """With the caller's scratch, the codes have the output's dtype."""
    out = given["normed_output"]
    dtype = out.dtype if isinstance(out, Tensor) and out.dtype in FP8_FORMATS else None
    return {**split_scale(given), "normed_dtype": dtype}


def lacks_scratch(given: Arguments) -> list[str]:
    """Codes come with a scale, and every segment with an output."""
    segments, outputs = (len(_further(dict(given), name)) for name in ("gamma", "normed_output"))
    scale = codes_of(given)["normed_dtype"] is None or given["scale_output"] is not None
    return [] if scale and segments == outputs else ["scale_output", "segment_outputs"]


def lacks_outputs(given: Arguments) -> list[str]:
    """``out`` has one element per output, or is not given."""
    out = _out(given)
    needed = 2 + len(_further(dict(given), "gamma")) + (given["normed_dtype"] is not None)
    return [] if all(t is None for t in out) or len(out) == needed else ["out"]


def call_unfused(given: Arguments) -> Any:
    given = public_scale(given)
    inputs = {name: given[name] for name in ("act", "weight", "gamma", "weight_scale", "eps")}
    return onepass.gemv_and_partial_norm(**inputs, fused=False)


def _rope(given: Arguments) -> Arguments:
    parts = [given.pop(name) for name in ("freqs", "positions", "style", "dim", "head_dim")]
    absent = all(part is None for part in (*parts[:2], *parts[3:])) and isinstance(parts[2], str) and parts[2] == "half"
    return given | {"rope": None if absent else onepass.Rope(*parts)}


def call_apply(given: Arguments) -> Any:
    return onepass.apply_qk_rms_norm(**_rope(dict(given)))


def call_qk(given: Arguments) -> Any:
    given = _rope(dict(given))
    for name in ("out", "scale_out"):
        pair = given.pop(f"q_{name}", None), given.pop(f"k_{name}", None)
        given[name] = None if pair[0] is pair[1] is None else pair
    return onepass.qk_rms_norm(**given)


def qk_dtype(given: Arguments) -> Arguments:
    """Codes may be requested by the output's dtype alone."""
    out = given["q_out"]
    codes = given["out_dtype"] is None and isinstance(out, Tensor) and out.dtype in FP8_FORMATS
    return given | {"out_dtype": out.dtype} if codes else given


def qk_contract(given: Arguments) -> Contract:
    heads = given["per_head"] is True and qk._has_heads(*(given[n] for n in ("q", "k", "gamma_q", "positions")))
    return QK_RMS_NORM_HEADS if heads else qk.QK_RMS_NORM


def call_mla(given: Arguments) -> Any:
    given = dict(given)
    cache = onepass.PagedKVCache(torch.zeros(1, 1, 1))
    for name in ("blocks", "cache_lengths", "lookup_table", "entry_format"):
        setattr(cache, name, given.pop(name))  # unchecked
    return onepass.fused_rope_rmsnorm_quantization(**given, k_cache=cache)


def call_qk_cache(given: Arguments) -> Any:
    given = dict(given)
    freqs, positions, cos, sin, style, dim = (
        given.pop(n) for n in ("freqs", "positions", "cos", "sin", "style", "dim")
    )
    given["rope"] = onepass.Rope(freqs, positions, style, dim) if cos is sin is None else (cos, sin, style)
    starts, first = given.pop("starts"), given.pop("first")
    return onepass.qk_norm_rope_cache(
        start=first if starts is None else starts, out=(given.pop("q_out"), given.pop("k_out")), **given
    )


def as_stored(given: Arguments) -> Arguments:
    """A start that is no tensor is a number, one of no dimension is one for all, and one sequence's angles serve all."""
    starts = given["starts"]
    if starts is not None and not isinstance(starts, Tensor):
        given, starts = given | {"first": starts}, None
    if isinstance(starts, Tensor) and starts.layout is torch.strided and not starts.is_nested and starts.dim() == 0:
        starts = starts.view(1)
    angles = {name: qk_cache._per_token(given[name], given["q"]) for name in ("cos", "sin")}
    return given | {"starts": starts} | angles


def public_subjects() -> list[Subject]:
    found: list[Subject] = []

    def add(
        name: str, contract: Contract, good: Callable[[], Arguments], call: Call, allocating: bool = True, **rest: Any
    ) -> None:
        op = contract.name
        outs = [out.argument for out in contract.outs.values()]
        found.append(Subject(name, op, contract, lambda: with_outputs(contract, good()), call, **rest))
        if allocating and "required" not in rest:
            nothing = dict.fromkeys(outs)
            if "out" in contract.carried:  # one argument for all
                rest["fixed"] = tuple(outs)
            found.append(Subject(f"{name}, allocating", op, contract, lambda: {**good(), **nothing}, call, **rest))

    scratch, unfused = gemv_norm.GEMV_WITH_SCRATCH, gemv_norm_contract.UNFUSED_WITH_SCRATCH
    add("rms_norm", rows.RMS_NORM, norm_arguments, call_norm, derived=split_gamma)
    add("rms_norm, gated", rows.RMS_NORM, gated_arguments, call_norm, False, derived=split_gamma)
    add("rms_norm, heads", rows.RMS_NORM, heads_arguments, call_norm, False, derived=split_gamma)
    add("layer_norm", LAYER_NORM, layer_arguments, call_layer, derived=split_gamma)
    add("layer_norm, heads", LAYER_NORM, layer_heads_arguments, call_layer, False, derived=split_gamma)
    fp8 = rows.RMS_NORM_FUSED_FP8
    add("rms_norm_fused_fp8", fp8, fp8_arguments, call_fp8, derived=split_both)
    add("rms_norm_fused_fp8, static", fp8, static_arguments, call_fp8, False, derived=split_both)
    add("rms_norm_fused_fp8, as vLLM", fp8, vllm_arguments, call_fp8, False, derived=split_both)
    quant = rows.RMS_NORM_FUSED_QUANT
    add("rms_norm_fused_quant", quant, quant_arguments, call_quant, False, derived=with_defaults)
    add("rms_norm_fused_quant, packed", quant, packed_arguments, call_quant, False, derived=with_defaults)
    add(
        "gemv",
        gemv_norm.GEMV,
        lambda: gemv_arguments(gemv_norm.GEMV),
        call_gemv,
        derived=split_scale,
        own_rules=lacks_outputs,
    )
    codes = {"normed_dtype": FP8, "weight": FP8}
    add(
        "gemv, codes",
        gemv_norm.GEMV,
        lambda: gemv_arguments(gemv_norm.GEMV, **codes),
        call_gemv,
        False,
        derived=split_scale,
        own_rules=lacks_outputs,
    )
    add(
        "gemv, scratch",
        scratch,
        lambda: gemv_arguments(scratch),
        call_scratch,
        derived=codes_of,
        fixed=("normed_dtype",),
        required=("normed_output", "unnormed_output", "normed_output1"),
        volatile=("trace", "units"),
        own_rules=lacks_scratch,
    )
    found.append(
        Subject(
            "gemv, unfused",
            gemv_norm.GEMV.name,
            gemv_norm_contract.UNFUSED,
            lambda: {**gemv_arguments(gemv_norm_contract.UNFUSED), "normed_output": None, "y_scratch": None},
            call_unfused,
            derived=split_scale,
            fixed=("normed_output", "y_scratch"),
        )
    )
    add(
        "gemv, unfused with scratch",
        unfused,
        lambda: gemv_arguments(unfused, weight=FP8),
        lambda given: onepass.gemv_and_partial_norm_unfused_with_scratch(**public_scale(given)),
        derived=split_scale,
        required=("normed_output", "y_scratch"),
    )
    add("linear", LINEAR, linear_arguments, call_linear, derived=split_scale)
    add("linear, blocks", LINEAR, blocks_arguments, call_linear, False, derived=split_scale)
    add(
        "sums",
        qk.ROW_SUM_OF_SQUARES_QK,
        lambda: qk_arguments(qk.ROW_SUM_OF_SQUARES_QK),
        lambda given: onepass.row_sum_of_squares_qk(**given),
    )
    add(
        "means",
        qk.ROW_MEAN_OF_SQUARES_QK,
        lambda: qk_arguments(qk.ROW_MEAN_OF_SQUARES_QK),
        lambda given: onepass.row_mean_of_squares_qk(**given),
    )
    apply = qk.APPLY_QK_RMS_NORM
    add("apply", apply, lambda: qk_arguments(apply, epsilon=0.5), call_apply, required=("q_out", "k_out"))
    flat = qk.QK_RMS_NORM
    fused: dict[str, Any] = {"contract_of": qk_contract, "derived": qk_dtype}
    add("qk", flat, lambda: qk_arguments(flat, eps=0.5), call_qk, **fused)
    add("qk, codes", flat, lambda: qk_arguments(flat, eps=0.5, out_dtype=FP8), call_qk, False, **fused)
    heads = qk_arguments(QK_RMS_NORM_HEADS, eps=0.0, weight_offset=0.0) | {"per_head": True}
    in_order = {name: heads.get(name) for name in (*flat.args, *flat.options)}
    outs = {"q_out": torch.zeros(2, 3, 3, 16, dtype=BF16), "k_out": torch.zeros(2, 3, 2, 16, dtype=BF16)}
    good_heads = partial(copied, {**in_order, **outs, "q_scale_out": None, "k_scale_out": None})
    found.append(Subject("qk, heads", flat.name, flat, good_heads, call_qk, **fused))
    written = mla_cache.FUSED_ROPE_RMSNORM_QUANTIZATION
    add("mla, scale", written, lambda: mla_arguments("kv_scale"), call_mla)
    add("mla, scales of tokens", written, lambda: mla_arguments("per_token_scale"), call_mla, False)
    cached, table, pair = qk_cache.QK_NORM_ROPE_CACHE, ("freqs", "positions"), ("cos", "sin")
    forms: dict[str, Any] = {"derived": as_stored, "fixed": ("first", *pair)}
    add("cache write, paged", cached, lambda: qk_cache_arguments("NHD", table), call_qk_cache, False, **forms)
    forms = {"derived": as_stored, "fixed": ("first", "dim", *table)}
    add("cache write, dense", cached, lambda: qk_cache_arguments("dense", pair), call_qk_cache, False, **forms)
    return found


def dispatched_subjects() -> list[Subject]:
    good: dict[str, Callable[[], Arguments]] = {
        "rms_norm": norm_arguments,
        "layer_norm": layer_arguments,
        "rms_norm_fused_fp8": fp8_arguments,
        "rms_norm_fused_quant": quant_arguments,
        "gemv": lambda: gemv_arguments(gemv_norm_contract.PLAIN_GEMV, weight=FP8),
        "linear": linear_arguments,
        mla_cache.FUSED_ROPE_RMSNORM_QUANTIZATION.name: lambda: mla_arguments("kv_scale"),
        qk_cache.QK_NORM_ROPE_CACHE.name: lambda: qk_cache_arguments("NHD", ("freqs", "positions")),
    }
    return [_dispatched(op, good.get(op.contract.name)) for op in registration._ops]


def _dispatched(op: registration.Op, good: Callable[[], Arguments] | None) -> Subject:
    contract = op.contract
    make = good or (lambda: (gemv_arguments if "act" in contract.args else qk_arguments)(contract))
    return Subject(
        f"torch.ops.{contract.name}",
        contract.public_name,
        contract,
        lambda: with_outputs(contract, make()),
        lambda given: op.out(*[given[name] for name in names(contract)]),
        fixed=tuple(contract.options),
        tensors_only=True,
        volatile=("trace", "units"),
    )
