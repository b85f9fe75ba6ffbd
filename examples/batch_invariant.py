"""Log-probabilities that do not depend on the batch: a trainer and a server agree bit by bit.

The same sequences are scored all at once, one at a time, and in batches of other sizes.

Run: python examples/batch_invariant.py
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import onepass

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=1024, eos_token_id=None, **sizes), dtype=torch.bfloat16)
model = model.eval().to(device)
sequences = torch.randint(2, 1024, (6, 12), device=device)

with torch.inference_mode(), onepass.patch(model, decode=True, batch_invariant=True):
    together = onepass.models.score(model, sequences)  # of each token after the first
    alone = torch.cat([onepass.models.score(model, row[None]) for row in sequences])
    halves = torch.cat([onepass.models.score(model, part) for part in sequences.split(4)])
print(f"alone: {int((alone != together).sum())} of {together.numel()} log-probabilities differ")
print(f"in batches of 4 and 2: {int((halves != together).sum())} differ")
