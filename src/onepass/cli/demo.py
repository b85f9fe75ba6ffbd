"""``onepass demo``: what the library does, shown by running it. Every number printed was measured a moment before."""

from __future__ import annotations

import inspect
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..bench.timing import Load
from ..ops.rms_norm import rms_norm_fused_fp8
from ..prologues import prologue, sigmoid
from ..testing import oracle
from ..testing.case import same_bytes
from ..testing.runner import CASES, run_case
from . import demo_model

EPS: Final = 1e-6
FP8_MAX: Final = 448.0
SHAPES: Final = ((1, 4096), (64, 7168), (512, 4096))
ROUNDS: Final = 6
SECONDS_A_ROUND: Final = 0.04
CALLS_A_GRAPH: Final = 20
SHOWN_CASES: Final = (
    ("rms_norm", "model: 5x4096 bf16"),
    ("rms_norm", "odd: 5x7919 bf16"),
    ("rms_norm", "wide: 5x20000 bf16"),
    ("rms_norm", "dtypes: 3x640 f16 gamma=f32 residual=f16 rounding=hf"),
    ("rms_norm", "layouts: 3x4x1536 bf16 misaligned"),
    ("rms_norm", "values: 9x384 bf16 special"),
    ("rms_norm_fused_fp8", "model: 5x7168 bf16"),
    ("rms_norm_fused_fp8", "groups: 6x7168 bf16 group_size=128 scale_layout=column"),
    ("rms_norm_fused_fp8", "scales: 4x512 bf16 scale_format=ue8m0 scales_dtype=f8_e8m0fnu"),
    ("rms_norm_fused_fp8", "outputs: 4x7168 bf16 residual=bf16"),
    ("rms_norm_fused_fp8", "layouts: 3x4x1536 bf16 transposed"),
    ("rms_norm_fused_fp8", "values: 9x384 bf16 out_dtype=f8_e4m3fnuz special"),
)
"""A dozen of the cases of ``onepass check``, chosen for variety."""


def gated(x, gate):  # type: ignore[no-untyped-def]
    """What the demo fuses; written as a user would write it."""
    return x * sigmoid(gate)


def composed(x: Tensor, gamma: Tensor, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same results from torch's own operators, in float32 as ours."""
    h = x.float()
    if gate is not None:
        h = h * torch.sigmoid(gate.float())
    y = F.rms_norm(h, gamma.shape, gamma.float(), EPS)
    scale = y.abs().amax(-1, keepdim=True) / FP8_MAX
    return (y / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def run(device: str, console: Console, model: str, path: Path | None, rounding: str, report: Path) -> bool:
    """All five parts; whether everything that was checked was right."""
    start = time.perf_counter()
    torch.manual_seed(0)
    with torch.inference_mode():
        console.print(Text(f"onepass on {_machine(device)}, torch {torch.__version__}", style="bold"))
        speedup = Speedup()
        speedup.warn(console)
        _heading(console, 1, "A transformers model generates without and with onepass.patch(model)")
        fine = demo_model.show(model, path, device, rounding, report, console, median_seconds, speedup)
        fine = _show_checks(device, console) and fine
        _show_speed(device, console, speedup)
        _show_prologue(device, console, speedup)
        fine = _show_invariance(device, console) and fine
        speedup.warn(console)
    _show_next(device, console, time.perf_counter() - start)
    return fine


# --- measuring ------------------------------------------------------------------------------------------------------


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"


class Speedup:
    """How many times faster, on a machine that is quiet. On one that is not, times are shown and no claim is made of them."""

    def __init__(self, load: Load | None = None) -> None:
        self.load = load or Load()
        self.warned = False

    def __call__(self, slow: float, fast: float) -> Text:
        """A cell of a table."""
        if not self.load.quiet():
            return Text("not quiet", style="yellow")
        return Text(f"{slow / fast:.1f}x", style="bold green" if slow > fast else "bold red")

    def warn(self, console: Console) -> None:
        """A banner, once, if others have the cores."""
        if self.warned or self.load.quiet():
            return
        self.warned = True
        text = (
            f"This machine is not quiet: other processes have had {self.load.worst:.0%} of its cores. "
            "Times are disturbed, those of torch the most, and no speed-up is claimed."
        )
        console.print(Text(text, style="bold yellow"), soft_wrap=True)


def median_seconds(calls: Sequence[Callable[[], object]], device: str) -> list[float]:
    """For each call the median time of its quietest round; rounds alternate, so that all see the same disturbances."""
    timers = [_gpu_timer(call) if device == "cuda" else _cpu_timer(call) for call in calls]
    medians: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for timer, collected in zip(timers, medians, strict=True):
            times: list[float] = []
            end = time.perf_counter() + SECONDS_A_ROUND
            while time.perf_counter() < end or len(times) < 3:
                times.append(timer())
            collected.append(statistics.median(times))
    return [min(collected) for collected in medians]


def _cpu_timer(call: Callable[[], object]) -> Callable[[], float]:
    def timer() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    timer()
    return timer


def _gpu_timer(call: Callable[[], object]) -> Callable[[], float]:
    """Times a CUDA graph of several calls, so that it is the GPU that is timed and not the host."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_A_GRAPH):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timer() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / CALLS_A_GRAPH

    timer()
    return timer


def dequantization_error(result: tuple[Tensor, ...], exact: Tensor) -> float:
    """The largest ``|code * scale - y|`` as a share of the row's largest ``|y|``."""
    codes, scale = result[:2]
    difference = (codes.double() * scale.double()).cpu() - exact
    return float((difference.abs() / exact.abs().amax(-1, keepdim=True)).max())


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _comparison(*first: str) -> Table:
    table = Table(*first, box=None, pad_edge=False)
    for name in ("torch", "onepass", "speed-up", "error, torch", "error, onepass"):
        table.add_column(name, justify="right")
    return table


def _compare(
    ours: Callable[[], Any], theirs: Callable[[], Any], exact: Tensor, device: str, speedup: Speedup
) -> tuple[Text | str, ...]:
    """The cells of one line of a comparison."""
    slow, fast = median_seconds((theirs, ours), device)
    errors = (f"{dequantization_error(call(), exact):.3%}" for call in (theirs, ours))
    return (
        _time(slow),
        _time(fast),
        speedup(slow, fast),
        *errors,
    )


# --- the other parts ------------------------------------------------------------------------------------------------


def _heading(console: Console, number: int, title: str) -> None:
    console.print()
    console.print(Rule(f"[bold]{number}[/]  {title}", align="left", style="cyan"))


@contextmanager
def _live(table: Table, console: Console) -> Iterator[None]:
    """Show the table as it grows, or whole at the end where nobody is watching."""
    if console.is_terminal:
        with Live(table, console=console, refresh_per_second=8):
            yield
    else:
        yield
        console.print(table)


def _show_checks(device: str, console: Console) -> bool:
    _heading(console, 2, "A dozen checks against a float64 oracle")
    table = Table("", "op", "case", box=None, pad_edge=False)
    table.add_column("time", justify="right")
    by_name = {(case.op, case.name): case for case in CASES}
    fine = True
    with _live(table, console):
        for op, name in SHOWN_CASES:
            result = run_case(by_name[op, name], device)
            fine = fine and result.passed
            mark = Text("ok", style="green") if result.passed else Text("WRONG", style="bold red")
            table.add_row(mark, op, name if result.passed else f"{name}\n{result.message}", _time(result.seconds))
    console.print("The time is the whole case: inputs, oracle, two runs and, the first time, compiling.", style="dim")
    return fine


def _show_speed(device: str, console: Console, speedup: Speedup) -> None:
    _heading(console, 3, "rms_norm_fused_fp8 against the same thing written with torch operators")
    table = _comparison("bfloat16")
    with _live(table, console):
        for rows, columns in SHAPES:
            x = torch.randn(rows, columns, dtype=torch.bfloat16)
            gamma = 1 + 0.25 * torch.randn(columns, dtype=torch.bfloat16)
            exact = oracle.rms_norm(x, gamma, EPS).y
            x, gamma = x.to(device), gamma.to(device)
            table.add_row(
                f"{rows} x {columns}",
                *_compare(
                    lambda x=x, gamma=gamma: rms_norm_fused_fp8(x, gamma, EPS),  # type: ignore[misc]
                    lambda x=x, gamma=gamma: composed(x, gamma),  # type: ignore[misc]
                    exact,
                    device,
                    speedup,
                ),
            )
    where = "in a CUDA graph, " if device == "cuda" else ""
    console.print(
        f"Time of a call, {where}inputs warm: the median of the quietest of {ROUNDS} rounds. Error against float64: the largest "
        "|code * scale - y| as a share of the row's largest |y|; half a step of fp8 at the top is 3.571%.",
        style="dim",
    )


def _show_prologue(device: str, console: Console, speedup: Speedup) -> None:
    _heading(console, 4, "Your own function, compiled into the load")
    body = inspect.getsource(gated).replace("  # type: ignore[no-untyped-def]", "").splitlines()
    code = ["@onepass.prologue", *(line for line in body if '"""' not in line), ""]
    code += ["rms_norm_fused_fp8(x, gamma, prologue=gated, prologue_args=(gate,))", ""]
    console.print(Syntax("\n".join(code), "python", theme="ansi_dark", background_color="default"))
    fused = prologue(gated)
    rows, columns = SHAPES[-1]
    x, gate = (torch.randn(rows, columns, dtype=torch.bfloat16) for _ in range(2))
    gamma = 1 + 0.25 * torch.randn(columns, dtype=torch.bfloat16)
    exact = oracle.rms_norm(x, gamma, EPS, prologue=fused, prologue_args=(gate,)).y
    x, gate, gamma = x.to(device), gate.to(device), gamma.to(device)
    table = _comparison("bfloat16")
    with _live(table, console):
        table.add_row(
            f"{rows} x {columns}",
            *_compare(
                lambda: rms_norm_fused_fp8(x, gamma, EPS, prologue=fused, prologue_args=(gate,)),
                lambda: composed(x, gamma, gate),
                exact,
                device,
                speedup,
            ),
        )


def _show_invariance(device: str, console: Console) -> bool:
    _heading(console, 5, "A row gives the same bytes alone and in any batch")
    columns = 7168
    x = torch.randn(1024, columns, dtype=torch.bfloat16).to(device)
    gamma = (1 + 0.25 * torch.randn(columns, dtype=torch.bfloat16)).to(device)
    whole = rms_norm_fused_fp8(x, gamma, EPS)
    table = Table(
        "rows in the call", "calls", "codes and scales equal to those of the batch of 1024", box=None, pad_edge=False
    )
    fine = True
    with _live(table, console):
        for size in (1, 3, 32, 500):
            starts = range(0, 1024 - size, max(size, 64))
            equal = 0
            for first in starts:
                part = rms_norm_fused_fp8(x[first : first + size], gamma, EPS)
                equal += all(same_bytes(p, w[first : first + size]) for p, w in zip(part, whole, strict=True))
            fine = fine and equal == len(starts)
            style = "green" if equal == len(starts) else "bold red"
            table.add_row(str(size), str(len(starts)), Text(f"{equal} of {len(starts)}", style=style))
    return fine


def _show_next(device: str, console: Console, seconds: float) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    if device == "cpu":
        grid.add_row("onepass check", "every case against the oracle")
        grid.add_row("onepass check --device interpreter", "the GPU kernels, interpreted on this CPU")
    else:
        grid.add_row("onepass check --device cuda", "every case against the oracle")
    grid.add_row("onepass env", "versions, devices, what works here")
    grid.add_row("docs/models.md", "what onepass.patch replaces in which family")
    grid.add_row("docs/ops.md", "every argument of every op")
    grid.add_row("docs/numerics.md", "what is rounded where")
    console.print()
    console.print(Panel(grid, title="What to try next", title_align="left", expand=False))
    console.print(f"That took {seconds:.1f} s.", style="dim")
