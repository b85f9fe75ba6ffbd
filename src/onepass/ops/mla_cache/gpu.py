"""The MLA cache-write kernel: its parameters, programs, alignment and names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Final, NamedTuple

import torch

from ...core import recording
from ...errors import ContractError, Unsupported
from ...formats import FP8_FORMATS
from ...gpu.chip import Chip
from ...gpu.compile import Build
from ...gpu.launch import F32, I32, SHORT_NAMES, GpuKernels, Sizes, make_build
from ...gpu.lib.numbers import quant
from ..qk_cache.gpu_tile import power_of_two
from .gpu_kernel import _mla_rope_norm_kernel
from .gpu_tile import MlaConfig, MlaCut, mla_config, mla_cut
from .launch import TILE as COLUMNS_PER_SCALE
from .launch import MlaCall, MlaRows, MlaSpec, MlaTensors

__all__ = ["MlaCut", "build_for", "builds", "config_of", "cut_as", "launch"]

MAX_PROGRAMS: Final = 2**31 - 2**13
"""Token numbers are 32-bit, including those of a tile's tokens beyond the last one."""


class MlaNumbers(NamedTuple):
    """Programs of kv, log2 of the page size, programs for an early start, and two floats."""

    kv_programs: I32
    page_shift: I32
    early: I32
    eps: F32
    weight_offset: F32


class MlaParameters(NamedTuple):
    """The parameters of the kernel."""

    tensors: MlaTensors
    rows: Annotated[MlaRows, Sizes(11)]
    numbers: MlaNumbers


def pack(call: MlaCall, config: MlaConfig, programs: tuple[int, ...]) -> MlaParameters:
    """The parameters of a call."""
    page_shift = call.rows.page_size.bit_length() - 1
    numbers = MlaNumbers(programs[1], page_shift, config.early, call.eps, call.weight_offset)
    return MlaParameters(call.tensors, call.rows, numbers)


class MlaMath(NamedTuple):
    """What a kernel computes. ``turned`` of ``rope`` columns rotate; ``half``: pairs are half of these
    apart. ``group`` columns share a scale of kind "tile". `Known` documents the rest.
    """

    rope: int
    turned: int
    half: bool
    reference: bool
    scale: str
    group: int
    paged: bool
    full: bool
    part: bool
    packed: bool
    split: bool
    hw_rounding: bool
    pdl: bool


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
    names = ["rows.rope", "rows.turned", "rows.page_size" if known.paged else "numbers.page_shift"]
    if known.full:
        names.append("rows.latent")
    if not known.part:
        names.append("rows.normed")
    if spec.freqs is None:
        names += ["rows.limit", "rows.freqs_row"]
    if spec.slots is not None:
        names += ["rows.table_width", "rows.table_row"]
    if not config.width:
        names.append("rows.requests")
    if spec.scale != "token":
        names += ["rows.scale_page", "rows.scale_entry"]
    return names


def build_for(spec: MlaSpec, config: MlaConfig, rope: int, turned: int, known: Known, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed."""
    dtypes = _dtypes(spec, config, turned)
    return make_build(
        MlaParameters,
        _describe(spec, config, rope, turned, known),
        _mla_rope_norm_kernel,
        chip,
        dtypes={f"tensors.{name}": dtype for name, dtype in dtypes.items()},
        constants=_constants(spec, config, rope, turned, known, chip),
        unused=dict.fromkeys(_unused(spec, config, known), 0),
        divisible=_divisible(spec, dtypes, known),
        warps=config.warps,
    )


def _dtypes(spec: MlaSpec, config: MlaConfig, turned: int) -> dict[str, torch.dtype | None]:
    """The dtypes of a kernel's tensors; None for those that it does not have."""
    rotates, searches = turned > 0, config.width > 0
    return {
        "q": spec.q,
        "kv": spec.kv,
        "gamma": spec.gamma,
        "freqs": spec.freqs if rotates else None,
        "offsets": spec.offsets if searches else None,
        "lengths": spec.lengths if searches else None,
        "table": spec.table if spec.slots is None else None,
        "slots": spec.slots,
        "positions": spec.positions if rotates else None,
        "kv_scale": torch.float32 if spec.scale == "tensor" else None,
        "q_out": spec.q_out,
        "blocks": spec.cache,
        "token_scale": torch.float32 if spec.scale == "token" else None,
    }


def _constants(spec: MlaSpec, config: MlaConfig, rope: int, turned: int, known: Known, chip: Chip) -> dict[str, object]:
    """The constants of a kernel."""
    half = spec.style == "half"
    pairs = power_of_two(turned if half else rope) // 2
    return {
        "MATH": MlaMath(
            rope,
            turned,
            half=turned > 0 and half,
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
        "TILE": config._replace(width=max(1, config.width), early=0),
        "CACHE": quant(FP8_FORMATS.get(spec.cache), chip),
        "K_OUT": quant(None if spec.scale == "tile" else FP8_FORMATS.get(spec.cache), chip),
        "Q_OUT": quant(FP8_FORMATS.get(spec.q_out), chip),
    }


def _divisible(spec: MlaSpec, dtypes: Mapping[str, torch.dtype | None], known: Known) -> dict[str, int]:
    """Alignment of addresses in bytes and of strides in elements.

    Stores are not given more than loads: a wider store of fp8 would first move columns between threads.
    """
    divisible: dict[str, int] = {"rows.latent": 16} if known.kv and not known.full else {}
    for aligned, loaded, strides in (
        (known.q, spec.q, {"q": ("q_token", "q_head"), "q_out": ("out_token", "out_head")}),
        (known.kv, spec.kv, {"kv": ("kv_token",), "gamma": (), "blocks": ("block_page", "block_entry")}),
        (known.freqs, spec.freqs, {"freqs": ("freqs_row",)}),
    ):
        for name, steps in strides.items():
            dtype = dtypes[name]
            if aligned and loaded is not None and dtype is not None:
                vec = 16 // max(loaded.itemsize, dtype.itemsize)
                divisible[f"tensors.{name}"] = vec * dtype.itemsize
                divisible |= dict.fromkeys((f"rows.{step}" for step in steps), vec)
    return divisible


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
    return " ".join(parts)


def _known(call: MlaCall) -> Known:
    """Determined by sizes and addresses. The stride of a dimension of size 1 does not matter."""
    spec, rows, t = call.spec, call.rows, call.tensors
    angles = spec.freqs or torch.float32
    tokens, heads = rows.tokens > 1, rows.heads > 1
    q_steps = (tokens and rows.q_token) | (heads and rows.q_head)
    out_steps = (tokens and rows.out_token) | (heads and rows.out_head)
    q = t.q.data_ptr() | t.q_out.data_ptr() | q_steps * spec.q.itemsize | out_steps * spec.q_out.itemsize
    steps = (tokens and rows.kv_token) * spec.kv.itemsize | (rows.block_page | rows.block_entry) * spec.cache.itemsize
    kv = t.kv.data_ptr() | t.gamma.data_ptr() | t.blocks.data_ptr() | steps
    return Known(
        q % 16 == 0,
        kv % 16 == 0 and rows.latent % 16 == 0,
        t.freqs is not None and (t.freqs.data_ptr() | rows.freqs_row * angles.itemsize) % 16 == 0,
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
    before, replays = _Forced.cut, recording.switch.on
    _Forced.cut, recording.switch.on = cut, False
    try:
        yield
    finally:
        _Forced.cut, recording.switch.on = before, replays


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


KERNELS: Final[GpuKernels[MlaSpec, MlaCall, MlaFacts, MlaConfig]] = GpuKernels(
    MlaParameters,
    _facts,
    config_of,
    lambda spec, facts, config, chip: build_for(spec, config, facts.rope, facts.turned, facts.known, chip),
    _grid,
    pack,
)
launch, builds = KERNELS.launch, KERNELS.builds
