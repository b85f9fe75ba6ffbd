"""A file of results, read with suspicion: it may come from anywhere, and its words end up on a terminal."""

from __future__ import annotations

import json
import math
import unicodedata
from pathlib import Path
from typing import Any

LARGEST = 64 << 20
"""Bytes. A full run of every op is under 100 KB."""
_NEST = 40
_WORDS = ("machine", "date", "torch", "triton", "python", "onepass", "device", "note")
_MAPS = ("packages", "ceilings", "clocks", "peers", "checks", "refused", "host_us", "overhead_us")
_CEILINGS = ("copy 2 GiB TB/s", "read 1 GiB TB/s", "empty kernel us")
_INSIDE = {"packages": str, "ceilings": float, "peers": str, "refused": str, "checks": float}
_NAMES = ("op", "with", "cache", "stream", "dtype")
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Control, format and line-breaking characters: what can move a cursor, hide text or start an escape sequence."""


def plain(text: str, most: int = 400) -> str:
    r"""Words fit for one line of a terminal: what could be an escape sequence is spelled out, what is too long is cut.

    >>> print(plain("a\x1b[31mred\n"))
    a\x1b[31mred\n
    """
    safe = "".join(c if unicodedata.category(c) not in _UNSAFE else repr(c)[1:-1] for c in text[: most + 1])
    return safe if len(safe) <= most else safe[:most] + "..."


def document(path: Path) -> dict[str, Any]:
    """The document in a file, checked and with words fit to print. OSError, or ValueError in one line that says what is wrong."""
    size = path.stat().st_size
    if size > LARGEST:
        raise ValueError(f"{path} is no file of results: it has {size >> 20} MB, more than {LARGEST >> 20}")
    try:
        found = json.loads(path.read_bytes().decode())
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no file of results: it is not text") from None
    except RecursionError:
        raise ValueError(f"{path} is no file of results: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is no file of results: {plain(str(error))}") from None
    wrong = complaint(found)
    if wrong:
        raise ValueError(f"{path} is no file of results: {plain(wrong)}")
    cleaned: dict[str, Any] = _clean(found)
    return cleaned


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(key): _clean(inner) for key, inner in value.items()}
    return [_clean(inner) for inner in value] if isinstance(value, list) else value


def complaint(found: Any) -> str:
    """What keeps a document from being one of ours; empty if nothing does."""
    if not isinstance(found, dict):
        return f"it is {_kind(found)}, not an object"
    if _depth(found) > _NEST:
        return "it is nested too deeply"
    for key in _WORDS:
        if key in found and not isinstance(found[key], str):
            return f"`{key}` is {_kind(found[key])}, not a string"
    for key in _MAPS:
        if not isinstance(found.get(key, {}), dict):
            return f"`{key}` is {_kind(found[key])}, not an object"
    for key, kind in _INSIDE.items():
        for name, value in found.get(key, {}).items():
            if not (isinstance(value, str) if kind is str else _number(value)):
                return f"`{key}` has {_kind(value)} as {name}, not a {'string' if kind is str else 'number'}"
    for when, clocks in found.get("clocks", {}).items():
        if not isinstance(clocks, dict) or not all(_number(value) for value in clocks.values()):
            return f"`clocks` {when} are not an object of numbers"
    if "threads" in found and not _count(found["threads"]):
        return "`threads` is not a positive whole number"
    for key in ("machine", "date", "torch"):
        if key not in found:
            return f"it has no `{key}`"
    if not isinstance(found.get("rows", []), list):
        return f"`rows` is {_kind(found['rows'])}, not a list"
    device = found.get("device", "cpu" if "threads" in found else "cuda")
    if device not in ("cpu", "cuda"):
        return "`device` is neither cpu nor cuda"
    if "ceilings" in found:
        for name in _CEILINGS:
            if not _number(found["ceilings"].get(name)) or found["ceilings"][name] <= 0:
                return f"`ceilings` has no positive `{name}`"
    for number, row in enumerate(found.get("rows", [])):
        wrong = _row(row)
        if not wrong and device == "cuda" and "best copy" not in row["us"] and "ceilings" not in found:
            wrong = "has no time of a best copy, and there are no `ceilings`"
        if wrong:
            return f"row {number} {wrong}"
    for key in ("host_us", "overhead_us"):
        for name, us in found.get(key, {}).items():
            if not _time(us):
                return f"`{key}` of {name} is {_kind(us)}, not one or more positive times"
    return "" if "rows" in found else "it has no `rows`"


def _row(row: Any) -> str:
    if not isinstance(row, dict):
        return f"is {_kind(row)}, not an object"
    for key in ("op", "shape", "bytes", "us"):
        if key not in row:
            return f"has no `{key}`"
    for key in _NAMES:
        if key in row and not isinstance(row[key], str):
            return f"has {_kind(row[key])} as `{key}`, not a string"
    shape = row["shape"]
    if not isinstance(shape, list) or not 1 <= len(shape) <= 8 or not all(_count(size) for size in shape):
        return "has a `shape` that is not a short list of positive whole numbers"
    if ("latent" in row or "normed" in row) and len(shape) < 2 + ("normed" in row):
        return "has a `shape` with too few numbers for its op"
    if "normed" in row and not _count(row["normed"]):
        return "has a `normed` that is not a positive whole number"
    if not _count(row["bytes"]):
        return "has `bytes` that are not a positive whole number"
    for key in ("us", "behind_us"):
        times = row.get(key, {})
        if not isinstance(times, dict):
            return f"has {_kind(times)} as `{key}`, not an object"
        for name, us in times.items():
            if not _time(us, signed=key == "behind_us"):
                return f"has no usable times of {name} in `{key}`"
    if "onepass" not in row["us"]:
        return "has no time of onepass"
    others = row.get("others", 0.0)
    return "" if _number(others) and others >= 0 else "has `others` that is not a share"


def _number(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18 and math.isfinite(value)
    )


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 60


def _time(us: Any, signed: bool = False) -> bool:
    times = us if isinstance(us, list) else [us]
    return 0 < len(times) <= 1000 and all(_number(t) and (signed or t > 0) for t in times)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _depth(value: Any) -> int:
    """How deep objects and lists are nested, without recursion."""
    deepest, left = 0, [(value, 1)]
    while left:
        inner, depth = left.pop()
        deepest = max(deepest, depth)
        if depth > _NEST:
            break
        if isinstance(inner, (dict, list)):
            left += [(each, depth + 1) for each in (inner.values() if isinstance(inner, dict) else inner)]
    return deepest
