"""The MLA cache-write kernel: its parameters, programs, alignment and names."""

from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

from ...core import replay
from ...errors import ContractError, Unsupported
from ...formats import FP8_FORMATS
from ...gpu.chip import Chip
from ...gpu.compile import Build
from ...gpu.launch import SHORT_NAMES, Family
from ...gpu.quantization import quant
from .gpu_kernel import _mla_rope_norm_kernel
from .gpu_tile import MlaConfig, MlaCut, mla_config, mla_cut, power_of_two
from .spec import TILE as COLUMNS_PER_SCALE
from .spec import MlaCall, MlaRows, MlaSpec

__all__ = ["MlaCut", "build_for", "builds", "config_of", "cut_as", "launch"]

MAX_PROGRAMS: Final = 2**31 - 2**13
"""Token numbers are 32-bit, including those of a tile's tokens beyond the last one."""


MlaTensors = namedtuple(
    "MlaTensors", "q kv gamma freqs offsets lengths table slots positions kv_scale q_out blocks token_scale"
)
MlaNumbers = namedtuple("MlaNumbers", "kv_programs page_shift early eps weight_offset")
"""Programs of kv, log2 of the page size, programs for an early start, and two floats."""
MlaMath = namedtuple("MlaMath", "rope turned half reference scale group paged full part packed split hw_rounding pdl")
"""What a kernel computes. ``turned`` of ``rope`` columns rotate; ``half``: pairs are half of these
apart. ``group`` columns share a scale of kind "tile". `Known` documents the rest.
"""

_SIZES: Final = MlaRows._fields[:11]
TABLE: Final = {
    "tensors": MlaTensors(*(f"* {name}" for name in MlaTensors._fields)),
    "rows": MlaRows._make(f"{'i32' if name in _SIZES else 'i64'} rows.{name}" for name in MlaRows._fields),
    "numbers": MlaNumbers(
        kv_programs="i32 programs[1]",
        page_shift="i32 rows.page_size.bit_length() - 1",
        early="i32 config.early",
        eps="fp32 eps",
        weight_offset="fp32 weight_offset",
    ),
}


class Known(NamedTuple):
    """What is known about addresses and sizes: whether rows of q, of kv and the cache, and of freqs
    are 16-byte aligned.

    ``full``: the latent is a power of two; ``paged``: a page is; ``part``: only part of the latent
    is normed.
    """

    q: bool
    kv: bool
    freqs: bool
    full: bool
    paged: bool
    part: bool = False


def _unused(spec: MlaSpec, config: MlaConfig, known: Known) -> list[str]:
    """The numbers that the kernel does not read."""
    found = ["rows.rope", "rows.turned", "rows.page_size" if known.paged else "numbers.page_shift"]
    if known.full:
        found.append("rows.latent")
    if not known.part:
        found.append("rows.normed")
    if spec.freqs is None:
        found += ["rows.limit", "rows.freqs_row"]
    if spec.slots is not None:
        found += ["rows.table_width", "rows.table_row"]
    if not config.width:
        found.append("rows.requests")
    if spec.scale != "token":
        found += ["rows.scale_page", "rows.scale_entry"]
    return found


def build_for(spec: MlaSpec, config: MlaConfig, rope: int, turned: int, known: Known, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed.

    Stores are not given more alignment than loads: a wider store of fp8 would first move columns
    between threads.
    """
    rotates, searches = turned > 0, config.width > 0
    tensors = MlaTensors(
        spec.q,
        spec.kv,
        spec.gamma,
        freqs=spec.freqs if rotates else None,
        offsets=spec.offsets if searches else None,
        lengths=spec.lengths if searches else None,
        table=spec.table if spec.slots is None else None,
        slots=spec.slots,
        positions=spec.positions if rotates else None,
        kv_scale=torch.float32 if spec.scale == "tensor" else None,
        q_out=spec.q_out,
        blocks=spec.cache,
        token_scale=torch.float32 if spec.scale == "token" else None,
    )
    dtypes = {f"tensors.{name}": dtype for name, dtype in tensors._asdict().items()}
    half = spec.style == "half"
    pairs = power_of_two(turned if half else rope) // 2
    constants = {
        "MATH": MlaMath(
            rope,
            turned,
            half=rotates and half,
            reference=spec.rounding == "reference",
            scale=spec.scale,
            group=COLUMNS_PER_SCALE,
            paged=known.paged,
            full=known.full,
            part=known.part,
            packed=known.freqs,
            split=turned > 2 and pairs >= config.warps * chip.warp_size,
            hw_rounding=chip.rounds_casts,
            pdl=chip.has_pdl,
        ),
        "TILE": config._replace(width=max(1, config.width), early=0, registers=0),
        "CACHE": quant(FP8_FORMATS.get(spec.cache), chip),
        "K_OUT": quant(None if spec.scale == "tile" else FP8_FORMATS.get(spec.cache), chip),
        "Q_OUT": quant(FP8_FORMATS.get(spec.q_out), chip),
    }
    divisible: dict[str, int] = {"rows.latent": 16} if known.kv and not known.full else {}
    for aligned, loaded, strides in (
        (known.q, spec.q, {"q": ("q_token", "q_head"), "q_out": ("out_token", "out_head")}),
        (known.kv, spec.kv, {"kv": ("kv_token",), "gamma": (), "blocks": ("block_page", "block_entry")}),
        (known.freqs, spec.freqs, {"freqs": ("freqs_row",)}),
    ):
        for name, steps in strides.items():
            dtype = getattr(tensors, name)
            if aligned and loaded is not None and dtype is not None:
                vec = 16 // max(loaded.itemsize, dtype.itemsize)
                divisible[f"tensors.{name}"] = vec * dtype.itemsize
                divisible |= dict.fromkeys((f"rows.{step}" for step in steps), vec)
    unused = dict.fromkeys(_unused(spec, config, known), 0)
    name, registers = _describe(spec, config, rope, turned, known), config.registers
    return FAMILY.make_build(
        name, _mla_rope_norm_kernel, chip, dtypes, constants, unused, divisible, config.warps, registers
    )


def _describe(spec: MlaSpec, config: MlaConfig, rope: int, turned: int, known: Known) -> str:
    """A readable name for one configuration; equal names mean equal builds (for one chip)."""
    short = SHORT_NAMES
    parts = ["mla", f"q={short[spec.q]}>{short[spec.q_out]}", f"kv={short[spec.kv]}>{short[spec.cache]}"]
    parts.append(f"gamma={short[spec.gamma]}")
    if spec.rounding != "once":
        parts.append(spec.rounding)
    if spec.scale != "none":
        parts.append(f"scale={spec.scale}")
    if turned and spec.freqs is not None:
        at = f"@{short[spec.positions]}" if spec.positions is not None else ""
        parts.append(f"rope={spec.style}:{turned}/{rope}:{short[spec.freqs]}{at}")
    else:
        parts.append(f"rope=none/{rope}")
    if spec.slots is not None:
        parts.append(f"slots={short[spec.slots]}")
    elif spec.table is not None:
        parts.append(f"table={short[spec.table]}")
    if config.width and spec.offsets is not None and spec.lengths is not None:
        parts.append(f"of={short[spec.offsets]}+{short[spec.lengths]}:{config.width}^{config.levels}")
    parts.append("page=2^n" if known.paged else "page=n")
    masked = "m" if config.guard else ""
    parts.append(f"{config.q_tokens}x{config.heads}*{config.pieces}{masked}v{'nf'[known.freqs]}{'nq'[known.q]}")
    latent = f"{config.block}{'' if known.full else 'm'}{'p' * known.part}"
    parts.append(f"{config.kv_tokens}x{latent}v{'nk'[known.kv]}/{config.warps}w")
    if config.registers:
        parts.append(f"registers={config.registers}")
    return " ".join(parts)


def _known(call: MlaCall) -> Known:
    """Determined by sizes and addresses. The stride of a dimension of size 1 does not matter."""
    spec, rows, freqs = call.spec, call.rows, call.freqs
    angles = spec.freqs or torch.float32
    tokens, heads = rows.tokens > 1, rows.heads > 1
    q_steps = (tokens and rows.q_token) | (heads and rows.q_head)
    out_steps = (tokens and rows.out_token) | (heads and rows.out_head)
    q = call.q.data_ptr() | call.q_out.data_ptr() | q_steps * spec.q.itemsize | out_steps * spec.q_out.itemsize
    steps = (tokens and rows.kv_token) * spec.kv.itemsize | (rows.block_page | rows.block_entry) * spec.cache.itemsize
    kv = call.kv.data_ptr() | call.gamma.data_ptr() | call.blocks.data_ptr() | steps
    return Known(
        q % 16 == 0,
        kv % 16 == 0 and rows.latent % 16 == 0,
        freqs is not None and (freqs.data_ptr() | rows.freqs_row * angles.itemsize) % 16 == 0,
        rows.latent >= 8 and rows.latent & (rows.latent - 1) == 0,
        rows.page_size & (rows.page_size - 1) == 0,
        rows.normed < rows.latent,
    )


class _Forced:
    """The cut of an open `cut_as`, if any."""

    cut: MlaCut | None = None


@contextmanager
def cut_as(cut: MlaCut) -> Iterator[None]:
    """For experiments: use ``cut`` for every launch of this process while the context is open;
    results do not change.

    ``threads`` is the size of a block, 32 to 1024; a block of RoPE has ``q_columns`` columns of q,
    and a block of the norm ``kv_columns`` of latents. All are powers of two. A cut is adjusted to
    fit short calls and long latents.
    """
    for name, value, least, most in (
        ("threads", cut.threads, 32, 1024),
        ("q_columns", cut.q_columns, 1, 1 << 16),
        ("kv_columns", cut.kv_columns, 1, 1 << 16),
    ):
        if not (isinstance(value, int) and least <= value <= most and value & (value - 1) == 0):
            raise ContractError(f"cut_as: `{name}` must be a power of two from {least} to {most}, got {value!r}")
    before, replays = _Forced.cut, replay.switch.on
    _Forced.cut, replay.switch.on = cut, False
    try:
        yield
    finally:
        _Forced.cut, replay.switch.on = before, replays


class MlaFacts(NamedTuple):
    """What selects the machine code, besides the spec; tokens and requests are powers of two."""

    tokens: int
    heads: int
    latent: int
    rope: int
    turned: int
    requests: int
    known: Known
    cut: MlaCut | None


def _facts(call: MlaCall, chip: Chip) -> MlaFacts:
    tokens, heads, latent, rope, turned, requests = call.rows[:6]
    tokens, requests = 1 << (tokens - 1).bit_length(), 1 << ((requests or 2) - 1).bit_length()  # none: masked
    return MlaFacts(tokens, heads, latent, rope, turned, requests, _known(call), _Forced.cut)


def config_of(spec: MlaSpec, facts: MlaFacts, chip: Chip) -> MlaConfig:
    """The programs of a call."""
    tokens, heads, latent, rope, turned, requests, _, cut = facts
    searches = spec.slots is None or (turned > 0 and spec.positions is None)
    cut = cut or mla_cut(tokens, heads, rope, chip)
    config = mla_config(cut, tokens, heads, latent, rope, requests if searches else 0, chip)
    if spec.scale == "tile":  # the kernel writes one packed entry
        config = config._replace(kv_tokens=1)
    return config


def _grid(call: MlaCall, config: MlaConfig) -> tuple[int, int]:
    """The number of programs, in total and for kv."""
    rows = call.rows
    kv = -(-rows.tokens // config.kv_tokens)
    programs = kv + (-(-rows.tokens // config.q_tokens) * config.pieces if rows.rope else 0)
    if max(rows.tokens, programs) > MAX_PROGRAMS:
        raise Unsupported(
            f"fused_rope_rmsnorm_quantization: at most 2**31 - 2**13 programs on a GPU, got {rows.tokens} tokens"
        )
    return programs, kv


FAMILY: Final = Family(
    MlaCall,
    TABLE,
    _facts,
    config_of,
    lambda spec, facts, config, chip: build_for(spec, config, facts.rope, facts.turned, facts.known, chip),
    _grid,
    device="q",
)
launch, builds = FAMILY.launch, FAMILY.builds
