"""The SGLang plugin: what it hooks, which calls it takes, and its bytes against SGLang's formulas.

`test_sglang_source.py` does this with SGLang itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass import __version__
from onepass.core.backend import launching_with
from onepass.engines import sglang_plugin as plugin
from onepass.engines.registration import fingerprint
from onepass.testing.tensors import same_bytes
from tests.engines.sglang_stand_in import StandIn, batch_invariant_kernel
from tools.vllm_bytes import normed_once, normed_twice, roots, rows_that_differ

BF16, F32 = torch.bfloat16, torch.float32
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-5


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A stand-in whose code is the code that the plugin was written for."""
    monkeypatch.delenv("ONEPASS_SGLANG_NORMS", raising=False)
    stand_in = StandIn(monkeypatch)
    functions: dict[str, Any] = {
        "forward_native": stand_in.layer.forward_native,
        "rms_norm_batch_invariant": stand_in.module("batch_invariant_ops.batch_invariant_ops").rms_norm_batch_invariant,
        "_rms_norm_kernel": batch_invariant_kernel,
    }
    for name, function in functions.items():
        monkeypatch.setitem(plugin.NATIVE, name, (fingerprint(function),))
    return stand_in


@pytest.fixture
def hooked(sglang: StandIn) -> StandIn:
    plugin.register()
    sglang.registry.apply_hooks()
    return sglang


def inputs(dtype: torch.dtype, n: int = 640, rows: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x, residual, weight = (torch.randn(size, generator=generator) for size in ((rows, n), (rows, n), (n,)))
    return x.to(dtype), residual.to(dtype), (1 + 0.3 * weight).to(dtype)


def layer_of(sglang: StandIn, weight: Tensor, **options: Any) -> Any:
    layer = sglang.layer(weight.shape[0], EPS, weight_dtype=weight.dtype, **options)
    layer.weight.data.copy_(weight)
    return layer


def only_warning(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return record.getMessage()


# --- registration ---------------------------------------------------------------------------------------------------


def test_sglang_discovers_the_plugin() -> None:
    (entry,) = entry_points(group="sglang.srt.plugins", name="onepass")
    assert entry.load() is plugin.register


def test_without_sglang(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert plugin.register() == only_warning(caplog) == "onepass is not used: SGLang is not installed"


def test_sglang_without_hooks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    StandIn(monkeypatch, "0.4.9")
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    assert plugin.register() == only_warning(caplog)
    assert "SGLang 0.4.9 has no hooks or norms that onepass knows" in only_warning(caplog)


@pytest.mark.parametrize("name", plugin.NATIVE)
def test_code_that_is_not_known(
    sglang: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Its bytes would be a guess."""
    monkeypatch.setitem(plugin.NATIVE, name, ("0" * 12,))
    assert plugin.register() == only_warning(caplog)
    assert "SGLang 0.5.23 computes its deterministic norms by code that onepass" in only_warning(caplog)
    assert sglang.registry.hooks == {}


def test_registers_once_and_quietly(sglang: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    line = plugin.register()
    sglang.registry.apply_hooks()
    assert plugin.register() == line
    assert line == f"onepass {__version__} computes the norms of SGLang 0.5.23's deterministic mode"
    assert {target: len(hooks) for target, hooks in sglang.registry.hooks.items()} == {plugin.LAYER: 1, plugin.NORM: 1}
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


def test_norms_of_sgl_kernel_if_asked(sglang: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four, in every mode, in place where they are in place, and once."""
    monkeypatch.setenv("ONEPASS_SGLANG_NORMS", "1")
    for _ in range(2):
        assert plugin.register().endswith(
            "computes the norms of SGLang 0.5.23's deterministic mode and the norms of sgl_kernel"
        )
    sglang.registry.apply_hooks()
    kernels = sglang.sgl_kernel
    x, residual, weight = inputs(BF16)
    total = x.float() + residual.float()
    for name, offset in (("rmsnorm", 0.0), ("gemma_rmsnorm", 1.0)):
        y = getattr(kernels, name)(x, weight, EPS, enable_pdl=True)
        assert rows_that_differ([y], ([(x * rs * (weight.float() + offset)).to(BF16)] for rs in roots(x))) == []
    for name, offset in (("fused_add_rmsnorm", 0.0), ("gemma_fused_add_rmsnorm", 1.0)):
        y, h = x.clone(), residual.clone()
        assert getattr(kernels, name)(y, h, weight, EPS) is None and same_bytes(h, total.to(BF16))
        assert rows_that_differ([y], ([(total * rs * (weight.float() + offset)).to(BF16)] for rs in roots(total))) == []


def test_norms_of_sgl_kernel_stay(hooked: StandIn) -> None:
    x, _, weight = inputs(BF16)
    with pytest.raises(NotImplementedError, match="a CUDA kernel"):
        hooked.sgl_kernel.rmsnorm(x, weight)


def test_other_norms_of_sgl_kernel(
    sglang: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ONEPASS_SGLANG_NORMS", "1")
    sglang.sgl_kernel.gemma_rmsnorm = lambda input, weight: input
    assert plugin.register() == only_warning(caplog)
    assert (
        "`sgl_kernel.gemma_rmsnorm` must have the parameters input, weight, eps, out, enable_pdl, got input, weight"
        in (only_warning(caplog))
    )
    del sglang.sgl_kernel.gemma_rmsnorm
    assert "SGLang 0.5.23 has no norms in sgl_kernel that onepass knows (" in plugin.register()
    assert sglang.registry.hooks == {}


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_the_layer(hooked: StandIn, dtype: torch.dtype, cast: bool) -> None:
    """Those of SGLang's formula for one float32 root of each row; the inputs stay as they are."""
    x, residual, weight = inputs(dtype)
    layer = layer_of(hooked, weight, cast_x_before_out_mul=cast)
    norm = normed_twice if cast else normed_once
    kept = x.clone(), residual.clone()
    total = x.float() + residual.float()
    with torch.no_grad():
        alone = layer.forward_native(x)
        y, h = layer.forward_native(x, residual)
    assert layer.torch_calls == 0 and same_bytes(x, kept[0]) and same_bytes(residual, kept[1])
    assert rows_that_differ([alone], ([norm(x, rs, weight).to(dtype)] for rs in roots(x))) == []
    rounded = (total * rs for rs in roots(total))
    if cast:
        candidates = ([(part.to(dtype).float() * weight.float()).to(dtype)] for part in rounded)
    else:
        candidates = ([(part * weight.float()).to(dtype)] for part in rounded)
    assert rows_that_differ([y], candidates) == [] and same_bytes(h, total.to(dtype))
    assert y.abs().max() > 0.5  # zeros would fail


def test_sum_is_not_rounded_before_the_norm(hooked: StandIn) -> None:
    x, residual, weight = inputs(BF16)
    layer = layer_of(hooked, weight)
    with torch.no_grad():
        y, h = layer.forward_native(x, residual)
        assert float((y != layer.forward_native(h)).float().mean()) > 0.1


def test_float32_residual(hooked: StandIn) -> None:
    x, residual, weight = inputs(BF16)
    with torch.no_grad():
        layer = layer_of(hooked, weight, fp32_residual=True)
        y, h = layer.forward_native(x, residual.float())
        assert layer.torch_calls == 0 and same_bytes(h, x.float() + residual.float())
        assert same_bytes(y, layer_of(hooked, weight).forward_native(x, residual)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_the_kernel(hooked: StandIn, dtype: torch.dtype) -> None:
    x, _, weight = inputs(dtype)
    norm = hooked.module("batch_invariant_ops.batch_invariant_ops").rms_norm_batch_invariant
    assert rows_that_differ([norm(x, weight, EPS)], ([normed_once(x, rs, weight)] for rs in roots(x))) == []
    assert same_bytes(norm(x.view(2, 12, 640), weight, eps=EPS).view(24, 640), norm(x, weight, EPS))


def test_batch_does_not_change_rows(hooked: StandIn) -> None:
    x, residual, weight = inputs(BF16, n=1000, rows=97)
    layer = layer_of(hooked, weight)
    with torch.no_grad():
        whole, total = layer.forward_native(x, residual)
        for row in (0, 31, 96):
            part = slice(row, row + 1)
            y, h = layer.forward_native(x[part], residual[part])
            assert same_bytes(y, whole[part]) and same_bytes(h, total[part])


def test_one_launch(hooked: StandIn) -> None:
    launched: list[str] = []
    x, residual, weight = inputs(BF16)
    layer = layer_of(hooked, weight)
    with launching_with(lambda family: lambda *_: launched.append(family)), torch.no_grad():
        layer.forward_native(x, residual)
    assert launched == ["rms_norm"] and layer.torch_calls == 0


# --- calls that SGLang's own code computes --------------------------------------------------------------------------

Change = Callable[[StandIn, dict[str, Any], dict[str, Any]], None]
LEFT: dict[str, Change] = {
    "not deterministic": lambda s, _, __: setattr(s, "deterministic", False),
    "a trainer's bits": lambda s, _, __: setattr(s, "rl_on_policy_target", "fsdp"),
    "a second addition": lambda _, call, __: call.update(post_residual_addition=call["residual"]),
    "the first columns": lambda _, __, options: options.update(var_hidden_size=320),
    "a result of another dtype": lambda _, __, options: options.update(override_orig_dtype=F32),
    "float32 residual of 16 bits": lambda _, __, options: options.update(fp32_residual=True),
    "residual of another dtype": lambda _, call, __: call.update(residual=call["residual"].float()),
    "float64": lambda _, call, __: call.update(x=call["x"].double(), residual=call["residual"].double()),
    "strided columns": lambda _, call, __: call.update(x=torch.stack((call["x"], call["x"]), -1)[..., 0]),
}


@pytest.mark.parametrize("name", LEFT)
def test_call_stays_sglangs(hooked: StandIn, name: str) -> None:
    """Every argument reaches SGLang's function, and its result comes back."""
    x, residual, weight = inputs(BF16)
    call: dict[str, Any] = {"x": x, "residual": residual, "post_residual_addition": None}
    options: dict[str, Any] = {}
    LEFT[name](hooked, call, options)
    layer = layer_of(hooked, weight, **options)
    with torch.no_grad():
        results = layer.forward_native(**call)
        assert layer.torch_calls == 1
        expected = type(layer).forward_native.__wrapped__(layer, **call)
    assert all(same_bytes(a, b) for a, b in zip(results, expected, strict=True)) and results[0].abs().max() > 0.5


def test_gradients_and_float32_weights(hooked: StandIn) -> None:
    x, _, weight = inputs(BF16)
    layer = layer_of(hooked, weight)
    assert layer.forward_native(x).requires_grad and layer.torch_calls == 1
    wide = layer_of(hooked, weight.float(), cast_x_before_out_mul=True)
    with torch.no_grad():
        assert wide.forward_native(x).dtype == F32 and wide.torch_calls == 1  # SGLang's product has weight's dtype


def test_kernel_keeps_other_calls(hooked: StandIn) -> None:
    """A weight with another shape, and tensors of a device without kernels."""
    x, _, weight = inputs(BF16)
    norm = hooked.module("batch_invariant_ops.batch_invariant_ops").rms_norm_batch_invariant
    assert same_bytes(norm(x, weight[None], EPS), batch_invariant_kernel(x, weight[None], EPS))
    assert norm(x.to("meta"), weight.to("meta")).device.type == "meta"
    hooked.deterministic = False
    with launching_with(lambda family: pytest.fail(family)):
        assert same_bytes(norm(x, weight, EPS), batch_invariant_kernel(x, weight, EPS))


def test_compiled_models_keep_sglangs_code(hooked: StandIn) -> None:
    x, residual, weight = inputs(BF16)
    layer = layer_of(hooked, weight)
    launched: list[str] = []
    compiled: Any = torch.compile(lambda *t: layer.forward_native(*t), backend="eager")
    with launching_with(lambda family: lambda *_: launched.append(family)), torch.no_grad():
        y, h = compiled(x, residual)
    assert launched == [] and same_bytes(h, (x.float() + residual.float()).to(BF16)) and y.abs().max() > 0.5
