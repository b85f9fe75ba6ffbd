"""``python -m onepass.bench.report FILE...``: everything that is made from result files, beside the first of them.

README.md with every number, bench.html, time.svg and roofline.svg; with ``--readme PAGE`` also the short table between that
page's markers. What it wrote names the files it was made from, so a test can make it again and compare.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from . import charts, page
from .results import COMPILED, EAGER, OURS, STREAM, Results, Row, load

BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"
SOURCE = "<!-- made by `python -m onepass.bench.report` from: "
HEADLINES = (
    "rms_norm_fused_fp8",
    "rms_norm",
    "gemv_and_partial_norm",
    "qk_rms_norm",
    "fused_rope_rmsnorm_quantization",
)
DECODE_STEP = "decode step"


def about(results: Results) -> str:
    """Machine, date, versions and ceilings in a sentence or two."""
    run = results.runs[0]
    dates = " and ".join(sorted({str(run["date"]) for run in results.runs}))
    note = f" {run['note']}" if run.get("note") else ""
    if results.device == "cpu":
        return (
            f"{results.machine}, {run['threads']} threads, {dates}, bfloat16, microseconds a call, contenders taking turns; torch "
            f"{run['torch']}. The ceiling is a memory stream of the same size, in turn with the rest.{note}"
        )
    copies = [found["ceilings"]["copy 2 GiB TB/s"] for found in results.runs]
    reads = [found["ceilings"]["read 1 GiB TB/s"] for found in results.runs]
    return (
        f"{results.machine}, {dates}, bfloat16, microseconds a call in a CUDA graph with rotating inputs; torch {run['torch']}, "
        f"Triton {run['triton']}. Ceiling, of the same run: a copy at {_range(copies)} TB/s, or a read at {_range(reads)} for ops "
        f"that write next to nothing.{note}"
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


# --- the short table ------------------------------------------------------------------------------------------------


def headlines(results: Results) -> list[Row]:
    """Of each op the fewest rows and the most bytes, with its main columns; of a decode step the fewest."""
    found: list[Row] = []
    for op in HEADLINES:
        rows = results.main(op) if op in results.ops else []
        if rows:
            found += [rows[0], *(row for row in rows[1:] if row is max(rows, key=lambda row: row.bytes))]
    return [*found, *(results.main(op)[0] for op in results.ops if op.startswith(DECODE_STEP))]


def short_table(results: Results) -> str:
    """A line a headline: time, share of the ceiling, torch.compile at its best, eager."""
    lines = [
        "| op | shape | onepass, us | of the ceiling | torch.compile | torch eager |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in headlines(results):
        name = row.op if row.op.startswith(DECODE_STEP) else f"`{row.op}`"
        cells = [_peer(row.best(names), row.ours) for names in (COMPILED, (EAGER,))]
        lines.append(f"| {name} | {row.words} | **{row.ours:.2f}** | {row.share_words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _peer(us: float | None, ours: float) -> str:
    return "" if us is None else f"{us:.2f} ({us / ours:.2f}x)"


def section(results: Results, folder: str) -> str:
    """What stands between the markers: the short table, the plot, and where the rest is."""
    modes = "the better of its default and max-autotune modes" if results.device == "cuda" else "in its default mode"
    return "\n".join(
        (
            f"{about(results)} In brackets how many times longer; torch.compile is {modes}.",
            "",
            short_table(results),
            "",
            f"![time against the number of rows]({folder}/time.svg)",
            "",
            f"Every shape and peer: [{folder}/README.md]({folder}/README.md); as a page to open: `{folder}/bench.html`.",
        )
    )


# --- every number ---------------------------------------------------------------------------------------------------


def tables(results: Results) -> str:
    """One table an op with those who were measured on it."""
    parts = []
    for op in results.ops:
        rows = results.of(op)
        others = [name for name in results.contenders if name != OURS and any(name in row.us for row in rows)]
        parts += [f"## {op}", "", f"| shape | onepass | of the ceiling | {' | '.join(others)} |"]
        parts.append(f"|---|---:|---:|{'---:|' * len(others)}")
        for row in rows:
            cells = [_peer(min(row.us[n]) if n in row.us else None, row.ours) for n in others]
            parts.append(f"| {row.words} | **{row.ours:.2f}** | {row.share_words} | {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def host_table(results: Results) -> str:
    """The host's time of a call."""
    lines = ["## Host time of an eager call at M = 1", "", "| | us |", "|---|---:|"]
    return "\n".join((*lines, *(f"| {name} | {min(us):.2f} |" for name, us in results.host.items()), ""))


def full(results: Results, sources: Sequence[str]) -> str:
    """The page of tables."""
    stream = f" `{STREAM}` moves as many bytes and computes nothing." if STREAM in results.contenders else ""
    behind = [
        f"- {row.op} {row.words}: {name} {us:.2f} us, {row.ours / us - 1:.1%} ahead" for row, name, us in results.behind
    ]
    parts = [
        f"{SOURCE}{' '.join(sources)} -->",
        f"# onepass on {results.machine}",
        "",
        f"{about(results)}{stream} In brackets how many times longer than onepass; where a call is too small for its bytes to "
        "matter, its share of the ceiling is put down to latency. The same as a page to open in a browser: `bench.html`.",
        "",
        "![time against the number of rows](time.svg)",
        "",
        "![bytes a second against bytes moved](roofline.svg)",
        "",
        tables(results),
        *([host_table(results)] if results.host else []),
        "## Where a peer is ahead",
        "",
        *(behind or ["Nowhere."]),
        "",
    ]
    return "\n".join(parts)


# --- files ----------------------------------------------------------------------------------------------------------


def files(paths: Sequence[Path]) -> dict[str, str]:
    """What belongs beside the first of these files, by name."""
    results = load(paths)
    folder = paths[0].parent
    names = [Path(os.path.relpath(path, folder)).as_posix() for path in paths]
    return {
        "README.md": full(results, names),
        "bench.html": page.html(results),
        "time.svg": charts.time_svg(results),
        "roofline.svg": charts.roofline_svg(results),
    }


def sources(readme: Path) -> list[Path]:
    """The result files a page of tables says it was made from."""
    first = readme.read_text().splitlines()[0]
    if not first.startswith(SOURCE):
        raise ValueError(f"{readme} does not say what it was made from")
    return [readme.parent / name for name in first.removeprefix(SOURCE).removesuffix(" -->").split()]


def with_section(text: str, results: Results, folder: str) -> str:
    """A page with the short table between its markers."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{section(results, folder)}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Write what the files give."""
    parser = argparse.ArgumentParser(prog="python -m onepass.bench.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--readme", type=Path, help="also write the short table into this page")
    options = parser.parse_args()
    for name, text in files(options.files).items():
        (options.files[0].parent / name).write_text(text)
    if options.readme:
        folder = Path(os.path.relpath(options.files[0].parent, options.readme.parent)).as_posix()
        options.readme.write_text(with_section(options.readme.read_text(), load(options.files), folder))


if __name__ == "__main__":
    main()
