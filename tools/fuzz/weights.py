"""Weights and scales of products: values drawn for them, and tensors made of these."""

from __future__ import annotations

from random import Random
from typing import Final

import torch
from torch import Tensor

from onepass.formats import E4M3FN, FLOATS, SCALE_BLOCK
from tests.oracle.weights import whole_numbers
from tools.fuzz.draw import PLAIN, Kind, Place, Values

INT8, E4M3, E8M0 = torch.int8, E4M3FN.dtype, torch.float8_e8m0fnu
_KINDS: Final[tuple[Kind, ...]] = ("normal", "normal", "ties", "small", "equal", "one hot", "zero", "-zero")
"""Kinds of weights. Activations have larger ones too, but sums must not exceed float32."""


def dtype(r: Random, x: torch.dtype) -> torch.dtype:
    """The dtype of weights for activations of dtype ``x``."""
    return r.choice((x, x, E4M3, E4M3, INT8))


def scale_kind(r: Random, weight: torch.dtype) -> str:
    """A kind of scale that such weights may have."""
    blocks: tuple[str, ...] = ("block", "block", "ue8m0") if weight == E4M3 else ()
    return r.choice(("none", "none", "row", "tensor", "column", *blocks))


def weights(r: Random) -> Values:
    """How weights are filled. One in fifty has a NaN, which int8 weights ignore."""
    return Values(r.choice(_KINDS), spoil="nan" if r.random() < 0.02 else "", start=r.randrange(1 << 20))


def scale_values(r: Random) -> Values:
    """Ordinary scales of either sign, equal ones, or zeros. One in fifty has a NaN."""
    kind: Kind = r.choice(("normal", "normal", "equal", "zero"))
    return Values(kind, spoil="nan" if r.random() < 0.02 else "", start=r.randrange(1 << 20))


def made(v: Values, shape: tuple[int, int], like: torch.dtype, dtype: torch.dtype, place: Place) -> Tensor:
    """Weights at a place, drawn for activations of dtype ``like``."""
    if dtype == INT8:
        values = whole_numbers(v.make(shape, torch.float32).nan_to_num())
    else:
        values = v.make(shape, like).to(dtype)
    if dtype in FLOATS or place == PLAIN:
        return place.put(values)
    room = place.room(shape, dtype)  # float8 has no copies
    room.view(torch.uint8).copy_(values.view(torch.uint8))
    return room


def scale(v: Values, kind: str, n: int, k: int, apart: bool = False) -> Tensor | None:
    """The scale of weights [n, k]. ``apart`` leaves gaps between the rows of blocks."""
    if kind == "none":
        return None
    if kind in ("row", "tensor", "column"):
        return v.make({"row": (n,), "tensor": (1,), "column": (n, 1)}[kind], torch.float32)
    rows, columns = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
    values = v.make((rows, columns + 2), torch.float32)
    if kind == "ue8m0":
        exponents = (values.nan_to_num() * 4).round().clamp(-20, 20) + 127
        values = torch.where(values.isnan(), 255, exponents).to(torch.uint8).view(E8M0)
    found = values[:, 1 : 1 + columns]
    return found if apart else found.contiguous()
