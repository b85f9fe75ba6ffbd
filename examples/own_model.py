"""Your own model: tell `onepass.patch` once what the code of your norm computes, and it replaces every module with that code.

Run: python examples/own_model.py
"""

import torch
from torch import nn

import onepass


class ScaleNorm(nn.Module):
    """A norm as someone wrote it: the weight is stored as its distance from 1."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.tiny, self.weight = 1e-6, nn.Parameter(0.1 * torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm in float32."""
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.tiny)
        return (y * (1 + self.weight.float())).to(x.dtype)


class Block(nn.Module):
    """A layer of your model."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.linear = ScaleNorm(size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm, the layer, and the residual."""
        return x + self.linear(self.norm(x))


torch.manual_seed(0)
model, x = nn.Sequential(Block(256), Block(256)).eval(), torch.randn(4, 256)
onepass.models.register(ScaleNorm, onepass.models.Norm(rounding="once", weight_offset=1.0, eps="tiny"))
with torch.inference_mode():
    expected = model(x)
    handle = onepass.patch(model)
    difference = (model(x) - expected).abs().max() / expected.abs().max()
print(handle)
print(f"largest difference: {difference:.0e} of the largest value")
handle.undo()
