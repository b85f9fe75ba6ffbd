"""The product of vLLM's batch-invariant mode: registration with a stand-in for vLLM, and what the replacements compute.

`test_vllm_ops.py` and `test_vllm_serving.py` run it with vLLM itself.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.core.backend import launching_with
from onepass.engines import plugin_product
from onepass.engines.plugin_product import CpuProducts, GpuProducts, product
from onepass.engines.registration import NotSupported, fingerprint
from onepass.testing.tensors import same_bytes
from tests.engines.test_functions import assert_close

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cpu_unquantized_gemm(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return layer.cpu_linear(x, weight, bias)


def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = "vLLM's"


def matmul_kernel_persistent(x: Tensor) -> Tensor:
    return x


def matmul_persistent(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.full((a.shape[0], b.shape[1]), torch.nan)


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for vLLM's two modules; returns the first, the second is its attribute ``gpu``."""
    modules: dict[str, Any] = {
        name: ModuleType(f"vllm.{name}")
        for name in (
            "model_executor",
            "model_executor.layers",
            "model_executor.layers.utils",
            "model_executor.determinism",
        )
    }
    gpu: Any = ModuleType("vllm.model_executor.determinism.batch_invariant")
    gpu.matmul_persistent, gpu.matmul_kernel_persistent = (
        matmul_persistent,
        SimpleNamespace(fn=matmul_kernel_persistent),
    )
    modules["model_executor.determinism.batch_invariant"] = gpu
    modules["model_executor.determinism"].batch_invariant = gpu
    cpu = modules["model_executor.layers.utils"]
    cpu.cpu_unquantized_gemm, cpu.dispatch_cpu_unquantized_gemm = cpu_unquantized_gemm, dispatch_cpu_unquantized_gemm
    cpu.gpu = gpu
    modules["model_executor.layers"].utils = cpu
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", module)
    monkeypatch.setattr(plugin_product, "CPU_CODE", (fingerprint(cpu_unquantized_gemm),))
    monkeypatch.setattr(plugin_product, "GPU_CODE", (fingerprint(matmul_kernel_persistent),))
    monkeypatch.delenv("ONEPASS_VLLM_PRODUCT", raising=False)
    return cpu


def test_cpus_get_the_product_once(utils: Any) -> None:
    assert plugin_product.register("vLLM 9.0", cpu=True) == "its batch-invariant product"
    replaced = utils.dispatch_cpu_unquantized_gemm
    assert isinstance(replaced, CpuProducts) and replaced.native is dispatch_cpu_unquantized_gemm
    assert plugin_product.register("vLLM 9.0", cpu=True) == "its batch-invariant product"
    assert utils.dispatch_cpu_unquantized_gemm is replaced and utils.gpu.matmul_persistent is matmul_persistent


def test_gpus_get_it_if_asked(utils: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin_product.register("vLLM 9.0", cpu=False) == ""
    assert utils.gpu.matmul_persistent is matmul_persistent
    monkeypatch.setenv("ONEPASS_VLLM_PRODUCT", "1")
    for _ in range(2):
        assert plugin_product.register("vLLM 9.0", cpu=False) == "its batch-invariant product"
        replaced: Any = utils.gpu.matmul_persistent
        assert isinstance(replaced, GpuProducts) and replaced.native is matmul_persistent
    assert utils.dispatch_cpu_unquantized_gemm is dispatch_cpu_unquantized_gemm


@pytest.mark.parametrize("cpu", [True, False])
def test_code_that_is_not_known(utils: Any, monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    monkeypatch.setenv("ONEPASS_VLLM_PRODUCT", "1")
    monkeypatch.setattr(plugin_product, "CPU_CODE" if cpu else "GPU_CODE", ("0" * 12,))
    with pytest.raises(NotSupported, match=r"^vLLM 9.0 computes batch-invariant products by code that onepass [^\n]*$"):
        plugin_product.register("vLLM 9.0", cpu)
    assert utils.dispatch_cpu_unquantized_gemm is dispatch_cpu_unquantized_gemm
    assert utils.gpu.matmul_persistent is matmul_persistent


def test_other_parameters(utils: Any) -> None:
    utils.dispatch_cpu_unquantized_gemm = lambda layer: None
    with pytest.raises(NotSupported, match="by code that onepass"):
        plugin_product.register("vLLM 9.0", cpu=True)


def test_vllm_without_such_a_product(utils: Any) -> None:
    del utils.dispatch_cpu_unquantized_gemm
    with pytest.raises(NotSupported, match=r"vLLM 9.0 has no batch-invariant product that onepass knows \(.*dispatch"):
        plugin_product.register("vLLM 9.0", cpu=True)


# --- results --------------------------------------------------------------------------------------------------------


def inputs(dtype: torch.dtype, rows: int = 33, k: int = 4096, n: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((rows, k), (n, k), (n,)))
    return x.to(dtype), (weight / k**0.5).to(dtype), bias.to(dtype)


def layer_of(weight: Tensor) -> Any:
    layer = SimpleNamespace(weight=weight)
    CpuProducts(dispatch_cpu_unquantized_gemm)(layer, remove_weight=True)
    return layer


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_rounded_once(dtype: torch.dtype, with_bias: bool) -> None:
    """Those of the formula in float64, but for the order of float32 sums."""
    x, weight, bias = inputs(dtype)
    added = bias if with_bias else None
    exact = x.double() @ weight.double().t() + (bias.double() if with_bias else 0.0)
    for y in (layer_of(weight).cpu_linear(x, weight, added), GpuProducts(matmul_persistent)(x, weight.t(), added)):
        if dtype is torch.float32:
            torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=2e-5)
        else:
            assert_close(y, exact.to(dtype), 0.97)
        assert y.abs().max() > 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_does_not_change_rows(dtype: torch.dtype) -> None:
    """At this K oneDNN's bits change between one row and two."""
    x, weight, bias = inputs(dtype)
    whole = product(x, weight, bias)
    for rows in ((0, 1), (32, 33), (3, 5), (8, 25)):
        assert same_bytes(product(x[slice(*rows)], weight, bias), whole[slice(*rows)])
    assert same_bytes(product(x.view(3, 11, -1), weight, bias).view(33, -1), whole)
    assert same_bytes(product(x.t().contiguous().t(), weight, bias), whole)


def test_weights_that_vllm_computes() -> None:
    _, weight, _ = inputs(torch.bfloat16)
    for other in (weight.double(), weight[None], weight.to("meta"), weight.t(), weight[:0]):
        assert layer_of(other).cpu_linear == "vLLM's"
    assert layer_of(weight).cpu_linear is product
    a = torch.ones(2, 96, dtype=weight.dtype)
    products = GpuProducts(matmul_persistent)
    assert products(a, weight).isnan().all()  # the columns of b are not contiguous
    assert products(a.float(), weight.t()[:96]).isnan().all()


def test_one_launch() -> None:
    x, weight, bias = inputs(torch.bfloat16)
    products = GpuProducts(matmul_persistent)
    launched: list[str] = []
    with launching_with(lambda family: lambda *_: launched.append(family)):
        products(x, weight.t(), bias)
    assert launched == ["linear"]


def test_one_graph() -> None:
    x, weight, bias = inputs(torch.bfloat16)
    products = GpuProducts(matmul_persistent)

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return products(x, weight.t(), bias)

    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert same_bytes(compiled(x, weight, bias), layer(x, weight, bias))
