"""An RMSNorm and the linear layer after it in fp8: the norm writes codes and row scales, and the layer multiplies codes.

Both take the state dicts of the modules they replace. On a GPU with fp8 matmuls the layer is one `torch._scaled_mm`.

Run: python examples/fp8_linear.py
"""

import torch
from torch import nn

from onepass.nn import LinearFP8, RMSNormFP8

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
norm = nn.RMSNorm(1024, eps=1e-6, device=device, dtype=torch.bfloat16)
linear = nn.Linear(1024, 512, device=device, dtype=torch.bfloat16)

fp8_norm = RMSNormFP8(1024, eps=1e-6, device=device, dtype=torch.bfloat16)
fp8_norm.load_state_dict(norm.state_dict())
fp8_linear = LinearFP8.from_linear(linear)

with torch.inference_mode():
    x, residual = (torch.randn(32, 1024, device=device, dtype=torch.bfloat16) for _ in range(2))
    codes, scale, h = fp8_norm(x, residual)
    y = fp8_linear((codes, scale))
    exact = linear(norm(x + residual))
    error = (y.float() - exact.float()).norm() / exact.float().norm()
    print(f"{fp8_linear.kernel(codes)}: {list(y.shape)} {y.dtype}, {error:.1%} from bfloat16")
