"""Reads a result file without trusting it: it may come from anywhere, and its strings end up on a terminal."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LARGEST = 64 << 20
"""Bytes. A full run of every op is under 100 KB."""
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Control, format and line-breaking characters: they can move a cursor, hide text or start an escape sequence."""


def _number(value: Any) -> bool:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and abs(value) < 1e18 and math.isfinite(value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 60


def _times(value: Any, least: float = 0.0) -> bool:
    times = value if isinstance(value, list) else [value]
    return 0 < len(times) <= 1000 and all(_number(t) and t > least for t in times)


Kind = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words and as a test."""
_STRING: Kind = "a string", lambda value: isinstance(value, str)
_NUMBER: Kind = "a finite number", _number
_POSITIVE: Kind = "a positive number", lambda value: _number(value) and value > 0
_SHARE: Kind = "a share", lambda value: _number(value) and value >= 0
_COUNT: Kind = "a positive whole number", _count
_SHAPE: Kind = (
    "a short list of positive whole numbers",
    lambda value: isinstance(value, list) and 1 <= len(value) <= 8 and all(map(_count, value)),
)
_TIMES: Kind = "one or more positive times", _times
_DIFFERENCES: Kind = "one or more times", lambda value: _times(value, -math.inf)
_DEVICE: Kind = "cpu or cuda", lambda value: value in ("cpu", "cuda")
_ROW = {
    "op!": _STRING,
    "shape!": _SHAPE,
    "bytes!": _COUNT,
    "us!": {"onepass!": _TIMES, "*": _TIMES},
    "behind_us": {"*": _DIFFERENCES},
    "refused": {"*": _STRING},
    "normed": _COUNT,
    "others": _SHARE,
    **dict.fromkeys(("with", "cache", "stream", "dtype"), _STRING),
}
_CEILINGS = dict.fromkeys(("copy 2 GiB TB/s!", "read 1 GiB TB/s!", "empty kernel us!"), _POSITIVE)
_DOCUMENT: dict[str, Any] = {
    **dict.fromkeys(("machine!", "date!", "torch!", "triton", "python", "onepass", "note"), _STRING),
    "device": _DEVICE,
    "threads": _COUNT,
    "ceilings": {**_CEILINGS, "*": _NUMBER},
    "clocks": {"*": {"*": _NUMBER}},
    "checks": {"*": _NUMBER},
    **{key: {"*": _STRING} for key in ("packages", "peers", "refused")},
    **{key: {"*": _TIMES} for key in ("host_us", "overhead_us")},
    "rows!": [_ROW],
}
"""The format: ``!`` marks required keys, ``*`` stands for any other key. Keys that are not listed are ignored."""


def plain(text: str, most: int = 400) -> str:
    r"""Text that is safe on one line of a terminal: unsafe characters are spelled out, and long text is cut.

    >>> print(plain("a\x1b[31mred\n"))
    a\x1b[31mred\n
    """
    safe = "".join(c if unicodedata.category(c) not in _UNSAFE else repr(c)[1:-1] for c in text[: most + 1])
    return safe if len(safe) <= most else safe[:most] + "..."


def document(path: Path) -> dict[str, Any]:
    """The document in a file, checked and with safe strings. Raises OSError, or a ValueError of one line."""
    size = path.stat().st_size
    if size > LARGEST:
        raise ValueError(f"{path} is not a result file: it has {size >> 20} MB, more than {LARGEST >> 20}")
    try:
        found = json.loads(path.read_bytes().decode())
        wrong = _complaint(found, _DOCUMENT, "it") or _inconsistency(found)
        cleaned: dict[str, Any] = _clean(found)
    except UnicodeDecodeError:
        wrong = "it is not text"
    except RecursionError:
        wrong = "it is nested too deeply"
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise ValueError(f"{path} is not a result file: {plain(wrong)}")
    return cleaned


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(key): _clean(inner) for key, inner in value.items()}
    return [_clean(inner) for inner in value] if isinstance(value, list) else value


def _complaint(value: Any, format_: Any, where: str) -> str:
    """The first violation of a format; empty if there is none."""
    if isinstance(format_, tuple):
        kind, test = format_
        return "" if test(value) else f"{where} is not {kind}"
    if isinstance(format_, list):
        if not isinstance(value, list):
            return f"{where} is not a list"
        complaints = (_complaint(each, format_[0], f"row {i}") for i, each in enumerate(value))
        return next(filter(None, complaints), "")
    if not isinstance(value, dict):
        return f"{where} is not an object"
    prefix = "" if where == "it" else f"{where} "
    for key in (key[:-1] for key in format_ if key.endswith("!")):
        if key not in value:
            return f"{where} has no `{key}`"
    for key, inner in value.items():
        kind = format_.get(f"{key}!", format_.get(key, format_.get("*")))
        if kind is not None and (wrong := _complaint(inner, kind, f"{prefix}`{key}`")):
            return wrong
    return ""


def _least_sizes(row: Mapping[str, Any]) -> int:
    """How many numbers the shape of a row needs for its words (`results.shape_words`)."""
    if "latent" in row:
        return 2
    if "cache" in row:
        return 4
    return 3 if "normed" in row else 1


def _inconsistency(found: Mapping[str, Any]) -> str:
    """The first inconsistency between values; empty if there is none."""
    device = found.get("device", "cpu" if "threads" in found else "cuda")
    for number, row in enumerate(found["rows"]):
        if len(row["shape"]) < _least_sizes(row):
            return f"row {number} has a `shape` with too few numbers for its op"
        if device == "cuda" and "best copy" not in row["us"] and "ceilings" not in found:
            return f"row {number} has no time of a best copy, and there are no `ceilings`"
    return ""
