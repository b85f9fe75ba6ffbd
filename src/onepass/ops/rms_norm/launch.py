"""What one row kernel computes (`RowSpec`), one call of it (`RowCall`), and the way from validated arguments to launches.

Every op of the RMSNorm family is a pass over rows. The two types are the whole interface between the validated public call
and a backend. `run_rows` folds the leading dimensions and selects the backend.

With ``d = h``, or for LayerNorm ``d = h - mean(h)``::

    y = ((d * rs) * (gamma + weight_offset) + bias) * act(gate)

``act`` is silu or sigmoid. A gate before the norm is a prologue: ``h = x * act(gate)``. A post-norm replaces x by its norm,
rounded to x's dtype, before the residual is added. Rows that are quantized without a norm have ``rs = 1`` and no gamma.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ...core.backend import launch_for
from ...core.layout import PACKINGS, Geometry, Strides, bytes_of_words, geometry, smallest_dimension
from ...errors import Unsupported
from ...formats import (
    CODE_FORMATS,
    QUANT_FORMATS,
    SCALE_FORMATS,
    SMALLEST_EPS,
    CodeFormat,
    QuantFormatName,
    Quantize,
    Rounding,
    ScaleFormat,
    ScaleKind,
    ScaleLayout,
    ScaleRule,
)
from ...prologues import Operand, Prologue, find, sigmoid_and_mul, silu_and_mul

GateOrder = Literal["after", "before"]
GATE_ORDERS: Final[tuple[GateOrder, ...]] = ("after", "before")
GateActivation = Literal["silu", "sigmoid"]
GATE_ACTIVATIONS: Final[tuple[GateActivation, ...]] = ("silu", "sigmoid")
Statistic = Literal["rms", "layer"]
STATISTICS: Final[tuple[Statistic, ...]] = ("rms", "layer")


class After(NamedTuple):
    """Whether the norm is multiplied by ``act(gate)`` and, before that, a bias is added to it."""

    gate: bool = False
    bias: bool = False


NOTHING_AFTER: Final = After()


@dataclass(frozen=True, eq=False)
class RowSpec:
    """Everything that affects the machine code of one row kernel, and nothing that varies between calls.

    With ``h = prologue(x, *operands) + residual`` the kernel writes any of: ``h`` (if ``residual`` is
    set), the norm (``norm``), codes and scales (``fp8``, which may also be another format). Instances are interned by `row_spec`, so
    identity is equality.
    """

    x: torch.dtype
    gamma: torch.dtype | None
    residual: torch.dtype | None
    norm: torch.dtype | None
    fp8: CodeFormat | None
    fp8_max: float
    scale: ScaleRule | None
    prologue: Prologue | None
    operands: tuple[Operand, ...]
    rounding: Rounding
    round_sum: bool
    """Whether ``h`` is rounded to the residual's dtype before the norm."""
    after: After = NOTHING_AFTER
    """What follows the product with gamma. Its tensors are the last of ``operands``, the gate before the bias."""
    centered: bool = False
    """Whether the row's mean is subtracted from ``h`` first: LayerNorm."""
    per_row: bool = False
    """Whether each row has its own gamma."""
    rstd: bool = False
    """Whether the reciprocal RMS of each row is stored."""
    gate_activation: GateActivation = "silu"
    """What is applied to a gate that follows gamma."""
    post: torch.dtype | None = None
    """The dtype of the post-norm's gamma, if x is normed before the residual is added."""
    scaled: bool = False
    """Whether the post-norm is multiplied by a number."""
    unnormed: bool = False
    """Whether rows are quantized without a norm: y is x, or its product with ``act(gate)``."""

    @property
    def quantizes_norm(self) -> bool:
        """Whether amax and codes are computed from y itself, not from ``h * g`` with the row's factor applied later."""
        divides = self.scale is not None and self.scale.divides
        return self.unnormed or self.rounding != "once" or any(self.after) or divides

    @property
    def gate(self) -> int:
        """The index of the gate among the operands, or -1."""
        return len(self.operands) - sum(self.after) if self.after.gate else -1

    @property
    def bias(self) -> int:
        """The index of the bias among the operands, or -1."""
        return len(self.operands) - 1 if self.after.bias else -1

    @property
    def itemsize(self) -> int:
        """Bytes per element for choosing tiles: 8-bit rows use the tiles of 16-bit ones."""
        return max(2, self.x.itemsize)


def row_spec(
    x: torch.dtype,
    gamma: torch.dtype | None,
    residual: torch.dtype | None,
    norm: torch.dtype | None,
    rounding: Rounding,
    prologue: str = "",
    operands: tuple[Operand, ...] = (),
    codes: torch.dtype | None = None,
    fp8_max: float = 0.0,
    scale: ScaleRule | None = None,
    round_sum: bool | None = None,
    after: After = NOTHING_AFTER,
    centered: bool = False,
    per_row: bool = False,
    rstd: bool = False,
    gate_activation: GateActivation = "silu",
    post: torch.dtype | None = None,
    scaled: bool = False,
    unnormed: bool = False,
) -> RowSpec:
    """The interned `RowSpec` with these properties. ``round_sum=None`` follows ``rounding``."""
    if round_sum is None or residual in (None, torch.float32):  # rounding does not change a float32 sum
        round_sum = rounding == "hf"
    return _interned(
        x,
        gamma,
        residual,
        norm,
        None if codes is None else CODE_FORMATS[codes],
        fp8_max,
        scale,
        find(prologue) if prologue else None,
        operands,
        rounding,
        round_sum,
        after,
        centered,
        per_row,
        rstd,
        gate_activation if after.gate else "silu",
        post,
        scaled,
        unnormed,
    )


_interned: Final = cache(RowSpec)


class RowCall(NamedTuple):
    """One call of a row kernel: its spec, tensors and numbers, all validated.

    ``n`` is the number of columns; ``geom`` and ``strides`` locate the rows. ``strides`` has one triple
    for each of x, residual, norm, codes, scale, new_residual, the operands, row_gamma and rstd, in this order. An output
    may be the input that it replaces. ``row_gamma`` [..., N] replaces ``gamma`` if rows differ in it, and neither is
    given if gamma is 1. ``rstd`` is [..., 1]. ``gamma_post`` [N] is the post-norm's, which
    ``branch_scale`` multiplies.
    """

    spec: RowSpec
    x: Tensor
    gamma: Tensor | None
    eps: float
    weight_offset: float
    residual: Tensor | None = None
    operands: Sequence[Tensor] = ()
    static_scale: Tensor | None = None
    norm: Tensor | None = None
    codes: Tensor | None = None
    scale: Tensor | None = None
    new_residual: Tensor | None = None
    scale_ub: float = math.inf
    scale_ub_tensor: Tensor | None = None
    min_scale: float = 0.0
    row_gamma: Tensor | None = None
    rstd: Tensor | None = None
    gamma_post: Tensor | None = None
    branch_scale: float = 1.0
    n: int = 0
    geom: Geometry = Geometry(0, 1, 1)
    strides: Sequence[Strides] = ()

    @property
    def rows(self) -> tuple[Tensor | None, ...]:
        """The tensors that ``strides`` describes."""
        outputs = (self.norm, self.codes, self.scale, self.new_residual)
        return (self.x, self.residual, *outputs, *self.operands, self.row_gamma, self.rstd)

    @property
    def device(self) -> int:
        """The number of the GPU that the tensors are on, or -1."""
        return self.x.get_device()


_ROW_SCALE = (1, 0, 0)
_SCALE, _OPERANDS = 4, 6
"""The indices of scale and of the first operand among a call's row tensors: x, residual, norm, codes, scale, ..."""


def run_rows(call: RowCall) -> None:
    """Run a row kernel over ``x`` [..., N], in one launch if its rows allow it. Without rows nothing is launched."""
    launch = launch_for("rms_norm", call.x)
    if call.x.dim() == 1:
        call = _with_rows(call, [None if t is None else t.unsqueeze(0) for t in _row_tensors(call)])
    x, scale = call.x, None if _tiled(call) else call.scale
    n, total = x.shape[-1], x.numel()
    if total == 0:
        return
    rows = _row_tensors(call)
    eps = max(call.eps, SMALLEST_EPS)
    if not call.operands and all(t is None or t.is_contiguous() for t in rows):
        step = (n, 0, 0)
        scale_step = _ROW_SCALE if scale is None else (scale.shape[-1], 0, 0)
        code_step = step if call.codes is None else (call.codes.shape[-1], 0, 0)
        strides = (step, step, step, code_step, scale_step, step, step, _ROW_SCALE)
        launch(call._replace(eps=eps, n=n, geom=Geometry(total // n, 1, 1), strides=strides))
        return
    folded = geometry(rows)
    if folded is not None:
        launch(call._replace(eps=eps, n=n, geom=folded[0], strides=folded[1]))
        return
    if _tiled(call):
        raise Unsupported(f"{_op(call.spec)}: `scale_layout` '128x4' needs rows that fold to three strides")
    dim = smallest_dimension(x.shape[:-1])
    for i in range(x.shape[dim]):
        run_rows(_with_rows(call, [None if t is None else t.select(dim, i) for t in rows]))


def _op(spec: RowSpec) -> str:
    """The op that quantizes rows by this spec."""
    if spec.unnormed:
        return "quantize"
    return "rms_norm_fused_quant" if spec.post is None else "rms_norm_add_rms_norm_quant"


def _row_tensors(call: RowCall) -> list[Tensor | None]:
    """The tensors that have a row for each row of x, with None for operands that have one value per column."""
    rows: list[Tensor | None] = [*call.rows]
    for i, operand in enumerate(call.spec.operands, start=_OPERANDS):
        if operand.kind == "column":
            rows[i] = None
    if _tiled(call):
        rows[_SCALE] = None
    return rows


def _tiled(call: RowCall) -> bool:
    """Whether scales are in tiles, which rows of x find by their number."""
    return call.spec.scale is not None and call.spec.scale.packing == "128x4"


def _with_rows(call: RowCall, rows: list[Tensor | None]) -> RowCall:
    """The same call on other row tensors, in the order of `_row_tensors`."""
    x, residual, norm, codes, scale, new_residual, *others, row_gamma, rstd = rows
    assert x is not None
    operands = [t if other is None else other for t, other in zip(call.operands, others, strict=True)]
    if _tiled(call):
        scale = call.scale
    call = call._replace(x=x, residual=residual, operands=operands, row_gamma=row_gamma)
    return call._replace(norm=norm, codes=codes, scale=scale, new_residual=new_residual, rstd=rstd)


# --- norms with a gate or a bias, LayerNorm, and quantized norms -----------------------------------------------------

SpecCache = dict[tuple[object, ...], RowSpec]
"""The specs of one combination of options, by the tensors' dtypes and kinds."""
Gating = tuple[GateOrder, GateActivation]
_BEFORE: Final = {"silu": silu_and_mul.key, "sigmoid": sigmoid_and_mul.key}
"""The prologue of a gate before the norm, by its activation."""


class NormArguments(Protocol):
    """Validated arguments that all norms have."""

    x: Tensor
    gamma: Tensor | None
    residual: Tensor | None
    eps: float
    weight_offset: float
    round_sum: bool | None
    residual_out: Tensor | None


class FinishedArguments(NormArguments, Protocol):
    """Validated arguments of `layer_norm`, all of which `rms_norm` has too."""

    head_gamma: Tensor | None
    bias: Tensor | None
    out: Tensor
    rstd_out: Tensor | None


class PlainArguments(FinishedArguments, Protocol):
    """Validated arguments of `rms_norm`."""

    gate: Tensor | None
    rounding: Rounding
    gate_order: GateOrder
    gate_activation: GateActivation
    return_rstd: bool


class CodesArguments(Protocol):
    """Validated arguments that say how a norm is quantized, and where codes and scales are stored."""

    static_scale: Tensor | None
    scale_ub_tensor: Tensor | None
    global_scale: Tensor | None
    rounding: Rounding
    scale_ub: float | None
    format: QuantFormatName
    code_max: float | None
    scales_dtype: torch.dtype
    group_size: int | None
    scale_format: ScaleFormat
    scale_layout: ScaleLayout
    quantize: Quantize
    min_scale: float
    out: Tensor
    scale_out: Tensor | None


class QuantArguments(NormArguments, CodesArguments, Protocol):
    """Validated arguments of `rms_norm_fused_quant`."""

    norm_out: Tensor | None
    head_gamma: Tensor | None
    gate: Tensor | None
    bias: Tensor | None
    prologue_args: Sequence[Tensor]
    prologue: str
    gate_order: GateOrder
    gate_activation: GateActivation
    statistic: Statistic
    rstd_out: Tensor | None


class SandwichArguments(Protocol):
    """Validated arguments of `rms_norm_add_rms_norm`."""

    x: Tensor
    gamma_post: Tensor
    gamma_pre: Tensor
    residual: Tensor
    eps: float
    branch_scale: float
    weight_offset: float
    rounding: Rounding
    round_sum: bool | None
    out: Tensor
    residual_out: Tensor


class SandwichQuantArguments(SandwichArguments, CodesArguments, Protocol):
    """Validated arguments of `rms_norm_add_rms_norm_quant`."""

    norm_out: Tensor | None


class RowsArguments(CodesArguments, Protocol):
    """Validated arguments of `quantize`."""

    x: Tensor
    gate: Tensor | None
    gate_activation: GateActivation


def finished_norm(
    spec_cache: SpecCache,
    a: FinishedArguments,
    rounding: Rounding,
    gate: Tensor | None = None,
    gating: Gating = ("after", "silu"),
    centered: bool = False,
    head_gamma: Tensor | None = None,
    rstd: Tensor | None = None,
) -> None:
    """A norm with a gate or a bias, or LayerNorm (``centered``)."""
    prologue, operands, kinds, after = further("", (), gate, gating, a.bias, a.x)
    gamma = a.gamma if head_gamma is None else head_gamma
    dtypes = (a.x.dtype, None if gamma is None else gamma.dtype, None if a.residual is None else a.residual.dtype)
    key = (*dtypes, kinds, head_gamma is None)
    spec = spec_cache.get(key)
    if spec is None:
        spec = spec_cache[key] = row_spec(
            *dtypes,
            a.out.dtype,
            rounding,
            prologue,
            kinds,
            round_sum=a.round_sum,
            after=after,
            centered=centered,
            per_row=head_gamma is not None,
            rstd=rstd is not None,
            gate_activation=gating[1],
        )
    call = RowCall(spec, a.x, a.gamma, a.eps, a.weight_offset, a.residual, operands, norm=a.out)
    run_rows(with_rows(call._replace(new_residual=a.residual_out), head_gamma, rstd))


def with_rows(call: RowCall, head_gamma: Tensor | None, rstd: Tensor | None) -> RowCall:
    """The call with a gamma for each head, and a reciprocal RMS to store for each row, where they are given."""
    if head_gamma is not None:
        call = call._replace(row_gamma=head_gamma.expand(call.x.shape))
    return call if rstd is None else call._replace(rstd=rstd.unsqueeze(-1))


def further(
    prologue: str, given: Sequence[Tensor], gate: Tensor | None, gating: Gating, bias: Tensor | None, x: Tensor
) -> tuple[str, list[Tensor], tuple[Operand, ...], After]:
    """A prologue's name, all operands and their kinds, and what follows gamma. A gate before the norm is a prologue."""
    order, activation = gating
    if gate is not None and order == "before":
        prologue, given, gate = _BEFORE[activation], (gate,), None
    operands = [*given, *(t for t in (gate, bias) if t is not None)]
    kinds = [operand_of(t, x) for t in given]
    kinds += [Operand("full", gate.dtype)] if gate is not None else []
    kinds += [Operand("column", bias.dtype)] if bias is not None else []
    return prologue, operands, tuple(kinds), After(gate is not None, bias is not None)


def operand_of(tensor: Tensor, x: Tensor) -> Operand:
    """What a prologue's tensor is to x."""
    if tensor.shape == x.shape:
        return Operand("full", tensor.dtype)
    n, last = x.shape[-1], tensor.shape[-1]
    if tensor.dim() == 1 and last == n:
        return Operand("column", tensor.dtype)
    return Operand("row", tensor.dtype) if last == 1 else Operand("group", tensor.dtype, n // last)


def quantized_norm(spec_cache: SpecCache, a: QuantArguments) -> None:
    """Run a validated call of `rms_norm_fused_quant`."""
    tensors, prologue, after = a.prologue_args, a.prologue, NOTHING_AFTER
    gating: Gating = (a.gate_order, a.gate_activation)
    operands = tuple([operand_of(t, a.x) for t in tensors]) if tensors else ()
    if a.gate is not None or a.bias is not None:
        prologue, tensors, operands, after = further(prologue, tensors, a.gate, gating, a.bias, a.x)
    gamma = a.gamma if a.head_gamma is None else a.head_gamma
    dtypes = (
        a.x.dtype,
        None if gamma is None else gamma.dtype,
        None if a.residual is None else a.residual.dtype,
        None if a.norm_out is None else a.norm_out.dtype,
    )
    absent = (a.static_scale is None, a.scale_ub_tensor is None, a.global_scale is None, a.head_gamma is None)
    key = (*dtypes, *absent, operands, after)
    spec = spec_cache.get(key)
    if spec is None:
        codes = QUANT_FORMATS[a.format].codes
        spec = spec_cache[key] = row_spec(
            *dtypes,
            a.rounding,
            prologue,
            operands,
            codes.dtype,
            a.code_max or codes.max,
            _scale_rule(a),
            a.round_sum,
            after=after,
            centered=a.statistic == "layer",
            per_row=a.head_gamma is not None,
            rstd=a.rstd_out is not None,
            gate_activation=a.gate_activation,
        )
    call = RowCall(spec, a.x, a.gamma, a.eps, a.weight_offset, a.residual, tensors, new_residual=a.residual_out)
    run_rows(with_rows(_with_codes(call, a)._replace(norm=a.norm_out), a.head_gamma, a.rstd_out))


def quantized_rows(spec_cache: SpecCache, a: RowsArguments) -> None:
    """Run a validated call of `quantize`."""
    gating: Gating = ("after", a.gate_activation)
    _, operands, kinds, after = further("", (), a.gate, gating, None, a.x)
    key = (a.x.dtype, a.static_scale is None, a.scale_ub_tensor is None, a.global_scale is None, kinds)
    spec = spec_cache.get(key)
    if spec is None:
        codes = QUANT_FORMATS[a.format].codes
        spec = spec_cache[key] = row_spec(
            a.x.dtype,
            None,
            None,
            None,
            "once" if a.gate is None else a.rounding,  # x itself is rounded already
            operands=kinds,
            codes=codes.dtype,
            fp8_max=a.code_max or codes.max,
            scale=_scale_rule(a),
            after=after,
            gate_activation=a.gate_activation,
            unnormed=True,
        )
    run_rows(_with_codes(RowCall(spec, a.x, None, 0.0, 0.0, operands=operands), a))


def sandwich_norm(spec_cache: SpecCache, a: SandwichArguments) -> None:
    """Run a validated call of `rms_norm_add_rms_norm`."""
    dtypes = (a.x.dtype, a.gamma_pre.dtype, a.residual.dtype, a.out.dtype)
    key = (*dtypes, a.gamma_post.dtype)
    spec = spec_cache.get(key)
    if spec is None:
        spec = spec_cache[key] = row_spec(
            *dtypes, a.rounding, round_sum=a.round_sum, post=a.gamma_post.dtype, scaled=a.branch_scale != 1.0
        )
    run_rows(_sandwiched(spec, a)._replace(norm=a.out))


def quantized_sandwich(spec_cache: SpecCache, a: SandwichQuantArguments) -> None:
    """Run a validated call of `rms_norm_add_rms_norm_quant`."""
    dtypes = (a.x.dtype, a.gamma_pre.dtype, a.residual.dtype, None if a.norm_out is None else a.norm_out.dtype)
    key = (*dtypes, a.gamma_post.dtype, a.static_scale is None, a.scale_ub_tensor is None, a.global_scale is None)
    spec = spec_cache.get(key)
    if spec is None:
        codes = QUANT_FORMATS[a.format].codes
        spec = spec_cache[key] = row_spec(
            *dtypes,
            a.rounding,
            codes=codes.dtype,
            fp8_max=a.code_max or codes.max,
            scale=_scale_rule(a),
            round_sum=a.round_sum,
            post=a.gamma_post.dtype,
            scaled=a.branch_scale != 1.0,
        )
    run_rows(_with_codes(_sandwiched(spec, a), a)._replace(norm=a.norm_out))


def _sandwiched(spec: RowSpec, a: SandwichArguments) -> RowCall:
    """The call without what it stores apart from the sum."""
    call = RowCall(spec, a.x, a.gamma_pre, a.eps, a.weight_offset, a.residual)
    return call._replace(gamma_post=a.gamma_post, branch_scale=a.branch_scale, new_residual=a.residual_out)


def _with_codes(call: RowCall, a: CodesArguments) -> RowCall:
    """The call with codes and scales."""
    scale = a.scale_out
    if scale is not None and a.scale_layout == "column_packed":
        scale = bytes_of_words(scale)
    return call._replace(
        static_scale=a.static_scale if a.global_scale is None else a.global_scale,
        codes=a.out,
        scale=scale,
        scale_ub=math.inf if a.scale_ub is None else a.scale_ub,
        scale_ub_tensor=a.scale_ub_tensor,
        min_scale=a.min_scale,
    )


def _scale_rule(a: CodesArguments) -> ScaleRule:
    """How the scales of a quantizing call are computed and stored."""
    kind: ScaleKind = "static" if a.static_scale is not None else "group" if a.group_size else "row"
    encoding = SCALE_FORMATS[a.scale_format]
    one_scale = torch.float8_e8m0fnu if a.scales_dtype == torch.int32 else a.scales_dtype
    return ScaleRule(
        kind,
        torch.float32 if kind == "static" else one_scale,
        a.group_size or 0,
        ue8m0=encoding.power_of_two,
        divides=a.quantize == "divide",
        has_least=a.min_scale > 0,
        bound_in_memory=a.scale_ub_tensor is not None,
        floor=encoding.floor,
        has_global=a.global_scale is not None,
        packing=PACKINGS.get(a.scale_layout, ""),
    )
