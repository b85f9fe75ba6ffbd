"""``onepass trace``: run an op with tracing on, and show where one launch spends its time."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor

from .. import gemv_and_partial_norm_with_scratch, gemv_trace_blocks
from ..bench.machine import label
from ..errors import ContractError, Unsupported
from ..trace import PHASES, GmemTrace, NullTrace, Timeline, TraceBuf, percent
from .common import DeviceOption, cannot_write, choose_device, progress_bar, table

EPS: Final = 1e-6
MAX_COPIES: Final = 8
WARM_UPS: Final = 3
GPU_COLD: Final = 100_000_000
FILES: Final = "onepass-trace-gemv"

app = typer.Typer(no_args_is_help=True, help="Show where one launch spends its time, block by block.")


class Dtype(StrEnum):
    """Activations and weights."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


@app.command()
def gemv(
    n: Annotated[int, typer.Option(help="Columns of the output: rows of the weight.", min=0)] = 2112,
    k: Annotated[int, typer.Option(help="Inner dimension.", min=0)] = 7168,
    normed: Annotated[int, typer.Option(help="How many leading columns are normed.", min=0)] = 1536,
    m: Annotated[int, typer.Option(help="Rows of the activations.", min=0)] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of activations and weights.")] = Dtype.bfloat16,
    device: DeviceOption = "",
    runs: Annotated[int, typer.Option(help="Launches to trace; the one of median length is shown.", min=1)] = 20,
    out: Annotated[Path, typer.Option(help="Where to write the timeline.", metavar="DIR")] = Path("."),
) -> None:
    """Trace gemv_and_partial_norm; write a page for the browser and a trace for Perfetto."""
    if not out.is_dir():
        raise typer.BadParameter(f"there is no directory {out}", param_hint="--out")
    chosen = choose_device(device)
    console = Console()
    try:
        with torch.inference_mode():
            timelines = _record((m, n, k, normed), getattr(torch, dtype.value), chosen, runs, console)
    except (ContractError, Unsupported) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    timelines.sort(key=lambda timeline: timeline.total)
    median = timelines[(runs - 1) // 2]
    _show(median, console)
    shortest, longest = timelines[0].total / 1e3, timelines[-1].total / 1e3
    console.print(
        f"\nThis is the median of {runs} runs, which took {shortest:.2f} to {longest:.2f} us.", highlight=False
    )
    _write(median, out, console)


def _record(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str, runs: int, console: Console
) -> list[Timeline]:
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
    with progress_bar(console, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=runs)
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
            progress.update(task, advance=run >= 0, description="tracing" if run >= 0 else "warming up")
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
    found = [int(text[:-1]) << {"K": 10, "M": 20}[text[-1]] for text in (file.read_text().strip() for file in sizes)]
    return 2 * max(found, default=32 << 20)


def _show(timeline: Timeline, console: Console) -> None:
    """Print a table of phases, then the figures that belong to no phase."""
    summary = timeline.summary()
    console.print(Text(f"{timeline.title} on {timeline.machine}", style="bold"))
    words = ", ".join(f"{name} {value}" for name, value in timeline.parameters.items())
    console.print(words, style="dim", highlight=False)
    console.print()
    phases = table("phase", right=("blocks", "median us", "max us", "share"))
    phases.add_column("what a block does", style="dim")
    meanings = {phase.name: phase.meaning for phase in PHASES}
    for row in summary.phases:
        numbers = (str(row.count), f"{row.median:.3f}", f"{row.max:.3f}", percent(row.share))
        phases.add_row(row.phase, *numbers, meanings[row.phase])
    console.print(phases)
    console.print()
    figures = table(show_header=False)
    figures.add_column(style="bold")
    figures.add_column(justify="right")
    figures.add_column(style="dim")
    for label_, value, remark in summary.figures():
        figures.add_row(label_, value, remark)
    console.print(figures)


def _write(timeline: Timeline, out: Path, console: Console) -> None:
    page, trace = out / f"{FILES}.html", out / f"{FILES}.json"
    try:
        timeline.write_html(page)
        timeline.write_chrome(trace)
    except OSError as error:
        raise cannot_write(out, error, "--out") from error
    console.print()
    for path, reader in ((page, "for a browser"), (trace, "for Perfetto")):
        console.print(Text.assemble("wrote ", (str(path), "bold"), f" {reader}"), soft_wrap=True)
