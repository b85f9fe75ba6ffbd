"""`MergedLinear`: results, merged weights, memory that the given layers share, and errors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass import ContractError, quantize_weight
from onepass.nn import Linear, LinearFP8, MergedLinear, RMSNorm
from onepass.weights import SCHEMES, Scheme
from tests.nn.test_linear import close, same, tensors

BF16 = torch.bfloat16
K, SIZES = 200, [256, 128, 72]


@pytest.fixture(autouse=True)
def inference() -> object:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def layers(sizes: list[int] = SIZES, bias: bool = True) -> list[nn.Linear]:
    with torch.inference_mode(False):
        return [nn.Linear(K, n, bias, dtype=BF16) for n in sizes]


def weight_bytes(*modules: nn.Module) -> int:
    """The bytes of the distinct memory of all parameters."""
    storages = (p.untyped_storage() for m in modules for p in m.parameters())
    total = end = 0
    for start, size in sorted((storage.data_ptr(), storage.nbytes()) for storage in storages):
        total += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return total


def within(part: Tensor, whole: Tensor) -> bool:
    """Whether a tensor lies in the memory of another one, with a storage of its own."""
    storage, offset = part.untyped_storage(), part.data_ptr() - whole.data_ptr()
    return offset >= 0 and offset + storage.nbytes() <= whole.nbytes and storage.nbytes() == part.nbytes < whole.nbytes


@pytest.mark.parametrize("bias", [True, False])
def test_merged_layers(bias: bool) -> None:
    """Views of one result, each within rounding of its layer."""
    given = layers(bias=bias)
    x = torch.randn(2, 3, K, dtype=BF16)
    exact = [nn.functional.linear(x.double(), m.weight.double(), m.bias.double() if bias else None) for m in given]
    merged = MergedLinear.from_linears(given)
    parts = merged(x)
    assert isinstance(parts, tuple) and [p.shape[-1] for p in parts] == SIZES
    whole = onepass.linear(x, merged.weight, bias=merged.bias)
    assert same(torch.cat(parts, -1), whole) and len({p.untyped_storage().data_ptr() for p in parts}) == 1
    for part, wanted in zip(parts, exact, strict=True):
        close(part, wanted)
    assert list(merged.state_dict()) == ["weight", "bias"][: 1 + bias]
    again = MergedLinear(K, SIZES, bias, dtype=BF16)
    again.load_state_dict(merged.state_dict())
    assert same(torch.cat(again(x), -1), whole)


@pytest.mark.parametrize("inside", [True, False])
def test_layers_share_the_merged_memory(inside: bool) -> None:
    given = layers()
    parameters = [p for m in given for p in m.parameters()]
    values = [{name: t.clone() for name, t in m.state_dict().items()} for m in given]
    separate = weight_bytes(*given)
    x = torch.randn(3, K, dtype=BF16)
    before = [m(x) for m in given]
    with torch.inference_mode(inside), torch.no_grad():
        merged = MergedLinear.from_linears(given)
    assert weight_bytes(merged, *given) == separate == (2 * sum(SIZES)) * (K + 1)
    assert all(p is q for p, q in zip((p for m in given for p in m.parameters()), parameters, strict=True))
    assert all(p.requires_grad for p in (*parameters, *merged.parameters()))
    for module, value, y in zip(given, values, before, strict=True):
        state = module.state_dict()
        assert list(state) == list(value) and all(same(state[name], value[name]) for name in value)
        assert same(module(x), y)
    # what is loaded into a layer is loaded into the merged one
    other = layers()
    for module, source in zip(given, other, strict=True):
        module.load_state_dict(source.state_dict())
    wanted = MergedLinear.from_linears(other, share=False)
    assert same(merged.weight, wanted.weight) and same(torch.cat(merged(x), -1), torch.cat(wanted(x), -1))
    assert weight_bytes(wanted, *other) == 2 * separate


def test_what_ends_the_sharing() -> None:
    """Moving, converting or copying one side; merging again restores it."""
    given = layers()
    merged = MergedLinear.from_linears(given)
    separate = weight_bytes(merged)
    copied, *copies = copy.deepcopy([merged, *given])
    assert weight_bytes(copied, *copies) == 2 * separate
    merged.to(BF16)  # nothing to convert
    assert weight_bytes(merged, *given) == separate
    with torch.inference_mode(False):
        given[1].float()
    assert not within(given[1].weight, merged.weight)
    assert merged.weight.dtype is BF16
    with torch.inference_mode(False):
        given[1].to(BF16)
    again = MergedLinear.from_linears(given)
    assert weight_bytes(again, *given) == separate and same(again.weight, merged.weight)


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_merged_layers_are_saved_whole(scheme: Scheme | None, tmp_path: Path) -> None:
    """safetensors refuses or drops tensors with the same storage, with the merged layer in the model or without it."""
    files = pytest.importorskip("safetensors.torch")
    given: list[Any] = [m if scheme is None else Linear.from_linear(m, scheme) for m in layers()]
    before = {name: t.clone() for name, t in nn.ModuleList(given).state_dict().items()}
    merged = MergedLinear.from_linears(given)
    for model in (nn.ModuleList(given), nn.ModuleList([*given, merged])):
        files.save_model(model, str(tmp_path / "model"))
        loaded = files.load_file(tmp_path / "model")
        assert loaded.keys() == model.state_dict().keys()
        assert all(same(loaded[name], value) for name, value in before.items())
    one = given[1]
    torch.save(one.state_dict(), tmp_path / "one")
    assert (tmp_path / "one").stat().st_size < 3000 + weight_bytes(one), "only its own rows"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_while_merging(scheme: Scheme) -> None:
    """The codes and scales of the layers one by one. Float layers stay as they are."""
    given = layers()
    own = [p.data_ptr() for m in given for p in m.parameters()]
    merged = MergedLinear.from_linears(given, scheme)
    assert own == [p.data_ptr() for m in given for p in m.parameters()]
    parts = [quantize_weight(m.weight, scheme) for m in given]
    scales = [scale.expand(n) if scheme == "fp8_tensor" else scale for (_, scale), n in zip(parts, SIZES, strict=True)]
    assert merged.scheme == ("fp8_row" if scheme == "fp8_tensor" else scheme)
    assert same(merged.weight, torch.cat([codes for codes, _ in parts]))
    assert merged.weight_scale is not None and same(merged.weight_scale, torch.cat(scales))
    assert not any(p.requires_grad for p in merged.parameters())
    x = torch.randn(3, K, dtype=BF16)
    whole = onepass.linear(x, merged.weight, weight_scale=merged.weight_scale, bias=merged.bias)
    assert same(torch.cat(merged(x), -1), whole)
    for part, module in zip(merged(x), given, strict=True):
        decoded = onepass.dequantize_weight(*quantize_weight(module.weight, scheme)).double()
        close(part, nn.functional.linear(x.double(), decoded, module.bias.double()))
    converted = copy.deepcopy(merged).to(torch.float16)
    assert same(converted.weight, merged.weight) and same(converted.get_parameter("weight_scale"), merged.weight_scale)


@pytest.mark.parametrize("scheme", [*SCHEMES, "LinearFP8"])
def test_quantized_layers_are_merged(scheme: Any) -> None:
    """Rows or blocks are concatenated, and the layers become views."""
    floats = layers()
    if scheme == "LinearFP8":
        given: list[Any] = [LinearFP8.from_linear(m) for m in floats]
        merged_scheme: Scheme = "fp8_row"
    else:
        given, merged_scheme = [Linear.from_linear(m, scheme) for m in floats], scheme
    values = [{name: t.clone() for name, t in m.state_dict().items()} for m in given]
    separate = weight_bytes(*given)
    merged = MergedLinear.from_linears(given)
    wanted = MergedLinear.from_linears(floats, merged_scheme)
    assert merged.scheme == wanted.scheme
    assert all(same(tensor, tensors(wanted)[name]) for name, tensor in merged.named_parameters())
    for module, value in zip(given, values, strict=True):
        assert all(same(tensor, value[name]) for name, tensor in module.state_dict().items())
        assert within(module.weight, merged.weight)
    scales = 4 * (sum(SIZES) + 3) if scheme == "fp8_tensor" else 0  # the layers' own, and one per row
    assert weight_bytes(merged, *given) == separate + scales - 12 * (scheme == "fp8_tensor")


@pytest.mark.parametrize("scale", [torch.tensor([0.25]), torch.full((8, 1), 0.25, dtype=BF16)], ids=["one", "bfloat16"])
def test_scales_of_other_shapes_and_dtypes_are_copied(scale: Tensor) -> None:
    given = [Linear(K, 8, dtype=BF16, scheme="int8_row") for _ in range(2)]
    for module in given:
        module.weight_scale = nn.Parameter(scale, requires_grad=False)
    merged = MergedLinear.from_linears(given)
    assert torch.equal(merged.get_parameter("weight_scale"), torch.full((16,), 0.25))
    for module in given:
        assert module.weight_scale is not None and same(module.weight_scale, scale)
        assert within(module.weight, merged.weight)


@pytest.mark.sampled(40)  # each compiles kernels
@pytest.mark.parametrize("activation", ["silu_mul", "gelu_tanh_mul"])
def test_gate_and_up(activation: Any) -> None:
    gate, up = layers([136, 136])
    norm = RMSNorm(K, 1e-6, dtype=BF16)
    merged = MergedLinear.from_linears([gate, up], activation=activation)
    x, residual, add = (torch.randn(3, n, dtype=BF16) for n in (K, K, 136))
    y, h = merged(x, residual, norm=norm, add=add)
    normed, wanted = norm(x, residual)
    assert same(h, wanted)
    assert same(y, onepass.linear(normed, merged.weight, bias=merged.bias, activation=activation, add=add))
    act = {"silu_mul": nn.functional.silu, "gelu_tanh_mul": lambda t: nn.functional.gelu(t, approximate="tanh")}
    gated = [nn.functional.linear(normed.double(), m.weight.double(), m.bias.double()) for m in (gate, up)]
    close(merged(normed), act[activation](gated[0]) * gated[1])
    assert merged(x).shape == (3, 136)


@pytest.mark.full  # test_gate_and_up has a residual too
def test_residual_without_an_activation() -> None:
    merged = MergedLinear.from_linears(layers([128, 72]), "fp8_block_ue8m0")
    x, residual = torch.randn(3, K, dtype=BF16), torch.randn(3, K, dtype=BF16)
    norm = RMSNorm(K, 1e-6, dtype=BF16)
    parts, h = merged(x, residual, norm=norm)
    normed, wanted = norm(x, residual)
    assert same(h, wanted) and [same(p, w) for p, w in zip(parts, merged(normed), strict=True)] == [True, True]
    out = torch.empty(3, 200, dtype=BF16)
    add = torch.randn(3, 200, dtype=BF16)
    left, right = merged(normed, add=add, out=out)
    assert same(out, onepass.linear(normed, merged.weight, weight_scale=merged.weight_scale, bias=merged.bias, add=add))
    assert left.data_ptr() == out.data_ptr() and right.data_ptr() == out[:, 128:].data_ptr()


def test_deepseek_checkpoints_are_merged() -> None:
    """q_a_proj and kv_a_proj of a DeepSeek layer, as small: the last part ends within a block."""
    parts = []
    for n in (256, 72):
        layer = Linear(K, n, bias=False, scheme="fp8_block")
        codes, scale = quantize_weight(torch.randn(n, K), "fp8_block")
        layer.load_state_dict({"weight": codes, "weight_scale_inv": scale})
        parts.append(layer)
    merged = MergedLinear.from_linears(parts)
    assert merged.weight_scale is not None and merged.weight_scale.shape == (3, 2)
    x = torch.randn(2, K)
    for got, layer in zip(merged(x), parts, strict=True):
        decoded = onepass.dequantize_weight(layer.weight, layer.get_parameter("weight_scale"))
        close(got, nn.functional.linear(x.double(), decoded.double()))


def test_float_state_dicts_are_quantized() -> None:
    given = layers()
    state = MergedLinear.from_linears(given, share=False).state_dict()
    merged = MergedLinear(K, SIZES, dtype=BF16, scheme="fp8_tensor")
    merged.load_state_dict(state)
    codes, scale = quantize_weight(state["weight"], "fp8_tensor")
    assert same(merged.weight, codes) and same(merged.get_parameter("weight_scale"), scale)


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_block_ue8m0"])
def test_blocks_may_not_span_two_layers(scheme: Scheme) -> None:
    message = r"MergedLinear: `out_features` must be multiples of 128, except the last, .*, got \[72, 128\]"
    with pytest.raises(ContractError, match=message):
        MergedLinear(K, [72, 128], scheme=scheme)
    given = [Linear.from_linear(m, scheme) for m in layers([72, 128])]
    before = [p.data_ptr() for m in given for p in m.parameters()]
    with pytest.raises(ContractError, match=message):
        MergedLinear.from_linears(given)
    assert before == [p.data_ptr() for m in given for p in m.parameters()], "a refused call changes nothing"


def test_layers_made_in_inference_mode_share_too() -> None:
    """A parameter that tracks no versions cannot be a view of a tensor that does."""
    given = [Linear.from_linear(m, "fp8_row") for m in layers()]
    assert given[0].weight.is_inference() and not layers()[0].weight.is_inference()
    merged = MergedLinear.from_linears(given)
    assert merged.weight.is_inference()
    for module, part in zip(given, merged.weight.split(SIZES), strict=True):
        assert module.weight.data_ptr() == part.data_ptr() and same(module.weight[3:], part[3:])
    with torch.inference_mode(False):
        normal = MergedLinear.from_linears(layers())
    assert not normal.weight.is_inference() and not MergedLinear.from_linears(layers()).weight.is_inference()


def test_layers_that_differ_are_refused() -> None:
    first = nn.Linear(K, 8, dtype=BF16)
    others: list[tuple[nn.Module, str]] = [
        (layers([8])[0], r"torch.inference_mode, got \[True, True\] and \[False, False\]"),
        (nn.Linear(K + 1, 8, dtype=BF16), "number of columns, got 200 and 201"),
        (nn.Linear(K, 8), "dtype, got bfloat16 and float32"),
        (nn.Linear(K, 8, False, dtype=BF16), "bias, got bfloat16 and None"),
        (nn.Linear(K, 8, dtype=BF16, device="meta"), "device, got cpu and meta"),
        (Linear(K, 8, dtype=BF16, scheme="int8_row"), "scheme, got None and int8_row"),
    ]
    for other, message in others:
        with pytest.raises(ContractError, match=f"^MergedLinear: `linears` must have the same {message}$"):
            MergedLinear.from_linears([first, other])
    value: Any
    for value in ([], first, [first, first], None):
        with pytest.raises(ContractError, match="MergedLinear: `linears` must be a list of different layers, got "):
            MergedLinear.from_linears(value)
    for value in ([first, None], ["x"]):
        with pytest.raises(ContractError, match="MergedLinear: `linears` must be a linear layer, got "):
            MergedLinear.from_linears(value)
    with pytest.raises(
        ContractError, match="MergedLinear: `scheme` must be None or that of the layer, 'int8_row', got"
    ):
        MergedLinear.from_linears([Linear(K, 8, scheme="int8_row")], "fp8_row")


def test_activations_need_two_equal_halves() -> None:
    for sizes in ([8], [8, 16], [8, 8, 8]):
        with pytest.raises(
            ContractError, match="MergedLinear: `out_features` must be two equal sizes with an activation"
        ):
            MergedLinear(K, sizes, activation="silu_mul")
    value: Any = "silu"
    with pytest.raises(ContractError, match=r"MergedLinear: `activation` must be 'silu_mul' or .*, got 'silu'"):
        MergedLinear(K, [8, 8], activation=value)


def test_repr() -> None:
    assert repr(MergedLinear(8, [4, 2])) == "MergedLinear(in_features=8, out_features=[4, 2], bias=True)"
    merged = MergedLinear(8, (4, 4), False, scheme="int8_row", activation="gelu_mul", rounding="hf")
    options = "scheme='int8_row', rounding='hf', activation='gelu_mul'"
    assert repr(merged) == f"MergedLinear(in_features=8, out_features=[4, 4], bias=False, {options})"


@pytest.mark.full  # test_nn_linear.py compiles one of the layers
def test_compiled() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(K, 1e-6, rounding="hf")
            options: Any = {"scheme": "fp8_row", "rounding": "hf"}
            self.gate_up = MergedLinear(K, [64, 64], activation="silu_mul", **options)
            self.down = Linear.from_linear(nn.Linear(64, K), "int8_row", rounding="hf")
            self.qk = MergedLinear.from_linears([nn.Linear(K, 16), nn.Linear(K, 8)], rounding="hf")
            self.gate_up.load_state_dict({"weight": torch.randn(128, K), "bias": torch.randn(128)})

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.down(self.gate_up(x, norm=self.norm), add=x)
            q, k = self.qk(h)
            return q, k

    with torch.inference_mode(False), torch.no_grad():
        block = Mlp()
        torch._dynamo.reset()
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
        for rows in (3, 5):
            x = torch.randn(rows, K)
            for got, expected in zip(compiled(x), block(x), strict=True):
                assert same(got, expected) and expected.any()
