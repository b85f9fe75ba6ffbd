"""Launches the row kernels: chooses the tile, names the machine code it needs, passes the arguments."""

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
from torch import Tensor

from ..errors import Unsupported
from ..prologues import MAX_OPERANDS
from ..rows import Geometry, RowSpec, Strides
from ._compile import POINTERS, Build, Launcher, current_chip
from ._config import INTERPRETER, Chip, RowConfig, dependent_launch, grid_size, row_config
from ._prologue import device_function
from ._rms_norm_kernels import _rms_norm_long_kernel, _rms_norm_row_kernel

ROW_TENSORS: Final = ("x", "residual", "norm", "codes", "scale", "new_residual", *(f"p{i}" for i in range(MAX_OPERANDS)))
STRIDES: Final = {
    name: tuple(f"{prefix}{level}" for level in range(3))
    for name, prefix in zip(ROW_TENSORS, ("x", "r", "y", "c", "s", "w", *(f"p{i}" for i in range(MAX_OPERANDS))), strict=True)
}
_NAMES: Final[tuple[str, ...]] = tuple(_rms_norm_row_kernel.arg_names)


def build_for(spec: RowSpec, config: RowConfig, levels: int, aligned: bool, pdl: bool, chip: Chip) -> Build:
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
        **{f"p{i}": operand[f"p{i}"].dtype if f"p{i}" in operand else None for i in range(MAX_OPERANDS)},
    }
    constants: dict[str, Any] = {
        "PROLOGUE": device_function(spec.prologue, tuple(o.kind for o in spec.operands)) if spec.prologue else None,
        "HF": spec.rounding == "hf",
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
        "ROWS": config.rows if aligned else 1,
        "BLOCK": config.block,
        "VEC": config.vec,
        "ALIGNED": aligned,
        "THREADS": config.warps * chip.warp_size,
        "PDL": pdl,
    }
    signature: dict[str, str] = {}
    divisible: dict[str, int] = {}
    vectors = aligned and config.vec > 1
    for name, dtype in dtypes.items():
        wide = name != "scale" and name != "static_scale" and (name not in operand or operand[name].kind != "row")
        if dtype is None:
            constants[name] = None
        else:
            signature[name] = POINTERS[dtype]
            if vectors and wide:
                divisible[name] = 16
        for level, stride in enumerate(STRIDES.get(name, ())):
            if dtype is None or level >= levels or (name in operand and operand[name].kind == "column"):
                constants[stride] = 0
            else:
                signature[stride] = "i64"
                if vectors and wide:
                    divisible[stride] = config.vec
    for name in _NAMES:
        if name in ("eps", "weight_offset", "bound"):
            signature[name] = "fp32"
        elif name in ("rows", "n", "n1", "n2"):
            signature[name] = "i32"
        elif name == "sg":
            signature[name] = "i64"
        elif name not in signature and name not in constants:
            constants[name] = None
    if vectors:
        divisible["n"] = config.vec
    kernel = _rms_norm_long_kernel if config.long else _rms_norm_row_kernel
    full = {name: signature.get(name, "constexpr") for name in _NAMES}
    return Build(
        _describe(spec, config, levels, aligned, pdl),
        kernel,
        tuple(full.items()),
        tuple(constants.items()),
        tuple(divisible.items()),
        config.warps,
        pdl,
    )


def _describe(spec: RowSpec, config: RowConfig, levels: int, aligned: bool, pdl: bool) -> str:
    """A readable name for one configuration; equal names mean equal builds (for one chip)."""
    short = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float8_e8m0fnu: "e8m0"}
    parts = ["rms_norm_long" if config.long else "rms_norm_row", f"x={short[spec.x]}", f"gamma={short[spec.gamma]}"]
    if spec.residual:
        parts.append(f"residual={short[spec.residual]}")
    if spec.prologue:
        kinds = ",".join(f"{o.kind}:{short[o.dtype]}" for o in spec.operands)
        parts.append(f"prologue={spec.prologue.key}({kinds})")
    if spec.norm:
        parts.append("norm")
    if spec.fp8 and spec.scale:
        rule = spec.scale
        size = str(rule.group) if rule.group else ""
        parts.append(f"{spec.fp8.name}:{spec.fp8_max:g}/{rule.kind}{size}:{'ue8m0:' if rule.ue8m0 else ''}{short[rule.dtype]}")
    if spec.rounding != "once":
        parts.append(spec.rounding)
    parts.append(f"{config.rows if aligned else 1}x{config.block}/{config.warps}w/v{config.vec}{'' if aligned else 'u'}")
    if levels > 1:
        parts.append(f"levels={levels}")
    if pdl:
        parts.append("pdl")
    return " ".join(parts)


_loaded: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def select(
    spec: RowSpec, geom: Geometry, strides: Sequence[Strides], n: int, tensors: Sequence[Tensor | None],
    operands: Sequence[Tensor], gamma: Tensor, chip: Chip,
) -> tuple[RowConfig, int, bool, bool]:  # fmt: skip
    """Tile, stride levels, alignment and dependent launch for a call; ``tensors`` in the order of ``strides``."""
    config = row_config(n, spec.x.itemsize, chip.warp_size)
    levels = 1 if geom.n1 * geom.n2 == 1 else 3
    aligned = True
    moved = 0
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        moved += tensor.element_size()
        if config.vec > 1 and index != 4 and (index < 6 or spec.operands[index - 6].kind == "full"):
            step = strides[index]
            loose = (step[0] | step[1] | step[2]) % config.vec if geom.rows > 1 else 0
            aligned = aligned and not (tensor.data_ptr() % 16 or loose)
    if config.vec > 1:
        columns = [t for t, o in zip(operands, spec.operands, strict=True) if o.kind == "column"]
        aligned = aligned and all(t.data_ptr() % 16 == 0 for t in (gamma, *columns))
    pdl = dependent_launch(chip, moved * geom.rows * n)
    return config, levels, aligned, pdl


def launch(
    spec: RowSpec,
    geom: Geometry,
    strides: Sequence[Strides],
    n: int,
    x: Tensor,
    gamma: Tensor,
    residual: Tensor | None,
    operands: Sequence[Tensor],
    static_scale: Tensor | None,
    norm: Tensor | None,
    codes: Tensor | None,
    scale: Tensor | None,
    new_residual: Tensor | None,
    eps: float,
    weight_offset: float,
    scale_ub: float,
) -> None:
    """Run one row kernel on the current stream; every argument has been checked."""
    if geom.rows >= 1 << 31:
        raise Unsupported(f"rms_norm: at most 2**31 - 1 rows in one call on a GPU, got {geom.rows}")
    if triton.knobs.runtime.interpret:
        codes, scale = (t.view(torch.uint8) if t is not None and t.element_size() == 1 else t for t in (codes, scale))
    tensors = (x, residual, norm, codes, scale, new_residual, *(t if o.kind != "column" else None for t, o in zip(operands, spec.operands, strict=True)))  # fmt: skip
    index = x.device.index
    chip = INTERPRETER if index is None else _chip(index)
    config, levels, aligned, pdl = select(spec, geom, strides, n, tensors, operands, gamma, chip)
    values: dict[str, Any] = dict(zip(ROW_TENSORS, tensors, strict=False))
    values.update(gamma=gamma, static_scale=static_scale, rows=geom.rows, n=n, n1=geom.n1, n2=geom.n2)
    values.update(eps=eps, weight_offset=weight_offset, bound=scale_ub, sg=0 if scale is None else scale.stride(-1))
    for position, operand in enumerate(operands):
        values[f"p{position}"] = operand
    for name, triple in zip(ROW_TENSORS, strides, strict=False):
        values.update(zip(STRIDES[name], triple, strict=True))
    grid = grid_size(-(-geom.rows // (config.rows if aligned else 1)))
    if index is None:
        build = build_for(spec, config, levels, aligned, pdl, chip)
        values.update(build.constants)
        build.kernel[(grid,)](**{name: values.get(name) for name in _NAMES})
        return
    key = (spec, config, levels, aligned, pdl, index)
    found = _loaded.get(key)
    if found is None:
        build = build_for(spec, config, levels, aligned, pdl, chip)
        constants = dict(build.constants)
        found = _loaded[key] = (Launcher(build, index), constants)
    launcher, constants = found
    launcher(grid, [constants[name] if name in constants else values[name] for name in _NAMES])


_chips: dict[int, Chip] = {}


def _chip(index: int) -> Chip:
    if index not in _chips:
        _chips[index] = current_chip(index)
    return _chips[index]
