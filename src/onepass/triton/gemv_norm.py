"""Launches the GEMV kernel: chooses the configuration, names the machine code it needs, passes the arguments."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import Unsupported
from ..fastpath import replay
from ..specs.gemv_norm import MAX_SEGMENTS, GemvCall, GemvSpec, tiles
from . import counters
from .compiler import POINTERS, Build, current_chip, load
from .config import INTERPRETER, Chip
from .gemv_norm_config import CHUNK, MOST_ROWS, GemvConfig, gemv_config
from .gemv_norm_kernels import _gemv_partial_norm_kernel

_NAMES: Final[tuple[str, ...]] = tuple(_gemv_partial_norm_kernel.arg_names)
UNALIGNED_REGISTERS: Final = 168
"""Left to itself the assembler takes 128 where it needs a few more, and spills."""
_SHORT: Final = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float8_e4m3fn: "e4m3fn"}


def build_for(spec: GemvSpec, config: GemvConfig, aligned: bool, even: bool, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed.

    ``aligned``: every row of act and weight starts on 16 bytes and k is a multiple of 16; ``even``: 16 divides the width of every segment,
    and gammas and normed rows can be read and written 4 elements at a time. Told of more alignment, Triton would store 8 at a time
    and shuffle the values first.
    """
    if spec.traced and chip.backend == "hip":
        raise Unsupported("gemv_and_partial_norm_with_scratch: traces need an NVIDIA GPU or a CPU; use NullTrace()")
    segments = len(spec.gammas)
    fp8 = spec.fp8
    constants: dict[str, Any] = {
        "SEGMENTS": segments,
        "STEPS": config.steps,
        "LONG": config.long,
        "MASK": config.mask,
        "DEPTH": config.depth,
        "AHEAD": config.ahead,
        "PACE": config.pace if chip.has_pdl else 0,
        "PACK": 4 // spec.weight.itemsize,
        "WARPS": config.warps,
        "VEC": config.vec,
        "DOT": config.dot,
        "COLUMNS": config.columns,
        "ROWS": config.rows,
        "FP8": spec.weight.itemsize == 1,
        "HARDWARE": chip.casts_e4m3fn,
        "SCALED": spec.weight_scale,
        "GROUP": config.group,
        "CHUNKS": config.chunks,
        "LONGS": config.longs,
        "FP8_MAX": fp8.max if fp8 else 0.0,
        "BIAS": fp8.bias if fp8 else 0,
        "NAN": fp8.nan_code if fp8 else 0,
        "NEGATIVE_ZERO": fp8.has_negative_zero if fp8 else False,
        "ENCODES": bool(fp8 and fp8.name == "e4m3fn" and chip.casts_e4m3fn),
        "EXACT": chip.backend != "interpreter",
        "PDL": chip.has_pdl,
        "TRACED": spec.traced,
    }
    out = POINTERS[spec.act]
    signature = {"act": out, "weight": POINTERS[spec.weight], "unnormed": out, "tail_stride": "i64"}
    if spec.weight_scale != "none":
        signature["weight_scale"] = "*fp32"
    if segments:
        signature.update(y="*fp32", counter="*i32", y_stride="i64")
    if fp8:
        signature.update(scale="*fp32", scale_stride="i64")
    if spec.traced:
        signature.update(trace="*i64", units="*i32")
    for s, gamma in enumerate(spec.gammas):
        codes = fp8 is not None and s == 0
        signature.update({f"gamma{s}": POINTERS[gamma], f"normed{s}": "*u8" if codes else out})
        signature.update({f"width{s}": "i32", f"stride{s}": "i64"})
    signature.update(m="i32", k="i32", tail="i32", act_stride="i64", weight_stride="i64", eps="fp32")
    for name in _NAMES:
        if name not in signature and name not in constants:
            constants[name] = None
    divisible: dict[str, int] = {}
    if segments:
        divisible.update(y=16, y_stride=16)
    if aligned:
        divisible.update(
            act=16, weight=16, act_stride=16 // spec.act.itemsize, weight_stride=16 // spec.weight.itemsize
        )
        divisible.update(k=config.vec)
    if even:
        for s, gamma in enumerate(spec.gammas):
            item = 1 if fp8 is not None and s == 0 else spec.act.itemsize
            divisible.update(
                {f"width{s}": 16, f"stride{s}": 4, f"gamma{s}": 4 * gamma.itemsize, f"normed{s}": 4 * item}
            )
    return Build(
        _describe(spec, config, aligned, even),
        _gemv_partial_norm_kernel,
        tuple((name, signature.get(name, "constexpr")) for name in _NAMES),
        tuple(constants.items()),
        tuple(divisible.items()),
        config.warps,
        chip.has_pdl,
        _registers(config, aligned),
        contracts=False,  # sums of squares must not depend on which products a layout brings beside which sums
    )


def _registers(config: GemvConfig, aligned: bool) -> int:
    """The most a thread may have; 0 leaves it to the assembler."""
    if not aligned:
        return min(UNALIGNED_REGISTERS, 2048 // config.warps)
    # a 134th made 4096 x 4096 two waves, 11.8 us instead of 9.0; left alone, 32 rows have 64 to 92: 13.8 us instead of 12.5
    few, many = config.warps == 4 and config.columns == 8, config.rows == MOST_ROWS and not config.long
    return 128 if few or many else 0


def _describe(spec: GemvSpec, config: GemvConfig, aligned: bool, even: bool) -> str:
    """A readable name for one configuration; equal names mean equal builds (for one chip)."""
    parts = ["gemv", f"act={_SHORT[spec.act]}", f"weight={_SHORT[spec.weight]}"]
    if spec.weight_scale != "none":
        parts.append(f"scale={spec.weight_scale}")
    gammas = ",".join(
        f"{_SHORT[g]}:{c * CHUNK}{'+' * long}"
        for g, c, long in zip(spec.gammas, config.chunks, config.longs, strict=True)
    )
    parts.append(f"norm={gammas}/{config.group}" if gammas else "plain")
    parts += [word for word, said in (("even", even), ("traced", spec.traced)) if said]
    if spec.fp8:
        parts.append(spec.fp8.name)
    shape = "dot" if config.dot else "products"
    extent = f"{config.steps}{'+' if config.long else ''}{'m' if config.mask else ''}"
    parts.append(
        f"{config.columns}x{config.rows}/{config.warps}w/{shape}/v{config.vec}{'' if aligned else 'u'}/{extent}"
    )
    parts.append(f"d{config.depth}a{config.ahead}p{config.pace}")
    return " ".join(parts)


def select(
    spec: GemvSpec, n: int, k: int, widths: tuple[int, ...], act: Tensor, weight: Tensor, gammas: Sequence[Tensor], normed: Sequence[Tensor]
) -> tuple[GemvConfig, bool, bool]:  # fmt: skip
    """Configuration of a call and what is known of its sizes, in the order `build_for` takes them."""
    m = act.shape[0]
    steps = (act.stride(0) if m > 1 else 0) * act.element_size() | weight.stride(0) * weight.element_size()
    aligned = (act.data_ptr() | weight.data_ptr() | steps) % 16 == 0 and k % 16 == 0
    even = True
    for width, gamma, out in zip(widths, gammas, normed, strict=True):
        even = even and not (
            width % 16
            or gamma.data_ptr() % (4 * gamma.element_size())
            or out.data_ptr() % (4 * out.element_size())
            or (m > 1 and out.stride(0) % 4)
        )
    return gemv_config(spec.act, spec.weight, m, n, k, widths, aligned), aligned, even


def builds(chip: Chip, call: GemvCall) -> list[Build]:
    """What `launch` would run on ``chip``, given the same arguments."""
    selected = select(call.spec, call.n, call.k, call.widths, call.act, call.weight, call.gammas, call.normed)
    return [build_for(call.spec, *selected, chip)]


_launchers: dict[tuple[Any, ...], Any] = {}
_chips: dict[int, Chip] = {}


def launch(call: GemvCall) -> None:
    """One launch on the current stream; every argument has been checked."""
    spec, widths, act, weight, weight_scale, gammas, y, normed, scale, unnormed, counter, trace, units, eps = call
    n, k = call.n, call.k
    tail = n - sum(widths)
    config, aligned, even = select(spec, n, k, widths, act, weight, gammas, normed)
    device = act.get_device()
    key = None
    if counter is None and widths:
        counter, key = (torch.zeros(MAX_SEGMENTS, dtype=torch.int32), None) if device < 0 else counters.take(device)
        replay.mark(counter.data_ptr(), (partial(counters.take, device), counters.discard))
    m = act.shape[0]
    values: dict[str, Any] = {
        "act": act, "weight": weight, "weight_scale": weight_scale, "y": y, "unnormed": unnormed,
        "scale": scale, "counter": counter, "trace": trace, "units": units, "m": m, "k": k, "tail": tail,
        "act_stride": act.stride(0), "weight_stride": weight.stride(0), "y_stride": 0 if y is None else y.stride(0),
        "tail_stride": 0 if unnormed is None else unnormed.stride(0),
        "scale_stride": 0 if scale is None else scale.stride(0), "eps": eps,
    }  # fmt: skip
    for s, (gamma, out, width) in enumerate(zip(gammas, normed, widths, strict=True)):
        values.update({f"gamma{s}": gamma, f"normed{s}": out, f"stride{s}": out.stride(0), f"width{s}": width})
    grid = sum(tiles(n, widths, config.columns)) * -(-m // config.rows)
    if device < 0:
        _interpret(build_for(spec, config, aligned, even, INTERPRETER), grid, values)
        return
    place = (spec, config, aligned, even, device)
    found = _launchers.get(place)
    if found is None:
        if device not in _chips:
            _chips[device] = current_chip(device)
        build = build_for(spec, config, aligned, even, _chips[device])
        found = _launchers[place] = (load(build, device), dict(build.constants))
    launcher, constants = found
    arguments = [constants[name] if name in constants else values[name] for name in _NAMES]
    try:
        launcher(grid, [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments])
    except BaseException:
        counters.discard(key)
        raise


def _interpret(build: Build, grid: int, values: dict[str, Any]) -> None:
    """The same call in Triton's interpreter, on CPU tensors."""
    constants = dict(build.constants)
    arguments = {name: constants[name] if name in constants else values[name] for name in _NAMES}
    viewed = {
        name: a.view(torch.uint8) if isinstance(a, Tensor) and a.element_size() == 1 else a
        for name, a in arguments.items()
    }
    build.kernel[(grid,)](**viewed)
