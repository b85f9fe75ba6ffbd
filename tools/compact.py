"""Results as JSON with one line per row: short files, readable diffs."""

from __future__ import annotations

import json
from typing import Any


def dumps(document: Any) -> str:
    """A JSON document that gives each item of its top level a line, and each row of a table there.

    A table is a list or a mapping that has lists or mappings as items.

    >>> print(dumps({"gpu": "H200", "shape": [1, 2], "rows": [{"us": [1.5]}, {"us": [2.5]}]}), end="")
    {
     "gpu": "H200",
     "shape": [1, 2],
     "rows": [
      {"us": [1.5]},
      {"us": [2.5]}
     ]
    }
    """
    if isinstance(document, dict):
        return _lines([_pair(key, _item(value)) for key, value in document.items()], "{}") + "\n"
    if isinstance(document, list):
        return _lines(list(map(json.dumps, document)), "[]") + "\n"
    return json.dumps(document) + "\n"


def _item(value: Any) -> str:
    """The text of an item of the top level."""
    if isinstance(value, dict) and any(isinstance(item, dict | list | tuple) for item in value.values()):
        return _lines([_pair(key, json.dumps(item)) for key, item in value.items()], "{}", " ")
    if isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple) for item in value):
        return _lines(list(map(json.dumps, value)), "[]", " ")
    return json.dumps(value)


def _pair(key: Any, text: str) -> str:
    """A key, which json turns into a string, and its value."""
    return json.dumps({key: None})[1:-1].removesuffix("null") + text


def _lines(rows: list[str], brackets: str, indent: str = "") -> str:
    """Brackets around a line, or more, per row."""
    inner = ",\n".join(f"{indent} {row}" for row in rows)
    return f"{brackets[0]}\n{inner}\n{indent}{brackets[1]}" if rows else brackets
