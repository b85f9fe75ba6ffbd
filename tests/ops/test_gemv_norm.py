"""gemv_and_partial_norm as its callers see it, on the CPU: results, two launches, traces, torch's compilers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass import GmemTrace
from onepass.cpu import arguments as cpu_args
from onepass.errors import ContractError
from onepass.ops import gemv_norm
from onepass.ops.dispatch import launching_with
from onepass.testing import compare, oracle
from onepass.testing.case import poison, same_bytes
from tests.helpers.gemv_inputs import all_same, inputs
from tools.promises.gemv_norm import gemv_promises

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
F8 = torch.float8_e4m3fn
OPS = torch.ops.onepass


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


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

    def test_no_rows_launch_nothing(self) -> None:
        _, weight, gamma = inputs()
        launches: list[str] = []
        with launching_with(lambda family: lambda *_: launches.append(family)):
            onepass.gemv_and_partial_norm(weight[:0], weight, gamma)
            onepass.gemv_and_partial_norm(weight[:0], weight.to(F8), gamma, fused=False)
        assert not launches

    def test_a_plain_product_is_one_launch(self) -> None:
        """Whatever the number of its rows."""
        act, weight, y = (torch.empty(shape) for shape in ((40, 8), (5, 8), (40, 5)))
        seen: list[int] = []
        with launching_with(lambda family: lambda call: seen.append(call.act.shape[0])):
            gemv_norm._plain_kernel({}, act, weight, None, y)
        assert seen == [40]

    def test_a_cpu_runs_a_plain_product_for_as_many_rows_as_a_kernel_holds(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []
        divide = cpu_args.row_blocks

        def counted(m: int) -> tuple[int, int]:
            seen.append(m)
            return divide(m)

        monkeypatch.setattr(cpu_args, "row_blocks", counted)
        act, weight, gamma = inputs(40)
        onepass.gemv_and_partial_norm(act, weight.to(F8), gamma, fused=False)
        assert seen == [16, 16, 8]

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
