"""What other parts of torch make of the ops: torch.fx traces them; DTensor and vmap are refused with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import onepass
from onepass.nn import GatedRMSNorm, LayerNorm, Linear, LinearFP8, MergedLinear, QKNorm, RMSNorm, RMSNormFP8

pytest.importorskip("llvmlite")

X, H, Q, K = torch.randn(2, 3, 64), torch.randn(2, 3, 64), torch.randn(2, 3, 4, 16), torch.randn(2, 3, 2, 16)
GAMMA, WEIGHT = torch.randn(64), torch.randn(32, 64)


class Call(nn.Module):
    """A call of a function with a parameter of this module."""

    def __init__(self, function: Callable[..., Any], parameter: Tensor) -> None:
        super().__init__()
        self.function, self.parameter = function, nn.Parameter(parameter)

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors, self.parameter)


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = RMSNormFP8(64), LinearFP8.from_linear(nn.Linear(64, 32), torch.float32)

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.norm(x))


TRACED: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "RMSNorm": (RMSNorm(64), (X,)),
    "RMSNorm, residual": (RMSNorm(64, weight_offset=1.0, rounding="hf"), (X, H)),
    "RMSNorm, no weight": (RMSNorm(64, elementwise_affine=False), (X,)),
    "RMSNorm, two dimensions": (RMSNorm((3, 64)), (X, H)),
    "GatedRMSNorm": (GatedRMSNorm(64), (X, H)),
    "GatedRMSNorm, groups": (GatedRMSNorm(64, groups=4), (X, H)),
    "LayerNorm": (LayerNorm(64), (X, H)),
    "LayerNorm, per head": (LayerNorm((4, 16), per_head=True, bias=False), (Q,)),
    "QKNorm": (QKNorm(64, 64), (X, H)),
    "QKNorm, per head": (QKNorm(16, per_head=True), (Q, K)),
    "Linear": (Linear(64, 32), (X,)),
    "Linear, fp8": (Linear.from_linear(nn.Linear(64, 32), "fp8_row"), (X, H)),
    "MergedLinear": (MergedLinear(64, [32, 16]), (X,)),
    "RMSNormFP8, LinearFP8": (Quantized(), (X,)),
    "rms_norm": (Call(onepass.rms_norm, GAMMA), (X,)),
    "layer_norm": (Call(onepass.layer_norm, GAMMA), (X,)),
    "rms_norm_fused_fp8": (Call(onepass.rms_norm_fused_fp8, GAMMA), (X,)),
    "rms_norm_fused_quant": (Call(lambda x, g: onepass.rms_norm_fused_quant(x, g, format="int8"), GAMMA), (X,)),
    "rms_norm_add_rms_norm": (Call(lambda x, h, g: onepass.rms_norm_add_rms_norm(x, g, g, residual=h), GAMMA), (X, H)),
    "rms_norm_add_rms_norm_quant": (
        Call(lambda x, h, g: onepass.rms_norm_add_rms_norm_quant(x, g, g, residual=h, format="int8"), GAMMA),
        (X, H),
    ),
    "quantize": (Call(lambda x, gate, _: onepass.quantize(x, gate=gate, format="int8"), GAMMA), (X, H)),
    "linear": (Call(onepass.linear, WEIGHT), (X,)),
    "gemv": (Call(lambda g, x, w: onepass.gemv_and_partial_norm(x, w, g), WEIGHT), (GAMMA[:16], X[0])),
    "row_mean_of_squares_qk": (Call(onepass.row_mean_of_squares_qk, torch.randn(2, 3, 64)), (X,)),
    "qk_rms_norm": (Call(lambda q, k, g: onepass.qk_rms_norm(q, k, g, g), GAMMA), (X, H)),
}


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [leaf for item in value for leaf in leaves(item)]


@pytest.mark.parametrize("name", TRACED)
def test_fx_traces_a_call_to_the_same_bytes(name: str) -> None:
    module, tensors = TRACED[name]
    module.requires_grad_(False)
    placeholders = [f"x{i}" for i in range(len(tensors))]
    source = f"def forward(self, {', '.join(placeholders)}): return self.inner({', '.join(placeholders)})"
    scope: dict[str, Any] = {}
    exec(source, scope)
    outer = type("Outer", (nn.Module,), {"forward": scope["forward"]})()
    outer.inner = module
    traced = fx.symbolic_trace(outer)
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert any("onepass" in target or "qk_rms_norm" in target for target in targets), targets
    for ours, theirs in zip(leaves(traced(*tensors)), leaves(module(*tensors)), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_fx_traces_a_call_into_the_callers_tensor() -> None:
    def both(x: Tensor, gamma: Tensor, out: Tensor, residual: Tensor) -> Tensor:
        return onepass.rms_norm(x, gamma, residual=residual, out=out, residual_out=residual)[0]

    traced, out, residual = fx.symbolic_trace(both), torch.empty_like(X), H.clone()
    y, h = onepass.rms_norm(X, GAMMA, residual=H)
    assert traced(X, GAMMA, out, residual) is out and torch.equal(out, y) and torch.equal(residual, h)
    with pytest.raises(onepass.ContractError, match="`residual_out` must be given if another output is"):
        fx.symbolic_trace(lambda x, out, h: onepass.rms_norm(x, GAMMA, residual=h, out=out))


def test_a_parametrized_weight_is_not_left_out() -> None:
    """C knows the call without a weight, which has the same x."""
    plain, norm = RMSNorm(64, elementwise_affine=False), RMSNorm(64)
    with torch.no_grad():
        for _ in range(4):
            plain(X)
        norm.weight.fill_(2.0)  # type: ignore[union-attr]
        nn.utils.parametrize.register_parametrization(norm, "weight", nn.Identity())
        assert torch.equal(norm(X), 2 * plain(X))


@pytest.mark.parametrize("dispatched", [False, True])
def test_vmap_is_refused(dispatched: bool) -> None:
    options = (1e-6, 0.0, "once", None, "after", "silu", None, False)
    norm: Callable[[Tensor], Any] = lambda x: onepass.rms_norm(x, GAMMA)  # noqa: E731
    if dispatched:
        norm = lambda x: torch.ops.onepass.rms_norm(x, GAMMA, None, None, None, None, *options)[0]  # noqa: E731
    with pytest.raises(
        onepass.Unsupported, match=r"rms_norm: torch.vmap is not supported; leading dimensions are batch"
    ):
        torch.vmap(norm)(X)


def test_dtensors_are_refused(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = distribute_tensor(X, init_device_mesh("cpu", (1,)), [Replicate()])
        options = (1e-6, 0.0, "once", None, "after", "silu", None, False)
        for call in (
            lambda: onepass.rms_norm(x, GAMMA),
            lambda: torch.ops.onepass.rms_norm(x, GAMMA, None, None, None, None, *options),
        ):
            with pytest.raises(
                onepass.Unsupported, match=r"rms_norm: `x` is a DTensor; onepass.dist .* x.to_local\(\)"
            ):
                call()
    finally:
        distributed.destroy_process_group()
