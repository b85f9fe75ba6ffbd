"""How cases of the norms, of those that quantize, and of `quantize` are called and verified."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onepass.formats import FLOATS, FP8_FORMATS
from onepass.ops.rms_norm.op import (
    LAYER_NORM,
    QUANTIZATION,
    RMS_NORM,
    RMS_NORM_ADD_RMS_NORM,
    RMS_NORM_ADD_RMS_NORM_QUANT,
    RMS_NORM_FUSED_QUANT,
    layer_norm,
    quantize,
    rms_norm,
    rms_norm_add_rms_norm,
    rms_norm_add_rms_norm_quant,
    rms_norm_fused_fp8,
    rms_norm_fused_quant,
)
from onepass.ops.rms_norm.reference import per_column
from onepass.testing import compare
from onepass.testing.quantized import Quantized, described, without_padding
from onepass.testing.tensors import lay_out, moved, set_special
from tests.oracle import bounds
from tests.oracle.batch_regime import assuming, others
from tests.oracle.case import Case
from tests.oracle.interpreter import interpreting
from tests.oracle.memory import poisoned_like, to_cpu
from tests.oracle.samples import sample
from tests.rms_norm.finish_bounds import activated, centered, finished, product
from tests.rms_norm.post_bounds import middle, post_sum

BF16, F16, F32 = FLOATS
E8M0, INT8, FP8, FNUZ = torch.float8_e8m0fnu, torch.int8, *FP8_FORMATS


SCALE_NAMES = {
    "rms_norm_fused_fp8": "scale_output",
    "rms_norm_fused_quant": "scale_out",
    "rms_norm_add_rms_norm_quant": "scale_out",
    "quantize": "scale_out",
}
"""The keyword for a tensor that receives the scales, by op."""


OPS: dict[str, Any] = {
    "rms_norm": (RMS_NORM, rms_norm),
    "layer_norm": (LAYER_NORM, layer_norm),
    "rms_norm_fused_fp8": (RMS_NORM_FUSED_QUANT, rms_norm_fused_fp8),
    "rms_norm_fused_quant": (RMS_NORM_FUSED_QUANT, rms_norm_fused_quant),
    "rms_norm_add_rms_norm": (RMS_NORM_ADD_RMS_NORM, rms_norm_add_rms_norm),
    "rms_norm_add_rms_norm_quant": (RMS_NORM_ADD_RMS_NORM_QUANT, rms_norm_add_rms_norm_quant),
    "quantize": (QUANTIZATION, quantize),
}


STATISTICS = {"layer_norm": "layer", "quantize": "none"}
"""What `verify_call` is told about ops that have no such option."""


# --- inputs and calls -----------------------------------------------------------------------------------------------


def inputs(case: Case, device: str, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of the public function."""
    contract, _ = OPS[case.op]
    options = dict(case.options)
    static, bound, overall = (options.pop(name, None) for name in ("static_scale", "bounded", "global_scale"))
    further: dict[str, torch.dtype] = {name: options.pop(name) for name in ("gate", "bias") if name in options}
    optional = [name for name, wanted in (("residual", case.residual), ("static_scale", static)) if wanted]
    sandwich, normed = "gamma_pre" in contract.args, case.op != "quantize"
    gamma = "gamma_pre" if sandwich else "head_gamma" if options.pop("heads", False) else "gamma"
    optional += [*further, gamma]
    own = case.x if case.x in FLOATS else F32
    dtypes = {"x": own, gamma: case.gamma or case.x, "residual": case.residual or own, "static_scale": F32}
    dtypes |= further
    if sandwich:
        dtypes["gamma_post"] = options.pop("post", case.gamma or case.x)
    sizes = {"N": case.n, "H": (1, *case.lead)[-1]}
    tensors: dict[str, Any] = {
        **sample(contract, sizes, case.lead, dtypes=dtypes, optional=optional, seed=seed + case.n)
    }
    if normed and not sandwich:
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
    x, gammas = tensors["x"], [tensors[name] for name in ("gamma", "gamma_post", "gamma_pre") if name in tensors]
    if case.values == "pattern":
        count = torch.arange(x.numel())
        x.copy_((0.05 + (3.0 - 0.05) * (count % 20) / 19).reshape(x.shape))
        for gamma in gammas:
            gamma.copy_(0.5 + 0.1 * (torch.arange(case.n) % 11))
    elif case.values == "spread":  # float16 cannot represent the smallest of these
        for gamma in gammas:
            gamma.mul_(2.0 ** (torch.arange(case.n) % 35 - 22))
    elif case.values == "special":
        set_special(x)
        if "residual" in tensors:
            tensors["residual"].zero_()


def call(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The public function's results as a tuple."""
    return _unpadded(case, OPS[case.op][1](**arguments))


def _unpadded(case: Case, result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Results as a tuple, without the padding of scales."""
    result = result if isinstance(result, tuple) else (result,)
    if case.options.get("scale_layout") == "128x4":
        return result[0], without_padding(result[1], math.prod(case.lead)), *result[2:]
    return result


def separate(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The results of `rms_norm` and the next norm as two calls."""
    rest = dict(arguments)
    x, gamma_post = rest.pop("x"), rest.pop("gamma_post")
    shared = {name: rest[name] for name in ("eps", "weight_offset", "rounding") if name in rest}
    if shared.get("rounding") == "stored":
        shared["rounding"] = "once"
    post = rms_norm(x, gamma_post, **shared)
    if "branch_scale" in rest:  # torch changes the bits of a NaN
        post = post * rest.pop("branch_scale")
    following: Any = rms_norm_fused_quant if case.op in SCALE_NAMES else rms_norm
    return _unpadded(case, following(post, gamma=rest.pop("gamma_pre"), **rest))


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
    if "gamma_post" in arguments:
        yield "from that of the separate calls", separate(case, arguments)
    for regime in others(math.prod(case.lead), case.n * max(2, case.x.itemsize)):
        with assuming(regime):
            yield f"with the tile of a {regime} batch", call_out(case, arguments, results)


# --- verification ---------------------------------------------------------------------------------------------------


def verify(case: Case, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results."""
    host, results = to_cpu(arguments), tuple(t.cpu() for t in results)
    if case.op in STATISTICS:
        host["statistic"] = STATISTICS[case.op]
    wrong = None
    if case.options.get("quantize") == "divide" and case.options.get("return_norm"):
        wrong = verify_division(host, results[0], results[1], results[-1])
    return wrong or verify_call(host, results)


def verify_call(host: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results of any call: every value lies between bounds."""
    if host.get("statistic") == "none":
        return _verify_rows(host, *results)
    quantized, residual = results[0].dtype not in FLOATS, host.get("residual")
    names = _names("scale" if quantized else None, residual is not None, host)
    named, hf = dict(zip(names, results, strict=True)), host.get("rounding") == "hf"
    x, error, doubt = host["x"], bounds.FLOAT32_ERROR, None
    h = x.float()
    if "prologue" in host:
        error *= 8
        h = host["prologue"](h.double(), *(per_column(t.double(), x.shape[-1]) for t in host["prologue_args"]))
        doubt = torch.where(h.isfinite(), h.abs() * error, 0.0)
    if host.get("gate") is not None and host.get("gate_order") == "before":
        error *= 8
        h = h.double() * activated(host["gate"].double(), host)
        doubt = torch.where(h.isfinite(), h.abs() * error, 0.0)
    round_sum = host.get("round_sum")
    round_sum = hf if round_sum is None else round_sum
    if "gamma_post" in host:
        summed = post_sum(host)
        wrong = summed.stored(named["residual_out"])
        if wrong is not None:
            return f"new_residual: {wrong}"
        h, doubt = middle(summed.rounded(host["residual"].dtype) if round_sum else summed)
    elif residual is not None:
        h = (h + residual.to(h.dtype)).double()
        summed = bounds.Bounds(h, h) if doubt is None else bounds.around(h, doubt)
        wrong = summed.stored(named["residual_out"])
        if wrong is not None:
            return f"new_residual: {wrong}"
        if round_sum:
            low, high = summed.rounded(residual.dtype)
            doubt = None if doubt is None else torch.where(low.isfinite() & high.isfinite(), high - low, 0.0)
            h = h.to(residual.dtype)
    h = h.double()
    if host.get("statistic") == "layer":
        h, doubt = centered(h, doubt)
    rs = bounds.reciprocal_rms(h, host.get("eps", 1e-6))
    wrong = _verify_rstd(named["rstd_out"], rs, error, doubt) if "rstd_out" in named else None
    if wrong is not None:
        return f"rstd: {wrong}"
    g = bounds.weight(host["gamma_pre" if "gamma_pre" in host else "gamma"], host.get("weight_offset", 0.0))
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


def _verify_rows(host: dict[str, Any], out: Tensor, scale: Tensor) -> str | None:
    """None, or what is wrong with codes and scales of rows without a norm."""
    y, one = product(host), torch.ones(1, dtype=torch.float64)
    q = described(host, out, scale)
    return q if isinstance(q, str) else _verify_codes(host, q, y.low, one, one, y, bounds.FLOAT32_ERROR, None)


def _verify_rstd(actual: Tensor, rs: Tensor, error: float, doubt: Tensor | None) -> str | None:
    """None, or what is wrong with the reciprocal RMS of rows whose own values may be off by ``doubt``."""
    off = rs * error if doubt is None else rs * (error + bounds.spread(doubt, rs))
    return bounds.Bounds(*(end.squeeze(-1) for end in bounds.around(rs, off))).stored(actual)


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
    normed = (
        rule.divides or host.get("rounding", "once") != "once" or _finishes(host) or host.get("statistic") == "none"
    )
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


def verify_division(host: dict[str, Any], out: Tensor, scale: Tensor, norm: Tensor) -> str | None:
    """With the quantized norm stored, scales and codes are known to the byte. Multiplying by a reciprocal would not
    give them all.
    """
    if norm.dtype != torch.float32 and host.get("rounding") != "hf":
        return None
    fmt, group = FP8_FORMATS[out.dtype], host.get("group_size") or norm.shape[-1]
    fp8_max = host.get("fp8_max") or fmt.max
    grouped = norm.float().unflatten(-1, (-1, group))
    if "static_scale" not in host and scale.dtype == torch.float32:
        amax = grouped.abs().amax(-1)
        bound = math.inf if host.get("scale_ub") is None else float(host["scale_ub"])
        wanted = (amax if math.isnan(bound) else amax.clamp(max=bound)) / fp8_max
        wanted = torch.maximum(wanted, torch.tensor(host.get("min_scale", 0.0)))
        known = amax.isfinite()
        if not torch.equal(wanted.view(torch.int32)[known], scale.view(torch.int32)[known]):
            return "scales are not those of the stored norm"
    divided = grouped / torch.where(scale == 0, math.inf, scale.float()).unsqueeze(-1)
    codes = compare.encoded(divided.flatten(-2).double(), fmt, fp8_max)
    different = int((codes != out.view(torch.uint8)).sum())
    return f"{different} codes are not those of the stored norm divided by its scale" if different else None
