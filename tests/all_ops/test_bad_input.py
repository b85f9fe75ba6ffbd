"""Bad input: each of thousands of invalid calls raises an error that names the argument, and writes nothing."""

from __future__ import annotations

import re
import struct
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass import nn
from onepass.core import native, recording
from onepass.core.backend import launching_with
from onepass.core.recording import Step
from onepass.errors import ContractError, Unsupported
from tests.all_ops.argument_mutations import Mutation, mutations
from tests.all_ops.bad_input import DISPATCHED, PUBLIC
from tests.core.fast_path import Driver, Op
from tests.helpers.contract_oracle import faults
from tests.inputs import Form, copied, memory, names

PAIRS = 100
REFUSALS = (ContractError, TypeError, Unsupported)


class Bench:
    """A subject, the tensors of its bad calls, and those of the good call that follows each."""

    def __init__(self, subject: Form) -> None:
        self.subject = subject
        self.memory = memory(subject.good_values)
        self.kept = {at: t.clone() for at, t in self.memory.items()}
        self.again = copied(subject.good_values)
        self.fresh = [(t, t.clone()) for t in memory(self.again).values()]
        lasting = {name: value for name, value in self.again.items() if name not in subject.volatile}
        self.lasting = list(memory(lasting).values())
        self.expected = [t.clone() for t in self.good_call()]

    def good_call(self) -> list[torch.Tensor]:
        """The contents of the caller's memory after the good call, and its results, as bytes."""
        for now, before in self.fresh:
            now.copy_(before)
        returned = self.subject.call(self.again)
        results = returned if isinstance(returned, (list, tuple)) else [returned]
        return [*self.lasting, *(t.reshape(-1).view(torch.uint8) for t in results if t is not None)]

    def judge(self, mutation: Mutation, wrong: set[str]) -> str | None:
        """None, or what is wrong with how a bad call was rejected."""
        mine = {**self.memory, **memory(mutation.changes)}
        kept = {at: self.kept[at] if at in self.kept else t.clone() for at, t in mine.items()}
        try:
            self.subject.call({**self.subject.good_values, **mutation.changes})
        except REFUSALS as error:
            fault = blame(self.subject, str(error), wrong)
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"
        else:
            fault = "was not refused"
        for at, now in mine.items():
            if not torch.equal(now, kept[at]):
                now.copy_(kept[at])
                fault = f"{fault or ''}; the caller's memory was written to"
        if not all(torch.equal(a, b) for a, b in zip(self.good_call(), self.expected, strict=True)):
            fault = f"{fault or ''}; the good call after it has another result"
        return None if fault is None else f"{mutation.label}: {fault} (may blame {', '.join(sorted(wrong))})"


def blame(subject: Form, message: str, wrong: set[str]) -> str | None:
    """None, or what an error message lacks."""
    named = re.match(r"(\w+): `(\w+)` (must|is) .*, got .|\w+: `\w+` is on", message, re.DOTALL)
    if named is None or not named[1].startswith(subject.op):
        return f"the message does not begin with op and argument: {message}"
    return None if named[2] in wrong else f"the wrong argument is blamed: {message}"


def cases(subject: Form, pairs: int) -> Iterator[tuple[Mutation, set[str]]]:
    """The mutations, each with the arguments that violate the contract, which may be none."""
    for mutation in mutations(subject.contract, subject.good_values, pairs):
        if subject.takes(mutation.changes):
            yield mutation, subject.wrong(mutation.changes)


@pytest.fixture(autouse=True)
def surroundings() -> Iterator[None]:
    """Record gradients and use one thread, which is faster for calls this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # of sparse and other tensors that torch calls experimental
        yield
    torch.set_num_threads(threads)


@pytest.mark.sampled(11)  # some calls of every op stay
@pytest.mark.parametrize("subject", [*PUBLIC, *DISPATCHED], ids=lambda s: s.name)
def test_bad_calls_name_the_argument_and_write_nothing(subject: Form) -> None:
    bench = Bench(subject)
    made = list(cases(subject, 0 if subject.tensors_only else PAIRS))
    bad = [(mutation, wrong) for mutation, wrong in made if wrong]
    assert len({mutation.label for mutation, _ in bad}) == len(bad) > 150
    failed = [fault for mutation, wrong in bad if (fault := bench.judge(mutation, wrong)) is not None]
    assert not failed, f"{len(failed)} of {len(bad)}:\n" + "\n".join(failed)
    # legal calls must pass: an op that rejects every call would satisfy the checks above
    with launching_with(lambda family: lambda *arguments: None):
        for mutation, wrong in made:
            if not wrong:
                subject.call({**copied(subject.good_values), **mutation.changes})


def test_thousands_of_bad_calls_are_generated() -> None:
    """More than three thousand with caller-allocated outputs and a single bad argument."""
    count = 0
    for subject in (s for s in PUBLIC if "allocating" not in s.name):
        count += sum(bool(wrong) for _, wrong in cases(subject, 0))
        if count > 3000:
            return
    pytest.fail(f"only {count}")


def test_output_may_alias_only_the_input_that_it_replaces() -> None:
    """An output that is another input of the same shape, which other rows or blocks read after it is written."""
    q, k, gamma = torch.randn(3, 64), torch.randn(3, 64), torch.ones(64)
    weight, y = torch.randn(128, 64), torch.randn(3, 64)
    kept = [t.clone() for t in (q, k, gamma, weight)]
    refused: dict[str, Callable[[], Any]] = {
        "`q_out` must not overlap `k`": lambda: onepass.qk_rms_norm(q, k, gamma, gamma, out=(k, y)),
        "`k_out` must not overlap `q`": lambda: onepass.qk_rms_norm(q, k, gamma, gamma, out=(y, q)),
        "`normed_output` must not overlap `act`": lambda: onepass.gemv_and_partial_norm(q, weight, gamma, out=(q, y)),
        "`unnormed_output` must not overlap `act`": lambda: onepass.gemv_and_partial_norm(q, weight, gamma, out=(y, q)),
        "`y_scratch` must not overlap `act`": lambda: onepass.gemv_and_partial_norm_unfused_with_scratch(
            y[:, :32], q, weight[:64], gamma[:32], 0.0, q
        ),
        "`out` must not overlap `x`": lambda: onepass.linear(q, weight[:64], out=q),
        "`residual_out` must not overlap `x`": lambda: onepass.linear(q, weight, residual=k, residual_out=q),
    }
    for message, call in refused.items():
        with pytest.raises(ContractError, match=message):
            call()
    assert all(torch.equal(a, b) for a, b in zip((q, k, gamma, weight), kept, strict=True))
    expected = onepass.qk_rms_norm(q, k, gamma, gamma)
    onepass.qk_rms_norm(q, k, gamma, gamma, out=(q, k))
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])


# --- recorded calls -------------------------------------------------------------------------------------------------


class Launcher:
    """A stand-in for a loaded kernel; every argument is an address."""

    def __init__(self, count: int) -> None:
        self.addresses = range(count)

    def __call__(self, grid: int, addresses: Any) -> None:
        if recording.tape.on:
            recording.note(self, grid, addresses)

    def step(self, grid: int, addresses: Any) -> Step:
        words = [*addresses, *[0] * 5]  # the driver's stand-in reads five
        return Step(True, (1234, grid, 128, 512, True, 0), struct.pack(f"<{len(words)}Q", *words), None)


@pytest.mark.skipif(native.describe() != "on", reason=f"the extension: {native.describe()}")
@pytest.mark.parametrize(
    "name",
    ["rms_norm, allocating", "rms_norm_fused_fp8, static", "gemv, allocating", "linear, allocating", "qk, allocating"],
)
def test_recorded_launch_is_not_used_for_options_of_another_type(name: str, driver: Driver) -> None:
    """A call that is repeated is not validated. 1, 1.0 and True are equal but must not count as the same option."""
    subject = next(s for s in PUBLIC if s.name == name)
    contract = subject.contract
    good = subject.good_values | dict.fromkeys(out.argument for out in contract.outs.values())
    good |= {"positions": None} if "positions" in contract.args else {}

    def kernel(op: Op, values: Any) -> None:
        tensors = [v.data_ptr() for v in values if isinstance(v, Tensor)]
        Launcher(len(tensors))(1, tensors)

    call = Op(kernel, contract=contract)
    for _ in range(4):
        call(*[good[n] for n in names(contract)])
    assert call.asked == len(driver.launched) == 2, "the good call is not repeated, so this tests nothing"
    wrong, tried = [], 0
    for mutation, _ in cases(subject, 0):
        bad = {**good, **mutation.changes}
        faulty = set(mutation.changes) <= set(contract.options) and faults(contract, bad)
        if faulty:
            tried += 1
            try:
                call(*[bad[n] for n in names(contract)])
                wrong.append(mutation.label)
            except ContractError as error:
                wrong += [] if blame(subject, str(error), set(faulty)) is None else [f"{mutation.label}: {error}"]
    assert tried > 100 and not wrong, wrong


# --- without a contract ---------------------------------------------------------------------------------------------


BLOCKS, LENGTHS, TABLE = torch.zeros(4, 2, 8), torch.tensor([3, 0]), torch.tensor([[2, 0], [1, 3]])
SLOTS, I32 = torch.tensor([4, 5, 0, 2, 3]), torch.int32


def paged() -> onepass.PagedKVCache:
    return onepass.PagedKVCache(BLOCKS.clone(), LENGTHS.clone(), TABLE.clone())


MADE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "PagedKVCache": (
        onepass.PagedKVCache,
        {"blocks": BLOCKS, "cache_lengths": LENGTHS, "lookup_table": TABLE, "page_size": 2},
        "cache_lengths lookup_table page_size",
    ),
    "PagedKVCache.from_slots": (
        onepass.PagedKVCache.from_slots,
        {"blocks": BLOCKS, "slots": SLOTS, "input_row_offsets": torch.tensor([0, 3, 5]), "table_width": 4, "dtype": I32},
        "table_width",
    ),
    "PagedKVCache.slot_mapping": (paged().slot_mapping, {"input_row_offsets": torch.tensor([0, 1, 3]), "tokens": 3}, "tokens"),
    "PagedKVCache.append": (paged().append, {"new_tokens": 1, "input_row_offsets": None}, "input_row_offsets"),
    "PagedKVCache.check": (paged().check, {"new_tokens": 1}, ""),
    "gather_mla": (
        onepass.gather_mla,
        {"cache": paged(), "request": 0, "dtype": torch.float32, "kv_scale": torch.ones(1), "per_token_scale": None},
        "kv_scale per_token_scale",
    ),
    "GmemTrace": (onepass.GmemTrace, {"buffer": torch.zeros(32, dtype=torch.int64), "units": torch.zeros(2, dtype=I32)}, "units"),
    "GmemTrace.allocate": (lambda blocks: onepass.GmemTrace.allocate(blocks, "cpu"), {"blocks": 2}, ""),
    "gemv_trace_blocks": (
        onepass.gemv_trace_blocks,
        {"act": torch.zeros(1, 64), "weight": torch.zeros(96, 64), "gamma": torch.ones(64), "segments": (torch.ones(3),)},
        "",
    ),
    "gemv_and_partial_norm": (
        onepass.gemv_and_partial_norm,
        {"act": torch.zeros(1, 64), "weight": torch.zeros(96, 64), "gamma": torch.ones(64), "segments": (torch.ones(3),), "out": None},
        "out",
    ),
    "qk_rms_norm": (
        onepass.qk_rms_norm,
        {"q": torch.ones(3, 8), "k": torch.ones(3, 4), "gamma_q": torch.ones(8), "gamma_k": torch.ones(4), "rope": None, "out": None},
        "rope out",
    ),
    "RMSNorm": (
        nn.RMSNorm,
        {"normalized_shape": 8, "eps": 0.5, "elementwise_affine": True, "weight_offset": 0.0, "rounding": "once"},
        "eps",
    ),
    "QKNorm": (nn.QKNorm, {"q_dim": 8, "k_dim": 8, "eps": 0.5, "per_head": True, "weight_offset": 0.0, "rounding": "once"}, "k_dim"),
    "LinearFP8": (nn.LinearFP8, {"in_features": 8, "out_features": 4, "bias": True, "dtype": torch.bfloat16}, ""),
    "Linear": (
        nn.Linear,
        {"in_features": 8, "out_features": 4, "bias": True, "dtype": torch.bfloat16, "scheme": "fp8_row", "rounding": "once"},
        "dtype scheme",
    ),
    "Linear.from_linear": (
        nn.Linear.from_linear,
        {"linear": torch.nn.Linear(8, 4), "scheme": "fp8_row", "rounding": "once"},
        "scheme",
    ),
    "MergedLinear": (
        nn.MergedLinear,
        {"in_features": 8, "out_features": [4, 4], "scheme": "fp8_row", "activation": "silu_mul", "rounding": "once"},
        "scheme activation",
    ),
    "MergedLinear.from_linears": (
        nn.MergedLinear.from_linears,
        {"linears": [torch.nn.Linear(8, 4)], "scheme": "int8_row", "share": True, "activation": None, "rounding": "once"},
        "scheme activation",
    ),
    "quantize_weight": (onepass.quantize_weight, {"weight": torch.ones(3, 4), "scheme": "fp8_row"}, ""),
    "dequantize_weight": (
        onepass.dequantize_weight,
        {"codes": torch.ones(3, 4, dtype=torch.int8), "scale": torch.ones(3), "dtype": torch.float32},
        "",
    ),
}  # fmt: skip
"""A function, a good call, and the arguments that may be None."""
LEGAL = {"new_tokens": ("minus one", "2**70"), "eps": ("2**70",), "weight_offset": ("minus one", "2**70")}
OWNERS = {"gemv_trace_blocks": "gemv_and_partial_norm"}
"""The op whose name messages use instead."""
NOTHING_LIKE_IT: dict[str, Any] = {
    "a string": "x", "bytes": b"xx", "an object": object(), "a type": Tensor, "a dict": {}, "a set": {1}, "a complex": 1j,
    "NaN": float("nan"), "infinity": float("inf"), "minus one": -1, "2**70": 2**70, "a numpy array": torch.ones(3).numpy(),
    "a sparse tensor": torch.ones(3, 3).to_sparse(), "a tensor of bools": torch.ones(1, 2, 3, 4) > 0, "a list": ["x"],
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_functions_without_a_contract_name_the_argument_too(name: str) -> None:
    function, good, optional = MADE[name]
    function(**good)
    before = {at: t.clone() for at, t in memory(good).items()}
    wrong, tried = [], 0
    for argument in good:
        values = NOTHING_LIKE_IT | ({} if argument in optional.split() else {"None": None})
        if isinstance(good[argument], Tensor):
            values |= {
                "a list of it": [good[argument]],
                "complex64": good[argument].to(torch.complex64),
                "a number": 2.5,
            }
        elif isinstance(good[argument], bool):
            values |= {"one": 1, "zero": 0, "1.0": 1.0}
        elif isinstance(good[argument], (int, float)) or good[argument] is None:
            values |= {"a bool": True, "a dtype": torch.float32}
        for label, bad in values.items():
            if label in LEGAL.get(argument, ()):
                continue
            tried += 1
            try:
                function(**{**good, argument: bad})
            except REFUSALS as error:
                if f"`{argument}`" not in str(error) or not str(error).startswith(OWNERS.get(name, name.split(".")[0])):
                    wrong.append(f"{argument}, {label}: {error}")
            except Exception as error:
                wrong.append(f"{argument}, {label}: {type(error).__name__}: {error}")
            else:
                wrong.append(f"{argument}, {label}: was not refused")
    assert tried >= 10 and not wrong, "\n".join(wrong)
    assert all(torch.equal(now, before[at]) for at, now in memory(good).items())
    function(**good)
