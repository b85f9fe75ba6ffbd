"""Cases of rms_norm and rms_norm_fused_fp8, and what the oracle says of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..formats import E4M3FN, FLOATS, FP8_FORMATS, QUANTIZED, ScaleRule
from ..ops.rms_norm import RMS_NORM, RMS_NORM_FUSED_FP8, rms_norm, rms_norm_fused_fp8
from ..prologues import Prologue, add, dequantize, prologue, sigmoid, silu_and_mul, tanh, where
from . import compare, oracle
from .batch_regime import assuming, others
from .case import Case, Layout, lay_out, on_device, poison, same_bytes, to_cpu
from .rms_norm_options import sum_cases, verify_division, vllm_cases
from .samples import sample

BF16, F16, F32 = FLOATS
E8M0 = torch.float8_e8m0fnu


@prologue
def soft_cap_gate(x, gate, bias, scale):  # type: ignore[no-untyped-def]
    """All three kinds of operand and most helpers."""
    capped = 3.0 * tanh((x + bias) / 3.0)
    return where(gate > 0, capped * sigmoid(gate), -0.5 * abs(capped)) * scale


LENGTHS = {
    "short": (1, 2, 31, 33, 64, 127, 128, 129, 200, 512),
    "model": (896, 2048, 2880, 4096, 5120, 7168, 8192),
    "odd": (1025, 4097, 7919),
    "wide": (12288, 16384, 16385, 20000, 131072),
}
"""short: several rows a program; model: hidden sizes, many in several chunks; odd: no vector divides them; wide: more chunks, then
rows that are walked."""

OTHER_GAMMAS = ((BF16, F16), (F16, BF16), (F32, BF16), (F32, F16))
"""Dtypes of x, and of a gamma that has neither x's dtype nor float32."""

_LAYOUTS: tuple[Layout, ...] = ("sliced", "misaligned", "expanded", "transposed")


def _rms_norm_cases() -> Iterator[Case]:
    op = "rms_norm"
    for group, lengths in LENGTHS.items():
        for n in lengths:
            yield Case(op, group, (5,), n)
    for x in FLOATS:
        for gamma in dict.fromkeys((x, F32)):
            for rounding in ("once", "hf"):
                for residual in dict.fromkeys((None, x, F32)):
                    yield Case(op, "dtypes", (3,), 640, x, gamma, residual, options={"rounding": rounding})
    for x, gamma in OTHER_GAMMAS:
        for rounding in ("once", "hf"):
            yield Case(op, "gammas", (3,), 640, x, gamma, options={"rounding": rounding})
        yield Case(op, "gammas", (5,), 4096, x, gamma, residual=x)
        yield Case(op, "gammas", (3,), 20000, x, gamma, options={"weight_offset": 1.0})
    yield Case(op, "gammas", (3, 4), 1536, F32, BF16, layout="misaligned")
    yield Case(op, "gammas", (9,), 384, F16, BF16, values="special")
    for layout in _LAYOUTS:
        for n in (128, 1536, 20000):
            yield Case(op, "layouts", (3, 4), n, layout=layout)
            yield Case(op, "layouts", (3, 4), n, residual=BF16, layout=layout)
    yield Case(op, "layouts", (2, 3, 4), 96, layout="transposed")
    yield Case(op, "levels", (2, 3, 2, 3), 128, layout="reversed")
    yield Case(op, "levels", (2, 2, 3, 2, 2), 1536, residual=BF16, layout="reversed")
    yield Case(op, "ranks", (), 300)
    yield Case(op, "ranks", (2, 1, 3, 2), 300)
    yield Case(op, "empty", (0,), 64)
    yield Case(op, "options", (4,), 512, options={"weight_offset": 1.0, "eps": 1e-5})
    yield Case(op, "options", (4,), 512, options={"eps": 0.0})
    for x in FLOATS:
        yield Case(op, "values", (9,), 384, x, values="special")
        yield Case(op, "values", (9,), 384, x, residual=x, values="special", options={"rounding": "hf"})
    yield Case(op, "values", (9,), 20000, values="special")
    for x in FLOATS:
        yield Case(op, "chunks", (3,), 3072, x, residual=x, options={"rounding": "hf"})
        yield Case(op, "chunks", (3,), 5000, x, F32, residual=F32)
    for layout in ("misaligned", "transposed"):
        yield Case(op, "chunks", (3, 4), 5000, layout=layout)
    yield Case(op, "chunks", (9,), 3072, values="special")
    yield from sum_cases(op, ("once", True), (64, 640, 4096, 5000, 20000))
    yield from sum_cases(op, ("hf", False), (640, 4096))
    yield Case(op, "large", (1024,), 8192)
    yield Case(op, "large", (2048,), 4096, residual=BF16)


def _lane_cases(op: str) -> Iterator[Case]:
    """Groups of rows in whole chunks, where a GPU leaves each chunk's scales to lanes of their own: a case a layout of the tile."""
    for n in (3072, 4096, 5120, 6144, 8192, 16384):
        yield Case(op, "lanes", (3,), n, options={"group_size": 128})
    for x in FLOATS:
        yield Case(op, "lanes", (3,), 4096, x, options={"group_size": 64})
        yield Case(op, "lanes", (3,), 7168, x, F32, options={"group_size": 128})
        yield Case(op, "lanes", (3,), 4096, options={"group_size": 128, "scales_dtype": x})
    yield Case(op, "lanes", (3,), 7168, residual=BF16, options={"group_size": 128, "return_norm": True})
    yield Case(op, "lanes", (3,), 4096, options={"group_size": 128, "weight_offset": 1.0, "scale_ub": 1.5})
    yield Case(op, "lanes", (3, 4), 4096, layout="transposed", options={"group_size": 128, "scale_layout": "column"})
    for out in FP8_FORMATS:
        for options in ({}, {"rounding": "hf"}, {"scale_format": "ue8m0"}):
            yield Case(
                op, "lanes", (9,), 4096, values="special", options={"group_size": 128, "out_dtype": out, **options}
            )


def _dequantize_cases(op: str) -> Iterator[Case]:
    """8-bit rows, and operands with a value per group of columns."""
    fp8, options = E4M3FN.dtype, {"prologue": dequantize}
    for x in QUANTIZED:
        yield Case(op, "dequantize", (4,), 1536, x, BF16, operands=("group128",), options=options)
        yield Case(op, "dequantize", (3,), 20480, x, BF16, residual=BF16, operands=("group128",), options=options)
        yield Case(op, "dequantize", (5,), 200, x, F32, operands=("row",), options={**options, "return_norm": True})
    for group in (32, 64, 256):
        yield Case(op, "dequantize", (4,), 768, fp8, BF16, operands=(f"group{group}",), options=options)
    shown = {**options, "group_size": 128, "return_norm": True}
    yield Case(op, "dequantize", (3,), 7168, fp8, BF16, BF16, operands=("group128",), options=shown)
    yield Case(op, "dequantize", (3,), 4096, torch.int8, F16, F32, operands=("row",), options=shown)
    for layout in ("sliced", "misaligned", "transposed"):
        yield Case(op, "dequantize", (3, 4), 640, fp8, BF16, BF16, ("group64",), layout, options=options)
    yield Case(op, "dequantize", (), 512, torch.int8, BF16, operands=("group64",), options=options)
    yield Case(op, "dequantize", (4,), 1536, BF16, operands=("group128",), options=options)
    three = ("full", "column", "group32")
    yield Case(op, "dequantize", (4,), 1536, fp8, BF16, BF16, three, options={"prologue": soft_cap_gate})


def _fp8_cases() -> Iterator[Case]:
    op, gate = "rms_norm_fused_fp8", {"prologue": soft_cap_gate}
    for group, lengths in LENGTHS.items():
        for n in lengths:
            yield Case(op, group, (5,), n)
    for x in FLOATS:
        for gamma in dict.fromkeys((x, F32)):
            for rounding in ("once", "hf"):
                yield Case(op, "dtypes", (4,), 640, x, gamma, options={"rounding": rounding})
        for scales in FLOATS:
            yield Case(op, "dtypes", (4,), 640, x, options={"scales_dtype": scales, "out_dtype": torch.float8_e4m3fnuz})
    for x, gamma in OTHER_GAMMAS:
        for rounding in ("once", "hf"):
            yield Case(op, "gammas", (4,), 640, x, gamma, options={"rounding": rounding})
        yield Case(op, "gammas", (3,), 4096, x, gamma, options={"group_size": 128})
        yield Case(op, "gammas", (3,), 20000, x, gamma, residual=x, options={"return_norm": True})
    for n in (384, 7168, 20480):
        for size in (64, 128):
            for order in ("row", "column"):
                yield Case(op, "groups", (6,), n, options={"group_size": size, "scale_layout": order})
        yield Case(op, "groups", (6,), n, options={"group_size": 128, "scale_format": "ue8m0", "scales_dtype": E8M0})
        yield Case(op, "groups", (6,), n, options={"group_size": 128, "scale_format": "ue8m0", "rounding": "hf"})
        yield Case(op, "groups", (6,), n, options={"group_size": 128}, layout="misaligned")
    yield Case(op, "groups", (2, 3), 256, options={"group_size": 64, "scale_layout": "column"})
    yield from _lane_cases(op)
    for n in (512, 20000):
        yield Case(op, "scales", (4,), n, options={"scale_format": "ue8m0", "scales_dtype": E8M0})
        yield Case(op, "scales", (4,), n, options={"scale_format": "ue8m0"})
        yield Case(op, "scales", (4,), n, options={"scale_ub": 1.5})
        yield Case(op, "scales", (4,), n, options={"static_scale": True})
        yield Case(op, "scales", (4,), n, options={"static_scale": True, "rounding": "hf"})
    yield Case(op, "scales", (4,), 512, options={"out_dtype": torch.float8_e4m3fnuz, "fp8_max": 224.0})
    yield Case(op, "scales", (4,), 512, options={"out_dtype": torch.float8_e4m3fnuz, "scale_ub": 1.0})
    for n in (640, 7168, 20000):
        yield Case(op, "outputs", (4,), n, residual=BF16)
        yield Case(op, "outputs", (4,), n, residual=F32, options={"return_norm": True, "rounding": "hf"})
        yield Case(op, "outputs", (4,), n, options={"return_norm": True})
    for n in (1536, 20000):
        yield Case(op, "prologues", (4,), n, operands=("full",), options={"prologue": silu_and_mul})
        yield Case(op, "prologues", (4,), n, operands=("full",), options={"prologue": add}, layout="sliced")
        yield Case(op, "prologues", (4,), n, operands=("row",), options={"prologue": dequantize})
        yield Case(
            op,
            "prologues",
            (4,),
            n,
            operands=("full", "column", "row"),
            residual=BF16,
            options={"prologue": soft_cap_gate},
        )
    yield from _dequantize_cases(op)
    for layout in _LAYOUTS:
        for n in (128, 1536, 20000):
            yield Case(op, "layouts", (3, 4), n, layout=layout)
    yield Case(op, "levels", (2, 3, 2, 3), 128, layout="reversed")
    yield Case(op, "levels", (2, 2, 3, 2, 2), 1536, operands=("full", "column", "row"), layout="reversed", options=gate)
    yield Case(op, "ranks", (), 300)
    yield Case(op, "ranks", (2, 1, 3, 2), 300)
    yield Case(op, "empty", (0,), 64)
    for out in FP8_FORMATS:
        for options in ({}, {"rounding": "hf"}, {"group_size": 128}, {"scale_format": "ue8m0"}, {"static_scale": True}):
            yield Case(op, "values", (9,), 384, values="special", options={"out_dtype": out, **options})
    yield Case(op, "values", (9,), 20000, values="special")
    for rank in ((6,), (2, 3), (2, 1, 3)):
        for offset in (0.0, 1.0):
            yield Case(
                op,
                "pattern",
                rank,
                120,
                values="pattern",
                options={"eps": 1e-5, "weight_offset": offset, "scale_ub": 448.0},
            )
    for x in FLOATS:
        yield Case(op, "chunks", (3,), 3072, x, F32, options={"rounding": "hf"})
    yield Case(op, "chunks", (9,), 5000, values="special")
    yield Case(op, "chunks", (3, 4), 5000, layout="misaligned")
    yield Case(op, "chunks", (4,), 3072, options={"static_scale": True})
    yield Case(op, "chunks", (4,), 9216, options={"group_size": 128})
    yield Case(op, "chunks", (4,), 5000, operands=("full", "column", "row"), residual=BF16, options=gate)
    yield from vllm_cases(op)
    yield Case(op, "large", (1024,), 8192)
    yield Case(op, "large", (2048,), 7168)


CASES = (*_rms_norm_cases(), *_fp8_cases())


def inputs(case: Case, device: str, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of the public function."""
    contract = RMS_NORM if case.op == "rms_norm" else RMS_NORM_FUSED_FP8
    options = dict(case.options)
    static, bound = options.pop("static_scale", False), options.pop("bounded", None)
    optional = [name for name, wanted in (("residual", case.residual), ("static_scale", static)) if wanted]
    own = case.x if case.x in FLOATS else F32
    dtypes = {"x": own, "gamma": case.gamma or case.x, "residual": case.residual or own, "static_scale": F32}
    tensors = sample(contract, {"N": case.n}, case.lead, dtypes=dtypes, optional=optional, seed=seed + case.n)
    _set_values(tensors, case)
    if case.x not in FLOATS:
        tensors["x"] = (40 * tensors["x"]).clamp(-127, 127).to(case.x)
    for name in ("x", "residual"):
        if name in tensors:
            tensors[name] = lay_out(tensors[name], case.layout)
    if bound is not None:
        tensors["scale_ub"] = torch.tensor(bound)
    arguments: dict[str, Any] = {**{k: on_device(v, device) for k, v in tensors.items()}, **options}
    if case.operands:
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(_operand_shape(case, kind), generator=generator).to(own) for kind in case.operands]
        arguments["prologue_args"] = [
            on_device(lay_out(t, case.layout) if t.dim() > 1 and t.shape[-1] > 1 else t, device) for t in made
        ]
    return arguments


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
    elif case.values == "special":
        x[0] = 0.0
        x[1] = -0.0
        x[2, 5] = torch.nan
        x[3, 7] = torch.inf
        x[4, case.n - 1] = -torch.inf
        x[5] *= 1e-3
        x[6] *= 1e4
        x[7] = 0.0
        x[7, 3] = -2.0
        if "residual" in tensors:
            tensors["residual"].zero_()


def call(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The public function's results as a tuple."""
    result = (rms_norm if case.op == "rms_norm" else rms_norm_fused_fp8)(**arguments)
    return result if isinstance(result, tuple) else (result,)


def result_names(case: Case) -> list[str]:
    """The keyword by which each result can be given, in the order they are returned."""
    names = ["out"]
    if case.op == "rms_norm_fused_fp8":
        names.append("scale_output")
    if case.residual is not None:
        names.append("residual_out")
    if case.options.get("return_norm"):
        names.append("norm_out")
    return names


def zeroable(case: Case) -> list[tuple[int, str]]:
    """Position and name of each result that the kernel writes."""
    static = case.options.get("static_scale")
    return [(i, name) for i, name in enumerate(result_names(case)) if not (static and name == "scale_output")]


def call_out(case: Case, arguments: dict[str, Any], like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same into poisoned outputs of the caller's."""
    static = "static_scale" in arguments
    given = {
        name: poison(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device))
        for name, t in zip(result_names(case), like, strict=True)
        if not (static and name == "scale_output")
    }
    return call(case, {**arguments, **given})


def verify(case: Case, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results."""
    host = {k: to_cpu(v) for k, v in arguments.items()}
    results = tuple(t.cpu() for t in results)
    fused: Prologue | None = host.get("prologue")
    if case.options.get("quantize") == "divide" and case.options.get("return_norm"):
        wrong = verify_division(host, results[0], results[1], results[-1])
        if wrong is not None:
            return wrong
    if host.get("rounding") == "hf":
        return _verify_rounded(case, host, dict(zip(result_names(case), results, strict=True)))
    exact = oracle.rms_norm(
        host["x"],
        host["gamma"],
        host.get("eps", 1e-6),
        weight_offset=host.get("weight_offset", 0.0),
        residual=host.get("residual"),
        prologue=fused,
        prologue_args=host.get("prologue_args", ()),
        round_sum=host.get("round_sum"),
    )
    error = compare.FLOAT32_ERROR * (8 if fused is not None else 1)
    expected = list(results)
    if case.op == "rms_norm":
        wrong = compare.floats(expected.pop(0), exact.y, error=error)
    else:
        ties = 0.01 if case.values == "pattern" else 0.001
        wrong = _verify_codes(host, exact, expected.pop(0), expected.pop(0), error, ties)
    if wrong is None and case.residual is not None:
        wrong = compare.floats(expected.pop(0), exact.h, error=error)
        wrong = wrong and f"new_residual: {wrong}"
    if wrong is None and case.options.get("return_norm"):
        wrong = compare.floats(expected.pop(0), exact.y, error=error)
        wrong = wrong and f"norm: {wrong}"
    return wrong


def _verify_codes(
    host: dict[str, Any], exact: oracle.Norm, out: Tensor, scale: Tensor, error: float, ties: float
) -> str | None:
    fmt = FP8_FORMATS[out.dtype]
    fp8_max = host.get("fp8_max") or fmt.max
    group = host.get("group_size")
    if "static_scale" in host:
        stored = scale.double().reshape(()).expand(out.shape)
    else:
        bound = None if host.get("scale_ub") is None else float(host["scale_ub"])
        step = oracle.quantization_step(
            exact.y, fp8_max, group_size=group, scale_ub=bound, min_scale=host.get("min_scale", 0.0)
        )
        rule = ScaleRule("group" if group else "row", scale.dtype, group or 0, host.get("scale_format") == "ue8m0")
        wrong = compare.scales(scale, step, rule, error=error)
        if wrong is not None:
            return wrong
        stored = compare.scale_values(scale).repeat_interleave(group or out.shape[-1], -1)
    return compare.codes(out, exact.y, stored, fmt, fp8_max, error=error, ties=ties)


def _verify_rounded(case: Case, host: dict[str, Any], results: dict[str, Tensor]) -> str | None:
    """The verdict on "hf", which rounds on the way: a value near the middle between two numbers may fall either way, amax with it.

    So every value has bounds: the exact one and its float32 error, taken through each rounding. Away from a middle they are one number.
    """
    from tools.fuzz import bounds  # draws calls of the op whose cases are here

    x, group = host["x"], host.get("group_size")
    h, error, doubt = x.float(), compare.FLOAT32_ERROR, None
    if "prologue" in host:
        error *= 8
        h = host["prologue"](h.double(), *(t.double() for t in host["prologue_args"]))
        doubt = torch.where(h.isfinite(), h.abs() * error, 0.0)
    if case.residual is not None:
        h = h + host["residual"].to(h.dtype)
        summed = bounds.around(h.double(), 0.0 if doubt is None else doubt)
        wrong = summed.stored(results["residual_out"])
        if wrong is not None:
            return f"new_residual: {wrong}"
        if host.get("round_sum") is not False:
            low, high = summed.rounded(case.residual)
            doubt = None if doubt is None else torch.where(low.isfinite() & high.isfinite(), high - low, 0.0)
            h = h.to(case.residual)
    h = h.double()
    rs = bounds.reciprocal_rms(h, host.get("eps", 1e-6))
    weight = bounds.weight(host["gamma"], host.get("weight_offset", 0.0))
    y = bounds.normed(h, rs, weight, x.dtype, error, doubt)
    for name in ("out",) if case.op == "rms_norm" else ("norm_out",) if case.options.get("return_norm") else ():
        wrong = y.stored(results[name])
        if wrong is not None:
            return f"{name}: {wrong}"
    if case.op == "rms_norm":
        return None
    out, scale = results["out"], results["scale_output"]
    fmt = FP8_FORMATS[out.dtype]
    fp8_max = host.get("fp8_max") or fmt.max
    stored = scale.double().reshape(()).expand(out.shape) if "static_scale" in host else None
    if stored is None:
        low, high = (bounds.largest(size, group) for size in bounds.sizes(y))
        rule = ScaleRule("group" if group else "row", scale.dtype, group or 0, host.get("scale_format") == "ue8m0")
        bound = None if host.get("scale_ub") is None else float(host["scale_ub"])
        wrong = bounds.scales(scale, low, high, bound, fp8_max, rule, host.get("min_scale", 0.0))
        if wrong is not None:
            return wrong
        stored = compare.scale_values(scale).repeat_interleave(group or out.shape[-1], -1)
    within = bounds.codes_divided if host.get("quantize") == "divide" else bounds.codes_rounded
    return within(out, y, torch.where(rs.isnan(), torch.nan, stored), fmt, fp8_max)


def run(case: Case, device: str, seed: int = 0) -> str | None:
    """Run a case allocating, into poisoned outputs, and as if its rows were more or fewer; None, or what is wrong."""
    arguments = inputs(case, device, seed)
    results = call(case, arguments)
    wrong = verify(case, arguments, results)
    if wrong is not None:
        return wrong
    if not _alike(results, call_out(case, arguments, results)):
        return "results differ when written into the caller's tensors"
    for crowd in others(math.prod(case.lead), case.n * max(2, case.x.itemsize)):
        with assuming(crowd):
            if not _alike(results, call_out(case, arguments, results)):
                return f"results differ with the tile of {crowd} rows"
    return None


def _alike(results: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return all(same_bytes(a, b) for a, b in zip(results, others, strict=True))
