"""Runs the README's example with a small model from disk instead of Qwen3, on the CPU: ``python tests/helpers/readme.py``.

It needs onepass and transformers only, so that `.ci/dist` can run it with the installed wheel.
"""

from __future__ import annotations

import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

README = Path(__file__).parents[2] / "README.md"
NEW_TOKENS = 8


def save_model(folder: Path) -> None:
    """A Qwen3 of two layers with random weights, and a tokenizer with a token per word."""
    words = {word: i for i, word in enumerate(("<s>", "</s>", "An", "RMSNorm", "is", *map(str, range(91))))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "clean_up_tokenization_spaces": False}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = transformers.Qwen3Config(
        vocab_size=96, bos_token_id=0, eos_token_id=None, pad_token_id=1, **sizes, **heads
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.generation_config.max_new_tokens = NEW_TOKENS
    model.save_pretrained(folder)


def example(model: Path) -> str:
    """The example with another model and device."""
    text: str
    (text,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for theirs, ours in (("Qwen/Qwen3-8B", str(model)), ('device="cuda"', 'device="cpu"')):
        if theirs not in text:
            raise AssertionError(f"the README's example has no {theirs}")
        text = text.replace(theirs, ours)
    return text


def run(folder: Path) -> None:
    """Run it as a program."""
    save_model(folder / "model")
    file = folder / "example.py"
    file.write_text(example(folder / "model"))
    runpy.run_path(str(file), run_name="__main__")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        run(Path(temporary))
