"""rms_norm_fused_quant of bfloat16 rows in each format, also of LayerNorm and of gated rows, and the gated norm alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

import onepass
from onepass.formats import E2M1, E4M3FN, QUANT_FORMATS

from .workload import EPS, Family, Problem, Workload, metas, moved_bytes, normed, randoms

OP, GATED = "rms_norm_fused_quant", "rms_norm, gated"
_ON_GPU, _ON_CPU = tuple((m, 7168) for m in (1, 4096, 16384)), ((1, 4096), (256, 4096))
SHAPES: Final = {(op, device): shapes for op in (OP, GATED) for device, shapes in (("cuda", _ON_GPU), ("cpu", _ON_CPU))}
_STEPS: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""The midpoints between the numbers of e2m1."""
STATIC: Final = "e4m3fn, given scale"
FORMATS: Final[dict[str, dict[str, Any]]] = {
    "e4m3fn": {"format": "e4m3fn"},
    "e4m3fn, groups of 128": {"format": "e4m3fn", "group_size": 128},
    "e4m3fn, groups of 128, packed": {
        "format": "e4m3fn",
        "group_size": 128,
        "scale_format": "ue8m0",
        "scale_layout": "column_packed",
    },
    STATIC: {"format": "e4m3fn"},
    "e5m2": {"format": "e5m2"},
    "int8": {"format": "int8"},
    "int8, groups of 128": {"format": "int8", "group_size": 128},
    "mxfp8": {"format": "mxfp8"},
    "mxfp4": {"format": "mxfp4"},
    "nvfp4": {"format": "nvfp4"},
    "nvfp4, 128x4": {"format": "nvfp4", "scale_layout": "128x4"},
    "e4m3fn, LayerNorm": {"format": "e4m3fn", "statistic": "layer"},
    "e4m3fn, gated": {"format": "e4m3fn"},
}
"""What is measured, by name: the options of a call, and in the name a given scale or a gate."""


def _power(t: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(t.clamp(min=2.0**-126))))


def _pairs(y: Tensor) -> Tensor:
    """e2m1 codes, two in a byte."""
    codes = torch.bucketize(y.abs(), torch.tensor(_STEPS, device=y.device)).to(torch.uint8) + 8 * y.signbit().to(
        torch.uint8
    )
    low, high = codes[..., ::2], codes[..., 1::2]
    return low | (high << 4)


def gated(x: Tensor, gamma: Tensor, eps: float, gate: Tensor) -> Tensor:
    """`onepass.rms_norm` with a gate in torch."""
    return (normed(x, gamma, eps) * functional.silu(gate.float())).to(x.dtype)


def composed(x: Tensor, gamma: Tensor, eps: float, *more: Tensor, name: str) -> object:
    """The same in torch. Scales are stored row by row in every format."""
    options = FORMATS[name]
    h = x.float()
    y = normed(h - h.mean(-1, keepdim=True) if "statistic" in options else h, gamma, eps)
    if name.endswith("gated"):
        y = y * functional.silu(more[0].float())
    known = QUANT_FORMATS[options["format"]]
    limit, dtype = known.codes.max, known.codes.dtype
    if name == STATIC:
        return (y / more[0]).clamp(-limit, limit).to(dtype)
    size = options.get("group_size") or known.groups[0] or y.shape[-1]
    groups = y.unflatten(-1, (-1, size))
    scale = groups.abs().amax(-1, keepdim=True) / limit
    stored = scale
    if known.scales[0] != "float" or "scale_format" in options:
        stored = scale.to(E4M3FN.dtype) if size == 16 else _power(scale)
    values = (groups / stored.float()).clamp(-limit, limit).flatten(-2)
    if limit == E2M1.max:
        return _pairs(values), stored.squeeze(-1)
    return (values.round() if known.codes.integer else values).to(dtype), stored.squeeze(-1)


COMPOSED: Final[dict[str, Callable[..., object]]] = {name: partial(composed, name=name) for name in FORMATS}
"""One function per format, so that each is compiled once per shape."""


def _more(name: str, m: int, n: int, device: str) -> dict[str, Tensor]:
    """Further tensors of a call. A given scale of 1 is the same for peers that multiply by it or divide."""
    if name == STATIC:
        return {"static_scale": torch.ones(1, device=device)}
    return {"gate": randoms(device, (m, n))[0]} if name.endswith("gated") else {}


def problem(m: int, n: int, name: str, device: str) -> Problem:
    """Random inputs, and our call with outputs allocated beforehand."""
    x, gamma = randoms(device, (m, n), (n,))
    more = _more(name, m, n, device)
    given: dict[str, Any] = {**FORMATS[name], **more}
    codes, scale = onepass.rms_norm_fused_quant(x, gamma, EPS, **given)
    given |= {"out": codes} | ({} if name == STATIC else {"scale_out": scale})
    ours = partial(onepass.rms_norm_fused_quant, x, gamma, EPS, **given)
    return Problem(f"{OP}, {name}", {"onepass": ours}, COMPOSED[name], (x, gamma, EPS, *more.values()))


def gated_problem(m: int, n: int, device: str) -> Problem:
    """The gated norm that is not quantized."""
    x, gamma = randoms(device, (m, n), (n,))
    gate = torch.randn_like(x)
    ours = partial(onepass.rms_norm, x, gamma, EPS, gate=gate, out=torch.empty_like(x))
    return Problem(GATED, {"onepass": ours}, gated, (x, gamma, EPS, gate))


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """[M, N] in each format; N is a multiple of 128."""
    if len(shape) != 2 or shape[1] % 128:
        return []
    m, n = shape
    x, gamma = metas((m, n), (n,))
    if op == GATED:
        make = partial(gated_problem, m, n)
        return [Workload(op, shape, moved_bytes([x, gamma, x, x]), make, "copy", {}, ("rms_norm",), slow=False)]
    found = []
    for name, options in FORMATS.items():
        plain = {key: value for key, value in options.items() if key != "scale_layout"}
        gates = [x] if name.endswith("gated") else []
        moved = moved_bytes([x, gamma, *gates, *onepass.rms_norm_fused_quant(x, gamma, **plain)])
        make = partial(problem, m, n, name)
        found.append(Workload(op, shape, moved, make, "halve", {"with": name}, slow=False))
    return found


FAMILY = Family("formats", (OP, GATED), SHAPES, workloads, "MxN, N a multiple of 128")
