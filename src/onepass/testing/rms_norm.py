"""Cases of rms_norm, rms_norm_fused_fp8 and rms_norm_fused_quant: inputs, calls and verification."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..formats import FLOATS, FP8_FORMATS, QUANTIZED
from ..ops.rms_norm.op import (
    LAYER_NORM,
    RMS_NORM,
    RMS_NORM_FUSED_QUANT,
    layer_norm,
    rms_norm,
    rms_norm_fused_fp8,
    rms_norm_fused_quant,
)
from ..prologues import add, dequantize, prologue, sigmoid, silu_and_mul, tanh, where
from . import bounds, compare
from .batch_regime import assuming, others
from .case import Case, grid, lay_out, moved, poisoned_like, set_special, to_cpu
from .interpreter import interpreting
from .oracle import per_column
from .quantized import Quantized, described, without_padding
from .rms_norm_finish import activated, centered, code_cases, finished, layer_cases, norm_cases
from .rms_norm_options import sum_cases, verify_division, vllm_cases
from .rms_norm_quant import quant_cases
from .rms_norm_weights import (
    fp8_weight_cases,
    layer_weight_cases,
    quant_weight_cases,
    verify_rstd,
    weight_cases,
)
from .samples import sample

BF16, F16, F32 = FLOATS
E8M0, FP8, FNUZ = torch.float8_e8m0fnu, *FP8_FORMATS


@prologue
def soft_cap_gate(x, gate, bias, scale):  # type: ignore[no-untyped-def]
    """All three kinds of operand and most helpers."""
    capped = 3.0 * tanh((x + bias) / 3.0)
    return where(gate > 0, capped * sigmoid(gate), -0.5 * abs(capped)) * scale


LENGTHS = {
    "short": [1, 2, 31, 33, 64, 127, 128, 129, 200, 512],
    "model": [896, 2048, 2880, 4096, 5120, 7168, 8192],
    "odd": [1025, 4097, 7919],
    "wide": [12288, 16384, 16385, 20000, 131072],
}
"""short: several rows per program; model: hidden sizes, many in several chunks; odd: no vector divides them; wide: more
chunks, then rows that are walked."""
OTHER_GAMMAS = ((BF16, F16), (F16, BF16), (F32, BF16), (F32, F16))
"""Dtypes of x, and of a gamma with neither x's dtype nor float32."""
_LAYOUTS = ["sliced", "misaligned", "expanded", "transposed"]
_ROUNDINGS = [{"rounding": "once"}, {"rounding": "hf"}]
_HF = {"rounding": "hf"}
_THREE = ("full", "column", "row")


def _common_cases(op: str) -> Iterator[Case]:
    c = partial(grid, Case, op)
    for group, lengths in LENGTHS.items():
        yield from c(group, (5,), lengths)
    yield from c("layouts", (3, 4), [128, 1536, 20000], layout=_LAYOUTS)
    yield from c("levels", (2, 3, 2, 3), 128, layout="reversed")
    yield from c("ranks", [(), (2, 1, 3, 2)], 300)
    yield from c("empty", (0,), 64)
    yield from c("values", (9,), 20000, values="special")
    yield from c("large", (1024,), 8192)


def _rms_norm_cases(op: str) -> Iterator[Case]:
    c = partial(grid, Case, op)
    yield from _common_cases(op)
    for x in FLOATS:
        gammas, residuals = list(dict.fromkeys((x, F32))), list(dict.fromkeys((None, x, F32)))
        yield from c("dtypes", (3,), 640, x, gammas, residuals, options=_ROUNDINGS)
        yield from c("values", (9,), 384, x, values="special")
        yield from c("values", (9,), 384, x, residual=x, values="special", options=_HF)
        yield from c("chunks", (3,), 3072, x, residual=x, options=_HF)
        yield from c("chunks", (3,), 5000, x, F32, residual=F32)
    for x, gamma in OTHER_GAMMAS:
        yield from c("gammas", (3,), 640, x, gamma, options=_ROUNDINGS)
        yield from c("gammas", (5,), 4096, x, gamma, residual=x)
        yield from c("gammas", (3,), 20000, x, gamma, options={"weight_offset": 1.0})
    yield from c("gammas", (3, 4), 1536, F32, BF16, layout="misaligned")
    yield from c("gammas", (9,), 384, F16, BF16, values="special")
    yield from c("gammas", (5,), [200, 4096, 20000], F16, BF16, [None, F16], values="spread", options=_HF)
    yield from c("layouts", (3, 4), [128, 1536, 20000], residual=BF16, layout=_LAYOUTS)
    yield from c("layouts", (2, 3, 4), 96, layout="transposed")
    yield from c("levels", (2, 2, 3, 2, 2), 1536, residual=BF16, layout="reversed")
    yield from c("options", (4,), 512, options=[{"weight_offset": 1.0, "eps": 1e-5}, {"eps": 0.0}])
    yield from c("chunks", (3, 4), 5000, layout=["misaligned", "transposed"])
    yield from c("chunks", (9,), 3072, values="special")
    yield from sum_cases(op, "once", True, [64, 640, 4096, 5000, 20000])
    yield from sum_cases(op, "hf", False, [64, 640, 2048, 4096, 5000, 5120, 7168, 8192, 20000])
    yield from c("large", (2048,), 4096, residual=BF16)


def _lane_cases(op: str) -> Iterator[Case]:
    """Groups of rows in whole chunks, where a GPU keeps each chunk's scales in lanes of their own: one per tile layout."""
    c, groups = partial(grid, Case, op, "lanes"), {"group_size": 128}
    yield from c((3,), [3072, 4096, 5120, 6144, 8192, 16384], options=groups)
    for x in FLOATS:
        yield from c((3,), 4096, x, options={"group_size": 64})
        yield from c((3,), 7168, x, F32, options=groups)
        yield from c((3,), 4096, options=groups | {"scales_dtype": x})
    yield from c((3,), 7168, residual=BF16, options=groups | {"return_norm": True})
    yield from c((3,), 4096, options=groups | {"weight_offset": 1.0, "scale_ub": 1.5})
    yield from c((3, 4), 4096, layout="transposed", options=groups | {"scale_layout": "column"})
    for out in FP8_FORMATS:
        ways = [groups | {"out_dtype": out} | way for way in ({}, _HF, {"scale_format": "ue8m0"})]
        yield from c((9,), 4096, values="special", options=ways)


def _dequantize_cases(op: str) -> Iterator[Case]:
    """8-bit rows, and operands with a value per group of columns."""
    c = partial(grid, Case, op, "dequantize")
    options: dict[str, Any] = {"prologue": dequantize}
    for x in QUANTIZED:
        yield from c((4,), 1536, x, BF16, operands=("group128",), options=options)
        yield from c((3,), 20480, x, BF16, residual=BF16, operands=("group128",), options=options)
        yield from c((5,), 200, x, F32, operands=("row",), options=options | {"return_norm": True})
    yield from c((4,), 768, FP8, BF16, operands=[(f"group{g}",) for g in (32, 64, 256)], options=options)
    shown = options | {"group_size": 128, "return_norm": True}
    yield from c((3,), 7168, FP8, BF16, BF16, operands=("group128",), options=shown)
    yield from c((3,), 4096, torch.int8, F16, F32, operands=("row",), options=shown)
    layouts = ["sliced", "misaligned", "transposed"]
    yield from c((3, 4), 640, FP8, BF16, BF16, ("group64",), layouts, options=options)
    yield from c((), 512, torch.int8, BF16, operands=("group64",), options=options)
    yield from c((4,), 1536, BF16, operands=("group128",), options=options)
    three = ("full", "column", "group32")
    yield from c((4,), 1536, FP8, BF16, BF16, three, options={"prologue": soft_cap_gate})


def _fp8_cases(op: str) -> Iterator[Case]:
    c, gate, groups = partial(grid, Case, op), {"prologue": soft_cap_gate}, {"group_size": 128}
    ue8m0, static = {"scale_format": "ue8m0"}, {"static_scale": True}
    yield from _common_cases(op)
    for x in FLOATS:
        yield from c("dtypes", (4,), 640, x, list(dict.fromkeys((x, F32))), options=_ROUNDINGS)
        yield from c("dtypes", (4,), 640, x, options=[{"scales_dtype": s, "out_dtype": FNUZ} for s in FLOATS])
        yield from c("chunks", (3,), 3072, x, F32, options=_HF)
    for x, gamma in OTHER_GAMMAS:
        yield from c("gammas", (4,), 640, x, gamma, options=_ROUNDINGS)
        yield from c("gammas", (3,), 4096, x, gamma, options=groups)
        yield from c("gammas", (3,), 20000, x, gamma, residual=x, options={"return_norm": True})
    yield from c("gammas", (4,), [640, 4096], F16, BF16, values="spread", options=_HF | {"return_norm": True})
    orders = [{"group_size": size, "scale_layout": order} for size in (64, 128) for order in ("row", "column")]
    powers = [groups | ue8m0 | {"scales_dtype": E8M0}, groups | ue8m0 | _HF]
    yield from c("groups", (6,), [384, 7168, 20480], options=[*orders, *powers])
    yield from c("groups", (6,), [384, 7168, 20480], layout="misaligned", options=groups)
    yield from c("groups", (2, 3), 256, options={"group_size": 64, "scale_layout": "column"})
    yield from _lane_cases(op)
    ways: list[dict[str, Any]] = [ue8m0 | {"scales_dtype": E8M0}, ue8m0, {"scale_ub": 1.5}, static, static | _HF]
    yield from c("scales", (4,), [512, 20000], options=ways)
    yield from c(
        "scales", (4,), 512, options=[{"out_dtype": FNUZ, "fp8_max": 224.0}, {"out_dtype": FNUZ, "scale_ub": 1.0}]
    )
    lengths = [640, 7168, 20000]
    yield from c("outputs", (4,), lengths, residual=BF16)
    yield from c("outputs", (4,), lengths, residual=F32, options={"return_norm": True, **_HF})
    yield from c("outputs", (4,), lengths, options={"return_norm": True})
    lengths = [1536, 20000]
    yield from c("prologues", (4,), lengths, operands=("full",), options={"prologue": silu_and_mul})
    yield from c("prologues", (4,), lengths, operands=("full",), options={"prologue": add}, layout="sliced")
    yield from c("prologues", (4,), lengths, operands=("row",), options={"prologue": dequantize})
    yield from c("prologues", (4,), lengths, operands=_THREE, residual=BF16, options=gate)
    yield from _dequantize_cases(op)
    yield from c("levels", (2, 2, 3, 2, 2), 1536, operands=_THREE, layout="reversed", options=gate)
    for out in FP8_FORMATS:
        special = [{"out_dtype": out} | way for way in ({}, _HF, groups, ue8m0, static)]
        yield from c("values", (9,), 384, values="special", options=special)
    offsets = [{"eps": 1e-5, "weight_offset": offset, "scale_ub": 448.0} for offset in (0.0, 1.0)]
    yield from c("pattern", [(6,), (2, 3), (2, 1, 3)], 120, values="pattern", options=offsets)
    yield from c("chunks", (9,), 5000, values="special")
    yield from c("chunks", (3, 4), 5000, layout="misaligned")
    yield from c("chunks", (4,), 3072, options=static)
    yield from c("chunks", (4,), 9216, options=groups)
    yield from c("chunks", (4,), 5000, operands=_THREE, residual=BF16, options=gate)
    yield from vllm_cases(op)
    yield from c("large", (2048,), 7168)


CASES = (
    *_rms_norm_cases("rms_norm"),
    *_fp8_cases("rms_norm_fused_fp8"),
    *quant_cases("rms_norm_fused_quant"),
    *norm_cases("rms_norm"),
    *layer_cases("layer_norm"),
    *code_cases("rms_norm_fused_quant"),
    *weight_cases("rms_norm"),
    *layer_weight_cases("layer_norm"),
    *fp8_weight_cases("rms_norm_fused_fp8"),
    *quant_weight_cases("rms_norm_fused_quant"),
)
SCALE_NAMES = {"rms_norm_fused_fp8": "scale_output", "rms_norm_fused_quant": "scale_out"}
"""The keyword for a tensor that receives the scales, by op."""
_OPS: dict[str, Any] = {
    "rms_norm": (RMS_NORM, rms_norm),
    "layer_norm": (LAYER_NORM, layer_norm),
    "rms_norm_fused_fp8": (RMS_NORM_FUSED_QUANT, rms_norm_fused_fp8),
    "rms_norm_fused_quant": (RMS_NORM_FUSED_QUANT, rms_norm_fused_quant),
}


# --- inputs and calls -----------------------------------------------------------------------------------------------


def inputs(case: Case, device: str, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of the public function."""
    contract, _ = _OPS[case.op]
    options = dict(case.options)
    static, bound, overall = (options.pop(name, None) for name in ("static_scale", "bounded", "global_scale"))
    further: dict[str, torch.dtype] = {name: options.pop(name) for name in ("gate", "bias") if name in options}
    optional = [name for name, wanted in (("residual", case.residual), ("static_scale", static)) if wanted]
    gamma = "head_gamma" if options.pop("heads", False) else "gamma"
    optional += [*further, gamma]
    own = case.x if case.x in FLOATS else F32
    dtypes = {"x": own, gamma: case.gamma or case.x, "residual": case.residual or own, "static_scale": F32}
    dtypes |= further
    sizes = {"N": case.n, "H": (1, *case.lead)[-1]}
    tensors: dict[str, Any] = {
        **sample(contract, sizes, case.lead, dtypes=dtypes, optional=optional, seed=seed + case.n)
    }
    tensors["gamma"] = tensors.pop(gamma)
    _set_values(tensors, case)
    if case.x not in FLOATS:
        tensors["x"] = (40 * tensors["x"]).clamp(-127, 127).to(case.x)
    for name in tensors.keys() & {"x", "residual", "gate"}:
        tensors[name] = lay_out(tensors[name], case.layout)
    if bound is not None:
        tensors["scale_ub"] = torch.tensor(bound)
    if overall is not None:
        tensors["global_scale"] = torch.tensor(overall)
    if case.operands:
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(_operand_shape(case, kind), generator=generator).to(own) for kind in case.operands]
        tensors["prologue_args"] = [lay_out(t, case.layout) if t.dim() > 1 and t.shape[-1] > 1 else t for t in made]
    return moved(tensors, device) | options


def _operand_shape(case: Case, kind: str) -> tuple[int, ...]:
    if kind.startswith("group"):
        return (*case.lead, case.n // int(kind.removeprefix("group")))
    return {"full": (*case.lead, case.n), "column": (case.n,), "row": (*case.lead, 1)}[kind]


def _set_values(tensors: dict[str, Tensor], case: Case) -> None:
    x, gamma = tensors["x"], tensors["gamma"]
    if case.values == "pattern":
        count = torch.arange(x.numel())
        x.copy_((0.05 + (3.0 - 0.05) * (count % 20) / 19).reshape(x.shape))
        gamma.copy_(0.5 + 0.1 * (torch.arange(case.n) % 11))
    elif case.values == "spread":  # float16 cannot represent the smallest of these
        gamma.mul_(2.0 ** (torch.arange(case.n) % 35 - 22))
    elif case.values == "special":
        set_special(x)
        if "residual" in tensors:
            tensors["residual"].zero_()


def call(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The public function's results as a tuple."""
    result = _OPS[case.op][1](**arguments)
    result = result if isinstance(result, tuple) else (result,)
    if case.options.get("scale_layout") == "128x4":
        return result[0], without_padding(result[1], math.prod(case.lead)), *result[2:]
    return result


def result_names(case: Case) -> list[str]:
    """The output keyword of each result, in order."""
    return _names(SCALE_NAMES.get(case.op), case.residual is not None, case.options)


def _names(scale: str | None, residual: bool, options: dict[str, Any]) -> list[str]:
    names = ["out"] + ([scale] if scale else []) + ["residual_out"] * residual
    return names + ["norm_out"] * bool(options.get("return_norm")) + ["rstd_out"] * bool(options.get("return_rstd"))


def zeroable(case: Case) -> list[tuple[int, str]]:
    """Position and name of each result that the kernel writes."""
    static = case.options.get("static_scale")
    return [(i, name) for i, name in enumerate(result_names(case)) if not (static and name in SCALE_NAMES.values())]


def call_out(case: Case, arguments: dict[str, Any], like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same call into the caller's poisoned outputs."""
    return call(case, arguments | {name: poisoned_like(like[index]) for index, name in zeroable(case)})


def variants(case: Case, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[tuple[str, Any]]:
    """Other ways to make the same call: into given outputs, and with the tiles of smaller or larger batches."""
    if not interpreting():  # there the first call was the same launch into poisoned memory
        yield "when written into the caller's tensors", call_out(case, arguments, results)
    for regime in others(math.prod(case.lead), case.n * max(2, case.x.itemsize)):
        with assuming(regime):
            yield f"with the tile of a {regime} batch", call_out(case, arguments, results)


# --- verification ---------------------------------------------------------------------------------------------------


def verify(case: Case, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results."""
    host, results = to_cpu(arguments), tuple(t.cpu() for t in results)
    if case.op == "layer_norm":
        host["statistic"] = "layer"
    wrong = None
    if case.options.get("quantize") == "divide" and case.options.get("return_norm"):
        wrong = verify_division(host, results[0], results[1], results[-1])
    return wrong or verify_call(host, results)


def verify_call(host: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results of any call: every value lies between bounds."""
    quantized, residual = results[0].dtype not in FLOATS, host.get("residual")
    names = _names("scale" if quantized else None, residual is not None, host)
    named, hf = dict(zip(names, results, strict=True)), host.get("rounding") == "hf"
    x, error, doubt = host["x"], compare.FLOAT32_ERROR, None
    h = x.float()
    if "prologue" in host:
        error *= 8
        h = host["prologue"](h.double(), *(per_column(t.double(), x.shape[-1]) for t in host["prologue_args"]))
        doubt = torch.where(h.isfinite(), h.abs() * error, 0.0)
    if host.get("gate") is not None and host.get("gate_order") == "before":
        error *= 8
        h = h.double() * activated(host["gate"].double(), host)
        doubt = torch.where(h.isfinite(), h.abs() * error, 0.0)
    if residual is not None:
        h = (h + residual.to(h.dtype)).double()
        summed = bounds.Bounds(h, h) if doubt is None else bounds.around(h, doubt)
        wrong = summed.stored(named["residual_out"])
        if wrong is not None:
            return f"new_residual: {wrong}"
        round_sum = host.get("round_sum")
        if hf if round_sum is None else round_sum:
            low, high = summed.rounded(residual.dtype)
            doubt = None if doubt is None else torch.where(low.isfinite() & high.isfinite(), high - low, 0.0)
            h = h.to(residual.dtype)
    h = h.double()
    if host.get("statistic") == "layer":
        h, doubt = centered(h, doubt)
    rs = bounds.reciprocal_rms(h, host.get("eps", 1e-6))
    wrong = verify_rstd(named["rstd_out"], rs, error, doubt) if "rstd_out" in named else None
    if wrong is not None:
        return f"rstd: {wrong}"
    g = bounds.weight(host["gamma"], host.get("weight_offset", 0.0))
    y = finished(bounds.normed(h, rs, g, x.dtype if hf else None, error, doubt), host)
    shown = "norm_out" if quantized else "out"
    wrong = y.stored(named[shown]) if shown in named else None
    if wrong is not None:
        return f"{shown}: {wrong}"
    if not quantized:
        return None
    if host.get("rounding") == "stored":
        y = y.rounded(x.dtype)
    q = described(host, named["out"], named["scale"])
    return q if isinstance(q, str) else _verify_codes(host, q, h, rs, g, y, error, doubt)


def _finishes(host: dict[str, Any]) -> bool:
    """Whether a bias or a gate follows gamma."""
    return host.get("bias") is not None or (host.get("gate") is not None and host.get("gate_order") != "before")


def _verify_codes(
    host: dict[str, Any],
    q: Quantized,
    h: Tensor,
    rs: Tensor,
    g: Tensor,
    y: bounds.Bounds,
    error: float,
    doubt: Tensor | None,
) -> str | None:
    group, rule, n = q.rule.group or None, q.rule, q.codes.shape[-1]
    normed = rule.divides or host.get("rounding", "once") != "once" or _finishes(host)
    if rule.kind == "static":
        stored = q.scale.double().reshape(()).expand(q.codes.shape)
    else:
        low, high = bounds.sizes(y)
        if not normed:  # amax is that of h * g, times rs
            size = (h * g).abs()
            off = (size if doubt is None else (h.abs() + doubt) * g.abs()) * rs * error + bounds.FLOOR * rs
            if doubt is not None:
                off = off + doubt * rs * g.abs() + size * rs * bounds.spread(doubt, rs)
            off = torch.where(size == 0, 0.0 if doubt is None else off, off)
            low, high = size * rs - off, size * rs + off
        bound = None if host.get("scale_ub") is None else float(host["scale_ub"])
        ends = bounds.largest(low, group), bounds.largest(high, group)
        wrong = bounds.scales(q.scale, *ends, bound, q.unit, rule, host.get("min_scale", 0.0), q.overall)
        if wrong is not None:
            return wrong
        stored = q.applied().repeat_interleave(group or n, -1)
    if normed:
        stored = torch.where(rs.isnan(), torch.nan, stored)
        codes = (bounds.codes_divided if rule.divides else bounds.codes_rounded)(y, stored)
    else:
        codes = bounds.codes_once(h, rs, g, stored, error, doubt)
    return compare.between(q.codes, *codes, q.fmt, q.limit)
