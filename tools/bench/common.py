"""What `tools.bench.models` and `tools.bench.agreement` share: models to build, options, and reports."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tools import compact

_COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_GEMMA_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256}
_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


def _sizes(hidden: int, intermediate: int, **more: int) -> dict[str, Any]:
    return {"hidden_size": hidden, "intermediate_size": intermediate, **more}


def _whole(
    vocabulary: int, layers: int, tied: bool, sizes: dict[str, Any], heads: tuple[int, int, int]
) -> dict[str, Any]:
    """The sizes of a whole model; ``heads`` of queries, of keys, and the columns of each."""
    own = {"vocab_size": vocabulary, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    return sizes | own | dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True))


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3 8B": ("LlamaConfig", _sizes(4096, 14336, **_HEADS)),
    "Qwen3 8B": ("Qwen3Config", _sizes(4096, 12288, **_HEADS)),
    "Gemma 3 12B": ("Gemma3TextConfig", _sizes(3840, 15360, **_GEMMA_HEADS)),
    "OLMo-2 7B": ("Olmo2Config", _sizes(4096, 11008, num_attention_heads=32, num_key_value_heads=32)),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        _sizes(7168, 18432, num_attention_heads=128, num_key_value_heads=128, **_LATENT),
    ),
}
"""The configuration class and layer sizes of each model."""
WHOLE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": ("LlamaConfig", _whole(128256, 16, True, _sizes(2048, 8192), (32, 8, 64))),
    "Qwen3-0.6B": ("Qwen3Config", _whole(151936, 28, True, _sizes(1024, 3072), (16, 8, 128))),
    "OLMo-2-1B": ("Olmo2Config", _whole(100352, 16, False, _sizes(2048, 8192), (16, 16, 128))),
    "Gemma-3-1B": (
        "Gemma3TextConfig",
        _whole(262144, 26, True, _sizes(1152, 6912, query_pre_attn_scalar=256), (4, 1, 256)),
    ),
}
"""Small models with their published sizes: all layers and the whole vocabulary. Every layer of Gemma attends to all entries."""
MORE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral 7B": ("MistralConfig", {**_sizes(4096, 14336, **_HEADS), "sliding_window": None}),
    "Qwen2 7B": ("Qwen2Config", _sizes(3584, 18944, num_attention_heads=28, num_key_value_heads=4, head_dim=128)),
    "Gemma 2 9B": ("Gemma2Config", _sizes(3584, 14336, **_GEMMA_HEADS)),
    "Phi-3 mini": (
        "Phi3Config",
        {**_sizes(3072, 8192, num_attention_heads=32, num_key_value_heads=32), "sliding_window": None},
    ),
    "GLM-4 9B": ("Glm4Config", _sizes(4096, 13696, num_attention_heads=32, num_key_value_heads=2, head_dim=128)),
}
"""Models that are measured only if they are named."""
_CPU_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
CPU_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 1024": ("LlamaConfig", _sizes(1024, 2816, **_CPU_HEADS, num_hidden_layers=16)),
}
"""Models for a CPU, with all of their layers."""


def sized(name: str, layers: int) -> tuple[str, str, dict[str, Any]]:
    """A title, the configuration class and its sizes with a number of decoder layers (DeepSeek-V3 has three dense ones)."""
    config, sizes = {**MODELS, **WHOLE_MODELS, **MORE_MODELS, **CPU_MODELS}[name]
    layers = sizes.get("num_hidden_layers", layers)
    more: dict[str, Any] = {}
    dense = ""
    if name.startswith("DeepSeek"):
        layers, dense = min(layers, 3), " dense"
        more = {"first_k_dense_replace": layers}
    elif name.startswith("Gemma"):
        more = {"layer_types": ["full_attention"] * layers}
    title = f"{name}, whole" if name in WHOLE_MODELS else f"{name}, {layers}{dense} layers"
    return title, config, {**sizes, "num_hidden_layers": layers, **more}


def tiny(sizes: dict[str, Any]) -> dict[str, Any]:
    """Small sizes for tests, with at most two layers."""
    small = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256}
    layers = min(2, sizes["num_hidden_layers"])
    more = {"layer_types": sizes["layer_types"][:layers]} if "layer_types" in sizes else {}
    return {**sizes, **small, **more, "num_hidden_layers": layers}


def build(config: str, sizes: dict[str, Any], device: str) -> Any:
    """A bfloat16 model with random weights, made on the device."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**_COMMON, **sizes})
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, attn_implementation="sdpa")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def parser(module: str, description: str | None, layers: int) -> argparse.ArgumentParser:
    """The options of both programs."""
    made = argparse.ArgumentParser(prog=f"python -m tools.bench.{module}", description=description)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--json", type=Path, help="write results here as they come")
    made.add_argument(
        "--model", nargs="+", metavar="NAME", help="only models whose name contains this: qwen3-8b, llama"
    )
    made.add_argument("--layers", type=int, default=layers, help=f"decoder layers (default {layers})")
    return made


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _matches(part: str, name: str) -> bool:
    return part[1:] == name if part.startswith("=") else _letters(part) in _letters(name)


def chosen(parts: Sequence[str] | None, usual: Iterable[str] = MODELS, more: Iterable[str] = MORE_MODELS) -> list[str]:
    """The names of the models that ``--model`` selects; of the usual ones and more if it names some.

    Case and punctuation do not matter. A part that starts with "=" is a whole name.
    """
    names = list(dict.fromkeys((*usual, *(more if parts else ()))))
    found = [name for name in names if not parts or any(_matches(part, name) for part in parts)]
    if not found:
        raise SystemExit(f"no model has a name like {', '.join(parts or ())}; there are {', '.join(names)}")
    return found


def head(device: str) -> dict[str, Any]:
    """The machine and the versions of a report."""
    import transformers

    return {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write(report: dict[str, Any], path: Path | None) -> None:
    """Write the report so far, if a file was asked for."""
    if path:
        part = path.with_name(f"{path.name}.part")  # whoever reads the file finds a whole report
        part.write_text(compact.dumps(report))
        part.replace(path)
