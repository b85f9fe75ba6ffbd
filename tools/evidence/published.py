"""Published sizes of the model families that `onepass.patch` supports, as data: what the evidence from a GPU must cover.

Sizes are from the ``config.json`` of each model. Only what affects a kernel is here: the hidden size, the heads that are
normed, MLA's ranks, and the dtype of the weights.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import torch

from onepass.formats import Rounding
from onepass.ops.qk_cache.launch import NormKind
from onepass.rope import RopeStyle

BF16, F16 = torch.bfloat16, torch.float16


class Latent(NamedTuple):
    """MLA: columns of the latents of queries (0: there are none) and of keys, columns that rotate, and heads."""

    q: int
    kv: int
    rope: int
    heads: int


class Model(NamedTuple):
    """One published size. ``head_dim``, ``heads`` and ``kv_heads`` are given where queries and keys are normed."""

    size: str
    hidden: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    latent: Latent | None = None
    dtype: torch.dtype = BF16


class Published(NamedTuple):
    """A family: how its norms round and what they add to the weight, which norms of q and k it has, and its models.

    ``norms``: "heads", each head by itself; "whole", whole projections. ``rotated``: the columns of a head that rotate, if not all.
    """

    name: str
    rounding: Rounding
    weight_offset: float
    models: tuple[Model, ...]
    norms: Literal["", "heads", "whole"] = ""
    rotated: int = 0


class Attention(NamedTuple):
    """Heads of q and k, how they are normed, and how many of their columns rotate: what the write of k and v needs."""

    name: str
    rounding: Rounding
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    norm: NormKind = "none"
    weight_offset: float = 0.0
    style: RopeStyle = "half"


_V3: Final = Latent(1536, 512, 64, 128)

FAMILIES: Final = (
    Published(
        "Llama", "hf", 0.0,
        (
            Model("1 7B", 4096, dtype=F16),
            Model("1 13B", 5120, dtype=F16),
            Model("1 33B", 6656, dtype=F16),
            Model("1 65B", 8192, dtype=F16),
            Model("2 7B", 4096, dtype=F16),
            Model("2 13B", 5120, dtype=F16),
            Model("2 70B", 8192, dtype=F16),
            Model("3.2 1B", 2048),
            Model("3.2 3B", 3072),
            Model("3, 3.1 8B", 4096),
            Model("3, 3.1, 3.3 70B", 8192),
            Model("3.1 405B", 16384),
        ),
    ),
    Published(
        "Mistral", "hf", 0.0,
        (
            Model("7B, Ministral 8B", 4096),
            Model("Nemo 12B", 5120),
            Model("Small 22B", 6144),
            Model("Small 24B", 5120),
            Model("Large 123B", 12288),
        ),
    ),
    Published(
        "Qwen2", "hf", 0.0,
        (
            Model("2, 2.5 0.5B", 896),
            Model("2, 2.5 1.5B", 1536),
            Model("2.5 3B", 2048),
            Model("2, 2.5 7B", 3584),
            Model("2.5 14B, 32B", 5120),
            Model("2, 2.5 72B", 8192),
        ),
    ),
    Published(
        "Qwen3", "hf", 0.0,
        (
            Model("0.6B", 1024, 16, 8, 128),
            Model("1.7B", 2048, 16, 8, 128),
            Model("4B", 2560, 32, 8, 128),
            Model("8B", 4096, 32, 8, 128),
            Model("14B", 5120, 40, 8, 128),
            Model("32B", 5120, 64, 8, 128),
        ),
        "heads",
    ),
    Published(
        "Gemma 2", "once", 1.0,
        (Model("2B", 2304), Model("9B", 3584), Model("27B", 4608)),
    ),
    Published(
        "Gemma 3", "once", 1.0,
        (
            Model("270M", 640, 4, 1, 256),
            Model("1B", 1152, 4, 1, 256),
            Model("4B", 2560, 8, 4, 256),
            Model("12B", 3840, 16, 8, 256),
            Model("27B", 5376, 32, 16, 128),
        ),
        "heads",
    ),
    Published(
        "OLMo-2", "once", 0.0,
        (
            Model("1B", 2048, 16, 16, 128),
            Model("7B", 4096, 32, 32, 128),
            Model("13B", 5120, 40, 40, 128),
            Model("32B", 5120, 40, 8, 128),
        ),
        "whole",
    ),
    Published(
        "Phi-3", "hf", 0.0,
        (Model("3 mini, 3.5 mini, 4 mini", 3072), Model("3 medium, 4", 5120)),
    ),
    Published(
        "DeepSeek-V3", "hf", 0.0,
        (
            Model("V3, R1", 7168, latent=_V3),
            Model("V2", 5120, latent=_V3),
            Model("V2-Lite", 2048, latent=Latent(0, 512, 64, 16)),
        ),
    ),
    Published(
        "MiniMax-M2", "hf", 0.0,
        (Model("M2", 3072, 48, 8, 128),),
        "whole", rotated=64,
    ),
    Published("GLM-4", "hf", 0.0, (Model("9B-0414", 4096), Model("32B-0414", 6144))),
    Published("gpt-oss", "once", 0.0, (Model("20B, 120B", 2880),)),
)  # fmt: skip

ATTENTIONS: Final = (
    Attention("Llama 3 8B, Mistral 7B", "hf", 32, 8, 128, 128),
    Attention("Qwen3 8B", "hf", 32, 8, 128, 128, "head"),
    Attention("Gemma 3 12B", "hf_rope", 16, 8, 256, 256, "head", 1.0),
    Attention("OLMo-2 7B", "hf_rope", 32, 32, 128, 128, "whole"),
    Attention("Phi-3 mini", "hf", 32, 32, 96, 96),
    Attention("Phi-4 mini", "hf", 24, 8, 128, 96),
    Attention("GLM-4 9B", "hf", 32, 2, 128, 64, style="interleaved"),
)
"""One size per kind of attention, bfloat16."""
