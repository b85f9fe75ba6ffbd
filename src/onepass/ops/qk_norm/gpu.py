"""The QK-norm kernel: its parameters, tiles, alignment and names."""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ...core.layout import LEVELS
from ...errors import Unsupported
from ...formats import FP8_FORMATS
from ...gpu.chip import Chip, tuning
from ...gpu.compile import Build
from ...gpu.launch import F32, I32, I64, SHORT_NAMES, GpuKernels, Pointer, Rows, make_build, rows
from ...gpu.lib.numbers import quant
from .gpu_kernel import _qk_norm_kernel
from .gpu_tile import QkConfig, Side, qk_config
from .launch import TENSORS, QkCall, QkRows, QkSpec

MAX_ROWS: Final = 2**31 - 2**13
"""Row numbers are 32-bit, including those of a tile's rows beyond the last one."""


class Heads(NamedTuple):
    """A tensor of rows with heads: `launch.Rows` and the stride to the next head."""

    at: Pointer
    s0: I64
    s1: I64
    s2: I64
    head: I64


class Angles(NamedTuple):
    """Cosines and sines, one row per position."""

    at: Pointer
    row: I64


class QkShape(NamedTuple):
    """Counts, programs of q, divisors of the statistics, eps, the offset of gamma, and k's eps or None."""

    tokens: I32
    q_heads: I32
    k_heads: I32
    nq: I32
    nk: I32
    n1: I32
    n2: I32
    sequence: I32
    limit: I32
    q_programs: I32
    q_divisor: F32
    k_divisor: F32
    eps: F32
    weight_offset: F32
    eps_k: F32


class QkParameters(NamedTuple):
    """The parameters of the kernel."""

    q: Heads
    k: Heads
    gamma_q: Pointer
    gamma_k: Pointer
    q_out: Heads
    k_out: Heads
    stats: Rows
    freqs: Angles
    positions: Rows
    q_scale: Pointer
    k_scale: Pointer
    q_scale_out: Heads
    k_scale_out: Heads
    shape: QkShape


def pack(call: QkCall, config: QkConfig, programs: tuple[int, ...]) -> QkParameters:
    """The parameters of a call."""
    where, freqs = call.rows, call.freqs
    geom, strides, steps = where.geom, where.strides, where.steps

    def heads(tensor: Tensor | None, index: int, step: int) -> Heads:
        return Heads(None, 0, 0, 0, 0) if tensor is None else Heads(tensor, *strides[index], steps[step])

    sums = call.spec.stage == "sums"
    shape = QkShape(
        geom.rows,
        *where.heads,
        *where.widths,
        geom.n1,
        geom.n2,
        where.sequence,
        limit=0 if freqs is None else freqs.shape[0],
        q_programs=programs[1],
        q_divisor=1.0 if sums else float(where.widths[0]),
        k_divisor=1.0 if sums else float(where.widths[1]),
        eps=call.eps,
        weight_offset=call.weight_offset,
        eps_k=call.eps_k,
    )
    return QkParameters(
        q=heads(call.q, 0, 0),
        k=heads(call.k, 1, 1),
        gamma_q=call.gamma_q,
        gamma_k=call.gamma_k,
        q_out=heads(call.q_out, 2, 2),
        k_out=heads(call.k_out, 3, 3),
        stats=rows(call.stats, strides[4]),
        freqs=Angles(freqs, 0 if freqs is None else freqs.stride(0)),
        positions=rows(call.positions, strides[5]),
        q_scale=call.q_scale,
        k_scale=call.k_scale,
        q_scale_out=heads(call.q_scale_out, 6, 4),
        k_scale_out=heads(call.k_scale_out, 7, 5),
        shape=shape,
    )


class QkMath(NamedTuple):
    """What a kernel computes: ``rope`` is the style of RoPE, for ``dim`` of every ``head`` columns.
    ``scale`` is what fp8 results are divided by (`QkScale`).
    """

    stage: str
    hf: bool
    heads: bool
    rope: str
    head: int
    dim: int
    levels: int
    scale: str
    hw_rounding: bool
    pdl: bool


def _stage(spec: QkSpec) -> str:
    """Sums and means are one kernel with two divisors."""
    return "stats" if spec.stage in ("sums", "means") else spec.stage


def build_for(spec: QkSpec, config: QkConfig, levels: int, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed."""
    rope = spec.rope
    dtypes = {
        "q": spec.x,
        "k": spec.x,
        "gamma_q": spec.gamma,
        "gamma_k": spec.gamma_k,
        "q_out": spec.out,
        "k_out": spec.out,
        "stats": None if spec.stage == "fused" else torch.float32,
        "freqs": torch.float32 if rope else None,
        "positions": rope.positions if rope else None,
        **dict.fromkeys(("q_scale", "k_scale"), torch.float32 if spec.scale == "tensor" else None),
        **dict.fromkeys(("q_scale_out", "k_scale_out"), torch.float32 if spec.scale == "row" else None),
    }
    style = (rope.style, rope.head_dim, rope.dim) if rope else ("none", 1, 0)
    math = QkMath(
        _stage(spec), spec.rounding == "hf", spec.heads, *style, levels, spec.scale, chip.rounds_casts, chip.has_pdl
    )
    constants: dict[str, object] = {
        "MATH": math,
        "Q": config.q,
        "K": config.k,
        "EARLY_ROWS": tuning(chip).rows.early_rows,
    }
    constants["QUANT"] = quant(None if spec.out is None else FP8_FORMATS.get(spec.out), chip)
    unused: dict[str, float | None] = {} if spec.two_eps else {"shape.eps_k": None}
    divisible: dict[str, int] = {}
    for side, names in ((config.q, ("q", "q_out", "gamma_q")), (config.k, ("k", "k_out", "gamma_k"))):
        x, out, gamma = names
        strides = [f"{name}.{stride}" for name in (x, out) for stride in ("s0", "s1", "s2", "head")]
        if side.vec > 1:
            divisible |= {f"{x}.at": 16, f"{out}.at": 16, gamma: 16, f"shape.n{x}": side.vec}
            divisible |= dict.fromkeys(strides, side.vec)
        if not spec.heads:
            unused |= {f"{x}.head": 0, f"{out}.head": 0, f"{x}_scale_out.head": 0}
    for name in TENSORS:
        unused |= dict.fromkeys((f"{name}.s{level}" for level in range(levels, 3)), 0)
    if not rope or rope.positions is not None:
        unused["shape.sequence"] = 1
    if not rope:
        unused["shape.limit"] = 1
    return make_build(
        QkParameters,
        _describe(spec, config, levels),
        _qk_norm_kernel,
        chip,
        dtypes=dtypes,
        constants=constants,
        unused=unused,
        divisible=divisible,
        warps=config.warps,
        registers=config.registers if spec.applies else 0,
    )


def _describe(spec: QkSpec, config: QkConfig, levels: int) -> str:
    """A readable name for one configuration; equal names mean equal builds (for one chip)."""
    short = SHORT_NAMES
    parts = [f"qk_{_stage(spec)}", f"x={short[spec.x]}"]
    if spec.gamma is not None and spec.out is not None:
        other = "" if spec.gamma_k in (None, spec.gamma) else f",{short[spec.gamma_k]}"
        parts += [f"gamma={short[spec.gamma]}{other}", f"out={short[spec.out]}"]
    if spec.scale != "none":
        parts.append(f"scale={spec.scale}")
    if spec.two_eps:
        parts.append("eps_k")
    if spec.rounding != "once":
        parts.append(spec.rounding)
    if spec.heads:
        parts.append("heads")
    if spec.rope:
        at = f"@{short[spec.rope.positions]}" if spec.rope.positions is not None else ""
        parts.append(f"rope={spec.rope.style}:{spec.rope.dim}/{spec.rope.head_dim}{at}")
    parts.append(f"{_tile(config.q)}+{_tile(config.k)}/{config.warps}w")
    if levels > 1:
        parts.append(f"levels={levels}")
    return " ".join(parts)


def _tile(side: Side) -> str:
    cut = f"={side.count}*{side.chunk}" if side.count > 1 else ""
    cut += "" if side.step == side.block else f"({side.step})"
    return f"{side.rows}x{side.block}{cut}{'L' if side.long else ''}v{side.vec}"


class QkFacts(NamedTuple):
    """What selects the machine code of a call, besides its spec."""

    widths: tuple[int, int]
    levels: int
    vecs: tuple[int, int]


def _facts(call: QkCall, chip: Chip) -> QkFacts:
    where = call.rows
    levels = 1 if where.geom[1] == where.geom[2] == 1 else LEVELS
    q = _vec(call, where, 0, call.q, call.q_out, call.gamma_q)
    return QkFacts(where.widths, levels, (q, _vec(call, where, 1, call.k, call.k_out, call.gamma_k)))


def _vec(call: QkCall, where: QkRows, side: int, x: Tensor, out: Tensor | None, gamma: Tensor | None) -> int:
    """Columns to load at a time: 16 bytes where all rows begin and end on 16 bytes, else one."""
    vec = 16 // call.spec.x.itemsize
    steps = where.widths[side] | where.steps[side] | where.steps[side + 2]
    if where.geom[0] > 1:
        (a0, a1, a2), (b0, b1, b2) = where.strides[side], where.strides[side + 2]
        steps |= a0 | a1 | a2 | b0 | b1 | b2
    address = x.data_ptr()
    if out is not None:
        address |= out.data_ptr()
    if gamma is not None:
        address |= gamma.data_ptr()
    return 1 if steps % vec or address % 16 else vec


def _configure(spec: QkSpec, facts: QkFacts, chip: Chip) -> QkConfig:
    head = spec.rope.head_dim if spec.rope else 0
    return qk_config(*facts.widths, facts.vecs, chip, spec.stage == "apply", head, 16 // spec.x.itemsize)


def _grid(call: QkCall, config: QkConfig) -> tuple[int, int]:
    """The number of programs, in total and for q."""
    where = call.rows
    tokens, (q_heads, k_heads), (nq, nk) = where.geom[0], where.heads, where.widths
    q, k = config.q, config.k
    q_programs, k_programs = -(-tokens * q_heads // q.rows), -(-tokens * k_heads // k.rows)
    if call.spec.stage == "apply":
        q_programs, k_programs = q_programs * -(-nq // q.step), k_programs * -(-nk // k.step)
    grid = q_programs + k_programs
    if max(grid, tokens * max(q_heads, k_heads)) > MAX_ROWS:
        raise Unsupported(f"qk_rms_norm: at most 2**31 - 2**13 rows in one call on a GPU, got {tokens} tokens")
    return grid, q_programs


KERNELS: Final[GpuKernels[QkSpec, QkCall, QkFacts, QkConfig]] = GpuKernels(
    QkParameters,
    _facts,
    _configure,
    lambda spec, facts, config, chip: build_for(spec, config, facts.levels, chip),
    _grid,
    pack,
)
launch, builds = KERNELS.launch, KERNELS.builds
