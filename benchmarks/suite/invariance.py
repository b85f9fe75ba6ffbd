"""Does a row's result depend on its batch? Every contender on this machine, run on the same rows in different batches.

``python -m benchmarks.suite.invariance`` needs torch and a backend, and not rich. It takes one to two minutes, most of it for
torch.compile.

A contender computes 4,096 rows in one call, then the same rows in calls of 1, 16, 255, 256 and again 4,096 rows. A row
counts as changed if one of its bytes differs from that of the first call.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from onepass.cli.common import add_device, at_least, cannot_write
from onepass.cli.common import run as run_command
from onepass.ops.linear.op import linear
from onepass.ops.rms_norm.op import rms_norm, rms_norm_fused_fp8

from . import machine
from .results import write
from .workload import EPS

ROWS: Final = 4096
SPLITS: Final = (1, 16, 255, 256, 4096)
COLUMNS: Final = 4096
LINEAR: Final = {"cuda": (4096, 4096), "cpu": (1024, 512)}
"""Columns of x and of the result of the linear layer; small on a CPU, where 4,096 calls with one row take long."""
NORM, FP8, PRODUCT = "RMSNorm", "RMSNorm to fp8", "linear layer"
OURS: Final = "onepass"
OTHER_DEVICE: Final = "only for "
"""What the reason begins with if a contender is for another device."""

Results = tuple[Tensor, ...]
Call = Callable[[Tensor], Results]


class Inputs(NamedTuple):
    """The rows of a kind of work, and its weight."""

    x: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Contender:
    """An implementation: ``make`` turns a weight into a function of rows. ``module`` must be installed."""

    work: str
    name: str
    make: Callable[[Tensor], Call]
    module: str = ""
    device: str = ""

    def why_not(self, device: str) -> str:
        """Why it cannot take part; empty if it can."""
        if self.device not in ("", device):
            return f"{OTHER_DEVICE}{self.device}"
        return "not installed" if self.module and util.find_spec(self.module) is None else ""


class Outcome(NamedTuple):
    """Rows that changed and the largest change of a value, by the size of the batches; or why it could not run."""

    work: str
    name: str
    changed: dict[int, int]
    largest: dict[int, float]
    failed: str = ""


# --- contenders -------------------------------------------------------------------------------------------------------


def _norm_as_written(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * y.to(x.dtype)


def _fp8_as_written(x: Tensor, weight: Tensor) -> Results:
    h = x.float()
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()
    scale = y.abs().amax(-1, keepdim=True) / 448.0
    return (y / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # one per size of a batch
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True)
    return compiled


def _transformers(weight: Tensor) -> Call:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm: Any = LlamaRMSNorm(weight.shape[0], EPS)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return lambda x: (norm(x),)


def _liger(weight: Tensor) -> Call:
    from liger_kernel.transformers.functional import liger_rms_norm

    return lambda x: (liger_rms_norm(x, weight, EPS),)


def _flashinfer(weight: Tensor) -> Call:
    from flashinfer.norm import rmsnorm

    return lambda x: (rmsnorm(x, weight, EPS),)


def _vllm(weight: Tensor) -> Call:
    from vllm import _custom_ops as ops

    def call(x: Tensor) -> Results:
        out = torch.empty_like(x)
        ops.rms_norm(out, x, weight, EPS)
        return (out,)

    return call


def _vllm_fp8(weight: Tensor) -> Call:
    from vllm import _custom_ops as ops

    def call(x: Tensor) -> Results:
        codes, scale = ops.rms_norm_dynamic_per_token_quant(x, weight, EPS, torch.float8_e4m3fn)
        return codes, scale

    return call


def _compiled_norm(weight: Tensor) -> Call:
    norm = _compiled(_norm_as_written)
    return lambda x: (norm(x, weight),)


def _compiled_fp8(weight: Tensor) -> Call:
    quantized = _compiled(_fp8_as_written)
    return lambda x: quantized(x, weight)


CONTENDERS: Final = (
    Contender(NORM, "torch eager", lambda w: lambda x: (_norm_as_written(x, w),)),
    Contender(NORM, "F.rms_norm", lambda w: lambda x: (functional.rms_norm(x, w.shape, w, EPS),)),
    Contender(NORM, "torch.compile", _compiled_norm),
    Contender(NORM, "transformers", _transformers, "transformers"),
    Contender(NORM, "Liger-Kernel", _liger, "liger_kernel", "cuda"),
    Contender(NORM, "FlashInfer", _flashinfer, "flashinfer", "cuda"),
    Contender(NORM, "vLLM", _vllm, "vllm", "cuda"),
    Contender(NORM, OURS, lambda w: lambda x: (rms_norm(x, w, EPS),)),
    Contender(FP8, "torch eager", lambda w: lambda x: _fp8_as_written(x, w)),
    Contender(FP8, "torch.compile", _compiled_fp8),
    Contender(FP8, "vLLM", _vllm_fp8, "vllm", "cuda"),
    Contender(FP8, OURS, lambda w: lambda x: rms_norm_fused_fp8(x, w, EPS)),
    Contender(PRODUCT, "F.linear", lambda w: lambda x: (functional.linear(x, w),)),
    Contender(PRODUCT, OURS, lambda w: lambda x: (linear(x, w),)),
)
"""In the order of the tables; onepass is the last of each kind of work."""


# --- measuring --------------------------------------------------------------------------------------------------------


def inputs(device: str, rows: int = ROWS) -> dict[str, Inputs]:
    """Random bfloat16 rows and weights of each kind of work, the same in every run."""
    generator = torch.Generator().manual_seed(2026)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, gamma = normal(rows, COLUMNS), 1 + 0.2 * normal(COLUMNS)
    k, n = LINEAR[device]
    matrix = normal(n, k) / k**0.5
    x, gamma, matrix = (t.to(device, torch.bfloat16) for t in (x, gamma, matrix))
    normed = Inputs(x, gamma)
    return {NORM: normed, FP8: normed, PRODUCT: Inputs(x[:, :k].contiguous(), matrix)}


def compare(call: Call, x: Tensor, splits: Iterable[int] = SPLITS) -> tuple[dict[int, int], dict[int, float]]:
    """How many rows change with the size of the batches, and by how much at most."""
    whole = _kept(call(x))
    changed: dict[int, int] = {}
    largest: dict[int, float] = {}
    for size in splits:
        pieces = [_kept(call(x[i : i + size])) for i in range(0, x.shape[0], size)]
        parts = tuple(torch.cat([piece[i] for piece in pieces]) for i in range(len(whole)))
        rows = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
        for a, b in zip(whole, parts, strict=True):
            rows |= (_bytes(a) != _bytes(b)).any(-1)
        changed[size] = int(rows.sum())
        largest[size] = float((_values(whole) - _values(parts)).abs().max())
    return changed, largest


def _kept(results: Results) -> Results:
    """Copies, because an implementation may reuse its outputs."""
    return tuple(t.clone() for t in results)


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8).reshape(t.shape[0], -1)


def _values(results: Results) -> Tensor:
    """The result as float32; codes times their scales."""
    first = results[0].float()
    return first if len(results) == 1 else first * results[1]


def run(device: str, rows: int = ROWS, contenders: Iterable[Contender] = CONTENDERS) -> Iterator[Outcome]:
    """One outcome per contender, as each is done. A contender that fails is reported and does not stop the others."""
    given = inputs(device, rows)
    splits = [size for size in SPLITS if size < rows] + [rows]
    for contender in contenders:
        why = contender.why_not(device)
        if not why:
            x, weight = given[contender.work]
            try:
                with torch.inference_mode():
                    yield Outcome(contender.work, contender.name, *compare(contender.make(weight), x, splits))
                continue
            except Exception as error:
                if contender.name == OURS:
                    raise
                lines = str(error).splitlines()
                why = f"failed: {type(error).__name__}: {lines[0] if lines else ''}"[:160]
        yield Outcome(contender.work, contender.name, {}, {}, why)


def document(device: str, outcomes: Iterable[Outcome], rows: int = ROWS) -> dict[str, Any]:
    """What a result file holds."""
    found = list(outcomes)
    k, n = LINEAR[device]
    return {
        **machine.describe(device),
        "rows": rows,
        "sizes": {NORM: f"{COLUMNS} columns", FP8: f"{COLUMNS} columns", PRODUCT: f"{k} to {n} columns"},
        "contenders": [
            {
                "work": o.work,
                "name": o.name,
                "changed": {str(size): count for size, count in o.changed.items()},
                "largest": {str(size): change for size, change in o.largest.items()},
            }
            for o in found
            if not o.failed
        ],
        "left_out": [[o.work, o.name, o.failed] for o in found if o.failed and not o.failed.startswith(OTHER_DEVICE)],
    }


def line(outcome: Outcome) -> str:
    """An outcome as a line of text."""
    if outcome.failed:
        return f"{outcome.work:<16}{outcome.name:<16}{outcome.failed}"
    counts = "".join(f"{count:>7}" for count in outcome.changed.values())
    return f"{outcome.work:<16}{outcome.name:<16}{counts}   largest change {max(outcome.largest.values()):.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the results; the exit status is 1 if a row of ours changes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite.invariance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_device(parser)
    parser.add_argument("--rows", type=at_least(2), default=ROWS, help=f"rows of the whole batch; default {ROWS}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.set_defaults(run=measure, parser=parser)
    return run_command(parser, arguments)


def measure(options: argparse.Namespace) -> int:
    """What `main` does with its options."""
    device, rows = options.device, options.rows
    print(f"{machine.label(device)}: rows of {rows} that change in batches of")
    print(" " * 32 + "".join(f"{size:>7}" for size in (*(size for size in SPLITS if size < rows), rows)))
    outcomes = []
    for outcome in run(device, rows):
        print(line(outcome), flush=True)
        outcomes.append(outcome)
    if options.json is not None:
        try:
            write(document(device, outcomes, rows), options.json)
        except OSError as error:
            raise cannot_write(options.json, error, "--json") from error
    return int(any(sum(o.changed.values()) for o in outcomes if o.name == OURS))


if __name__ == "__main__":
    sys.exit(main())
