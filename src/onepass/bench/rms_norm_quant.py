"""rms_norm_fused_quant of bfloat16 rows, in each format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

import onepass

from ..contract.declaration import moved_bytes
from ..formats import E2M1, E4M3FN, INT8
from .workload import EPS, Family, Problem, Workload, metas, normed, randoms

OP: Final = "rms_norm_fused_quant"
SHAPES: Final = {
    (OP, "cuda"): tuple((m, 7168) for m in (1, 4096, 16384)),
    (OP, "cpu"): ((1, 4096), (256, 4096)),
}
_STEPS: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""The midpoints between the numbers of e2m1."""
FORMATS: Final[dict[str, dict[str, Any]]] = {
    "int8": {"format": "int8"},
    "e5m2": {"format": "e5m2"},
    "mxfp8": {"format": "mxfp8"},
    "mxfp4": {"format": "mxfp4"},
    "nvfp4": {"format": "nvfp4"},
    "nvfp4, 128x4": {"format": "nvfp4", "scale_layout": "128x4"},
    "fp8, groups of 128, packed": {
        "format": "e4m3fn",
        "group_size": 128,
        "scale_format": "ue8m0",
        "scale_layout": "column_packed",
    },
}
"""What is measured, by name."""


def _power(t: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(t.clamp(min=2.0**-126))))


def _pairs(y: Tensor) -> Tensor:
    """e2m1 codes, two in a byte."""
    codes = torch.bucketize(y.abs(), torch.tensor(_STEPS, device=y.device)).to(torch.uint8) + 8 * y.signbit().to(
        torch.uint8
    )
    low, high = codes[..., ::2], codes[..., 1::2]
    return low | (high << 4)


def composed(x: Tensor, gamma: Tensor, eps: float, name: str) -> tuple[Tensor, Tensor]:
    """The same in torch. Scales are stored row by row in every format."""
    y = normed(x, gamma, eps)
    if name in ("int8", "e5m2"):
        fmt = INT8.dtype if name == "int8" else torch.float8_e5m2
        limit = 127.0 if name == "int8" else 57344.0
        scale = y.abs().amax(-1, keepdim=True) / limit
        codes = (y / scale).clamp(-limit, limit)
        return (codes.round() if name == "int8" else codes).to(fmt), scale
    size = 16 if name.startswith("nvfp4") else 128 if name.startswith("fp8") else 32
    groups = y.unflatten(-1, (-1, size))
    limit = E2M1.max if name.startswith(("nvfp4", "mxfp4")) else E4M3FN.max
    scale = groups.abs().amax(-1, keepdim=True) / limit
    stored = scale.to(E4M3FN.dtype) if size == 16 else _power(scale)
    values = (groups / stored.float()).clamp(-limit, limit).flatten(-2)
    return _pairs(values) if limit == E2M1.max else values.to(E4M3FN.dtype), stored.squeeze(-1)


COMPOSED: Final[dict[str, Callable[..., object]]] = {name: partial(composed, name=name) for name in FORMATS}
"""One function per format, so that each is compiled once per shape."""


def problem(m: int, n: int, name: str, device: str) -> Problem:
    """Random inputs, and our call with outputs allocated beforehand."""
    x, gamma = randoms(device, (m, n), (n,))
    codes, scale = onepass.rms_norm_fused_quant(x, gamma, EPS, **FORMATS[name])
    ours = partial(onepass.rms_norm_fused_quant, x, gamma, EPS, **FORMATS[name], out=codes, scale_output=scale)
    return Problem(f"{OP}, {name}", {"onepass": ours}, COMPOSED[name], (x, gamma, EPS))


def workloads(op: str, shape: tuple[int, ...]) -> list[Workload]:
    """[M, N] in each format; N is a multiple of 128."""
    if len(shape) != 2 or shape[1] % 128:
        return []
    m, n = shape
    x, gamma = metas((m, n), (n,))
    found = []
    for name, options in FORMATS.items():
        plain = {key: value for key, value in options.items() if key != "scale_layout"}
        moved = moved_bytes([x, gamma, *onepass.rms_norm_fused_quant(x, gamma, **plain)])
        found.append(Workload(op, shape, moved, partial(problem, m, n, name), "halve", {"with": name}))
    return found


FAMILY = Family("formats", (OP,), SHAPES, workloads)
