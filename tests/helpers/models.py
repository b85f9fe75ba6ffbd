"""Small models with random weights, one of every family that `onepass.patch` supports."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tools.architectures.small import VOCABULARY, logits, randomize, tokens

__all__ = ["COMMON", "CONFIGS", "close", "fresh", "logits", "small", "tokens"]
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
COMMON |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_WINDOW: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_YARN = {"rope_type": "default", "rope_theta": 10000.0}
_LATENT: dict[str, Any] = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
_LATENT |= {"v_head_dim": 16, "num_key_value_heads": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
_LATENT |= {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Mistral": ("MistralConfig", {"head_dim": 16}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {"head_dim": 16}),
    "Gemma 2": ("Gemma2Config", _WINDOW),
    "Gemma 3": ("Gemma3TextConfig", _WINDOW),
    "OLMo-2": ("Olmo2Config", {}),
    "Phi-3": ("Phi3Config", {}),
    "DeepSeek-V3": ("DeepseekV3Config", _LATENT),
    "MiniMax-M2": ("MiniMaxM2Config", {"head_dim": 16, **_EXPERTS}),
    "GLM-4": ("Glm4Config", {"head_dim": 16}),
    "gpt-oss": ("GptOssConfig", {"head_dim": 16, "sliding_window": 8, "rope_parameters": _YARN, **_EXPERTS}),
}


@cache
def small(family: str, dtype: torch.dtype, layers: int = 2, seed: int = 0) -> Any:
    """A model with large weights, so that every layer matters, and with different weights in its norms."""
    import transformers

    name, special = CONFIGS[family]
    config = getattr(transformers, name)(**{**COMMON, "num_hidden_layers": layers, **special})
    torch.manual_seed(seed)
    make: Any = transformers.AutoModelForCausalLM.from_config
    model = make(config, dtype=dtype).eval()
    randomize(model)
    return model


def fresh(name: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> Any:
    """A copy of the small model that a test may change."""
    return copy.deepcopy(small(name, dtype, layers))


def close(got: Tensor, expected: Tensor) -> None:
    """Assert equality up to float32 sums in another order, relative to the largest value. Zeros are not close."""
    if expected.is_floating_point():
        size = float(expected.abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-4 * size)
    else:
        assert torch.equal(got, expected)
