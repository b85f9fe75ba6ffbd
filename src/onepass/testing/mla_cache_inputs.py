"""Cases of MLA's cache write: what a case is, and the list of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch

from ..formats import E4M3FN, E4M3FNUZ, FLOATS
from ..specs.mla_cache import ScaleKind
from .case import Values, short_dtype

BF16, F16, F32 = FLOATS
FP8, FNUZ = E4M3FN.dtype, E4M3FNUZ.dtype
OP: Final = "fused_rope_rmsnorm_quantization"

MlaLayout = Literal["contiguous", "slices", "misaligned", "transposed"]
"""slices: q of heads 128 columns wider, its output of heads 512 wider, kv the last columns of a projection, entries with
room behind them that holds the token's scale; transposed: heads before tokens."""
Fault = Literal["", "pages", "width", "lengths", "slots"]
"""What the tables have that must not be followed."""


@dataclass(frozen=True, eq=False)
class MlaCase:
    """One call: the requests (tokens cached, tokens new), sizes, dtypes, options, layout, values and bad tables."""

    group: str
    batch: tuple[tuple[int, int], ...] = ((5, 3), (0, 2), (9, 1))
    heads: int = 4
    latent: int = 128
    rope: int = 64
    turned: int | None = None
    normed: int | None = None
    q: torch.dtype = BF16
    kv: torch.dtype = BF16
    gamma: torch.dtype = BF16
    cache: torch.dtype = FP8
    freqs: torch.dtype | None = F32
    out: torch.dtype | None = None
    page: int = 4
    style: str = "interleaved"
    scale: ScaleKind = "none"
    index: torch.dtype = torch.int32
    slots: torch.dtype | None = None
    positions: torch.dtype | None = None
    padding: tuple[int, int] = (0, 0)
    layout: MlaLayout = "contiguous"
    values: Values = "normal"
    fault: Fault = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def op(self) -> str:
        """The op's name."""
        return OP

    @property
    def tokens(self) -> int:
        """Tokens of the call, padding included."""
        return sum(new for _, new in self.batch) + sum(self.padding)

    @property
    def interpretable(self) -> bool:
        """Whether Triton's interpreter gets through it in seconds."""
        return self.group not in ("large", "families")

    @property
    def name(self) -> str:
        """Readable and unique within the op."""
        parts = [f"{self.tokens}x{self.heads}x{self.rope}", f"{self.latent}+{self.rope}", f"pages of {self.page}"]
        dtypes = (("q", self.q), ("kv", self.kv), ("gamma", self.gamma), ("cache", self.cache), ("out", self.out))
        parts += [f"{label}={short_dtype(dtype)}" for label, dtype in dtypes if dtype is not None]
        if self.freqs != F32:
            parts.append("no freqs" if self.freqs is None else f"freqs={short_dtype(self.freqs)}")
        parts += [f"turned={self.turned}"] if self.turned is not None else []
        parts += [f"normed={self.normed}"] if self.normed is not None else []
        for label, dtype in (("index", self.index), ("slots", self.slots), ("positions", self.positions)):
            if dtype not in (None, torch.int32):
                parts.append(f"{label}={str(dtype).removeprefix('torch.')}")
            elif dtype is not None and label != "index":
                parts.append(label)
        parts += [f"{k}={v}" for k, v in self.options.items()]
        parts += [part for part in (self.style, f"scale={self.scale}", self.layout, self.values) if part not in _USUAL]
        parts += [f"padding={self.padding}"] if any(self.padding) else []
        parts += [f"bad {self.fault}"] if self.fault else []
        return f"{self.group}: {' '.join(parts)}"


_USUAL: Final = ("interleaved", "scale=none", "contiguous", "normal")
RAGGED: Final = ((0, 0), (7, 4), (3, 0), (0, 0), (12, 1), (0, 5), (1, 0))


def _cases() -> Iterator[MlaCase]:
    c = MlaCase
    for tokens, heads in ((1, 128), (3, 16)):  # DeepSeek-V3, whole and of eight ranks
        for cache in (FP8, BF16):
            yield c("model", ((70, tokens),), heads, 512, cache=cache, page=64)
    yield c("model", ((0, 5), (40, 1)), 8, 512, 64, style="half", scale="token", page=16, layout="slices")
    # widths
    for latent in (1, 2, 31, 33, 127, 129, 577, 1000, 1536, 2047, 2048):
        yield c("widths", latent=latent)
    for rope, turned in ((2, None), (6, None), (34, 18), (96, 64), (128, None), (250, 200), (256, None), (64, 2)):
        for style in ("interleaved", "half"):
            yield c("widths", rope=rope, turned=turned, style=style, latent=96)
    for heads in (1, 2, 3, 7, 65, 256):
        yield c("heads", ((3, 2), (0, 1)), heads)
    # dtypes
    for q in FLOATS:
        for kv in FLOATS:
            yield c("dtypes", q=q, kv=kv, gamma=F32 if q != kv else kv, cache=FP8)
    for kv, gamma in ((BF16, F16), (F16, BF16), (F32, BF16), (F32, F16)):
        yield c("gammas", kv=kv, gamma=gamma)
        yield c("gammas", kv=kv, gamma=gamma, latent=577, scale="token", options={"rounding": "reference"})
    for cache in (FP8, FNUZ, BF16, F16, F32):
        for kv in (BF16, F32):
            yield c("dtypes", kv=kv, gamma=F32, cache=cache, style="half")
        yield c("dtypes", q=F32, out=cache, gamma=F32, cache=BF16)
    for freqs in (BF16, F16):
        yield c("dtypes", freqs=freqs)
    # norms of fewer columns than lie before those that turn
    for latent, normed in ((128, 64), (129, 128), (577, 512), (512, 448), (2048, 1), (96, 95), (64, 64)):
        yield c("part", latent=latent, normed=normed)
    scales: tuple[ScaleKind, ...] = ("tensor", "token")
    for scale in scales:
        yield c("part", latent=576, normed=512, scale=scale, page=5)
        yield c("part", latent=256, normed=200, scale=scale, cache=FNUZ, options={"rounding": "reference"})
    yield c("part", latent=600, normed=512, rope=0, freqs=None, cache=BF16)
    yield c("part", latent=512, normed=384, kv=F32, gamma=F32, cache=F32, style="half")
    yield c("part", latent=160, normed=128, kv=F16, gamma=BF16, cache=F16, layout="slices", slots=torch.int64)
    yield c("part", latent=160, normed=33, layout="misaligned", options={"weight_offset": 1.0})
    yield c("part", ((0, 16),), latent=128, normed=100, values="special", scale="token")
    yield c("part", ((0, 16),), latent=128, normed=100, values="special")
    # no rotation, and none to rotate
    yield c("nope", turned=0)
    yield c("nope", turned=0, freqs=None, cache=BF16, scale="none")
    yield c("nope", turned=0, freqs=None, q=F32, out=FP8, scale="token")
    yield c("nope", rope=0, freqs=None)
    yield c("nope", rope=0, freqs=None, latent=33, scale="token", padding=(1, 2))
    # scales
    for cache in (FP8, FNUZ):
        for scale in ("tensor", "token"):
            for latent, rope in ((128, 64), (577, 10)):
                yield c("scales", latent=latent, rope=rope, cache=cache, scale=scale)
    yield c("scales", kv=F32, gamma=F32, scale="token")
    yield c("scales", scale="token", layout="slices", latent=512)
    # options
    yield c("options", options={"weight_offset": 1.0})
    yield c("options", options={"epsilon": 1e-3})
    rounded = {"rounding": "reference"}
    yield c("reference", options=rounded)
    yield c("reference", q=F16, cache=F32, options=rounded)
    yield c("reference", kv=F16, q=F32, gamma=F16, scale="token", options=rounded)
    yield c("reference", kv=F32, gamma=F32, cache=FNUZ, scale="tensor", options=rounded)
    yield c("reference", out=FP8, q=BF16, gamma=F32, style="half", cache=BF16, options=rounded)
    yield c("reference", out=F32, q=BF16, gamma=F32, cache=F32, options={**rounded, "weight_offset": 1.0})
    # places
    for index in (torch.uint32, torch.int32, torch.int64):
        yield c("ragged", RAGGED, index=index)
        yield c("ragged", RAGGED, index=index, page=1)
    yield c("ragged", RAGGED, page=7, padding=(2, 3))
    yield c("ragged", ((0, 0), (4, 0)), padding=(0, 2))
    yield c("ragged", (), padding=(0, 3))
    yield c("ragged", tuple((i % 9, 1) for i in range(40)), page=3)
    yield c("ragged", ((30, 40),), page=256)
    for slots in (torch.int32, torch.int64):
        yield c("slots", RAGGED, slots=slots)
        yield c("slots", RAGGED, slots=slots, positions=slots, scale="token", page=5)
        yield c("slots", positions=slots)
    yield c("slots", turned=0, freqs=None, slots=torch.int64, cache=BF16)
    for fault in ("pages", "width", "lengths"):
        for index in (torch.int32, torch.int64, torch.uint32):
            if fault != "lengths" or index != torch.uint32:
                yield c("bad tables", RAGGED, index=index, fault=fault, scale="token")
    yield c("bad tables", RAGGED, slots=torch.int64, fault="slots", scale="token")
    yield c("bad tables", RAGGED, slots=torch.int32, fault="slots")
    # memory
    for layout in ("slices", "misaligned", "transposed"):
        for style in ("interleaved", "half"):
            yield c("layouts", heads=5, layout=layout, style=style)
        yield c("layouts", heads=3, latent=512, q=F32, kv=F32, gamma=F32, cache=BF16, layout=layout)
    yield c("layouts", latent=512, layout="slices", cache=F16, slots=torch.int64)
    for scale in ("none", "tensor", "token"):
        for kv in (BF16, F32):
            yield c("values", ((0, 16),), kv=kv, gamma=kv, q=kv, scale=scale, values="special")
    yield c("values", ((0, 16),), cache=FNUZ, out=FNUZ, scale="token", values="special")
    yield c("values", ((0, 16),), cache=BF16, out=FP8, style="half", values="special", options={"epsilon": 0.0})
    yield c("empty", ((3, 0), (5, 0)))
    yield c("large", ((0, 150), (13, 0), (900, 37), (100, 1)), 128, 512, page=64)
    yield c("large", ((0, 2000),), 1, 512, page=64, scale="token", layout="slices")
    yield c("large", ((0, 2000),), 2, 512, normed=384, page=64)


CASES = tuple(_cases())
