"""Launches the kernel of MLA's cache write: chooses the tiles, names the machine code it needs, passes the arguments."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..errors import ContractError, Unsupported
from ..fastpath import replay
from ..formats import FP8_FORMATS
from ..specs.mla_cache import MlaCall, MlaRows, MlaSpec
from .compiler import POINTERS, Build, current_chip, load
from .config import INTERPRETER, Chip
from .mla_cache_config import MlaConfig, MlaCut, mla_config, mla_cut, power_of_two
from .mla_cache_kernels import _mla_rope_norm_kernel

__all__ = ["MlaCut", "build_for", "builds", "config_of", "cut_as", "launch"]

_NAMES: Final[tuple[str, ...]] = tuple(_mla_rope_norm_kernel.arg_names)
TENSORS: Final = (
    "q", "kv", "gamma", "freqs", "offsets", "lengths", "table", "slots", "positions", "kv_scale", "q_out", "blocks", "token_scale"
)  # fmt: skip
_SIZES: Final = MlaRows._fields[:11]
_STRIDES: Final = MlaRows._fields[11:]
_CONSTANTS: Final = _NAMES[len(TENSORS) + len(MlaRows._fields) + 5 :]
"""The kernel takes the tensors, `MlaRows`, three integers, two floats and then these."""
MAX_PROGRAMS: Final = 2**31 - 2**13
"""Token numbers are 32-bit, those of a tile's tokens beyond the last one too."""
_SHORT: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint32: "u32",
}


class Known(NamedTuple):
    """What is known of addresses and sizes: rows of q, of kv and the cache, and of freqs lie on 16 bytes.

    ``full``: the latent is a power of two; ``paged``: a page is; ``part``: not all of the latent is normed.
    """

    q: bool
    kv: bool
    freqs: bool
    full: bool
    paged: bool
    part: bool = False


def _dtypes(spec: MlaSpec) -> dict[str, torch.dtype | None]:
    return {
        "q": spec.q,
        "kv": spec.kv,
        "gamma": spec.gamma,
        "freqs": spec.freqs,
        "offsets": spec.offsets,
        "lengths": spec.lengths,
        "table": spec.table,
        "slots": spec.slots,
        "positions": spec.positions,
        "kv_scale": torch.float32 if spec.scale == "tensor" else None,
        "q_out": spec.q_out,
        "blocks": spec.cache,
        "token_scale": torch.float32 if spec.scale == "token" else None,
    }


def _unused(spec: MlaSpec, config: MlaConfig, known: Known) -> set[str]:
    """The integers that the kernel does not look at."""
    found = {"rope", "turned", "page_size" if known.paged else "page_shift"}
    if known.full:
        found.add("latent")
    if not known.part:
        found.add("normed")
    if spec.freqs is None:
        found |= {"limit", "freqs_row"}
    if spec.slots is not None:
        found |= {"table_width", "table_row"}
    if not config.width:
        found.add("requests")
    if spec.scale != "token":
        found |= {"scale_page", "scale_entry"}
    return found


def build_for(spec: MlaSpec, config: MlaConfig, rope: int, turned: int, known: Known, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed.

    Stores are told of no more columns at a time than loads have: a wider store of fp8 would move them between threads first.
    """
    fp8 = {name: f.name if (f := FP8_FORMATS.get(dtype)) else "" for name, dtype in _dtypes(spec).items() if dtype}
    dtypes = {name: None if _idle(spec, config, name, turned) else dtype for name, dtype in _dtypes(spec).items()}
    pairs = power_of_two(turned if spec.style == "half" else rope) // 2
    values: dict[str, Any] = {
        "ROPE": rope,
        "TURNED": turned,
        "HALF": turned > 0 and spec.style == "half",
        "REFERENCE": spec.rounding == "reference",
        "SCALE": spec.scale,
        "FP8": fp8["blocks"],
        "FP8_Q": fp8["q_out"],
        "HARDWARE": chip.casts_e4m3fn,
        "EXACT": chip.backend != "interpreter",
        "PAGE_POWER": known.paged,
        "WIDTH": max(1, config.width),
        "LEVELS": config.levels,
        "KV_TOKENS": config.kv_tokens,
        "BLOCK": config.block,
        "FULL": known.full,
        "PART": known.part,
        "Q_TOKENS": config.q_tokens,
        "HEADS": config.heads,
        "PIECES": config.pieces,
        "GUARD": config.guard,
        "PDL": chip.has_pdl,
        "PACKED": known.freqs,
        "SPLIT": turned > 2 and pairs >= config.warps * chip.warp_size,
    }
    constants: dict[str, Any] = {name: None for name, dtype in dtypes.items() if dtype is None}
    constants |= dict.fromkeys(sorted(_unused(spec, config, known)), 0)
    constants |= {name: values[name] for name in _CONSTANTS}
    signature = {name: POINTERS[dtype] for name, dtype in dtypes.items() if dtype is not None}
    signature |= dict.fromkeys((*_SIZES, "kv_programs", "page_shift", "early"), "i32") | dict.fromkeys(_STRIDES, "i64")
    signature |= {"eps": "fp32", "weight_offset": "fp32"}
    divisible: dict[str, int] = {}
    for aligned, loaded, strides in (
        (known.q, spec.q, {"q": ("q_token", "q_head"), "q_out": ("out_token", "out_head")}),
        (known.kv, spec.kv, {"kv": ("kv_token",), "gamma": (), "blocks": ("block_page", "block_entry")}),
        (known.freqs, spec.freqs, {"freqs": ("freqs_row",)}),
    ):
        for name, steps in strides.items():
            dtype = dtypes[name]
            if aligned and loaded is not None and dtype is not None:
                vec = 16 // max(loaded.itemsize, dtype.itemsize)
                divisible |= {name: vec * dtype.itemsize} | dict.fromkeys(steps, vec)
    if known.kv and not known.full:
        divisible["latent"] = 16
    return Build(
        _describe(spec, config, rope, turned, known), _mla_rope_norm_kernel,
        tuple((name, "constexpr" if name in constants else signature[name]) for name in _NAMES),
        tuple(constants.items()), tuple(divisible.items()), config.warps, chip.has_pdl, config.registers, contracts=False,
    )  # fmt: skip


def _idle(spec: MlaSpec, config: MlaConfig, name: str, turned: int) -> bool:
    """Whether the kernel does not look at a tensor that the call has."""
    if name in ("offsets", "lengths"):
        return not config.width
    return (name == "table" and spec.slots is not None) or (name in ("freqs", "positions") and not turned)


def _describe(spec: MlaSpec, config: MlaConfig, rope: int, turned: int, known: Known) -> str:
    """A readable name for one configuration; equal names mean equal builds (for one chip)."""
    parts = ["mla", f"q={_SHORT[spec.q]}>{_SHORT[spec.q_out]}", f"kv={_SHORT[spec.kv]}>{_SHORT[spec.cache]}"]
    parts.append(f"gamma={_SHORT[spec.gamma]}")
    if spec.rounding != "once":
        parts.append(spec.rounding)
    if spec.scale != "none":
        parts.append(f"scale={spec.scale}")
    if turned and spec.freqs is not None:
        at = f"@{_SHORT[spec.positions]}" if spec.positions is not None else ""
        parts.append(f"rope={spec.style}:{turned}/{rope}:{_SHORT[spec.freqs]}{at}")
    else:
        parts.append(f"rope=none/{rope}")
    if spec.slots is not None:
        parts.append(f"slots={_SHORT[spec.slots]}")
    elif spec.table is not None:
        parts.append(f"table={_SHORT[spec.table]}")
    if config.width and spec.offsets is not None and spec.lengths is not None:
        parts.append(f"of={_SHORT[spec.offsets]}+{_SHORT[spec.lengths]}:{config.width}^{config.levels}")
    parts.append("page=2^n" if known.paged else "page=n")
    masked = "m" if config.guard else ""
    parts.append(f"{config.q_tokens}x{config.heads}*{config.pieces}{masked}v{'nf'[known.freqs]}{'nq'[known.q]}")
    parts.append(
        f"{config.kv_tokens}x{config.block}{'' if known.full else 'm'}{'p' * known.part}v{'nk'[known.kv]}/{config.warps}w"
    )
    if config.registers:
        parts.append(f"registers={config.registers}")
    return " ".join(parts)


def _known(spec: MlaSpec, rows: MlaRows, q: int, q_out: int, kv: int, gamma: int, blocks: int, freqs: int) -> Known:
    """From the addresses. A stride that leads nowhere does not count."""
    tokens, heads = rows.tokens > 1, rows.heads > 1
    q_steps = (tokens and rows.q_token) | (heads and rows.q_head)
    out_steps = (tokens and rows.out_token) | (heads and rows.out_head)
    block_steps = (rows.block_page | rows.block_entry) * spec.cache.itemsize
    places = kv | gamma | blocks | (tokens and rows.kv_token) * spec.kv.itemsize | block_steps
    return Known(
        (q | q_out | q_steps * spec.q.itemsize | out_steps * spec.q_out.itemsize) % 16 == 0,
        places % 16 == 0 and rows.latent % 16 == 0,
        spec.freqs is not None and (freqs | rows.freqs_row * spec.freqs.itemsize) % 16 == 0,
        rows.latent >= 8 and rows.latent & (rows.latent - 1) == 0,
        rows.page_size & (rows.page_size - 1) == 0,
        rows.normed < rows.latent,
    )


class _Forced:
    """The cut of `cut_as`, while there is one."""

    cut: MlaCut | None = None


@contextmanager
def cut_as(cut: MlaCut) -> Iterator[None]:
    """For experiments: cut every launch of this process like ``cut`` while the context is open; no bit of a result changes.

    ``threads`` is the size of a block, 32 to 1024; a block of RoPE has ``q_columns`` columns of q, and a block of the norm
    ``kv_columns`` of latents. All are powers of two. Short calls and long latents bend a cut to what fits them.
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


def config_of(spec: MlaSpec, rows: MlaRows, warp_size: int, cut: MlaCut | None = None) -> MlaConfig:
    """The programs of a call; of tokens and requests only their next powers of two count."""
    tokens, heads, latent, rope, turned, requests = rows[:6]
    searches = spec.slots is None or (turned > 0 and spec.positions is None)
    tokens = power_of_two(tokens)
    cut = cut or _Forced.cut or mla_cut(tokens, heads, rope)
    requests = (power_of_two(requests) if requests else 2) if searches else 0  # none: any width that is masked
    return mla_config(cut, tokens, heads, latent, rope, requests, warp_size)


def builds(chip: Chip, call: MlaCall) -> list[Build]:
    """What `launch` would run on ``chip``, given the same arguments."""
    spec, rows, freqs = call.spec, call.rows, call.freqs
    q_at, out_at, kv_at, gamma_at, blocks_at = [
        t.data_ptr() for t in (call.q, call.q_out, call.kv, call.gamma, call.blocks)
    ]
    known = _known(spec, rows, q_at, out_at, kv_at, gamma_at, blocks_at, 0 if freqs is None else freqs.data_ptr())
    return [build_for(spec, config_of(spec, rows, chip.warp_size), rows.rope, rows.turned, known, chip)]


class _Plan(NamedTuple):
    """A loaded kernel, how its programs are counted, and the constants at the end of its arguments."""

    config: MlaConfig
    launcher: Any
    constants: tuple[Any, ...]


_plans: dict[tuple[Any, ...], _Plan] = {}
_chips: dict[int, Chip] = {}


def _plan(key: tuple[Any, ...], spec: MlaSpec, rows: MlaRows, known: Known, device: int) -> _Plan:
    if device not in _chips:
        _chips[device] = current_chip(device)
    chip = _chips[device]
    config = config_of(spec, rows, chip.warp_size)
    build = build_for(spec, config, rows.rope, rows.turned, known, chip)
    constants = dict(build.constants)
    plan = _plans[key] = _Plan(config, load(build, device), tuple(constants[name] for name in _CONSTANTS))
    return plan


def _grid(config: MlaConfig, rows: MlaRows) -> tuple[int, int]:
    """Programs of kv, and all."""
    kv = -(-rows.tokens // config.kv_tokens)
    programs = kv + (-(-rows.tokens // config.q_tokens) * config.pieces if rows.rope else 0)
    if max(rows.tokens, programs) > MAX_PROGRAMS:
        raise Unsupported(
            f"fused_rope_rmsnorm_quantization: at most 2**31 - 2**13 programs on a GPU, got {rows.tokens} tokens"
        )
    return kv, programs


def launch(call: MlaCall) -> None:
    """Run the kernel of ``spec`` on the current stream; every argument has been checked."""
    spec, rows, eps, weight_offset = call.spec, call.rows, call.eps, call.weight_offset
    tensors = call[1:14]
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    known = _known(spec, rows, pointers[0], pointers[10], pointers[1], pointers[2], pointers[11], pointers[3])
    device = call.q.get_device()
    shift = rows.page_size.bit_length() - 1
    if device < 0:
        _interpret(spec, rows, known, tensors, shift, eps, weight_offset)
        return
    sizes = ((rows.tokens - 1).bit_length(), rows[1:5], power_of_two(rows.requests or 2))
    key = (spec, sizes, known, device, _Forced.cut)
    plan = _plans.get(key) or _plan(key, spec, rows, known, device)
    kv_programs, programs = _grid(plan.config, rows)
    plan.launcher(
        programs, (*pointers, *rows, kv_programs, shift, plan.config.early, eps, weight_offset, *plan.constants)
    )


def _interpret(
    spec: MlaSpec,
    rows: MlaRows,
    known: Known,
    tensors: Sequence[Tensor | None],
    shift: int,
    eps: float,
    weight_offset: float,
) -> None:
    """The same call in Triton's interpreter, on CPU tensors."""
    config = config_of(spec, rows, INTERPRETER.warp_size)
    build = build_for(spec, config, rows.rope, rows.turned, known, INTERPRETER)
    kv_programs, programs = _grid(config, rows)
    viewed = [t.view(torch.uint8) if t is not None and t.element_size() == 1 else t for t in tensors]
    values = dict(zip(_NAMES, (*viewed, *rows, kv_programs, shift, config.early, eps, weight_offset), strict=False))
    values |= dict(build.constants)
    build.kernel[(programs,)](**values)
