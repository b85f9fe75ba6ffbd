"""Cases of gemv_and_partial_norm, and what the oracle says of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats import FLOATS, FP8_FORMATS, ScaleRule
from ..ops.gemv_norm import (
    GEMV,
    gemv_and_partial_norm,
    gemv_and_partial_norm_unfused_with_scratch,
    gemv_and_partial_norm_with_scratch,
    gemv_trace_blocks,
)
from ..trace import GemvEvent, GmemTrace, NullTrace, TraceBuf
from . import compare, oracle
from .case import Layout, Values, lay_out, on_device, poison, same_bytes, short_dtype, to_cpu
from .samples import sample

BF16, F16, F32 = FLOATS
E4M3, E4M3UZ = FP8_FORMATS


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
        """Whether Triton's interpreter gets through it in seconds."""
        most = 1 << 20 if self.fused else 1 << 17
        return self.group not in ("large", "traced", "families") and self.m * self.n * self.k <= most

    @property
    def name(self) -> str:
        """Readable and unique."""
        parts = [f"{self.m}x{self.n}x{self.k}", "+".join(map(str, self.widths)), short_dtype(self.act)]
        if self.weight is not None:
            parts.append(f"weight={short_dtype(self.weight)}")
        if self.gamma is not None:
            parts.append(f"gamma={short_dtype(self.gamma)}")
        if self.codes is not None:
            parts.append(f"normed={short_dtype(self.codes)}")
        parts += [
            word for word in (self.scale, self.layout, self.values) if word not in ("none", "contiguous", "normal")
        ]
        if not self.fused and self.group != "two launches":
            parts.append("two launches")
        return f"{self.group}: {' '.join(parts)}"


def _cases() -> Iterator[Case]:
    for m in range(1, 17):
        yield Case("rows", m, 48, 640, (24,))
    for k in (1, 2, 7, 8, 33, 64, 255, 512, 513, 1000, 2048, 2049, 2560):
        yield Case("k", 2, 20, k, (13,))
    for n, width in ((1, 1), (2, 1), (3, 3), (17, 5), (31, 31), (64, 64), (100, 37), (130, 129)):
        yield Case("columns", 1, n, 256, (width,))
        yield Case("columns", 9, n, 256, (width,))
    for act in FLOATS:
        for gamma in dict.fromkeys((act, F32)):
            for m in (1, 7):
                yield Case("dtypes", m, 40, 520, (24,), act, gamma=gamma)
        for gamma in FLOATS:
            if gamma not in (act, F32):
                for m in (1, 7):
                    yield Case("gammas", m, 40, 520, (24,), act, gamma=gamma)
                yield Case("gammas", 3, 70, 384, (32, 16), act, gamma=gamma, codes=E4M3)
                yield Case("gammas", 33, 40, 640, (24,), act, gamma=gamma, scale="row", fused=False)
        for m in (1, 16):
            yield Case("fp8 weights", m, 40, 1040, (24,), act, E4M3, scale="row")
    for scale in ("none", "tensor"):
        for m in (1, 4):
            yield Case("fp8 weights", m, 40, 1040, (24,), BF16, E4M3, scale=scale)
    yield Case("fp8 weights", 2, 40, 1041, (24,), BF16, E4M3, scale="row")
    for codes in FP8_FORMATS:
        yield Case("fp8 output", 3, 70, 384, (64,), codes=codes)
        yield Case("fp8 output", 16, 70, 384, (40,), codes=codes)
    yield Case("fp8 output", 2, 70, 384, (64,), F32, codes=E4M3)
    for widths in ((16, 16), (15, 17, 1), (8, 8, 8, 8), (1, 1, 1, 1)):
        for m in (1, 6):
            yield Case("segments", m, 80, 300, widths)
    yield Case("segments", 6, 80, 304, (30, 40), codes=E4M3)
    yield Case("segments", 1, 64, 320, (48, 16), gamma=F32)
    layouts: tuple[Layout, ...] = ("sliced", "misaligned")
    for layout in layouts:
        for m in (1, 3, 11):
            yield Case("layouts", m, 40, 512, (24,), layout=layout)
        yield Case("layouts", 2, 40, 512, (24,), F32, layout=layout)
        yield Case("layouts", 2, 40, 1024, (24,), weight=E4M3, scale="row", layout=layout)
    for m in (1, 16):
        yield Case("traced", m, 60, 1024, (24, 20), traced=True)
    yield Case("traced", 1, 2112, 7168, (1536,), traced=True)
    yield Case("traced", 2, 60, 1024, (24,), F32, traced=True)
    yield Case("empty", 0, 40, 64, (24,))
    for act in FLOATS:
        yield Case("values", 9, 48, 256, (24, 8), act, values="special")
    yield Case("values", 9, 48, 256, (24,), weight=E4M3, codes=E4M3UZ, values="special")
    for width in (513, 3000, 4096, 4097, 9000):
        yield Case("wide norms", 1, width + 5, 32, (width,))
        yield Case("wide norms", 5, width + 5, 32, (width,), codes=E4M3)
    for m in (1, 2, 4, 8, 16):
        yield Case("large", m, 2112, 7168, (1536,))
    for m in (1, 16):
        yield Case("large", m, 2112, 7168, (1536, 512), codes=E4M3)
        yield Case("large", m, 2112, 7168, (1536,), weight=E4M3, scale="row")
        yield Case("large", m, 2112, 7168, (1536,), F32)
        yield Case("large", m, 300, 40000, (200,))
    yield from _two_launches()
    yield Case("large", 1, 2112, 7168, (1536, 512))
    yield Case("large", 1, 2112, 5120, (1536,))
    yield Case("large", 1, 4096, 4096, (4096,))
    yield Case("large", 1, 2624, 6144, (2048,))
    yield Case("large", 16, 300, 16500, (200,), weight=E4M3, scale="row")
    yield Case("large", 16, 300, 9001, (200,), F32)


def _two_launches() -> Iterator[Case]:
    """Products of our own, which fp8 weights and scales ask for, with any number of rows."""
    for m in (1, 4, 16, 17, 40, 70, 300):
        yield Case("two launches", m, 40, 640, (24,), weight=E4M3, scale="row", fused=False)
    yield Case("two launches", 40, 10, 100, (7,), weight=E4M3, scale="row", fused=False)
    for act in FLOATS:
        yield Case("two launches", 33, 40, 700, (24,), act, E4M3, fused=False)
        yield Case("two launches", 65, 30, 320, (30,), act, scale="tensor", fused=False)
    layouts: tuple[Layout, ...] = ("sliced", "misaligned")
    for layout in layouts:
        yield Case("two launches", 40, 40, 512, (24,), weight=E4M3, scale="row", layout=layout, fused=False)
        yield Case("two launches", 40, 40, 512, (24,), scale="row", layout=layout, fused=False)
    yield Case("two launches", 20, 48, 256, (24,), weight=E4M3, values="special", fused=False)
    for m in (32, 64, 1000):
        yield Case("large", m, 2112, 7168, (1536,), weight=E4M3, scale="row", fused=False)
    yield Case("large", 64, 2112, 7168, (1536,), scale="row", fused=False)


CASES = tuple(_cases())


def inputs(case: Case, device: str, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of the public function."""
    gamma, weight = case.gamma or case.act, case.weight or case.act
    names = ["gamma", *(f"gamma{i}" for i in range(1, len(case.widths)))]
    dtypes = {"act": case.act, "weight": weight, "weight_scale": F32, **dict.fromkeys(names, gamma)}
    optional = [*names[1:], *(["weight_scale"] if case.scale != "none" else [])]
    sizes = {"M": case.m, "N": case.n, "K": case.k, "S": case.n if case.scale == "row" else 1}
    sizes.update({f"W{i}": width for i, width in enumerate(case.widths)})
    tensors = sample(GEMV, sizes, (), dtypes=dtypes, optional=optional, seed=seed + case.n)
    if case.values == "special":
        _set_values(tensors)
    for name in ("act", "weight"):
        tensors[name] = lay_out(tensors[name], case.layout)
    moved = {name: on_device(t, device) for name, t in tensors.items()}
    arguments: dict[str, Any] = {name: moved[name] for name in ("act", "weight", "gamma")}
    if "weight_scale" in moved:
        arguments["weight_scale"] = moved["weight_scale"]
    if len(names) > 1:
        arguments["segments"] = [moved[name] for name in names[1:]]
    if case.codes is not None:
        arguments["normed_dtype"] = case.codes
    return arguments


def _set_values(tensors: dict[str, Tensor]) -> None:
    """Rows of zeros, NaN, infinities, one value, tiny and large ones."""
    act = tensors["act"]
    act[0] = 0.0
    act[1] = -0.0
    act[2, 5] = torch.nan
    act[3, 7] = torch.inf
    act[4, -1] = -torch.inf
    act[5] *= 1e-3
    act[6] *= 1e3
    act[7] = 0.0
    act[7, 3] = -2.0


def call(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The public function's results; of a traced case those of the traced launch, of two launches the norm and all of y."""
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
    """The caller-scratch form into poisoned, strided outputs; also the counter it used."""
    given = []
    for t in like:
        wide = torch.empty(t.shape[0], t.shape[1] + 3, dtype=t.dtype, device=t.device)
        given.append(poison(wide)[:, 1 : 1 + t.shape[1]])
    rest = list(given)
    normed, unnormed = rest.pop(0), rest.pop()
    scale = rest.pop(0) if case.codes is not None else None
    counter = torch.zeros(len(case.widths), dtype=torch.int32, device=like[0].device)
    if not case.fused:
        call_two_launches(arguments, normed, unnormed)
        return tuple(given), counter
    trace: TraceBuf = NullTrace()
    if case.traced:
        named = (arguments["act"], arguments["weight"], arguments["gamma"], arguments.get("segments", ()))
        trace = GmemTrace.allocate(gemv_trace_blocks(*named), like[0].device)
    gemv_and_partial_norm_with_scratch(
        normed, unnormed, arguments["act"], arguments["weight"], arguments["gamma"], arguments.get("eps", 1e-6), counter, trace,
        segments=arguments.get("segments", ()), segment_outputs=rest, weight_scale=arguments.get("weight_scale"),
        scale_output=scale,
    )  # fmt: skip
    if isinstance(trace, GmemTrace):
        _check_trace(trace, len(case.widths))
    return tuple(given), counter


def call_two_launches(arguments: dict[str, Any], normed: Tensor, y: Tensor) -> None:
    """The form in two launches into the caller's tensors."""
    named = (arguments["act"], arguments["weight"], arguments["gamma"], arguments.get("eps", 1e-6))
    gemv_and_partial_norm_unfused_with_scratch(normed, *named, y, weight_scale=arguments.get("weight_scale"))


def _check_trace(trace: GmemTrace, segments: int) -> None:
    """Every block entered, looped and left, in that order; one a segment applied the norm; the rest of the slots is 0."""
    events = trace.events()
    if not events.any():  # nothing was launched: the call is being recorded
        return
    order = events[:, [GemvEvent.ENTER, GemvEvent.K_LOOP_START, GemvEvent.K_LOOP_END, GemvEvent.EXIT]]
    if not order.all() or (order.diff(dim=1) < 0).any():
        raise AssertionError("a block's events are missing or out of order")
    if int((events[:, GemvEvent.APPLY_END] > 0).sum()) != segments or events[:, 10:].any():
        raise AssertionError("the norm's events are not those of one block a segment")


def verify(case: Case, arguments: dict[str, Any], results: tuple[Tensor, ...]) -> str | None:
    """None, or what is wrong with the results."""
    host = {k: to_cpu(v) for k, v in arguments.items()}
    left = [t.cpu() for t in results]
    y, slack = oracle.matmul(host["act"], host["weight"], host.get("weight_scale"))
    if not case.fused:
        wrong = compare.near(left[1], y, slack)
        return f"y: {wrong}" if wrong else _verify_norm_of_stored(host, *left)
    gammas = [host["gamma"], *host.get("segments", ())]
    begin = 0
    for index, gamma in enumerate(gammas):
        part = slice(begin, begin + gamma.shape[0])
        begin = part.stop
        exact = oracle.rms_norm(y[:, part], gamma, host.get("eps", 1e-6)).y
        # the norm's error follows that of y: a column's own, and the root's of all columns
        size = y[:, part].square().mean(-1, keepdim=True).sqrt()
        error = (slack[:, part] + size * compare.FLOAT32_ERROR) / size.clamp(min=1e-30) * gamma.double().abs()
        if index == 0 and case.codes is not None:
            wrong = _verify_codes(left.pop(0), left.pop(0), exact, error)
        else:
            wrong = compare.near(left.pop(0), exact, error)
        if wrong is not None:
            return f"segment {index}: {wrong}"
    wrong = compare.near(left.pop(0), y[:, begin:], slack[:, begin:])
    return wrong and f"unnormed: {wrong}"


def _verify_norm_of_stored(host: dict[str, Any], normed: Tensor, y: Tensor) -> str | None:
    """In two launches the norm is that of y as it was stored."""
    exact = oracle.rms_norm(y[:, : normed.shape[1]], host["gamma"], host.get("eps", 1e-6)).y
    wrong = compare.near(normed, exact, exact.abs() * compare.FLOAT32_ERROR)
    return wrong and f"normed: {wrong}"


def _verify_codes(out: Tensor, scale: Tensor, exact: Tensor, error: Tensor) -> str | None:
    fmt = FP8_FORMATS[out.dtype]
    step = oracle.quantization_step(exact, fmt.max)
    relative = (
        float((error / exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)).nan_to_num(0.0).max())
        + compare.FLOAT32_ERROR
    )
    wrong = compare.scales(scale, step, ScaleRule("row", torch.float32), error=relative)
    if wrong is not None:
        return wrong
    return compare.codes(
        out, exact, scale.double().expand(exact.shape), fmt, fmt.max, error=8e-6, stray=0.002, ties=0.005
    )


def run(case: Case, device: str, seed: int = 0) -> str | None:
    """Run a case twice, allocating and into poisoned scratch; None, or what is wrong."""
    arguments = inputs(case, device, seed)
    results = call(case, arguments)
    wrong = verify(case, arguments, results)
    if wrong is not None:
        return wrong
    again, counter = call_scratch(case, arguments, results)
    if counter.any():
        return f"the counter is {counter.tolist()} after a call"
    for index, (first, second) in enumerate(zip(results, again, strict=True)):
        if not same_bytes(first, second):
            return f"result {index} differs when written into the caller's tensor"
        around = second.as_strided((second.shape[0], second.shape[1] + 3), second.stride(), second.storage_offset() - 1)
        if not all(_untouched(around[:, i]) for i in (0, -2, -1)):
            return f"result {index} was written beyond its columns"
    return None


def _untouched(column: Tensor) -> bool:
    return bool(column.clone(memory_format=torch.contiguous_format).view(torch.uint8).eq(0xFF).all())
