"""Serve a block-scaled FP8 checkpoint, DeepSeek-V3's format: codes and one scale per 128 x 128 weights, used as they are stored.

The codes and scales of the file are loaded without a 16-bit copy of the weights, and one launch multiplies them, adds the norm
before and the residual after.

Run: python examples/fp8_checkpoint.py
"""

import torch

import onepass
from onepass import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, INNER = 512, 1024


def stored(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """A layer as such a file has it."""
    codes, scale = onepass.quantize_weight(torch.randn(rows, columns, device=device) / columns**0.5, "fp8_block")
    return {"weight": codes, "weight_scale_inv": scale}


checkpoint = {"gate_proj": stored(INNER, HIDDEN), "up_proj": stored(INNER, HIDDEN), "down_proj": stored(HIDDEN, INNER)}

layers = {}
for name, tensors in checkpoint.items():
    rows, columns = tensors["weight"].shape
    layers[name] = nn.Linear(columns, rows, bias=False, device=device, dtype=torch.bfloat16, scheme="fp8_block")
    layers[name].load_state_dict(tensors)
gate_up = nn.MergedLinear.from_linears([layers["gate_proj"], layers["up_proj"]], activation="silu_mul")
norm = nn.RMSNorm(HIDDEN, device=device, dtype=torch.bfloat16)

with torch.inference_mode():
    x = torch.randn(8, HIDDEN, device=device, dtype=torch.bfloat16)
    y = layers["down_proj"](gate_up(x, norm=norm), add=x)  # the whole MLP block in two calls

weights = {
    name: onepass.dequantize_weight(t["weight"], t["weight_scale_inv"]).double() for name, t in checkpoint.items()
}
h = torch.nn.functional.rms_norm(x.double(), (HIDDEN,), eps=norm.eps)
inner = torch.nn.functional.silu(h @ weights["gate_proj"].T) * (h @ weights["up_proj"].T)
exact = x.double() + inner @ weights["down_proj"].T
size = sum(t.numel() * t.element_size() for tensors in checkpoint.values() for t in tensors.values())
print(f"{size / 2**20:.2f} MiB of weights, bfloat16 would be {3 * HIDDEN * INNER * 2 / 2**20:.2f}")
print(f"within {(y.double() - exact).norm() / exact.norm():.2%} of the same weights in float64")
