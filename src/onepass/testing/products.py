"""The calls of `linear` and `gemv_and_partial_norm` that `onepass check` makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from ..formats import FLOATS, FP8_FORMATS, SCALE_BLOCK
from ..ops.gemv_norm.op import gemv_and_partial_norm
from ..ops.gemv_norm.reference import gemv_and_partial_norm as exact_gemv
from ..ops.linear.op import linear
from ..ops.linear.reference import linear as exact_linear
from ..ops.linear.reference import matmul
from ..ops.rms_norm.reference import rms_norm
from .call import Case, Expected, Random, bf16, case, e4m3fn, f16, f32, int8, scaled_rows

BF16, F16, F32 = FLOATS
FP8, FNUZ = FP8_FORMATS
_SUM: Final = 2e-4
"""Error of a float32 sum of some hundred products, relative to the mean of a row's results."""

FUNCTIONS: Final = {"linear": linear, "gemv_and_partial_norm": gemv_and_partial_norm}


def _blocks(n: int, k: int) -> Random:
    """A scale per block of weights [n, k]."""
    return f32(-(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK), positive=True)


def _powers(n: int, k: int) -> Tensor:
    """Powers of two, as exponents."""
    shape = _blocks(n, k).shape
    exponents = 120 + torch.arange(torch.Size(shape).numel()).view(shape) % 5
    return exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def _linear(group: str, x: Random, n: int, weight: Random | None = None, **more: Any) -> Case:
    """A case whose weight [n, K] has x's dtype and layout, unless passed."""
    k = x.shape[-1]
    return case("linear", group, x=x, weight=weight or Random(x.dtype, (n, k), x.layout, times=k**-0.5), **more)


def _gemv(group: str, act: Random, n: int, gamma: Random, weight: Random | None = None, **more: Any) -> Case:
    """A case whose weight [n, K] has the activations' dtype and layout, unless passed."""
    weight = weight or Random(act.dtype, (n, act.shape[-1]), act.layout)
    return case("gemv_and_partial_norm", group, act=act, weight=weight, gamma=gamma, **more)


_ROW: Final = f32(40, positive=True)
_ONE: Final = f32(1, positive=True)
_MIXED: Final[dict[str, Any]] = {
    "segments": [f16(150), f32(40)],
    "weight_scale": _blocks(300, 257),
    "normed_dtype": FP8,
}
_SLICED: Final = e4m3fn(40, 1024, layout="sliced")


CASES: Final[tuple[Case, ...]] = (
    _gemv("dtypes", bf16(1, 520), 40, bf16(24)),
    _gemv("dtypes", f32(1, 520), 40, f32(24), eps=1e-5),
    _gemv("dtypes", f16(1, 520), 40, f16(24)),
    _gemv("dtypes", f16(2, 1040), 40, f16(24), int8(40, 1040), weight_scale=_ONE),
    _gemv("scales", bf16(3, 520), 140, bf16(130), e4m3fn(140, 520), weight_scale=_powers(140, 520)),
    _gemv("segments", bf16(1, 257), 300, bf16(24), e4m3fn(300, 257), **_MIXED),
    _gemv("two launches", bf16(33, 640), 40, f16(24), weight_scale=_ROW, fused=False),
    _gemv("layouts", bf16(1, 512, layout="misaligned"), 40, bf16(24)),
    _gemv("layouts", bf16(2, 1024, layout="sliced"), 40, bf16(24), _SLICED, weight_scale=_ROW),
    _gemv("values", bf16(9, 256, special=True), 48, bf16(24), e4m3fn(48, 256), normed_dtype=FNUZ),
    _linear("dtypes", bf16(3, 200), 136, e4m3fn(136, 200), weight_scale=_powers(136, 200)),
    _linear("dtypes", bf16(3, 200), 136, e4m3fn(136, 200), weight_scale=f32(136, 1, positive=True)),
    _linear("dtypes", f32(2, 256, layout="sliced"), 40, int8(40, 256), weight_scale=_ROW),
    _linear("bias", bf16(2, 260), 136, e4m3fn(136, 260), weight_scale=_ONE, bias=f32(136), out_dtype=F32),
    _linear("norm", f16(4, 320), 40, gamma=f16(320), residual=f16(4, 320)),
    _linear("norm", bf16(2, 300), 40, gamma=f32(300), weight_offset=1.0, eps=0.001),
    _linear("activation", bf16(5, 96), 46, bias=bf16(46), activation="gelu_mul"),
    _linear("activation", f16(5, 96), 46, bias=f16(46), activation="silu_mul"),
    *(
        _linear(
            "activation",
            Random(x, (3, 96)),
            46,
            activation=activation,
            rounding="hf",
            gamma=Random(x, (96,)),
            add=Random(x, (3, 23)),
        )
        for x, activation in ((BF16, "gelu_tanh_mul"), (F16, "silu_mul"), (F32, "silu_mul"))
    ),
    _linear("rows", bf16(33, 160), 48),
    _linear("rows", bf16(130, 160), 48),
    _linear("rows", bf16(130, 272), 144, e4m3fn(144, 272), weight_scale=_blocks(144, 272)),
    _linear("layouts", bf16(1, 264, layout="misaligned"), 40, gamma=bf16(264), residual=f32(1, 264), add=bf16(1, 40)),
    _linear(
        "layouts",
        bf16(3, 2, 2, 64, layout="reversed"),
        40,
        bf16(40, 64, times=0.1),
        gamma=f32(64),
        residual=bf16(3, 2, 2, 64),
        add=f32(3, 2, 2, 40),
    ),
    _linear("layouts", bf16(4, 3, 64, layout="transposed"), 40, bf16(40, 64, times=0.1)),
    _linear("layouts", bf16(4, 3, 64, layout="expanded"), 40, bf16(40, 64, times=0.1)),
    _linear(
        "values",
        f16(9, 264, special=True),
        48,
        e4m3fn(48, 264),
        weight_scale=_blocks(48, 264),
        gamma=f16(264),
        residual=f32(9, 264),
        bias=f32(48),
    ),
)
GPU_CASES: Final[tuple[Case, ...]] = (
    Case(
        "linear",
        "static",
        {"x": bf16(1, 512), "weight": bf16(1504, 512, times=0.05), "static_weight": True, "rounding": "hf"},
        interpretable=False,
    ),
)
"""What only a GPU does differently."""


def verify(op: str, host: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[Expected | str]:
    """The product, after a norm or with norms of its first columns."""
    if op == "gemv_and_partial_norm":
        yield from _verify_gemv(host, results)
        return
    x, named = host["x"], {n: v for n, v in host.items() if n not in ("out_dtype", "static_weight")}
    for name in ("x", "residual", "add"):
        if name in named:
            named[name] = named[name].reshape(-1, named[name].shape[-1])
    exact, eps = exact_linear(**named), torch.finfo(x.dtype).eps
    error = _SUM + eps / 8 * ("gamma" in host) + 2 * eps * (host.get("rounding") == "hf")
    yield Expected("y", results[0].reshape(exact.y.shape), exact.y, error, share=0.95)
    if "residual" in host:
        yield Expected("new residual", results[1], x.double() + host["residual"].double())


def _verify_gemv(host: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[Expected]:
    gammas, left = (host["gamma"], *host.get("segments", ())), list(results)
    eps, error = host.get("eps", 1e-6), _SUM
    exact = exact_gemv(host["act"], host["weight"], gammas, eps, host.get("weight_scale"))
    if not host.get("fused", True):  # the norm is that of the rounded products
        y = matmul(host["act"], host["weight"], host.get("weight_scale"))[0].to(host["act"].dtype)
        exact = exact._replace(normed=[rms_norm(y[:, : len(gammas[0])], gammas[0], eps).y])
        error += torch.finfo(host["act"].dtype).eps / 8
    for index, normed in enumerate(exact.normed):
        codes = left.pop(0)
        fmt = FP8_FORMATS.get(codes.dtype)
        if fmt is not None:
            yield from scaled_rows(f"normed {index}", codes, left.pop(0), normed, fmt, error, 0.95)
        else:
            yield Expected(f"normed {index}", codes, normed, error, share=0.95)
    yield Expected("unnormed", left[0], exact.unnormed, error, share=0.95)
