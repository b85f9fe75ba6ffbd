"""The row kernels compile for chips that have no evidence."""

from __future__ import annotations

import re
from functools import cache
from itertools import combinations

import pytest

pytest.importorskip("triton")

from onepass.gpu.chip import Chip
from onepass.gpu.compile import Build, compile_build
from tests.rms_norm.cases import CASES
from tools.evidence import proof

OTHER_CHIPS = [Chip("cuda", 80, 32), Chip("cuda", 100, 32), Chip("hip", "gfx942", 64), Chip("hip", "gfx950", 64)]


@cache
def covering_builds(chip: Chip) -> list[Build]:
    """One length of each kind with every option; other lengths would compile the same code."""
    lengths = (33, 128, 640, 1536, 5000, 20480)
    groups = (
        "short",
        "dtypes",
        "layouts",
        "groups",
        "scales",
        "outputs",
        "prologues",
        "dequantize",
        "chunks",
        "sums",
        "vllm",
        "divide",
        "static",
    )
    cases = [case for case in CASES if case.n in lengths and case.group in groups]
    return list(proof.distinct_builds(cases, chip).values())


def parts(build: Build) -> set[tuple[str, ...]]:
    """The words of a build's name, and the pairs of those that are options and not the tile."""
    _, *words = build.name.split()
    options = sorted(word for word in words if not re.search(r"/\d+w/", word))
    return {*combinations(options, 2), *((word,) for word in words)}


def covering_places() -> list[int]:
    """Places in `covering_builds`, the same for all chips, of builds that together have every tile and pair of options."""
    found = [parts(build) for build in covering_builds(OTHER_CHIPS[0])]
    missing, places = set().union(*found), list[int]()
    while missing:
        places.append(max(range(len(found)), key=lambda place: len(found[place] & missing)))
        missing -= found[places[-1]]
    return places


@pytest.mark.full  # 50 CPU-seconds; part of the other families stays
@pytest.mark.parametrize("chip", OTHER_CHIPS, ids=lambda c: str(c.arch))
def test_compiles_for_other_chips(chip: Chip) -> None:
    """Every tile and every pair of options, each for one of the other chips, in turn."""
    first, own, places = covering_builds(OTHER_CHIPS[0]), covering_builds(chip), covering_places()
    assert len(first) == len(own) and len(places) > 100
    for place in places[OTHER_CHIPS.index(chip) :: len(OTHER_CHIPS)]:
        assert {p for p in parts(first[place]) if len(p) == 2} == {p for p in parts(own[place]) if len(p) == 2}
        assert compile_build(own[place], chip).asm
