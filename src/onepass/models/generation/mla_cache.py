"""A transformers cache for multi-head latent attention, with one entry per token.

An entry is ``[norm(latent), rotated key]``: L + R adjacent columns in the blocks of a
`onepass.PagedKVCache` with one page per sequence, so that attention reads a view of them. Any model
that caches (latent, rotated key), as DeepSeek-V3 does, can use it. A model patched with
rounding="once" norms, rotates and writes an entry, and rotates q, in one launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...core.contract import describe, require_bool
from ...errors import ContractError
from ...kvcache import PagedKVCache


class MlaCacheLayer(CacheLayerMixin):
    """One layer's entries [batch, max_length, L + R]; ``keys`` and ``values`` are views of them.

    Tokens are counted on the host, in ``length``. A ``static`` layer counts them on the device
    only.
    """

    is_sliding = False

    def __init__(self, max_length: int, static: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.max_length = max_length
        self.static = static
        self.is_compileable = static  # transformers then makes a mask also for single tokens
        self.length = 0
        self.paged: PagedKVCache | None = None
        self.pairs = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for states [batch, 1, tokens, L] and [batch, 1, tokens, R]."""
        sizes = key_states.shape[-1], value_states.shape[-1]
        self.allocate(key_states.shape[0], *sizes, key_states.dtype, key_states.device)

    def allocate(self, batch: int, latent: int, rope: int, dtype: torch.dtype, device: torch.device) -> PagedKVCache:
        """Return the entries, allocating them at the first call."""
        if self.paged is None:
            blocks = torch.zeros(batch, self.max_length, latent + rope, dtype=dtype, device=device)
            lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            table = torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(1)
            self.paged = PagedKVCache(blocks, lengths, table)
            self.keys, self.values = (part.unsqueeze(1) for part in blocks.split([latent, rope], -1))
            self.is_initialized = True
        return self.paged

    def require(self, tokens: int) -> None:
        """Raise unless there is room for this many more tokens.

        A static layer cannot know. There a patched model skips tokens beyond the end, and `update`
        raises.
        """
        if not self.static and self.length + tokens > self.max_length:
            raise ContractError(
                f"MlaCache: `max_length` must be at least {self.length + tokens} for these tokens, got {self.max_length}"
            )

    def arrange(self, pairs: bool) -> None:
        """Reorder the columns of all rotated keys to match those of the keys to come.

        A rotation acts on pairs of columns. The interleaved rotation of the cache write leaves the
        two columns of a pair adjacent, but the models' own code moves the first columns of all
        pairs before the second ones. Both may write to one cache, when a hook is added or removed
        or a model is patched between two steps. Queries and keys must have the same order.
        """
        if pairs != self.pairs and self.values is not None:
            shape = (-1, 2) if self.pairs else (2, -1)
            self.values.copy_(self.values.unflatten(-1, shape).transpose(-1, -2).flatten(-2))
        self.pairs = pairs

    def written(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Count newly written tokens and return all latents and keys, if static also unused ones."""
        assert self.paged is not None and self.keys is not None and self.values is not None
        self.paged.append(tokens)
        if self.static:
            return self.keys, self.values
        self.length += tokens
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write states as entries; the model's own code calls this."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        tokens = key_states.shape[-2]
        self.require(tokens)
        self.arrange(pairs=False)
        if self.static:
            index = self._count() + torch.arange(tokens, device=self.keys.device)
            self.keys.index_copy_(2, index, key_states)
            self.values.index_copy_(2, index, value_states)
        else:
            self.keys[:, :, self.length : self.length + tokens] = key_states
            self.values[:, :, self.length : self.length + tokens] = value_states
        return self.written(tokens)

    def _count(self) -> Tensor:
        assert self.paged is not None and self.paged.cache_lengths is not None
        return self.paged.cache_lengths[0].long()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that attention will see."""
        return self.max_length if self.static else self.length + query_length, 0

    def get_seq_length(self) -> Any:
        """Tokens so far: a number, or a tensor on the device if the layer is static."""
        return self._count() if self.static and self.is_initialized else self.length

    def get_max_length(self) -> int:
        """The capacity in tokens."""
        return self.max_length

    def reset(self) -> None:
        """Remove all tokens."""
        self.length = 0
        if self.paged is not None and self.paged.cache_lengths is not None:
            self.paged.blocks.zero_()
            self.paged.cache_lengths.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences, for beam search."""
        if self.paged is not None:
            self.paged.blocks.copy_(self.paged.blocks[beam_idx.to(self.paged.blocks.device)])


class MlaCache(Cache):
    """A cache for `generate` or a decode loop: ``past_key_values=MlaCache(layers, max_length)``.

    Each layer has entries ``concat(norm(latent), rope(k))``.

    Args:
        layers: Number of layers.
        max_length: Capacity in tokens.
        static: Whether the number of tokens is known on the device only, as with transformers' StaticCache: attention sees
            all ``max_length`` entries and needs a mask, and a CUDA graph can capture a step. On a GPU transformers'
            ``generate`` then compiles steps unless ``disable_compile=True``.

    >>> import torch
    >>> from onepass.models import MlaCache
    >>> cache = MlaCache(layers=1, max_length=8)
    >>> latents, keys = cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 2), 0)
    >>> list(latents.shape), list(keys.shape), cache.get_seq_length()
    ([1, 1, 3, 4], [1, 1, 3, 2], 3)
    """

    onepass_mla = True
    layers: list[MlaCacheLayer]  # type: ignore[assignment]

    def __init__(self, layers: int, max_length: int, static: bool = False) -> None:
        for name, value in (("layers", layers), ("max_length", max_length)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ContractError(f"MlaCache: `{name}` must be an int of at least 1, got {describe(value)}")
        require_bool("MlaCache", "static", static)
        super().__init__(layers=[MlaCacheLayer(max_length, static) for _ in range(layers)])
        self._cos: Tensor | None = None
        self._angles: tuple[Tensor, Tensor, Tensor] | None = None

    def angles(self, cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row offsets, interleaved (cos, sin) and each token's row of it, computed once per step."""
        if self._cos is not cos or self._angles is None:
            half, tokens = cos.shape[-1] // 2, cos.shape[1]
            freqs = torch.stack((cos[..., :half], sin[..., :half]), -1).flatten(-2).view(-1, 2 * half)
            rows = torch.arange(freqs.shape[0], device=cos.device)
            offsets = torch.arange(batch + 1, dtype=torch.int32, device=cos.device) * tokens
            self._cos = cos
            self._angles = offsets, freqs, rows if cos.shape[0] == batch else rows.repeat(batch)
        return self._angles
