"""The attention of a decode step: its parameters, programs and memory for sums of splits."""

from typing import Annotated, Any, Final, NamedTuple, TypeVar

import torch

from ...gpu import counters
from ...gpu.chip import Chip
from ...gpu.compile import Build
from ...gpu.launch import F32, I32, SHORT_NAMES, GpuKernels, Pointer, Sizes, chip_of, make_build
from ..latent_attention.launch import LatentCall, LatentRows
from ..qk_cache.gpu_tile import power_of_two
from .gpu_kernel import _attention_kernel
from .launch import ROWS, SPLIT, AttentionCall, AttentionRows, AttentionSpec

WARPS: Final = 4
AHEAD: Final = 264
"""Up to this many programs, entries are requested while the kernel before still runs. More would queue."""


class AttentionTensors(NamedTuple):
    """The tensors of a call."""

    q: Pointer
    k: Pointer
    v: Pointer
    mask: Pointer
    out: Pointer
    sums: Pointer
    tops: Pointer
    counter: Pointer


class AttentionParameters(NamedTuple):
    """The parameters of the kernel. ``ahead``: whether entries are requested while the kernel before still runs."""

    tensors: AttentionTensors
    rows: Annotated[AttentionRows, Sizes(7)]
    scale: F32
    ahead: I32


class AttentionTile(NamedTuple):
    """Sizes of a program: rows, columns of a head (padded), entries of a split and of a step, stages of the loop, cache
    lines of an entry; splits whose largest scores are looked at together, rows that are joined at a time, and the stages
    of that.
    """

    rows: int
    columns: int
    split: int
    block: int
    stages: int
    lines: int
    looked: int
    joined: int
    join_stages: int


class AttentionMath(NamedTuple):
    """What a kernel computes."""

    mask: str
    columns: int
    several: bool
    hw_rounding: bool
    pdl: bool


class AttentionFacts(NamedTuple):
    """What selects the machine code of a call, besides its spec."""

    columns: int
    several: bool
    """Whether there are several splits."""


def _facts(call: AttentionCall, chip: Chip) -> AttentionFacts:
    return AttentionFacts(call.rows.columns, call.rows.splits > 1)


def _tile(spec: AttentionSpec, facts: AttentionFacts, chip: Chip) -> AttentionTile:
    """Steps of 128 entries, or 64 for long heads."""
    padded = max(16, power_of_two(facts.columns))
    return AttentionTile(ROWS, padded, SPLIT, 64 if padded > 128 else 128, 2, max(1, padded // 64), 64, 4, 6)


def build_for(spec: AttentionSpec, facts: AttentionFacts, tile: AttentionTile, chip: Chip) -> Build:
    """The kernel, signature, constants and alignment of one configuration; pure, no GPU needed."""
    dtypes = dict.fromkeys("qkv", spec.x) | dtypes_of_ends(spec, facts.several)
    math = AttentionMath(spec.mask, facts.columns, facts.several, chip.rounds_casts, chip.has_pdl)
    strides = [name for name in AttentionRows._fields if name[:2] in ("q_", "k_", "v_")]
    divisible = {f"tensors.{name}": 16 for name in ("q", "k", "v", "out", "sums", "tops")}
    divisible |= {f"rows.{name}": 8 for name in strides}
    name = f"attention x={SHORT_NAMES[spec.x]} mask={spec.mask} columns={facts.columns}{' splits' * facts.several}"
    return make_build(
        AttentionParameters,
        name,
        _attention_kernel,
        chip,
        dtypes={f"tensors.{name}": dtype for name, dtype in dtypes.items()},
        constants={"TILE": tile, "MATH": math},
        unused=unused_rows(spec, facts.several, batch=0, columns=0),
        divisible=divisible,
        warps=WARPS,
    )


def dtypes_of_ends(spec: AttentionSpec, several: bool) -> dict[str, torch.dtype | None]:
    """The dtypes of the mask, the result and the memory of several splits; of no tensor it is None."""
    dtypes: dict[str, torch.dtype | None] = {"mask": spec.x if spec.mask != "none" else None, "out": spec.x}
    sums, counter = (torch.float32, torch.int32) if several else (None, None)
    return dtypes | {"sums": sums, "tops": sums, "counter": counter}


def unused_rows(spec: AttentionSpec, several: bool, **constant: int) -> dict[str, int]:
    """The sizes and strides that a kernel does not read: ``constant`` ones, and those of a mask and of splits."""
    if spec.mask == "none":
        constant["mask_batch"] = 0
    if spec.mask != "many":
        constant["mask_token"] = 0
    if not several:
        constant["splits"] = 1
    return {f"rows.{name}": value for name, value in constant.items()}


def units(rows: AttentionRows | LatentRows) -> int:
    """Tiles of rows, of all heads of keys and sequences."""
    return rows.batch * rows.heads * -(-rows.groups * rows.tokens // ROWS)


def grid(call: AttentionCall | LatentCall, tile: object) -> tuple[int]:
    """A program for each unit and split."""
    return (units(call.rows) * call.rows.splits,)


def pack(call: AttentionCall, tile: AttentionTile, programs: tuple[int, ...]) -> AttentionParameters:
    """The parameters of a call."""
    tensors = AttentionTensors(call.q, call.k, call.v, call.mask, call.out, call.sums, call.tops, call.counter)
    return AttentionParameters(tensors, call.rows, call.scale, ahead=int(programs[0] <= AHEAD))


KERNELS: Final[GpuKernels[AttentionSpec, AttentionCall, AttentionFacts, AttentionTile]] = GpuKernels(
    AttentionParameters, _facts, _tile, build_for, grid, pack
)
builds = KERNELS.builds


def launch(call: AttentionCall) -> None:
    """One launch on the current stream. Several splits need memory for their sums, and a counter per unit."""
    launch_splits(KERNELS, call)


SplitCall = TypeVar("SplitCall", AttentionCall, LatentCall)


def launch_splits(kernels: GpuKernels[AttentionSpec, SplitCall, Any, Any], call: SplitCall) -> None:
    """Launch a call, with memory for the sums of its splits if there are several."""
    rows = call.rows
    if rows.splits == 1:
        kernels.launch(call)
        return
    chip = chip_of(call.device)
    columns = kernels.configure(call.spec, kernels.facts(call, chip), chip).columns
    count = units(rows)
    programs = count * rows.splits
    sums = torch.empty(programs * ROWS * (columns + 2), dtype=torch.float32, device=call.q.device)
    sums, tops = sums.split_with_sizes((programs * ROWS * columns, programs * ROWS * 2))
    counters.launch_counted(
        call.device, count, lambda counter: kernels.launch(call._replace(sums=sums, tops=tops, counter=counter))
    )
