"""`Linear` with and without a scheme: state dicts, checkpoints, conversions, results and errors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass import ContractError, dequantize_weight, quantize_weight
from onepass.nn import Linear, LinearFP8, RMSNorm, RMSNormFP8
from onepass.weights import SCHEMES, Scheme

BF16 = torch.bfloat16
K, N = 200, 136
E8M0 = torch.float8_e8m0fnu


@pytest.fixture(autouse=True)
def inference() -> object:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def same(got: Tensor, expected: Tensor) -> bool:
    """The same dtype and bytes."""
    assert got.dtype is expected.dtype and got.shape == expected.shape
    return torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def close(got: Tensor, exact: Tensor) -> None:
    """A float64 result up to bfloat16's rounding and the cancellation of 200 terms."""
    assert exact.dtype is torch.float64 and exact.abs().max() > 0.3  # zeros would fail
    torch.testing.assert_close(got.double(), exact, rtol=2.0**-8, atol=2e-4)


def made(scheme: Scheme | None, bias: bool = True, dtype: torch.dtype = BF16) -> tuple[nn.Linear, Linear]:
    theirs = nn.Linear(K, N, bias, dtype=dtype)
    ours = Linear(K, N, bias, dtype=dtype, scheme=scheme)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_copies_and_pickles(scheme: Scheme | None) -> None:
    """torch cannot read its own pickles of 8-bit floats."""
    _, ours = made(scheme)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert repr(other) == repr(ours) and list(other.state_dict()) == list(ours.state_dict())
        for name, tensor in tensors(other).items():
            assert same(tensor, tensors(ours)[name]) and tensor.data_ptr() != tensors(ours)[name].data_ptr()
            assert type(tensor) is nn.Parameter and tensor.requires_grad == tensors(ours)[name].requires_grad


@pytest.mark.sampled(7)  # each compiles a kernel
@pytest.mark.parametrize(("dtype", "bias"), [(BF16, True), (BF16, False), (torch.float16, True), (torch.float32, True)])
def test_replaces_torch_linear(bias: bool, dtype: torch.dtype) -> None:
    theirs, ours = made(None, bias, dtype)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(2, 3, K).to(dtype)
    assert same(ours(x), onepass.linear(x, theirs.weight, bias=theirs.bias))
    exact = nn.functional.linear(
        x.double(), theirs.weight.double(), None if theirs.bias is None else theirs.bias.double()
    )
    close(ours(x), exact)
    assert ours(x, out_dtype=torch.float32).dtype is torch.float32


def test_new_layers_are_drawn_like_torchs() -> None:
    torch.manual_seed(3)
    theirs = nn.Linear(K, N)
    torch.manual_seed(3)
    ours = Linear(K, N)
    assert all(torch.equal(t, tensors(ours)[name]) for name, t in theirs.named_parameters())
    assert [p.requires_grad for p in ours.parameters()] == [True, True]
    for scheme in SCHEMES:  # codes and scales of zeros
        new = Linear(K, N, scheme=scheme)
        codes, scale = quantize_weight(torch.zeros(N, K), scheme)
        assert same(new.weight, codes) and new.weight_scale is not None and same(new.weight_scale, scale)
        assert not any(p.requires_grad for p in new.parameters())
    assert not Linear(K, N, scheme="fp8_block_ue8m0")(torch.ones(1, K)).any()


@pytest.mark.sampled(5)  # each compiles kernels; test_weights.py has all schemes
@pytest.mark.parametrize(("scheme", "bias"), [*((scheme, True) for scheme in SCHEMES), ("fp8_block", False)])
def test_float_weights_are_quantized_when_loaded(scheme: Scheme, bias: bool) -> None:
    theirs, ours = made(scheme, bias)
    codes, scale = quantize_weight(theirs.weight, scheme)
    assert ours.weight_scale is not None and same(ours.weight, codes) and same(ours.weight_scale, scale)
    assert list(ours.state_dict()) == ["weight", "weight_scale", "bias"][: 2 + bias]
    x = torch.randn(5, K, dtype=BF16)
    assert same(ours(x), onepass.linear(x, codes, weight_scale=scale, bias=theirs.bias))
    exact = nn.functional.linear(x.double(), dequantize_weight(codes, scale).double())
    close(ours(x), exact if theirs.bias is None else exact + theirs.bias.double())


@pytest.mark.full  # linear/test_op.py has these dtypes
def test_quantized_layers_take_any_float_dtype() -> None:
    _, ours = made("fp8_row")
    for dtype in (torch.float32, torch.float16):  # whatever the bias's
        x = torch.randn(1, K, dtype=dtype)
        assert same(ours(x), onepass.linear(x, ours.weight, weight_scale=ours.weight_scale, bias=ours.bias))


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_from_linear(scheme: Scheme | None) -> None:
    theirs, loaded = made(scheme)
    ours = Linear.from_linear(theirs.eval(), scheme)
    assert ours.scheme == scheme and not ours.training
    assert (ours.weight is theirs.weight and ours.bias is theirs.bias) == (scheme is None)
    assert ours.bias is not None and ours.bias.data_ptr() == theirs.bias.data_ptr()
    for name, tensor in loaded.named_parameters():
        assert same(tensors(ours)[name], tensor)
    x = torch.randn(3, K, dtype=BF16)
    assert same(ours(x), loaded(x))
    again = Linear.from_linear(ours)  # keeps the scheme, and shares
    assert again.scheme == scheme and again.weight.data_ptr() == ours.weight.data_ptr() and same(again(x), ours(x))


def test_from_linear_takes_other_quantized_layers() -> None:
    theirs = nn.Linear(K, N, dtype=BF16)
    x = torch.randn(3, K, dtype=BF16)
    rows = LinearFP8.from_linear(theirs)
    ours = Linear.from_linear(rows)
    assert ours.scheme == "fp8_row" and ours.weight.data_ptr() == rows.weight.data_ptr()
    assert same(ours(x), Linear.from_linear(theirs, "fp8_row")(x))
    with pytest.raises(
        ContractError, match=r"Linear: `scheme` must be None or that of the layer, 'fp8_row', got 'fp8_b"
    ):
        Linear.from_linear(rows, "fp8_block")
    one_scale = Linear(K, N, scheme="int8_row")
    one_scale.weight_scale = nn.Parameter(torch.tensor([0.25]), requires_grad=False)
    per_row = Linear.from_linear(one_scale).get_parameter("weight_scale")
    assert torch.equal(per_row, torch.full((N,), 0.25)) and per_row.is_contiguous()


@pytest.mark.sampled(7)  # one kind of weight stays
@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_block", "fp8_block_ue8m0"])
def test_from_linear_of_transformers(scheme: Scheme) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    blocks = None if scheme == "fp8_tensor" else (128, 128)
    theirs = fp8.FP8Linear(K, N, blocks, scale_fmt="ue8m0" if scheme == "fp8_block_ue8m0" else "float", has_bias=True)
    weight = torch.randn(N, K)
    codes, scale = quantize_weight(weight, scheme)
    theirs.weight.data, theirs.bias.data = codes, torch.randn(N)
    theirs.weight_scale_inv.data = scale.reshape(theirs.weight_scale_inv.shape)
    ours = Linear.from_linear(theirs)
    assert ours.scheme == scheme and ours.weight.data_ptr() == codes.data_ptr()
    assert not any(p.requires_grad for p in ours.parameters())
    x = torch.randn(3, K)
    close(ours(x), nn.functional.linear(x.double(), dequantize_weight(codes, scale).double(), theirs.bias.double()))
    if blocks:
        theirs.block_size = (64, 64)
        with pytest.raises(ContractError, match=r"per block of 128 x 128 if per block, got blocks of \(64, 64\)"):
            Linear.from_linear(theirs)


NORMS: dict[str, Callable[[], RMSNorm]] = {
    "once": lambda: RMSNorm(K, 1e-5, dtype=BF16),
    "hf": lambda: RMSNorm(K, 1e-5, dtype=BF16, rounding="hf"),
    "torch's epsilon, Gemma's offset": lambda: RMSNorm(K, dtype=torch.float32, weight_offset=1.0),
    "no weight": lambda: RMSNorm(K, 1e-5, elementwise_affine=False),
}


@pytest.mark.sampled(31)  # each compiles kernels
@pytest.mark.parametrize(("name", "scheme"), [*((name, None) for name in NORMS), ("once", "fp8_block")])
def test_norm_residual_and_addition(name: str, scheme: Scheme | None) -> None:
    norm = NORMS[name]()
    if norm.weight is not None:
        norm.weight.add_(0.2 * torch.randn(K))
    layer = Linear.from_linear(nn.Linear(K, N, dtype=BF16), scheme, rounding=norm.rounding)
    x, residual = torch.randn(2, 3, K, dtype=BF16) * 0.01, torch.randn(2, 3, K, dtype=BF16) * 0.01
    add = torch.randn(2, 3, N, dtype=BF16)
    assert same(layer(x, norm=norm), layer(norm(x)))
    y, h = layer(x, residual, norm=norm, add=add)
    normed, wanted = norm(x, residual)
    assert same(h, wanted) and same(y, layer(normed, add=add))
    assert not torch.equal(y, layer(normed)) and not torch.equal(y, layer(x, add=add))
    y_plain, h_plain = layer(x, residual)
    assert same(h_plain, wanted) and same(y_plain, layer(x + residual))
    out, residual_out = add.clone(), residual.clone()
    returned = layer(x, residual_out, norm=norm, add=out, out=out, residual_out=residual_out)
    assert returned[0] is out and returned[1] is residual_out and same(out, y) and same(residual_out, h)


def test_rounding_before_the_addition() -> None:
    layer = nn.Linear(K, N, dtype=BF16)
    once, hf = Linear.from_linear(layer), Linear.from_linear(layer, rounding="hf")
    x, add = torch.randn(40, K, dtype=BF16), torch.randn(40, N, dtype=BF16)
    assert same(once(x), hf(x))
    assert same(hf(x, add=add), hf(x) + add) and not torch.equal(hf(x, add=add), once(x, add=add))
    norm = RMSNorm(K, dtype=BF16, rounding="hf")
    assert same(once(x, norm=norm), once(norm(x)))
    with pytest.raises(ContractError, match=r"`norm` must have the rounding of the layer, 'once', .*, got 'hf'$"):
        once(x, norm=norm, add=add)


def test_norms_that_cannot_be_fused_are_refused() -> None:
    layer, x = Linear(K, N), torch.randn(2, K)
    norm: Any
    for norm in (nn.RMSNorm(K), RMSNormFP8(K), "norm"):
        with pytest.raises(ContractError, match=r"Linear: `norm` must be an onepass.nn.RMSNorm \(.*\), got (RMSN|str)"):
            layer(x, norm=norm)
    with pytest.raises(ContractError, match=r"Linear: `norm` must normalize the 200 columns of x, got \[2, 200\]"):
        layer(x, norm=RMSNorm((2, K)))


def deepseek_checkpoint(dtype: torch.dtype, ue8m0: bool = False) -> dict[str, Tensor]:
    """The keys, dtypes and shapes of one layer of a published checkpoint."""
    codes, scale = quantize_weight(torch.randn(N, K), "fp8_block_ue8m0" if ue8m0 else "fp8_block")
    return {"attn.o_proj.weight": codes, "attn.o_proj.weight_scale_inv": scale.to(dtype)}


def model(scheme: Scheme | None) -> nn.Module:
    return nn.ModuleDict({"attn": nn.ModuleDict({"o_proj": Linear(K, N, bias=False, scheme=scheme)})})


@pytest.mark.sampled(7)  # each compiles kernels
@pytest.mark.parametrize(
    ("scheme", "dtype", "ue8m0"),
    [
        ("fp8_block", torch.float32, False),  # V3
        ("fp8_block", torch.float32, True),  # V3.1: powers of two as float32
        ("fp8_block_ue8m0", torch.float32, True),
        ("fp8_block", E8M0, True),  # later releases
        ("fp8_block_ue8m0", E8M0, True),
    ],
)
@pytest.mark.parametrize("assign", [False, True])
def test_deepseek_checkpoints_are_loaded(scheme: Scheme, dtype: torch.dtype, ue8m0: bool, assign: bool) -> None:
    state = deepseek_checkpoint(dtype, ue8m0)
    before = dict(state)
    loaded = model(scheme)
    loaded.load_state_dict(state, strict=True, assign=assign)
    assert state == before  # not changed for other modules
    layer = loaded.get_submodule("attn.o_proj")
    codes, scale = state.values()
    assert same(layer.get_parameter("weight"), codes)
    stored = layer.get_parameter("weight_scale")
    assert stored.dtype is (E8M0 if scheme == "fp8_block_ue8m0" else torch.float32)
    assert torch.equal(stored.float(), scale.float())
    assert (layer.get_parameter("weight").data_ptr() == codes.data_ptr()) == assign
    x = torch.randn(2, K)
    close(layer(x), nn.functional.linear(x.double(), dequantize_weight(codes, scale).double()))


def test_scales_that_are_no_powers_of_two_are_refused() -> None:
    with pytest.raises(
        ContractError, match=r"`attn.o_proj.weight_scale_inv` must be powers of two .* use scheme='fp8_bl"
    ):
        model("fp8_block_ue8m0").load_state_dict(deepseek_checkpoint(torch.float32))


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv", "scale"])
@pytest.mark.parametrize("shape", [(N,), (N, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_names_and_shapes_of_row_scales(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codes, scale = quantize_weight(torch.randn(N, K), "int8_row")
    scale = scale.to(dtype)
    layer = Linear(K, N, False, scheme="int8_row")
    layer.load_state_dict({"weight": codes, name: scale.view(shape)})
    assert same(layer.weight, codes) and torch.equal(layer.get_parameter("weight_scale"), scale.float())
    tensor = Linear(K, N, False, scheme="fp8_tensor")
    tensor.load_state_dict({"weight": codes.to(torch.float8_e4m3fn), name: torch.tensor(0.5, dtype=dtype)})
    assert tensor.get_parameter("weight_scale").tolist() == [0.5]


def test_state_dicts_that_do_not_fit_are_refused() -> None:
    """torch would convert any dtype to any other and drop the scales."""
    codes, scale = quantize_weight(torch.randn(N, K), "fp8_row")
    cases: list[tuple[Scheme | None, dict[str, Any], str]] = [
        (
            None,
            {"weight": codes, "weight_scale": scale},
            "`weight` must be a float weight unless the layer has a scheme",
        ),
        (None, {"weight": codes}, "`weight` must be a float weight unless"),
        (
            "int8_row",
            {"weight": codes, "weight_scale": scale},
            "`weight` must be int8 with scales, or a float weight w",
        ),
        ("fp8_row", {"weight": codes.float(), "weight_scale": scale}, "`weight` must be float8_e4m3fn with scales, or"),
        (
            "fp8_row",
            {"weight": codes.double()},
            "`weight` must be float8_e4m3fn with scales, or a float weight without",
        ),
        (
            "fp8_row",
            {"weight": codes, "scale": scale.int()},
            "`scale` must be a float32 or float8_e8m0fnu tensor, got a t",
        ),
        ("int8_row", {"weight": torch.full((N, K), torch.nan)}, "`weight` must be finite with scheme='int8_row'"),
    ]
    for scheme, state, message in cases:
        with pytest.raises(ContractError, match=message):
            Linear(K, N, False, scheme=scheme).load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_scale"):
        Linear(K, N, False, scheme="fp8_row").load_state_dict({"weight": codes})
    with pytest.raises(RuntimeError, match="size mismatch for weight_scale"):
        Linear(K, N, False, scheme="fp8_block").load_state_dict({"weight": codes, "weight_scale": scale})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*weight_scale_inv"):
        layer = Linear(K, N, False, scheme="fp8_row")
        layer.load_state_dict({"weight": codes, "weight_scale": scale, "weight_scale_inv": scale})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        Linear(K, N, False, scheme="fp8_row").load_state_dict({"weight": torch.randn(N, K + 1)})


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to bfloat16": lambda m: m.to(BF16),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.float32),
    "to a device and dtype": lambda m: m.to("cpu", torch.float16),
    "share_memory": lambda m: m.share_memory(),
    "deepcopy": copy.deepcopy,
    "nested": lambda m: nn.Sequential(m).to(BF16)[0],
}


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("scheme", [*SCHEMES, "LinearFP8"])
def test_conversions_keep_codes_and_scales(name: str, scheme: Any) -> None:
    theirs = nn.Linear(K, N)
    layer = LinearFP8.from_linear(theirs) if scheme == "LinearFP8" else Linear.from_linear(theirs, scheme)
    before = {key: tensor.clone() for key, tensor in tensors(layer).items()}
    after = CONVERSIONS[name](layer)
    assert list(tensors(after)) == list(before)
    assert same(tensors(after)["weight"], before["weight"]) and before["weight"].float().any()
    assert same(tensors(after)["weight_scale"], before["weight_scale"])
    assert isinstance(after.bias, Tensor)
    wanted = {
        "to bfloat16": BF16,
        "half": torch.float16,
        "double": torch.float64,
        "to a device and dtype": torch.float16,
    }
    assert after.bias.dtype is wanted.get(name, BF16 if name == "nested" else torch.float32)


def test_a_function_that_moves_and_converts_everything_moves_codes() -> None:
    layer = Linear(K, N, scheme="fp8_block")
    layer._apply(lambda t: t.to("meta", torch.float64))
    assert [(p.dtype, p.is_meta) for p in layer.parameters()] == [
        (torch.float8_e4m3fn, True),
        (torch.float32, True),
        (torch.float64, True),
    ]


def test_unquantized_layers_are_converted() -> None:
    layer = Linear(K, N).to(BF16)
    assert {t.dtype for t in layer.parameters()} == {BF16}
    assert layer(torch.randn(2, K, dtype=BF16)).dtype is BF16


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_state_dicts_through_a_file_and_meta(scheme: Scheme | None) -> None:
    _, layer = made(scheme)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    x = torch.randn(2, K, dtype=BF16)
    copied = Linear(K, N, dtype=BF16, scheme=scheme)
    copied.load_state_dict(state)
    assigned = Linear(K, N, device="meta", dtype=BF16, scheme=scheme)
    assert all(p.is_meta for p in assigned.parameters())
    assigned.load_state_dict(state, assign=True)
    emptied = Linear(K, N, device="meta", dtype=BF16, scheme=scheme).to_empty(device="cpu")
    assert [(p.shape, p.dtype) for p in emptied.parameters()] == [(p.shape, p.dtype) for p in layer.parameters()]
    emptied.load_state_dict(state)
    for other in (copied, assigned, emptied, copy.deepcopy(layer)):
        assert same(other(x), layer(x))
        for name, tensor in layer.named_parameters():
            assert same(tensors(other)[name], tensor) and tensors(other)[name].requires_grad == tensor.requires_grad
    assert {p.device.type for p in layer.to("meta").parameters()} == {"meta"}
    assert layer.weight.dtype is copied.weight.dtype


def test_gradients() -> None:
    """As with every op: what requires a gradient raises. Codes do not require one."""
    with torch.inference_mode(False):
        x = torch.randn(2, K)
        with pytest.raises(ContractError, match="linear: `weight` must not require a gradient"):
            Linear(K, N)(x)
        for scheme in SCHEMES:
            layer = Linear.from_linear(nn.Linear(K, N), scheme)
            assert not layer(x).requires_grad
            with pytest.raises(ContractError, match="linear: `x` must not require a gradient"):
                layer(x.clone().requires_grad_())
        with torch.no_grad():
            assert Linear(K, N)(x.clone().requires_grad_()).shape == (2, N)


def test_repr() -> None:
    assert repr(Linear(8, 4)) == "Linear(in_features=8, out_features=4, bias=True)"
    layer = Linear(8, 4, False, scheme="fp8_block", rounding="hf")
    assert repr(layer) == "Linear(in_features=8, out_features=4, bias=False, scheme='fp8_block', rounding='hf')"


def test_bad_arguments_are_refused() -> None:
    value: Any
    for value in (nn.Identity(), nn.Conv1d(3, 3, 1), "x", None):
        with pytest.raises(ContractError, match="Linear: `linear` must be a linear layer, got "):
            Linear.from_linear(value)
    with pytest.raises(
        ContractError, match=r"Linear: `linear` must have a weight of bfloat16, .*, got a tensor .* float64"
    ):
        Linear.from_linear(nn.Linear(K, N).double())
    codes = nn.Linear(K, N)
    codes.weight = nn.Parameter(torch.zeros(N, K).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ContractError, match=r"Linear: `linear` must have scales, .*, got no scales"):
        Linear.from_linear(codes)
    value = "fp8"
    calls: list[Callable[[], Linear]] = [
        lambda: Linear(K, N, scheme=value),
        lambda: Linear.from_linear(nn.Linear(K, N), value),
    ]
    for call in calls:
        with pytest.raises(ContractError, match=r"Linear: `scheme` must be 'fp8_tensor' or .*, got 'fp8'"):
            call()


@pytest.mark.sampled(5)  # one kind of weight stays
@pytest.mark.parametrize("scheme", [None, "fp8_block_ue8m0"])
def test_compiled(scheme: Scheme | None) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(K, 1e-6)
            self.linear = Linear.from_linear(nn.Linear(K, K), scheme)

        def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            y, h = self.linear(x, residual, norm=self.norm)
            return self.linear(y, add=h), h

    with torch.inference_mode(False), torch.no_grad():
        block = Block()
        torch._dynamo.reset()
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
        for rows in (3, 5):
            x, residual = torch.randn(rows, K), torch.randn(rows, K)
            for got, expected in zip(compiled(x, residual), block(x, residual), strict=True):
                assert same(got, expected)
