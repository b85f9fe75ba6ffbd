"""linear under torch: opcheck, torch.compile, export, fake tensors, gradients; and what it rejects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.errors import ContractError
from onepass.ops.linear.op import LINEAR
from onepass.testing.tensors import same_bytes
from tests.inputs import names, with_outputs
from tests.linear.inputs import blocks_arguments, linear_arguments

BF16, F32 = torch.bfloat16, torch.float32
F8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
OPS = torch.ops.onepass
OUTS = ("out", "residual_out")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def call(given: dict[str, Any]) -> tuple[Tensor, ...]:
    """The public function with the contract's arguments."""
    arguments = {name: value for name, value in given.items() if name != "block_scale"}
    if given.get("block_scale") is not None:
        arguments["weight_scale"] = given["block_scale"]
    results = onepass.linear(**arguments)
    return results if isinstance(results, tuple) else (results,)


# --- torch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [linear_arguments, blocks_arguments])
def test_opcheck(make: Callable[[], dict[str, Any]]) -> None:
    given = make()
    inputs = [given[name] for name in names(LINEAR) if name not in OUTS]
    # torch cannot compare float8 tensors, which the tests of schemas do
    tests: Any = {} if given["weight"].dtype is not F8 else {"test_utils": "test_faketensor"}
    torch.library.opcheck(OPS.linear.default, tuple(inputs), **tests)
    filled = with_outputs(LINEAR, given)
    torch.library.opcheck(OPS.linear_out.default, (*inputs, *(filled[name] for name in OUTS)), **tests)


def everything(x: Tensor, weight: Tensor, coded: Tensor, scale: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    gamma = torch.ones_like(weight[0])
    a, h = onepass.linear(x, weight, gamma=gamma, residual=residual, activation="silu_mul")
    b = onepass.linear(x * 2, coded, weight_scale=scale, add=torch.cat((a, a), -1), rounding="hf")
    onepass.linear(x, weight, add=b, out=b)
    c = onepass.linear(x, coded, weight_scale=torch.ones_like(weight[:, :1], dtype=F32), out_dtype=F32)
    return a, h, b, c


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.full])])
def test_compile_whole_graph(backend: str) -> None:
    torch._dynamo.reset()
    compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(
        everything, fullgraph=True, dynamic=True, backend=backend
    )
    weight = torch.randn(140, 136).bfloat16()
    fixed = weight, weight.to(F8), torch.rand(2, 2)
    with torch.no_grad():
        for lead in ((3,), (20,)):
            x, residual = torch.randn(*lead, 136).bfloat16(), torch.randn(*lead, 136)
            got, expected = compiled(x, *fixed, residual), everything(x, *fixed, residual)
            assert all(same_bytes(a, b) for a, b in zip(got, expected, strict=True))


def test_compiled_bad_call_names_op_and_argument() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: onepass.linear(*a, activation="silu_mul"), fullgraph=True, backend="aot_eager")
    with torch.no_grad(), pytest.raises(Exception, match="linear: `weight` must have an even number of rows"):
        compiled(torch.randn(2, 8), torch.randn(3, 8))


def test_export() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Buffer(torch.randn(12, 40).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            return onepass.linear(x, self.weight, gamma=self.weight[0])

    model, x = Model(), torch.randn(2, 3, 40).bfloat16()
    program = torch.export.export(model, (x,))
    assert same_bytes(program.module()(2 * x), model(2 * x))
    assert any("onepass.linear" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("make", [linear_arguments, blocks_arguments])
def test_fake_and_meta_results_match_real_ones(make: Callable[[], dict[str, Any]]) -> None:
    given = make()
    real = call(given)
    mode = torch._subclasses.FakeTensorMode()
    for convert in (mode.from_tensor, lambda t: t.to("meta")):
        results = call({name: convert(v) if isinstance(v, Tensor) else v for name, v in given.items()})
        for one, other in zip(real, results, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            assert isinstance(other, torch._subclasses.FakeTensor) or other.is_meta


@pytest.mark.parametrize("name", ["x", "weight", "gamma", "residual", "bias", "weight_scale", "add"])
def test_gradients_raise_instead_of_being_lost(name: str) -> None:
    given = linear_arguments()
    expected = call(given)
    given[name] = torch.nn.Parameter(given[name])
    with pytest.raises(ContractError, match=f"^linear: `{name}` must not require a gradient .*requires_grad"):
        call(given)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert all(same_bytes(a, b) for a, b in zip(call(given), expected, strict=True))


# --- refusals -------------------------------------------------------------------------------------------------------

X, W = torch.zeros(3, 140).bfloat16(), torch.zeros(260, 140).bfloat16()
W8 = W.to(F8)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("x", {"x": torch.zeros(3, 0), "weight": torch.zeros(4, 0)}, "have at least one column, got"),
    ("x", {"x": X.to(F8)}, "have dtype bfloat16 or float16 or float32, got float8_e4m3fn"),
    ("x", {"x": torch.tensor(1.0)}, r"have shape \[..., K\], got \[\]"),
    ("weight", {"weight": W[:, 1:]}, r"have shape \[N, K\] with N=260, K=140, got \[260, 139\]"),
    ("weight", {"weight": W[:0]}, "have at least one row, got"),
    ("weight", {"weight": W.half()}, "have dtype bfloat16 or float8_e4m3fn or int8, got float16"),
    ("weight", {"weight": torch.zeros(140, 260).bfloat16().t()}, "have a contiguous last dimension, got strides"),
    ("weight", {"weight": W[:3], "activation": "silu_mul"}, "have an even number of rows with an activation, got"),
    ("gamma", {"gamma": torch.ones(139)}, r"have shape \[K\] with K=140, got \[139\]"),
    ("residual", {"residual": X.half()}, "have dtype bfloat16 or float32, got float16"),
    ("residual", {"residual": X[:2]}, r"have shape \[..., K\] with ...=\[3\], K=140, got \[2, 140\]"),
    ("residual_out", {"residual_out": X}, "be None unless residual is not None, got"),
    ("bias", {"bias": torch.ones(3)}, r"have shape \[N\] with N=260, got \[3\]"),
    ("weight_scale", {"weight_scale": torch.ones(259)}, "have one element, or one per row of weight, got"),
    ("weight_scale", {"weight_scale": torch.ones(260).bfloat16()}, "have dtype float32, got bfloat16"),
    ("weight_scale", {"weight_scale": torch.ones(260, 1).double()}, "have dtype float32, got float64"),
    ("weight_scale", {"weight_scale": torch.ones(3, 2)}, r"have shape \[1\], \[N\] or \[N, 1\] unless weight is"),
    (
        "weight_scale",
        {"weight": W8, "weight_scale": torch.ones(2, 3)},
        r"have shape .*, \[ceil\(N / 128\), ceil\(K / 128\)\]=\[3, 2\], got a tensor \[2, 3\]",
    ),
    ("weight_scale", {"weight": W8, "weight_scale": torch.ones(2, 3).t()}, "have a contiguous last dimension, got"),
    ("weight_scale", {"weight": W8, "weight_scale": torch.ones(3, 2).half()}, "have dtype float32 or float8_e8m0fnu"),
    ("weight_scale", {"weight": W8, "weight_scale": torch.ones(1).to(E8M0)}, "have dtype float32, got float8_e8m0fnu"),
    ("weight_scale", {"weight_scale": 2.0}, "be a tensor, got 2.0"),
    ("activation", {"activation": "silu"}, "be 'silu_mul' or 'gelu_tanh_mul' or 'gelu_mul', got 'silu'"),
    ("add", {"add": torch.zeros(3, 259)}, "have as many columns as the result, I=260, got"),
    ("add", {"add": torch.zeros(3, 260), "activation": "gelu_mul"}, "have as many columns as the result, I=130, got"),
    ("add", {"add": torch.zeros(3, 260).half()}, "have dtype bfloat16 or float32, got float16"),
    ("out_dtype", {"out_dtype": torch.float16}, "be x's dtype or float32, got float16"),
    ("out_dtype", {"out_dtype": F8}, "be bfloat16 or float16 or float32, got float8_e4m3fn"),
    ("out_dtype", {"out_dtype": F32, "rounding": "hf"}, "be None or x's dtype with rounding='hf'"),
    ("out", {"out": torch.zeros(3, 260)}, "have dtype bfloat16, got float32"),
    ("rounding", {"rounding": "none"}, "be 'once' or 'hf', got 'none'"),
    ("eps", {"eps": -1.0}, "be a number and satisfy 0 <= eps < 1, got -1.0"),
]


@pytest.mark.parametrize(("argument", "change", "message"), REFUSED)
def test_error_messages(argument: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=f"^linear: `{argument}` must {message}"):
        onepass.linear(**({"x": X, "weight": W} | change))


@pytest.mark.parametrize(
    ("n", "k", "fits"), [(2**24, 2, True), (2, 2**24, True), (2**24 + 1, 2, False), (2, 2**24 + 1, False)]
)
def test_size_limit_of_weight(n: int, k: int, fits: bool) -> None:
    x, weight = (torch.empty(shape, dtype=BF16, device="meta") for shape in ((1, k), (n, k)))
    if fits:
        assert onepass.linear(x, weight).shape == (1, n)
    else:
        with pytest.raises(ContractError, match=r"`weight` must have at most 2\*\*24 rows and columns"):
            onepass.linear(x, weight)
