"""Launches the row kernels: chooses the tile, names the machine code it needs, passes the arguments."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import Unsupported
from ..formats import FP8_FORMATS
from ..prologues import MAX_OPERANDS
from ..specs.layout import LEVELS, Geometry, Strides
from ..specs.rms_norm import RowCall, RowSpec
from .compiler import POINTERS, Build, current_chip, load
from .config import EARLY_ROWS, FP8_EARLY_ROWS, INTERPRETER, Chip, Crowd, RowConfig, Work, crowd_of, row_config
from .device.groups import slots
from .prologue import device_function
from .rms_norm_kernels import _rms_norm_long_kernel, _rms_norm_row_kernel

ROW_TENSORS: Final = (
    "x",
    "residual",
    "norm",
    "codes",
    "scale",
    "new_residual",
    *(f"p{i}" for i in range(MAX_OPERANDS)),
)
STRIDES: Final = {
    name: tuple(f"{prefix}{level}" for level in range(3))
    for name, prefix in zip(
        ROW_TENSORS, ("x", "r", "y", "c", "s", "w", *(f"p{i}" for i in range(MAX_OPERANDS))), strict=True
    )
}
_NARROW: Final = ("row", "group")
"""Kinds of operands with fewer values than columns: where these lie decides no layout."""
SCALE_INDEX: Final = ROW_TENSORS.index("scale")
FIRST_OPERAND: Final = ROW_TENSORS.index("p0")
_NAMES: Final[tuple[str, ...]] = tuple(_rms_norm_row_kernel.arg_names)


def build_for(spec: RowSpec, config: RowConfig, levels: int, aligned: bool, chip: Chip, offset: bool = False) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed."""
    operand = dict(zip((f"p{i}" for i in range(MAX_OPERANDS)), spec.operands, strict=False))
    dtypes: dict[str, torch.dtype | None] = {
        "x": spec.x,
        "gamma": spec.gamma,
        "residual": spec.residual,
        "norm": spec.norm,
        "codes": spec.fp8.dtype if spec.fp8 else None,
        "scale": spec.scale.dtype if spec.scale and spec.scale.kind != "static" else None,
        "new_residual": spec.residual,
        "static_scale": torch.float32 if spec.scale and spec.scale.kind == "static" else None,
        "scale_ub": torch.float32 if spec.scale and spec.scale.bound_in_memory else None,
        **{f"p{i}": operand[f"p{i}"].dtype if f"p{i}" in operand else None for i in range(MAX_OPERANDS)},
    }
    vectors = aligned and config.unit > 1
    constants: dict[str, Any] = {
        "PROLOGUE": _prologue(spec, chip, config.chunk if vectors or config.rows > 1 else 0),
        "HF": spec.rounding == "hf",
        "ROUND_SUM": spec.round_sum,
        "NORMED": spec.quantizes_norm,
        "DIVIDE": bool(spec.scale and spec.scale.divides),
        "FP8_MAX": spec.fp8_max,
        "BIAS": spec.fp8.bias if spec.fp8 else 0,
        "NAN": spec.fp8.nan_code if spec.fp8 else 0,
        "NEGATIVE_ZERO": spec.fp8.has_negative_zero if spec.fp8 else False,
        "SCALE": spec.scale.kind if spec.scale else "none",
        "GROUP": spec.scale.group if spec.scale else 0,
        "LARGEST": torch.finfo(spec.scale.dtype).max if spec.scale else 0.0,
        "UE8M0": bool(spec.scale and spec.scale.ue8m0),
        "E8M0": bool(spec.scale and spec.scale.dtype == torch.float8_e8m0fnu),
        "HARDWARE": bool(spec.fp8 and spec.fp8.name == "e4m3fn" and chip.casts_e4m3fn),
        "EXACT": chip.backend != "interpreter",
        "LEVELS": levels,
        "ROWS": config.rows,
        "CHUNK": config.chunk,
        "COUNT": config.count,
        "SETS": config.sets,
        "PIECES": config.pieces(vectors, chip.warp_size),
        "SIZE": config.size(vectors),
        "WHOLE": config.whole,
        "VEC": config.vec,
        "WARPS": config.warps,
        "LANES": 0 if vectors or config.rows > 1 else chip.warp_size,
        "PDL": chip.has_pdl,
        "EARLY_ROWS": FP8_EARLY_ROWS if work_of(spec) == "fp8" else EARLY_ROWS,
        "EARLY_GAMMA": config.early_gamma,
        "REREAD": config.reread,
        "OFFSET": offset,
        "BY_LANE": aligned and _by_lane(spec, config, chip),
    }
    signature: dict[str, str] = {}
    divisible: dict[str, int] = {}
    for name, dtype in dtypes.items():
        wide = name not in ("scale", "static_scale", "scale_ub") and (
            name not in operand or operand[name].kind not in _NARROW
        )
        if dtype is None:
            constants[name] = None
        else:
            signature[name] = POINTERS[dtype]
            if vectors and wide:
                # a tensor without rows must not tempt Triton to a layout with more columns a thread than the rows allow
                single = name == "gamma" or (name in operand and operand[name].kind == "column")
                divisible[name] = min(16, config.vec * dtype.itemsize) if single else 16
        for level, stride in enumerate(STRIDES.get(name, ())):
            if dtype is None or level >= levels or (name in operand and operand[name].kind == "column"):
                constants[stride] = 0
            else:
                signature[stride] = "i64"
                if vectors and wide:
                    divisible[stride] = config.unit
    for name in _NAMES:
        if name in ("eps", "weight_offset", "bound") or (name == "least" and spec.scale and spec.scale.has_least):
            signature[name] = "fp32"
        elif name in ("rows", "n", "n1", "n2"):
            signature[name] = "i32"
        elif name == "sg":
            signature[name] = "i64"
        elif name not in signature and name not in constants:
            constants[name] = None
    if vectors:
        divisible["n"] = config.unit
    kernel = _rms_norm_long_kernel if config.long else _rms_norm_row_kernel
    full = {name: signature.get(name, "constexpr") for name in _NAMES}
    return Build(
        _describe(spec, config, levels, aligned, offset),
        kernel,
        tuple(full.items()),
        tuple(constants.items()),
        tuple(divisible.items()),
        config.warps,
        chip.has_pdl,
        config.registers if vectors else 0,
        contracts=False,
    )


def _prologue(spec: RowSpec, chip: Chip, width: int) -> Any:
    """The device function of a spec's prologue, which reads 8-bit floats as codes; ``width`` as `device_function` has it."""
    if spec.prologue is None:
        return None
    width = width if any(operand.group for operand in spec.operands) else 0
    x = FP8_FORMATS.get(spec.x)
    hardware = x is not None and x.name == "e4m3fn" and chip.casts_e4m3fn
    return device_function(spec.prologue, spec.operands, width, x, hardware)


def _by_lane(spec: RowSpec, config: RowConfig, chip: Chip) -> bool:
    """Whether `store_groups_by_lane` can do it: whole chunks, a group in the lanes of one warp, of which each chunk has one at least."""
    rule = spec.scale
    if rule is None or rule.kind != "group" or chip.backend != "cuda":
        return False
    lanes = rule.group // config.vec
    return config.whole and config.rows == 1 and not config.long and slots(config.count) <= lanes <= chip.warp_size


def _describe(spec: RowSpec, config: RowConfig, levels: int, aligned: bool, offset: bool) -> str:
    """A readable name for one configuration; equal names mean equal builds (for one chip)."""
    short = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float8_e8m0fnu: "e8m0"}
    short |= {torch.int8: "int8", **{dtype: fmt.name for dtype, fmt in FP8_FORMATS.items()}}
    parts = ["rms_norm_long" if config.long else "rms_norm_row", f"x={short[spec.x]}", f"gamma={short[spec.gamma]}"]
    if spec.residual:
        parts.append(f"residual={short[spec.residual]}")
    if spec.prologue:
        kinds = ",".join(f"{o.kind}{o.group or ''}:{short[o.dtype]}" for o in spec.operands)
        parts.append(f"prologue={spec.prologue.key}({kinds})")
    if spec.norm:
        parts.append("norm")
    if spec.fp8 and spec.scale:
        rule = spec.scale
        size = str(rule.group) if rule.group else ""
        parts.append(
            f"{spec.fp8.name}:{spec.fp8_max:g}/{rule.kind}{size}:{'ue8m0:' if rule.ue8m0 else ''}{short[rule.dtype]}"
        )
        parts += [
            word
            for word, said in (("divide", rule.divides), ("least", rule.has_least), ("bound", rule.bound_in_memory))
            if said
        ]
    if spec.rounding != "once":
        parts.append(spec.rounding)
    if spec.residual and spec.round_sum != (spec.rounding == "hf"):
        parts.append("rounded sum" if spec.round_sum else "unrounded sum")
    if offset:
        parts.append("offset")
    chunks = str(config.chunk) if config.count < 2 else f"{config.count}*{config.chunk}"
    tile = f"{config.rows}x{chunks}" if config.rows > 1 or config.count < 2 else chunks
    tile += "" if config.whole or config.long else "-"
    tile += f"/{config.warps}w/v{config.vec}"
    tile += "" if config.unit * spec.itemsize == 16 else f":{config.unit}"
    tile += "" if aligned else "u"
    tile += f"/r{config.registers}" if config.registers and aligned else ""
    parts.append(tile + ("/twice" if config.reread else ""))
    if levels > 1:
        parts.append(f"levels={levels}")
    return " ".join(parts)


def work_of(spec: RowSpec) -> Work:
    """How much a row kernel holds in registers, in the words of `row_config`."""
    if spec.prologue:
        return "prologue"
    if spec.x.itemsize != 2:
        return "more"
    if spec.scale and spec.scale.kind == "group":
        if spec.norm:
            return "group, norm"
        return "group, residual" if spec.residual or spec.gamma.itemsize != 2 else "group"
    if spec.quantizes_norm or (spec.residual and spec.residual.itemsize != 2):
        return "more"
    if spec.fp8 is None:
        if spec.residual:
            return "residual" if spec.gamma.itemsize == 2 else "more"
        return "norm" if spec.gamma.itemsize == 2 else "wide gamma"
    if (
        spec.norm
        or spec.gamma.itemsize != 2
        or spec.scale is None
        or spec.scale.kind != "row"
        or spec.fp8.name != "e4m3fn"
    ):
        return "more"
    return "fp8, residual" if spec.residual else "fp8"


def select(
    spec: RowSpec, geom: Geometry, strides: Sequence[Strides], n: int, pointers: Sequence[int], gamma: int, chip: Chip
) -> tuple[RowConfig, int, bool]:
    """Tile, stride levels and alignment of a call; ``pointers`` and ``strides`` in the order of `ROW_TENSORS`."""
    config = row_config(n, spec.itemsize, chip.warp_size, work_of(spec), crowd_of(geom[0], n * spec.itemsize))
    levels = 1 if geom[1] * geom[2] == 1 else LEVELS
    aligned = _aligned(spec, geom, strides, pointers, gamma, config.unit)
    return config, levels, aligned


def _aligned(
    spec: RowSpec, geom: Geometry, strides: Sequence[Strides], pointers: Sequence[int], gamma: int, unit: int
) -> bool:
    """Whether every row of every tensor starts on 16 bytes, so that loads and stores can be vectors."""
    if unit == 1:
        return True
    addresses, steps = gamma, 0
    for index, pointer in enumerate(pointers):
        if index == SCALE_INDEX or (index >= FIRST_OPERAND and spec.operands[index - FIRST_OPERAND].kind in _NARROW):
            continue
        addresses |= pointer
        step = strides[index]
        steps |= step[0] | step[1] | step[2]
    return addresses % 16 == 0 and (geom[0] == 1 or steps % unit == 0)


def builds(chip: Chip, call: RowCall) -> list[Build]:
    """What `launch` would run on ``chip``, given the same arguments."""
    spec, gamma, geom, strides, n, weight_offset = (
        call.spec,
        call.gamma,
        call.geom,
        call.strides,
        call.n,
        call.weight_offset,
    )
    tensors = call.rows
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    chosen = select(spec, geom, strides, n, pointers, gamma.data_ptr(), chip)
    return [build_for(spec, *chosen, chip, weight_offset != 0)]


class _Plan:
    """A loaded kernel and where each argument of a call goes; everything else in ``template`` is constant."""

    __slots__ = ("launcher", "pointers", "rows", "strides", "template")

    def __init__(self, build: Build, config: RowConfig, device: int) -> None:
        constants = dict(build.constants)
        self.launcher = load(build, device)
        self.rows = config.rows
        self.template = [constants.get(name) for name in _NAMES]
        self.pointers = [(_NAMES.index(name), i) for i, name in enumerate(ROW_TENSORS) if name not in constants]
        self.strides = [
            (_NAMES.index(stride), i, level)
            for i, name in enumerate(ROW_TENSORS)
            for level, stride in enumerate(STRIDES[name])
            if stride not in constants
        ]


_plans: dict[tuple[Any, ...], _Plan] = {}
_chips: dict[int, Chip] = {}
_GAMMA, _STATIC, _SG, _BOUND = (_NAMES.index(name) for name in ("gamma", "static_scale", "sg", "scale_ub"))
_ROWS = _NAMES.index("rows")
_OFFSET = _NAMES.index("weight_offset")


def _plan(
    key: tuple[Any, ...], spec: RowSpec, n: int, levels: int, aligned: bool, device: int, offset: bool, crowd: Crowd
) -> _Plan:
    if device not in _chips:
        _chips[device] = current_chip(device)
    chip = _chips[device]
    config = row_config(n, spec.itemsize, chip.warp_size, work_of(spec), crowd)
    plan = _plans[key] = _Plan(build_for(spec, config, levels, aligned, chip, offset), config, device)
    return plan


def launch(call: RowCall) -> None:
    """Run one row kernel on the current stream; every argument has been checked."""
    spec, x, gamma, eps, weight_offset, residual, operands, static_scale, norm, codes, scale, new_residual = call[:12]
    scale_ub, scale_ub_tensor, min_scale, n, geom, strides = call[12:]
    rows, n1, n2 = geom
    if rows >= 1 << 31:
        raise Unsupported(f"rms_norm: at most 2**31 - 1 rows in one call on a GPU, got {rows}")
    sg = 0 if scale is None else scale.stride(-1)
    scalars = (rows, n, n1, n2, eps, weight_offset, scale_ub, min_scale if min_scale else None)
    tensors = (x, residual, norm, codes, scale, new_residual, *operands)
    device = x.get_device()
    if device < 0:
        _interpret(spec, geom, strides, n, tensors, gamma, static_scale, scale_ub_tensor, sg, scalars)
        return
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    weight = gamma.data_ptr()
    unit = row_config(n, spec.itemsize, 32, "more", "many").unit  # the same whatever else
    aligned = _aligned(spec, geom, strides, pointers, weight, unit)
    levels = 1 if n1 == 1 and n2 == 1 else LEVELS
    key = (spec, n, levels, aligned, device, weight_offset != 0, crowd_of(rows, n * spec.itemsize))
    plan = _plans.get(key) or _plan(key, *key)
    arguments = plan.template.copy()
    for place, index in plan.pointers:
        arguments[place] = pointers[index]
    for place, index, level in plan.strides:
        arguments[place] = strides[index][level]
    arguments[_GAMMA] = weight
    arguments[_SG] = sg
    if static_scale is not None:
        arguments[_STATIC] = static_scale.data_ptr()
    if scale_ub_tensor is not None:
        arguments[_BOUND] = scale_ub_tensor.data_ptr()
    arguments[_ROWS : _ROWS + len(scalars)] = scalars
    plan.launcher(-(-rows // plan.rows), arguments)


def _interpret(
    spec: RowSpec, geom: Geometry, strides: Sequence[Strides], n: int, tensors: Sequence[Tensor | None], gamma: Tensor,
    static_scale: Tensor | None, scale_ub_tensor: Tensor | None, sg: int, scalars: tuple[float | None, ...],
) -> None:  # fmt: skip
    """The same call in Triton's interpreter, on CPU tensors."""
    codes = (*FP8_FORMATS, torch.float8_e8m0fnu)
    viewed = [t.view(torch.uint8) if t is not None and t.dtype in codes else t for t in tensors]
    pointers = [0 if t is None else t.data_ptr() for t in viewed]
    config, levels, aligned = select(spec, geom, strides, n, pointers, gamma.data_ptr(), INTERPRETER)
    build = build_for(spec, config, levels, aligned, INTERPRETER, scalars[_OFFSET - _ROWS] != 0)
    values: dict[str, Any] = {"gamma": gamma, "static_scale": static_scale, "scale_ub": scale_ub_tensor, "sg": sg}
    values.update(zip(ROW_TENSORS, viewed, strict=False))
    values.update(zip(_NAMES[_ROWS : _ROWS + len(scalars)], scalars, strict=True))
    for name, triple in zip(ROW_TENSORS, strides, strict=False):
        values.update(zip(STRIDES[name], triple, strict=True))
    values.update(build.constants)
    if values["least"] is not None:
        values["least"] = _interpreted_number(values["least"])
    build.kernel[(-(-geom[0] // config.rows),)](**{name: values.get(name) for name in _NAMES})


def _interpreted_number(value: float) -> Any:
    """A number as float32, as compiled kernels get it. The interpreter takes a subnormal Python number for a float64."""
    import numpy
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(numpy.array([value], numpy.float32), tl.float32), tl.float32)
