"""The calls of the attention of decode steps, and of its products, that `onepass check` makes on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from ..ops.attention import reference as attention
from ..ops.attention.op import attend
from ..ops.head_product import reference as head_products
from ..ops.head_product.op import head_product
from ..ops.latent_attention import reference as latents
from ..ops.latent_attention.op import attend_latents
from .call import Case, Expected, Random, bf16, case, f16

FUNCTIONS: Final = {"attend": attend, "attend_latents": attend_latents, "head_product": head_product}
_REFERENCES: Final = {"attend": attention, "attend_latents": latents, "head_product": head_products}


def _mask(kind: str, q: Random, context: int) -> Tensor | None:
    """One of zeros, or one that lets a query see some entries, by the sequence's own rule or by one for all."""
    batch, _, tokens, _ = q.shape
    entry, token = torch.arange(context), torch.arange(tokens).view(-1, 1)
    sequence = torch.arange(1 if kind == "shared" else batch).view(-1, 1, 1, 1)
    match kind:
        case "none":
            return None
        case "zeros":
            allowed = torch.ones(batch, 1, tokens, context, dtype=torch.bool)
        case "padded":  # in front and behind; the first query of all has no entry
            allowed = (entry >= sequence * 7) & (entry <= context * 3 // 4 + token)
            allowed[0, :, 0] = False
        case _:
            allowed = (entry + token + sequence) % 5 != 1
    return torch.log(allowed).to(q.dtype)


def _attend(
    group: str,
    mask: str,
    draw: Any = bf16,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    tokens: int = 1,
    context: int = 70,
    columns: int = 64,
) -> Case:
    q, cache = draw(batch, heads[0], tokens, columns), draw(batch, heads[1], context, columns)
    return case("attend", group, q=q, k=cache, v=cache, mask=_mask(mask, q, context), scale=columns**-0.5)


def _latents(
    group: str,
    mask: str,
    draw: Any = bf16,
    batch: int = 2,
    heads: int = 5,
    tokens: int = 1,
    context: int = 70,
    columns: tuple[int, int] = (64, 16),
) -> Case:
    q, q_rot = (draw(batch, heads, tokens, n) for n in columns)
    latent, k_rot = (draw(batch, 1, context, n) for n in columns)
    tensors = {"q": q, "q_rot": q_rot, "latent": latent, "k_rot": k_rot, "mask": _mask(mask, q, context)}
    return case("attend_latents", group, **tensors, scale=sum(columns) ** -0.5)


GPU_CASES: Final[tuple[Case, ...]] = (
    _attend("masks", "none"),
    _attend("masks", "zeros", f16),
    _attend("masks", "padded", heads=(20, 1), context=513, columns=72),
    _attend("masks", "shared", heads=(3, 3), context=1, columns=8),
    _attend("tokens", "each", tokens=3, context=300),
    _latents("masks", "none"),
    _latents("masks", "zeros", f16, columns=(128, 64)),
    _latents("masks", "padded", heads=20, context=513, columns=(72, 24)),
    _latents("masks", "shared", heads=3, context=1, columns=(40, 8)),
    _latents("tokens", "each", tokens=3, context=300),
    case("head_product", "short", x=bf16(3, 2, 128), weight=bf16(2, 128, 128)),
    case("head_product", "columns", x=f16(5, 2, 136), weight=f16(2, 136, 40, layout="columns")),
)


def verify(op: str, host: dict[str, Any], results: tuple[Tensor, ...]) -> Iterator[Expected]:
    """The result. Powers are rounded to the dtype of the values before they are multiplied by them."""
    error, share = (1e-4, 0.95) if op == "head_product" else (2 * torch.finfo(results[0].dtype).eps, 0.5)
    yield Expected("out", results[0], getattr(_REFERENCES[op], op)(**host), error, share=share)
