"""Sentences of tables and pages about how times were measured and what they are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from .results import BEST, COMPILED, Results

BEHIND = "Behind an ordinary kernel"
BEHIND_WORDS = (
    "In a chain of the same op, programmatic launch overlaps each call with the previous one. In a model the previous kernel often "
    "does not use it. So each call was also timed behind a small torch kernel: the time of (kernel, call), less that of the kernel."
)


def ceiling_words(results: Results) -> str:
    """What times on a GPU are compared with."""
    if results.has_best:
        without = sum(BEST not in row.us for row in results.rows)
        alone = f" {without} rows have no such copy and are compared with that rate alone." if without else ""
        return (
            "The ceiling of a row is the fastest of several copies of as many bytes, measured next to it with programmatic launch; "
            "for ops that write almost nothing it is a read. Rows over 128 MiB are also compared with the rate of a 2 GiB copy, or "
            f"of a 1 GiB read.{alone}"
        )
    measured = [run["ceilings"] for run in results.runs if run.get("ceilings")]
    copies, reads = (
        [found[name] for found in measured if name in found] for name in ("copy 2 GiB TB/s", "read 1 GiB TB/s")
    )
    if not copies or not reads:
        return "No ceiling was measured."
    return (
        f"Ceiling, from the same run: a large copy at {_range(copies)} TB/s, or a large read at {_range(reads)} for ops that write "
        "almost nothing. The best copy of each row's own size was not measured, and small rows can exceed this ceiling."
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def compiled_words(results: Results) -> str:
    """Which modes the torch.compile column is the best of, and in how many rows."""
    if results.device == "cpu":
        return "`torch.compile` is in its default mode"
    best = sum(COMPILED[1] in row.us for row in results.rows)
    if best == len(results.rows):
        return "`torch.compile` is the better of its default and max-autotune modes"
    return f"`torch.compile` is in its default mode, or max-autotune where that is faster ({best} of {len(results.rows)} rows have it)"


def ahead_words(results: Results) -> str:
    """In how many shapes onepass is fastest, in a chain and behind a kernel, and who the peers are."""
    if results.banner:
        return results.banner
    fastest = f"onepass is fastest in {len(results.rows) - len(results.behind)} of {len(results.rows)} shapes"
    if results.device == "cpu":
        return f"{fastest}. {results.peer_words}"
    pairs = results.behind_kernel
    wins = len(pairs.rows) - len(pairs.behind)
    behind = (
        f", and in {wins} of {len(pairs.rows)} behind another kernel"
        if pairs.rows
        else "; not measured behind a kernel"
    )
    return f"{fastest} back to back{behind}. {results.peer_words}"
