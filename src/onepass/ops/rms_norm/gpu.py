"""The row kernels: their parameters, tile, alignment and names."""

from typing import Annotated, Final, NamedTuple

import torch

from ...core.layout import LEVELS
from ...errors import Unsupported
from ...formats import FP8_FORMATS
from ...gpu.chip import Chip, tuning
from ...gpu.compile import Build
from ...gpu.launch import ABSENT, F32, I32, I64, SHORT_NAMES, GpuKernels, Pointer, Rows, make_build, rows
from ...gpu.lib.groups import owned
from ...gpu.lib.numbers import hardware_cast, quant
from ...gpu.prologue import device_function
from ...gpu.tuning.table import Regime, Variant
from ...prologues import MAX_OPERANDS
from .gpu_kernel import _rms_norm_long_kernel, _rms_norm_row_kernel
from .gpu_tile import RowConfig, batch_regime, row_config, row_unit
from .launch import RowCall, RowSpec

_NARROW: Final = ("row", "group")
"""Kinds of operands with fewer values than columns; their alignment does not affect the layout."""
_SMALL: Final = ("scale", "static_scale", "scale_ub", "rstd")
"""Tensors without columns, whose alignment does not matter either."""
_SINGLE: Final = ("gamma", "static_scale", "scale_ub", "gamma_post")
"""Tensors without rows."""
_SHIFTED: Final = (torch.float16, torch.bfloat16)
"""The dtypes of x and gamma for which `gpu.lib.row.factor` shifts bits."""
_MOST_OWNED: Final = 8
"""Chunks for whose scales a lane may divide."""
_FIRST_OPERAND: Final = 6
"""The index of the first operand in `RowCall.strides`."""


class RowShape(NamedTuple):
    """Rows, columns, and the sizes of the two inner leading dimensions."""

    rows: I32
    n: I32
    n1: I32
    n2: I32


class RowParameters(NamedTuple):
    """The parameters of the row kernels. ``bound`` is a number, ``scale_ub`` one in memory."""

    x: Rows
    gamma: Pointer
    residual: Rows
    norm: Rows
    codes: Rows
    scale: Rows
    scale_group: I64
    new_residual: Rows
    static_scale: Pointer
    operands: Annotated[tuple[Rows, ...], MAX_OPERANDS]
    shape: RowShape
    eps: F32
    weight_offset: F32
    bound: F32
    least: F32
    scale_ub: Pointer
    row_gamma: Rows
    rstd: Rows
    gamma_post: Pointer
    branch_scale: F32


def pack(call: RowCall, config: RowConfig, programs: tuple[int, ...]) -> RowParameters:
    """The parameters of a call."""
    strides, geom, scale = call.strides, call.geom, call.scale
    operands = [rows(tensor, strides[i]) for i, tensor in enumerate(call.operands, _FIRST_OPERAND)]
    return RowParameters(
        x=rows(call.x, strides[0]),
        gamma=call.gamma,
        residual=rows(call.residual, strides[1]),
        norm=rows(call.norm, strides[2]),
        codes=rows(call.codes, strides[3]),
        scale=rows(scale, strides[4]),
        scale_group=0 if scale is None else scale.stride(-1),
        new_residual=rows(call.new_residual, strides[5]),
        static_scale=call.static_scale,
        operands=(*operands, *[ABSENT] * (MAX_OPERANDS - len(operands))),
        shape=RowShape(geom.rows, call.n, geom.n1, geom.n2),
        eps=call.eps,
        weight_offset=call.weight_offset,
        bound=call.scale_ub,
        least=call.min_scale,
        scale_ub=call.scale_ub_tensor,
        row_gamma=rows(call.row_gamma, strides[-2]),
        rstd=rows(call.rstd, strides[-1]),
        gamma_post=call.gamma_post,
        branch_scale=call.branch_scale,
    )


class RowMath(NamedTuple):
    """What a kernel computes, apart from quantization."""

    hf: bool
    round_sum: bool
    offset: bool
    """Whether gamma has an offset."""
    shift_gamma: bool
    """See `gpu.lib.row.factor`."""
    hw_rounding: bool
    stored: bool
    """Whether the norm is rounded before it is quantized."""
    centered: bool
    """Whether the mean is subtracted."""
    finishes: bool
    """Whether a gate or a bias follows gamma: operands with the following indices, or -1."""
    gate: int
    bias: int
    weightless: bool
    """Whether there is no gamma."""
    activation: str
    """What is applied to the gate."""
    post: bool
    """Whether x is normed before the residual is added."""
    shift_post: bool
    """``shift_gamma`` for the post-norm's gamma."""
    scaled: bool
    """Whether a number multiplies the post-norm."""
    unnormed: bool
    """Whether there is no norm: rs is 1."""


def build_for(spec: RowSpec, config: RowConfig, levels: int, aligned: bool, chip: Chip, offset: bool = False) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed."""
    dtypes = _dtypes(spec)
    kinds = {f"operands.{i}": operand.kind for i, operand in enumerate(spec.operands)}
    vectors = aligned and config.unit > 1
    unused: dict[str, float | None] = {} if spec.scale and spec.scale.has_least else {"least": None}
    unused |= {} if spec.scaled else {"branch_scale": None}
    divisible: dict[str, int] = {"shape.n": config.unit} if vectors else {}
    for name, dtype in dtypes.items():
        kind = kinds.get(name, "")
        strided = name not in _SINGLE
        strides = [f"{name}.s{level}" for level in range(3)] if strided else []
        unused |= dict.fromkeys(strides if kind == "column" else strides[levels:], 0)
        if vectors and dtype and kind not in _NARROW and name not in _SMALL:
            # a tensor without rows must not make Triton choose a layout with more columns per
            # thread than the rows allow
            single = name in ("gamma", "gamma_post") or kind == "column"
            pointer = f"{name}.at" if strided else name
            divisible |= {pointer: min(16, config.vec * dtype.itemsize) if single else 16}
            divisible |= dict.fromkeys(strides, config.unit)
    return make_build(
        RowParameters,
        _describe(spec, config, levels, aligned, offset),
        _rms_norm_long_kernel if config.long else _rms_norm_row_kernel,
        chip,
        dtypes=dtypes,
        constants=_constants(spec, config, levels, aligned, chip, offset),
        unused=unused,
        divisible=divisible,
        warps=config.warps,
        registers=config.registers if vectors else 0,
    )


def _dtypes(spec: RowSpec) -> dict[str, torch.dtype | None]:
    """The dtypes of a kernel's tensors; None for those that it does not have."""
    rule = spec.scale
    return {
        "x": spec.x,
        "gamma": None if spec.per_row else spec.gamma,
        "row_gamma": spec.gamma if spec.per_row else None,
        "residual": spec.residual,
        "norm": spec.norm,
        "codes": spec.fp8.dtype if spec.fp8 else None,
        "scale": rule.dtype if rule and rule.kind != "static" else None,
        "new_residual": spec.residual,
        "static_scale": torch.float32 if rule and (rule.kind == "static" or rule.has_global) else None,
        "scale_ub": torch.float32 if rule and rule.bound_in_memory else None,
        "rstd": torch.float32 if spec.rstd else None,
        "gamma_post": spec.post,
        **{f"operands.{i}": None for i in range(MAX_OPERANDS)},
        **{f"operands.{i}": operand.dtype for i, operand in enumerate(spec.operands)},
    }


def _constants(
    spec: RowSpec, config: RowConfig, levels: int, aligned: bool, chip: Chip, offset: bool
) -> dict[str, object]:
    """The constants of a kernel."""
    hf, table = spec.rounding == "hf", tuning(chip).rows
    vectors = aligned and config.unit > 1
    ordered = vectors or config.rows > 1
    math = RowMath(
        hf,
        spec.round_sum,
        offset,
        shift_gamma=hf and (spec.x, spec.gamma) == _SHIFTED,
        hw_rounding=chip.rounds_casts,
        stored=spec.rounding == "stored",
        centered=spec.centered,
        finishes=any(spec.after),
        gate=spec.gate,
        bias=spec.bias,
        weightless=spec.gamma is None,
        activation=spec.gate_activation,
        post=spec.post is not None,
        shift_post=hf and (spec.x, spec.post) == _SHIFTED,
        scaled=spec.scaled,
        unnormed=spec.unnormed,
    )
    tile = config.laid_out(vectors, chip.warp_size, levels)._replace(
        early_rows=table.fp8_early_rows if variant_of(spec) == "row scale" else table.early_rows,
        lane_scales=aligned and _scales_by_lane(spec, config, chip),
        assembly=_has_ptx(chip),
    )
    return {
        "PROLOGUE": _prologue(spec, chip, config.chunk if ordered else 0),
        "MATH": math,
        "QUANT": quant(spec.fp8, chip, spec.scale, spec.fp8_max, spec.quantizes_norm),
        "TILE": tile,
        "PDL": chip.has_pdl,
    }


def _prologue(spec: RowSpec, chip: Chip, width: int) -> object:
    """The device function of a prologue; ``width`` as in `device_function`."""
    if spec.prologue is None:
        return None
    width = width if any(operand.group for operand in spec.operands) else 0
    x = FP8_FORMATS.get(spec.x)
    own = spec.operands[: len(spec.operands) - sum(spec.after)]
    return device_function(spec.prologue, own, width, x, hardware_cast(x, chip))


def _has_ptx(chip: Chip) -> bool:
    """Whether the chip has the instructions that kernels contain as PTX."""
    return chip.backend == "cuda" and int(chip.arch) >= 80


def _scales_by_lane(spec: RowSpec, config: RowConfig, chip: Chip) -> bool:
    """Whether `store_groups_by_lane` applies: whole chunks, a few of them per lane of a group within a warp."""
    rule = spec.scale
    if rule is None or rule.kind != "group" or not _has_ptx(chip):
        return False
    lanes = rule.group // config.vec
    if not config.whole or config.rows > 1 or config.long or not 1 <= lanes <= chip.warp_size:
        return False
    chunks: int = owned(config.count, lanes)
    return chunks <= _MOST_OWNED


def _describe(spec: RowSpec, config: RowConfig, levels: int, aligned: bool, offset: bool) -> str:
    """A readable name for one configuration; equal names mean equal builds (for one chip)."""
    short = SHORT_NAMES
    parts = ["rms_norm_long" if config.long else "rms_norm_row"]
    if spec.unnormed:
        parts.append("unnormed")
    if spec.post:
        parts.append(f"post={short[spec.post]}{' scaled' if spec.scaled else ''}")
    parts.append(f"x={short[spec.x]}")
    if not spec.unnormed:
        parts.append(f"gamma={short[spec.gamma] if spec.gamma else 'none'}{' per row' if spec.per_row else ''}")
    if spec.residual:
        parts.append(f"residual={short[spec.residual]}")
    if spec.prologue:
        own = spec.operands[: len(spec.operands) - sum(spec.after)]
        kinds = ",".join(f"{o.kind}{o.group or ''}:{short[o.dtype]}" for o in own)
        parts.append(f"prologue={spec.prologue.key}({kinds})")
    if spec.centered:
        parts.append("centered")
    for name, index in (("bias", spec.bias), ("gate", spec.gate)):
        if index >= 0:
            activation = f" {spec.gate_activation}" if name == "gate" and spec.gate_activation != "silu" else ""
            parts.append(f"{name}={short[spec.operands[index].dtype]}{activation}")
    if spec.norm:
        parts.append("norm" if spec.norm == spec.x or spec.x.itemsize == 1 else f"norm={short[spec.norm]}")
    if spec.fp8 and spec.scale:
        rule = spec.scale
        powers = "floor:" if rule.floor else "ue8m0:" if rule.ue8m0 else ""
        scale = f"{rule.kind}{rule.group or ''}:{powers}{short[rule.dtype]}"
        parts.append(f"{spec.fp8.name}:{spec.fp8_max:g}/{scale}")
        options = {"divide": rule.divides, "least": rule.has_least, "bound": rule.bound_in_memory}
        options |= {"global": rule.has_global, rule.packing: rule.packing != ""}
        parts += [option for option, chosen in options.items() if chosen]
    if spec.rounding != "once":
        parts.append(spec.rounding)
    if spec.residual and spec.round_sum != (spec.rounding == "hf"):
        parts.append("rounded sum" if spec.round_sum else "unrounded sum")
    if offset:
        parts.append("offset")
    if spec.rstd:
        parts.append("rstd")
    chunks = str(config.chunk) if config.count < 2 else f"{config.count}*{config.chunk}"
    tile = f"{config.rows}x{chunks}" if config.rows > 1 or config.count < 2 else chunks
    tile += "" if config.whole or config.long else "-"
    tile += f"/{config.warps}w/v{config.vec}"
    tile += "" if config.unit * spec.itemsize == 16 else f":{config.unit}"
    tile += "" if aligned else "u"
    tile += f"/r{config.registers}" if config.registers and aligned else ""
    tile += "/late" if config.late else ""
    parts.append(tile + ("/twice" if config.reread else ""))
    if levels > 1:
        parts.append(f"levels={levels}")
    return " ".join(parts)


def variant_of(spec: RowSpec) -> Variant:
    """The variant of a spec, by which `row_config` chooses the tile."""
    if spec.prologue:
        return "prologue"
    if any(spec.after):
        return "layer norm, gate or bias" if spec.centered or spec.fp8 else "other"
    plain = _plain_variant(spec)
    if not spec.centered:
        return plain
    if plain == "row scale":
        return "layer norm, row scale"
    return "layer norm, group scales" if plain == "group scales" else "layer norm, gate or bias"


def _plain_variant(spec: RowSpec) -> Variant:
    """The variant of rows without a prologue, a bias or a gate whose mean stays."""
    if spec.x.itemsize != 2:
        return "other"
    narrow_gamma = spec.gamma is None or spec.gamma.itemsize == 2
    if spec.scale and spec.scale.kind == "group":
        if spec.norm:
            return "group scales, norm"
        return "group scales" if narrow_gamma and not spec.residual else "group scales, residual"
    if (spec.quantizes_norm and not spec.unnormed) or (spec.residual and spec.residual.itemsize != 2):
        return "other"
    if spec.fp8 is None:
        if spec.residual:
            return "norm, residual" if narrow_gamma else "other"
        return "norm" if narrow_gamma else "norm, float32 gamma"
    if spec.norm or not narrow_gamma or spec.fp8.name == "e4m3fnuz":
        return "other"
    if spec.scale and spec.scale.kind == "static":
        return "other" if spec.residual else "static scale"
    return "row scale, residual" if spec.residual else "row scale"


class RowFacts(NamedTuple):
    """What selects the machine code of a call, besides its spec."""

    n: int
    levels: int
    aligned: bool
    offset: bool
    regime: Regime


def _facts(call: RowCall, chip: Chip) -> RowFacts:
    spec, n, (count, n1, n2) = call.spec, call.n, call.geom
    levels = 1 if n1 == 1 and n2 == 1 else LEVELS
    aligned = _aligned(call, row_unit(n, spec.itemsize))
    return RowFacts(n, levels, aligned, call.weight_offset != 0, batch_regime(count, n * spec.itemsize, chip))


def _aligned(call: RowCall, unit: int) -> bool:
    """Whether all rows of all tensors start on 16 bytes, so that loads can be vectors."""
    if unit == 1:
        return True
    strides = call.strides
    (s0, s1, s2), addresses = strides[0], call.x.data_ptr()
    steps = s0 | s1 | s2
    if call.gamma is not None:
        addresses |= call.gamma.data_ptr()
    if call.gamma_post is not None:
        addresses |= call.gamma_post.data_ptr()
    tensors = ((1, call.residual), (2, call.norm), (3, call.codes), (5, call.new_residual), (-2, call.row_gamma))
    for i, tensor in tensors:
        if tensor is not None:
            s0, s1, s2 = strides[i]
            addresses |= tensor.data_ptr()
            steps |= s0 | s1 | s2
    for i, (tensor, operand) in enumerate(zip(call.operands, call.spec.operands, strict=True), _FIRST_OPERAND):
        if operand.kind not in _NARROW:
            s0, s1, s2 = strides[i]
            addresses |= tensor.data_ptr()
            steps |= s0 | s1 | s2
    return addresses % 16 == 0 and (call.geom[0] == 1 or steps % unit == 0)


def _grid(call: RowCall, config: RowConfig) -> tuple[int]:
    count = call.geom[0]
    if count >= 1 << 31:
        raise Unsupported(f"rms_norm: at most 2**31 - 1 rows in one call on a GPU, got {count}")
    return (-(-count // config.rows),)


KERNELS: Final[GpuKernels[RowSpec, RowCall, RowFacts, RowConfig]] = GpuKernels(
    RowParameters,
    _facts,
    lambda spec, facts, chip: row_config(facts.n, spec.itemsize, chip, variant_of(spec), facts.regime),
    lambda spec, facts, config, chip: build_for(spec, config, facts.levels, facts.aligned, chip, facts.offset),
    _grid,
    pack,
)
launch, builds = KERNELS.launch, KERNELS.builds
