"""`linear`: its kernels, their parameters, configuration, alignment and names.

The norm is a launch of its own, with the same bytes, except for few float32 rows.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor
from triton import JITFunction

from ...core import recording
from ...core.layout import Geometry
from ...gpu import counters
from ...gpu.chip import Chip
from ...gpu.compile import Build
from ...gpu.launch import F32, I32, I64, SHORT_NAMES, GpuKernels, Matrix, Pointer, chip_of, make_build
from ...gpu.product_tile import WEIGHTS, PieceTile, describe_pieces, describe_tile, has_blocks, tile_registers
from ..gemv_norm.gpu import scale_dtype
from ..rms_norm import gpu as rms_norm
from ..rms_norm.launch import RowCall, row_spec
from .gpu_kernel import (
    _decode_kernel,
    _linear_blocks_kernel,
    _linear_descriptors_kernel,
    _linear_pieces_kernel,
    _linear_rows_kernel,
    _linear_split_kernel,
)
from .gpu_tile import LinearConfig, fuses_norm, linear_config
from .launch import LinearCall, LinearSpec, changed


class LinearStrides(NamedTuple):
    """Strides from row to row."""

    x: I64
    weight: I64
    weight_scale: I64
    residual: I64
    add: I64
    out: I64
    residual_out: I64


class LinearParameters(NamedTuple):
    """The parameters of the kernels. Tiles are what the copy engine loads of a matrix."""

    x: Pointer
    weight: Pointer
    x_tiles: Matrix
    weight_tiles: Matrix
    weight_scale: Pointer
    gamma: Pointer
    residual: Pointer
    bias: Pointer
    add: Pointer
    out: Pointer
    residual_out: Pointer
    sums: Pointer
    counter: Pointer
    m: I32
    n: I32
    k: I32
    strides: LinearStrides
    eps: F32
    weight_offset: F32


def _step(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def pack(call: LinearCall, config: LinearConfig, programs: tuple[int, ...]) -> LinearParameters:
    """The parameters of a call."""
    x, weight, scale = call.x, call.weight, call.weight_scale
    strides = LinearStrides(
        x=x.stride(0),
        weight=weight.stride(0),
        weight_scale=0 if scale is None or scale.dim() < 2 else scale.stride(0),
        residual=_step(call.residual),
        add=_step(call.add),
        out=call.out.stride(0),
        residual_out=_step(call.residual_out),
    )
    return LinearParameters(
        x,
        weight,
        x_tiles=x,
        weight_tiles=weight,
        weight_scale=scale,
        gamma=call.gamma,
        residual=call.residual,
        bias=call.bias,
        add=call.add,
        out=call.out,
        residual_out=call.residual_out,
        sums=call.sums,
        counter=call.counter,
        m=x.shape[0],
        n=call.out.shape[1],
        k=weight.shape[1],
        strides=strides,
        eps=call.eps,
        weight_offset=call.weight_offset,
    )


class LinearMath(NamedTuple):
    """What a kernel computes; ``pack`` weights fill 32 bits. ``regroups``: see `gpu.lib.codes`.
    ``offset`` and ``shift_gamma``: see `gpu.lib.row.factor`.
    """

    pack: int
    weight: str
    regroups: bool
    scaled: str
    gated: bool
    activation: str
    normed: bool
    residual: bool
    round_sum: bool
    offset: bool
    shift_gamma: bool
    hf: bool
    hw_rounding: bool
    pdl: bool


def build_for(spec: LinearSpec, config: LinearConfig, aligned: bool, even: bool, offset: bool, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed.

    ``aligned``: every row of x, weight, the residual and gamma starts on 16 bytes, and k is a
    multiple of 16. ``even``: rows of the result and of what is added to it can be written and read
    16 bytes at a time.
    """
    dtypes = _dtypes(spec)
    math = _math(spec, config, offset, chip)
    name = _describe(spec, config, aligned, even, offset)
    unused, divisible = _unused(spec), _divisible(spec, aligned, even)
    stream, pieces = config.stream, config.pieces
    if stream is not None:
        tile = stream if chip.has_pdl else stream._replace(pace=0)
        return make_build(
            LinearParameters,
            name,
            _linear_rows_kernel,
            chip,
            dtypes=dtypes,
            constants={"TILE": tile, "STATS": config.stats, "MATH": math},
            unused=unused,
            divisible=divisible,
            warps=stream.warps,
            registers=tile_registers(stream, aligned, chip),
        )
    assert pieces is not None
    wide = pieces.columns // (2 if math.gated else 1)
    return make_build(
        LinearParameters,
        name,
        _kernel_of(pieces, spec),
        chip,
        dtypes=dtypes | {"x_tiles": spec.x, "weight_tiles": spec.x},
        constants={"TILE": pieces, "MATH": math},
        unused=unused,
        divisible=divisible,
        warps=pieces.warps,
        blocks={"x_tiles": (pieces.rows, pieces.step), "weight_tiles": (wide, pieces.step)},
    )


def _kernel_of(pieces: PieceTile, spec: LinearSpec) -> JITFunction:
    """The kernel of a tile."""
    if pieces.kind in ("cube", "flat"):
        return _linear_pieces_kernel
    if pieces.kind == "decoded" and has_blocks(spec.weight_scale):
        return _linear_blocks_kernel
    return _linear_split_kernel if pieces.kind == "split" else _linear_descriptors_kernel


def _dtypes(spec: LinearSpec) -> dict[str, torch.dtype | None]:
    """The dtypes of a kernel's tensors; None for those that it does not have."""
    return {
        "x": spec.x,
        "weight": spec.weight,
        "weight_scale": scale_dtype(spec.weight_scale),
        "gamma": spec.gamma,
        "residual": spec.residual,
        "bias": spec.bias,
        "add": spec.add,
        "out": spec.out,
        "residual_out": spec.residual,
        "sums": torch.float32,
        "counter": torch.int32,
    }


def _unused(spec: LinearSpec) -> dict[str, float | None]:
    """The numbers that the kernel does not read, and the value that they have for it."""
    tensors = {"residual": spec.residual, "add": spec.add, "residual_out": spec.residual}
    unused: dict[str, float | None] = {f"strides.{name}": 0 for name, dtype in tensors.items() if not dtype}
    if not spec.weight_scale.endswith("block"):
        unused["strides.weight_scale"] = 0
    if spec.gamma is None:
        unused |= {"eps": 0.0, "weight_offset": 0.0}
    return unused


def _divisible(spec: LinearSpec, aligned: bool, even: bool) -> dict[str, int]:
    """Alignment of addresses in bytes, and of sizes and strides in elements."""
    divisible: dict[str, int] = {}
    if aligned:
        divisible |= {"x": 16, "weight": 16, "k": 16}
        divisible |= {"strides.x": 16 // spec.x.itemsize, "strides.weight": 16 // spec.weight.itemsize}
        for name, dtype in (("gamma", spec.gamma), ("residual", spec.residual), ("residual_out", spec.residual)):
            if dtype is not None:
                divisible |= {name: 16, f"strides.{name}": 16 // dtype.itemsize}
        divisible.pop("strides.gamma", None)
        divisible["sums"] = 16
    if even:
        divisible |= {"n": 16, "out": 16, "strides.out": 16 // spec.out.itemsize}
        if spec.add is not None:
            divisible |= {"add": 16, "strides.add": 16 // spec.add.itemsize}
    return divisible


def _math(spec: LinearSpec, config: LinearConfig, offset: bool, chip: Chip) -> LinearMath:
    hf = spec.rounding == "hf"
    return LinearMath(
        pack=4 // spec.weight.itemsize,
        weight="float" if _decodes(config) else WEIGHTS.get(spec.weight, "float"),
        regroups=chip.sums_sixteen,
        scaled=spec.weight_scale,
        gated=spec.activation is not None,
        activation=spec.activation or "",
        normed=spec.gamma is not None,
        residual=spec.residual is not None,
        round_sum=hf,
        offset=offset,
        shift_gamma=hf and (spec.x, spec.gamma) == (torch.float16, torch.bfloat16),
        hf=hf,
        hw_rounding=chip.rounds_casts,
        pdl=chip.has_pdl,
    )


def _describe(spec: LinearSpec, config: LinearConfig, aligned: bool, even: bool, offset: bool) -> str:
    """A readable name for one configuration; equal names mean equal builds (for one chip)."""
    short = SHORT_NAMES
    parts = ["linear", f"x={short[spec.x]}", f"weight={short[spec.weight]}"]
    if spec.weight_scale != "none":
        parts.append(f"scale={spec.weight_scale}")
    for name in ("gamma", "residual", "bias", "add"):
        dtype = getattr(spec, name)
        if dtype is not None:
            parts.append(f"{name}={short[dtype]}")
    if spec.activation:
        parts.append(spec.activation)
    if spec.out != spec.x:
        parts.append(f"out={short[spec.out]}")
    options = (("hf", spec.rounding == "hf"), ("offset", offset), ("even", even))
    parts += [option for option, chosen in options if chosen]
    if config.stats is not None:
        parts.append(f"norm={config.stats.rows}x{config.stats.bins}")
    if config.stream is not None:
        parts.append(describe_tile(config.stream, aligned))
    elif config.pieces is not None:
        parts.append(describe_pieces(config.pieces))
    return " ".join(parts)


class LinearFacts(NamedTuple):
    """What selects the machine code of a call, besides its spec."""

    config: LinearConfig
    aligned: bool
    even: bool
    offset: bool


def _facts(call: LinearCall, chip: Chip) -> LinearFacts:
    spec, x, weight = call.spec, call.x, call.weight
    m, (n, k) = x.shape[0], weight.shape
    several = m > 1
    steps = (x.stride(0) * spec.x.itemsize if several else 0) | weight.stride(0) * spec.weight.itemsize
    places = x.data_ptr() | weight.data_ptr()
    if call.gamma is not None:
        places |= call.gamma.data_ptr()
    for tensor in (call.residual, call.residual_out):
        if tensor is not None:
            places |= tensor.data_ptr()
            steps |= tensor.stride(0) * tensor.element_size() if several else 0
    aligned = (places | steps) % 16 == 0 and k % 16 == 0
    even = call.out.shape[1] % 16 == 0
    for tensor in (call.out, call.add):
        if tensor is not None:
            step = tensor.stride(0) * tensor.element_size() if several else 0
            even = even and (tensor.data_ptr() | step) % 16 == 0
    return LinearFacts(linear_config(spec, m, n, k, aligned, chip), aligned, even, call.weight_offset != 0)


def _grid(call: LinearCall, config: LinearConfig) -> tuple[int]:
    tile = config.stream or config.pieces
    assert tile is not None
    columns = tile.columns // (1 if call.spec.activation is None else 2)
    tiles = -(-call.out.shape[1] // columns) * -(-call.x.shape[0] // tile.rows)
    return (tiles * tile.pieces if _is_split(config) else tiles,)


def _decodes(config: LinearConfig) -> bool:
    """Whether 8-bit weights are decoded by a launch of their own."""
    return config.pieces is not None and config.pieces.kind == "decoded"


def _is_split(config: LinearConfig) -> bool:
    """Whether each piece has a program of its own."""
    return config.pieces is not None and config.pieces.kind == "split"


KERNELS: Final[GpuKernels[LinearSpec, LinearCall, LinearFacts, LinearConfig]] = GpuKernels(
    LinearParameters,
    _facts,
    lambda spec, facts, chip: facts.config,
    lambda spec, facts, config, chip: build_for(spec, config, facts.aligned, facts.even, facts.offset, chip),
    _grid,
    pack,
)


# --- 8-bit weights as 16-bit ones, for products of many rows: to decode them once costs less than in every tile ---------


class DecodeSpec(NamedTuple):
    """Everything except sizes that affects the machine code."""

    weight: torch.dtype
    out: torch.dtype


class DecodeCall(NamedTuple):
    """Codes [N, K] with any row stride, and the contiguous ``out``. Rows of both start on 16 bytes, and 16 divides K."""

    spec: DecodeSpec
    weight: Tensor
    out: Tensor

    @property
    def device(self) -> int:
        """The number of the GPU, or -1."""
        return self.weight.get_device()


class DecodeParameters(NamedTuple):
    """The parameters of the decoding kernel."""

    weight: Pointer
    out: Pointer
    n: I32
    k: I32
    stride: I64


class Tile(NamedTuple):
    """Rows and columns of a program."""

    rows: int
    columns: int


class Math(NamedTuple):
    """The kind of codes, and whether the chip's own instructions decode them."""

    weight: str
    hardware: bool
    pdl: bool


DECODE_TILE: Final = Tile(8, 512)
DECODE_WARPS: Final = 4


def decode_build_for(spec: DecodeSpec, chip: Chip) -> Build:
    """The decoding kernel of a configuration; pure, no GPU needed."""
    return make_build(
        DecodeParameters,
        f"decode {SHORT_NAMES[spec.weight]} to {SHORT_NAMES[spec.out]}",
        _decode_kernel,
        chip,
        dtypes=spec._asdict(),
        constants={"TILE": DECODE_TILE, "MATH": Math(WEIGHTS[spec.weight], chip.sums_sixteen, chip.has_pdl)},
        unused={},
        divisible={"weight": 16, "out": 16, "k": 16, "stride": 16},
        warps=DECODE_WARPS,
    )


def _decode_grid(call: DecodeCall, config: None) -> tuple[int]:
    n, k = call.weight.shape
    return (-(-n // DECODE_TILE.rows) * -(-k // DECODE_TILE.columns),)


def _decode_pack(call: DecodeCall, config: None, programs: tuple[int, ...]) -> DecodeParameters:
    n, k = call.weight.shape
    return DecodeParameters(call.weight, call.out, n, k, call.weight.stride(0))


DECODE: Final[GpuKernels[DecodeSpec, DecodeCall, tuple[()], None]] = GpuKernels(
    DecodeParameters,
    lambda call, chip: (),
    lambda spec, facts, chip: None,
    lambda spec, facts, config, chip: decode_build_for(spec, chip),
    _decode_grid,
    _decode_pack,
)


def decode_call(weight: Tensor, dtype: torch.dtype) -> DecodeCall:
    """The call that decodes a weight, with memory for its result."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    return DecodeCall(DecodeSpec(weight.dtype, dtype), weight, out)


# --- a call's launches ----------------------------------------------------------------------------------------------


def _is_fused(call: LinearCall, chip: Chip) -> bool:
    """Whether one launch does all. Programs read the residual while one of them writes the sum, so
    these must be two tensors.
    """
    if call.gamma is None and call.residual is None:
        return True
    m, k = call.x.shape
    before, after = call.residual, call.residual_out
    in_place = before is not None and after is not None and before.data_ptr() == after.data_ptr()
    return fuses_norm(call.spec, m, k, chip) and not in_place


def _norm_call(call: LinearCall, norm: Tensor) -> RowCall:
    """The `rms_norm` that a call begins with."""
    spec, gamma, (m, k) = call.spec, call.gamma, call.x.shape
    assert gamma is not None
    rows_call = RowCall(
        row_spec(spec.x, gamma.dtype, spec.residual, spec.x, spec.rounding),
        call.x,
        gamma,
        call.eps,
        call.weight_offset,
        call.residual,
        norm=norm,
        new_residual=call.residual_out,
        n=k,
        geom=Geometry(m, 1, 1),
    )
    rows = (rows_call.x, rows_call.residual, norm, None, None, rows_call.new_residual)
    return rows_call._replace(strides=tuple([(0 if t is None else t.stride(0), 0, 0) for t in rows]))


def _product_call(call: LinearCall, x: Tensor) -> LinearCall:
    """The rest of a call, for a normed x."""
    spec = changed(call.spec, gamma=None, residual=None)
    return call._replace(spec=spec, x=x, gamma=None, residual=None, residual_out=None, eps=0.0, weight_offset=0.0)


def builds(chip: Chip, call: LinearCall) -> list[Build]:
    """The builds that `launch` would run on ``chip``."""
    if _is_fused(call, chip):
        return _product_builds(chip, call)
    x = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    first = rms_norm.builds(chip, _norm_call(call, x)) if call.gamma is not None else []
    return [*first, *_product_builds(chip, _product_call(call, x))]


def _product_builds(chip: Chip, call: LinearCall) -> list[Build]:
    """The builds of a call without a norm."""
    builds = KERNELS.builds(chip, call)
    if _decodes(_facts(call, chip).config):
        builds.insert(0, decode_build_for(DecodeSpec(call.spec.weight, call.spec.x), chip))
    return builds


def launch(call: LinearCall) -> None:
    """One launch on the current stream, or the norm first."""
    chip = chip_of(call.device)
    if _is_fused(call, chip):
        _launch_product(call, chip)
        return
    x = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    if call.gamma is not None:
        recording.temporary(x)
        rms_norm.launch(_norm_call(call, x))
    elif call.residual is not None and call.residual_out is not None:
        sums = call.x.float() + call.residual.float()
        call.residual_out.copy_(sums)
        x.copy_(sums)
    _launch_product(_product_call(call, x), chip)


def _launch_product(call: LinearCall, chip: Chip) -> None:
    """One launch on the current stream, or the weights are decoded first.

    If each piece has a program of its own, it needs memory for their sums.
    """
    config = _facts(call, chip).config
    if _decodes(config):
        first = decode_call(call.weight, call.spec.x)
        DECODE.launch(first)
        call = call._replace(weight=first.out)
    if not _is_split(config):
        KERNELS.launch(call)
        return
    tile = config.pieces
    assert tile is not None
    programs = _grid(call, config)[0]
    sums = torch.empty(programs * tile.columns * tile.rows, dtype=torch.float32, device=call.weight.device)
    counters.launch_counted(
        call.device,
        programs // tile.pieces,
        lambda counter: KERNELS.launch(call._replace(sums=sums, counter=counter)),
    )
