"""Runs `linear` in Triton's interpreter, with tiles of any kind, and prints JSON.

With the argument "cases": what is wrong with each case of `RUNS`, and the kernels that ran. With "sums": sums of
products of which one per block of K is not zero, so that every addition and its place are known.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import onepass
from onepass.formats import SCALE_BLOCK, WeightScale
from onepass.gpu import product_tile as product_config
from onepass.gpu.chip import Chip
from onepass.gpu.compile import Build
from onepass.gpu.lib import product
from onepass.gpu.lib.codes import decode
from onepass.gpu.product_tile import PieceTile, has_blocks, order_of
from onepass.gpu.tuning.table import PieceKind
from onepass.ops.linear import gpu as linear
from onepass.ops.linear import gpu_kernel
from onepass.ops.linear import gpu_tile as linear_config
from onepass.ops.linear.gpu_tile import LinearConfig
from onepass.ops.linear.launch import LinearSpec
from tests.linear.checks import BF16, E4M3, F16, F32, INT8, Case
from tests.oracle.runner import run_case, running_on

SILU = {"activation": "silu_mul"}


class Run(NamedTuple):
    """A case with tiles of ``kind``. With ``wide``, 16-bit weights have one piece, else four."""

    case: Case
    kind: PieceKind
    wide: bool = False


_CODES = (
    Case("tiles", 3, 40, 200, weight=E4M3, bias=BF16),
    Case("tiles", 9, 40, 208, weight=E4M3, scale="row", values="special"),
    Case("tiles", 17, 24, 1024, weight=E4M3, scale="tensor"),
    Case("tiles", 3, 136, 1000, weight=E4M3, scale="block"),
    Case("tiles", 3, 264, 1040, weight=E4M3, scale="block", options=SILU),
    Case("tiles", 3, 136, 200, F16, weight=E4M3, scale="ue8m0", options=SILU),
    Case("tiles", 3, 136, 1536, F16, weight=E4M3, scale="ue8m0"),
    Case("tiles", 3, 24, 200, F16, weight=INT8, scale="row", add=F32),
    Case("tiles", 3, 24, 1000, weight=INT8, scale="tensor", layout="misaligned"),
    Case("tiles", 18, 46, 640, weight=INT8, scale="row", gamma=BF16, residual=F32, options=SILU),
    Case("tiles", 9, 72, 528, F16, weight=INT8, layout="sliced"),
    Case("tiles", 9, 136, 520, weight=E4M3, scale="block", values="special"),
    Case("tiles", 3, 136, 512, weight=E4M3, scale="block", layout="misaligned"),
)
"""8-bit weights: each kind of scale, K that fills its pieces or not, rows that are aligned or not."""
RUNS = (
    Run(Case("tiles", 5, 20, 1000), "flat", True),
    Run(Case("tiles", 5, 20, 200, F16, bias=F32), "flat"),
    Run(Case("tiles", 70, 24, 1000, add=BF16), "flat", True),
    Run(Case("tiles", 130, 10, 64, options=SILU), "descriptors"),
    Run(Case("tiles", 6, 22, 256, gamma=BF16, residual=F32, options=SILU), "flat"),
    Run(Case("tiles", 9, 40, 160, layout="sliced", values="special"), "descriptors"),
    Run(Case("tiles", 260, 10, 1008), "descriptors", True),
    Run(Case("tiles", 21, 40, 1008, bias=F32), "split"),
    Run(Case("tiles", 34, 22, 512, options=SILU, add=BF16), "split"),
    Run(Case("tiles", 18, 40, 160, layout="sliced", values="special"), "split"),
    *(Run(case, kind) for case in _CODES for kind in ("cube", "flat")),
    *(Run(case, "decoded") for case in _CODES if case.layout != "misaligned" and case.k % 16 == 0),
)
"""Every branch of the kernels for 16-bit x."""
COLUMNS = 2320
"""K of the sums below: several blocks in every piece, and more in some of them."""


class Sums(NamedTuple):
    """Dtypes and scales of a product, multiplied in tiles of ``kind``. ``wide``: see `Run`."""

    act: torch.dtype
    weight: torch.dtype
    scaled: WeightScale
    wide: bool = False
    kind: PieceKind = "cube"

    @property
    def block(self) -> int:
        """Columns of a block of K."""
        return 128 if self.scaled == "block" else 16 if self.act == F32 else 64


KINDS: tuple[PieceKind, ...] = ("cube", "flat", "descriptors", "split")
SUMS = (
    *(Sums(BF16, BF16, "none", wide, kind) for kind in KINDS for wide in (False, True)),
    *(Sums(BF16, E4M3, "block", wide, kind) for kind in KINDS[:2] for wide in (False, True)),
    *(Sums(F16, E4M3, "row", False, kind) for kind in (*KINDS[:2], "decoded")),
    Sums(BF16, E4M3, "block", True, "decoded"),
    Sums(BF16, INT8, "none", True),
    Sums(F32, F32, "none"),
)


@triton.jit  # type: ignore[untyped-decorator]
def _decoded(codes: tl.tensor, DTYPE: tl.constexpr, WEIGHT: tl.constexpr) -> tl.tensor:
    """In the place of assembly. Regrouping both sides in the same way does not change a product."""
    return decode(codes, tl.float32, WEIGHT)


@triton.jit  # type: ignore[untyped-decorator]
def _unchanged(values: tl.tensor) -> tl.tensor:
    return values


def force(kind: PieceKind, wide: bool, longer: bool) -> None:
    """Use tiles of ``kind`` with the columns that an H200 loads. ``longer``: steps of a cube may exceed its pieces."""

    def piece_tile(
        weight: torch.dtype, scaled: WeightScale, m: int, n: int, k: int, aligned: bool, *rest: object, **more: object
    ) -> PieceTile:
        pieces, _, grain = order_of(BF16, weight, scaled, n)
        length = -(-k // (pieces * grain)) * grain
        chosen: PieceKind = kind if aligned or kind in ("cube", "flat") else "flat"
        step = SCALE_BLOCK if longer and chosen == "cube" and not has_blocks(scaled) else grain
        mask = pieces * length != k or length % step != 0
        first = (weight.itemsize == 1 and chosen != "decoded") or m % 2 == 0
        form = (chosen, 32, 16, step, 2, 4, pieces, grain, aligned, mask, first)
        return PieceTile(*form, late=wide, group=8, static=wide)

    Chip.sums_sixteen = property(lambda chip: True)  # type: ignore[assignment, method-assign]
    for name, replacement in (("decode_words", _decoded), ("decode_fragments", _decoded), ("regroup", _unchanged)):
        setattr(product, name, replacement)
    setattr(gpu_kernel, "decode_words", _decoded)  # noqa: B010
    linear_config.piece_tile = piece_tile  # type: ignore[assignment, attr-defined]
    product_config.WIDE = 1 if wide else 8192  # type: ignore[misc]
    linear_config.linear_config.cache_clear()


def watch_kernels() -> list[str]:
    """The name of each build that is made from now on."""
    made: list[str] = []
    original = linear.build_for

    def build_for(spec: LinearSpec, config: LinearConfig, aligned: bool, even: bool, offset: bool, chip: Chip) -> Build:
        build = original(spec, config, aligned, even, offset, chip)
        made.append(build.name)
        return build

    linear.build_for = build_for
    return made


def sparse(call: Sums) -> dict[str, Any]:
    """Rows of x with one number in each block of K, whose sums depend on the order of additions."""
    generator = torch.Generator().manual_seed(3)
    firsts = torch.arange(0, COLUMNS, call.block)
    width = (COLUMNS - firsts).clamp(max=call.block)
    places = firsts + (torch.rand(3, len(firsts), generator=generator) * width).long()
    powers = torch.randint(-9, 12, places.shape, generator=generator)
    x = torch.zeros(3, COLUMNS).scatter(1, places, torch.randn(places.shape, generator=generator) * 2.0**powers)
    found = {"x": x.to(call.act), "weight": torch.ones(2, COLUMNS).to(call.weight)}
    if call.scaled == "row":
        found["weight_scale"] = torch.ones(2)
    elif call.scaled == "block":
        found["weight_scale"] = 2.0 ** torch.randint(-3, 4, (1, len(firsts)), generator=generator)
    return found


def run_cases() -> dict[str, list[Any]]:
    """The messages of the cases of `RUNS` that fail, and the kernels of each."""
    made, failed, kernels = watch_kernels(), [], []
    with running_on("interpreter"):
        for case, kind, wide in RUNS:
            force(kind, wide, longer=True)
            result = run_case(case, "interpreter")
            if not result.passed:
                failed.append(f"{kind} {result.case}: {result.message}")
            kernels.append(made.copy())
            made.clear()
    return {"failed": failed, "kernels": kernels}


def run_sums() -> dict[str, Any]:
    """The sums of each of `SUMS`, and the kernels."""
    made, found = watch_kernels(), []
    with running_on("interpreter"):
        for call in SUMS:
            force(call.kind, call.wide, longer=False)
            found.append(onepass.linear(**sparse(call), out_dtype=F32).tolist())
    return {"sums": found, "kernels": made}


if __name__ == "__main__":
    print(json.dumps(run_cases() if sys.argv[1] == "cases" else run_sums()))
