"""Small models with random weights on disk, as an engine loads them. Their gammas are not all ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

VOCABULARY: Final = 512
LAYERS: Final = 3
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
CONFIGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 64, "query_pre_attn_scalar": 64}),
}
WIDE: Final = "wide"
"""A Llama whose down projection adds 4096 products: there oneDNN's bits depend on the number of rows."""


def made(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model of a family, always the same."""
    import transformers

    name, special = ("LlamaConfig", {"intermediate_size": 4096}) if family == WIDE else CONFIGS[family]
    torch.manual_seed(len(family))
    config = getattr(transformers, name)(**{**_COMMON, **special})
    make: Any = transformers.AutoModelForCausalLM.from_config
    model = make(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape).to(dtype))
            else:  # larger than transformers' own, so that every layer matters
                parameter.copy_((torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5).to(dtype))
    return model


def saved(family: str, directory: Path) -> Path:
    """The folder of a saved model."""
    path = directory / family
    if not path.exists():
        made(family).save_pretrained(path)
    return path
