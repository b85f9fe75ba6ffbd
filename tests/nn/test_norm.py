"""Modules compared with those they replace: state dicts, results and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
from torch import Tensor, nn

import onepass
from onepass.formats import Rounding
from onepass.nn import LinearFP8, QKNorm, RMSNorm, RMSNormFP8

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.dtype is torch.float32:
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-7)
    else:
        assert (got == expected).float().mean() >= 0.999
        torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=1e-6)
    assert expected.abs().max() > 0.5  # zeros would fail


def randomized(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return module


@pytest.fixture(autouse=True)
def inference() -> object:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_replaces_torch_rms_norm(dtype: torch.dtype, eps: float | None) -> None:
    theirs = randomized(nn.RMSNorm(192, eps, dtype=dtype))
    ours = RMSNorm(192, eps, dtype=dtype)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for scale in (1.0, 1e-3):  # with the second, eps=None makes a difference
        x = (torch.randn(4, 5, 192) * scale).to(dtype)
        assert_close(ours(x), theirs(x))


def test_several_dimensions_and_no_weight() -> None:
    x = torch.randn(3, 6, 8)
    theirs = randomized(nn.RMSNorm((6, 8), 1e-6))
    ours = RMSNorm((6, 8), 1e-6)
    ours.load_state_dict(theirs.state_dict())
    assert_close(ours(x), theirs(x))
    bare = RMSNorm(8, 1e-6, elementwise_affine=False)
    assert not bare.state_dict()
    assert_close(bare(x), nn.RMSNorm(8, 1e-6, elementwise_affine=False)(x))
    y, h = ours(x, residual=x)
    assert torch.equal(h, 2 * x)
    assert_close(y, theirs(2 * x))


def test_replaces_hugging_face_norms() -> None:
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x = torch.randn(4, 5, 192).bfloat16()
    rows: list[tuple[nn.Module, float, Rounding]] = [
        (llama.LlamaRMSNorm(192, 1e-5), 0.0, "hf"),
        (gemma.Gemma3RMSNorm(192, 1e-5), 1.0, "once"),
    ]
    for theirs, offset, rounding in rows:
        randomized(theirs.bfloat16())
        ours = RMSNorm(192, 1e-5, dtype=torch.bfloat16, weight_offset=offset, rounding=rounding)
        ours.load_state_dict(theirs.state_dict())
        assert_close(ours(x), theirs(x))
        shared = RMSNorm.from_module(theirs, weight_offset=offset, rounding=rounding)
        assert shared.weight is theirs.weight and shared.eps == 1e-5
        assert torch.equal(shared(x), ours(x))


def test_new_norms_multiply_by_one() -> None:
    x = torch.randn(4, 64)
    assert_close(RMSNorm(64, weight_offset=1.0)(x), nn.RMSNorm(64)(x))


def test_narrow_weights_are_widened() -> None:
    """A bfloat16 weight with float32 activations gives the same result as a float32 weight."""
    norm = randomized(RMSNorm(64, 1e-6, dtype=torch.bfloat16))
    x = torch.randn(4, 64)
    assert torch.equal(norm(x), onepass.rms_norm(x, norm.get_parameter("weight").float()))


@pytest.mark.parametrize("per_head", [True, False])
def test_qk_norm(per_head: bool) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_norm = nn.RMSNorm(64 if per_head else 512, 1e-6, dtype=torch.bfloat16)
            self.k_norm = nn.RMSNorm(64 if per_head else 128, 1e-6, dtype=torch.bfloat16)

    theirs = Attention()
    randomized(theirs)
    ours = QKNorm(64 if per_head else 512, None if per_head else 128, per_head=per_head, dtype=torch.bfloat16)
    ours.load_state_dict(theirs.state_dict())
    q, k = torch.randn(2, 5, 8, 64).bfloat16(), torch.randn(2, 5, 2, 64).bfloat16()
    if not per_head:
        q, k = q.flatten(-2), k.flatten(-2)
    for module in (ours, QKNorm.from_modules(theirs.q_norm, theirs.k_norm, per_head=per_head)):
        got = module(q, k)
        assert_close(got[0], theirs.q_norm(q))
        assert_close(got[1], theirs.k_norm(k))
    with pytest.raises(onepass.ContractError, match="QKNorm: `k_norm` must have q_norm's epsilon"):
        QKNorm.from_modules(nn.RMSNorm(64, 1e-6), nn.RMSNorm(64, 1e-5), per_head=True)
    with pytest.raises(onepass.ContractError, match="QKNorm: `k_dim` must be given unless `per_head`"):
        QKNorm(64)


@pytest.mark.parametrize("bias", [True, False])
def test_fp8_linear(bias: bool) -> None:
    """The error is within two roundings to three mantissa bits in a sum of 256 products, and the formula is exact."""
    norm = randomized(nn.RMSNorm(256, 1e-6, dtype=torch.bfloat16))
    linear = nn.Linear(256, 96, bias=bias, dtype=torch.bfloat16)
    fp8_norm, fp8_linear = RMSNormFP8(256, 1e-6, dtype=torch.bfloat16), LinearFP8(256, 96, bias)
    fp8_norm.load_state_dict(norm.state_dict())
    fp8_linear.load_state_dict(linear.state_dict())  # quantizes
    x = torch.randn(3, 7, 256).bfloat16()
    quantized = fp8_norm(x)
    y = fp8_linear(quantized)
    expected = linear(norm(x))
    assert y.shape == expected.shape and y.dtype is torch.bfloat16
    error = (y.float() - expected.float()).norm() / expected.float().norm()
    assert 0.001 < error < 0.06  # a zero result has an error of 1

    codes, scale = quantized
    exact = (codes.double() * scale) @ (fp8_linear.weight.double() * fp8_linear.weight_scale).t()
    exact = exact + (linear.bias.double() if bias else 0)
    torch.testing.assert_close(y, exact.bfloat16(), rtol=2.0**-7, atol=1e-6)

    again = LinearFP8(256, 96, bias)
    again.load_state_dict(fp8_linear.state_dict())  # fp8 weights, unchanged
    assert torch.equal(again(quantized), y)
    assert torch.equal(LinearFP8.from_linear(linear)(quantized), y)
    assert fp8_linear.kernel(codes) == "decoded"


def test_fp8_norm_with_residual() -> None:
    norm = RMSNormFP8(256, 1e-6, dtype=torch.bfloat16)
    x, residual = torch.randn(4, 256).bfloat16(), torch.randn(4, 256).bfloat16()
    codes, scale, h = norm(x, residual)
    assert torch.equal(h, x + residual)
    whole = nn.RMSNorm(256, 1e-6)(x.float() + residual.float())
    assert ((codes.float() * scale - whole).abs() <= whole.abs() * 2**-4 + scale * 2**-9).all()
    assert LinearFP8(256, 32)((codes, scale)).shape == (4, 32)


def test_weights_of_fp8_rows() -> None:
    weight = torch.randn(8, 64)
    weight[3] = 0
    linear = nn.Linear(64, 8, bias=False)
    linear.weight.data = weight
    layer = LinearFP8.from_linear(linear)
    codes, scale = layer.weight, layer.weight_scale
    assert (codes[3].float() == 0).all() and scale[3] == 0
    assert (codes.float().abs().amax(-1) == 448).sum() == 7
    assert ((codes.float() * scale - weight).abs() <= weight.abs() * 2**-4 + scale * 2**-9).all()


def test_bad_arguments_are_rejected() -> None:
    with pytest.raises(onepass.ContractError, match="LinearFP8: `quantized` must be float8_e4m3fn codes"):
        LinearFP8(64, 32)((torch.randn(4, 64), torch.ones(4, 1)))
    with pytest.raises(onepass.ContractError, match="RMSNormFP8: `normalized_shape` must be the last dimension"):
        RMSNormFP8((4, 64))(torch.randn(4, 64))
    with pytest.raises(onepass.ContractError, match="RMSNorm: `norm` must have a weight"):
        RMSNorm.from_module(nn.Identity())


def test_gradients_are_rejected() -> None:
    with torch.inference_mode(False), pytest.raises(onepass.ContractError, match="`gamma` must not require a gradient"):
        RMSNorm(64)(torch.randn(2, 64))


def test_compiled() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = RMSNormFP8(256, 1e-6), LinearFP8(256, 32, dtype=torch.float32)
            self.qk = QKNorm(16, per_head=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(self.norm(x)).unflatten(-1, (2, 16))
            q, k = self.qk(y, y)
            return q, k

    block = Block()
    block.linear.load_state_dict(nn.Linear(256, 32).state_dict())
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 256)
        for got, expected in zip(compiled(x), block(x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_known_calls_follow_the_module() -> None:
    """After calls that are repeated, changes of the module are honoured, and what the op alone would reject still works."""
    x, h = torch.randn(3, 64), torch.randn(3, 64)
    norm = RMSNorm(64).requires_grad_(False)

    def check() -> None:
        gamma = norm.weight
        assert gamma is not None
        options: dict[str, Any] = {"weight_offset": norm.weight_offset, "rounding": norm.rounding}
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        for _ in range(4):
            assert torch.equal(norm(x), onepass.rms_norm(x, gamma, eps, **options))
            expected = onepass.rms_norm(x, gamma, eps, residual=h, **options)
            assert all(torch.equal(a, b) for a, b in zip(norm(x, h), expected, strict=True))

    check()
    norm.eps = 0.5
    check()
    norm.weight_offset = 1.0
    norm.rounding = "hf"
    check()
    norm.weight = nn.Parameter(torch.randn(64), requires_grad=False)
    check()
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus(), unsafe=True)
    check()
    wide = RMSNorm((4, 16)).requires_grad_(False)
    for _ in range(4):
        assert torch.equal(wide(x.view(3, 4, 16)).view(3, 64), RMSNorm(64).requires_grad_(False)(x))
        with pytest.raises(onepass.ContractError, match="`residual` must"):
            RMSNorm(64).requires_grad_(False)(x, h[:2])
