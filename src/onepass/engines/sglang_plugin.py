"""onepass in SGLang: the norms of its deterministic mode.

SGLang calls `register` in each of its processes, because onepass has an entry point in the group ``sglang.srt.plugins``.
With ``--enable-deterministic-inference`` the layer `RMSNorm` calls a batch-invariant kernel, but where there is a residual,
or where the layer rounds twice, it computes the norm in plain torch. `register` hooks both::

    RMSNorm.forward_native      h = x + residual, unrounded;  residual = round(h)
                                y = round((h * rs) * weight)
                                y = round(round(h * rs) * weight)    with cast_x_before_out_mul
    rms_norm_batch_invariant    y = round((x * rs) * weight)

Each is one launch. Results are bit-identical to SGLang's, except where the order of a sum changes the last bit of ``rs``.
Each row is bit-identical to running it alone.

SGLang's own code computes everything else: outside of deterministic mode, under ``torch.compile``, and calls that onepass
has no equation for (see `supports_layer`). With ``--rl-on-policy-target`` it computes both functions' norms, because those must
have the trainer's bits.

With ``ONEPASS_SGLANG_NORMS=1`` in the environment, `register` also replaces the four norms of ``sgl_kernel`` by those of
`onepass.engines.sglang`. On CUDA, `RMSNorm` calls them outside of deterministic mode, and Gemma's norms in any mode. That is
opt-in: nobody has measured the two next to each other.

``python -m onepass.engines.sglang_plugin`` prints what `register` does on this machine.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor

from .. import __version__
from ..core.backend import can_launch
from ..formats import FLOATS, Rounding
from ..ops.rms_norm.op import rms_norm
from .flashinfer.norm import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm
from .registration import NotSupported, announced, fingerprint

__all__ = ["KERNELS", "LAYER", "NATIVE", "NORM", "DeterministicNorms", "register", "supports_layer"]

LAYER: Final = "sglang.srt.layers.layernorm.RMSNorm.forward_native"
NORM: Final = "sglang.srt.batch_invariant_ops.batch_invariant_ops.rms_norm_batch_invariant"
NATIVE: Final = {
    "forward_native": ("5a498a5f074c",),
    "rms_norm_batch_invariant": ("c967f96029bf",),
    "_rms_norm_kernel": ("c212e093957f",),
}
"""SGLang's code that the hooks reproduce. It was read in six releases, 0.5.18 to 0.5.23."""
KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "rmsnorm": rmsnorm,
    "fused_add_rmsnorm": fused_add_rmsnorm,
    "gemma_rmsnorm": gemma_rmsnorm,
    "gemma_fused_add_rmsnorm": gemma_fused_add_rmsnorm,
}
"""What replaces the norms of ``sgl_kernel``."""

_log = logging.getLogger("sglang.plugins.onepass")
_hooked: Final[WeakSet[type]] = WeakSet()
"""The registries that have the hooks."""


def register() -> str:
    """Hook the norms of SGLang's deterministic mode. Returns one line that says what was done, or why nothing was.

    A second call changes nothing. If SGLang is absent, too old or too new, it keeps its own implementations, and the line
    is logged as a warning.
    """
    return announced(_log, _register)


def _register() -> str:
    try:
        import sglang
    except ImportError:
        raise NotSupported("SGLang is not installed") from None
    version = f"SGLang {getattr(sglang, '__version__', '')}".strip()
    try:
        from sglang.srt.batch_invariant_ops import batch_invariant_ops as invariant
        from sglang.srt.layers.layernorm import RMSNorm
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.runtime_context import get_exec

        functions = {
            "forward_native": RMSNorm.forward_native,
            "rms_norm_batch_invariant": invariant.rms_norm_batch_invariant,
            "_rms_norm_kernel": invariant._rms_norm_kernel.fn,
        }
        norms = DeterministicNorms(invariant.is_batch_invariant_mode_enabled, get_exec)
        around, replace = HookType.AROUND, HookType.REPLACE
    except (ImportError, AttributeError) as error:
        raise NotSupported(f"{version} has no hooks or norms that onepass knows ({error})") from None
    if HookRegistry not in _hooked:
        if any(fingerprint(function) not in NATIVE[name] for name, function in functions.items()):
            raise NotSupported(
                f"{version} computes its deterministic norms by code that onepass {__version__} does not know; "
                "update one of them"
            )
        kernels = _kernels(version)
        HookRegistry.register(LAYER, norms.forward_native, around)
        HookRegistry.register(NORM, norms.rms_norm_batch_invariant, around)
        for name, function in kernels.items():
            HookRegistry.register(f"sgl_kernel.{name}", function, replace)
        _hooked.add(HookRegistry)
    more = " and the norms of sgl_kernel" if _wants_kernels() else ""
    return f"onepass {__version__} computes the norms of {version}'s deterministic mode{more}"


def _wants_kernels() -> bool:
    return os.environ.get("ONEPASS_SGLANG_NORMS") == "1"


def _kernels(version: str) -> dict[str, Callable[..., Any]]:
    """What replaces functions of ``sgl_kernel``: all of `KERNELS`, or nothing unless it was asked for."""
    if not _wants_kernels():
        return {}
    try:
        import sgl_kernel

        natives = {name: getattr(sgl_kernel, name) for name in KERNELS}
    except (ImportError, AttributeError) as error:
        raise NotSupported(f"{version} has no norms in sgl_kernel that onepass knows ({error})") from None
    for name, native in natives.items():
        theirs, ours = (list(inspect.signature(function).parameters) for function in (native, KERNELS[name]))
        if theirs != ours:
            raise NotSupported(
                f"`sgl_kernel.{name}` must have the parameters {', '.join(ours)}, got {', '.join(theirs)}"
            )
    return KERNELS


class DeterministicNorms:
    """The two hooks. SGLang passes each the function that it hooks, then that function's arguments."""

    def __init__(self, deterministic: Callable[[], bool], execution: Callable[[], Any]) -> None:
        self.deterministic = deterministic
        self.execution = execution

    def active(self) -> bool:
        """Whether SGLang is in deterministic mode, does not follow a trainer's bits, and is not being compiled."""
        if not self.deterministic() or torch.compiler.is_compiling():
            return False
        return self.execution().deterministic.rl_on_policy_target is None

    def forward_native(
        self,
        native: Callable[..., Any],
        layer: Any,
        x: Tensor,
        residual: Tensor | None = None,
        post_residual_addition: Tensor | None = None,
        quant_linear: object = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``RMSNorm.forward_native``.

        Args:
            native: SGLang's own.
            layer: The `RMSNorm`.
            x: [..., hidden size].
            residual: Like x, in its dtype, or float32 if the layer keeps it in float32.
            post_residual_addition: Added too; SGLang's own function computes such a call.
            quant_linear: Ignored in deterministic mode.

        Returns:
            y, or with a residual (y, h). Both are new tensors.

        Rounding:
            h is not rounded before the norm. y is rounded once, with ``cast_x_before_out_mul`` also before the product.
        """
        if post_residual_addition is not None or not self.active() or not supports_layer(layer, x, residual):
            result: Tensor | tuple[Tensor, Tensor] = native(layer, x, residual, post_residual_addition, quant_linear)
            return result
        weight: Tensor = layer.weight
        eps: float = layer.variance_epsilon
        rounding: Rounding = "hf" if layer.cast_x_before_out_mul else "once"
        if residual is None:
            return rms_norm(x, weight, eps, rounding=rounding)
        return rms_norm(x, weight, eps, residual=residual, rounding=rounding, round_sum=False)

    def rms_norm_batch_invariant(
        self, native: Callable[..., Any], input: Tensor, weight: Tensor, eps: float = 1e-6
    ) -> Tensor:
        """``rms_norm_batch_invariant``, which ``aten::rms_norm`` is too in deterministic mode.

        Args:
            native: SGLang's own.
            input: [..., N].
            weight: [N] of any float dtype.
            eps: Added to the mean of squares.

        Returns:
            ``round((input * rs) * weight)``, a new tensor.
        """
        usable = weight.dim() == 1 and weight.shape == input.shape[-1:] and _has_kernels(input, weight)
        if not usable or not self.active():
            result: Tensor = native(input, weight, eps)
            return result
        return rms_norm(input, weight, eps)


def supports_layer(layer: Any, x: Tensor, residual: Tensor | None) -> bool:
    """Whether onepass has the equation of this call of an `RMSNorm`.

    It has not for a norm of the first columns only (``var_hidden_size``), for a result of another dtype than x, and for a
    residual that is not stored in its own dtype.
    """
    weight = layer.weight
    if layer.variance_size_override is not None or x.shape[-1:] != weight.shape:
        return False
    if layer.override_orig_dtype not in (None, x.dtype):
        return False
    if layer.cast_x_before_out_mul and weight.dtype != x.dtype:
        return False
    if residual is None:
        return _has_kernels(x, weight)
    stored = torch.float32 if layer.fp32_residual else x.dtype
    return residual.shape == x.shape and residual.dtype == stored and _has_kernels(x, weight, residual)


def _has_kernels(x: Tensor, weight: Tensor, *others: Tensor) -> bool:
    """Whether onepass takes these tensors as they are, and no derivative is needed."""
    rows = (x, *others)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*rows, weight)):
        return False
    if not all(t.dtype in FLOATS and t.stride(-1) == 1 for t in (*rows, weight)):
        return False
    return x.shape[-1] > 0 and can_launch("rms_norm", x.device.type)


if __name__ == "__main__":
    print(register())
