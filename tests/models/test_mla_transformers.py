"""MLA's cache write against Hugging Face's DeepseekV3Attention: its projections, its norm, its rotation, its cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onepass import PagedKVCache, fused_rope_rmsnorm_quantization, gather_mla

modeling: Any = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")

REQUESTS, PROMPT, STEPS = 2, 7, 20
LATENT, ROPE, NOPE, HEADS = 48, 16, 24, 4


def attention(interleave: bool, dtype: torch.dtype) -> tuple[Any, Any]:
    """A layer with random weights, and the module that computes its angles."""
    sizes = {"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 64}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "v_head_dim": 16}
    latent = {"q_lora_rank": 32, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE}
    options = {"rope_interleave": interleave, "attn_implementation": "eager"}
    config = modeling.DeepseekV3Config(**sizes, **heads, **latent, **options)
    layer = modeling.DeepseekV3Attention(config, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
        layer.kv_a_layernorm.weight.copy_(1 + 0.25 * torch.randn(LATENT))
    return layer.to(dtype).eval(), modeling.DeepseekV3RotaryEmbedding(config)


def in_order(rotated: Tensor, interleave: bool) -> Tensor:
    """Columns in their original order: for interleaved pairs Hugging Face moves the first columns before the second ones."""
    return torch.stack(rotated.chunk(2, -1), -1).flatten(-2) if interleave else rotated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleave", [True, False])
@torch.no_grad()
def test_cache_and_queries_of_a_prompt_and_twenty_steps(
    interleave: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import DynamicCache

    layer, rotary = attention(interleave, dtype)
    theirs = DynamicCache()
    name = "apply_rotary_pos_emb_interleave" if interleave else "apply_rotary_pos_emb"
    rotate, seen = getattr(modeling, name), list[tuple[Tensor, Tensor]]()

    def watched(q: Tensor, *rest: Any) -> Any:
        rotated = rotate(q, *rest)
        seen.append((q, rotated[0]))
        return rotated

    monkeypatch.setattr(modeling, name, watched)
    length = PROMPT + STEPS
    cos, sin = rotary(torch.zeros(1, dtype=dtype), torch.arange(length)[None])
    freqs = torch.stack((cos[0, :, : ROPE // 2], sin[0, :, : ROPE // 2]), -1).flatten(-2)
    table = torch.randperm(20).view(REQUESTS, 10)
    ours = PagedKVCache(torch.zeros(20, 3, LATENT + ROPE, dtype=dtype), torch.zeros(REQUESTS, dtype=torch.int64), table)
    gamma = layer.kv_a_layernorm.weight.detach()
    eps = layer.kv_a_layernorm.variance_epsilon
    error = 0.0
    for step in range(1 + STEPS):
        new = PROMPT if step == 0 else 1
        first = 0 if step == 0 else PROMPT + step - 1
        hidden = torch.randn(REQUESTS, new, 64, dtype=dtype)
        mask = torch.full((new, first + new), torch.finfo(dtype).min, dtype=dtype).triu(first + 1)[None, None]
        angles = tuple(t[:, first : first + new] for t in (cos, sin))
        layer(hidden, angles, mask, past_key_values=theirs)
        q, rotated = seen.pop()
        kv = layer.kv_a_proj_with_mqa(hidden).flatten(0, 1)
        offsets = torch.arange(REQUESTS + 1) * new
        q = q.transpose(1, 2).flatten(0, 1)
        style: Any = {"rope_style": "interleaved" if interleave else "half", "rounding": "reference"}
        made = fused_rope_rmsnorm_quantization(None, q, kv, offsets, freqs, gamma, ours, eps, **style)
        ours.append(new)
        expected = in_order(rotated, interleave).transpose(1, 2).flatten(0, 1)
        error = max(error, far(made, expected))
    assert error < (1e-5 if dtype == torch.float32 else 0.03)
    cached: Any = theirs.layers[0]
    for request in range(REQUESTS):
        latent, k = gather_mla(ours, request, dtype).split([LATENT, ROPE], -1)
        assert latent.shape == (length, LATENT)
        their_latent, their_k = cached.keys[request, 0], in_order(cached.values[request, 0], interleave)
        assert far(k, their_k) < (1e-5 if dtype == torch.float32 else 0.03)
        if dtype == torch.float32:
            assert far(latent, their_latent) < 1e-5
        else:  # it rounds like "reference", so only sums in another order can differ
            assert latent.eq(their_latent).double().mean() > 0.995 and far(latent, their_latent) < 0.02


def far(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the typical size. For zeros it would be at least 1."""
    return float((a.double() - b.double()).abs().max() / b.double().square().mean().sqrt())
