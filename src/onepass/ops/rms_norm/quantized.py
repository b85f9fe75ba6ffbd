"""Norms that are quantized: from the arguments of a validated call to a `RowCall`, and from its results to the caller's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...core.contract import Contract, describe
from ...core.op import Op
from ...core.scale_layout import PACKINGS, bytes_of_words
from ...formats import QUANT_FORMATS, SCALE_FORMATS, CodeFormat, ScaleKind, ScaleRule
from ...prologues import Prologue
from .call import run_rows
from .finish import Gating, SpecCache, further, operand_of, with_rows
from .spec import NOTHING_AFTER, RowCall, row_spec


def quantized_norm(spec_cache: SpecCache, a: Any) -> None:
    """Run a validated call of `rms_norm_fused_quant`."""
    scale = bytes_of_words(a.scale_out) if a.scale_layout == "column_packed" else a.scale_out
    further = (a.global_scale, a.gate, a.bias, a.statistic == "layer")
    _quantized(spec_cache, a, QUANT_FORMATS[a.format].codes, a.code_max, scale, *further)


def _quantized(
    spec_cache: SpecCache,
    a: Any,
    codes: CodeFormat,
    limit: float | None,
    scale: Tensor | None,
    global_scale: Tensor | None = None,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    centered: bool = False,
) -> None:
    tensors, prologue, after = a.prologue_args, a.prologue, NOTHING_AFTER
    gating: Gating = ("after", "silu") if gate is None else (a.gate_order, a.gate_activation)
    operands = tuple([operand_of(t, a.x) for t in tensors]) if tensors else ()
    if gate is not None or bias is not None:
        prologue, tensors, operands, after = further(prologue, tensors, gate, gating, bias, a.x)
    residual_dtype = None if a.residual is None else a.residual.dtype
    gamma = a.gamma if a.head_gamma is None else a.head_gamma
    dtypes = (a.x.dtype, None if gamma is None else gamma.dtype, residual_dtype)
    given = (a.static_scale is None, a.scale_ub_tensor is None, global_scale is None, a.head_gamma is None)
    key = (*dtypes, *given, operands, after)
    spec = spec_cache.get(key)
    if spec is None:
        kind: ScaleKind = "static" if a.static_scale is not None else "group" if a.group_size else "row"
        encoding = SCALE_FORMATS[a.scale_format]
        one_scale = torch.float8_e8m0fnu if a.scales_dtype == torch.int32 else a.scales_dtype
        rule = ScaleRule(
            kind,
            torch.float32 if kind == "static" else one_scale,
            a.group_size or 0,
            ue8m0=encoding.power_of_two,
            divides=a.quantize == "divide",
            has_least=a.min_scale > 0,
            bound_in_memory=a.scale_ub_tensor is not None,
            floor=encoding.floor,
            has_global=global_scale is not None,
            packing=PACKINGS.get(a.scale_layout, ""),
        )
        norm_dtype = None if a.norm_out is None else a.norm_out.dtype
        quantized: tuple[Any, ...] = (
            a.rounding,
            prologue,
            operands,
            codes.dtype,
            limit or codes.max,
            rule,
            a.round_sum,
        )
        options: dict[str, Any] = {"after": after, "centered": centered, "gate_activation": gating[1]}
        options |= {"per_row": a.head_gamma is not None, "rstd": a.rstd_out is not None}
        spec = spec_cache[key] = row_spec(*dtypes, norm_dtype, *quantized, **options)
    number = a.static_scale if global_scale is None else global_scale
    inputs = (a.x, a.gamma, a.eps, a.weight_offset, a.residual, tensors, number)
    outs = (a.norm_out, a.out, scale, a.residual_out)
    scale_ub = math.inf if a.scale_ub is None else a.scale_ub
    call = RowCall(spec, *inputs, *outs, scale_ub, a.scale_ub_tensor, a.min_scale)
    run_rows(with_rows(call, a.head_gamma, a.rstd_out))


def prologue_key(contract: Contract, prologue: object) -> str:
    """The name under which the kernels find a prologue."""
    if prologue is None:
        return ""
    if not isinstance(prologue, Prologue):
        contract.fail("prologue", "be a function decorated with onepass.prologue", describe(prologue))
    return prologue.key


def quantized_results(op: Op, arguments: tuple[Any, ...], static_scale: Tensor | None) -> tuple[Tensor, ...]:
    """The results of a quantizing call: codes, scale, and those of new residual, norm and rstd that there are."""
    results: Any = None
    if not is_compiling() and (repeat := op.repeat) is not None:
        results = repeat(*arguments)
    if results is None:
        results = op.call(*arguments)
    codes, scale, new_residual, norm, rstd = results
    if static_scale is not None:
        scale = static_scale
    if new_residual is None and norm is None and rstd is None:
        return codes, scale
    return tuple([t for t in (codes, scale, new_residual, norm, rstd) if t is not None])
