"""The tables that compare ops with other libraries: one number per op in README.md, every row in docs/performance.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.suite.qk_norm import HALVES
from benchmarks.suite.results import BEST, OURS, load
from tools.bench.markdown import filled, table

from .page import Page

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "benchmarks/h200"
LIBRARIES: Final = FOLDER / "libraries.json"
COPY: Final = "copy"
NO_PEER: Final = (COPY, OURS, BEST, HALVES)
NAMES: Final = {"torch.compile max": "max-autotune"}
WORDS: Final = {
    "rms_norm": "RMSNorm, with residual add",
    "rms_norm_fused_fp8": "RMSNorm to FP8 codes and scales",
    "gemv_and_partial_norm": "projection, norm of its first columns",
    "linear": "linear with norm, activation, add",
    "qk_rms_norm": "norms of q and k, with RoPE",
    "fused_rope_rmsnorm_quantization": "MLA: norm, RoPE, paged cache write",
}
"""What one launch of each op does."""
ELSEWHERE: Final = {"qk_rms_norm": ("bench.json", [1, 6144, 1024]), "linear": ("linear-peers.json", [1, 4096, 4096])}
"""Ops that the run with every library does not have: the file, and the shape of one token."""


class Comparison(NamedTuple):
    """An op's time for one token next to that of its fastest peer."""

    ours: float
    peer: str
    theirs: float


def best(op: str) -> Comparison:
    """From the run with every library, or from the file in `ELSEWHERE`."""
    if op in ELSEWHERE:
        file, shape = ELSEWHERE[op]
        row = next(row for row in load([FOLDER / file]).rows if row.op == op and list(row.shape) == shape)
        times = {name: min(us) for name, us in row.us.items() if name not in NO_PEER}
        ours = row.ours
    else:
        first = next(row for row in libraries()["rows"] if row["op"] == op)
        times = {name: us for name, us in first["us"].items() if name not in NO_PEER}
        ours = first["us"][OURS]
    peer = min(times, key=times.__getitem__)
    return Comparison(ours, NAMES.get(peer, peer), times[peer])


def libraries() -> dict[str, Any]:
    """The run with every library."""
    return dict(json.loads(LIBRARIES.read_text()))


def brief() -> str:
    """One number per op, for one token."""
    rows = []
    for op, words in WORDS.items():
        ours, peer, theirs = best(op)
        rows.append([f"`{op}`", words, f"{ours:.2f}", f"**{theirs / ours:.2f}x** ({peer})"])
    return "\n".join(table(["op", "in one launch", "µs", "vs best peer"], rows, 2))


def every_row() -> str:
    """The whole run with every library."""
    run, rows, last = libraries(), [], ""
    for row in run["rows"]:
        us = row["us"]
        others = {name: time for name, time in us.items() if name not in (COPY, OURS, "MAX")}
        other = "".join(f"{time:.3g} {name}" for name, time in others.items())
        name = "" if row["op"] == last else f"`{row['op']}`"
        rows.append([name, row["shape"], *(f"{us[column]:.3g}" for column in (COPY, OURS, "MAX")), other])
        last = row["op"]
    head = table(["op", "shape", COPY, OURS, "MAX", "best of the others"], rows, 2)
    words = f"onepass was fastest in {run['ahead']} of the {run['shapes']} shapes of that run"
    return "\n".join((*head, "", f"{words}; {len(rows)} of them are shown."))


def _page(path: str, name: str, body: str) -> str:
    return filled((ROOT / path).read_text(), {name: body})


PAGES: Final = (
    Page(Path("README.md"), lambda: _page("README.md", "peers", brief())),
    Page(Path("docs/performance.md"), lambda: _page("docs/performance.md", "libraries", every_row())),
)
