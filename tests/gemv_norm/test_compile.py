"""gemv_and_partial_norm under torch: opcheck, torch.compile, export, fake tensors, gradients."""

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
from onepass.errors import ContractError
from tests.gemv_norm.inputs import all_same, inputs

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
F8 = torch.float8_e4m3fn
OPS = torch.ops.onepass


def op_arguments(dtype: torch.dtype = F32, codes: torch.dtype | None = None) -> tuple[Any, ...]:
    """Positional arguments of ``torch.ops.onepass.gemv_and_partial_norm``."""
    act, weight, gamma = inputs(dtype=dtype)
    return act, weight, gamma, torch.ones(5), None, None, torch.rand(50), None, 1e-6, codes


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


@pytest.mark.full  # TestOpcheck stays
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


@pytest.mark.full  # torch.compile in a separate process
def test_first_call_of_a_process_may_be_compiled() -> None:
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
    def test_fake_results_match_real_ones(self, options: dict[str, Any]) -> None:
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

    def test_trace_blocks_of_meta_tensors_need_no_triton(self) -> None:
        code = (
            "import sys; sys.modules['triton'] = sys.modules['llvmlite'] = None\n"
            "import torch, onepass\n"
            "for device in ('cpu', 'meta'):\n"
            "    act, weight, gamma = (torch.empty(shape, device=device) for shape in ((1, 64), (48, 64), (16,)))\n"
            "    print(onepass.gemv_trace_blocks(act, weight, gamma))\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(onepass.__file__).parent.parent)}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        assert all(int(line) > 0 for line in done.stdout.splitlines()) and len(done.stdout.splitlines()) == 2

    def test_fake_scratch_call_writes_nothing(self) -> None:
        with torch._subclasses.FakeTensorMode():
            act, weight, gamma = inputs()
            outs = torch.zeros(3, 30, dtype=BF16), torch.zeros(3, 20, dtype=BF16)
            onepass.gemv_and_partial_norm_with_scratch(*outs, act, weight, gamma, 0.0, torch.zeros(1, dtype=I32))
            with pytest.raises(
                ContractError, match="_with_scratch: `finish_counter` must have one element per segment"
            ):
                onepass.gemv_and_partial_norm_with_scratch(*outs, act, weight, gamma, 0.0, torch.zeros(0, dtype=I32))


def test_gradients_raise_instead_of_being_lost() -> None:
    act, weight, gamma = inputs()
    parameter = torch.nn.Parameter(weight)
    for fused in (True, False):
        with pytest.raises(
            ContractError, match=r"gemv_and_partial_norm: `weight` must not require a gradient .*requires_grad"
        ):
            onepass.gemv_and_partial_norm(act, parameter, gamma, fused=fused)
        expected = onepass.gemv_and_partial_norm(act, weight, gamma, fused=fused)
        with torch.no_grad():
            results = onepass.gemv_and_partial_norm(act, parameter, gamma, fused=fused)
            assert all_same(results, expected) and not any(t.requires_grad for t in results)
        with torch.inference_mode():
            results = onepass.gemv_and_partial_norm(act, parameter, gamma, fused=fused)
            assert all_same(results, expected) and all(t.is_inference() for t in results)
