"""What gemv_and_partial_norm rejects, and how its counters are managed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.backend import launching_with
from onepass.errors import ContractError
from onepass.gpu import counters
from onepass.ops.gemv_norm.op import GEMV, GEMV_WITH_SCRATCH
from onepass.testing.tensors import same_bytes
from tests.gemv_norm.inputs import RawTrace, all_same, inputs
from tests.helpers.mistakes import Mistake, mistakes
from tests.oracle.memory import poison
from tests.oracle.samples import sample

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
F8 = torch.float8_e4m3fn
OPS = torch.ops.onepass


# --- refusals ------------------------------------------------------------------------------------------------------


SIZES = {"M": 3, "N": 40, "K": 64, "W0": 24, "W1": 8, "S": 40, "C": 2, "E": 48, "B": 3}
OPTIONAL = ["gamma1", "weight_scale", "trace", "units"]


@pytest.mark.parametrize(
    ("n", "k", "fits"), [(2**24, 2, True), (2, 2**24, True), (2**24 + 1, 2, False), (2, 2**24 + 1, False)]
)
def test_size_limit_of_weight(n: int, k: int, fits: bool) -> None:
    act, weight, gamma = (torch.empty(shape, dtype=BF16, device="meta") for shape in ((1, k), (n, k), (2,)))
    if fits:
        assert onepass.gemv_and_partial_norm(act, weight, gamma)[0].shape == (1, 2)
    else:
        with pytest.raises(ContractError, match="`weight` must have at most 2"):
            onepass.gemv_and_partial_norm(act, weight, gamma)


def good_call(with_scratch: bool) -> dict[str, Any]:
    contract = GEMV_WITH_SCRATCH if with_scratch else GEMV
    tensors: dict[str, Any] = dict(sample(contract, SIZES, (), dtypes={"act": BF16}, optional=OPTIONAL))
    for name in ("finish_counter", "trace", "units"):
        if name in tensors:
            tensors[name].zero_()
    return {**tensors, "eps": 1e-6}


@dataclass
class Call:
    """One call with outputs filled with sevens, from a contract's arguments."""

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
def test_bad_argument_is_named(with_scratch: bool, mistake: Mistake) -> None:
    contract = GEMV_WITH_SCRATCH if with_scratch else GEMV
    call = Call(with_scratch, mistake.arguments)
    with torch.enable_grad(), pytest.raises(ContractError) as caught:
        call.run()
    in_list = mistake.argument == "gamma1" and not isinstance(mistake.arguments["gamma1"], Tensor)
    argument = "segments" if in_list else mistake.argument
    assert str(caught.value).startswith(f"{contract.name}: `{argument}` must "), str(caught.value)
    assert ", got " in str(caught.value)
    call.assert_nothing_written()


def test_there_are_many_bad_arguments_and_the_good_calls_pass() -> None:
    assert len(all_mistakes()) > 110
    for with_scratch in (False, True):
        call = Call(with_scratch, good_call(with_scratch))
        call.run()
        assert not any(out.eq(7).all() for i, out in enumerate(call.outs) if i != 1)


REFUSED: list[tuple[str, Any, str]] = [
    ("act", torch.zeros(17, 64).bfloat16(), r"have at most 16 rows \(fused=False takes any number\), got"),
    ("weight", torch.zeros(40, 63).bfloat16(), r"have shape \[N, K\] with .*K=64, got \[40, 63\]"),
    ("weight", torch.zeros(40, 64).half(), r"have dtype bfloat16 or float8_e4m3fn or int8, got float16"),
    ("weight", torch.zeros(40, 64).to(torch.float8_e5m2), r"have dtype bfloat16 or float8_e4m3fn or int8, got"),
    ("gamma", torch.ones(0).bfloat16(), r"have at least one element, got"),
    (
        "gamma",
        torch.ones(33).bfloat16(),
        r"have at most as many elements, further segments included, as weight has rows",
    ),
    ("gamma1", torch.ones(0), r"have at least one element, got"),
    ("gamma1", torch.ones(8).double(), r"have dtype bfloat16 or float16 or float32, got float64"),
    ("weight_scale", torch.ones(39), r"have one element, or one per row of weight, got"),
    ("weight_scale", torch.ones(0), r"have one element, or one per row of weight, got"),
    ("weight_scale", torch.ones(40).bfloat16(), r"have dtype float32, got bfloat16"),
    ("finish_counter", torch.zeros(2, dtype=torch.int64), r"have dtype int32, got int64"),
    ("finish_counter", torch.zeros(1, dtype=I32), r"have one element per segment, got"),
    ("finish_counter", torch.zeros(4, dtype=I32)[::2], r"be contiguous, got strides \(2,\)"),
    ("trace", torch.zeros(47, dtype=torch.int64), r"have 16 slots per block \(gemv_trace_blocks counts"),
    ("units", torch.zeros(2, dtype=I32), r"have one element per block, got"),
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
def test_error_messages(with_scratch: bool, argument: str, change: Any, message: str) -> None:
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
                **{**given, argument: bad},
                act=act,
                weight=weight,
                gamma=gamma,
                eps=0.0,
                finish_counter=torch.zeros(1, dtype=I32),
            )
        assert all(t.eq(7).all() for t in given.values())

    widths = (("normed_output", 30), ("unnormed_output", 20))

    def test_scale_is_required_for_codes_only(self) -> None:
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
                torch.zeros(3, 30).bfloat16(),
                torch.zeros(3, 20).bfloat16(),
                act,
                weight,
                gamma,
                0.0,
                torch.zeros(1, dtype=I32),
                bad,
            )
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
    """Results in the order of the function that allocates them."""
    widths = [len(gamma), *map(len, more), len(weight) - len(gamma) - sum(map(len, more))]
    normed, *further, unnormed = outs = [poison(torch.empty(len(act), w, dtype=act.dtype)) for w in widths]
    onepass.gemv_and_partial_norm_with_scratch(
        normed, unnormed, act, weight, gamma, 1e-6, counter, segments=more, segment_outputs=further
    )
    return outs


class TestCounter:
    shapes = ((1, 50, 64, 30), (16, 200, 33, 1), (2, 1000, 300, 999), (7, 3, 1, 3), (0, 50, 64, 30))

    @pytest.mark.parametrize("threads", [1, 2])
    def test_is_zero_again_and_works_for_any_shape(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from onepass.ops.gemv_norm import cpu as gemv_norm

        monkeypatch.setattr(gemv_norm, "SERIAL_BELOW", 0)
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

    def test_failed_launch_leaves_no_used_counter(self) -> None:
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
                with pytest.raises(RuntimeError, match="gemv_norm did not launch"):
                    call()
        assert all_same(onepass.gemv_and_partial_norm(act, weight, gamma), expected)
        assert all_same(into_scratch(counter, act, weight, gamma, []), expected) and not counter.any()


@dataclass
class Gpu:
    """A stand-in for the parts of torch that counters use: a current stream, which may be capturing."""

    stream: int = 0
    capturing: bool = False
    zeroed: int = 0

    def zeros(self, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
        assert device in ("cuda:0", "cuda:1")
        self.zeroed += 1
        return torch.zeros(*shape, dtype=dtype)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Take counters from a `Gpu`, starting with none."""
    fake = Gpu()
    cuda = SimpleNamespace(is_current_stream_capturing=lambda: fake.capturing)
    low = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: fake.stream)
    monkeypatch.setattr(counters, "torch", SimpleNamespace(cuda=cuda, _C=low, zeros=fake.zeros, int32=I32))
    monkeypatch.setattr(counters, "_streams", {})
    monkeypatch.setattr(counters, "_pools", {})
    monkeypatch.setattr(counters, "POOL", 32)
    monkeypatch.setattr(counters, "MOST", 16)
    return fake


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return pretend_gpu(monkeypatch)


class TestCountersOfAGpu:
    def test_each_stream_has_its_own(self, gpu: Gpu) -> None:
        taken: dict[tuple[int, int], Tensor] = {}
        for device, stream in ((0, 11), (0, 12), (1, 11), (0, 11), (1, 11), (0, 12)):
            gpu.stream = stream
            counter, key = counters.take(device, 4)
            assert key == (device, stream) and counter.dtype == I32 and counter.shape == (16,) and not counter.any()
            assert taken.setdefault(key, counter) is counter
        assert len({t.data_ptr() for t in taken.values()}) == 3

    def test_captured_calls_share_none(self, gpu: Gpu) -> None:
        eager, _ = counters.take(0, 4)
        gpu.capturing, before = True, gpu.zeroed
        taken = [counters.take(0, 4) for _ in range(8)]
        assert gpu.zeroed == before, "the pool was there before the capture"
        taken += [counters.take(0, 4) for _ in range(2)]  # more than were prepared: zeroed by the graph itself
        assert gpu.zeroed == before + 2
        assert all(key is None for _, key in taken)
        gpu.capturing = False
        assert counters.take(0, 4)[0] is eager
        gpu.capturing = True
        taken += [counters.take(0, 4) for _ in range(8)]
        places = [counter.data_ptr() for counter, _ in taken] + [eager.data_ptr()]
        assert len(set(places)) == len(places) == 19
        assert all(counter.shape == (4,) and not counter.any() for counter, _ in taken)

    def test_captured_calls_of_several_sizes_do_not_overlap(self, gpu: Gpu) -> None:
        counters.take(0, 4)
        gpu.capturing, before = True, gpu.zeroed
        sizes = (4, 16, 7)
        taken = [counters.take(0, size)[0] for size in sizes]
        assert gpu.zeroed == before and [len(counter) for counter in taken] == list(sizes)
        places = [counter.data_ptr() + 4 * i for counter in taken for i in range(len(counter))]
        assert len(set(places)) == sum(sizes)
        assert len(counters.take(0, 6)[0]) == 6 and gpu.zeroed == before + 1, (
            "five are left, so the graph zeroes others"
        )

    def test_many_are_zeroed_for_each_launch(self, gpu: Gpu) -> None:
        first, key = counters.take(0, 17)
        assert len(first) == 17 and key is None and counters.take(0, 17)[0].data_ptr() != first.data_ptr()

    def test_discarded_ones_are_not_reused(self, gpu: Gpu) -> None:
        first, key = counters.take(0, 4)
        gpu.stream = 5
        other, _ = counters.take(0, 4)
        counters.discard(key)
        counters.discard(key)
        counters.discard(None)
        assert counters.take(0, 4)[0] is other
        gpu.stream = 0
        again, same = counters.take(0, 4)
        assert same == key and again.data_ptr() != first.data_ptr() and not again.any()
