"""gemv_and_partial_norm as its callers see it, on the CPU: results, refusals, counters, torch's compilers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass import GmemTrace, oracle
from onepass.checks import compare
from onepass.checks.case import poison, same_bytes
from onepass.checks.gemv_promises import gemv_promises
from onepass.errors import ContractError
from onepass.ops._launch import launching_with
from onepass.ops.gemv_partial_norm import GEMV, GEMV_WITH_SCRATCH
from onepass.samples import Mistake, mistakes, sample
from onepass.trace import TraceBuf
from onepass.triton import _counters

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
F8 = torch.float8_e4m3fn
OPS = torch.ops.onepass
Three = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def inputs(m: int = 3, n: int = 50, k: int = 64, width: int = 30, dtype: torch.dtype = BF16) -> Three:
    """act, weight and gamma."""
    act, weight, gamma = torch.randn(m, k), torch.randn(n, k), 1 + 0.25 * torch.randn(width)
    return act.to(dtype), weight.to(dtype), gamma.to(dtype)


def all_same(a: Any, b: Any) -> bool:
    return all(same_bytes(x, y) for x, y in zip(a, b, strict=True))


# --- results -------------------------------------------------------------------------------------------------------


class TestResults:
    def test_order(self) -> None:
        act, weight, gamma = inputs()
        more = [torch.ones(5), torch.ones(4).bfloat16(), torch.ones(3)]
        results = onepass.gemv_and_partial_norm(act, weight, gamma, segments=more, normed_dtype=F8)
        assert [(tuple(t.shape), t.dtype) for t in results] == [
            ((3, 30), F8),
            ((3, 1), F32),
            ((3, 5), BF16),
            ((3, 4), BF16),
            ((3, 3), BF16),
            ((3, 8), BF16),
        ]
        plain = onepass.gemv_and_partial_norm(act, weight, gamma)
        assert [tuple(t.shape) for t in plain] == [(3, 30), (3, 20)]
        assert same_bytes(results[-1], plain[1][:, 12:])
        for index, begin, width in ((2, 30, 5), (3, 35, 4), (4, 39, 3)):
            alone = onepass.gemv_and_partial_norm(act, weight[begin : begin + width], more[index - 2])
            assert same_bytes(results[index], alone[0])
        y = oracle.matmul(act, weight)[0][:, :30]
        norm = oracle.rms_norm(y, gamma, 1e-6).y
        assert ((results[0].double() * results[1].double() - norm).abs() <= norm.abs() / 16 + results[1] / 512).all()

    def test_out_is_written_in_place_in_that_order(self) -> None:
        act, weight, gamma = inputs()
        more = [torch.ones(5), torch.ones(4)]
        expected = onepass.gemv_and_partial_norm(act, weight, gamma, segments=more, normed_dtype=F8)
        frames = [poison(torch.empty(3, t.shape[1] + 7, dtype=t.dtype)) for t in expected]
        given = [frame[:, 3 : 3 + t.shape[1]] for frame, t in zip(frames, expected, strict=True)]
        got = onepass.gemv_and_partial_norm(act, weight, gamma, segments=more, normed_dtype=F8, out=given)
        assert all(a is b for a, b in zip(got, given, strict=True))
        assert all_same(given, expected)
        for frame, out in zip(frames, given, strict=True):
            for guard in (frame[:, :3], frame[:, 3 + out.shape[1] :]):
                assert guard.contiguous().view(torch.uint8).eq(0xFF).all()

    def test_outs_are_slices_of_one_parent(self) -> None:
        act, weight, gamma = inputs()
        parent = torch.zeros(3, 50, dtype=BF16)
        onepass.gemv_and_partial_norm(act, weight, gamma, out=(parent[:, :30], parent[:, 30:]))
        assert same_bytes(parent, torch.cat(onepass.gemv_and_partial_norm(act, weight, gamma), 1))

    def test_no_rows(self) -> None:
        _, weight, gamma = inputs()
        normed, scale, unnormed = onepass.gemv_and_partial_norm(weight[:0], weight, gamma, normed_dtype=F8)
        assert (normed.shape, scale.shape, unnormed.shape) == ((0, 30), (0, 1), (0, 20))
        normed, unnormed = onepass.gemv_and_partial_norm(weight[:0], weight, gamma, fused=False)
        assert (normed.shape, unnormed.shape) == ((0, 30), (0, 20))

    def test_nothing_is_left_over(self) -> None:
        act, weight, gamma = inputs(width=50)
        normed, unnormed = onepass.gemv_and_partial_norm(act, weight, gamma)
        assert unnormed.shape == (3, 0)
        assert compare.floats(normed, oracle.rms_norm(oracle.matmul(act, weight)[0], gamma, 1e-6).y) is None

    def test_the_norm_is_that_of_the_unrounded_product(self) -> None:
        """y = 1 + j/1024 is exact in float32 whatever the order of its sum, and is no bfloat16."""
        steps = torch.arange(64) % 8
        act = torch.tensor([[1.0, 2.0**-10]]).bfloat16()
        weight = torch.stack([torch.ones(64), steps], 1).bfloat16()
        weight[0] = torch.tensor([3.0, 5.0])
        y = oracle.matmul(act, weight)[0]
        gamma = torch.ones(48).bfloat16()
        exact = oracle.rms_norm(y[:, :48], gamma, 0.0).y.bfloat16()
        rounded = oracle.rms_norm(y[:, :48].bfloat16(), gamma, 0.0).y.bfloat16()
        assert not same_bytes(exact, rounded)
        normed, unnormed = onepass.gemv_and_partial_norm(act, weight, gamma, 0.0)
        assert same_bytes(normed, exact) and same_bytes(unnormed, y[:, 48:].bfloat16())
        unfused, _ = onepass.gemv_and_partial_norm(act, weight, gamma, 0.0, fused=False)
        assert same_bytes(unfused, rounded)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 0.0])
    def test_a_bad_row_spoils_no_other(self, bad: float) -> None:
        act, weight, gamma = inputs(5)
        more = [torch.ones(7).bfloat16()]
        good = onepass.gemv_and_partial_norm(act, weight, gamma, segments=more, normed_dtype=F8)
        spoiled = act.clone()
        spoiled[2] = bad
        results = onepass.gemv_and_partial_norm(spoiled, weight, gamma, segments=more, normed_dtype=F8)
        for index, (one, other) in enumerate(zip(results, good, strict=True)):
            assert same_bytes(one[[0, 1, 3, 4]], other[[0, 1, 3, 4]])
            row = one[2].float()
            assert row.eq(0).all() if bad == 0 else not row.isfinite().any(), index

    def test_more_than_two_billion_elements_are_addressed(self) -> None:
        """Rows 2**31 elements apart, in memory that is never touched in between."""
        step = 2**31 + 64

        def apart(rows: Tensor) -> Tensor:
            return torch.empty(step + 64, dtype=BF16).as_strided(rows.shape, (step, 1)).copy_(rows)

        act, weight, gamma = inputs(2, 2, 64, 1)
        expected = onepass.gemv_and_partial_norm(act, weight, gamma)
        assert all_same(onepass.gemv_and_partial_norm(act, apart(weight), gamma), expected)
        assert all_same(onepass.gemv_and_partial_norm(apart(act), weight, gamma), expected)
        out = [apart(torch.zeros_like(t)) for t in expected]
        assert all_same(onepass.gemv_and_partial_norm(act, weight, gamma, out=out), expected)


PROMISES = dict(gemv_promises("cpu"))


@pytest.mark.parametrize("name", PROMISES)
def test_promise(name: str) -> None:
    assert PROMISES[name]() is None


# --- two launches --------------------------------------------------------------------------------------------------


class TestUnfused:
    @pytest.mark.parametrize("m", [1, 16, 40])
    @pytest.mark.parametrize("weights", ["bf16", "fp8", "fp8 scaled"])
    def test_any_number_of_rows(self, weights: str, m: int) -> None:
        act, weight, gamma = inputs(m)
        weight = weight if weights == "bf16" else weight.to(F8)
        scale = torch.rand(50) + 0.5 if weights == "fp8 scaled" else None
        normed, unnormed = onepass.gemv_and_partial_norm(act, weight, gamma, fused=False, weight_scale=scale)
        y, _ = oracle.matmul(act, weight, scale)
        torch.testing.assert_close(unnormed.double(), y[:, 30:], rtol=2.0**-8, atol=1e-4)
        norm = oracle.rms_norm(y[:, :30], gamma, 1e-6).y
        torch.testing.assert_close(normed.double(), norm, rtol=2.0**-6, atol=1e-4)
        if m <= 16:
            fused = onepass.gemv_and_partial_norm(act, weight, gamma, weight_scale=scale)
            torch.testing.assert_close((normed, unnormed), fused, rtol=2.0**-6, atol=1e-4)

    @pytest.mark.parametrize("weight_dtype", [BF16, F8])
    def test_unnormed_is_a_view_of_all_of_y(self, weight_dtype: torch.dtype) -> None:
        act, weight, gamma = inputs(20)
        normed, unnormed = onepass.gemv_and_partial_norm(act, weight.to(weight_dtype), gamma, fused=False)
        assert unnormed.untyped_storage().nbytes() == 20 * 50 * 2
        assert (unnormed.stride(), unnormed.storage_offset()) == ((50, 1), 30)
        y = unnormed.as_strided((20, 50), (50, 1), 0)
        assert same_bytes(normed, onepass.rms_norm(y[:, :30], gamma))

    @pytest.mark.parametrize("weight_dtype", [BF16, F8])
    def test_scratch_holds_all_of_y(self, weight_dtype: torch.dtype) -> None:
        act, weight, gamma = inputs(20)
        weight = weight.to(weight_dtype)
        expected = onepass.gemv_and_partial_norm(act, weight, gamma, fused=False)
        normed, y = poison(torch.empty(20, 40, dtype=BF16))[:, 4:34], poison(torch.empty(20, 50, dtype=BF16))
        onepass.gemv_and_partial_norm_unfused_with_scratch(normed, act, weight, gamma, 1e-6, y)
        assert same_bytes(normed, expected[0]) and same_bytes(y[:, 30:], expected[1])
        assert same_bytes(y[:, :30], expected[1].as_strided((20, 30), (50, 1), 0))

    def test_weight_scale(self) -> None:
        act, weight, gamma = inputs(20)
        normed, y, scale = torch.empty(20, 30, dtype=BF16), torch.empty(20, 50, dtype=BF16), torch.rand(50) + 0.5
        onepass.gemv_and_partial_norm_unfused_with_scratch(
            normed, act, weight.to(F8), gamma, 1e-6, y, weight_scale=scale
        )
        expected = onepass.gemv_and_partial_norm(act, weight.to(F8), gamma, fused=False, weight_scale=scale)
        assert same_bytes(normed, expected[0]) and same_bytes(y[:, 30:], expected[1])

    @pytest.mark.parametrize(
        ("argument", "change"),
        [
            ("normed_output", torch.empty(20, 31, dtype=BF16)),
            ("normed_output", torch.empty(20, 30)),
            ("normed_output", None),
            ("y_scratch", torch.empty(20, 49, dtype=BF16)),
            ("y_scratch", torch.empty(20, 50)),
            ("y_scratch", torch.empty(50, 20, dtype=BF16).t()),
            ("y_scratch", None),
            ("act", torch.empty(20, 63, dtype=BF16)),
            ("act", torch.empty(20, 64, dtype=torch.int8)),
            ("act", 3),
            ("weight", torch.empty(50, 64)),
            ("weight", torch.empty(50, dtype=BF16)),
            ("weight", None),
            ("gamma", torch.empty(51, dtype=BF16)),
            ("gamma", torch.empty(0, dtype=BF16)),
            ("gamma", torch.empty(5, 6, dtype=BF16)),
            ("weight_scale", torch.empty(49)),
            ("eps", -1.0),
            ("eps", None),
        ],
    )
    def test_mistakes(self, argument: str, change: Any) -> None:
        act, weight, gamma = inputs(20)
        normed, y = torch.full((20, 30), 7.0).bfloat16(), torch.full((20, 50), 7.0).bfloat16()
        good: dict[str, Any] = {
            "normed_output": normed, "act": act, "weight": weight, "gamma": gamma, "eps": 1e-6, "y_scratch": y,
        }  # fmt: skip
        onepass.gemv_and_partial_norm_unfused_with_scratch(**good)
        normed.fill_(7.0), y.fill_(7.0)
        blamed = "weight" if argument == "act" and isinstance(change, Tensor) and change.dtype == BF16 else argument
        with pytest.raises(
            ContractError, match=f"^gemv_and_partial_norm_unfused_with_scratch: `{blamed}` must .*, got"
        ):
            onepass.gemv_and_partial_norm_unfused_with_scratch(**{**good, argument: change})
        assert normed.eq(7).all() and y.eq(7).all()
        if not argument.endswith(("output", "scratch")):
            named = {name: value for name, value in good.items() if name not in ("normed_output", "y_scratch")}
            with pytest.raises(ContractError, match=f"^gemv_and_partial_norm: `{blamed}` must .*, got"):
                onepass.gemv_and_partial_norm(**{**named, argument: change}, fused=False)

    @pytest.mark.parametrize(
        ("option", "value"), [("segments", [torch.ones(3)]), ("normed_dtype", F8), ("out", [torch.empty(3)] * 2)]
    )
    def test_what_one_launch_alone_does(self, option: str, value: Any) -> None:
        with pytest.raises(ContractError, match=f"gemv_and_partial_norm: `{option}` must be left out with fused=False"):
            onepass.gemv_and_partial_norm(*inputs(), fused=False, **{option: value})


# --- refusals ------------------------------------------------------------------------------------------------------


class RawTrace(TraceBuf):
    """Hands on whatever it was given."""

    def __init__(self, trace: Any, units: Any) -> None:
        self.pair = trace, units

    def store(self, offset: int, ts: int) -> None:
        raise AssertionError("only kernels write here")

    def tensors(self) -> tuple[Any, Any]:
        return self.pair


SIZES = {"M": 3, "N": 40, "K": 64, "W0": 24, "W1": 8, "S": 40, "C": 2, "E": 48, "B": 3}
OPTIONAL = ["gamma1", "weight_scale", "trace", "units"]


def good_call(with_scratch: bool) -> dict[str, Any]:
    contract = GEMV_WITH_SCRATCH if with_scratch else GEMV
    tensors: dict[str, Any] = dict(sample(contract, SIZES, (), dtypes={"act": BF16}, optional=OPTIONAL))
    for name in ("finish_counter", "trace", "units"):
        if name in tensors:
            tensors[name].zero_()
    return {**tensors, "eps": 1e-6}


@dataclass
class Call:
    """One call with outputs full of sevens, from the arguments of a contract."""

    with_scratch: bool
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        shapes = [(3, 24), (3, 1), (3, 8), (3, 8)]
        self.outs = [torch.full(shape, 7.0, dtype=F32 if i == 1 else BF16) for i, shape in enumerate(shapes)]

    def run(self) -> None:
        given = dict(self.arguments)
        segments = [given.pop("gamma1")] if "gamma1" in given else []
        normed, scale, *further, unnormed = self.outs
        if not self.with_scratch:
            scales = [scale] if given.get("normed_dtype") is not None else []
            onepass.gemv_and_partial_norm(**given, segments=segments, out=[normed, *scales, *further, unnormed])
            return
        trace = RawTrace(given.pop("trace"), given.pop("units"))
        onepass.gemv_and_partial_norm_with_scratch(
            normed, unnormed, trace_buf=trace, segments=segments, segment_outputs=further, **given
        )

    def assert_nothing_written(self) -> None:
        assert all(out.eq(7).all() for out in self.outs)
        for name in ("finish_counter", "trace", "units"):
            value = self.arguments.get(name)
            if isinstance(value, Tensor) and not value.is_meta:
                assert not value.any()


def all_mistakes() -> list[Any]:
    found = []
    for with_scratch, contract in ((False, GEMV), (True, GEMV_WITH_SCRATCH)):
        for mistake in mistakes(contract, good_call(with_scratch)):
            if not (with_scratch and mistake.argument == "normed_dtype"):  # there it is normed_output's
                found.append(pytest.param(with_scratch, mistake, id=f"{contract.name}-{mistake.label}"))
    return found


@pytest.mark.parametrize(("with_scratch", "mistake"), all_mistakes())
def test_mistake_is_refused_by_name(with_scratch: bool, mistake: Mistake) -> None:
    contract = GEMV_WITH_SCRATCH if with_scratch else GEMV
    call = Call(with_scratch, mistake.arguments)
    with torch.enable_grad(), pytest.raises(ContractError) as caught:
        call.run()
    in_list = mistake.argument == "gamma1" and not isinstance(mistake.arguments["gamma1"], Tensor)
    argument = "segments" if in_list else mistake.argument
    assert str(caught.value).startswith(f"{contract.name}: `{argument}` must "), str(caught.value)
    assert ", got " in str(caught.value)
    call.assert_nothing_written()


def test_there_are_many_mistakes_and_the_calls_are_good() -> None:
    assert len(all_mistakes()) > 110
    for with_scratch in (False, True):
        call = Call(with_scratch, good_call(with_scratch))
        call.run()
        assert not any(out.eq(7).all() for i, out in enumerate(call.outs) if i != 1)


REFUSED: list[tuple[str, Any, str]] = [
    ("act", torch.zeros(17, 64).bfloat16(), r"have at most 16 rows \(fused=False takes any number\), got"),
    ("weight", torch.zeros(40, 63).bfloat16(), r"have shape \[N, K\] with .*K=64, got \[40, 63\]"),
    ("weight", torch.zeros(40, 64).half(), r"have dtype bfloat16 or float8_e4m3fn, got float16"),
    ("weight", torch.zeros(40, 64).to(torch.float8_e5m2), r"have dtype bfloat16 or float8_e4m3fn, got"),
    ("gamma", torch.ones(0).bfloat16(), r"have at least one element, got"),
    ("gamma", torch.ones(33).bfloat16(), r"have, with further segments, no more elements than weight has rows"),
    ("gamma1", torch.ones(0), r"have at least one element, got"),
    ("gamma1", torch.ones(8).half(), r"have dtype bfloat16 or float32, got float16"),
    ("weight_scale", torch.ones(39), r"have one element, or one for each row of weight, got"),
    ("weight_scale", torch.ones(0), r"have one element, or one for each row of weight, got"),
    ("weight_scale", torch.ones(40).bfloat16(), r"have dtype float32, got bfloat16"),
    ("finish_counter", torch.zeros(2, dtype=torch.int64), r"have dtype int32, got int64"),
    ("finish_counter", torch.zeros(1, dtype=I32), r"have an element for each segment, got"),
    ("finish_counter", torch.zeros(4, dtype=I32)[::2], r"be contiguous, got strides \(2,\)"),
    ("trace", torch.zeros(47, dtype=torch.int64), r"have 16 slots for every block \(gemv_trace_blocks counts"),
    ("units", torch.zeros(2, dtype=I32), r"have an element for every block, got"),
    ("normed_dtype", BF16, r"be float8_e4m3fn or float8_e4m3fnuz, got bfloat16"),
]


def both_forms() -> list[Any]:
    found = []
    for argument, change, message in REFUSED:
        for with_scratch in (False, True):
            contract = GEMV_WITH_SCRATCH if with_scratch else GEMV
            if argument in contract.args or (argument == "normed_dtype" and not with_scratch):
                found.append((with_scratch, argument, change, message))
    return found


@pytest.mark.parametrize(("with_scratch", "argument", "change", "message"), both_forms())
def test_messages(with_scratch: bool, argument: str, change: Any, message: str) -> None:
    call = Call(with_scratch, {**good_call(with_scratch), argument: change})
    name = (GEMV_WITH_SCRATCH if with_scratch else GEMV).name
    with pytest.raises(ContractError, match=f"^{name}: `{argument}` must {message}"):
        call.run()
    call.assert_nothing_written()


class TestLists:
    @pytest.mark.parametrize("segments", [torch.ones(3), 3, None, [3.0], [None], [torch.ones(3), "x"]])
    def test_segments_are_tensors(self, segments: Any) -> None:
        act, weight, gamma = inputs()
        with pytest.raises(ContractError, match=r"^gemv_and_partial_norm: `segments` must be a list of tensors, got"):
            onepass.gemv_and_partial_norm(act, weight, gamma, segments=segments)
        with pytest.raises(ContractError, match=r"^gemv_and_partial_norm: `segments` must be a list of tensors, got"):
            onepass.gemv_trace_blocks(act, weight, gamma, segments)

    def test_too_many_segments(self) -> None:
        with pytest.raises(ContractError, match="`segments` must hold at most 3 tensors, got 4"):
            onepass.gemv_and_partial_norm(*inputs(), segments=[torch.ones(1)] * 4)

    @pytest.mark.parametrize(("count", "codes"), [(1, None), (3, None), (0, None), (2, F8), (4, F8)])
    def test_out_count(self, count: int, codes: torch.dtype | None) -> None:
        needed = 2 if codes is None else 3
        out = [torch.full((3, 30), 7.0) for _ in range(count)]
        with pytest.raises(
            ContractError, match=f"gemv_and_partial_norm: `out` must hold {needed} tensors, got {count}"
        ):
            onepass.gemv_and_partial_norm(*inputs(), normed_dtype=codes, out=out)
        assert all(t.eq(7).all() for t in out)

    def test_out_is_a_list(self) -> None:
        out: Any = torch.zeros(2, 3, 30)
        with pytest.raises(ContractError, match=r"`out` must hold 2 tensors, got .*Tensor"):
            onepass.gemv_and_partial_norm(*inputs(), out=out)

    @pytest.mark.parametrize("outputs", [None, [], [None], [3.0], [torch.zeros(3, 5).bfloat16()] * 2, torch.zeros(1)])
    def test_segment_outputs(self, outputs: Any) -> None:
        act, weight, gamma = inputs()
        out = [torch.full((3, w), 7.0).bfloat16() for w in (30, 15)]
        counter = torch.zeros(2, dtype=I32)
        with pytest.raises(ContractError, match=r"^gemv_and_partial_norm_with_scratch: `segment_outputs` must .*, got"):
            onepass.gemv_and_partial_norm_with_scratch(
                out[0], out[1], act, weight, gamma, 0.0, counter, segments=[gamma[:5]], segment_outputs=outputs
            )
        assert all(t.eq(7).all() for t in out)

    @pytest.mark.parametrize("argument", ["normed_output", "unnormed_output"])
    @pytest.mark.parametrize("bad", [None, 3, torch.zeros(3, 29).bfloat16(), torch.zeros(3, 30), torch.zeros(3)])
    def test_outputs(self, argument: str, bad: Any) -> None:
        act, weight, gamma = inputs()
        given: dict[str, Any] = {name: torch.full((3, w), 7.0).bfloat16() for name, w in self.widths}
        with pytest.raises(ContractError, match=f"^gemv_and_partial_norm_with_scratch: `{argument}` must .*, got"):
            onepass.gemv_and_partial_norm_with_scratch(
                **{**given, argument: bad}, act=act, weight=weight, gamma=gamma, eps=0.0,
                finish_counter=torch.zeros(1, dtype=I32),
            )  # fmt: skip
        assert all(t.eq(7).all() for t in given.values())

    widths = (("normed_output", 30), ("unnormed_output", 20))

    def test_codes_need_a_scale_and_nothing_else_does(self) -> None:
        act, weight, gamma = inputs()
        codes, normed, unnormed = (
            torch.zeros(3, 30).to(F8),
            torch.zeros(3, 30, dtype=BF16),
            torch.zeros(3, 20, dtype=BF16),
        )
        rest: tuple[Any, ...] = (unnormed, act, weight, gamma, 0.0, torch.zeros(1, dtype=I32))
        with pytest.raises(ContractError, match="`scale_output` must be given with an fp8 normed_output"):
            onepass.gemv_and_partial_norm_with_scratch(codes, *rest)
        with pytest.raises(ContractError, match="`scale_output` must be None unless"):
            onepass.gemv_and_partial_norm_with_scratch(normed, *rest, scale_output=torch.zeros(3, 1))
        onepass.gemv_and_partial_norm_with_scratch(codes, *rest, scale_output=torch.zeros(3, 1))
        expected = onepass.gemv_and_partial_norm(act, weight, gamma, 0.0, normed_dtype=F8)
        assert same_bytes(codes, expected[0]) and same_bytes(unnormed, expected[2])

    def test_trace_buf_and_fused(self) -> None:
        act, weight, gamma = inputs()
        bad: Any = torch.zeros(48, dtype=torch.int64)
        with pytest.raises(ContractError, match="_with_scratch: `trace_buf` must be a TraceBuf"):
            onepass.gemv_and_partial_norm_with_scratch(
                torch.zeros(3, 30).bfloat16(), torch.zeros(3, 20).bfloat16(), act, weight, gamma, 0.0,
                torch.zeros(1, dtype=I32), bad,
            )  # fmt: skip
        not_bool: Any = 1
        with pytest.raises(ContractError, match="gemv_and_partial_norm: `fused` must be a bool, got 1"):
            onepass.gemv_and_partial_norm(act, weight, gamma, fused=not_bool)


class TestOverlap:
    def test_outputs(self) -> None:
        act, weight, gamma = inputs()
        memory = torch.full((3, 50), 7.0).bfloat16()
        out = memory[:, :30], memory[:, 29:49]
        with pytest.raises(ContractError, match="norm: `unnormed_output` must not overlap `normed_output`"):
            onepass.gemv_and_partial_norm(act, weight, gamma, out=out)
        with pytest.raises(ContractError, match="_with_scratch: `unnormed_output` must not overlap `normed_output`"):
            onepass.gemv_and_partial_norm_with_scratch(*out, act, weight, gamma, 0.0, torch.zeros(1, dtype=I32))
        assert memory.eq(7).all()

    def test_an_input(self) -> None:
        _, weight, gamma = inputs()
        memory = torch.full((3, 70), 7.0).bfloat16()
        with pytest.raises(ContractError, match="`normed_output` must not overlap `act`"):
            onepass.gemv_and_partial_norm(
                memory[:, :64], weight, gamma, out=(memory[:, 40:70], torch.zeros(3, 20).bfloat16())
            )
        assert memory.eq(7).all()

    def test_the_counter(self) -> None:
        act, weight, gamma = inputs()
        memory = torch.zeros(3, 30, dtype=BF16)
        counter = memory.view(-1)[:2].view(I32)
        with pytest.raises(ContractError, match="must not overlap"):
            onepass.gemv_and_partial_norm_with_scratch(
                memory, torch.zeros(3, 20).bfloat16(), act, weight, gamma, 0.0, counter
            )
        assert not memory.any()


# --- counters ------------------------------------------------------------------------------------------------------


def into_scratch(counter: Tensor, act: Tensor, weight: Tensor, gamma: Tensor, more: list[Tensor]) -> list[Tensor]:
    """Results in the order of the allocating function."""
    widths = [len(gamma), *map(len, more), len(weight) - len(gamma) - sum(map(len, more))]
    normed, *further, unnormed = outs = [poison(torch.empty(len(act), w, dtype=act.dtype)) for w in widths]
    onepass.gemv_and_partial_norm_with_scratch(
        normed, unnormed, act, weight, gamma, 1e-6, counter, segments=more, segment_outputs=further
    )
    return outs


class TestCounter:
    shapes = ((1, 50, 64, 30), (16, 200, 33, 1), (2, 1000, 300, 999), (7, 3, 1, 3), (0, 50, 64, 30))

    @pytest.mark.parametrize("threads", [1, 2])
    def test_is_zero_again_and_serves_any_shape(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from onepass.cpu import gemv_partial_norm

        monkeypatch.setattr(gemv_partial_norm, "SERIAL_BELOW", 0)
        before, counter = torch.get_num_threads(), torch.zeros(5, dtype=I32)
        torch.set_num_threads(threads)
        try:
            for repeat in range(20):
                for m, n, k, width in self.shapes:
                    act, weight, gamma = inputs(m, n, k, width)
                    more = [torch.ones(1).bfloat16()] * (repeat % 4) if n - width >= 4 else []
                    expected = onepass.gemv_and_partial_norm(act, weight, gamma, segments=more)
                    assert all_same(into_scratch(counter, act, weight, gamma, more), expected)
                    assert not counter.any()
        finally:
            torch.set_num_threads(before)

    def test_a_failing_launch_poisons_nothing(self) -> None:
        act, weight, gamma = inputs()
        counter = torch.zeros(1, dtype=I32)
        expected = onepass.gemv_and_partial_norm(act, weight, gamma)

        def broken(family: str) -> Callable[..., None]:
            def launch(*arguments: Any) -> None:
                raise RuntimeError(f"{family} did not launch")

            return launch

        with launching_with(broken):
            for call in (
                lambda: onepass.gemv_and_partial_norm(act, weight, gamma),
                lambda: into_scratch(counter, act, weight, gamma, []),
                lambda: onepass.gemv_and_partial_norm(act, weight.to(F8), gamma, fused=False),
            ):
                with pytest.raises(RuntimeError, match="gemv_partial_norm did not launch"):
                    call()
        assert all_same(onepass.gemv_and_partial_norm(act, weight, gamma), expected)
        assert all_same(into_scratch(counter, act, weight, gamma, []), expected) and not counter.any()


@dataclass
class Gpu:
    """As much of torch as counters are taken from: a current stream, which may be capturing."""

    stream: int = 0
    capturing: bool = False
    zeroed: int = 0

    def zeros(self, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
        assert device in ("cuda:0", "cuda:1")
        self.zeroed += 1
        return torch.zeros(*shape, dtype=dtype)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Counters are taken from a `Gpu`; none has been taken yet."""
    fake = Gpu()
    cuda = SimpleNamespace(is_current_stream_capturing=lambda: fake.capturing)
    low = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: fake.stream)
    monkeypatch.setattr(_counters, "torch", SimpleNamespace(cuda=cuda, _C=low, zeros=fake.zeros, int32=I32))
    monkeypatch.setattr(_counters, "_streams", {})
    monkeypatch.setattr(_counters, "_pools", {})
    monkeypatch.setattr(_counters, "POOL", 8)
    return fake


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return pretend_gpu(monkeypatch)


class TestCountersOfAGpu:
    def test_a_stream_keeps_its_own(self, gpu: Gpu) -> None:
        taken: dict[tuple[int, int], Tensor] = {}
        for device, stream in ((0, 11), (0, 12), (1, 11), (0, 11), (1, 11), (0, 12)):
            gpu.stream = stream
            counter, key = _counters.take(device)
            assert key == (device, stream) and counter.dtype == I32 and counter.shape == (4,) and not counter.any()
            assert taken.setdefault(key, counter) is counter
        assert len({t.data_ptr() for t in taken.values()}) == 3

    def test_captured_calls_share_with_nobody(self, gpu: Gpu) -> None:
        eager, _ = _counters.take(0)
        gpu.capturing, before = True, gpu.zeroed
        taken = [_counters.take(0) for _ in range(8)]
        assert gpu.zeroed == before, "the pool was there before the capture"
        taken += [_counters.take(0) for _ in range(2)]  # more than were prepared: zeroed by the graph itself
        assert gpu.zeroed == before + 2
        assert all(key is None for _, key in taken)
        gpu.capturing = False
        assert _counters.take(0)[0] is eager
        gpu.capturing = True
        taken += [_counters.take(0) for _ in range(8)]
        places = [counter.data_ptr() for counter, _ in taken] + [eager.data_ptr()]
        assert len(set(places)) == len(places) == 19
        assert all(counter.shape == (4,) and not counter.any() for counter, _ in taken)

    def test_discarded_ones_are_not_used_again(self, gpu: Gpu) -> None:
        first, key = _counters.take(0)
        gpu.stream = 5
        other, _ = _counters.take(0)
        _counters.discard(key)
        _counters.discard(key)
        _counters.discard(None)
        assert _counters.take(0)[0] is other
        gpu.stream = 0
        again, same = _counters.take(0)
        assert same == key and again.data_ptr() != first.data_ptr() and not again.any()


# --- traces --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "widths"), [(96, (64,)), (2112, (1536, 512)), (5, (1, 1, 1, 1)), (24, (24,)), (25, (1,))]
)
@pytest.mark.parametrize("m", [1, 16])
def test_trace_blocks_are_those_that_run(m: int, n: int, widths: tuple[int, ...]) -> None:
    act, weight, gamma = inputs(m, n, 40, widths[0])
    more = [torch.ones(w).bfloat16() for w in widths[1:]]
    blocks = onepass.gemv_trace_blocks(act, weight, gamma, more)
    trace = GmemTrace.allocate(blocks + 3, "cpu")
    assert trace.units is not None
    trace.units.fill_(-1)
    outs = [torch.empty(m, w, dtype=BF16) for w in (*widths, n - sum(widths))]
    onepass.gemv_and_partial_norm_with_scratch(
        outs[0], outs[-1], act, weight, gamma, 1e-6, torch.zeros(len(widths), dtype=I32), trace,
        segments=more, segment_outputs=outs[1:-1],
    )  # fmt: skip
    events = trace.events()
    assert events[:blocks, 0].all() and not events[blocks:].any()
    assert trace.units[:blocks].ge(0).all() and trace.units[blocks:].eq(-1).all()
    assert all_same(outs, onepass.gemv_and_partial_norm(act, weight, gamma, segments=more))


def test_trace_blocks_refuses_what_a_call_would() -> None:
    act, weight, gamma = inputs()
    missing: Any = None
    for arguments in ((act, weight, torch.ones(51)), (act, weight[:, 1:], gamma), (act, weight, missing)):
        with pytest.raises(ContractError, match=r"^gemv_and_partial_norm: `(gamma|weight)` must"):
            onepass.gemv_trace_blocks(*arguments)


# --- torch ---------------------------------------------------------------------------------------------------------


def op_arguments(dtype: torch.dtype = F32, codes: torch.dtype | None = None) -> tuple[Any, ...]:
    """Positional arguments of ``torch.ops.onepass.gemv_and_partial_norm``."""
    act, weight, gamma = inputs(dtype=dtype)
    return act, weight, gamma, torch.ones(5), None, None, torch.rand(50), 1e-6, codes


def scratch_arguments(traced: bool) -> tuple[Any, ...]:
    """Positional arguments of ``torch.ops.onepass.gemv_and_partial_norm_with_scratch``."""
    *tensors, eps, codes = op_arguments()
    pair: tuple[Any, Any] = (None, None)
    if traced:
        act, weight, gamma, further = tensors[:4]
        trace = GmemTrace.allocate(onepass.gemv_trace_blocks(act, weight, gamma, [further]), "cpu")
        pair = trace.tensors()
    outs = torch.empty(3, 30), None, torch.empty(3, 5), None, None, torch.empty(3, 15)
    return (*tensors, torch.zeros(2, dtype=I32), *pair, eps, codes, *outs)


class TestOpcheck:
    def test_allocating(self) -> None:
        torch.library.opcheck(OPS.gemv_and_partial_norm.default, op_arguments())

    def test_codes(self) -> None:
        # opcheck compares with allclose, which has no float8
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(OPS.gemv_and_partial_norm.default, op_arguments(BF16, F8), test_utils=tests)

    def test_out(self) -> None:
        outs = torch.empty(3, 30), None, torch.empty(3, 5), None, None, torch.empty(3, 15)
        torch.library.opcheck(OPS.gemv_and_partial_norm_out.default, (*op_arguments(), *outs))

    def test_scratch(self) -> None:
        torch.library.opcheck(OPS.gemv_and_partial_norm_with_scratch.default, scratch_arguments(False))
        # two traces are never the same
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(OPS.gemv_and_partial_norm_with_scratch.default, scratch_arguments(True), test_utils=tests)


def everything(act: Tensor, weight: Tensor, gamma: Tensor, more: Tensor, counter: Tensor) -> tuple[Tensor, ...]:
    a = onepass.gemv_and_partial_norm(act, weight, gamma, segments=[more], normed_dtype=F8)
    b = onepass.gemv_and_partial_norm(act * 2, weight, gamma, fused=False)
    out = torch.empty_like(b[0]), torch.empty_like(b[1])
    onepass.gemv_and_partial_norm(act, weight, gamma, out=out)
    c = torch.empty_like(out[0]), torch.empty_like(out[1])
    onepass.gemv_and_partial_norm_with_scratch(c[0], c[1], act + 1, weight, gamma, 1e-6, counter)
    return a[0].float(), *a[1:], *b, *out, *c


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_whole_graph(backend: str) -> None:
    torch._dynamo.reset()
    compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(
        everything, fullgraph=True, dynamic=True, backend=backend
    )
    with torch.no_grad():
        for m in (3, 16):
            act, weight, gamma = inputs(m)
            arguments = (act, weight, gamma, torch.ones(5).bfloat16())
            counter = torch.zeros(1, dtype=I32)
            got, expected = compiled(*arguments, counter), everything(*arguments, torch.zeros(1, dtype=I32))
            assert all_same(got, expected) and not counter.any()


def test_the_first_call_of_a_process_may_be_a_compiled_one() -> None:
    code = (
        "import torch, onepass\n"
        "def call(act, weight, gamma):\n"
        "    out = torch.empty_like(act)\n"
        "    onepass.gemv_and_partial_norm_unfused_with_scratch(out, act, weight, gamma, 1e-6, torch.empty_like(act))\n"
        "    fused = [onepass.gemv_and_partial_norm(act, weight, gamma, fused=fused)[0] for fused in (True, False)]\n"
        "    return out, *fused\n"
        "with torch.no_grad():\n"
        "    got = torch.compile(call, fullgraph=True, backend='eager')(torch.ones(1, 4), 2 * torch.eye(4), torch.ones(4))\n"
        "print([t.tolist() for t in got])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(onepass.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[[pytest.approx(1.0)] * 4]] * 3


def test_compiled_bad_call_names_op_and_argument() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: onepass.gemv_and_partial_norm(*a), fullgraph=True, backend="aot_eager")
    with torch.no_grad(), pytest.raises(Exception, match="gemv_and_partial_norm: `act` must have at most 16 rows"):
        compiled(*inputs(17))


def test_export() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            _, weight, gamma = inputs()
            self.weight, self.gamma = torch.nn.Buffer(weight), torch.nn.Buffer(gamma)

        def forward(self, act: Tensor) -> tuple[Tensor, ...]:
            return onepass.gemv_and_partial_norm(act, self.weight, self.gamma)

    model, act = Model(), inputs()[0]
    program = torch.export.export(model, (act,))
    other = torch.randn_like(act)
    assert all_same(program.module()(other), model(other))
    assert any("onepass.gemv_and_partial_norm" in str(node.target) for node in program.graph.nodes)


class TestNoMemory:
    @pytest.mark.parametrize("options", [{}, {"normed_dtype": F8}, {"fused": False}])
    def test_fake_results_are_the_real_ones(self, options: dict[str, Any]) -> None:
        tensors = *inputs(), torch.ones(5)
        mode = torch._subclasses.FakeTensorMode()
        fakes = tuple(mode.from_tensor(t) for t in tensors)
        results = []
        for act, weight, gamma, further in (tensors, fakes):
            segments = [further] if "fused" not in options else []
            results.append(onepass.gemv_and_partial_norm(act, weight, gamma, segments=segments, **options))
        for real, fake in zip(*results, strict=True):
            assert isinstance(fake, torch._subclasses.FakeTensor)
            assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
            assert real.device == fake.device

    def test_meta(self) -> None:
        act, weight, gamma = (t.to("meta") for t in inputs())
        normed, unnormed = onepass.gemv_and_partial_norm(act, weight, gamma)
        assert (normed.shape, unnormed.shape) == ((3, 30), (3, 20)) and normed.is_meta and unnormed.is_meta
        normed, unnormed = onepass.gemv_and_partial_norm(act, weight, gamma, fused=False)
        assert (normed.shape, unnormed.shape) == ((3, 30), (3, 20)) and normed.is_meta and unnormed.is_meta

    def test_fake_scratch_call_writes_nothing(self) -> None:
        with torch._subclasses.FakeTensorMode():
            act, weight, gamma = inputs()
            outs = torch.zeros(3, 30, dtype=BF16), torch.zeros(3, 20, dtype=BF16)
            onepass.gemv_and_partial_norm_with_scratch(*outs, act, weight, gamma, 0.0, torch.zeros(1, dtype=I32))
            with pytest.raises(ContractError, match="_with_scratch: `finish_counter` must have an element for each"):
                onepass.gemv_and_partial_norm_with_scratch(*outs, act, weight, gamma, 0.0, torch.zeros(0, dtype=I32))


def test_gradients_are_refused_not_lost() -> None:
    act, weight, gamma = inputs()
    parameter = torch.nn.Parameter(weight)
    for fused in (True, False):
        with pytest.raises(
            ContractError, match=r"gemv_and_partial_norm: `weight` must need no gradient .*requires_grad"
        ):
            onepass.gemv_and_partial_norm(act, parameter, gamma, fused=fused)
        expected = onepass.gemv_and_partial_norm(act, weight, gamma, fused=fused)
        with torch.no_grad():
            results = onepass.gemv_and_partial_norm(act, parameter, gamma, fused=fused)
            assert all_same(results, expected) and not any(t.requires_grad for t in results)
        with torch.inference_mode():
            results = onepass.gemv_and_partial_norm(act, parameter, gamma, fused=fused)
            assert all_same(results, expected) and all(t.is_inference() for t in results)
