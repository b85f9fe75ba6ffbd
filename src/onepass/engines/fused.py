"""A norm and the MLP after it as one layer for transformers' ``KernelConfig``, which fuses modules while it loads a model::

    norm_and_mlp = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))
    config = KernelConfig({norm_and_mlp: "/path/of/the/repository:RMSNormMLP"}, use_local_kernel=True)
    model = AutoModelForCausalLM.from_pretrained(MODEL, kernel_config=config, device_map="cuda")

transformers finds `RMSNormMLPLayout` by its name and builds one from each pair of modules. `RMSNormMLP` has the forward: one
launch of `onepass.nn.MergedLinear` with a norm, and one of `onepass.nn.Linear`.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from ..errors import Unsupported
from ..models.patching.forms import GATED, Mlp, match
from ..ops.gemv_norm.launch import MAX_ROWS
from ..ops.linear.op import linear
from .layers import computes, form_of

__all__ = ["RMSNormMLP", "RMSNormMLPLayout"]


def _conversions() -> list[Any]:
    """How a checkpoint's names become those of `RMSNormMLPLayout`, which lies where the norm was."""
    try:
        from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
    except ImportError:  # the layer also loads without transformers, which alone reads this
        return []
    norm, mlp = "post_attention_layernorm", "mlp"
    halves = [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"]
    return [
        WeightConverter(halves, f"{norm}.gate_up_proj.weight", operations=[Concatenate(dim=0)]),
        WeightRenaming(rf"{mlp}\.down_proj\.weight", f"{norm}.down_proj.weight"),
        WeightRenaming(rf"{norm}\.weight$", f"{norm}.norm.weight"),
    ]


class RMSNormMLP(nn.Module):
    """``down(silu(gate(norm(x))) * up(norm(x)))``; ``self`` is a `RMSNormMLPLayout`."""

    can_torch_compile = True
    has_backward = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Two launches for up to 16 tokens; for more, the modules' own forward, which is faster there."""
        layout = cast(RMSNormMLPLayout, self)
        weights = (layout.norm.weight, layout.gate_up_proj.weight, layout.down_proj.weight)
        few = hidden_states.numel() <= MAX_ROWS * hidden_states.shape[-1]
        if not few or not computes("linear", hidden_states, *weights):
            return type(layout).forward(layout, hidden_states)
        gamma, gate_up, down = cast(tuple[Tensor, Tensor, Tensor], weights)
        norm = {"gamma": gamma, "eps": layout.eps, "weight_offset": layout.weight_offset}
        gated = linear(hidden_states, gate_up, activation="silu_mul", rounding="hf", static_weight=True, **norm)
        return linear(gated, down, rounding="hf", static_weight=True)


class RMSNormMLPLayout(nn.Module):
    """What `RMSNormMLP` reads: the norm, the gate and up projections as one, and the down projection."""

    conversion_mapping = _conversions()

    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        form = form_of(type(norm))
        projections = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        activation = type(getattr(mlp, "act_fn", None)).__name__
        plain = all(type(layer) is nn.Linear and layer.bias is None for layer in projections)
        if form is None or form[0] != "hf":
            raise Unsupported(f"RMSNormMLP: {type(norm).__name__} must round twice, as Llama's norm does")
        if match(type(mlp), Mlp).form is not GATED or not plain or activation not in ("SiLUActivation", "SiLU"):
            raise Unsupported(f"RMSNormMLP: {type(mlp).__name__} must be Llama's MLP, without biases and with SiLU")
        gate, up, down = cast(list[nn.Linear], projections)
        self.norm = norm
        self.eps: float = getattr(norm, form[2])
        self.weight_offset = form[1]
        sizes = gate.in_features, gate.out_features + up.out_features
        self.gate_up_proj = nn.Linear(*sizes, bias=False, device=gate.weight.device, dtype=gate.weight.dtype)
        self.down_proj = down
        self.act_fn = cast(nn.Module, mlp.act_fn)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The modules' own forward."""
        gate, up = self.gate_up_proj(self.norm(hidden_states)).chunk(2, -1)
        return cast(Tensor, self.down_proj(self.act_fn(gate) * up))
