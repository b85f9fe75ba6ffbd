"""The parts of SGLang 0.5.23 and its sgl_kernel that the plugin meets, written from their documentation and formulas.

SGLang needs CUDA libraries, so `make test` cannot have it. `test_sglang_source.py` runs the plugin with SGLang itself.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


def registry() -> Any:
    """A new registry with the methods of SGLang's, for hooks that wrap or replace a function or method."""

    class HookRegistry:
        hooks: dict[str, list[tuple[HookType, Callable[..., Any]]]] = {}  # noqa: RUF012

        @classmethod
        def register(
            cls, target: str, hook: Callable[..., Any], hook_type: HookType = HookType.AFTER, *, source: object = None
        ) -> None:
            assert hook_type in (HookType.AROUND, HookType.REPLACE)
            cls.hooks.setdefault(target, []).append((hook_type, hook))

        @classmethod
        def apply_hooks(cls) -> None:
            for target, hooks in cls.hooks.items():
                owner, name = resolved(target)
                for kind, hook in hooks:
                    original = getattr(owner, name)
                    setattr(
                        owner, name, around(original, hook) if kind is HookType.AROUND else replaced(original, hook)
                    )

    return HookRegistry


def resolved(target: str) -> tuple[Any, str]:
    """The module or class that has the target, and the target's name."""
    *path, name = target.split(".")
    if path[-1][0].isupper():
        return getattr(importlib.import_module(".".join(path[:-1])), path[-1]), name
    return importlib.import_module(".".join(path)), name


def around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        return hook(original, *arguments, **options)

    return wrapper


def replaced(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    return around(original, lambda _, *arguments, **options: hook(*arguments, **options))


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    raise NotImplementedError("a CUDA kernel")


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    raise NotImplementedError("a CUDA kernel")


def sgl_kernel() -> Any:
    """The module with the signatures of its norms."""
    module: Any = ModuleType("sgl_kernel")
    module.__spec__ = ModuleSpec("sgl_kernel", None)
    module.rmsnorm, module.fused_add_rmsnorm = rmsnorm, fused_add_rmsnorm
    module.gemma_rmsnorm, module.gemma_fused_add_rmsnorm = (
        around(function, lambda original, *arguments, **options: original(*arguments, **options))
        for function in (rmsnorm, fused_add_rmsnorm)
    )
    return module


def layer_class() -> Any:
    """SGLang's `RMSNorm` as far as the plugin reads it; a new class, because hooks change it."""

    class RMSNorm(nn.Module):
        def __init__(self, hidden_size: int, eps: float = 1e-6, **options: Any) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(hidden_size, dtype=options.get("weight_dtype")))
            self.hidden_size, self.variance_epsilon = hidden_size, eps
            self.variance_size_override = options.get("var_hidden_size")
            self.cast_x_before_out_mul = options.get("cast_x_before_out_mul", False)
            self.fp32_residual = options.get("fp32_residual", False)
            self.override_orig_dtype = options.get("override_orig_dtype")
            self.torch_calls = 0

        def forward_native(
            self,
            x: Tensor,
            residual: Tensor | None = None,
            post_residual_addition: Tensor | None = None,
            quant_linear: object = None,
        ) -> Any:
            self.torch_calls += 1
            dtype = self.override_orig_dtype or x.dtype
            total = x.float()
            for added in (residual, post_residual_addition) if residual is not None else ():
                total = total if added is None else total + added.float()
            counted = total[..., : self.variance_size_override]
            y = total * torch.rsqrt(counted.square().mean(-1, keepdim=True) + self.variance_epsilon)
            y = self.weight * y.to(dtype) if self.cast_x_before_out_mul else (y * self.weight).to(dtype)
            stored = total if self.fp32_residual else total.to(dtype)
            return y if residual is None else (y, stored)

    return RMSNorm


def batch_invariant_kernel(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = input.float()
    return (x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()).to(input.dtype)


def rms_norm_batch_invariant(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return batch_invariant_kernel(input, weight, eps)


class StandIn:
    """SGLang in `sys.modules`, and its two settings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str = "0.5.23") -> None:
        self.deterministic, self.rl_on_policy_target = True, None
        self.layer, self.registry = layer_class(), registry()
        self.kernel = SimpleNamespace(fn=batch_invariant_kernel)
        modules: dict[str, dict[str, Any]] = {
            "sglang": {"__version__": version},
            "sglang.srt": {},
            "sglang.srt.layers": {},
            "sglang.srt.layers.layernorm": {"RMSNorm": self.layer},
            "sglang.srt.batch_invariant_ops": {},
            "sglang.srt.batch_invariant_ops.batch_invariant_ops": {
                "rms_norm_batch_invariant": rms_norm_batch_invariant,
                "_rms_norm_kernel": self.kernel,
                "is_batch_invariant_mode_enabled": lambda: self.deterministic,
            },
            "sglang.srt.plugins": {},
            "sglang.srt.plugins.hook_registry": {"HookRegistry": self.registry, "HookType": HookType},
            "sglang.srt.runtime_context": {"get_exec": lambda: SimpleNamespace(deterministic=self)},
        }
        for name, members in modules.items():
            module: Any = ModuleType(name)
            module.__path__ = []
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, module)

        self.sgl_kernel = sgl_kernel()
        monkeypatch.setitem(sys.modules, "sgl_kernel", self.sgl_kernel)

    def module(self, name: str) -> Any:
        return sys.modules[f"sglang.srt.{name}"]
