"""Markdown tables, and text between markers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> list[str]:
    """The lines of a table; all but the first ``left`` columns are aligned to the right."""
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return [f"| {' | '.join(heads)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(row)} |" for row in rows)]


def markers(name: str) -> tuple[str, str]:
    """The markers around a generated text."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def filled(text: str, bodies: Mapping[str, str]) -> str:
    """``text`` with new bodies between the markers that it has; a body of one line stays in its paragraph."""
    for name, body in bodies.items():
        begin, end = markers(name)
        if begin not in text and end not in text:
            continue
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{begin} and {end} must each occur once in the text")
        edge = "\n" if "\n" in body else ""
        new = f"{begin}{edge}{body}{edge}{end}"
        text = re.sub(f"{begin}.*?{end}", lambda _, new=new: new, text, flags=re.DOTALL)  # type: ignore[misc]
    return text
