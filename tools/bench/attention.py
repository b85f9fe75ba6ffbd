"""``python -m tools.bench.attention``: the attention of a decode step, beside those of torch, on a GPU.

One query per sequence, 32 + 8 heads of 128 columns, bfloat16, a mask of zeros as a static cache has one. Every call is
timed in a CUDA graph over rotating inputs, in a chain of itself and behind an ordinary kernel: two medians, of which the
smaller counts. "default" is what torch chooses, "flash" its flash kernel, which takes no mask, and "unsplit" its
memory-efficient kernel as `onepass.patch(batch_invariant=True)` calls it where onepass has none. The floor reads keys and
values once.

For each, 200 calls are repeated with equal inputs, and every sequence of a batch is compared with a call of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.suite.timing import Behind, graph_times
from onepass.models.forwards.attend import attend_unsplit
from onepass.ops.attention.op import attend
from onepass.testing.tensors import same_bytes

from . import common, markdown

HEADS, KEYS, COLUMNS = 32, 8, 128
SIZES: Final = tuple((batch, context) for context in (64, 128, 256, 1024, 8192) for batch in (1, 4, 16))
REPEATS: Final = 200
BANDWIDTH: Final = 4.55e12
"""Bytes per second that the floor assumes, as in `tools.bench.models`."""
LARGE: Final = 200 << 20
"""Bytes of rotating inputs: more than a cache holds."""

Call = Callable[[], Tensor]
Row = dict[str, Any]


class Problem:
    """One set of inputs."""

    def __init__(self, batch: int, context: int) -> None:
        make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.q = make(batch, 1, HEADS, COLUMNS).transpose(1, 2)
        self.k, self.v = make(batch, KEYS, context, COLUMNS), make(batch, KEYS, context, COLUMNS)
        self.mask: Tensor | None = torch.zeros(batch, 1, 1, context, device="cuda", dtype=torch.bfloat16)

    def alone(self, sequence: int) -> Problem:
        """One sequence of these inputs."""
        one = object.__new__(Problem)
        one.q, one.k, one.v = (t[sequence : sequence + 1] for t in (self.q, self.k, self.v))
        one.mask = None if self.mask is None else self.mask[sequence : sequence + 1]
        return one


def ours(p: Problem) -> Tensor:
    """onepass's kernel."""
    return attend(p.q, p.k, p.v, p.mask, COLUMNS**-0.5)


def default(p: Problem) -> Tensor:
    """What torch chooses."""
    return F.scaled_dot_product_attention(p.q, p.k, p.v, attn_mask=p.mask, scale=COLUMNS**-0.5, enable_gqa=True)


def flash(p: Problem) -> Tensor:
    """torch's flash kernel."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(p.q, p.k, p.v, scale=COLUMNS**-0.5, enable_gqa=True)


def unsplit(p: Problem) -> Tensor:
    """torch's memory-efficient kernel."""
    return attend_unsplit(p.q, p.k, p.v, p.mask, COLUMNS**-0.5, 0)


CONTENDERS: Final = {"onepass": ours, "default": default, "flash": flash, "unsplit": unsplit}


def timed(row: Row, contenders: Mapping[str, Callable[[Any], Tensor]], problems: Sequence[Any], behind: Behind) -> Row:
    """``row`` with the times of all contenders, and how many calls and sequences had other bytes."""
    row |= {"us": {}, "behind": {}, "other_runs": {}, "other_alone": {}}
    first_problem = problems[0]
    for name, function in contenders.items():
        calls: list[Call] = [partial(function, p) for p in problems]
        row["us"][name] = min(graph_times(calls, chain_us=800.0, replays=9))
        row["behind"][name] = min(behind.times(calls))
        first = function(first_problem).clone()
        row["other_runs"][name] = sum(not same_bytes(function(first_problem), first) for _ in range(REPEATS))
        parts = [function(first_problem.alone(b)) for b in range(row["batch"])]
        row["other_alone"][name] = sum(not same_bytes(part, first[b : b + 1]) for b, part in enumerate(parts))
    return row


def sized(batch: int, context: int, size: int) -> Row:
    """The beginning of a row whose calls must read ``size`` bytes."""
    return {"batch": batch, "context": context, "floor": size / BANDWIDTH * 1e6}


def measured(batch: int, context: int, behind: Behind) -> Row:
    """The row of one size."""
    size = 2 * batch * KEYS * context * COLUMNS * 2
    problems = [Problem(batch, context) for _ in range(max(2, min(8, -(-LARGE // size))))]
    return timed(sized(batch, context, size), CONTENDERS, problems, behind)


def table(rows: list[Row]) -> str:
    """Microseconds in a chain and, in brackets, behind an ordinary kernel."""
    names = tuple(rows[0]["us"])
    lines = []
    for row in rows:
        cells = [f"{row['us'][name]:.1f} ({row['behind'][name]:.1f})" for name in names]
        lines.append((str(row["context"]), str(row["batch"]), f"{row['floor']:.1f}", *cells))
    return "\n".join(markdown.table(("context", "batch", "floor", *names), lines, 0))


def run(about: str | None, sizes: Sequence[tuple[int, int]], measure: Callable[[int, int, Behind], Row]) -> None:
    """Measure all sizes, print the table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here, after every row")
    options = parser.parse_args()
    report: dict[str, Any] = {**common.head("cuda"), "rows": []}
    behind = Behind()
    with torch.inference_mode():
        for batch, context in sizes:
            report["rows"].append(measure(batch, context, behind))
            common.write(report, options.json)
    print(table(report["rows"]))
    found = ("other_runs", "other_alone", "difference")
    print(json.dumps({key: [row[key] for row in report["rows"]] for key in found if key in report["rows"][0]}))


if __name__ == "__main__":
    run(__doc__, SIZES, measured)
