"""Quantized results as plain codes and scales: 4-bit codes taken apart, scales read from every layout.

This is written from the layouts' definitions, index by index, and shares nothing with the kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import CODE_FORMATS, QUANT_FORMATS, SCALE_FORMATS, CodeFormat, ScaleRule
from ..ops.rms_norm import reference as rms_norm_reference


class Quantized(NamedTuple):
    """One byte per column, the sign of a float in bit 7, and a scale per row or group [..., G]."""

    fmt: CodeFormat
    limit: float
    rule: ScaleRule
    codes: Tensor
    scale: Tensor
    overall: float

    @property
    def unit(self) -> float:
        """What amax is divided by."""
        return self.fmt.largest_power if self.rule.floor else self.limit

    def applied(self) -> Tensor:
        """What codes are multiplied by, as float64: the scale, divided in float32 by the overall one."""
        scale = rms_norm_reference.scale_values(self.scale)
        if not self.rule.has_global:
            return scale
        return torch.where(scale == 0, 0.0, (scale.float() / self.overall).double())


def described(host: dict[str, Any], out: Tensor, scale: Tensor) -> Quantized | str:
    """The results of a quantizing norm with these arguments, or what is wrong with its padding."""
    quant = QUANT_FORMATS.get(host.get("format", ""))
    fmt = CODE_FORMATS[out.dtype] if quant is None else quant.codes
    limit = host.get("code_max") or host.get("fp8_max") or fmt.max
    codes, divides = _bytes(fmt, out), host.get("quantize") == "divide"
    if "static_scale" in host:
        return Quantized(fmt, limit, ScaleRule("static", torch.float32, divides=divides), codes, scale, 1.0)
    group = host.get("group_size") or (quant.groups[0] if quant is not None else 0) or 0
    encoding = SCALE_FORMATS[host.get("scale_format") or ("float" if quant is None else quant.scales[0])]
    overall = host.get("global_scale")
    plain = plain_scales(scale, codes.shape, group, host.get("scale_layout", "row"))
    if isinstance(plain, str):
        return plain
    rule = ScaleRule(
        "group" if group else "row",
        plain.dtype,
        group,
        encoding.power_of_two,
        divides,
        floor=encoding.floor,
        has_global=overall is not None,
    )
    return Quantized(fmt, limit, rule, codes, plain, 1.0 if overall is None else float(overall))


def _bytes(fmt: CodeFormat, out: Tensor) -> Tensor:
    """One byte per column."""
    if fmt.bits == 8:
        return out.contiguous().view(torch.uint8)
    pairs = torch.stack((out & 15, out >> 4), -1).flatten(-2)
    return (pairs & 7) | ((pairs & 8) << 4)


def plain_scales(scale: Tensor, shape: torch.Size, group: int | None, layout: str) -> Tensor | str:
    """Scales [..., G] from any layout, or what is wrong with the bytes that fill up a word or tile of four groups."""
    if layout not in ("column_packed", "128x4"):
        return scale
    groups = shape[-1] // (group or shape[-1])
    if layout == "column_packed":
        words = scale.long() & 0xFFFFFFFF
        spread = torch.stack([(words >> (8 * byte)) & 0xFF for byte in range(4)], -1).flatten(-2).to(torch.uint8)
        dtype = torch.float8_e8m0fnu
    else:
        spread = tiles(scale)[: shape[:-1].numel()].reshape(*shape[:-1], scale.shape[1])
        dtype = scale.dtype
    if bool(spread[..., groups:].any()):
        return "bytes after the last group are not zero"
    return spread[..., :groups].contiguous().view(dtype)


def tiles(scale: Tensor) -> Tensor:
    """The bytes of a tensor [128 a, 4 b] in tiles of 128 rows and 4 groups, as plain [128 a, 4 b]."""
    rows, groups = scale.shape
    return scale.contiguous().view(torch.uint8).flatten()[tile_index(rows, groups).to(scale.device)]


def tile_index(rows: int, groups: int) -> Tensor:
    """Where row r and group j are: [rows, groups]."""
    r, j = torch.arange(rows)[:, None], torch.arange(groups)[None, :]
    tile = (r // 128) * (groups // 4) + j // 4
    return tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + j % 4


def without_padding(scale: Tensor, count: int) -> Tensor:
    """A copy whose rows from ``count`` on, which kernels do not write, are zeros."""
    copy = scale.clone()
    index = tile_index(*scale.shape)[count:].flatten().to(scale.device)
    copy.view(torch.uint8).view(-1)[index] = 0
    return copy
