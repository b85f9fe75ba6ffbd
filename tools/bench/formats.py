"""``python -m tools.bench.formats FILE...``: the tables of `rms_norm_fused_quant` from result files.

It writes formats.md next to the first file, with every row, and with ``--readme PAGE...`` the table of goals between the
markers of those pages. The ceiling of a row is the measured copy of as many bytes. Times at M = 1 are compared with those
of `rms_norm_fused_fp8`, which must be among the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from benchmarks.suite.results import BEST, COMPILED, EAGER, OURS, Results, Row, load
from benchmarks.suite.rms_norm_quant import FORMATS, GATED, OP
from onepass.formats import QUANT_FORMATS

from .goals import Goal, goal_table, times, verdicts
from .markdown import filled, linked, page_options, table, write_pages

FILE, MARKER = "formats.md", "formats"
SOURCE: Final = "<!-- made by `python -m tools.bench.formats` from: "
FP8: Final = "rms_norm_fused_fp8"
FLASHINFER: Final = "FlashInfer"
UNMEASURED: Final = "Not measured on a GPU yet."
MANY: Final = (4096, 16384)


class Sheet:
    """The rows of formats in results, and what their goals refer to."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.rows = [row for row in results.rows if row.op in (OP, GATED)]
        self.fp8 = {row.shape: row for row in results.rows if row.op == FP8 and not row.kind}

    def share(self, row: Row) -> float | None:
        """The share of the ceiling that onepass reaches in a chain."""
        return row.share

    def times_fp8(self, row: Row) -> float | None:
        """How many times as long as `rms_norm_fused_fp8` it takes in a chain; None if that was not measured."""
        plain = self.fp8.get(row.shape)
        return None if plain is None else row.ours / plain.ours

    def times_fp8_behind(self, row: Row) -> float | None:
        """The same behind an ordinary kernel."""
        plain = self.fp8.get(row.shape)
        if plain is None or OURS not in plain.behind_us or OURS not in row.behind_us:
            return None
        return row.behind_kernel.ours / plain.behind_kernel.ours


def bits(row: Row) -> int:
    """Bits of a code; 16 of a norm that is not quantized."""
    return QUANT_FORMATS[FORMATS[row.kind]["format"]].codes.bits if row.kind in FORMATS else 16


def _many(code_bits: int) -> Callable[[Row], bool]:
    return lambda row: row.m in MANY and bits(row) == code_bits


def _one(row: Row) -> bool:
    return row.op == OP and row.m == 1


_NEAR, _FEW = "at least 95% of the ceiling", "at most 1.2 times `rms_norm_fused_fp8`"
GOALS: Final = (
    Goal("8-bit codes, M = 4096 and 16384", _NEAR, _many(8), Sheet.share, 0.95),
    Goal("4-bit codes, M = 4096 and 16384", _NEAR, _many(4), Sheet.share, 0.95),
    Goal("gated norm, M = 4096 and 16384", _NEAR, _many(16), Sheet.share, 0.95),
    Goal("every format, M = 1", _FEW, _one, Sheet.times_fp8, 1.2, unit="x"),
    Goal("every format, M = 1, behind a kernel", _FEW, _one, Sheet.times_fp8_behind, 1.2, unit="x"),
)


def goals(sheet: Sheet) -> str:
    """How many rows reach each goal."""
    return goal_table(GOALS, sheet, sheet.rows)


def rows(sheet: Sheet) -> str:
    """The table of every row, beside that of `rms_norm_fused_fp8`."""
    heads = ["op", "M x N", "onepass", "of the ceiling", "copy", "torch.compile", "torch eager", FLASHINFER, "goal"]
    lines = []
    for row in (*sheet.fp8.values(), *sheet.rows):
        cells = [f"`{row.op.split(',')[0]}`", row.words, f"**{times(row, (OURS,))}**", row.share_words]
        cells += [times(row, names) for names in ((BEST,), COMPILED, (EAGER,), (FLASHINFER,))]
        lines.append([*cells, "; ".join(verdict for _, verdict in verdicts(GOALS, sheet, row))])
    return "\n".join(table(heads, lines, 2))


def full(sheet: Sheet, sources: Sequence[str]) -> str:
    """The page of every row."""
    run = sheet.results.runs[0]
    about = (
        f"{sheet.results.machine}, {run['date']}, torch {run['torch']}, Triton {run.get('triton', 'unknown')}. bfloat16 rows, microseconds "
        "per call back to back / behind an ordinary kernel, the smaller of two medians. The ceiling is the fastest copy of as many "
        "bytes. `torch.compile` is in its default mode. Of FlashInfer's norms, only the one with a static scale runs on this chip; "
        "its FP4 needs a newer one."
    )
    parts = [f"{SOURCE}{' '.join(sources)} -->", f"# Formats on {sheet.results.machine}", "", about, ""]
    refused = [f"- {name}, {row.words}: `{why}`" for row in sheet.rows for name, why in row.refused.items()]
    parts += ["## Goals", "", goals(sheet), "", "## Rows", "", rows(sheet), ""]
    return "\n".join([*parts, *(["## Refused", "", *refused, ""] if refused else [])])


def section(sheet: Sheet | None, folder: str) -> str:
    """The text between the markers of a page: the goals, and a link to every row."""
    if sheet is None or not sheet.rows:
        return UNMEASURED
    words = f"{sheet.results.machine}, {sheet.results.runs[0]['date']}: rows of 7168 columns, in a chain unless stated."
    return linked(words, goals(sheet), folder, FILE)


def with_section(text: str, sheet: Sheet | None, folder: str) -> str:
    """A page with the text that it has markers for."""
    return filled(text, {MARKER: section(sheet, folder)})


def main() -> None:
    """Write the page, and the sections of other pages."""
    options = page_options("python -m tools.bench.formats", __doc__)
    sheet = Sheet(load(options.files))
    write_pages(
        options.files,
        options.readme,
        FILE,
        partial(full, sheet),
        lambda text, folder: with_section(text, sheet, folder),
    )
    print(goals(sheet))


if __name__ == "__main__":
    main()
