"""Result files as a Markdown table, for the README."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"
SMALL = 4_000_000
"""Bytes up to which a low share of the ceiling is put down to latency."""


def markdown(report: dict[str, Any]) -> str:
    """One line a shape: microseconds, share of the copy ceiling, and how many times longer each peer takes."""
    peers = list(dict.fromkeys(name for row in report["rows"] for name in row["us"] if name != "onepass"))
    copy = report["ceilings"]["copy 2 GiB TB/s"]
    lines = [
        f"{report['machine']}, {report['date']}, bfloat16, microseconds a call in a CUDA graph with rotating inputs; torch "
        f"{report['torch']}, Triton {report['triton']}. Copy ceiling of that run: {copy:.2f} TB/s.",
        "",
        f"| op | shape | onepass | of the copy ceiling | {' | '.join(peers)} |",
        f"|---|---|---:|---:|{'---:|' * len(peers)}",
    ]
    for row in report["rows"]:
        ours = min(row["us"]["onepass"])
        share = row["bytes"] / ours / 1e6 / copy
        shape = shape_words(row)
        cells = [_peer(row["us"].get(name), ours) for name in peers]
        reached = f"{share:.0%}" if share > 0.3 or row["bytes"] > SMALL else "latency"
        lines.append(f"| `{row['op']}` | {shape} | **{ours:.2f}** | {reached} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shape_words(row: dict[str, Any]) -> str:
    """``16 x 7168``; of q and k ``16 x (6144 + 1024)``; of a GEMV ``1 x 2112 x 7168, 1536 normed``; of MLA ``64 x 128 heads, fp8``."""
    rows, *columns = row["shape"]
    if "latent" in row:
        return f"{rows} x {columns[0]} heads{', ' + row['cache'] if 'cache' in row else ''}"
    if "normed" in row:
        return f"{rows} x {columns[0]} x {columns[1]}, {row['normed']} normed"
    return f"{rows} x {columns[0]}" if len(columns) == 1 else f"{rows} x ({' + '.join(map(str, columns))})"


def _peer(times: list[float] | None, ours: float) -> str:
    return "" if times is None else f"{min(times):.2f} ({min(times) / ours:.2f}x)"


def write_into(page: Path, results: Sequence[Path]) -> None:
    """Replace what stands between the markers of ``page`` by a table of each file."""
    text = page.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    tables = "\n\n".join(markdown(json.loads(path.read_text())) for path in results)
    page.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}")


if __name__ == "__main__":
    import sys

    write_into(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
