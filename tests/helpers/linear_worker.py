"""Runs `linear` in Triton's interpreter, with either kernel, and prints JSON.

``cases``: what is wrong with each case, and the kernels that ran. ``order``: sums of products of which
one per block of K is not zero, so that every addition and its place are known.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import torch

import onepass
from onepass.specs.gemv_norm import WeightScale
from onepass.specs.linear import LinearSpec
from onepass.testing.linear import BF16, E4M3, F16, F32, INT8, Case
from onepass.testing.runner import run_case, running_on
from onepass.triton import linear, linear_config, product_config
from onepass.triton.chip import Chip
from onepass.triton.compiler import Build
from onepass.triton.linear_config import LinearConfig
from onepass.triton.product_config import GRAIN, PieceTile
from onepass.triton.tuning.table import PieceKind

SILU = {"activation": "silu_mul"}
CASES = (
    Case("tiles", 5, 20, 1000),
    Case("tiles", 5, 20, 200, F16, bias=F32),
    Case("tiles", 70, 24, 1000, add=BF16),
    Case("tiles", 3, 40, 200, weight=E4M3, scale="row", bias=BF16),
    Case("tiles", 3, 136, 1000, weight=E4M3, scale="block"),
    Case("tiles", 3, 136, 200, F16, weight=E4M3, scale="ue8m0", options=SILU),
    Case("tiles", 3, 24, 200, F16, weight=INT8, scale="row", add=F32),
    Case("tiles", 3, 24, 1000, weight=INT8, scale="tensor", layout="misaligned"),
    Case("tiles", 130, 10, 64, options=SILU),
    Case("tiles", 6, 22, 256, gamma=BF16, residual=F32, options=SILU),
    Case("tiles", 9, 40, 160, layout="sliced", values="special"),
    Case("tiles", 260, 10, 1008),
)
"""Every branch of the kernels for many rows. With 1000 columns or more, 8-bit weights have four pieces,
of several blocks, and 16-bit weights one.
"""
COLUMNS = 2320
"""K of the sums below: several blocks in every piece, and more in some of them."""


class Sums(NamedTuple):
    """Dtypes and scales of a product, and whether it has few pieces (``wide``) or many.

    16-bit weights are multiplied in tiles of ``kind``, others by the kernel for many rows (``tiled``) or
    few.
    """

    act: torch.dtype
    weight: torch.dtype
    scaled: WeightScale
    tiled: bool = False
    wide: bool = False
    kind: PieceKind = "cube"

    @property
    def block(self) -> int:
        """Columns of a block of K."""
        return 128 if self.scaled == "block" else 16 if self.act == F32 else 64


KINDS: tuple[PieceKind, ...] = ("cube", "flat", "descriptors")
SUMS = (
    *(Sums(BF16, BF16, "none", kind != "cube", wide, kind) for kind in KINDS for wide in (False, True)),
    *(Sums(BF16, E4M3, "block", tiled, wide) for tiled in (False, True) for wide in (False, True)),
    Sums(F16, E4M3, "row"),
    Sums(F16, E4M3, "row", True),
    Sums(BF16, INT8, "none"),
    Sums(F32, F32, "none"),
)


def force(tiled: bool, wide: bool, kind: PieceKind = "flat") -> None:
    """Use the kernel for many rows for 16-bit x, tiles of ``kind``, and the pieces of a product with many columns."""

    def piece_tile(m: int, n: int, k: int, aligned: bool, chip: Chip, descriptors: bool) -> PieceTile:
        pieces = 1 if wide else 4
        length = -(-k // (pieces * GRAIN)) * GRAIN
        chosen = kind if aligned or kind != "descriptors" else "flat"
        mask = pieces * length != k
        return PieceTile(chosen, 32, 16, GRAIN, 2, 4, pieces, mask, m % 2 == 0, late=wide, group=8)

    Chip.sums_sixteen = property(lambda chip: tiled)  # type: ignore[assignment, method-assign]
    linear_config._few_rows = lambda *_: 0
    linear_config.piece_tile = piece_tile  # type: ignore[assignment, attr-defined]
    product_config.WIDE = 1 if wide else 8192  # type: ignore[misc]
    for cached in (linear_config.linear_config, product_config.stream_tile):
        cached.cache_clear()


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


def run_cases(indices: list[int]) -> dict[str, list[str]]:
    """The messages of the cases that fail, and the kernels."""
    made, failed = watch_kernels(), []
    with running_on("interpreter"):
        for index in indices:
            case = CASES[index]
            force(True, case.k >= 1000, "descriptors" if case.k % 16 == 0 and case.gamma is None else "flat")
            result = run_case(case, "interpreter")
            if not result.passed:
                failed.append(f"{result.case}: {result.message}")
    return {"failed": failed, "kernels": made}


def run_sums() -> dict[str, Any]:
    """The sums of each of `SUMS`, and the kernels."""
    made, found = watch_kernels(), []
    with running_on("interpreter"):
        for call in SUMS:
            force(call.tiled, call.wide, call.kind)
            found.append(onepass.linear(**sparse(call), out_dtype=F32).tolist())
    return {"sums": found, "kernels": made}


if __name__ == "__main__":
    print(json.dumps(run_cases(json.loads(sys.argv[1])) if len(sys.argv) > 1 else run_sums()))
