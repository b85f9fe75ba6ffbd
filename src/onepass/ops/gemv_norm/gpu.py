"""The GEMV kernel: its parameters, configuration, alignment and names."""

from typing import Annotated, Final, NamedTuple

import torch

from ...errors import Unsupported
from ...formats import WeightScale
from ...gpu import counters
from ...gpu.chip import Chip
from ...gpu.compile import Build
from ...gpu.launch import F32, I32, I64, SHORT_NAMES, GpuKernels, Pointer, make_build
from ...gpu.lib.numbers import quant
from ...gpu.product_tile import WEIGHTS, StreamTile, describe_tile, tile_registers
from .gpu_kernel import _gemv_partial_norm_kernel
from .gpu_tile import (
    CHUNK,
    FragmentTile,
    GemvConfig,
    GemvTile,
    blocks,
    describe_fragments,
    fragment_registers,
    gemv_config,
)
from .launch import MAX_SEGMENTS, GemvCall, GemvSpec


class GemvStrides(NamedTuple):
    """Strides from row to row."""

    act: I64
    weight: I64
    weight_scale: I64
    y: I64
    tail: I64
    scale: I64


class GemvParameters(NamedTuple):
    """The parameters of the kernel. Those of a segment come `MAX_SEGMENTS` times."""

    act: Pointer
    weight: Pointer
    weight_scale: Pointer
    y: Pointer
    unnormed: Pointer
    scale: Pointer
    counter: Pointer
    trace: Pointer
    units: Pointer
    gammas: Annotated[tuple[Pointer, ...], MAX_SEGMENTS]
    normed: Annotated[tuple[Pointer, ...], MAX_SEGMENTS]
    m: I32
    k: I32
    widths: Annotated[tuple[I32, ...], MAX_SEGMENTS]
    tail: I32
    strides: GemvStrides
    normed_strides: Annotated[tuple[I64, ...], MAX_SEGMENTS]
    eps: F32


def pack(call: GemvCall, config: GemvConfig, programs: tuple[int, ...]) -> GemvParameters:
    """The parameters of a call."""
    act, weight, y, scale = call.act, call.weight, call.y, call.scale
    n, k = weight.shape
    weight_scale, unnormed, segments = call.weight_scale, call.unnormed, len(call.widths)
    absent, zeros = (None,) * (MAX_SEGMENTS - segments), (0,) * (MAX_SEGMENTS - segments)
    strides = GemvStrides(
        act=act.stride(0),
        weight=weight.stride(0),
        weight_scale=0 if weight_scale is None or weight_scale.dim() < 2 else weight_scale.stride(0),
        y=0 if y is None else y.stride(0),
        tail=0 if unnormed is None else unnormed.stride(0),
        scale=0 if scale is None else scale.stride(0),
    )
    return GemvParameters(
        act,
        weight,
        weight_scale,
        y,
        unnormed,
        scale,
        call.counter,
        call.trace,
        call.units,
        gammas=(*call.gammas, *absent),
        normed=(*call.normed, *absent),
        m=act.shape[0],
        k=k,
        widths=(*call.widths, *zeros),
        tail=n - sum(call.widths),
        strides=strides,
        normed_strides=(*[t.stride(0) for t in call.normed], *zeros),
        eps=call.eps,
    )


class GemvMath(NamedTuple):
    """What a kernel computes; ``pack`` weights fill 32 bits. Act comes as it is, without a norm. ``regroups``: whether 8-bit
    weights are decoded with the chip's instructions. ``stream``: the kind of tile, one of `STREAMS`.
    """

    segments: int
    stream: str
    pack: int
    weight: str
    regroups: bool
    scaled: str
    gated: bool
    normed: bool
    residual: bool
    round_sum: bool
    hf: bool
    hw_rounding: bool
    pdl: bool
    traced: bool


STREAMS: Final = {FragmentTile: "fragments", StreamTile: "products"}


def scale_dtype(scaled: WeightScale) -> torch.dtype | None:
    """The dtype of the scales of weights."""
    if scaled == "none":
        return None
    return torch.float8_e8m0fnu if scaled == "ue8m0_block" else torch.float32


def build_for(spec: GemvSpec, config: GemvConfig, aligned: bool, even: bool, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed.

    ``aligned``: every row of act and weight starts on 16 bytes and k is a multiple of 16. ``even``:
    16 divides the width of every segment, and gammas and normed rows can be read and written 4
    elements at a time. With more alignment Triton would store 8 at a time and shuffle the values
    first.
    """
    if spec.traced and chip.backend == "hip":
        raise Unsupported("gemv_and_partial_norm_with_scratch: traces need an NVIDIA GPU or a CPU; use NullTrace()")
    segments, fp8 = len(spec.gammas), spec.fp8
    outputs = [fp8.dtype if fp8 is not None and s == 0 else spec.act for s in range(segments)]
    dtypes: dict[str, torch.dtype | None] = {
        "act": spec.act,
        "weight": spec.weight,
        "weight_scale": scale_dtype(spec.weight_scale),
        "y": torch.float32 if segments else None,
        "unnormed": spec.act,
        "scale": torch.float32 if fp8 else None,
        "counter": torch.int32 if segments else None,
        "trace": torch.int64 if spec.traced else None,
        "units": torch.int32 if spec.traced else None,
    }
    unused: dict[str, float | None] = {}
    divisible: dict[str, int] = {"y": 16, "strides.y": 16}
    for s in range(MAX_SEGMENTS):
        present = s < segments
        dtypes |= {f"gammas.{s}": spec.gammas[s] if present else None, f"normed.{s}": outputs[s] if present else None}
        if not present:
            unused |= {f"widths.{s}": None, f"normed_strides.{s}": None}
        elif even:
            divisible |= {f"widths.{s}": 16, f"normed_strides.{s}": 4}
            divisible |= {f"gammas.{s}": 4 * spec.gammas[s].itemsize, f"normed.{s}": 4 * outputs[s].itemsize}
    if not segments:
        unused["strides.y"] = None
    if not spec.weight_scale.endswith("block"):
        unused["strides.weight_scale"] = 0
    if not fp8:
        unused["strides.scale"] = None
    if aligned:
        divisible |= {"act": 16, "weight": 16, "k": 16 // spec.weight.itemsize if spec.act != torch.float32 else 4}
        divisible |= {"strides.act": 16 // spec.act.itemsize, "strides.weight": 16 // spec.weight.itemsize}
    tile = config.tile
    if isinstance(tile, StreamTile) and not chip.has_pdl:
        tile = tile._replace(pace=0)
    constants = {"TILE": tile, "NORM": config.norm, "MATH": _math(spec, tile, chip), "QUANT": quant(fp8, chip)}
    return make_build(
        GemvParameters,
        _describe(spec, config, aligned, even),
        _gemv_partial_norm_kernel,
        chip,
        dtypes=dtypes,
        constants=constants,
        unused=unused,
        divisible=divisible,
        warps=tile.warps,
        registers=_registers(tile, aligned, chip),
    )


def _math(spec: GemvSpec, tile: GemvTile, chip: Chip) -> GemvMath:
    return GemvMath(
        len(spec.gammas),
        stream=STREAMS[type(tile)],
        pack=4 // spec.weight.itemsize,
        weight=WEIGHTS.get(spec.weight, "float"),
        regroups=chip.sums_sixteen,
        scaled=spec.weight_scale,
        gated=False,
        normed=False,
        residual=False,
        round_sum=False,
        hf=False,
        hw_rounding=chip.rounds_casts,
        pdl=chip.has_pdl,
        traced=spec.traced,
    )


def _registers(tile: GemvTile, aligned: bool, chip: Chip) -> int:
    """The register limit per thread; 0 leaves it to the assembler."""
    if isinstance(tile, FragmentTile):
        return fragment_registers(tile, aligned, chip)
    return tile_registers(tile, aligned, chip)


def _describe_tile(tile: GemvTile, aligned: bool) -> str:
    if isinstance(tile, FragmentTile):
        return describe_fragments(tile, aligned)
    return describe_tile(tile, aligned)


def _describe(spec: GemvSpec, config: GemvConfig, aligned: bool, even: bool) -> str:
    """A readable name for one configuration; equal names mean equal builds (for one chip)."""
    short = SHORT_NAMES
    parts = ["gemv", f"act={short[spec.act]}", f"weight={short[spec.weight]}"]
    if spec.weight_scale != "none":
        parts.append(f"scale={spec.weight_scale}")
    norm = config.norm
    segments = zip(spec.gammas, norm.tiles, norm.longs, strict=True)
    gammas = ",".join(f"{short[gamma]}:{count * norm.side * CHUNK}{'+' * long}" for gamma, count, long in segments)
    parts.append(f"norm={gammas}" if gammas else "plain")
    parts += [option for option, chosen in (("shared", norm.shared), ("even", even), ("traced", spec.traced)) if chosen]
    if spec.fp8:
        parts.append(spec.fp8.name)
    parts.append(_describe_tile(config.tile, aligned))
    return " ".join(parts)


class GemvFacts(NamedTuple):
    """What selects the machine code of a call, besides its spec."""

    config: GemvConfig
    aligned: bool
    even: bool


def _facts(call: GemvCall, chip: Chip) -> GemvFacts:
    spec, act, weight = call.spec, call.act, call.weight
    m, (n, k) = act.shape[0], weight.shape
    steps = (act.stride(0) if m > 1 else 0) * spec.act.itemsize | weight.stride(0) * spec.weight.itemsize
    aligned = (act.data_ptr() | weight.data_ptr() | steps) % 16 == 0 and k % 16 == 0
    even = True
    for width, gamma, out in zip(call.widths, call.gammas, call.normed, strict=True):
        even = even and not (
            width % 16
            or gamma.data_ptr() % (4 * gamma.element_size())
            or out.data_ptr() % (4 * out.element_size())
            or (m > 1 and out.stride(0) % 4)
        )
    return GemvFacts(
        gemv_config(spec.act, spec.weight, spec.weight_scale, m, n, k, call.widths, aligned, chip), aligned, even
    )


def _grid(call: GemvCall, config: GemvConfig) -> tuple[int]:
    return (blocks(config.tile, call.act.shape[0], call.weight.shape[0], call.widths),)


KERNELS: Final[GpuKernels[GemvSpec, GemvCall, GemvFacts, GemvConfig]] = GpuKernels(
    GemvParameters,
    _facts,
    lambda spec, facts, chip: facts.config,
    lambda spec, facts, config, chip: build_for(spec, config, facts.aligned, facts.even, chip),
    _grid,
    pack,
)
builds = KERNELS.builds


def launch(call: GemvCall) -> None:
    """One launch on the current stream, with the backend's counter if the call has none."""
    if call.counter is not None or not call.widths:
        KERNELS.launch(call)
        return
    counters.launch_counted(call.device, MAX_SEGMENTS, lambda counter: KERNELS.launch(call._replace(counter=counter)))
