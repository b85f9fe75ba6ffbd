"""The provider against vLLM's native ops: bytes, in-place behaviour, which calls it takes, and its registration.

vLLM's wheel has no tests. The last tests here do what its own tests of IR ops do: inputs from each op's generator,
results within its tolerances, and batch invariance of the layer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.ir import ops
from vllm.ir.op import IrOp
from vllm.model_executor.determinism import batch_invariant

from onepass import __version__
from onepass.engines import plugin, plugin_product
from onepass.engines import vllm as functions
from onepass.engines.plugin_product import product
from onepass.engines.registration import fingerprint
from onepass.testing.tensors import same_bytes
from tests.engines.test_functions import assert_close
from tests.engines.test_plugin_product import inputs as product_inputs
from tools.vllm_bytes import normed_once, normed_twice, roots, rows_that_differ

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-5


@pytest.fixture(autouse=True)
def registered() -> None:
    assert plugin.register() == f"onepass {__version__} provides rms_norm and fused_add_rms_norm of vLLM 0.32.0"


def provider(op: Any, name: str = plugin.PROVIDER) -> Any:
    return op.impls[name]


def inputs(dtype: torch.dtype, weight: torch.dtype | None, n: int = 640) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(n)
    x, residual, gamma = (torch.randn(size, generator=generator) for size in ((96, n), (96, n), (n,)))
    sizes = torch.tensor([1.0, 30.0, 0.02])[torch.arange(96) % 3, None]
    return (x * sizes).to(dtype), (residual * sizes).to(dtype), None if weight is None else (1 + 0.3 * gamma).to(weight)


def differing(a: Tensor, b: Tensor) -> float:
    return float((a != b).float().mean())


@pytest.mark.parametrize("weight", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_the_native_ops(dtype: torch.dtype, weight: torch.dtype | None) -> None:
    """Of vLLM's native functions except where float32 sums differ, and of its formula for some float32 root always."""
    x, residual, gamma = inputs(dtype, weight)
    if weight not in (dtype, torch.float32, None):
        assert not provider(ops.rms_norm).supports_args(x, gamma, EPS)
        assert not provider(ops.fused_add_rms_norm).supports_args(x, residual, gamma, EPS)
        return
    own = torch.ones(x.shape[-1]) if gamma is None else gamma
    norm = normed_twice if gamma is not None and gamma.dtype == dtype else normed_once
    total = x.float() + residual.float()
    for op, h, arguments in (
        (ops.rms_norm, x.float(), (x, gamma, EPS)),
        (ops.fused_add_rms_norm, total, (x, residual, gamma, EPS)),
    ):
        assert provider(op).supports_args(*arguments)
        native, mine = (provider(op, name).func_impl_fn(*arguments) for name in ("native", "onepass"))
        if op is ops.fused_add_rms_norm:
            assert same_bytes(native[1], mine[1]) and same_bytes(mine[1], total.to(dtype))
            native, mine = native[0], mine[0]
        assert mine.dtype == dtype and differing(native, mine) < (1e-3 if dtype.itemsize == 2 else 0.6)
        made = ([norm(h, rs, own).to(dtype)] for rs in roots(h))
        assert rows_that_differ([mine], made) == []
        if dtype.itemsize == 2 and gamma is not None and norm is normed_twice:  # the other rounding is far away
            other = next(iter([normed_once(h, rs, own).to(dtype) for rs in [list(roots(h))[8]]]))
            assert differing(other, mine) > 0.05


def test_sum_is_not_rounded_before_the_norm() -> None:
    """Only the stored residual is rounded: `engines.vllm_0_19`, which rounds it first, gives other bytes."""
    x, residual, gamma = inputs(torch.bfloat16, torch.bfloat16)
    assert gamma is not None
    y, _ = provider(ops.fused_add_rms_norm).func_impl_fn(x, residual, gamma, EPS)
    rounded = provider(ops.rms_norm).impl_fn(x + residual, gamma, EPS)
    assert differing(y, rounded) > 0.1


def test_maybe_inplace_overwrites_both_activations() -> None:
    x, residual, gamma = inputs(torch.bfloat16, torch.bfloat16)
    with ops.fused_add_rms_norm.set_priority(["onepass", "native"]):
        expected = ops.fused_add_rms_norm(x, residual, gamma, EPS)
        assert not same_bytes(expected[0], x) and not same_bytes(expected[1], residual)  # functional: inputs remain
        before = (x.data_ptr(), residual.data_ptr())
        got = ops.fused_add_rms_norm.maybe_inplace(x, residual, gamma, EPS)
    assert (got[0].data_ptr(), got[1].data_ptr()) == before
    assert same_bytes(got[0], expected[0]) and same_bytes(got[1], expected[1]) and same_bytes(x, expected[0])


def test_heads_of_a_fused_projection_are_normed_without_a_copy() -> None:
    """Qwen3 norms q and k as views of one projection."""
    qkv = torch.randn(7, 10 * 64).bfloat16()
    q = qkv[:, : 4 * 64].view(7, 4, 64)
    gamma = (1 + 0.3 * torch.randn(64)).bfloat16()
    assert provider(ops.rms_norm).supports_args(q, gamma, EPS)
    mine, native = (provider(ops.rms_norm, name).impl_fn(q, gamma, EPS) for name in ("onepass", "native"))
    assert differing(mine, native) < 1e-3 and mine.view(7, 256).shape == (7, 256)


def test_other_calls_are_left_to_vllm() -> None:
    x, residual, gamma = inputs(torch.bfloat16, torch.bfloat16)
    norm, added = provider(ops.rms_norm), provider(ops.fused_add_rms_norm)
    assert norm.supports_args(x, gamma, EPS, 640) and not norm.supports_args(x, gamma, EPS, 320)
    assert not norm.supports_args(x.t().contiguous().t(), gamma, EPS)
    assert not norm.supports_args(x.double(), gamma, EPS)
    assert not added.supports_args(x, residual.float(), gamma, EPS)
    assert not added.supports_args(x, residual[:1], gamma, EPS)
    with ops.rms_norm.set_priority(["onepass", "native"]):
        assert ops.rms_norm.dispatch(x, gamma, EPS, 320).provider == "native"
        assert ops.rms_norm.dispatch(x, gamma, EPS).provider == "onepass"


def test_registering_again_changes_nothing() -> None:
    before = {op.name: provider(op) for op in (ops.rms_norm, ops.fused_add_rms_norm)}
    plugin.register()
    assert {op.name: provider(op) for op in (ops.rms_norm, ops.fused_add_rms_norm)} == before


def test_uuid_has_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled model of another onepass must not be found in vLLM's cache."""
    uuid = provider(ops.rms_norm).uuid()
    assert uuid == provider(ops.rms_norm).uuid() and len(uuid) == 64
    monkeypatch.setattr(plugin, "__version__", "0.0.0")
    assert plugin._Uuid("file")() != uuid
    assert plugin._Uuid("file")() != plugin._Uuid("other file")()


def test_unknown_native_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugin.NATIVE, "rms_norm", ("0" * 12,))
    line = plugin.register()
    assert "does not know" in line and "vLLM 0.32.0" in line and "\n" not in line


# --- what vLLM's own tests check ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 257])
@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
def test_generated_inputs_are_within_vllms_tolerances(name: str, tokens: int, dtype: torch.dtype) -> None:
    op: Any = IrOp.registry[name]
    torch.manual_seed(0)
    arguments = op.generate_inputs(num_tokens=tokens, hidden_size=1024, dtype=dtype)
    with op.set_priority(["onepass", "native"]):
        mine = op(*arguments)
        torch.library.opcheck(op.torch_op, arguments)
    native = op.impls["native"].impl_fn(*arguments)
    results = [(t,) if isinstance(t, Tensor) else t for t in (mine, native)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **op.get_tolerance(dtype))
        assert b.abs().amax() > 0


def test_batch_does_not_change_rows_of_the_ops() -> None:
    x, residual, gamma = inputs(torch.bfloat16, torch.bfloat16)
    norm, added = provider(ops.rms_norm), provider(ops.fused_add_rms_norm)
    whole, (summed, total) = norm.impl_fn(x, gamma, EPS), added.func_impl_fn(x, residual, gamma, EPS)
    for row in range(0, 96, 7):
        part = slice(row, row + 1)
        assert same_bytes(norm.impl_fn(x[part], gamma, EPS), whole[part])
        y, h = added.func_impl_fn(x[part], residual[part], gamma, EPS)
        assert same_bytes(y, summed[part]) and same_bytes(h, total[part])


def test_batch_invariant_layer(monkeypatch: pytest.MonkeyPatch, default_config: None) -> None:
    """With VLLM_BATCH_INVARIANT=1 models get our layer, whose GPU forward computes what vLLM's does there."""
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert plugin.register().endswith(
        ", its batch-invariant RMSNorm layer and its batch-invariant product of vLLM 0.32.0"
    )
    plugin.register()
    from vllm.model_executor.layers.layernorm import RMSNorm

    from onepass.engines.plugin_layer import OnepassRMSNorm

    layer: Any = RMSNorm(640, EPS)
    assert issubclass(type(layer), OnepassRMSNorm) and layer.name == "rms_norm"
    x, residual, gamma = inputs(torch.bfloat16, torch.bfloat16)
    assert gamma is not None
    layer.weight.data = gamma
    calls: list[str] = []
    monkeypatch.setattr(batch_invariant, "rms_norm_batch_invariant", lambda *a, **b: calls.append("vLLM's"))
    expected = torch.empty_like(x)
    functions.rms_norm(expected, x, gamma, EPS)
    assert same_bytes(layer.forward_cuda(x), expected) and not calls
    assert rows_that_differ([expected], ([normed_once(x, rs, gamma)] for rs in roots(x))) == []
    a, b = x.clone(), residual.clone()
    functions.fused_add_rms_norm(a, b, gamma, EPS)
    y, h = layer.forward_cuda(x, residual)
    assert y is x and h is residual and same_bytes(y, a) and same_bytes(h, b)
    assert layer.state_dict().keys() == {"weight"}
    parts = [layer.forward_cuda(b[i : i + 1]) for i in range(96)]
    assert same_bytes(torch.cat(parts), layer.forward_cuda(b))
    bare = RMSNorm(640, EPS, has_weight=False)
    assert same_bytes(bare.forward_cuda(b), layer_without_weight(b))


def test_products_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own functions call the replacements; both product and bias are those of torch, rounded once."""
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    assert plugin_product.register("vLLM", cpu=True)
    kernel = batch_invariant.matmul_kernel_persistent
    monkeypatch.setattr(plugin_product, "GPU_CODE", (fingerprint(kernel),))  # without Triton it is another function
    monkeypatch.setattr(batch_invariant, "matmul_persistent", batch_invariant.matmul_persistent)
    monkeypatch.setenv("ONEPASS_VLLM_PRODUCT", "1")
    assert plugin_product.register("vLLM", cpu=False)
    x, weight, bias = product_inputs(torch.bfloat16)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    expected = (x.double() @ weight.double().t() + bias.double()).to(torch.bfloat16)
    whole = utils.cpu_unquantized_gemm(layer, x, layer.weight, bias)
    assert_close(whole, expected, 0.97)
    parts = [utils.cpu_unquantized_gemm(layer, x[i : i + 1], layer.weight, bias) for i in range(len(x))]
    assert same_bytes(torch.cat(parts), whole)
    assert same_bytes(batch_invariant.linear_batch_invariant(x, weight, bias), whole)
    assert same_bytes(batch_invariant.addmm_batch_invariant(bias, x, weight.t()), whole)
    assert same_bytes(
        batch_invariant.matmul_batch_invariant(x.view(3, 11, -1), weight.t()).flatten(0, 1), product(x, weight)
    )


def layer_without_weight(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    functions.rms_norm(out, x, None, EPS)
    return out


@pytest.fixture
def default_config() -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield
