"""Docstrings as Markdown, for pages of docs/ and for the site."""

from __future__ import annotations

import re
import textwrap


def markdown(doc: str) -> str:
    """Convert a docstring to Markdown: fence literal blocks after ``::`` and turn double backticks into single ones."""
    parts = re.split(r"::\n\n((?:    .*\n|\n)*    .*)", doc)
    for index, part in enumerate(parts):
        parts[index] = part.replace("``", "`") if index % 2 == 0 else f":\n\n```\n{textwrap.dedent(part)}\n```"
    return "".join(parts)
