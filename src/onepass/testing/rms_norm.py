"""The calls of the norms, of those that quantize, and of `quantize`, that `onepass check` makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..formats import FLOATS, FP8_FORMATS
from ..ops.rms_norm import reference
from ..ops.rms_norm.op import (
    layer_norm,
    quantize,
    rms_norm,
    rms_norm_add_rms_norm,
    rms_norm_add_rms_norm_quant,
    rms_norm_fused_fp8,
    rms_norm_fused_quant,
)
from ..prologues import add, dequantize, prologue, sigmoid, silu_and_mul, tanh, where
from . import compare
from .call import ERROR, Case, Expected, Random, bf16, case, e4m3fn, e4m3fnuz, f16, f32, int8
from .quantized import Quantized, described, without_padding

BF16, F16, F32 = FLOATS
FP8, FNUZ = FP8_FORMATS


@prologue
def soft_cap_gate(x, gate, bias, scale):  # type: ignore[no-untyped-def]
    """All three kinds of operand and most helpers."""
    capped = 3.0 * tanh((x + bias) / 3.0)
    return where(gate > 0, capped * sigmoid(gate), -0.5 * abs(capped)) * scale


def _quantized(op: Callable[..., tuple[Tensor, ...]], **arguments: Any) -> tuple[Tensor, ...]:
    out, scale, *others = op(**arguments)
    if arguments.get("scale_layout") == "128x4":
        scale = without_padding(scale, out.shape[:-1].numel())
    return out, scale, *others


FUNCTIONS: Final = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "rms_norm_fused_fp8": rms_norm_fused_fp8,
    "rms_norm_fused_quant": partial(_quantized, rms_norm_fused_quant),
    "rms_norm_add_rms_norm": rms_norm_add_rms_norm,
    "rms_norm_add_rms_norm_quant": partial(_quantized, rms_norm_add_rms_norm_quant),
    "quantize": partial(_quantized, quantize),
}
_DRAWS: Final = {BF16: bf16, F16: f16, F32: f32}
_OPERANDS: Final = [bf16(4, 1536), bf16(1536), bf16(4, 48, positive=True)]
_UPPER: Final = torch.tensor(1.5)
_VLLM: Final[dict[str, Any]] = {
    "scale_ub": _UPPER,
    "rounding": "hf",
    "round_sum": False,
    "quantize": "divide",
    "min_scale": 1 / (448 * 512),
    "return_norm": True,
}


def _norm(group: str, x: Random, gamma: Any = "x", /, op: str = "rms_norm", **more: Any) -> Case:
    """A case whose gamma has x's dtype, or bfloat16 if x holds codes, unless passed."""
    n = x.shape[-1]
    if gamma == "x":
        gamma = _DRAWS.get(x.dtype, bf16)(n)
    elif gamma is not None and not isinstance(gamma, Random):
        gamma = gamma(n)
    return case(op, group, x=x, gamma=gamma, **more)


_layer = partial(_norm, op="layer_norm")
_fp8 = partial(_norm, op="rms_norm_fused_fp8")
_quant = partial(_norm, op="rms_norm_fused_quant")


def _scales(*shape: int) -> dict[str, Any]:
    """Codes are multiplied by scales of this shape."""
    return {"prologue": dequantize, "prologue_args": [f32(*shape, positive=True)]}


def _sandwich(group: str, x: Random, /, gamma_pre: Any = None, residual: Any = None, **more: Any) -> Case:
    """A case of a post-norm, a sum and a pre-norm. The latter's gamma and the residual have x's dtype, unless passed."""
    own, n = _DRAWS[x.dtype], x.shape[-1]
    op = "rms_norm_add_rms_norm" + "_quant" * ("format" in more)
    tensors = {"gamma_post": own(n), "gamma_pre": (gamma_pre or own)(n), "residual": residual or own(*x.shape)}
    return case(op, group, x=x, **tensors, **more)


_SANDWICHES: Final[tuple[Case, ...]] = (
    _sandwich("short", bf16(5, 31)),
    _sandwich("wide", bf16(5, 20000)),
    _sandwich("gemma", bf16(5, 1152), weight_offset=1.0, round_sum=True),
    _sandwich("layouts", bf16(3, 4, 640, layout="transposed"), rounding="hf"),
    _sandwich("scaled", bf16(5, 640), rounding="hf", branch_scale=0.22),
    _sandwich("layouts", bf16(3, 4, 640, layout="misaligned")),
    _sandwich("dtypes", f16(3, 640), bf16, f32(3, 640), rounding="hf", round_sum=False),
    _sandwich("dtypes", f32(3, 640), f16, out_dtype=BF16),
    _sandwich("values", f16(9, 384, special=True), eps=1e-5),
    _sandwich("formats", bf16(5, 640), format="e4m3fn", return_norm=True),
    _sandwich("formats", bf16(5, 640), format="int8", group_size=64, rounding="hf"),
    _sandwich("formats", f16(5, 640), format="mxfp8", rounding="stored", scale_layout="column_packed"),
    _sandwich("formats", bf16(3, 44, 256), format="nvfp4", scale_layout="128x4"),
    _sandwich("formats", f32(4, 640), format="mxfp4", quantize="divide"),
    _sandwich("limits", bf16(5, 640), format="e4m3fn", static_scale=torch.tensor(0.02)),
    _sandwich("limits", bf16(5, 640), format="e5m2", scale_ub=_UPPER, min_scale=1e-4),
)
_rows = partial(case, "quantize")
_UNNORMED: Final[tuple[Case, ...]] = (
    _rows("short", x=bf16(5, 33)),
    _rows("wide", x=bf16(5, 20000), format="int8"),
    _rows("layouts", x=bf16(3, 4, 640, layout="transposed"), gate=bf16(3, 4, 640, layout="sliced")),
    _rows("layouts", x=bf16(3, 4, 640, layout="misaligned"), format="e4m3fnuz", group_size=64),
    _rows("values", x=bf16(9, 384, special=True), format="mxfp8", scale_layout="column_packed"),
    _rows("values", x=f16(9, 384, special=True), static_scale=torch.tensor(0.02), quantize="divide"),
    _rows("gate", x=bf16(5, 7168), gate=bf16(5, 7168), rounding="hf", group_size=128, scale_format="ue8m0"),
    _rows("gate", x=f16(5, 640), gate=f16(5, 640), rounding="stored", format="mxfp4", scale_layout="128x4"),
    _rows("gate", x=f32(4, 640), gate=bf16(4, 640), gate_activation="sigmoid", format="nvfp4", global_scale=_UPPER),
    _rows("limits", x=bf16(5, 640), format="e5m2", scale_ub=_UPPER, min_scale=1e-4),
)
CASES: Final[tuple[Case, ...]] = (
    _norm("short", bf16(5, 33)),
    _norm("wide", bf16(5, 20000)),
    _norm("layouts", bf16(3, 4, 128, layout="expanded")),
    _norm("layouts", bf16(3, 4, 128, layout="transposed"), None, weight_offset=0.0),
    _norm("dtypes", f16(3, 640), f32, rounding="once"),
    _norm("dtypes", bf16(3, 640), f16, weight_offset=1.0),
    _norm("dtypes", f16(5, 200), bf16, residual=f16(5, 200), rounding="hf", round_sum=False),
    _norm("sums", bf16(3, 4, 640, layout="misaligned"), residual=bf16(3, 4, 640), round_sum=True, return_rstd=True),
    _norm("sums", bf16(3, 4, 640), bf16(4, 640), residual=f32(3, 4, 640)),
    _norm("values", f16(9, 384, special=True), gate=f16(9, 384), eps=1e-5),
    _norm("gate", bf16(5, 128), gate=bf16(5, 128), gate_order="before"),
    _norm("gate", f32(3, 640), bf16, gate=f32(3, 640), bias=bf16(640), rounding="hf"),
    _norm("gate", bf16(3, 640), gate=f32(3, 640), gate_activation="sigmoid"),
    _norm("out dtype", bf16(3, 640), out_dtype=F16),
    _norm("out dtype", bf16(3, 640), out_dtype=F32),
    _norm("out dtype", f16(3, 640), out_dtype=BF16),
    _layer("short", bf16(5, 33)),
    _layer("dtypes", f16(3, 640), bf16, bias=f16(640), out_dtype=F32),
    _layer(
        "heads", f32(3, 4, 640), bf16(4, 640), residual=f32(3, 4, 640), round_sum=True, bias=f16(640), return_rstd=True
    ),
    _fp8("short", bf16(5, 33)),
    _fp8("scales", bf16(4, 640), scales_dtype=F16, out_dtype=FNUZ),
    _fp8("scales", f32(4, 640), scales_dtype=BF16, fp8_max=448.0),
    _fp8("scales", bf16(4, 512), out_dtype=FNUZ, fp8_max=224.0),
    _fp8("scales", bf16(6, 120), eps=1e-5, scale_ub=_UPPER, weight_offset=1.0),
    _fp8("groups", bf16(6, 384), group_size=64, scale_layout="row"),
    _fp8("groups", bf16(6, 384), group_size=64, scale_layout="column"),
    _fp8("groups", bf16(6, 384), group_size=128, scale_format="ue8m0"),
    _fp8("prologues", bf16(4, 1536), prologue=silu_and_mul, prologue_args=[bf16(4, 1536)]),
    _fp8("prologues", bf16(4, 1536, layout="sliced"), prologue=add, prologue_args=[bf16(4, 1536, layout="sliced")]),
    _fp8("prologues", e4m3fn(4, 1536), residual=bf16(4, 1536), prologue=soft_cap_gate, prologue_args=_OPERANDS),
    _fp8("dequantize", e4m3fnuz(5, 200), f32, **_scales(5, 1), return_norm=True),
    _fp8("dequantize", e4m3fn(4, 768), **_scales(4, 12), return_rstd=True),
    _fp8("dequantize", e4m3fn(4, 768), **_scales(4, 3)),
    _fp8("values", bf16(9, 384, special=True), out_dtype=FP8, static_scale=torch.tensor(0.02)),
    _fp8("vllm", f16(5, 640), residual=f16(5, 640), **_VLLM),
    _quant("formats", f16(3, 640), format="e5m2", rounding="stored"),
    _quant("formats", bf16(5, 640), format="e4m3fnuz", group_size=64),
    _quant("formats", bf16(2, 3, 2, 3, 128, layout="reversed"), format="nvfp4"),
    _quant("formats", int8(4, 1536), format="int8", **_scales(4, 12)),
    _quant("scales", bf16(5, 384), format="mxfp8", scale_format="ue8m0_floor", scales_dtype=F32),
    _quant("scales", bf16(5, 640), format="nvfp4", global_scale=torch.tensor(8.0)),
    _quant("places", bf16(5, 480), format="mxfp8", scale_layout="column_tma"),
    _quant("places", bf16(3, 44, 256, layout="transposed"), format="mxfp4", scale_layout="128x4"),
    _quant(
        "places",
        bf16(9, 384, special=True),
        code_max=448.0,
        group_size=128,
        scale_format="ue8m0",
        scale_layout="column_packed",
    ),
    _quant(
        "gate",
        f32(4, 640),
        gate=bf16(4, 640),
        gate_activation="sigmoid",
        statistic="layer",
        bias=f32(640),
        quantize="divide",
    ),
    *_SANDWICHES,
    *_UNNORMED,
)


def verify(op: str, host: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[Expected | str]:
    """The norm, or codes and scales, the new residual, and the reciprocal RMS."""
    options = dict(host, statistic="layer") if op == "layer_norm" else host
    quantized = "fused" in op or op.endswith(("quant", "quantize"))
    names = ["out", *["scale"] * quantized, *["residual"] * (host.get("residual") is not None)]
    names += [name for name in ("norm", "rstd") if host.get(f"return_{name}")]
    named = dict(zip(names, results, strict=True))
    y, summed, normed, error = _product(host) if op == "quantize" else _exact(options)
    if "residual" in named:
        yield Expected("new residual", named["residual"], summed, _post_error(host) + ERROR)
    if "rstd" in named:
        mean = normed.square().mean(-1) + host.get("eps", 1e-6)
        yield Expected("rstd", named["rstd"], torch.where(mean.isfinite(), mean.rsqrt(), torch.nan), error)
    shown = "norm" if quantized else "out"
    if shown in named:
        yield Expected(shown, named[shown], y, error)
    if quantized:
        q = described(host, named["out"], named["scale"])
        if isinstance(q, str):
            yield q
            return
        yield from _codes(host, q, y.to(host["x"].dtype).double() if host.get("rounding") == "stored" else y, error)


class _Exact(NamedTuple):
    """The norm and what it is of; ``summed``: with the residual, unrounded; ``error``: what roundings on the way leave."""

    y: Tensor
    summed: Tensor
    normed: Tensor
    error: float


def _post_error(host: dict[str, Any]) -> float:
    """What the rounding of a post-norm leaves."""
    return 3 * torch.finfo(host["x"].dtype).eps if "gamma_post" in host else 0.0


def _product(host: dict[str, Any]) -> _Exact:
    """What `quantize` quantizes."""
    rounding, activation = host.get("rounding", "once"), host.get("gate_activation", "silu")
    y = reference.gated(host["x"], host.get("gate"), activation, rounding)
    return _Exact(y, y, y, ERROR + (0.0 if rounding == "once" else 2 * torch.finfo(host["x"].dtype).eps))


def _exact(host: dict[str, Any]) -> _Exact:
    if "gamma_post" in host:
        numbers = (host.get("eps", 1e-6), host.get("branch_scale", 1.0), host.get("weight_offset", 0.0))
        post = reference.post_norm(host["x"], host["gamma_post"], *numbers, host.get("rounding", "once"))
        rest = {name: value for name, value in host.items() if name != "gamma_post"}
        exact = _exact(rest | {"x": post, "gamma": host["gamma_pre"]})
        return exact._replace(error=exact.error + _post_error(host))
    x, gate, rounding = host["x"], host.get("gate"), host.get("rounding", "once")
    names = ("residual", "prologue", "prologue_args")
    before: dict[str, Any] = {name: host[name] for name in names if name in host}
    factor = None if gate is None else reference.activate(gate.double(), host.get("gate_activation", "silu"))
    if factor is not None and host.get("gate_order") == "before":
        before |= {"prologue": torch.mul, "prologue_args": [factor]}
        factor = None
    eps, round_sum = host.get("eps", 1e-6), host.get("round_sum")
    summed, normed = (
        reference.rms_norm(x, None, eps, rounding=rounding, round_sum=rounds, **before).h
        for rounds in (False, round_sum)
    )
    if host.get("statistic") == "layer":
        normed = normed - normed.mean(-1, keepdim=True)

    def rounded(t: Tensor) -> Tensor:
        return t.to(x.dtype).double() if rounding == "hf" else t

    a = rounded(reference.rms_norm(normed, None, eps).y)
    gamma = torch.ones(1) if host["gamma"] is None else host["gamma"]
    y = rounded(a * (gamma.double() + host.get("weight_offset", 0.0)))
    y = y if host.get("bias") is None else rounded(y + host["bias"].double())
    y = y if factor is None else rounded(y * factor)
    return _Exact(y, summed, normed, ERROR + (0.0 if rounding == "once" else 2 * torch.finfo(x.dtype).eps))


def _codes(host: dict[str, Any], q: Quantized, y: Tensor, error: float) -> Iterator[Expected | str]:
    """The scales, by their rule, and the codes of ``y / scale`` with the scales that were stored."""
    if q.rule.kind == "static":
        stored = q.scale.double().reshape(()).expand(y.shape)
    else:
        amax = y.abs().unflatten(-1, (-1, q.rule.group or y.shape[-1])).amax(-1)
        amax = torch.where(amax.isfinite(), amax, torch.nan)
        if host.get("scale_ub") is not None:
            amax = amax.clamp(max=float(host["scale_ub"]))
        value = reference.scale_values(q.scale)
        least = torch.tensor(host.get("min_scale", 0.0)).double()
        ends = [(amax * (1 + e) / q.unit * q.overall).clamp(min=least) for e in (-error, error)]
        low, high = (compare.stored_scale(end, q.rule) for end in ends)
        right = ((low <= value) & (value <= high)) | (value.isnan() & amax.isnan())
        if value.shape != amax.shape or not right.all():
            yield f"scale: {int((~right).sum())} of {right.numel()} are not those of the rows or groups"
            return
        stored = q.applied().repeat_interleave(q.rule.group or y.shape[-1], -1)
    yield Expected("codes", q.codes, reference.divided(y, stored), error, q.fmt, q.limit)
