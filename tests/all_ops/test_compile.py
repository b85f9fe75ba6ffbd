"""The ops under torch: opcheck, torch.compile, export, dispatch modes, threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from onepass.ops.rms_norm.launch import GATE_ACTIVATIONS, GATE_ORDERS
from onepass.ops.rms_norm.op import (
    QUANTIZATION,
    RMS_NORM,
    RMS_NORM_ADD_RMS_NORM,
    RMS_NORM_ADD_RMS_NORM_QUANT,
    RMS_NORM_FUSED_QUANT,
)
from onepass.prologues import silu_and_mul
from onepass.testing.tensors import same_bytes
from tests.oracle.samples import sample

F8 = torch.float8_e4m3fn


def fp8_arguments(**changes: Any) -> tuple[Any, ...]:
    """Positional arguments of ``torch.ops.onepass.rms_norm_fused_quant``."""
    tensors = sample(RMS_NORM_FUSED_QUANT, {"N": 128}, (3, 4), dtypes={"x": torch.bfloat16}, optional=["gamma"])
    values = dict.fromkeys(RMS_NORM_FUSED_QUANT.args)
    values.update(prologue_args=[], **tensors, **{n: o.default for n, o in RMS_NORM_FUSED_QUANT.options.items()})
    return tuple({**values, **changes}.values())


FP8_VARIANTS: dict[str, dict[str, Any]] = {
    "row": {},
    "residual and norm": {"residual": torch.randn(3, 4, 128).bfloat16(), "return_norm": True},
    "groups": {"group_size": 64, "scale_layout": "column"},
    "ue8m0": {"scale_format": "ue8m0", "scales_dtype": torch.float8_e8m0fnu, "group_size": 128},
    "static": {"static_scale": torch.tensor(0.02)},
    "as vLLM": {
        "residual": torch.randn(3, 4, 128).bfloat16(),
        "rounding": "hf",
        "round_sum": False,
        "quantize": "divide",
        "min_scale": 1 / (448 * 512),
        "scale_ub_tensor": torch.tensor([1.5]),
    },
    "no gamma": {"gamma": None, "group_size": 64},
    "heads and rstd": {"gamma": None, "head_gamma": torch.randn(4, 128).bfloat16(), "return_rstd": True},
    "prologue": {"prologue": silu_and_mul.key, "prologue_args": [torch.randn(3, 4, 128).bfloat16()]},
}


@pytest.mark.parametrize("variant", FP8_VARIANTS)
def test_opcheck_fp8(variant: str) -> None:
    # opcheck compares with allclose, which has no float8
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.onepass.rms_norm_fused_quant.default, fp8_arguments(**FP8_VARIANTS[variant]), test_utils=tests
    )


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
def test_opcheck_rms_norm(lead: tuple[int, ...], residual: bool) -> None:
    optional = ["gamma", "residual"] if residual else ["gamma"]
    tensors = sample(RMS_NORM, {"N": 96}, lead, dtypes={"x": torch.float32}, optional=optional)
    options = (1e-6, 0.0, "once", None, "after", "silu", None, False)
    arguments = (tensors["x"], tensors["gamma"], tensors.get("residual"), None, None, None, *options)
    torch.library.opcheck(torch.ops.onepass.rms_norm.default, arguments)
    outs = (torch.empty_like(tensors["x"]), torch.empty_like(tensors["x"]) if residual else None)
    torch.library.opcheck(torch.ops.onepass.rms_norm_out.default, (*arguments, *outs, None))


def test_gated_norms_compile() -> None:
    """All activations and orders, in one graph."""
    x, gate, gamma = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
    ways: list[Any] = [{"gate_order": o, "gate_activation": a} for o in GATE_ORDERS for a in GATE_ACTIVATIONS]

    def norms(x: Tensor, gate: Tensor) -> list[Tensor]:
        return [onepass.rms_norm(x, gamma, gate=gate, **way) for way in ways]

    torch._dynamo.reset()
    found, expected = torch.compile(norms, fullgraph=True, backend="aot_eager")(x, gate), norms(x, gate)
    assert all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize("heads", [False, True])
def test_opcheck_weights_and_statistics(heads: bool) -> None:
    """Without gamma or with one of each head, and with the reciprocal RMS."""
    x, gamma = torch.randn(2, 3, 96), torch.randn(3, 96) if heads else None
    arguments = (x, None, None, None, None, gamma, 1e-6, 0.0, "once", None, "after", "silu", None, True)
    torch.library.opcheck(torch.ops.onepass.rms_norm.default, arguments)
    outs = (torch.empty_like(x), None, torch.empty(2, 3))
    torch.library.opcheck(torch.ops.onepass.rms_norm_out.default, (*arguments, *outs))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: onepass.rms_norm(x, gamma, return_rstd=True), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for found, wanted in zip(compiled(x), onepass.rms_norm(x, gamma, return_rstd=True), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("quantized", [False, True])
def test_opcheck_sandwich(quantized: bool) -> None:
    contract = RMS_NORM_ADD_RMS_NORM_QUANT if quantized else RMS_NORM_ADD_RMS_NORM
    tensors = sample(contract, {"N": 96}, (2, 3), dtypes={"x": torch.float32})
    options = {name: option.default for name, option in contract.options.items()}
    arguments = tuple({**dict.fromkeys(contract.args), **tensors, **options}.values())
    if quantized:
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # allclose has no float8
        torch.library.opcheck(torch.ops.onepass.rms_norm_add_rms_norm_quant.default, arguments, test_utils=tests)
        return
    torch.library.opcheck(torch.ops.onepass.rms_norm_add_rms_norm.default, arguments)
    outs = (torch.empty_like(tensors["x"]), tensors["residual"])
    torch.library.opcheck(torch.ops.onepass.rms_norm_add_rms_norm_out.default, (*arguments, *outs))


def sandwich(x: Tensor, gamma: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    y, h = onepass.rms_norm_add_rms_norm(x, gamma, gamma + 1, residual=residual, rounding="hf")
    out = torch.empty_like(x)
    onepass.rms_norm_add_rms_norm(y, gamma, gamma, residual=h, out=out)
    codes, scale, *rest = onepass.rms_norm_add_rms_norm_quant(
        out, gamma, gamma, residual=h, format="mxfp8", return_norm=True
    )
    return y, h, out, codes.float(), scale.view(torch.uint8), *rest


def test_compile_sandwich() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(sandwich, fullgraph=True, dynamic=True, backend="aot_eager")
    gamma = torch.randn(96).bfloat16()
    for rows in (2, 5):
        x, residual = torch.randn(rows, 3, 96).bfloat16(), torch.randn(rows, 3, 96).bfloat16()
        found, expected = compiled(x, gamma, residual), sandwich(x, gamma, residual)
        assert len(found) == 7 and all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


def test_opcheck_quantize() -> None:
    tensors = sample(QUANTIZATION, {"N": 96}, (2, 3), dtypes={"x": torch.bfloat16}, optional=("gate",))
    options = {name: option.default for name, option in QUANTIZATION.options.items()}
    arguments = tuple({**dict.fromkeys(QUANTIZATION.args), **tensors, **options}.values())
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # allclose has no float8
    torch.library.opcheck(torch.ops.onepass.quantize.default, arguments, test_utils=tests)
    integers = tuple({**dict.fromkeys(QUANTIZATION.args), **tensors, **options, "format": "int8"}.values())
    torch.library.opcheck(torch.ops.onepass.quantize.default, integers)
    outs = (torch.empty(2, 3, 96, dtype=torch.int8), torch.empty(2, 3, 1))
    torch.library.opcheck(torch.ops.onepass.quantize_out.default, (*integers, *outs))


def activations(gate_up: Tensor) -> tuple[Tensor, ...]:
    gate, x = gate_up.chunk(2, -1)
    codes, scale = onepass.quantize(x, gate=gate, rounding="hf", group_size=32)
    pairs, tiles = onepass.quantize(
        x, format="nvfp4", scale_layout="128x4", scale_out=x.new_zeros(128, 8).to(torch.float8_e4m3fn)
    )
    integers, static = onepass.quantize(x, format="int8", static_scale=gate_up.new_ones((), dtype=torch.float32))
    return codes.float(), scale, pairs, tiles.view(torch.uint8), integers, static


def test_compile_quantize() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(activations, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (2, 5):
        gate_up = torch.randn(rows, 3, 192).bfloat16()
        found, expected = compiled(gate_up), activations(gate_up)
        assert len(found) == 6 and all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


def every_rstd(x: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    """With a gamma of each head."""
    y = onepass.layer_norm(x, gamma, return_rstd=True)
    fp8 = onepass.rms_norm_fused_fp8(x, gamma, return_rstd=True)
    int8 = onepass.rms_norm_fused_quant(x, gamma, format="int8", statistic="layer", return_rstd=True)
    return *y, fp8[0].float(), *fp8[1:], *int8


def test_compile_heads_and_statistics_of_every_op() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(every_rstd, fullgraph=True, dynamic=True, backend="aot_eager")
    gamma = torch.randn(3, 96)
    for rows in (2, 5):
        x = torch.randn(rows, 3, 96)
        found, expected = compiled(x, gamma), every_rstd(x, gamma)
        assert len(found) == 8 and all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


def everything(x: Tensor, gamma: Tensor, residual: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    y, h = onepass.rms_norm(x, gamma, residual=residual)
    out = torch.empty_like(x)
    onepass.rms_norm(y, gamma, out=out)
    q, s = onepass.rms_norm_fused_fp8(h, gamma, prologue=silu_and_mul, prologue_args=[gate])
    q2, s2 = onepass.rms_norm_fused_fp8(out * 2, gamma, group_size=64)
    return y, h, out, q.float(), s, q2.float(), s2


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compile_whole_graph_dynamic(backend: str) -> None:
    torch._dynamo.reset()
    compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(
        everything, fullgraph=True, dynamic=True, backend=backend
    )
    with torch.no_grad():
        for rows in (3, 7, 1):
            arguments = [torch.randn(rows, 128).bfloat16() if i != 1 else torch.randn(128).bfloat16() for i in range(4)]
            for got, expected in zip(compiled(*arguments), everything(*arguments), strict=True):
                assert same_bytes(got, expected)


def test_compiled_bad_call_names_op_and_argument() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, g: onepass.rms_norm(x, g), fullgraph=True, backend="aot_eager")
    with torch.no_grad(), pytest.raises(Exception, match="rms_norm: `gamma` must have shape"):
        compiled(torch.randn(3, 64), torch.ones(63))


def test_in_place_under_compile() -> None:
    torch._dynamo.reset()

    def step(x: Tensor, residual: Tensor, gamma: Tensor) -> Tensor:
        onepass.rms_norm(x, gamma, residual=residual, out=x, residual_out=residual)
        return x + residual

    x, r, gamma = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
    x2, r2 = x.clone(), r.clone()
    with torch.no_grad():
        expected = step(x, r, gamma)
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(x2, r2, gamma)
    assert same_bytes(got, expected) and same_bytes(x, x2) and same_bytes(r, r2)


def test_export() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = torch.nn.Buffer(torch.randn(64))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = onepass.rms_norm(x, self.gamma)
            return y

    model, x = Model(), torch.randn(5, 64)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    longer = torch.randn(9, 64)
    assert same_bytes(program.module()(longer), model(longer))
    assert any("onepass.rms_norm" in str(node.target) for node in program.graph.nodes)


def test_dispatch_modes_see_the_op() -> None:
    class Log(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    log = Log()
    x, gamma = torch.randn(3, 64), torch.ones(64)
    with log:
        y = onepass.rms_norm(x, gamma)
    assert "onepass.rms_norm.default" in log.names
    assert same_bytes(y, onepass.rms_norm(x, gamma))


def test_gradients_raise_instead_of_being_lost() -> None:
    gamma = torch.nn.Parameter(torch.ones(64))
    x = torch.randn(3, 64)
    with pytest.raises(
        onepass.ContractError, match=r"rms_norm: `gamma` must not require a gradient .* got requires_grad=True"
    ):
        onepass.rms_norm(x, gamma)
    with torch.no_grad():
        assert not onepass.rms_norm(x, gamma).requires_grad
    with torch.inference_mode():
        assert onepass.rms_norm(x, gamma).is_inference()


def test_tensor_subclass_goes_through_the_dispatcher() -> None:
    class Tagged(Tensor):
        pass

    x = torch.randn(3, 64)
    y = onepass.rms_norm(x.as_subclass(Tagged), torch.ones(64))
    assert same_bytes(y.as_subclass(Tensor), onepass.rms_norm(x, torch.ones(64)))


def test_unsupported_device_error_names_supported_ones() -> None:
    class Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("mps")

    with pytest.raises(onepass.Unsupported, match=r"rms_norm: `x` is on mps; only cpu and cuda have kernels"):
        onepass.rms_norm(torch.randn(3, 64).as_subclass(Elsewhere), torch.ones(64))


def test_python_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    x, gamma = torch.randn(300, 512).bfloat16(), torch.randn(512).bfloat16()
    expected = onepass.rms_norm_fused_fp8(x, gamma)

    def work(_: int) -> bool:
        with torch.inference_mode():
            return all(same_bytes(a, b) for a, b in zip(onepass.rms_norm_fused_fp8(x, gamma), expected, strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(200)))
