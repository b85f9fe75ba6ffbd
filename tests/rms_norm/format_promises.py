"""Promises of formats and of the norms around them, without an oracle.

Codes and scales of a row depend on the row alone. Every layout holds the scales of the plain one. A norm that is
quantized is the norm alone, and its codes are the quotient. Gates, biases and LayerNorm change none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from onepass.formats import QUANT_FORMATS
from onepass.ops.rms_norm.op import layer_norm, rms_norm, rms_norm_fused_quant
from onepass.testing.quantized import plain_scales
from onepass.testing.tensors import same_bytes

Promise = Callable[[], str | None]
_COLUMNS: Final = ("row", "column", "column_tma")
_TILED: Final = (*_COLUMNS, "128x4")
_PACKED: Final = (*_TILED, "column_packed")
FORMS: Final[dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    "e4m3fn": ({"format": "e4m3fn"}, _COLUMNS),
    "e4m3fn, groups of 128": ({"format": "e4m3fn", "group_size": 128}, _COLUMNS),
    "e4m3fn, UE8M0, groups of 128": (
        {"format": "e4m3fn", "group_size": 128, "scale_format": "ue8m0", "scales_dtype": torch.float8_e8m0fnu},
        _PACKED,
    ),
    "e4m3fnuz, groups of 64": ({"format": "e4m3fnuz", "group_size": 64}, _COLUMNS),
    "e5m2, UE8M0 rounded down, groups of 32": (
        {"format": "e5m2", "group_size": 32, "scale_format": "ue8m0_floor", "scales_dtype": torch.float8_e8m0fnu},
        _PACKED,
    ),
    "int8": ({"format": "int8"}, _COLUMNS),
    "int8, groups of 16": ({"format": "int8", "group_size": 16, "scales_dtype": torch.float16}, _COLUMNS),
    "mxfp8": ({"format": "mxfp8"}, _PACKED),
    "mxfp4": ({"format": "mxfp4", "rounding": "stored"}, _PACKED),
    "nvfp4": ({"format": "nvfp4", "quantize": "divide"}, _TILED),
}
"""Options of a form, and the layouts that its scales may have."""
LENGTHS: Final = (384, 7168)
NORMS: Final[dict[str, tuple[str, ...]]] = {
    "gate": ("gate",),
    "bias": ("bias",),
    "gate before the norm, bias, residual": ("gate", "before", "bias", "residual"),
    "LayerNorm": ("layer", "bias"),
    "LayerNorm, residual": ("layer", "bias", "residual"),
}
"""What a norm has around it."""
WIDTHS: Final = (100, 1536, 7168, 20000)


def format_promises(device: str) -> Iterator[tuple[str, Promise]]:
    """Name and test of every promise that can be tested on ``device``."""
    for form in FORMS:
        for n in LENGTHS:
            yield f"formats, a row alone is the row in a batch: {form}, {n} columns", partial(_batch, device, form, n)
            yield f"formats, layouts hold the same scales: {form}, {n} columns", partial(_layouts, device, form, n)
        yield f"formats, alignment changes no bit: {form}, 384 columns", partial(_alignment, device, form)
    for name in ("int8", "e4m3fn", "e5m2"):
        for n in (640, 7168):
            yield f"formats, codes are the quotient: {name}, {n} columns", partial(_quotient, device, name, n)
    for dtype in (torch.bfloat16, torch.float32):
        for norm in NORMS:
            for n in WIDTHS if dtype == torch.bfloat16 else WIDTHS[:2]:
                label = f"{norm}, {str(dtype).removeprefix('torch.')}, {n} columns"
                yield f"norms, a row alone is the row in a batch: {label}", partial(_rows, device, norm, n, dtype)
                yield f"norms, what is quantized is the norm alone: {label}", partial(_same, device, norm, n, dtype)
    if device == "cuda":
        yield "formats, a captured graph replays on new inputs", _graph


def _inputs(device: str, rows: int, n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, n, device=device).to(dtype), torch.randn(n, device=device).to(dtype)


def _called(form: str, x: Tensor, gamma: Tensor, layout: Any = "row", **more: Any) -> tuple[Tensor, ...]:
    options = dict(FORMS[form][0], **more)
    if layout == "column_packed":
        options["scales_dtype"] = torch.int32
    return rms_norm_fused_quant(x, gamma, scale_layout=layout, **options)


def _read(form: str, shape: torch.Size, layout: str, results: tuple[Tensor, ...]) -> list[Tensor]:
    """Codes and scales [rows, groups], read from the layout, then further results. Waits for the device."""
    codes, scales, *rest = results
    options = FORMS[form][0]
    group = options.get("group_size") or QUANT_FORMATS[options["format"]].groups[0]
    found = plain_scales(scales, shape, group, layout)
    if isinstance(found, str):
        raise ValueError(f"{layout}: {found}")
    return [codes, found, *rest]


def _plain(form: str, x: Tensor, gamma: Tensor, layout: str = "row", **more: Any) -> list[Tensor]:
    """The results of a call, its scales read from the layout."""
    return _read(form, x.shape, layout, _called(form, x, gamma, layout, **more))


def _differing(some: list[Tensor], others: list[Tensor]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=True)) if not same_bytes(a, b)), None)


def _batch(device: str, form: str, n: int) -> str | None:
    """Rows alone, a few and many, also in the most packed layout."""
    count = 300 if device == "cuda" else 150
    x, gamma = _inputs(device, count, n)
    whole = _plain(form, x, gamma, return_norm=True)
    for rows in (1, 2, 17, 130):
        for begin in (0, 1, count - rows):
            part = slice(begin, begin + rows)
            for layout in ("row", FORMS[form][1][-1]):
                got = _plain(form, x[part], gamma, layout, return_norm=True)
                wrong = _differing(got, [t[part] for t in whole])
                if wrong is not None:
                    return f"result {wrong} of rows {begin} to {begin + rows} differs from the whole batch's ({layout})"
    return None


def _layouts(device: str, form: str, n: int) -> str | None:
    for rows in (1, 5, 131):
        x, gamma = _inputs(device, rows, n)
        expected = _plain(form, x, gamma)
        for layout in FORMS[form][1][1:]:
            wrong = _differing(_plain(form, x, gamma, layout), expected)
            if wrong is not None:
                return f"result {wrong} of {rows} rows differs with {layout}"
            flat = _plain(form, x.unsqueeze(0), gamma, layout)
            if _differing([t[0] for t in flat], expected) is not None:
                return f"{rows} rows with another leading dimension differ with {layout}"
    return None


def _alignment(device: str, form: str) -> str | None:
    n = 384
    x, gamma = _inputs(device, 33, n)
    layout = FORMS[form][1][-1]
    expected = _plain(form, x, gamma, layout)
    for shift in (1, 4):
        moved = torch.empty(33 * n + 64, device=device, dtype=x.dtype)[shift : shift + 33 * n].view(33, n).copy_(x)
        weight = torch.empty(n + 64, device=device, dtype=x.dtype)[shift : shift + n].copy_(gamma)
        apart = torch.empty(33, n + shift, device=device, dtype=x.dtype)[:, :n].copy_(x)
        for label, a, g in (("x moved", moved, gamma), ("gamma moved", x, weight), ("rows apart", apart, gamma)):
            wrong = _differing(_plain(form, a, g, layout), expected)
            if wrong is not None:
                return f"result {wrong} differs with {label} by {shift} elements"
    return None


def _quotient(device: str, name: str, n: int) -> str | None:
    """The stored norm over its scale, rounded by torch; a given scale has the codes of the same scale of a row's own."""
    x, gamma = _inputs(device, 33, n)
    options: dict[str, Any] = {"format": name, "rounding": "stored", "quantize": "divide"}
    codes, scale, norm = rms_norm_fused_quant(x, gamma, return_norm=True, **options)
    fmt = QUANT_FORMATS[name].codes
    if not same_bytes(norm, rms_norm(x, gamma)):
        return "the norm differs from the norm alone"
    y = norm.float()
    most = torch.tensor(fmt.max, device=device)  # on a GPU torch multiplies by the reciprocal of a number
    if not same_bytes(y.abs().amax(-1, keepdim=True) / most, scale):
        return f"a scale is not the largest magnitude over {fmt.max:g}"
    quotient = (y / scale).clamp(-fmt.max, fmt.max)
    if not same_bytes((quotient.round() if fmt.integer else quotient).to(fmt.dtype), codes):
        return "codes are not the rounded quotient"
    for row in (0, 32):
        alone = rms_norm_fused_quant(x[row : row + 1], gamma, static_scale=scale[row], **options)[0]
        if not same_bytes(alone, codes[row : row + 1]):
            return "a given scale gives other codes"
    return None


def _around(norm: str, device: str, rows: int, n: int, dtype: torch.dtype) -> dict[str, Any]:
    """The tensors that a norm has around it; those with rows are named "gate" and "residual"."""
    parts = NORMS[norm]
    found: dict[str, Any] = {
        name: torch.randn(rows, n, device=device).to(dtype) for name in ("gate", "residual") if name in parts
    }
    return found | ({"bias": torch.randn(n, device=device).to(dtype)} if "bias" in parts else {})


def _normed(norm: str, x: Tensor, gamma: Tensor, around: dict[str, Any], **options: Any) -> list[Tensor]:
    """The norm, and the new residual if there is one."""
    given: dict[str, Any] = {**around, **options}
    if "layer" in NORMS[norm]:
        found = layer_norm(x, gamma, given.pop("bias"), **given)
    else:
        found = rms_norm(x, gamma, **given, **_order(norm))
    return list(found) if isinstance(found, tuple) else [found]


def _order(norm: str) -> dict[str, Any]:
    return {"gate_order": "before"} if "before" in NORMS[norm] else {}


def _quantized(norm: str, x: Tensor, gamma: Tensor, around: dict[str, Any], **options: Any) -> list[Tensor]:
    statistic: dict[str, Any] = {"statistic": "layer"} if "layer" in NORMS[norm] else _order(norm)
    return list(rms_norm_fused_quant(x, gamma, return_norm=True, **around, **statistic, **options))


def _rows(device: str, norm: str, n: int, dtype: torch.dtype) -> str | None:
    """Norms, norms in another dtype, and codes."""
    count = 300 if device == "cuda" else 70
    x, gamma = _inputs(device, count, n, dtype)
    around = _around(norm, device, count, n, dtype)

    def results(part: slice) -> list[Tensor]:
        of_part = {name: t if name == "bias" else t[part] for name, t in around.items()}
        some = _normed(norm, x[part], gamma, of_part)
        some += _normed(norm, x[part], gamma, of_part, out_dtype=torch.float32)
        return some + _quantized(norm, x[part], gamma, of_part, format="int8")

    whole = results(slice(count))
    for rows in (1, 3, 64):
        for begin in (0, 1, count - rows):
            part = slice(begin, begin + rows)
            wrong = _differing(results(part), [t[part] for t in whole])
            if wrong is not None:
                return f"result {wrong} of rows {begin} to {begin + rows} differs from the whole batch's"
    return None


def _same(device: str, norm: str, n: int, dtype: torch.dtype) -> str | None:
    """The norm beside codes of several formats, and in another dtype, rounded afterwards."""
    x, gamma = _inputs(device, 65, n, dtype)
    around = _around(norm, device, 65, n, dtype)
    alone = _normed(norm, x, gamma, around)
    wide = _normed(norm, x, gamma, around, out_dtype=torch.float32)
    if not same_bytes(wide[0].to(dtype), alone[0]) or _differing(wide[1:], alone[1:]) is not None:
        return "the float32 norm, rounded, differs from the norm"
    formats = ["int8", "e4m3fn", *(["mxfp8", "nvfp4"] if n % 32 == 0 else [])]
    for name in formats:
        _, _, *kept = _quantized(norm, x, gamma, around, format=name)
        if _differing([kept[-1], *kept[:-1]], alone) is not None:
            return f"the norm beside {name} codes differs from the norm alone"
    return None


def _graph() -> str | None:
    x, gamma = _inputs("cuda", 130, 4096)
    around: dict[str, Any] = {"gate": torch.randn_like(x), "bias": torch.randn_like(gamma)}

    def calls() -> list[tuple[Tensor, ...]]:
        found = [_called(form, x, gamma, layouts[-1]) for form, (_, layouts) in FORMS.items()]
        return [*found, (rms_norm(x, gamma, **around), layer_norm(x, gamma, around["bias"]))]

    def read(results: list[tuple[Tensor, ...]]) -> list[Tensor]:
        """The results without the bytes that fill up a tile, which no kernel writes."""
        each = zip(FORMS.items(), results[:-1], strict=True)
        found = [t for (form, (_, layouts)), some in each for t in _read(form, x.shape, layouts[-1], some)]
        return [*found, *results[-1]]

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = calls()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        if _differing(read(results), read(calls())) is not None:
            return "a replay differs from an eager call"
    return None
