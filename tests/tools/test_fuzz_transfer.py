"""On a GPU, the fuzzer fetches all memory of a case in one transfer. Here "elsewhere" is the CPU, and everything is copied."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.testing.tensors import memory_of
from tests.linear import fuzz as linear
from tests.mla_cache import checks as mla_cache
from tests.oracle import guarded
from tests.oracle.memory import fetched
from tests.qk_norm import fuzz as qk
from tests.rms_norm import fuzz as rows
from tools.fuzz import steps
from tools.fuzz.cases import OPS, numbered, run, run_all


def test_copies_have_the_same_values_strides_and_surroundings() -> None:
    memory = torch.arange(40, dtype=torch.float32)
    first, second = memory[3:11].view(2, 4), memory[1:].as_strided((3, 2), (5, 2), 7)
    odd, empty = torch.arange(7, dtype=torch.uint8)[2:], torch.empty(0, 5)
    wide = torch.randn(3, 4, dtype=torch.bfloat16).t()
    (group, others, none) = fetched("elsewhere", (first, second), (odd, empty, wide), ())
    assert none == ()
    for copy, original in zip((*group, *others), (first, second, odd, empty, wide), strict=True):
        assert torch.equal(copy, original) and copy.stride() == original.stride() and copy.dtype == original.dtype
        assert torch.equal(memory_of(copy), memory_of(original))
        assert not copy.numel() or copy.data_ptr() != original.data_ptr()
    assert group[0].untyped_storage().data_ptr() == group[1].untyped_storage().data_ptr()


def test_on_a_cpu_nothing_is_copied() -> None:
    t = torch.ones(3)
    ((same,),) = fetched("cpu", (t,))
    assert same is t


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (steps, guarded):
        monkeypatch.setattr(module, "fetched", lambda device, *groups: fetched("elsewhere", *groups))


@pytest.mark.sampled(11)  # some ops stay; test_properties.py runs random calls of all
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("op", OPS)
def test_cases_pass(op: str) -> None:
    for index in range(60):
        case = numbered(5, index, (op,), 4, False)
        assert case is not None and case.run("cpu") is None, case


def _writing(function: Any, name: str, **arguments: Any) -> Any:
    """The op, which also changes the last byte of an input's memory."""
    memory_of(arguments[name])[-1:] += 1
    return function(**arguments)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("family", "op", "name"),
    [
        (rows, "rms_norm", "gamma"),
        pytest.param(linear, "linear", "weight", marks=pytest.mark.full),
        (qk, "qk_rms_norm", "gamma_k"),
    ],
)
def test_a_changed_input_is_detected(family: Any, op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, op, partial(_writing, getattr(family, op), name))
    found = [numbered(5, index, (op,), 4, False) for index in range(20)]
    assert {case.run("cpu") for case in found if case is not None and 0 not in case.lead} == {f"{name} was written"}  # type: ignore[attr-defined]


@pytest.mark.usefixtures("elsewhere")
def test_bytes_beside_an_entry_of_the_cache_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last byte of the memory around the blocks belongs to no output."""
    right: Any = vars(mla_cache)["call_with"]

    def wrong(case: Any, given: dict[str, Any], *way: Any) -> Any:
        memory_of(given["blocks"])[-1:] += 1
        return right(case, given, *way)

    monkeypatch.setattr(mla_cache, "call_with", wrong)
    found = [numbered(5, index, ("fused_rope_rmsnorm_quantization",), 4, False) for index in range(10)]
    assert {case.run("cpu") for case in found if case is not None} == {"1 bytes beside the outputs were written"}


@pytest.mark.usefixtures("elsewhere")
def test_a_wrong_result_in_place_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Any = vars(rows)["rms_norm"]

    def wrong(**arguments: Any) -> Any:
        result = right(**arguments)
        if arguments.get("out") is arguments["x"]:
            first: Tensor = result[0]
            first.view(torch.uint8)[..., :1] ^= 1
        return result

    monkeypatch.setattr(rows, "rms_norm", wrong)
    found = {case.run("cpu") for index in range(100) if (case := numbered(5, index, ("rms_norm",), 12, False))}
    assert "out differs in place" in found and found <= {None, "out differs in place"}


@pytest.mark.usefixtures("elsewhere")
def test_cases_that_share_a_wait_have_their_own_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait for each step of all cases, and the results of each case alone, also of one that raises."""
    waits: list[int] = []

    def counted(device: str, *groups: Any) -> Any:
        waits.append(len(groups))
        return fetched("elsewhere", *groups)

    monkeypatch.setattr(steps, "fetched", counted)
    right: Any = vars(rows)["rms_norm"]

    def wrong(**arguments: Any) -> Any:
        if arguments["x"].shape[-1] % 5 == 0:
            raise ValueError("no multiple of five")
        result = right(**arguments)
        if arguments["x"].shape[-1] % 3 == 0:
            for t in result if isinstance(result, tuple) else (result,):
                t.view(torch.uint8).fill_(1)
        return result

    monkeypatch.setattr(rows, "rms_norm", wrong)
    found = [case for index in range(60) if (case := numbered(5, index, ("rms_norm", "linear"), 4, False))]
    together = run_all(found, "cpu")
    assert len(waits) == 2  # the last fetches nothing
    assert together == [run(case, "cpu") for case in found]
    assert "ValueError: no multiple of five" in together and None in together
    assert any(message and "ValueError" not in message for message in together)


def test_an_error_of_the_gpu_is_that_of_all_cases_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(device: str, *groups: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(steps, "fetched", failing)
    found = [case for index in range(5) if (case := numbered(5, index, ("rms_norm",), 4, False))]
    assert run_all(found, "cpu") == ["RuntimeError: CUDA error: an illegal memory access"] * 5
