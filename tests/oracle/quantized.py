"""The numbers that quantized results stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.ops.rms_norm.reference import decode_table
from onepass.testing.quantized import Quantized


def values(q: Quantized) -> Tensor:
    """Codes times scales, as float64."""
    if q.fmt.integer:
        numbers = q.codes.view(torch.int8).double()
    else:
        table = decode_table(q.fmt.bias, q.fmt.mantissa)
        numbers = table[(q.codes & 0x7F).long()] * torch.where(q.codes >= 0x80, -1.0, 1.0)
        if q.fmt.has_nan:
            numbers = torch.where((q.codes & 0x7F) == (q.fmt.nan_code & 0x7F), torch.nan, numbers)
    scale = q.applied()
    wide = scale if scale.numel() == 1 else scale.repeat_interleave(numbers.shape[-1] // scale.shape[-1], -1)
    return numbers * wide
