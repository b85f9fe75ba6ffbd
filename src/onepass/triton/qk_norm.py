"""Launches the QK-RMSNorm kernel: chooses the tiles, names the machine code it needs, passes the arguments."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import Unsupported
from ..specs.layout import LEVELS
from ..specs.qk_norm import TENSORS, QkCall, QkRows, QkSpec
from .compiler import POINTERS, Build, current_chip, load
from .config import EARLY_ROWS, INTERPRETER, Chip, QkConfig, Side, qk_config
from .qk_norm_kernels import _qk_norm_kernel

_NAMES: Final[tuple[str, ...]] = tuple(_qk_norm_kernel.arg_names)
STRIDES: Final = {name: tuple(f"{p}{i}" for i in range(3)) for name, p in zip(TENSORS, "qkyzsp", strict=True)}
STEPS: Final = ("qh", "kh", "yh", "zh")
_SIDES: Final = (("q", "q_out", "gamma_q"), ("k", "k_out", "gamma_k"))
"""Tensors of rows, and of a row."""
MAX_ROWS: Final = 2**31 - 2**13
"""Row numbers are 32-bit, those of a tile's rows beyond the last one too."""
_POINTERS: Final = (*TENSORS, "gamma_q", "gamma_k", "freqs")
_SCALARS: Final = ("tokens", "q_heads", "k_heads", "nq", "nk", "n1", "n2", "sequence", "limit", "q_programs")
_FLOATS: Final = ("q_divisor", "k_divisor", "eps", "weight_offset")
_SHORT: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.int32: "i32",
    torch.int64: "i64",
}


def _stage(spec: QkSpec) -> str:
    """Sums and means are one kernel with two divisors."""
    return "stats" if spec.stage in ("sums", "means") else spec.stage


def build_for(spec: QkSpec, config: QkConfig, levels: int, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed."""
    rope = spec.rope
    sized = (("Q", config.q), ("K", config.k))
    constants: dict[str, Any] = {
        "STAGE": _stage(spec),
        "HF": spec.rounding == "hf",
        "HEADS": spec.heads,
        "ROPE": rope.style if rope else "none",
        "HEAD": rope.head_dim if rope else 1,
        "DIM": rope.dim if rope else 0,
        "EXACT": chip.backend != "interpreter",
        "LEVELS": levels,
        **{f"ROWS_{side}": tile.rows for side, tile in sized},
        **{f"BLOCK_{side}": tile.block for side, tile in sized},
        **{f"STEP_{side}": tile.step for side, tile in sized},
        **{f"CHUNK_{side}": tile.chunk for side, tile in sized},
        **{f"COUNT_{side}": tile.count for side, tile in sized},
        **{f"LONG_{side}": tile.long for side, tile in sized},
        "PDL": chip.has_pdl,
        "EARLY_ROWS": EARLY_ROWS,
    }
    signature: dict[str, str] = dict.fromkeys(_SCALARS, "i32") | dict.fromkeys(_FLOATS, "fp32")
    divisible: dict[str, int] = {}
    vecs = {name: side.vec for names, side in zip(_SIDES, (config.q, config.k), strict=True) for name in names}
    vectors = {name: vec for name, vec in vecs.items() if vec > 1}
    for name, dtype in _dtypes(spec).items():
        strides = STRIDES.get(name, ()) + (("f0",) if name == "freqs" else ())
        if dtype is None:
            constants |= {name: None, **dict.fromkeys(strides, 0)}
            continue
        signature[name] = POINTERS[dtype]
        for level, stride in enumerate(strides):
            if level < levels:
                signature[stride] = "i64"
            else:
                constants[stride] = 0
        if name in vectors:
            divisible[name] = 16
            divisible |= {stride: vectors[name] for stride in strides if stride in signature}
    for name, step in zip(TENSORS, STEPS, strict=False):
        if spec.heads and name in signature:
            signature[step] = "i64"
            if name in vectors:
                divisible[step] = vectors[name]
        else:
            constants[step] = 0
    if not rope or rope.positions is not None:
        constants["sequence"] = 1
    if not rope:
        constants["limit"] = 1
    divisible |= {f"n{name}": vectors[name] for name in ("q", "k") if name in vectors}
    full = tuple((name, "constexpr" if name in constants else signature[name]) for name in _NAMES)
    return Build(
        _describe(spec, config, levels), _qk_norm_kernel, full, tuple(constants.items()),
        tuple(divisible.items()), config.warps, chip.has_pdl,
        config.registers if spec.applies else 0, contracts=False,
    )  # fmt: skip


def _dtypes(spec: QkSpec) -> dict[str, torch.dtype | None]:
    return {
        "q": spec.x,
        "k": spec.x,
        "gamma_q": spec.gamma,
        "gamma_k": spec.gamma_k,
        "q_out": spec.out,
        "k_out": spec.out,
        "stats": None if spec.stage == "fused" else torch.float32,
        "freqs": torch.float32 if spec.rope else None,
        "positions": spec.rope.positions if spec.rope else None,
    }


def _describe(spec: QkSpec, config: QkConfig, levels: int) -> str:
    """A readable name for one configuration; equal names mean equal builds (for one chip)."""
    parts = [f"qk_{_stage(spec)}", f"x={_SHORT[spec.x]}"]
    if spec.gamma is not None and spec.out is not None:
        other = "" if spec.gamma_k in (None, spec.gamma) else f",{_SHORT[spec.gamma_k]}"
        parts += [f"gamma={_SHORT[spec.gamma]}{other}", f"out={_SHORT[spec.out]}"]
    if spec.rounding != "once":
        parts.append(spec.rounding)
    if spec.heads:
        parts.append("heads")
    if spec.rope:
        at = f"@{_SHORT[spec.rope.positions]}" if spec.rope.positions is not None else ""
        parts.append(f"rope={spec.rope.style}:{spec.rope.dim}/{spec.rope.head_dim}{at}")
    parts.append(f"{_tile(config.q)}+{_tile(config.k)}/{config.warps}w")
    if levels > 1:
        parts.append(f"levels={levels}")
    return " ".join(parts)


def _tile(side: Side) -> str:
    cut = f"={side.count}*{side.chunk}" if side.count > 1 else ""
    cut += "" if side.step == side.block else f"({side.step})"
    return f"{side.rows}x{side.block}{cut}{'L' if side.long else ''}v{side.vec}"


def config_of(spec: QkSpec, rows: QkRows, vecs: tuple[int, int], warp_size: int) -> QkConfig:
    """The tiles of a call."""
    head = spec.rope.head_dim if spec.rope else 0
    return qk_config(*rows.widths, vecs, warp_size, spec.stage == "apply", head, 16 // spec.x.itemsize)


def _vecs(spec: QkSpec, rows: QkRows, pointers: Sequence[int]) -> tuple[int, int]:
    """Columns of q, and of k, to load at a time: 16 bytes where every row begins and ends there in every tensor, or one."""
    vec = 16 // spec.x.itemsize
    found = [vec, vec]
    for side in (0, 1):
        x, out, gamma = side, side + 2, side + 6
        steps = rows.widths[side] | rows.steps[x] | rows.steps[out]
        if rows.geom[0] > 1:
            for index in (x, out):
                s0, s1, s2 = rows.strides[index]
                steps |= s0 | s1 | s2
        if steps % vec or (pointers[x] | pointers[out] | pointers[gamma]) % 16:
            found[side] = 1
    return found[0], found[1]


def _programs(side: Side, rows: int, n: int, given: bool) -> int:
    tiles = -(-rows // side.rows)
    return tiles * -(-n // side.step) if given else tiles


def builds(chip: Chip, call: QkCall) -> list[Build]:
    """What `launch` would run on ``chip``, given the same arguments."""
    spec, q, k, gamma_q, gamma_k, q_out, k_out, stats, freqs, positions, _, _, rows = call
    tensors = (q, k, q_out, k_out, stats, positions, gamma_q, gamma_k, freqs)
    vecs = _vecs(spec, rows, [0 if t is None else t.data_ptr() for t in tensors])
    return [build_for(spec, config_of(spec, rows, vecs, chip.warp_size), _levels(rows), chip)]


def _levels(rows: QkRows) -> int:
    return 1 if rows.geom[1] == rows.geom[2] == 1 else LEVELS


class _Plan:
    """A loaded kernel and where each argument of a call goes; everything else in ``template`` is constant."""

    __slots__ = ("config", "launcher", "pointers", "scalars", "steps", "strides", "template")

    def __init__(self, build: Build, config: QkConfig, device: int) -> None:
        constants = dict(build.constants)
        self.config = config
        self.launcher = load(build, device)
        self.template = [constants.get(name) for name in _NAMES]
        self.pointers = [(_NAMES.index(name), i) for i, name in enumerate(_POINTERS) if name not in constants]
        self.strides = [
            (_NAMES.index(stride), i, level)
            for i, name in enumerate(TENSORS)
            for level, stride in enumerate(STRIDES[name])
            if stride not in constants
        ]
        self.steps = [(_NAMES.index(step), i) for i, step in enumerate(STEPS) if step not in constants]
        self.scalars = [
            (_NAMES.index(name), i) for i, name in enumerate((*_SCALARS, *_FLOATS)) if name not in constants
        ]


_plans: dict[tuple[Any, ...], _Plan] = {}
_chips: dict[int, Chip] = {}
_F0: Final = _NAMES.index("f0")


def _plan(key: tuple[Any, ...], spec: QkSpec, rows: QkRows, levels: int, vecs: tuple[int, int], device: int) -> _Plan:
    if device not in _chips:
        _chips[device] = current_chip(device)
    chip = _chips[device]
    config = config_of(spec, rows, vecs, chip.warp_size)
    plan = _plans[key] = _Plan(build_for(spec, config, levels, chip), config, device)
    return plan


def _scalars(
    spec: QkSpec, rows: QkRows, config: QkConfig, freqs: Tensor | None, eps: float, weight_offset: float
) -> tuple[list[float], int]:
    """The numbers after the tensors, and the number of programs."""
    (tokens, n1, n2), (q_heads, k_heads), (nq, nk) = rows.geom, rows.heads, rows.widths
    given = spec.stage == "apply"
    q_programs = _programs(config.q, tokens * q_heads, nq, given)
    grid = q_programs + _programs(config.k, tokens * k_heads, nk, given)
    if max(grid, tokens * max(q_heads, k_heads)) > MAX_ROWS:
        raise Unsupported(f"qk_rms_norm: at most 2**31 - 2**13 rows in one call on a GPU, got {tokens} tokens")
    limit = 1 if freqs is None else freqs.shape[0]
    divisors = (1.0, 1.0) if spec.stage == "sums" else (float(nq), float(nk))
    counts = (tokens, q_heads, k_heads, nq, nk, n1, n2, rows.sequence, limit, q_programs)
    return [*counts, *divisors, eps, weight_offset], grid


def launch(call: QkCall) -> None:
    """Run the kernel of ``spec`` on the current stream; every argument has been checked."""
    spec, q, k, gamma_q, gamma_k, q_out, k_out, stats, freqs, positions, eps, weight_offset, rows = call
    tensors = (q, k, q_out, k_out, stats, positions, gamma_q, gamma_k, freqs)
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    device = q.get_device()
    vecs = _vecs(spec, rows, pointers)
    levels = _levels(rows)
    if device < 0:
        _interpret(spec, rows, levels, vecs, tensors, eps, weight_offset)
        return
    key = (spec, rows.widths, levels, vecs, device)
    plan = _plans.get(key) or _plan(key, spec, rows, levels, vecs, device)
    scalars, grid = _scalars(spec, rows, plan.config, freqs, eps, weight_offset)
    arguments = plan.template.copy()
    for place, index in plan.pointers:
        arguments[place] = pointers[index]
    for place, index, level in plan.strides:
        arguments[place] = rows.strides[index][level]
    for place, index in plan.steps:
        arguments[place] = rows.steps[index]
    for place, index in plan.scalars:
        arguments[place] = scalars[index]
    if freqs is not None:
        arguments[_F0] = freqs.stride(0)
    plan.launcher(grid, arguments)


def _interpret(
    spec: QkSpec, rows: QkRows, levels: int, vecs: tuple[int, int], tensors: Sequence[Tensor | None], eps: float, weight_offset: float
) -> None:  # fmt: skip
    """The same call in Triton's interpreter, on CPU tensors."""
    config = config_of(spec, rows, vecs, INTERPRETER.warp_size)
    build = build_for(spec, config, levels, INTERPRETER)
    freqs = tensors[-1]
    scalars, grid = _scalars(spec, rows, config, freqs, eps, weight_offset)
    values: dict[str, Any] = dict(zip(_POINTERS, tensors, strict=True))
    values |= dict(zip((*_SCALARS, *_FLOATS), scalars, strict=True)) | dict(zip(STEPS, rows.steps, strict=True))
    for name, triple in zip(TENSORS, rows.strides, strict=True):
        values |= dict(zip(STRIDES[name], triple, strict=True))
    if freqs is not None:
        values["f0"] = freqs.stride(0)
    values |= dict(build.constants)
    build.kernel[(grid,)](**{name: values.get(name) for name in _NAMES})
