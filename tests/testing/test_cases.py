"""The few cases that `onepass check` runs have everything that the matrix has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from onepass.testing import runner
from onepass.testing.case import Check
from tests import matrix

ROOT = Path(__file__).parents[2]
SIZES = (
    ("rms_norm", "wide: 5x20000 bf16"),
    ("linear", "rows: 33x48x160 bf16"),
    ("linear", "rows: 130x48x160 bf16"),
    ("linear", "rows: 130x144x272 bf16 weight=f8_e4m3fn scale=block"),
)
"""Cases for kernels that a GPU chooses by size: long rows, and linear layers of many rows."""


def traits(cases: Iterable[Check]) -> set[tuple[str, str]]:
    """The ops with the dtypes of their inputs; with the ops' families, every other dtype, format, layout and option.

    Of an option with a number it is the name alone.
    """
    found = set()
    for case in cases:
        words = case.name.partition(": ")[2].split()[1:]
        found |= {(case.op, word) for word in words if word in ("bf16", "f16", "f32")} | {(case.op, "")}
        for word in words:
            option, _, value = word.partition("=")
            if not word[0].isdigit():
                trait = option if re.match(r"[-(\d]|inf|nan", value) else word.partition(":")[0]
                found.add((runner.MODULES[case.op].__name__, trait))
    return found


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and all(getattr(a, f.name) == getattr(b, f.name) for f in fields(a))


@pytest.mark.parametrize("device", runner.DEVICES)
def test_few_cases_have_every_trait_of_the_matrix(device: str) -> None:
    """Every op with every dtype of its input, and every format, dtype, layout and option of every family."""
    few, cases = runner.select(device=device), matrix.select(device=device)
    assert {case.op for case in few} == {case.op for case in cases} and {*SIZES} <= {(c.op, c.name) for c in few}
    if device == "interpreter":
        few, cases = ([case for case in some if case.interpretable] for some in (few, cases))
    assert traits(few) == traits(cases) and len(traits(cases)) > 200
    assert len(few) < len(cases) / 13


def test_few_cases_are_cases_of_the_matrix() -> None:
    """A case with the name of another one is the same case, so evidence about one is about both."""
    known = {(case.op, case.name): case for case in matrix.select(device="cuda")}
    assert len(known) == len(matrix.select(device="cuda"))
    few = runner.select(device="cuda")
    assert len({(case.op, case.name) for case in few}) == len(few)
    assert all(same(case, known[case.op, case.name]) for case in few)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_few_cases_have_every_format_of_the_matrix(device: str) -> None:
    """Dtypes and named formats as they stand in the names, whatever `traits` makes of them."""
    pattern = r"\S*(?:bf16|f16|f32|f8_\w+|int8)\b|format=\w+|activation=\w+|scale_(?:format|layout)=\w+|quantize=\w+|rounding=\w+"

    def words(some: Iterable[Check]) -> set[tuple[str, str]]:
        return {(runner.MODULES[c.op].__name__, word) for c in some for word in re.findall(pattern, c.name)}

    assert words(runner.select(device=device)) == words(matrix.select(device=device))
    assert len(words(matrix.select(device=device))) > 100


def test_few_cases_launch_every_gpu_kernel() -> None:
    pytest.importorskip("triton")
    from tools.evidence import proof
    from tools.evidence.chips import MACHINES

    chip = MACHINES["h200"].chip
    builds = [b for case in runner.select(device="cuda") for b in proof.builds(case, chip)]
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert {b.kernel.__name__ for b in builds} == set(re.findall(r"^def (_\w+_kernel)\(", sources, re.MULTILINE))
    assert len({build.name for build in builds}) < 220, "each is compiled"
