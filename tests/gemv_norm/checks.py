"""Cases of gemv_and_partial_norm: inputs, calls and verification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from onepass.formats import FLOATS, FP8_FORMATS, ScaleRule
from onepass.ops.gemv_norm import reference
from onepass.ops.gemv_norm.op import (
    GEMV,
    gemv_and_partial_norm,
    gemv_and_partial_norm_unfused_with_scratch,
    gemv_and_partial_norm_with_scratch,
    gemv_trace_blocks,
)
from onepass.ops.linear.reference import matmul
from onepass.ops.rms_norm.reference import divided
from onepass.testing import compare
from onepass.testing.tensors import Layout, lay_out, moved, set_special, short_dtype
from onepass.trace import GemvEvent, GmemTrace, NullTrace, TraceBuf
from tests.linear import bounds as linear_bounds
from tests.oracle import bounds
from tests.oracle.bounds import FLOOR, Bounds
from tests.oracle.case import GPU_ONLY, Values, case_name, labelled
from tests.oracle.memory import poison, to_cpu
from tests.oracle.samples import sample
from tests.oracle.weights import scales, whole_numbers

BF16, F16, F32 = FLOATS
E4M3, E4M3UZ = FP8_FORMATS
INT8 = torch.int8
BLOCKS = ("block", "ue8m0")
OPS: Final = ("gemv_and_partial_norm",)


@dataclass(frozen=True, eq=False)
class Case:
    """One call: sizes, segments, dtypes, layout and the kind of values."""

    group: str
    m: int
    n: int
    k: int
    widths: tuple[int, ...]
    act: torch.dtype = BF16
    weight: torch.dtype | None = None
    gamma: torch.dtype | None = None
    scale: str = "none"
    codes: torch.dtype | None = None
    layout: Layout = "contiguous"
    values: Values = "normal"
    traced: bool = False
    fused: bool = True
    op: str = "gemv_and_partial_norm"

    @property
    def interpretable(self) -> bool:
        """See `Check`."""
        most = 1 << 20 if self.fused else 1 << 17
        return self.group not in (*GPU_ONLY, "traced") and self.m * self.n * self.k <= most

    @property
    def name(self) -> str:
        """See `Check`."""
        shapes = f"{self.m}x{self.n}x{self.k}", "+".join(map(str, self.widths))
        dtypes = labelled("weight", self.weight), labelled("gamma", self.gamma), labelled("normed", self.codes)
        launches = "" if self.fused or self.group == "two launches" else "two launches"
        rest = self.scale, self.layout, self.values, launches
        return case_name(self.group, *shapes, short_dtype(self.act), *dtypes, *rest)


# --- inputs and calls -----------------------------------------------------------------------------------------------


def inputs(case: Case, device: str, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of the public function."""
    gamma, weight = case.gamma or case.act, case.weight or case.act
    names = ["gamma", *(f"gamma{i}" for i in range(1, len(case.widths)))]
    dtypes = {"act": case.act, "weight": weight, "weight_scale": F32, **dict.fromkeys(names, gamma)}
    optional = [*names[1:], *(["weight_scale"] if case.scale in ("row", "tensor") else [])]
    sizes = {"M": case.m, "N": case.n, "K": case.k, "S": case.n if case.scale == "row" else 1}
    sizes.update({f"W{i}": width for i, width in enumerate(case.widths)})
    if weight == INT8:
        dtypes["weight"] = F32
    tensors: dict[str, Any] = {**sample(GEMV, sizes, (), dtypes=dtypes, optional=optional, seed=seed + case.n)}
    if weight == INT8:
        tensors["weight"] = whole_numbers(tensors["weight"])
    if case.scale in BLOCKS:
        generator = torch.Generator().manual_seed(seed + case.n)
        tensors["weight_scale"] = scales(case.scale, case.n, case.k, generator, case.layout != "contiguous")
    if case.values == "special":
        set_special(tensors["act"], large=1e3)
    for name in ("act", "weight"):
        tensors[name] = lay_out(tensors[name], case.layout)
    if len(names) > 1:
        tensors["segments"] = [tensors.pop(name) for name in names[1:]]
    return moved(tensors, device) | ({} if case.codes is None else {"normed_dtype": case.codes})


def call(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The public function's results; those of the traced launch if traced; the norm and all of y for two launches."""
    if not case.fused:
        normed, unnormed = gemv_and_partial_norm(**arguments, fused=False)
        return normed, unnormed.as_strided((case.m, case.n), unnormed.stride(), 0)
    results = gemv_and_partial_norm(**arguments)
    return call_scratch(case, arguments, results)[0] if case.traced else results


def zeroable(case: Case) -> list[tuple[int, str]]:
    """Position and name of each result that the kernel writes."""
    names = ["normed", *(["scale"] if case.codes is not None else [])]
    names += [f"normed{i}" for i in range(1, len(case.widths))]
    if not case.fused:
        names.append("y")
    elif case.n > sum(case.widths):
        names.append("unnormed")
    return list(enumerate(names))


def call_scratch(case: Case, arguments: dict[str, Any], like: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
    """The caller-scratch form into poisoned, strided outputs; and the counter it used."""
    outputs = []
    for t in like:
        wide = torch.empty(t.shape[0], t.shape[1] + 3, dtype=t.dtype, device=t.device)
        outputs.append(poison(wide)[:, 1 : 1 + t.shape[1]])
    rest = list(outputs)
    normed, unnormed = rest.pop(0), rest.pop()
    scale = rest.pop(0) if case.codes is not None else None
    counter = torch.zeros(len(case.widths), dtype=torch.int32, device=like[0].device)
    if not case.fused:
        call_two_launches(arguments, normed, unnormed)
        return tuple(outputs), counter
    trace: TraceBuf = NullTrace()
    segments = arguments.get("segments", ())
    named = (arguments["act"], arguments["weight"], arguments["gamma"])
    if case.traced:
        trace = GmemTrace.allocate(gemv_trace_blocks(*named, segments), like[0].device)
    more = {"segments": segments, "segment_outputs": rest, "weight_scale": arguments.get("weight_scale")}
    eps = arguments.get("eps", 1e-6)
    gemv_and_partial_norm_with_scratch(normed, unnormed, *named, eps, counter, trace, scale_output=scale, **more)
    if isinstance(trace, GmemTrace):
        _check_trace(trace, len(case.widths), case.m)
    return tuple(outputs), counter


def call_two_launches(arguments: dict[str, Any], normed: Tensor, y: Tensor) -> None:
    """The two-launch form with the caller's output tensors."""
    named = (arguments["act"], arguments["weight"], arguments["gamma"], arguments.get("eps", 1e-6))
    gemv_and_partial_norm_unfused_with_scratch(normed, *named, y, weight_scale=arguments.get("weight_scale"))


def _check_trace(trace: GmemTrace, segments: int, rows: int) -> None:
    """Every block entered, looped and left, in that order. Up to one per row of a segment applied the norm. Other slots are 0."""
    events = trace.events()
    if not events.any():  # nothing was launched: the call is only recorded
        return
    order = events[:, [GemvEvent.ENTER, GemvEvent.K_LOOP_START, GemvEvent.K_LOOP_END, GemvEvent.EXIT]]
    if not order.all() or (order.diff(dim=1) < 0).any():
        raise AssertionError("a block's events are missing or out of order")
    if not segments <= int((events[:, GemvEvent.APPLY_END] > 0).sum()) <= segments * rows or events[:, 10:].any():
        raise AssertionError("the norm's events are not those of the last blocks of each segment")


def variants(case: Case, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[tuple[str, Any]]:
    """The caller-scratch form, which must reset its counter and leave neighbouring columns alone."""
    again, counter = call_scratch(case, arguments, results)
    if counter.any():
        raise AssertionError(f"the counter is {counter.tolist()} after a call")
    yield "when written into the caller's tensor", again
    for index, t in enumerate(again):
        around = t.as_strided((t.shape[0], t.shape[1] + 3), t.stride(), t.storage_offset() - 1)
        edges = (around[:, i].clone(memory_format=torch.contiguous_format).view(torch.uint8) for i in (0, -2, -1))
        if not all(bool(edge.eq(0xFF).all()) for edge in edges):
            raise AssertionError(f"result {index} was written beyond its columns")


# --- verification ---------------------------------------------------------------------------------------------------


def verify(case: Case, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong: every value lies between bounds, and most are those of the exact products."""
    host, results = to_cpu(arguments), tuple(t.cpu() for t in results)
    y = products(host, arguments["act"].is_cuda)
    act, weight, scale = host["act"], host["weight"], host.get("weight_scale")
    if case.fused:
        gammas = host["gamma"], *host.get("segments", ())
        exact = reference.gemv_and_partial_norm(act, weight, gammas, host.get("eps", 1e-6), scale)
        return verify_call(host, results, y, exact)
    wrong = y.stored(results[1]) or compare.mostly_equal(results[1], matmul(act, weight, scale)[0])
    return f"y: {wrong}" if wrong else verify_norm_of_stored(host, *results)


def products(host: dict[str, Any], on_gpu: bool) -> Bounds:
    """``act @ weight.T`` and the error of float32 sums."""
    return linear_bounds.products(host["act"], host["weight"], host.get("weight_scale"), on_gpu)


def verify_call(
    host: dict[str, Any], results: tuple[Tensor, ...], y: Bounds, exact: reference.Products | None = None
) -> str | None:
    """None, or what is wrong with the results of one fused launch; ``y`` are the `products`, ``exact`` without error."""
    left, begin, eps = list(results), 0, host.get("eps", 1e-6)
    for index, gamma in enumerate((host["gamma"], *host.get("segments", ()))):
        part = slice(begin, begin + gamma.shape[0])
        begin = part.stop
        out = left.pop(0)
        fmt = FP8_FORMATS.get(out.dtype)
        scale = None if fmt is None else left.pop(0)
        normed = normed_bounds(y.part(part), gamma.double(), eps)
        wrong = normed[0].stored(out) if scale is None else _verify_codes(out, scale, *normed)
        if wrong is None and exact is not None:
            norm = exact.normed[index] if scale is None else divided(exact.normed[index], scale)
            wrong = compare.mostly_equal(out, norm, fmt, 0.99 if fmt is None else 0.995)
        if wrong is not None:
            return f"segment {index}: {wrong}"
    wrong = y.part(slice(begin, None)).stored(left[0])
    if wrong is None and exact is not None:
        wrong = compare.mostly_equal(left[0], exact.unnormed)
    return wrong and f"unnormed: {wrong}"


def verify_norm_of_stored(host: dict[str, Any], normed: Tensor, y: Tensor) -> str | None:
    """With two launches, the norm is that of the stored y."""
    h = y[:, : normed.shape[1]].double()
    rs = bounds.reciprocal_rms(h, host.get("eps", 1e-6))
    wrong = bounds.normed(h, rs, host["gamma"].double(), None).stored(normed)
    return wrong and f"normed: {wrong}"


def normed_bounds(y: Bounds, gamma: Tensor, eps: float) -> tuple[Bounds, Tensor]:
    """The norm of a y that lies between bounds, and the smallest root."""
    least, most = bounds.sizes(y)
    slow, fast = bounds.reciprocal_rms(most, eps), bounds.reciprocal_rms(least, eps)
    ends = torch.stack([end * rs * gamma for end in y for rs in (slow, fast)])
    low, high = ends.amin(0), ends.amax(0)
    off = bounds.FLOAT32_ERROR
    low, high = low - low.abs() * off - FLOOR * (1 + gamma.abs()), high + high.abs() * off + FLOOR * (1 + gamma.abs())
    exact = ~(low.isfinite() & high.isfinite()) | (gamma == 0)
    return Bounds(torch.where(exact, ends[0], low), torch.where(exact, ends[3], high)), slow


def _verify_codes(codes: Tensor, scale: Tensor, normed: Bounds, slow: Tensor) -> str | None:
    fmt = FP8_FORMATS[codes.dtype]
    low, high = (bounds.largest(t, None) for t in bounds.sizes(normed))
    tiny = FLOOR * slow
    wrong = bounds.scales(scale, low - tiny, high + tiny, None, fmt.max, ScaleRule("row", torch.float32))
    if wrong is not None:
        return wrong
    stored = scale.double()
    if bool((slow / stored > 1e38).any()):
        return None  # the factor exceeds float32; the cases of rms_norm_fused_fp8 test these codes
    k = torch.where(stored == 0, 0.0, 1 / stored)
    low, high = (torch.where((end == 0) & ~k.isnan(), end, end * k) for end in normed)
    off, exact = bounds.FLOAT32_ERROR, low == 0
    low, high = torch.where(exact, low, low - low.abs() * off), torch.where(exact, high, high + high.abs() * off)
    return compare.between(codes, low, high, fmt)
