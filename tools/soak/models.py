"""Patched transformers models that decode ragged batches over a paged cache, compared with the unpatched model.

Keys and values of every layer lie in pages of a `onepass.PagedKVCache`. DeepSeek-V3's entries are written by one launch of
`fused_rope_rmsnorm_quantization`, those of the others by torch at the slots that the cache names.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache

from onepass.kvcache import PagedKVCache, gather_mla
from onepass.models import patch
from onepass.models.generation.mla_cache import MlaCache, MlaCacheLayer
from tools.soak.batch import LONGEST, PAGE, Churn, Ledger, Request, tables

VOCABULARY, LAYERS, CAPACITY, PAGES = 128, 2, 6, 32
CLOSE: Final = 2e-5
"""Allowed distance of logits from the unpatched model's, relative to the largest: float32 sums in another order."""
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MLA: Final[dict[str, Any]] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": LAYERS,  # no experts: with two almost equal ones a last bit would change the logits
}
FAMILIES: Final[dict[str, tuple[str, dict[str, Any], int, str]]] = {
    "Llama": ("LlamaConfig", {}, 64, "hf"),
    "Qwen3": ("Qwen3Config", {"head_dim": 16}, 64, "once"),
    "OLMo-2": ("Olmo2Config", {}, 64, "hf"),
    "DeepSeek-V3": ("DeepseekV3Config", _MLA, 40, "once"),
}
"""Configuration class, options beyond the sizes above, columns per entry, and the rounding of the patch."""


def build(family: str, seed: int, device: str) -> Any:
    """A float32 model with weights large enough to avoid cancellation, and different norm weights."""
    name, special, _, _ = FAMILIES[family]
    make: Any = transformers.AutoModelForCausalLM.from_config
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make(getattr(transformers, name)(**{**_COMMON, **special}), dtype=torch.float32)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" in key:
                    parameter.add_(0.2 * torch.randn(parameter.shape))
                elif parameter.dim() > 1:
                    parameter.mul_(4)
    return model.eval().requires_grad_(False).to(device)


class PagedLayer(MlaCacheLayer):  # type: ignore[no-untyped-call]
    """One layer's entries, each token's [key, value], in the pages of the current requests."""

    def __init__(self, blocks: Tensor) -> None:
        super().__init__(LONGEST)
        self.blocks = blocks
        self.heads: tuple[int, int, int] = (0, 0, 0)

    def begin(self, lengths: Tensor, table: Tensor, longest: int) -> None:
        """Serve these requests."""
        self.paged = PagedKVCache(self.blocks, lengths.clone(), table)
        self.length = longest
        self.is_initialized = True

    def allocate(self, batch: int, latent: int, rope: int, dtype: torch.dtype, device: torch.device) -> PagedKVCache:
        """Where a launch may write entries of these widths."""
        assert self.paged is not None
        self.heads = (1, latent, rope)
        return self.paged

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write given states [batch, heads, tokens, columns] at the slots that the cache names."""
        assert self.paged is not None
        batch, heads, tokens, columns = key_states.shape
        self.require(tokens)
        self.heads = (heads, columns, value_states.shape[-1])
        entries = torch.cat([t.transpose(1, 2).flatten(2) for t in (key_states, value_states)], -1)
        offsets = torch.arange(batch + 1, device=key_states.device) * tokens
        slots = self.paged.slot_mapping(offsets, batch * tokens)
        self.blocks.view(-1, self.blocks.shape[-1])[slots] = entries.flatten(0, 1)
        return self.written(tokens)

    def written(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Count the written tokens; return all keys and values, with shorter requests padded on the left."""
        assert self.paged is not None and self.paged.cache_lengths is not None
        self.paged.append(tokens)
        self.length += tokens
        batch = self.paged.cache_lengths.shape[0]
        padded = self.blocks.new_zeros(batch, self.length, self.blocks.shape[-1])
        for request in range(batch):
            entries = gather_mla(self.paged, request, padded.dtype)
            padded[request, self.length - entries.shape[0] :] = entries
        heads, key, value = self.heads
        keys, values = padded.split([heads * key, heads * value], -1)
        return keys.unflatten(-1, (heads, key)).transpose(1, 2), values.unflatten(-1, (heads, value)).transpose(1, 2)


class PagedCache(MlaCache):
    """The layers of one model's pool."""

    layers: list[PagedLayer]  # type: ignore[assignment]

    def __init__(self, pool: Tensor) -> None:
        super().__init__(len(pool), LONGEST)
        Cache.__init__(self, layers=[PagedLayer(blocks) for blocks in pool])

    def begin(self, requests: list[Request], device: str) -> PagedCache:
        """Serve these requests."""
        lengths, table = tables(requests, device)
        for layer in self.layers:
            layer.begin(lengths, table, max(r.length for r in requests))
        return self


class Model:
    """A patched model, its requests and its pool, and an unpatched copy."""

    def __init__(self, family: str, seed: int, device: str) -> None:
        self.name, self.device = family, device
        self.plain = build(family, seed, device)
        self.model = copy.deepcopy(self.plain)
        columns, rounding = FAMILIES[family][2:]
        self.patched = patch(self.model, rounding=rounding)  # type: ignore[arg-type]
        if not self.patched.replaced:
            raise RuntimeError(f"{family}: nothing was patched: {self.patched}")
        self.churn = Churn(f"{seed} {family}", CAPACITY, PAGES)
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = torch.randn(LAYERS, PAGES, PAGE, columns, generator=self.generator).to(device)
        self.ledgers = [Ledger(f"{family}, layer {i}", blocks) for i, blocks in enumerate(self.pool)]
        self.cache = PagedCache(self.pool)
        self.logits: dict[Request, list[Tensor]] = {}
        self.tokens = self.compared = 0
        self.worst = 0.0

    def step(self, check: bool) -> list[str]:
        """Run prompts one by one, then one token for all others; return what is wrong.

        All logits of requests that end or are evicted are compared and, if ``check``, those of one that continues.
        """
        ended = self.churn.leaving()
        self.churn.release(ended)
        planned = [request for request, _ in self.churn.plan()]
        ended += [request for request in self.churn.dropped if request in self.logits]
        wrong = [fault for request in ended for fault in self._compare(request)]
        self.compared += sum(len(self.logits[request]) for request in ended)
        self.logits = {request: self.logits.get(request, []) for request in planned}
        arrived, decoding = ([r for r in planned if (r.length > 0) == later] for later in (False, True))
        for request in arrived:
            request.kept = torch.randint(2, VOCABULARY, (request.prompt,), generator=self.generator).tolist()
            self._run([request], request.prompt)
        if decoding:
            self._run(decoding, 1)
        wrong += [found for ledger in self.ledgers if (found := ledger.check())]
        if check and planned:
            wrong += self._compare(self.churn.random.choice(planned))
        return wrong

    def _run(self, requests: list[Request], new: int) -> None:
        ids = torch.tensor([r.kept[r.length : r.length + new] for r in requests], device=self.device)
        starts = torch.tensor([r.length for r in requests])
        longest = int(starts.max())
        mask = torch.arange(longest + new) >= (longest - starts)[:, None]
        positions = starts[:, None] + torch.arange(new)
        options = {"attention_mask": mask.long().to(self.device), "position_ids": positions.to(self.device)}
        cache = self.cache.begin(requests, self.device)
        logits = self.model(ids, past_key_values=cache, logits_to_keep=1, **options).logits[:, -1].cpu()
        chances = logits.softmax(-1).nan_to_num(1.0)
        chosen = torch.multinomial(chances, 1, generator=self.generator).flatten().tolist()
        for request, row, token in zip(requests, logits, chosen, strict=True):
            for ledger in self.ledgers:
                ledger.written.update(request.slots(request.length, request.length + new))
            request.length += new
            self.logits[request].append(row)
            request.kept.append(token)
        self.tokens += new * len(requests)

    def _compare(self, request: Request) -> list[str]:
        """Compare all logits of a request with the unpatched model's, computed at once without a cache."""
        ids = torch.tensor([request.kept[: request.length]], device=self.device)
        got = torch.stack(self.logits[request])
        expected = self.plain(ids, use_cache=False).logits[0, -got.shape[0] :].cpu()
        apart = (got - expected).abs().amax(-1) / expected.abs().amax(-1)
        self.worst = max(self.worst, float(apart.max()))
        far = ~(apart <= CLOSE)  # so that NaN is far
        if not far.any():
            return []
        first = request.length - got.shape[0] + int(far.nonzero()[0])
        return [f"request {request.number}: logits up to {float(apart.max()):.1e} apart, first after token {first}"]
