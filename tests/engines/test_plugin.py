"""The vLLM plugin where vLLM is absent, too old or too new: one clear line, and nothing registered.

`test_vllm_ops.py` runs it with vLLM itself.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from onepass.engines import plugin
from onepass.models.patching.code import fingerprint_of


def known_norm(x: Any, weight: Any, epsilon: Any, variance_size: Any = None) -> Any:
    return x


class FakeOp:
    """An IR op with a native implementation, which accepts or rejects others."""

    def __init__(self, name: str, rejects: bool = False) -> None:
        self.name, self.rejects = name, rejects
        self.impls: dict[str, Any] = {"native": SimpleNamespace(impl_fn=known_norm)}
        self.options: dict[str, Any] = {}

    def register_impl(self, provider: str, **options: Any) -> Any:
        def register(function: Any) -> Any:
            if self.rejects:
                raise ValueError("schema does not match")
            self.options = options
            self.impls[provider] = made = SimpleNamespace(impl_fn=function, uuid=lambda: "of the file")
            return made

        return register


def install(monkeypatch: pytest.MonkeyPatch, ops: Any = None, version: str = "9.0") -> None:
    """Put a vLLM of this version into `sys.modules`; without ops it has no IR."""
    package: Any = ModuleType("vllm")
    package.__version__, package.__path__ = version, []
    package.envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False)
    monkeypatch.setitem(sys.modules, "vllm", package)
    platform = SimpleNamespace(is_cuda_alike=lambda: False, is_cpu=lambda: True)
    parts = {"platforms": SimpleNamespace(current_platform=platform)}
    for name, part in (parts | ({"ir": SimpleNamespace(ops=ops)} if ops else {})).items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", part)


@pytest.fixture
def ops() -> Any:
    return SimpleNamespace(**{name: FakeOp(name) for name in plugin.NATIVE})


def only_warning(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return record.getMessage()


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert plugin.register() == only_warning(caplog) == "onepass is not used: vLLM is not installed"


def test_vllm_without_ir(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    install(monkeypatch, version="0.10.1")
    assert plugin.register() == only_warning(caplog)
    assert "vLLM 0.10.1 has no IR ops that onepass knows" in only_warning(caplog)


def test_native_code_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ops: Any
) -> None:
    """Its bytes would be a guess."""
    install(monkeypatch, ops)
    assert plugin.register() == only_warning(caplog)
    assert "vLLM 9.0 computes its native norms by code that onepass" in only_warning(caplog)
    assert list(ops.rms_norm.impls) == ["native"]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in plugin.NATIVE:
        monkeypatch.setitem(plugin.NATIVE, name, (fingerprint_of(known_norm),))


@pytest.mark.usefixtures("known")
def test_signature_that_is_not_accepted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ops: Any
) -> None:
    ops.rms_norm.rejects = True
    install(monkeypatch, ops)
    assert plugin.register() == only_warning(caplog)
    assert "does not accept it (schema does not match)" in only_warning(caplog)


@pytest.mark.usefixtures("known")
def test_registers_once_and_quietly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ops: Any
) -> None:
    install(monkeypatch, ops)
    line = plugin.register()
    made = ops.rms_norm.impls["onepass"]
    assert plugin.register() == line and ops.rms_norm.impls["onepass"] is made
    assert "provides rms_norm and fused_add_rms_norm of vLLM 9.0" in line
    assert made.impl_fn is plugin.norm and made.uuid() != "of the file"
    assert ops.rms_norm.options["inplace"] is False and ops.fused_add_rms_norm.options["inplace"] is True
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


@pytest.mark.usefixtures("known")
def test_batch_invariant_mode_without_the_layer_or_the_product(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ops: Any
) -> None:
    """The norms are provided all the same, and each part that is missing is one line."""
    install(monkeypatch, ops)
    sys.modules["vllm"].envs.VLLM_BATCH_INVARIANT = True
    monkeypatch.setitem(sys.modules, "vllm.model_executor", None)
    monkeypatch.delitem(sys.modules, "onepass.engines.plugin_layer", raising=False)
    assert plugin.register().endswith(" provides rms_norm and fused_add_rms_norm of vLLM 9.0")
    layer, product = (r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    assert layer.startswith("onepass replaces no layer: vLLM 9.0 has no RMSNorm that onepass knows (")
    assert product.startswith(
        "onepass computes no products: vLLM 9.0 has no batch-invariant product that onepass knows ("
    )
