"""Promises: those of formats and norms on the CPU, and how several processes share all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onepass.ops.rms_norm.op import rms_norm_fused_quant
from onepass.testing.runner import Result
from tests.mla_cache import promises as mla_cache
from tests.rms_norm import format_promises as formats
from tests.rms_norm.format_promises import format_promises
from tools.promises import run as promises


@pytest.mark.sampled(15)  # each compiles kernels; one promise in fifteen stays
@pytest.mark.parametrize(("name", "promise"), [pytest.param(n, p, id=n) for n, p in format_promises("cpu")])
def test_format_promise(name: str, promise: Callable[[], str | None]) -> None:
    assert promise() is None


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        (
            "formats, a row alone is the row in a batch: mxfp8, 384 columns",
            lambda r: (r[0] ^ (len(r[0]) == 17), *r[1:]),
        ),
        ("formats, layouts hold the same scales: int8, 384 columns", lambda r: (r[0], r[1] * r[1].stride(-1), *r[2:])),
        ("formats, codes are the quotient: int8, 640 columns", lambda r: (r[0].bitwise_xor(1), *r[1:])),
        ("norms, what is quantized is the norm alone: gate, bfloat16, 100 columns", lambda r: (*r[:-1], -r[-1])),
    ],
)
def test_a_broken_promise_is_noticed(name: str, spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = rms_norm_fused_quant

    def wrong(*args: Any, **named: Any) -> Any:
        first, *rest = right(*args, **named)
        codes = first.view(torch.uint8) if first.is_floating_point() else first
        changed, *others = spoil((codes, *rest))
        return changed.view(first.dtype), *others

    monkeypatch.setattr(formats, "rms_norm_fused_quant", wrong)
    assert dict(format_promises("cpu"))[name]() is not None


def test_all_promises_are_in_one_group_each() -> None:
    names = [name for name, _ in promises.promises("cpu")]
    groups = promises.groups_of(names)
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert len(set(names)) == len(names)
    together = next(
        group for group in groups if "MLA, alignment and strides change no bit: 31 + 6 columns of float32" in group
    )
    assert together == [name for name, _ in mla_cache.promises("cpu") if "31 + 6 columns of float32" in name]
    assert any(word in groups[0][0] for word in promises._LONG)


def test_a_process_tests_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(device: str) -> Any:
        yield "kept", lambda: None
        yield "broken", lambda: "why"

    monkeypatch.setattr(promises, "promises", some)
    seen: list[Result] = []
    promises.serve("cpu", [json.dumps(["broken"]), json.dumps(["kept", "broken"])], seen.append)
    assert [(r.case, r.passed, r.message) for r in seen] == [
        ("broken", False, "why"),
        ("kept", True, ""),
        ("broken", False, "why"),
    ]


class _Process:
    """Stands for a process of promises: it dies at "deadly" and the GPU fails at "spoiling"."""

    made = 0

    def __init__(self, device: str) -> None:
        type(self).made += 1
        self.spoilt = False
        self.code: int | None = None

    def run(self, names: list[str]) -> Any:
        for name in names:
            self.code = 9 if "deadly" in name else self.code
            self.spoilt = self.spoilt or "spoiling" in name
            yield None if self.code else Result("promises", name, "cpu", not self.spoilt, "", 0.0)

    def status(self) -> int | None:
        return self.code

    def end(self) -> None: ...


def test_a_dead_process_is_a_broken_promise_and_another_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["deadly: a", "after: a", "spoiling: b", "fine: c", "fine: d"]
    monkeypatch.setattr(promises, "promises", lambda device: ((name, None) for name in names))
    monkeypatch.setattr(promises, "_Worker", _Process)
    monkeypatch.setattr(_Process, "made", 0)
    found = promises.run_promises_in_groups("cpu", 1, lambda result: None)
    assert [(r.case, r.passed) for r in found] == [(name, name.startswith("fine")) for name in names]
    assert found[0].message == "the process ended: 9"
    assert _Process.made == 3
    assert promises.run_promises_in_groups("cpu", 2, lambda result: None, limit=-1) == []


@pytest.mark.full  # starts two processes
def test_two_processes_share_promises() -> None:
    seen: list[Result] = []
    found = promises.run_promises_in_groups("cpu", 2, seen.append, "MLA, caches|cache write, paged")
    assert found == seen and len(found) == 2 and all(result.passed for result in found)
