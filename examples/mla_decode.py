"""Decode steps of an MLA layer's "A" side over a paged fp8 cache: two launches per step, with a matmul in between.

Run: python examples/mla_decode.py (on a GPU if there is one).
"""

from __future__ import annotations

import torch

import onepass

HIDDEN, Q_LORA, LATENT, ROPE, NOPE, HEADS = 512, 192, 128, 64, 32, 8
REQUESTS, STEPS, PAGE = 4, 24, 8


def main() -> None:
    """Decode, then read the cache back and compare it with float64."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {"dtype": torch.bfloat16, "device": device}
    weight_a = torch.randn(Q_LORA + LATENT + ROPE, HIDDEN, **weights) / HIDDEN**0.5
    weight_b = torch.randn(HEADS * (NOPE + ROPE), Q_LORA, **weights) / Q_LORA**0.5
    gamma_q, gamma_kv = torch.ones(Q_LORA, **weights), 1 + 0.1 * torch.randn(LATENT, **weights)
    turns = torch.outer(torch.arange(STEPS), 10000 ** (-torch.arange(0, ROPE, 2) / ROPE))
    freqs = torch.stack((turns.cos(), turns.sin()), -1).flatten(-2).to(device)

    pages = -(-STEPS // PAGE)
    table = torch.randperm(REQUESTS * pages).view(REQUESTS, pages).to(device, torch.int32)
    blocks = torch.zeros(REQUESTS * pages, PAGE, LATENT + ROPE, dtype=torch.float8_e4m3fn, device=device)
    cache = onepass.PagedKVCache(blocks, torch.zeros(REQUESTS, dtype=torch.int32, device=device), table)
    scale = torch.zeros(REQUESTS * pages, PAGE, device=device)
    offsets = torch.arange(REQUESTS + 1, dtype=torch.int32, device=device)  # one token a request

    cache.check(new_tokens=STEPS)
    seen = []
    for _ in range(STEPS):
        hidden = torch.randn(REQUESTS, HIDDEN, **weights)
        seen.append(hidden)
        # normalizes q's columns only; the cache write normalizes kv
        q_latent, kv = onepass.gemv_and_partial_norm(hidden, weight_a, gamma_q)
        q = (q_latent @ weight_b.T).view(REQUESTS, HEADS, NOPE + ROPE)
        q_rope = q[..., NOPE:]
        onepass.fused_rope_rmsnorm_quantization(
            q_rope, q_rope, kv, offsets, freqs, gamma_kv, cache, per_token_scale=scale
        )  # in place: q is ready for attention
        cache.append()

    hidden = torch.stack(seen, 1).double()
    latent = hidden @ weight_a[Q_LORA : Q_LORA + LATENT].double().T
    exact = latent * (latent.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gamma_kv.double()
    for request in range(REQUESTS):
        got = onepass.gather_mla(cache, request, torch.float32, per_token_scale=scale)[:, :LATENT].double()
        error = (got - exact[request]).norm() / exact[request].norm()
        print(f"request {request}: {got.shape[0]} tokens cached, latents within {error:.1%} of float64")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
