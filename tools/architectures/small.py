"""Tiny models with random weights, one of every architecture, made from transformers' configurations."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

VOCABULARY: Final = 128
_SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "query_pre_attn_scalar": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attentions
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # linear attentions and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
}
"""Values of those attributes that a configuration has."""

_LATENT: Final[dict[str, Any]] = {"num_key_value_heads": 4}
_LINEAR: Final = ["linear_attention", "full_attention"]
_SLIDING: Final = ["sliding_attention", "full_attention"]
_CONV: Final = {"layer_types": ["conv", "full_attention"]}
_HALVES: Final = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_QUARTERS: Final = {"rope_parameters": {**_HALVES["rope_parameters"], "mrope_section": [1, 1, 2]}}
_OMITTED: Final = ...
"""The value of an attribute that a configuration derives."""
_MAMBA: Final = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
_SPECIAL: Final[dict[str, dict[str, Any]]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, "index_n_heads": 2, "index_head_dim": 16},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3n_text": {
        "layer_types": _SLIDING,
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {"layer_types": _SLIDING, "num_kv_shared_layers": 0, "global_head_dim": 16},
    "gemma4_unified_text": {"layer_types": _SLIDING, "num_kv_shared_layers": 0, "global_head_dim": 16},
    "glm4v_moe_text": _QUARTERS,
    "glm4v_text": _HALVES,
    "glm_image_text": _HALVES,
    "glm_ocr_text": _HALVES,
    "glm4_moe": {"use_qk_norm": True},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], **_MAMBA},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "rel_extent": 16},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": {**_LATENT, "layer_types": _LINEAR, "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "longcat_flash": {
        **_LATENT,
        "num_layers": 1,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "head_dim": 8,
    },
    "mamba2": {"num_heads": 8, "state_size": 16},
    "minicpm3": _LATENT,
    "mistral4": _LATENT,
    "moshi": {"ffn_dim": 96, "audio_vocab_size": 16, "num_codebooks": 2},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
    },
    "qwen2_5_vl_text": _HALVES,
    "qwen2_vl_text": _HALVES,
    "qwen3_5_moe_text": {"layer_types": _LINEAR},
    "qwen3_5_text": {"layer_types": _LINEAR},
    "qwen3_next": {"layer_types": _LINEAR},
    "qwen4_exp_text": {
        "layer_types": _LINEAR,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 64, "attention_window_size": 8},
    "youtu": _LATENT,
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "mamba_d_state": 16,
        "n_mamba_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": _OMITTED,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What else a configuration needs to be small and to have an attention."""

# fmt: off
ARCHITECTURES: Final = [
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bamba", "bitnet", "cohere", "cohere2", "cwm", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "diffllama", "doge", "dots1", "ernie4_5", "ernie4_5_moe",
    "eurobert", "exaone4", "exaone_moe", "falcon_h1", "falcon_mamba", "flex_olmo", "gemma", "gemma2", "gemma3_text",
    "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
    "glm4v_moe_text", "glm4v_text", "glm_image_text", "glm_moe_dsa", "glm_ocr_text", "gpt_oss", "granite",
    "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hrm_text",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "inkling_text", "jamba", "jetmoe",
    "kimi_linear", "laguna", "lfm2", "lfm2_moe", "llama", "llama4_text", "longcat_flash", "mamba", "mamba2",
    "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3",
    "mistral", "mistral4", "mixtral", "moshi", "muse_glimmer_text", "nanochat", "nemotron_h", "olmo2", "olmo3",
    "olmo_hybrid", "olmoe", "phi3", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "qwen3_vl_text",
    "qwen4_exp_text", "recurrent_gemma", "seed_oss", "smollm3", "solar_open", "vaultgemma", "youtu", "zamba2",
    "zaya",
]
# fmt: on
"""transformers' names (``model_type``) of the models that are compared."""


def configuration(architecture: str) -> Any:
    """A configuration of two narrow layers."""
    import transformers

    cls = transformers.CONFIG_MAPPING[architecture]
    known = {*dir(cls), *cls().to_dict(), *cls.attribute_map}
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    if "qk_rope_head_dim" in sizes:
        sizes["head_dim"] = _OMITTED
    values = {**sizes, **_SPECIAL.get(architecture, {})}
    return cls(**{name: value for name, value in values.items() if value is not _OMITTED})


def build(architecture: str, seed: int = 0) -> Any:
    """A float32 model for inference, the same one for the same seed. It has a head if transformers has one."""
    import transformers

    torch.manual_seed(seed)
    config = configuration(architecture)
    with_head = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    make: Any = transformers.AutoModelForCausalLM if with_head else transformers.AutoModel
    model = make.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Enlarge weights so that every layer matters, and make those of norms different from each other."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(0.2 * torch.randn(parameter.shape))
        elif parameter.dim() > 1:
            parameter.mul_(4)


def tokens(rows: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    """Token ids without padding."""
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def logits(model: Any, ids: Tensor) -> Tensor:
    """The model's logits of all positions. Without a head, its last hidden states."""
    output = model(ids)
    found: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return found
