"""``python -m tools.scaled_mm``: torch's scaled matrix products read what `rms_norm_fused_quant` writes.

Both operands are rows quantized by `rms_norm_fused_quant`. The product of torch's GEMM is compared with the float64
product of the decoded values. A product with the scales of other rows must not pass, which shows that the tolerance
would notice a wrong layout. GEMMs that the GPU or torch does not offer are reported as refused; those named in
`REQUIRED` must agree.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

import onepass
from onepass.testing.quantized import Quantized, described
from tests.oracle.memory import to_cpu
from tests.oracle.quantized import values
from tools import compact

ROWS: Final = 192
COLUMNS: Final = 1024
OUTPUTS: Final = 384
ERROR: Final = 2.0**-10
"""Error of a sum, relative to the sum of its absolute products: tensor cores keep about 13 bits of fp8 products."""
REQUIRED: Final = (
    "row scales, torch._scaled_mm",
    "row scales, scaled_mm",
    "one scale, torch._scaled_mm",
    "int8, torch._int_mm",
)


class Operand(NamedTuple):
    """Quantized rows, their scales as the GEMM reads them, and what both stand for."""

    codes: Tensor
    scale: Tensor
    values: Tensor


Product = Callable[[Operand, Operand], Tensor]


class Way(NamedTuple):
    """A GEMM, and the options that quantize its two operands."""

    title: str
    product: Product
    options: dict[str, Any]
    other: dict[str, Any] | None = None
    exact: bool = False
    """Whether nothing may differ but the rounding of the result."""


def operand(rows: int, options: dict[str, Any], device: str, seed: int) -> Operand:
    """Rows of random numbers whose size varies by row and by group, so that each scale differs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, COLUMNS, generator=generator)
    gamma = torch.exp2(torch.randint(-3, 4, (COLUMNS // 16,), generator=generator).float()).repeat_interleave(16)
    x *= torch.exp2(torch.randint(-2, 3, (rows, COLUMNS // 16), generator=generator).float()).repeat_interleave(16, 1)
    given = dict(options)
    if given.pop("one", False):
        given["static_scale"] = torch.tensor(2.0**-6, device=device)
    arguments: dict[str, Any] = {"x": x.bfloat16().to(device), "gamma": gamma.to(device), **given}
    codes, scale = onepass.rms_norm_fused_quant(**arguments)[:2]
    plain = described(to_cpu(arguments), codes.cpu(), scale.cpu())
    if not isinstance(plain, Quantized):
        raise TypeError(plain)
    return Operand(codes, scale, values(plain))


def _old(a: Operand, b: Operand) -> Tensor:
    scales = (
        a.scale.reshape(()) if a.scale.numel() == 1 else a.scale,
        b.scale.reshape(()) if b.scale.numel() == 1 else b.scale.t(),
    )
    return torch._scaled_mm(a.codes, b.codes.t(), scales[0], scales[1], out_dtype=torch.bfloat16)


def _new(kind: ScalingType, swizzled: bool = False) -> Product:
    def product(a: Operand, b: Operand) -> Tensor:
        swizzle = SwizzleType.SWIZZLE_32_4_4 if swizzled else SwizzleType.NO_SWIZZLE
        pairs = [t.codes.view(torch.float4_e2m1fn_x2) if t.codes.dtype == torch.uint8 else t.codes for t in (a, b)]
        transposed = b.scale if swizzled else b.scale.t()
        return scaled_mm(pairs[0], pairs[1].t(), a.scale, kind, transposed, kind, swizzle, swizzle)

    return product


def _integers(a: Operand, b: Operand) -> Tensor:
    return torch._int_mm(a.codes, b.codes.t()).double() * a.scale.double() * b.scale.double().t()


_BLOCKS: Final = {"group_size": 128, "scale_layout": "column"}
_PADDED: Final = _BLOCKS | {"scale_layout": "column_tma"}
_POWERS: Final = _BLOCKS | {"scale_format": "ue8m0", "scales_dtype": torch.float32}
WAYS: Final = (
    Way("row scales, torch._scaled_mm", _old, {}),
    Way("row scales, scaled_mm", _new(ScalingType.RowWise), {}),
    Way("row scales, e5m2 rows, torch._scaled_mm", _old, {"format": "e5m2"}, {}),
    Way("one scale, torch._scaled_mm", _old, {"one": True}),
    Way("one scale, e5m2 rows, torch._scaled_mm", _old, {"one": True, "format": "e5m2"}, {"one": True}),
    Way("groups of 128, torch._scaled_mm", _old, _BLOCKS),
    Way("groups of 128, scaled_mm", _new(ScalingType.BlockWise1x128), _BLOCKS),
    Way("groups of 128, padded columns, scaled_mm", _new(ScalingType.BlockWise1x128), _PADDED),
    Way("groups of 128, powers of two, scaled_mm", _new(ScalingType.BlockWise1x128), _POWERS),
    Way("mxfp8, scaled_mm", _new(ScalingType.BlockWise1x32, True), {"format": "mxfp8", "scale_layout": "128x4"}),
    Way("mxfp4, scaled_mm", _new(ScalingType.BlockWise1x32, True), {"format": "mxfp4", "scale_layout": "128x4"}),
    Way("nvfp4, scaled_mm", _new(ScalingType.BlockWise1x16, True), {"format": "nvfp4", "scale_layout": "128x4"}),
    Way("int8, torch._int_mm", _integers, {"format": "int8"}, exact=True),
)  # fmt: skip


def difference(way: Way, a: Operand, b: Operand) -> float:
    """The largest error of the GEMM in units of its tolerance: the rounding to bfloat16 and the error of the sum."""
    exact = a.values @ b.values.T
    got = way.product(a, b).double().cpu()
    slack = 0.0 if way.exact else ERROR
    rounding = 2.0**-40 if way.exact else 2.0**-8
    bound = exact.abs() * rounding + (a.values.abs() @ b.values.abs().T) * max(slack, 2.0**-40)
    return float(((got - exact).abs() / bound).nan_to_num(torch.inf).max())


def run(way: Way, device: str) -> dict[str, Any]:
    """The outcome of one way."""
    a = operand(ROWS, way.options, device, 1)
    b = operand(OUTPUTS, way.options if way.other is None else way.other, device, 2)
    try:
        found = difference(way, a, b)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return {"way": way.title, "outcome": "refused", "message": str(error).strip().splitlines()[0][:300]}
    outcome = "agrees" if found <= 1 else "wrong"
    moved = a._replace(scale=a.scale * 4 if a.scale.numel() == 1 else _rolled(a.scale))
    control = difference(way, moved, b)
    if control <= 1:
        outcome = "wrong scales pass"
    return {"way": way.title, "outcome": outcome, "error": found, "with wrong scales": control}


def _rolled(scale: Tensor) -> Tensor:
    """The scales of other rows in the same memory layout."""
    other = torch.empty_like(scale)
    if scale.element_size() == 1:
        other.view(torch.uint8).copy_(scale.view(torch.uint8).roll(1, 0))
    else:
        other.copy_(scale.roll(1, 0))
    return other


def main() -> int:
    """Run every way; 1 if a required one does not agree or any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    options = parser.parse_args()
    with torch.inference_mode():
        results = [run(way, options.device) for way in WAYS]
    for result in results:
        numbers = f"{result['error']:.3g} of the tolerance" if "error" in result else result["message"]
        print(f"{result['outcome']:8} {result['way']}: {numbers}")
    if options.json:
        machine = torch.cuda.get_device_name() if options.device == "cuda" else options.device
        options.json.write_text(compact.dumps({"machine": machine, "torch": torch.__version__, "ways": results}))
    required = options.device == "cuda"
    failed = [r for r in results if r["outcome"].startswith("wrong")]
    failed += [r for r in results if required and r["way"] in REQUIRED and r["outcome"] != "agrees"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
