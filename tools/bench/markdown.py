"""Markdown tables, and text between markers."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path


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


def page_options(prog: str, doc: str | None) -> argparse.Namespace:
    """The result files that a command makes pages of, and the pages that also show their goals."""
    parser = argparse.ArgumentParser(prog=prog, description=doc)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--readme", nargs="+", type=Path, default=[], help="also write the goals into these pages")
    return parser.parse_args()


def write_pages(
    files: Sequence[Path],
    pages: Iterable[Path],
    name: str,
    full: Callable[[list[str]], str],
    with_section: Callable[[str, str], str],
) -> None:
    """Write ``full(names of the files)`` to ``name`` beside the first file, and ``with_section(text, folder)`` to each page."""
    folder = files[0].parent
    (folder / name).write_text(full([Path(os.path.relpath(path, folder)).as_posix() for path in files]))
    for page in pages:
        page.write_text(with_section(page.read_text(), Path(os.path.relpath(folder, page.parent)).as_posix()))


def linked(words: str, goals: str, folder: str, name: str) -> str:
    """A section: words, a table of goals, and a link to the page with every row."""
    shown = f"{folder.removeprefix('../')}/{name}"
    return "\n".join((words, "", goals, "", f"Every row and peer: [{shown}]({folder}/{name})."))
