"""Random configurations of the row norms and of `quantize`: what determines machine code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import torch

from onepass.formats import (
    FLOATS,
    FP8_CODES,
    GROUP_SIZES,
    OPERAND_GROUPS,
    QUANT_FORMATS,
    QUANTIZE,
    QUANTIZED,
    ROUNDINGS,
    SCALE_FORMATS,
    SCALE_LAYOUTS,
)
from onepass.ops.rms_norm.launch import GATE_ACTIVATIONS, GATE_ORDERS
from onepass.prologues import Prologue, add, dequantize, silu_and_mul
from onepass.testing.rms_norm import soft_cap_gate
from tools.fuzz import draw

E8M0 = torch.float8_e8m0fnu
STORES_NORM = ("rms_norm", "layer_norm", "rms_norm_add_rms_norm")
"""Ops that store the norm alone."""
SANDWICH = ("rms_norm_add_rms_norm", "rms_norm_add_rms_norm_quant")
"""Ops with a post-norm, which always have a residual."""
PROLOGUES: dict[str, tuple[Prologue, tuple[str, ...]]] = {
    "silu_and_mul": (silu_and_mul, ("full",)),
    "add": (add, ("full",)),
    "dequantize": (dequantize, ("row",)),
    "dequantize groups": (dequantize, ("group",)),
    "soft_cap_gate": (soft_cap_gate, ("full", "column", "row")),
}
_LONG = (4096, 4097, 7168, 12288, 16384, 16385, 20000)
"""Lengths that each have their own machine code on a GPU."""


@dataclass(frozen=True)
class RowConfiguration:
    """What determines the machine code. ``lengths`` lists the row lengths to draw from where they do too."""

    op: str
    x: torch.dtype = torch.bfloat16
    gamma: torch.dtype | None = torch.bfloat16
    residual: torch.dtype | None = None
    rounding: str = "once"
    out: torch.dtype = torch.float8_e4m3fn
    fp8_max: float | None = None
    scales: torch.dtype = torch.float32
    group: int | None = None
    ue8m0: bool = False
    static: bool = False
    norm: bool = False
    prologue: str = ""
    operand: torch.dtype = torch.bfloat16
    operand_group: int = 0
    lengths: tuple[int, ...] = ()
    round_sum: bool | None = None
    quantize: str = "reciprocal"
    least: bool = False
    bounded: bool = False
    """Whether the upper bound of amax is a tensor."""
    format: str = ""
    """Of rms_norm_fused_quant."""
    scale_format: str = "float"
    layout: str = "row"
    overall: bool = False
    """Whether a number in memory multiplies the scales."""
    gate: torch.dtype | None = None
    gate_order: str = "after"
    gate_activation: str = "silu"
    bias: torch.dtype | None = None
    layer: bool = False
    y: torch.dtype | None = None
    """The dtype of a norm that is not quantized."""
    heads: bool = False
    """Whether each head has its own gamma."""
    rstd: bool = False
    post: torch.dtype | None = None
    """The dtype of a post-norm's gamma."""
    scaled: bool = False
    """Whether a number multiplies the post-norm."""

    @property
    def normed(self) -> bool:
        """Whether there is a norm."""
        return self.op != "quantize"

    @property
    def unit(self) -> int:
        """The number that row lengths are multiples of."""
        return max(1, self.group or 1, self.operand_group)


def configuration(op: str, r: Random, bounded: bool) -> RowConfiguration:
    """A random configuration that the contract allows."""
    x = r.choice(FLOATS)
    c = RowConfiguration(
        op,
        x,
        gamma=None if r.random() < 0.1 else r.choice((x, *FLOATS)),
        residual=r.choice((None, None, x, torch.float32)),
        rounding=r.choice(ROUNDINGS),
        lengths=(draw.size(r, 300), draw.size(r, 3000), r.choice(_LONG)) if bounded else (),
        round_sum=r.choice((None, None, True, False)),
    )
    if op in SANDWICH:
        return _sandwich(c, r)
    if not c.normed:
        gate, activation = r.choice((None, *FLOATS)), r.choice(GATE_ACTIVATIONS)
        c = replace(c, gamma=None, residual=None, round_sum=None, gate=gate, gate_activation=activation)
        return _limited(_formatted(c, r), r)
    if op in STORES_NORM:
        return _by_row(_finished(replace(c, y=r.choice((None, None, *FLOATS))), r), r)
    out = r.choice(tuple(FP8_CODES))
    static = r.random() < 0.15
    group = None if static or r.random() < 0.6 else r.choice(GROUP_SIZES)
    ue8m0 = not static and r.random() < 0.25
    if op == "rms_norm_fused_quant":
        c = _formatted(c, r)
        static, group = c.static, c.group
    prologue = r.choice(("", "", "", *PROLOGUES))
    c = replace(c, operand_group=r.choice(OPERAND_GROUPS) if prologue == "dequantize groups" else 0, group=group)
    if prologue and r.random() < 0.4:
        c = replace(
            c, x=r.choice(QUANTIZED), gamma=r.choice(FLOATS), residual=r.choice((None, *FLOATS)), rounding="once"
        )
    if c.format:
        least, bounded = (not static and r.random() < 0.3 for _ in range(2))
        lengths = tuple(-(-n // c.unit) * c.unit for n in c.lengths)
        c = replace(c, norm=r.random() < 0.3, prologue=prologue, quantize=r.choice(QUANTIZE), lengths=lengths)
        c = replace(c, least=least, bounded=bounded, operand=r.choice(FLOATS))
        return _by_row(c if prologue else _finished(c, r), r)
    c = replace(
        c,
        out=out,
        fp8_max=r.choice((None, *FP8_CODES[out].maxima)),
        static=static,
        ue8m0=ue8m0,
        scales=r.choice((torch.float32, E8M0)) if ue8m0 else r.choice(FLOATS),
        norm=r.random() < 0.3,
        prologue=prologue,
        quantize=r.choice(QUANTIZE),
        least=not static and r.random() < 0.3,
        bounded=not static and r.random() < 0.3,
        operand=r.choice(FLOATS),
        lengths=tuple(-(-n // c.unit) * c.unit for n in c.lengths),
    )
    return _by_row(c, r)


def _sandwich(c: RowConfiguration, r: Random) -> RowConfiguration:
    """A post-norm before the residual, without what only other ops have."""
    c = replace(c, gamma=r.choice((c.x, *FLOATS)), post=r.choice((c.x, *FLOATS)))
    c = replace(c, residual=r.choice((c.x, torch.float32)), scaled=r.random() < 0.3)
    if c.op in STORES_NORM:
        return replace(c, y=r.choice((None, None, *FLOATS)))
    return replace(_limited(_formatted(c, r), r), norm=r.random() < 0.3)


def _limited(c: RowConfiguration, r: Random) -> RowConfiguration:
    """Perhaps with limits of scales, and with lengths that have whole groups."""
    least, bounded = (not c.static and r.random() < 0.3 for _ in range(2))
    lengths = tuple(-(-n // c.unit) * c.unit for n in c.lengths)
    return replace(c, least=least, bounded=bounded, quantize=r.choice(QUANTIZE), lengths=lengths)


def _by_row(c: RowConfiguration, r: Random) -> RowConfiguration:
    """Perhaps with a gamma for each head, and the reciprocal RMS of rows."""
    return replace(c, heads=c.gamma is not None and r.random() < 0.2, rstd=r.random() < 0.2)


def _finished(c: RowConfiguration, r: Random) -> RowConfiguration:
    """Perhaps with a gate, a bias, or the statistic of LayerNorm."""
    layer = c.op == "layer_norm" or (c.op == "rms_norm_fused_quant" and r.random() < 0.2)
    return replace(
        c,
        gate=r.choice((None, None, *FLOATS)) if c.op != "layer_norm" else None,
        gate_order=r.choice(GATE_ORDERS),
        gate_activation=r.choice(GATE_ACTIVATIONS),
        bias=r.choice((None, None, *FLOATS)),
        layer=layer,
        rounding="once" if layer and c.rounding == "hf" else c.rounding,
    )


def _formatted(c: RowConfiguration, r: Random) -> RowConfiguration:
    """A format, with scales that it may have."""
    known = r.choice(tuple(QUANT_FORMATS.values()))
    static = None in known.groups and r.random() < 0.15
    scales = "float" if static else r.choice(known.scales)
    group = None if static else r.choice(known.groups)
    dtypes = SCALE_FORMATS[scales].dtypes
    layouts = [name for name in SCALE_LAYOUTS if name in ("row", "column", "column_tma") or group]
    layouts = [name for name in layouts if name != "128x4" or any(dtype.itemsize == 1 for dtype in dtypes)]
    layouts = [name for name in layouts if name != "column_packed" or torch.int32 in dtypes]
    layout = r.choice(layouts)
    if layout == "column_packed":
        dtypes = (torch.int32,)
    elif layout == "128x4":
        dtypes = tuple(dtype for dtype in dtypes if dtype.itemsize == 1)
    return replace(
        c,
        rounding=r.choice((*ROUNDINGS, "stored")),
        format=known.name,
        fp8_max=r.choice((None, *known.codes.maxima)),
        static=static,
        group=group,
        scale_format=scales,
        scales=r.choice([dtype for dtype in dtypes if dtype != torch.int32 or layout == "column_packed"]),
        layout=layout,
        overall=known.name == "nvfp4" and r.random() < 0.6,
    )
