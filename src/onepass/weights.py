"""Weights of `linear` as 8-bit codes with scales: how they are quantized, and what codes mean.

`quantize_weight` lists the schemes. The last blocks of rows and columns may be smaller. "fp8_block" is the format of
DeepSeek-V3's checkpoints: ``weight`` and ``weight_scale_inv``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from .core.contract import describe, short
from .errors import ContractError
from .formats import E4M3FN, FLOATS, SCALE_BLOCK, SMALLEST_SCALE

Scheme = Literal["fp8_tensor", "fp8_row", "fp8_block", "fp8_block_ue8m0", "int8_row"]
SCHEMES: Final[tuple[Scheme, ...]] = ("fp8_tensor", "fp8_row", "fp8_block", "fp8_block_ue8m0", "int8_row")
BLOCK_SCHEMES: Final = ("fp8_block", "fp8_block_ue8m0")
INT8_MAX: Final = 127.0
SMALLEST_EXPONENT: Final = -127
"""The exponent of the smallest UE8M0 scale, whose code is 0."""
PANEL: Final = 2**22
"""Weights that are converted to float32 at a time: 16 MiB, and a few times that for intermediate results."""


def codes_dtype(scheme: Scheme) -> torch.dtype:
    """The dtype of a scheme's codes."""
    return torch.int8 if scheme == "int8_row" else E4M3FN.dtype


def scale_dtype(scheme: Scheme) -> torch.dtype:
    """The dtype of a scheme's scales."""
    return torch.float8_e8m0fnu if scheme == "fp8_block_ue8m0" else torch.float32


def scale_shape(scheme: Scheme, n: int, k: int) -> tuple[int, ...]:
    """The shape of the scales of a weight [n, k]."""
    if scheme in BLOCK_SCHEMES:
        return -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
    return (1,) if scheme == "fp8_tensor" else (n,)


def check_scheme(op: str, scheme: object) -> None:
    """Reject what is not the name of a scheme."""
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        _fail(op, "scheme", f"be {' or '.join(map(repr, SCHEMES))}", describe(scheme))


def quantize_weight(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """A weight as (codes, scale), which `linear` takes as ``weight`` and ``weight_scale``.

    With the largest magnitude of the elements that share a scale::

        scale = max |w| / 448                   float32; int8: max |w| / 127
        codes = round(w / scale)                the float32 quotient to nearest, ties to even, saturated

    | scheme | codes | scale | elements that share a scale |
    |---|---|---|---|
    | "fp8_tensor" | float8_e4m3fn | float32 [1] | all |
    | "fp8_row" | float8_e4m3fn | float32 [N] | a row |
    | "fp8_block" | float8_e4m3fn | float32 [ceil(N / 128), ceil(K / 128)] | a block of 128 x 128 |
    | "fp8_block_ue8m0" | float8_e4m3fn | float8_e8m0fnu, the same shape | a block of 128 x 128 |
    | "int8_row" | int8 | float32 [N] | a row |

    Args:
        weight: [N, K], bfloat16, float16 or float32 with any strides, on any device. The memory needed beyond the results does
            not grow with N.
        scheme: One of the above. "int8_row" on a GPU waits for the device.

    Returns:
        ``(codes, scale)``.

    Rounding:
        "fp8_block_ue8m0" rounds scales up to a power of two, so nothing saturates, and stores exponents; the smallest scale is
        2**-127. A float32 scale below 2**-126 is stored as 0 and its codes are 0, as for a row or block of zeros. A NaN or
        infinite weight becomes the NaN code 0x7F and does not affect the scale, and `linear` returns NaN in that column.
        int8 has no NaN, so "int8_row" raises.

    >>> import torch, onepass
    >>> codes, scale = onepass.quantize_weight(torch.tensor([[3.5, -0.5], [896.0, 4.0]]), "fp8_row")
    >>> codes.float(), scale
    (tensor([[448., -64.],
             [448.,   2.]]), tensor([0.0078, 2.0000]))
    """
    op = "quantize_weight"
    _check_matrix(op, "weight", weight, FLOATS)
    check_scheme(op, scheme)
    n, k = weight.shape
    source, device = weight.detach(), weight.device
    codes = torch.empty(n, k, dtype=codes_dtype(scheme), device=device)
    scale = torch.empty(scale_shape(scheme, n, k), dtype=scale_dtype(scheme), device=device)
    whole = None
    if scheme == "fp8_tensor":
        whole = torch.zeros(1, 1, 1, 1, device=device)
        for rows in _panels(n, k):
            torch.maximum(whole, _largest(_in_blocks(scheme, _float32(source[rows]))), out=whole)
    limit = INT8_MAX if scheme == "int8_row" else E4M3FN.max
    for rows in _panels(n, k):
        panel = _float32(source[rows])
        finite = panel.isfinite()
        if scheme == "int8_row" and not panel.is_meta and not finite.all():
            row = rows.start + int((~finite).any(-1).nonzero()[0])
            _fail(op, "weight", "be finite with scheme='int8_row'", f"NaN or infinity in row {row}")
        blocks = _in_blocks(scheme, torch.where(finite, panel, torch.nan))
        stored, factor = _scales(scheme, _largest(blocks) if whole is None else whole, limit)
        scaled = blocks * factor if scheme == "fp8_block_ue8m0" else blocks / factor
        scaled = _as_panel(scaled.clamp_(-limit, limit), len(panel), k)
        codes[rows] = (scaled.round_() if scheme == "int8_row" else scaled).to(codes.dtype)
        _of_panel(scheme, scale, rows).copy_(stored.view_as(_of_panel(scheme, scale, rows)))
    return codes, scale


def dequantize_weight(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight from its codes: ``codes * scale``.

    Args:
        codes: [N, K], float8_e4m3fn or int8.
        scale: Any of `linear`'s: float32 [1], [N] or [N, 1], or for float8_e4m3fn codes [ceil(N / 128), ceil(K / 128)],
            float32 or float8_e8m0fnu.
        dtype: bfloat16, float16 or float32.

    Returns:
        [N, K] in ``dtype``.

    Rounding:
        The product is computed in float32 and rounded once. A NaN code or scale gives NaN.

    >>> import torch, onepass
    >>> codes, scale = onepass.quantize_weight(torch.tensor([[1.0, -0.5], [0.0, 0.25]]), "int8_row")
    >>> onepass.dequantize_weight(codes, scale)
    tensor([[ 1.0000, -0.5039],
            [ 0.0000,  0.2500]])
    """
    op = "dequantize_weight"
    _check_matrix(op, "codes", codes, (E4M3FN.dtype, torch.int8))
    if not isinstance(scale, Tensor) or scale.layout is not torch.strided:
        _fail(op, "scale", "be a tensor", describe(scale))
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        _fail(op, "dtype", "be bfloat16, float16 or float32", describe(dtype))
    scheme, scale = match_scheme(op, "scale", codes, scale)
    n, k = codes.shape
    weight = torch.empty(n, k, dtype=dtype, device=codes.device)
    for rows in _panels(n, k):
        blocks = _in_blocks(scheme, _float32(codes[rows]))
        factor = _of_panel(scheme, scale, rows).float().view(blocks.shape[0], 1, blocks.shape[2], 1)
        weight[rows] = _as_panel(blocks * factor, rows.stop - rows.start, k)
    return weight


def match_scheme(op: str, argument: str, codes: Tensor, scale: Tensor) -> tuple[Scheme, Tensor]:
    """The scheme of given codes and scales, and the scales in its shape. int8 codes get a scale per row.

    A scale of one element may have any number of dimensions. Checkpoints store row scales as [N] or [N, 1].
    """
    n, k = codes.shape
    blocks = scale_shape("fp8_block", n, k)
    int8, ue8m0 = codes.dtype is torch.int8, scale.dtype is torch.float8_e8m0fnu
    if scale.device != codes.device:
        _fail(op, argument, f"be on {codes.device}", str(scale.device))
    if scale.dtype is not torch.float32 and not (ue8m0 and not int8):
        _fail(op, argument, "be float32" + " or, per block, float8_e8m0fnu" * (not int8), describe(scale))
    if not ue8m0 and (scale.numel() == 1 or scale.shape in ((n,), (n, 1))):
        if int8:
            return "int8_row", scale.reshape(-1).expand(n).contiguous()
        return ("fp8_tensor", scale.reshape(1)) if scale.numel() == 1 else ("fp8_row", scale.reshape(n))
    if not int8 and scale.shape == blocks:
        return ("fp8_block_ue8m0" if ue8m0 else "fp8_block"), scale
    shapes = f"[1], [N] or [N, 1] with N={n}" + f", or {list(blocks)} for blocks" * (not int8)
    _fail(op, argument, f"have shape {shapes}", describe(scale))


def _panels(n: int, k: int) -> Iterator[slice]:
    """Consecutive rows. Each panel but the last ends with a block."""
    step = max(1, PANEL // k // SCALE_BLOCK) * SCALE_BLOCK
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _float32(panel: Tensor) -> Tensor:
    return panel.to(torch.float32)


def _in_blocks(scheme: Scheme, panel: Tensor) -> Tensor:
    """A view (of a copy padded with zeros where needed) [p, rows, q, columns]: p x q groups that share a scale."""
    n, k = panel.shape
    if scheme in BLOCK_SCHEMES:
        p, q = scale_shape(scheme, n, k)
        padded = F.pad(panel, (0, q * SCALE_BLOCK - k, 0, p * SCALE_BLOCK - n))
        return padded.reshape(p, SCALE_BLOCK, q, SCALE_BLOCK)
    return panel.reshape(1, n, 1, k) if scheme == "fp8_tensor" else panel.reshape(n, 1, 1, k)


def _as_panel(blocks: Tensor, n: int, k: int) -> Tensor:
    """The reverse of `_in_blocks`."""
    p, rows, q, columns = blocks.shape
    return blocks.reshape(p * rows, q * columns)[:n, :k]


def _of_panel(scheme: Scheme, scale: Tensor, rows: slice) -> Tensor:
    """The scales of these rows."""
    if scheme in BLOCK_SCHEMES:
        return scale[rows.start // SCALE_BLOCK : -(-rows.stop // SCALE_BLOCK)]
    return scale if scheme == "fp8_tensor" else scale[rows]


def _largest(blocks: Tensor) -> Tensor:
    """The largest finite magnitude of each group [p, 1, q, 1]."""
    magnitude = blocks.abs()
    return torch.where(magnitude < torch.inf, magnitude, 0.0).amax((1, 3), keepdim=True)


def _scales(scheme: Scheme, largest: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """The scale as it is stored, and the float32 divisor of the weights (UE8M0: the reciprocal, which is exact)."""
    scale = largest / torch.full_like(largest, limit)  # by a number, torch multiplies by the reciprocal on a GPU
    if scheme == "fp8_block_ue8m0":
        mantissa, exponent = torch.frexp(scale)
        exponent = torch.where(scale > 0, exponent - (mantissa == 0.5).int(), SMALLEST_EXPONENT)
        exponent = exponent.clamp(min=SMALLEST_EXPONENT)
        code = (exponent - SMALLEST_EXPONENT).to(torch.uint8).view(torch.float8_e8m0fnu)
        return code, ((127 - exponent) << 23).view(torch.float32)
    scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)
    return scale, torch.where(scale > 0, scale, 1.0)


def _check_matrix(op: str, name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        _fail(op, name, "be a strided tensor", describe(value))
    if value.dtype not in dtypes:
        _fail(op, name, f"be {' or '.join(map(short, dtypes))}", describe(value))
    if value.dim() != 2 or not value.numel():
        _fail(op, name, "have shape [N, K] with N, K > 0", str(list(value.shape)))


def _fail(op: str, argument: str, expects: str, got: str) -> NoReturn:
    raise ContractError(f"{op}: `{argument}` must {expects}, got {got}")
