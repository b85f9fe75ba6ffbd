"""Patch a model and generate: tokens per second without onepass, with it, and with fp8 weights.

Run: python examples/generate.py [DIR with a transformers model]. Without one, a small Llama with random weights is made.
On a GPU, `onepass.models.generate` also replays the decode step from a CUDA graph.
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import onepass

PROMPT, NEW = 16, 32
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
else:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=4096, eos_token_id=None, **sizes), dtype=torch.bfloat16
    )
model = model.eval().to(device)
ids = torch.randint(2, 4096, (1, PROMPT), device=device)


def rate(**options: object) -> float:
    """Tokens per second, prompt included; the first call compiles kernels."""
    named = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW, **options}
    for _ in range(2):
        start = time.perf_counter()
        model.generate(ids, **named)
        if device == "cuda":
            torch.cuda.synchronize()
    return NEW / (time.perf_counter() - start)


captured = {"custom_generate": onepass.models.generate} if device == "cuda" else {}
print(f"without onepass:  {rate():7.1f} tokens/s")
with onepass.patch(model, decode=True):
    print(f"with onepass:     {rate(**captured):7.1f} tokens/s")
with onepass.patch(model, decode=True, weights="fp8") as handle:
    print(f"with fp8 weights: {rate(**captured):7.1f} tokens/s, {len(handle.fp8)} weights are fp8")
