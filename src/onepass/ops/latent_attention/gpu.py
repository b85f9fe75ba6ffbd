"""The attention of a decode step to latents: its parameters, programs and memory for sums of splits."""

from typing import Annotated, Final, NamedTuple

from ...gpu.chip import Chip
from ...gpu.compile import Build
from ...gpu.launch import F32, I32, SHORT_NAMES, GpuKernels, Pointer, Sizes, make_build
from ..attention.gpu import AHEAD, dtypes_of_ends, grid, launch_splits, unused_rows
from ..attention.launch import ROWS, SPLIT, AttentionSpec
from ..qk_cache.gpu_tile import power_of_two
from .gpu_kernel import _latent_attention_kernel
from .launch import BLOCK, PIECES, LatentCall, LatentRows

WARPS: Final = PIECES


class LatentTensors(NamedTuple):
    """The tensors of a call."""

    q: Pointer
    q_rot: Pointer
    latent: Pointer
    k_rot: Pointer
    mask: Pointer
    out: Pointer
    sums: Pointer
    tops: Pointer
    counter: Pointer


class LatentParameters(NamedTuple):
    """The parameters of the kernel. ``ahead``: whether entries are requested while the kernel before still runs."""

    tensors: LatentTensors
    rows: Annotated[LatentRows, Sizes(8)]
    scale: F32
    ahead: I32


class LatentTile(NamedTuple):
    """Sizes of a program: rows, columns of a latent and of a rotated key (padded) and their pieces, entries of a split and
    of a step, stages of the loop, cache lines of a latent; the rest is that of `AttentionTile`.
    """

    rows: int
    columns: int
    rotated: int
    pieces: int
    split: int
    block: int
    stages: int
    lines: int
    looked: int
    joined: int
    join_stages: int


class LatentMath(NamedTuple):
    """What a kernel computes."""

    mask: str
    columns: int
    rotated: int
    several: bool
    hw_rounding: bool
    pdl: bool


class LatentFacts(NamedTuple):
    """What selects the machine code of a call, besides its spec."""

    columns: int
    rotated: int
    several: bool
    """Whether there are several splits."""


def _facts(call: LatentCall, chip: Chip) -> LatentFacts:
    rows = call.rows
    return LatentFacts(rows.columns, rows.rotated, rows.splits > 1)


def _tile(spec: AttentionSpec, facts: LatentFacts, chip: Chip) -> LatentTile:
    """A piece has at least the 16 columns that a tensor core takes."""
    columns, rotated = (max(16 * PIECES, power_of_two(n)) for n in (facts.columns, facts.rotated))
    return LatentTile(ROWS, columns, rotated, PIECES, SPLIT, BLOCK, 3, columns // 64, 64, 4, 6)


def build_for(spec: AttentionSpec, facts: LatentFacts, tile: LatentTile, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed."""
    inputs = ("q", "q_rot", "latent", "k_rot")
    dtypes = dict.fromkeys(inputs, spec.x) | dtypes_of_ends(spec, facts.several)
    math = LatentMath(spec.mask, facts.columns, facts.rotated, facts.several, chip.rounds_casts, chip.has_pdl)
    strides = [name for name in LatentRows._fields if name.startswith(("q_", "latent_", "k_rot_"))]
    divisible = {f"tensors.{name}": 16 for name in (*inputs, "out", "sums", "tops")}
    divisible |= {f"rows.{name}": 8 for name in strides}
    columns = f"{facts.columns}+{facts.rotated}"
    name = f"latent_attention x={SHORT_NAMES[spec.x]} mask={spec.mask} columns={columns}{' splits' * facts.several}"
    return make_build(
        LatentParameters,
        name,
        _latent_attention_kernel,
        chip,
        dtypes={f"tensors.{name}": dtype for name, dtype in dtypes.items()},
        constants={"TILE": tile, "MATH": math},
        unused=unused_rows(spec, facts.several, batch=0, columns=0, rotated=0, heads=1),
        divisible=divisible,
        warps=WARPS,
    )


def pack(call: LatentCall, tile: LatentTile, programs: tuple[int, ...]) -> LatentParameters:
    """The parameters of a call."""
    inputs = (call.q, call.q_rot, call.latent, call.k_rot, call.mask)
    tensors = LatentTensors(*inputs, call.out, call.sums, call.tops, call.counter)
    return LatentParameters(tensors, call.rows, call.scale, ahead=int(programs[0] <= AHEAD))


KERNELS: Final[GpuKernels[AttentionSpec, LatentCall, LatentFacts, LatentTile]] = GpuKernels(
    LatentParameters, _facts, _tile, build_for, grid, pack
)
builds = KERNELS.builds


def launch(call: LatentCall) -> None:
    """One launch on the current stream. Several splits need memory for their sums, and a counter per unit."""
    launch_splits(KERNELS, call)
