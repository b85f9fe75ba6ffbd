"""The plugin with SGLang's own sources, on a CPU. Run by hand, where `sglang.srt.layers.layernorm` can be imported:

``python -m pytest -n0 tests/engines/test_sglang_source.py``
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.batch_invariant_ops import batch_invariant_ops
from sglang.srt.layers import layernorm
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from torch import Tensor

from onepass.core.backend import launching_with
from onepass.engines import sglang_plugin as plugin
from onepass.testing.tensors import same_bytes
from tests.engines.sglang_stand_in import sgl_kernel
from tests.engines.test_sglang_plugin import BF16, DTYPES, EPS, inputs
from tools.vllm_bytes import normed_once, roots, rows_that_differ

os.environ["ONEPASS_SGLANG_NORMS"] = "1"
kernels = sys.modules.setdefault("sgl_kernel", sgl_kernel())  # the package cannot be imported without CUDA libraries
layernorm.rmsnorm = kernels.rmsnorm  # what `from sgl_kernel import rmsnorm` does there on CUDA
load_plugins()  # as each process of SGLang does; it finds the entry point


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The mode's flag without its torch ops, which need a GPU."""
    settings = SimpleNamespace(rl_on_policy_target=None)
    monkeypatch.setattr(batch_invariant_ops, "_batch_invariant_MODE", True)
    bags = {"exec": SimpleNamespace(deterministic=settings)}
    monkeypatch.setattr(runtime_context._CONTEXT, "_config_bags", bags)
    with torch.no_grad():
        yield settings


def layer_of(weight: Tensor, **options: Any) -> Any:
    layer = RMSNorm(weight.shape[0], EPS, weight_dtype=weight.dtype, **options)
    layer.weight.data.copy_(weight)
    return layer


def native(layer: Any, *tensors: Tensor) -> Any:
    """What SGLang computes without the hook."""
    return RMSNorm.forward_native.__wrapped__(layer, *tensors)


def differing(a: Tensor, b: Tensor) -> float:
    return float((a != b).float().mean())


def test_both_hooks_are_applied() -> None:
    assert {plugin.LAYER, plugin.NORM} <= HookRegistry._patched
    assert "computes the norms" in plugin.register()
    assert len(HookRegistry._hooks[plugin.LAYER]) == len(HookRegistry._hooks[plugin.NORM]) == 1


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_the_native_layer(dtype: torch.dtype, cast: bool) -> None:
    x, residual, weight = inputs(dtype)
    layer = layer_of(weight, cast_x_before_out_mul=cast)
    for tensors in ((x,), (x, residual)):
        mine, theirs = layer.forward_native(*tensors), native(layer, *tensors)
        if len(tensors) == 2:
            assert same_bytes(mine[1], theirs[1])
            mine, theirs = mine[0], theirs[0]
        assert mine.dtype == dtype and differing(mine, theirs) < (1e-3 if dtype.itemsize == 2 else 0.6)
        torch.testing.assert_close(mine, theirs)
        assert theirs.abs().max() > 0.5
        other = native(layer_of(weight, cast_x_before_out_mul=not cast), *tensors)
        other = other[0] if isinstance(other, tuple) else other
        assert dtype == torch.float32 or differing(mine, other) > 0.05


def test_gpu_forward_reaches_the_hooks() -> None:
    """In deterministic mode it calls the one with a residual, and the other without."""
    launched: list[str] = []
    x, residual, weight = inputs(BF16)
    layer = layer_of(weight)
    with launching_with(lambda family: lambda *_: launched.append(family)):
        layer.forward_cuda(x, residual)
        assert launched == ["rms_norm"]
        layer.forward_cuda(x.view(2, 12, 640))
        batch_invariant_ops._rms_norm_aten_compat(x, (640,), weight, EPS)
    assert launched == ["rms_norm"] * 3
    y = layer.forward_cuda(x)
    assert rows_that_differ([y], ([normed_once(x, rs, weight)] for rs in roots(x))) == []


def test_batch_does_not_change_rows() -> None:
    x, residual, weight = inputs(BF16, rows=96)
    layer = layer_of(weight)
    y, h = layer.forward_cuda(x, residual)
    parts = [layer.forward_cuda(x[i : i + 1], residual[i : i + 1]) for i in range(96)]
    assert same_bytes(torch.cat([part[0] for part in parts]), y)
    assert same_bytes(torch.cat([part[1] for part in parts]), h)


def test_norms_of_sgl_kernel_reach_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry replaces them in modules that imported them before, so outside of deterministic mode the layer calls ours."""
    monkeypatch.setattr(batch_invariant_ops, "_batch_invariant_MODE", False)
    assert {f"sgl_kernel.{name}" for name in plugin.KERNELS} <= HookRegistry._patched
    x, _, weight = inputs(BF16)
    y = layer_of(weight).forward_cuda(x)
    assert rows_that_differ([y], ([normed_once(x, rs, weight)] for rs in roots(x))) == []


def test_a_trainers_bits_stay_sglangs(deterministic: SimpleNamespace) -> None:
    deterministic.rl_on_policy_target = "fsdp"
    x, residual, weight = inputs(BF16)
    layer = layer_of(weight)
    for mine, theirs in zip(layer.forward_cuda(x, residual), native(layer, x, residual), strict=True):
        assert same_bytes(mine, theirs)
