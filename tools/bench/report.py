"""``python -m tools.bench.report FILE...``: renders result files next to the first of them.

It writes README.md with every number, time.svg and roofline.svg; with ``--readme PAGE...``
also the tables between the markers of those pages. README.md has the tokens per second of the models.json next to it, and
names the other files it was made from, so that a test can render it again and compare.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite.results import BEST, COMPILED, EAGER, OURS, STREAM, Results, Row, load
from benchmarks.suite.words import BEHIND, BEHIND_WORDS, ahead_words, ceiling_words, compiled_words

from .generating import FORMS
from .markdown import filled, table
from .svg import roofline_svg, time_svg

SHORT = "speed"
"""The markers of the table in docs/performance.md."""
SOURCE = "<!-- made by `python -m tools.bench.report` from: "
HEADLINES = (
    "rms_norm_fused_fp8",
    "rms_norm",
    "gemv_and_partial_norm",
    "qk_rms_norm",
    "fused_rope_rmsnorm_quantization",
)
DECODE_STEP = "decode step"
MODELS = "models.json"
"""The file of `tools.bench.models` next to the results: its `generate()` is part of the page."""
EAGER_FORMS = ("dynamic", "dynamic-patched", "dynamic-decode")


def setup(results: Results) -> str:
    """Machine, date, versions and unit in a sentence."""
    run = results.runs[0]
    dates = " and ".join(sorted({str(run["date"]) for run in results.runs}))
    if results.device == "cpu":
        return (
            f"{results.machine}, {run.get('threads', 'unknown')} threads, {dates}, bfloat16, microseconds per call, contenders take "
            f"turns; torch {run['torch']}."
        )
    return (
        f"{results.machine}, {dates}, bfloat16, microseconds per call in a CUDA graph with rotating inputs; torch {run['torch']}, "
        f"Triton {run.get('triton', 'unknown')}."
    )


def ceiling(results: Results) -> str:
    """What a row's share of the ceiling refers to."""
    stream = "The ceiling is a memory stream of the same size, which takes turns with the contenders."
    note = f" {results.runs[0]['note']}" if results.runs[0].get("note") else ""
    return f"{stream if results.device == 'cpu' else ceiling_words(results)}{note}"


# --- the short table ------------------------------------------------------------------------------------------------


def headlines(results: Results) -> list[Row]:
    """Per op, the fewest rows and the most bytes at its main columns; per decode step, the smallest batch."""
    found: list[Row] = []
    for op in HEADLINES:
        rows = results.main(op) if op in results.ops else []
        if rows:
            found += [rows[0], *(row for row in rows[1:] if row is max(rows, key=lambda row: row.bytes))]
    return [*found, *(results.main(op)[0] for op in results.ops if op.startswith(DECODE_STEP))]


def short_table(results: Results) -> str:
    """One line per headline: time in a chain and behind a kernel, share of the ceiling, best torch.compile, eager."""
    gpu = results.device == "cuda"
    heads = ["op", "shape", "onepass, us"]
    heads += ["behind a kernel: onepass / torch.compile"] if gpu else []
    heads += ["of the ceiling", "torch.compile", "torch eager"]
    rows = []
    for row in headlines(results):
        name = row.op if row.op.startswith(DECODE_STEP) else f"`{row.op}`"
        cells = [name, row.words, f"**{row.ours:.2f}**", *([_behind(row)] if gpu else []), _share(row, results)]
        cells += [_peer(row.best(names), row.ours, results.quiet) for names in (COMPILED, (EAGER,))]
        rows.append(cells)
    return "\n".join(table(heads, rows, 2))


def _share(row: Row, results: Results) -> str:
    return row.share_words if results.quiet else ""


def _behind(row: Row) -> str:
    if OURS not in row.behind_us:
        return "not measured"
    theirs = row.behind_kernel.best(COMPILED)
    return f"{row.behind_kernel.ours:.2f} / {'not measured' if theirs is None else f'{theirs:.2f}'}"


def _peer(us: float | None, ours: float, quiet: bool = True) -> str:
    ratio = f" ({us / ours:.2f}x)" if us is not None and quiet else ""
    return "" if us is None else f"{us:.2f}{ratio}"


def _brackets(results: Results) -> str:
    return "Brackets show how many times longer than onepass. " if results.quiet else ""


def section(results: Results, folder: str) -> str:
    """The text of docs/performance.md: the short table, the plot, and links to the rest."""
    shown = folder.removeprefix("../")
    return "\n".join(
        (
            f"{setup(results)} {ahead_words(results)}",
            "",
            short_table(results),
            "",
            f"- {ceiling(results)}",
            f"- {_brackets(results)}{compiled_words(results)}.",
            "",
            f"![time against the number of rows]({folder}/time.svg)",
            "",
            f"Every shape and peer: [{shown}/README.md]({folder}/README.md).",
        )
    )


# --- every number ---------------------------------------------------------------------------------------------------


def tables(results: Results) -> str:
    """One table per op with its contenders; on a GPU a second one, behind an ordinary kernel."""
    parts = []
    pairs = results.behind_kernel
    for op in results.ops:
        parts += [f"## {op}", "", *_table(results, op), ""]
        if op in pairs.ops:
            parts += [f"{BEHIND}:", "", *_table(pairs, op, shares=False), ""]
    return "\n".join(parts)


def _table(results: Results, op: str, shares: bool = True) -> list[str]:
    rows = results.of(op)
    others = [name for name in results.contenders if name != OURS and any(name in row.us for row in rows)]
    heads = ["shape", "onepass", *(["of the ceiling"] if shares else []), *others]
    lines = []
    for row in rows:
        cells = [_peer(min(row.us[n]) if n in row.us else None, row.ours, results.quiet) for n in others]
        share = [_share(row, results)] if shares else []
        lines.append([row.words, f"**{row.ours:.2f}**", *share, *cells])
    return table(heads, lines, 1)


def host_table(results: Results) -> str:
    """The host time per call."""
    rows = ([name, f"{min(us):.2f}"] for name, us in results.host.items())
    return "\n".join(("## Host time of an eager call at M = 1", "", *table(["", "us"], rows, 1), ""))


def generate_table(report: dict[str, Any]) -> str:
    """Tokens per second of `generate()` with its default cache, which launches every kernel from Python."""
    ways = [FORMS[name][0] for name in EAGER_FORMS]
    rows = []
    for row in report.get("generated", []):
        rates = [row["batch"] * 1e6 / row["us_per_token"][way] if way in row["us_per_token"] else None for way in ways]
        if rates[0] is not None and any(rates[1:]):
            cells = ["" if rate is None else f"{rate:.1f} ({rate / rates[0]:.2f}x)" for rate in rates[1:]]
            rows.append([row["model"], str(row["batch"]), f"{rates[0]:.1f}", *cells])
    if not rows:
        return ""
    kept = [0, *(i for i in range(1, len(ways)) if any(row[i + 2] for row in rows))]
    heads = ["model", "batch", *(["unpatched", "`onepass.patch`", "`decode=True`"][i] for i in kept)]
    rows = [[*row[:2], *(row[i + 2] for i in kept)] for row in rows]
    about = (
        f"Tokens per second, prompts included, of models with random weights and transformers' default cache "
        f"({report['date']}, torch {report['torch']}, transformers {report['transformers']}). The host launches every kernel "
        "of every step."
    )
    return "\n".join(("## Eager `generate()`", "", about, "", *table(heads, rows, 1), ""))


def full(results: Results, sources: Sequence[str], models: dict[str, Any] | None = None) -> str:
    """The page of tables, with those of whole ``models`` if there are any."""
    stream = "".join(
        f" `{name}` moves as many bytes and computes nothing." for name in (STREAM, BEST) if name in results.contenders
    )
    small = "Where a call is too small for its bytes to matter, its share of the ceiling is marked latency. "
    small = "" if results.has_best or results.banner else small
    behind = ""
    if results.device == "cuda":
        behind = BEHIND_WORDS if results.behind_kernel.rows else f"{BEHIND}: not measured in this run."
    parts = [
        f"{SOURCE}{' '.join(sources)} -->",
        f"# onepass on {results.machine}",
        "",
        *([f"**{results.banner}**", ""] if results.banner else []),
        setup(results),
        "",
        *(
            f"- {words.strip()}"
            for words in (f"{ceiling(results)}{stream}", f"{_brackets(results)}{small}", behind)
            if words
        ),
        "",
        "![time against the number of rows](time.svg)",
        "",
        "![bytes per second against bytes moved](roofline.svg)",
        "",
        tables(results),
        *([host_table(results)] if results.host else []),
        *([text] if models and (text := generate_table(models)) else []),
        *_ahead(results),
    ]
    return "\n".join(parts)


def _ahead(results: Results) -> list[str]:
    if results.banner:
        return []
    parts = ["## Where a peer is ahead", "", ahead_words(results), ""]
    for title, found in (("In a chain", results), (BEHIND, results.behind_kernel)):
        if found.behind:
            lines = [
                f"- {row.op} {row.words}: {name} {us:.2f} us, {row.ours / us - 1:.1%} ahead"
                for row, name, us in found.behind
            ]
            parts += [f"{title}:", "", *lines, ""]
    return parts


# --- files ----------------------------------------------------------------------------------------------------------


def files(paths: Sequence[Path]) -> dict[str, str]:
    """The files that belong next to the first of these, by name."""
    results = load(paths)
    folder = paths[0].parent
    names = [Path(os.path.relpath(path, folder)).as_posix() for path in paths]
    models = folder / MODELS
    return {
        "README.md": full(results, names, json.loads(models.read_text()) if models.exists() else None),
        "time.svg": time_svg(results),
        "roofline.svg": roofline_svg(results),
    }


def sources(readme: Path) -> list[Path]:
    """The result files that a page of tables was made from."""
    first = readme.read_text().splitlines()[0]
    names = re.fullmatch(r"<!-- made by `[\w. -]+` from: (.+) -->", first)
    if names is None:
        raise ValueError(f"{readme} does not name the files it was made from")
    return [readme.parent / name for name in names[1].split()]


def with_section(text: str, results: Results, folder: str) -> str:
    """A page with the tables that it has markers for."""
    return filled(text, {SHORT: section(results, folder)})


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--readme", nargs="+", type=Path, default=[], help="also write the tables of these pages")
    options = parser.parse_args()
    for name, text in files(options.files).items():
        (options.files[0].parent / name).write_text(text)
    for path in options.readme:
        folder = Path(os.path.relpath(options.files[0].parent, path.parent)).as_posix()
        path.write_text(with_section(path.read_text(), load(options.files), folder))


if __name__ == "__main__":
    main()
