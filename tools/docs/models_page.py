"""The table of families and releases of transformers in docs/models.md, from what `tools.architectures` recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.helpers.families import FAMILIES
from tools.bench.markdown import filled, table

from .architectures_page import DATA, FOLDER

PATH: Final = Path("docs/models.md")
_ARCHITECTURE: Final = {"Gemma 3": "gemma3_text"}
"""Families whose architecture is not named like their Python module."""
_TOKENS: Final = {True: "equal", False: "**differ**"}


def render() -> str:
    """The text of docs/models.md with a new table."""
    text = (Path(__file__).parents[2] / PATH).read_text()
    return filled(text, {"releases": "\n".join(_table([json.loads((FOLDER / name).read_text()) for name in DATA]))})


def _table(releases: list[dict[str, Any]]) -> list[str]:
    """Families and releases with the same cells share a row or a column."""
    releases = sorted(releases, key=lambda found: [int(part) for part in found["transformers"].split(".")])
    families = [family for family in FAMILIES if family.path != family.module]  # not torch's own norm
    names = [_ARCHITECTURE.get(family.name, family.module) for family in families]
    columns: dict[tuple[str, ...], list[str]] = {}
    for found in releases:
        cells = tuple(_cell(found["models"].get(name)) for name in names)
        columns.setdefault(cells, []).append(found["transformers"])
    rows: dict[tuple[str, ...], list[str]] = {}
    for family, cells in zip(families, zip(*columns, strict=True), strict=True):
        rows.setdefault(cells, []).append(family.name)
    heads = ["family", *map(", ".join, columns.values())]
    return table(heads, [[", ".join(members), *cells] for cells, members in rows.items()], left=len(heads))


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not there"
    counts = (str(row[key]) for key in ("norms", "additions", "layers", "rotary"))
    return ", ".join((*counts, _TOKENS[row["tokens_equal"]]))
