"""Modules with the state dicts of the modules they replace.

| here | replaces | state dict |
|---|---|---|
| `RMSNorm` | `torch.nn.RMSNorm`; the RMSNorms of Hugging Face's Llama, Qwen, Gemma, ... | ``weight`` |
| `GatedRMSNorm` | the gated norms of Qwen3-Next, Mamba-2, Zamba2, ... | ``weight`` |
| `LayerNorm` | `torch.nn.LayerNorm`; Cohere's | ``weight``, ``bias`` |
| `QKNorm` | an attention's ``q_norm`` and ``k_norm`` | ``q_norm.weight``, ``k_norm.weight`` |
| `Linear` | `torch.nn.Linear`, optionally with the norm before and the addition after it | ``weight``, ``bias`` |
| `Linear` with a scheme | the same with fp8 or int8 weights | ``weight``, ``weight_scale``, ``bias``; also a Linear's and DeepSeek's |
| `MergedLinear` | q, k and v, or gate and up: several Linears with the same input | those of `Linear`, with the rows of all |
| `RMSNormFP8` | an RMSNorm whose result goes to fp8 linear layers | ``weight`` |
| `LinearFP8` | `torch.nn.Linear` after it | ``weight``, ``weight_scale``, ``bias``; also loads a Linear's |

With ``h = x + residual`` (if given) and ``rs = 1 / sqrt(mean(h^2) + eps)``::

    RMSNorm       y            = (h * rs) * (weight + weight_offset)
    GatedRMSNorm  y            = norm(x) * silu(gate), or norm(x * silu(gate))
    LayerNorm     y            = norm(h - mean(h)) + bias
    Linear        out          = (norm(h) @ weight.T) * weight_scale + bias + add
    MergedLinear  out          = the same, split; or act(gate) * up
    RMSNormFP8    codes, scale = y / scale as fp8, max |y| / 448 per row
    LinearFP8     out          = (codes @ weight.T) * scale * weight_scale + bias

There is no backward: call these under ``torch.inference_mode()`` or ``torch.no_grad()``. A norm's weight
in neither x's dtype nor float32 (float32 activations in a bfloat16 model) is converted to float32,
which is exact.
"""

from __future__ import annotations

from .fp8 import LinearFP8, RMSNormFP8
from .linear import Linear, MergedLinear
from .norm import GatedRMSNorm, LayerNorm, QKNorm, RMSNorm
from .norm import eps_of as eps_of
from .norm import gamma_of as gamma_of

__all__ = ["GatedRMSNorm", "LayerNorm", "Linear", "LinearFP8", "MergedLinear", "QKNorm", "RMSNorm", "RMSNormFP8"]
