"""``onepass trace``: run an op with tracing on, and show where one launch spends its time."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from .. import gemv_and_partial_norm_with_scratch, gemv_trace_blocks
from ..errors import ContractError, Unsupported
from ..trace import PHASES, GmemTrace, NullTrace, Timeline, TraceBuf, percent
from .common import Commands, Progress, UsageError, add_device, at_least, cannot_write, label, table

EPS: Final = 1e-6
MAX_COPIES: Final = 8
WARM_UPS: Final = 3
GPU_COLD: Final = 100_000_000
FILES: Final = "onepass-trace-gemv"
DTYPES: Final = ("bfloat16", "float16", "float32")


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    words = "show where one launch spends its time, block by block"
    parser = commands.add_parser("trace", help=words, description=f"{words.capitalize()}.", allow_abbrev=False)
    parser.set_defaults(run=None, parser=parser)
    ops = parser.add_subparsers(metavar="OP", title="ops")
    words = "trace gemv_and_partial_norm; write a page for the browser and a trace for Perfetto"
    parser = ops.add_parser("gemv", help=words, description=f"T{words[1:]}.", allow_abbrev=False)
    for name, default, meaning in (
        ("n", 2112, "columns of the output: rows of the weight"),
        ("k", 7168, "inner dimension"),
        ("normed", 1536, "how many leading columns are normed"),
        ("m", 1, "rows of the activations"),
    ):
        parser.add_argument(f"--{name}", type=at_least(0), default=default, help=f"{meaning}; default {default}")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="dtype of activations and weights")
    add_device(parser)
    words = "launches to trace, of which the one of median length is shown; default 20"
    parser.add_argument("--runs", type=at_least(1), default=20, help=words)
    parser.add_argument("--out", type=_directory, default=Path("."), metavar="DIR", help="where to write the timeline")
    parser.set_defaults(run=gemv, parser=parser)


def _directory(text: str) -> Path:
    if not Path(text).is_dir():
        raise UsageError(f"there is no directory {text}")
    return Path(text)


def gemv(options: argparse.Namespace) -> int:
    """Trace launches; show the one of median length and write it to files."""
    sizes, runs = (options.m, options.n, options.k, options.normed), options.runs
    try:
        with torch.inference_mode():
            timelines = _record(sizes, getattr(torch, options.dtype), options.device, runs)
    except (ContractError, Unsupported) as error:
        print(error, file=sys.stderr)
        return 2
    timelines.sort(key=lambda timeline: timeline.total)
    median = timelines[(runs - 1) // 2]
    _show(median)
    shortest, longest = timelines[0].total / 1e3, timelines[-1].total / 1e3
    print(f"\nThis is the median of {runs} runs, which took {shortest:.2f} to {longest:.2f} us.\n")
    _write(median, options.out)
    return 0


def _record(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str, runs: int) -> list[Timeline]:
    """Record one timeline per run. Copies of the weights rotate, so that no run finds its own in a cache."""
    m, n, k, normed = sizes
    torch.manual_seed(0)
    act = torch.randn(m, k, dtype=dtype, device=device)
    weight = torch.randn(n, k, dtype=dtype, device=device).div_(math.sqrt(max(k, 1)))
    gamma = 1 + 0.25 * torch.randn(normed, dtype=dtype, device=device)
    trace = GmemTrace.allocate(gemv_trace_blocks(act, weight, gamma), device)
    weights, temperature = _copies(weight, device)
    outputs = act.new_empty(m, normed), act.new_empty(m, max(0, n - normed))
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    parameters = {"N": str(n), "K": str(k), "normed": str(normed), "M": str(m), "dtype": str(dtype)[6:]}
    parameters |= {"blocks": str(trace.blocks), "weights": temperature, "run": f"median of {runs}"}
    timelines: list[Timeline] = []
    buffers: tuple[TraceBuf, ...] = (NullTrace(), trace)
    progress = Progress(runs)
    for run in range(-max(WARM_UPS, len(weights)), runs):
        trace.clear()
        # An untraced launch comes first: threads awake and clocks up, as between the layers of a model.
        for copy, buffer in enumerate(buffers, run - 1):
            weight = weights[copy % len(weights)]
            gemv_and_partial_norm_with_scratch(*outputs, act, weight, gamma, EPS, counter, trace_buf=buffer)
        timeline = Timeline.from_trace(
            trace,
            title="gemv_and_partial_norm, one launch",
            unit="SM" if device == "cuda" else "thread",
            machine=label(device),
            parameters=parameters,
            bytes_read=weight.nbytes + act.nbytes,
        )
        if run >= 0:
            timelines.append(timeline)
            progress.step()
    return timelines


def _copies(weight: Tensor, device: str) -> tuple[list[Tensor], str]:
    """Copies that together are twice as large as the last-level cache, if few enough, and a description."""
    enough = _cold_bytes(device)
    count = min(MAX_COPIES, max(1, math.ceil(enough / max(weight.nbytes, 1))))
    words = "1 copy" if count == 1 else f"{count} copies in turn"
    temperature = "cold" if count * weight.nbytes >= enough else "may stay in a cache"
    return [weight, *(weight.clone() for _ in range(count - 1))], f"{words}, {temperature}"


def _cold_bytes(device: str) -> int:
    if device == "cuda":
        return max(GPU_COLD, 2 * torch.cuda.get_device_properties().L2_cache_size)
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes_in_bytes = [
        int(text[:-1]) << {"K": 10, "M": 20}[text[-1]] for text in (file.read_text().strip() for file in sizes)
    ]
    return 2 * max(sizes_in_bytes, default=32 << 20)


def _show(timeline: Timeline) -> None:
    """Print a table of phases, then the figures that belong to no phase."""
    summary = timeline.summary()
    print(f"{timeline.title} on {timeline.machine}")
    print(", ".join(f"{name} {value}" for name, value in timeline.parameters.items()) + "\n")
    meanings = {phase.name: phase.meaning for phase in PHASES}
    phases = [("phase", "blocks", "median us", "max us", "share", "what a block does")]
    for row in summary.phases:
        numbers = (str(row.count), f"{row.median:.3f}", f"{row.max:.3f}", percent(row.share))
        phases.append((row.phase, *numbers, meanings[row.phase]))
    print(table(phases, right=(1, 2, 3, 4)) + "\n")
    print(table(list(summary.figures()), right=(1,)))


def _write(timeline: Timeline, out: Path) -> None:
    page, trace = out / f"{FILES}.html", out / f"{FILES}.json"
    try:
        timeline.write_html(page)
        timeline.write_chrome(trace)
    except OSError as error:
        raise cannot_write(out, error, "--out") from error
    print(f"wrote {page} for a browser\nwrote {trace} for Perfetto")
