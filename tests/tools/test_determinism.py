"""A row's bytes depend on the row alone: every op and dtype on the CPU. The same runs on a GPU with ``--promises``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.op import ops
from onepass.cpu import threads as _parallel
from onepass.formats import FLOATS
from onepass.ops.rms_norm.contract import RMS_NORM_FUSED_FP8
from onepass.testing.tensors import lay_out, same_bytes
from tests.inputs import Rows
from tools import checks, determinism
from tools.determinism import SUBJECTS, determinism_promises

ROOT = Path(__file__).parents[2]
BY_NAME = {subject.name: subject for subject in SUBJECTS}


@pytest.mark.sampled(23)  # each promise stays, with fewer dtypes and lengths
@pytest.mark.parametrize(("name", "promise"), [pytest.param(n, p, id=n) for n, p in determinism_promises("cpu")])
def test_promise(name: str, promise: Callable[[], str | None]) -> None:
    assert promise() is None


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("*/promises.json")), ids=lambda f: f.parent.name)
def test_promises_were_kept_on_the_gpu(file: Path) -> None:
    document = json.loads(file.read_text())
    assert len(checks.kept_promises(file)) == document["number"] >= 443
    assert document["device"] == "cuda" and not document["broken"]


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_fused_fp8", "row_sum_of_squares_qk"])
@pytest.mark.parametrize("n", [1, 7, 33, 129, 1408, 4099])
def test_odd_lengths(n: int, name: str) -> None:
    assert determinism.batches(BY_NAME[name], "cpu", n, torch.bfloat16) is None


@pytest.mark.parametrize("layout", ["sliced", "misaligned", "transposed"])
@pytest.mark.parametrize("n", [96, 640, 7168])
def test_leading_dimensions_may_lie_in_any_order(n: int, layout: Any) -> None:
    x, gamma = torch.randn(3, 5, n).bfloat16(), torch.randn(n).bfloat16()
    moved = lay_out(x, layout)
    pairs = zip(onepass.rms_norm_fused_fp8(x, gamma), onepass.rms_norm_fused_fp8(moved, gamma), strict=True)
    assert all(same_bytes(a, b) for a, b in (*pairs, (onepass.rms_norm(x, gamma), onepass.rms_norm(moved, gamma))))


def test_every_op_is_a_subject() -> None:
    private = {"gemv", "gemv_and_partial_norm_with_scratch", "qk_rms_norm_heads"}  # forms of others
    named = {name.split(",")[0] for name in BY_NAME}
    assert {op.contract.name for op in ops} - private == named - {RMS_NORM_FUSED_FP8.name}


@pytest.mark.sampled(5)  # some ops stay
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_threads_are_used_where_their_number_is_tested(subject: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    run = _parallel.run

    def spy(function: int, block: Any, threads: int) -> None:
        seen.append(threads)
        run(function, block, threads)

    monkeypatch.setattr(_parallel, "run", spy)
    assert determinism.threads(subject, torch.bfloat16) is None
    assert {2, 3} <= set(seen)


# --- the tests can fail ---------------------------------------------------------------------------------------------

_calls = count()


def faulty(change: Callable[[Tensor], Tensor]) -> Rows:
    """rms_norm with a fault."""
    subject = BY_NAME["rms_norm, hf"]

    def call(t: dict[str, Tensor]) -> list[Tensor]:
        return [y + change(t["x"]) for y in subject.call(t)]

    return replace(subject, call=call)


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., str | None]]] = {
    "a late call": (lambda x: torch.tensor(float(next(_calls) == 900)).to(x.dtype), determinism.repeats),
    "the number of rows": (lambda x: torch.tensor(float(x.shape[0] == 7)).to(x.dtype), determinism.batches),
    "the place": (lambda x: torch.arange(len(x)).eq(20).to(x.dtype).unsqueeze(1), determinism.batches),
    "the neighbours": (lambda x: x.roll(1, 0)[:, :1], determinism.batches),
    "the address": (lambda x: torch.tensor(x.storage_offset() % 8).to(x.dtype), determinism.alignment),
    "the strides": (lambda x: torch.tensor(x.stride(0) - x.shape[1]).to(x.dtype), determinism.alignment),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_detected(fault: str, dtype: torch.dtype) -> None:
    global _calls
    _calls = count()
    change, test = FAULTS[fault]
    assert test(faulty(change), "cpu", 100, dtype) is not None


def test_dependence_on_the_number_of_threads_is_detected() -> None:
    subject = faulty(lambda x: torch.tensor(torch.get_num_threads()).to(x.dtype))
    assert determinism.threads(subject, torch.bfloat16) is not None
