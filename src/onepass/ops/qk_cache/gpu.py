"""The cache-write kernel of q, k and v: its parameters, programs, alignment and names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Final, NamedTuple

import torch
from torch import Tensor

from ...core import recording
from ...errors import ContractError, Unsupported
from ...formats import FP8_FORMATS
from ...gpu.chip import Chip
from ...gpu.compile import Build
from ...gpu.launch import F32, I32, SHORT_NAMES, GpuKernels, Pointer, Sizes, make_build
from ...gpu.lib.numbers import quant
from .gpu_kernel import _qk_cache_kernel
from .gpu_tile import QkCacheConfig, Side, columns_for, qk_cache_config
from .launch import Axes, QkCacheCall, QkCacheRows, QkCacheSpec, Scaling

MAX_PROGRAMS: Final = 2**31 - 2**13
"""Programs are numbered in 32 bits."""


class QkCacheTensors(NamedTuple):
    """The tensors of a call."""

    q: Pointer
    k: Pointer
    v: Pointer
    gamma_q: Pointer
    gamma_k: Pointer
    freqs: Pointer
    positions: Pointer
    cos: Pointer
    sin: Pointer
    slots: Pointer
    starts: Pointer
    k_scale: Pointer
    v_scale: Pointer
    q_out: Pointer
    k_out: Pointer
    k_cache: Pointer
    v_cache: Pointer
    k_scale_out: Pointer
    v_scale_out: Pointer


class QkCacheNumbers(NamedTuple):
    """log2 of the page size, programs for an early start, and two floats."""

    page_shift: I32
    early: I32
    eps: F32
    weight_offset: F32


class QkCacheParameters(NamedTuple):
    """The parameters of the kernel."""

    tensors: QkCacheTensors
    rows: Annotated[QkCacheRows, Sizes(11)]
    numbers: QkCacheNumbers


def pack(call: QkCacheCall, config: QkCacheConfig, programs: tuple[int, ...]) -> QkCacheParameters:
    """The parameters of a call."""
    tensors = QkCacheTensors(
        q=call.q,
        k=call.k,
        v=call.v,
        gamma_q=call.gamma_q,
        gamma_k=call.gamma_k,
        freqs=call.freqs,
        positions=call.positions,
        cos=call.cos,
        sin=call.sin,
        slots=call.slots,
        starts=call.starts,
        k_scale=call.k_scale,
        v_scale=call.v_scale,
        q_out=call.q_out,
        k_out=call.k_out,
        k_cache=call.k_cache,
        v_cache=call.v_cache,
        k_scale_out=call.k_scale_out,
        v_scale_out=call.v_scale_out,
    )
    page_shift = call.rows.entries.bit_length() - 1
    numbers = QkCacheNumbers(page_shift, config.early, call.eps, call.weight_offset)
    return QkCacheParameters(tensors, call.rows, numbers)


class QkCacheMath(NamedTuple):
    """What a kernel computes for heads of ``rope`` columns, of which ``turned`` rotate; ``half``: pairs are half of these
    apart.

    ``packed``: a table's rows allow loads of pairs. ``hf``: the norm rounds twice; ``stepwise``: the rotation rounds every
    step. ``paged``: the page size is a power of two. ``indexed``: a token's sequence and its index there are needed.
    ``axes``: which pairs turn by which of three positions. ``k_scale``, ``v_scale``: see `Scaling`.
    """

    rope: int
    turned: int
    half: bool
    packed: bool
    reference: bool
    norm: str
    hf: bool
    stepwise: bool
    pair: bool
    placing: str
    paged: bool
    indexed: bool
    levels: int
    hw_rounding: bool
    pdl: bool
    axes: Axes | None
    k_scale: Scaling
    v_scale: Scaling


class Known(NamedTuple):
    """What is known about addresses and sizes: whether rows of q, of k, of v, and of the angles are 16-byte aligned.

    ``paged``: the page size is a power of two; ``single``: sequences have one token; ``folded``: one stride per tensor
    reaches every token.
    """

    q: bool
    k: bool
    v: bool
    angles: bool
    paged: bool
    single: bool
    folded: bool


class QkCacheFacts(NamedTuple):
    """What selects the machine code of a call, besides its spec."""

    columns: int
    q_heads: int
    k_heads: int
    head: int
    value: int
    known: Known


def _unused(spec: QkCacheSpec, known: Known, indexed: bool) -> dict[str, float | None]:
    """The numbers that the kernel does not read, and the value that they have for it."""
    names = ["tokens", "head", "value", "folded"]
    if known.folded:
        names += [name for name in QkCacheRows._fields if name.endswith("_outer")]
    turn = spec.turn
    if turn is None or turn.pair:
        names += ["limit", "freqs_row"]
    if turn is None or not turn.pair:
        names += ["cos_outer", "cos_token", "sin_outer", "sin_token"]
    if turn is None or turn.positions is None:
        names += ["positions_outer", "positions_token"]
    if turn is None or turn.axes is None:
        names.append("positions_axis")
    if spec.placing == "none":
        names += ["k_page", "k_entry", "k_step", "entries"]
    else:
        names += ["k_out_outer", "k_out_token", "k_out_head"]
    if not spec.values:
        names += ["v_page", "v_entry", "v_step", "v_outer", "v_token", "v_head"]
    for of, scale in (("k", spec.k_scale), ("v", spec.v_scale)):
        if scale != "own":
            names += [f"{of}_scale_page", f"{of}_scale_entry"]
        if scale not in ("head", "own"):
            names.append(f"{of}_scale_step")
    if spec.placing != "slots":
        names += ["pages", "slots_outer", "slots_token"]
    if spec.placing == "slots" and known.paged:
        names.append("entries")
    if spec.placing != "dense":
        names.append("first")
    if spec.starts is None:
        names.append("start_step")
    unused: dict[str, float | None] = {f"rows.{name}": 0 for name in names}
    if spec.placing != "slots" or not known.paged:
        unused["numbers.page_shift"] = 0
    if spec.norm == "none":
        unused["numbers.weight_offset"] = 0.0
        if not spec.norm_v:
            unused["numbers.eps"] = 0.0
    if not indexed or known.single:
        unused["rows.sequence"] = 1
    return unused


def build_for(spec: QkCacheSpec, facts: QkCacheFacts, config: QkCacheConfig, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed."""
    turn, known, dtypes = spec.turn, facts.known, _dtypes(spec)
    by_index = turn is not None and not turn.pair and turn.positions is None
    indexed = not known.folded or spec.placing == "dense" or by_index
    return make_build(
        QkCacheParameters,
        _describe(spec, facts, config),
        _qk_cache_kernel,
        chip,
        dtypes={f"tensors.{name}": dtype for name, dtype in dtypes.items()},
        constants=_constants(spec, facts, config, indexed, chip),
        unused=_unused(spec, known, indexed),
        divisible=_divisible(spec, dtypes, known),
        warps=config.warps,
    )


def _dtypes(spec: QkCacheSpec) -> dict[str, torch.dtype | None]:
    """The dtypes of a kernel's tensors; None for those that it does not have."""
    turn, cached = spec.turn, spec.placing != "none"
    pair = turn is not None and turn.pair
    table = None if turn is None or pair else turn.angles

    def scale(scaling: Scaling, *kinds: Scaling) -> torch.dtype | None:
        return torch.float32 if scaling in kinds else None

    return {
        "q": spec.x,
        "k": spec.x,
        "v": spec.x if spec.values else None,
        "gamma_q": spec.gamma_q,
        "gamma_k": spec.gamma_k,
        "freqs": table,
        "positions": None if turn is None else turn.positions,
        "cos": turn.angles if turn is not None and pair else None,
        "sin": turn.angles if turn is not None and pair else None,
        "slots": spec.slots,
        "starts": spec.starts,
        "k_scale": scale(spec.k_scale, "tensor", "head"),
        "v_scale": scale(spec.v_scale, "tensor", "head"),
        "q_out": spec.q_out,
        "k_out": None if cached else spec.k_out,
        "k_cache": spec.k_out if cached else None,
        "v_cache": spec.k_out if spec.values else None,
        "k_scale_out": scale(spec.k_scale, "own"),
        "v_scale_out": scale(spec.v_scale, "own"),
    }


def _constants(
    spec: QkCacheSpec, facts: QkCacheFacts, config: QkCacheConfig, indexed: bool, chip: Chip
) -> dict[str, object]:
    """The constants of a kernel. ``indexed``: a token's sequence and its index there are needed."""
    turn, known = spec.turn, facts.known
    math = QkCacheMath(
        rope=facts.head,
        turned=0 if turn is None else turn.dim,
        half=turn is not None and turn.style == "half",
        packed=known.angles,
        reference=False,
        norm=spec.norm,
        hf=spec.rounding == "hf",
        stepwise=spec.rounding != "once",
        pair=turn is not None and turn.pair,
        placing=spec.placing,
        paged=known.paged,
        indexed=indexed,
        levels=1 if known.folded else 2,
        hw_rounding=chip.rounds_casts,
        pdl=chip.has_pdl,
        axes=None if turn is None else turn.axes,
        k_scale=spec.k_scale,
        v_scale=spec.v_scale,
    )
    return {
        "Q": config.q,
        "K": config.k,
        "V": config.v,
        "MATH": math,
        "VALUE": math._replace(
            rope=max(1, facts.value), turned=0, half=False, norm="head" if spec.norm_v else "none", axes=None
        ),
        "CACHE": quant(FP8_FORMATS.get(spec.k_out), chip),
        "PLAIN": quant(None, chip),
    }


def _divisible(spec: QkCacheSpec, dtypes: Mapping[str, torch.dtype | None], known: Known) -> dict[str, int]:
    """Alignment of addresses in bytes and of strides in elements. Stores are not given more than loads."""
    divisors: dict[str, int] = {}
    groups: tuple[tuple[bool, dict[str, tuple[str, ...]]], ...] = (
        (known.q, {"q": _strides("q"), "q_out": _strides("q_out"), "gamma_q": ()}),
        (
            known.k,
            {"k": _strides("k"), "k_out": _strides("k_out"), "gamma_k": (), "k_cache": ("k_page", "k_entry", "k_step")},
        ),
        (known.v, {"v": _strides("v"), "v_cache": ("v_page", "v_entry", "v_step")}),
        (
            known.angles,
            {"freqs": ("freqs_row",), "cos": ("cos_outer", "cos_token"), "sin": ("sin_outer", "sin_token")},
        ),
    )
    for aligned, group in groups:
        for name, strides in group.items():
            dtype = dtypes[name]
            if aligned and dtype is not None:
                loaded = dtype if name in ("freqs", "cos", "sin") else spec.x
                vec = 16 // max(loaded.itemsize, dtype.itemsize)
                divisors[f"tensors.{name}"] = vec * dtype.itemsize
                divisors |= dict.fromkeys((f"rows.{stride}" for stride in strides), vec)
    return divisors


def _strides(name: str) -> tuple[str, ...]:
    return f"{name}_outer", f"{name}_token", f"{name}_head"


def _describe(spec: QkCacheSpec, facts: QkCacheFacts, config: QkCacheConfig) -> str:
    """A readable name for one configuration; equal names mean equal builds (for one chip)."""
    short, known, turn = SHORT_NAMES, facts.known, spec.turn
    parts = ["qk_cache"]
    if turn is not None and turn.axes is not None:
        parts.append(f"axes={','.join(map(str, turn.axes))}")
    if spec.norm_v:
        parts.append("vnorm")
    if spec.placing != "none" and not spec.values:
        parts.append("keys")
    if {spec.k_scale, spec.v_scale} & {"head", "own"}:
        parts.append(f"scales={spec.k_scale},{spec.v_scale}")
    parts += [f"x={short[spec.x]}>{short[spec.q_out]},{short[spec.k_out]}"]
    if spec.gamma_q is not None and spec.gamma_k is not None:
        other = "" if spec.gamma_k == spec.gamma_q else f",{short[spec.gamma_k]}"
        parts.append(f"{spec.norm}={short[spec.gamma_q]}{other}")
    if spec.rounding != "once":
        parts.append(spec.rounding)
    if turn is not None:
        at = "@pair" if turn.pair else "" if turn.positions is None else f"@{short[turn.positions]}"
        parts.append(f"rope={turn.style}:{turn.dim}:{short[turn.angles]}{at}")
    if spec.placing == "slots" and spec.slots is not None:
        parts.append(f"slots={short[spec.slots]} page={'2^n' if known.paged else 'n'}")
    elif spec.placing == "dense":
        parts.append("dense" if spec.starts is None else f"dense={short[spec.starts]}")
    if "tensor" in (spec.k_scale, spec.v_scale):
        parts.append(f"scale={'k' * (spec.k_scale == 'tensor')}{'v' * (spec.v_scale == 'tensor')}")
    values = f"+{facts.value}" if facts.value else ""
    aligned = "".join(name for name, here in zip("qkva", known[:4], strict=True) if here)
    parts.append(f"{facts.head}{values}v{aligned or 'n'}")
    parts.append(f"{_tile(config.q)}+{_tile(config.k)}+{_tile(config.v)}/{config.warps}w")
    if not known.folded:
        parts.append("levels=2")
    if known.single:
        parts.append("single")
    return " ".join(parts)


def _tile(side: Side) -> str:
    row = "" if side.exact else f"r{side.row}"
    return f"{side.heads}*{side.pieces}{row}{'L' if side.long else ''}"


def _known(call: QkCacheCall) -> Known:
    """Determined by sizes and addresses. Strides of a dimension of size 1 do not matter."""
    spec, rows, cached = call.spec, call.rows, call.k_cache is not None
    tokens = rows.tokens > 1
    outer = 0 if rows.folded else 1

    def address(tensor: Tensor | None, *steps: int) -> int:
        if tensor is None:
            return 0
        bits = tensor.data_ptr()
        for step in steps:
            bits |= step * tensor.element_size()
        return bits

    def of_tokens(tensor: Tensor | None, by_outer: int, by_token: int, by_head: int, heads: int) -> int:
        return address(tensor, outer * by_outer, tokens * by_token, (heads > 1) * by_head)

    q = of_tokens(call.q, rows.q_outer, rows.q_token, rows.q_head, rows.q_heads) | address(call.gamma_q)
    q |= of_tokens(call.q_out, rows.q_out_outer, rows.q_out_token, rows.q_out_head, rows.q_heads)
    k = of_tokens(call.k, rows.k_outer, rows.k_token, rows.k_head, rows.k_heads) | address(call.gamma_k)
    v = 0
    several = rows.k_heads > 1
    if cached:
        k |= address(call.k_cache, rows.k_page, rows.k_entry, several * rows.k_step)
    else:
        k |= of_tokens(call.k_out, rows.k_out_outer, rows.k_out_token, rows.k_out_head, rows.k_heads)
    if spec.values:
        v = of_tokens(call.v, rows.v_outer, rows.v_token, rows.v_head, rows.k_heads)
        v |= address(call.v_cache, rows.v_page, rows.v_entry, several * rows.v_step)
    angles = address(call.freqs, rows.freqs_row) | address(call.cos, outer * rows.cos_outer, tokens * rows.cos_token)
    angles |= address(call.sin, outer * rows.sin_outer, tokens * rows.sin_token)
    by_index = spec.turn is not None and not spec.turn.pair and spec.turn.positions is None
    indexed = not rows.folded or spec.placing == "dense" or by_index
    return Known(
        q % 16 == 0,
        k % 16 == 0,
        spec.values and v % 16 == 0,
        spec.turn is not None and angles % 16 == 0,
        spec.placing == "slots" and rows.entries > 0 and rows.entries & (rows.entries - 1) == 0,
        indexed and rows.sequence == 1,
        bool(rows.folded),
    )


class _Forced:
    """The columns of an open `columns_as`, if any."""

    columns = 0


@contextmanager
def columns_as(columns: int) -> Iterator[None]:
    """For experiments: programs of about ``columns`` columns in every launch of this process while the context is open.

    Results do not change. ``columns`` is a power of two.
    """
    if not isinstance(columns, int) or columns < 1 or columns & (columns - 1):
        raise ContractError(f"columns_as: `columns` must be a power of two, got {columns!r}")
    before, replays = _Forced.columns, recording.switch.on
    _Forced.columns, recording.switch.on = columns, False
    try:
        yield
    finally:
        _Forced.columns, recording.switch.on = before, replays


def _facts(call: QkCacheCall, chip: Chip) -> QkCacheFacts:
    rows = call.rows
    elements = rows.tokens * (rows.head * (rows.q_heads + rows.k_heads) + rows.value * rows.k_heads)
    return QkCacheFacts(
        _Forced.columns or columns_for(elements, chip), rows.q_heads, rows.k_heads, rows.head, rows.value, _known(call)
    )


def _configure(spec: QkCacheSpec, facts: QkCacheFacts, chip: Chip) -> QkCacheConfig:
    return qk_cache_config(*facts[:5], spec.norm, spec.turn, chip, spec.norm_v)


def _grid(call: QkCacheCall, config: QkCacheConfig) -> tuple[int]:
    """The number of programs."""
    programs = call.rows.tokens * config.programs
    if programs > MAX_PROGRAMS:
        raise Unsupported(f"qk_norm_rope_cache: at most 2**31 - 2**13 programs on a GPU, got {call.rows.tokens} tokens")
    return (programs,)


KERNELS: Final[GpuKernels[QkCacheSpec, QkCacheCall, QkCacheFacts, QkCacheConfig]] = GpuKernels(
    QkCacheParameters, _facts, _configure, build_for, _grid, pack
)
launch, builds = KERNELS.launch, KERNELS.builds
