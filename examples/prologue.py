"""An elementwise function of your own, compiled into the load of the norm: one launch instead of three.

Run: python examples/prologue.py
"""

import torch

import onepass
from onepass.prologues import sigmoid


@onepass.prologue
def gated(x, gate, bias):
    """Gate the input."""
    return (x + bias) * sigmoid(gate)


torch.manual_seed(0)
x, gate = torch.randn(128, 2048, dtype=torch.bfloat16), torch.randn(128, 2048, dtype=torch.bfloat16)
bias, gamma = torch.randn(2048), torch.ones(2048)  # bias is shared by all rows

codes, scale, norm = onepass.rms_norm_fused_fp8(x, gamma, prologue=gated, prologue_args=(gate, bias), return_norm=True)

h = (x.float() + bias) * torch.sigmoid(gate.float())
expected = torch.nn.functional.rms_norm(h, (2048,), gamma, 1e-6)
print(
    f"largest difference from torch: {(norm.float() - expected).abs().max():.4f}; codes {codes.dtype}, scale {list(scale.shape)}"
)
