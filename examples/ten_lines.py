"""RMSNorm, with a residual add and with fp8 quantization: three calls, on the device of the tensors.

Run: python examples/ten_lines.py
"""

import torch

import onepass

x, residual = torch.randn(64, 4096, dtype=torch.bfloat16), torch.randn(64, 4096, dtype=torch.bfloat16)
gamma = torch.ones(4096, dtype=torch.bfloat16)

y = onepass.rms_norm(x, gamma, eps=1e-6)
y, h = onepass.rms_norm(x, gamma, residual=residual)  # y = norm(x + residual), h = x + residual
codes, scale = onepass.rms_norm_fused_fp8(x, gamma, group_size=128)  # one scale per 128 columns

error = (codes.float().view(64, -1, 128) * scale[..., None]).flatten(1) - onepass.rms_norm(x, gamma).float()
print(
    f"h is x + residual: {torch.equal(h, x + residual)}; fp8 is within {error.abs().max() / y.abs().max():.1%} of y's largest"
)
