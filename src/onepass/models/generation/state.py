"""The tensors of a decode step that can be recorded, and the step: model, choice of the token, next position.

All tensors keep their addresses, and nothing in a step is read by the host. The cache has layers of the
full length, for sliding windows too: a mask cuts the window. transformers' own static layers of a
window decide on the host when the window is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..forwards.cache import OUTSIDE, Cache, CacheLayer

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
PATTERNS: Final = (FULL, SLIDING)
"""The kinds of attention whose masks are known here."""
LAYERS: Final = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
"""The layers of given caches that can be read and written."""


class ModelConfig(Protocol):
    """What is read of a model's configuration."""

    is_encoder_decoder: bool
    _attn_implementation: str

    def get_text_config(self) -> ModelConfig:
        """The configuration of the language model."""
        ...


class Model(nn.Module):
    """What is read of a model."""

    config: ModelConfig
    dtype: torch.dtype
    prepare_inputs_for_generation: Callable[..., dict[str, object]]
    _optimize_model_for_decode: Callable[[], AbstractContextManager[object]]
    """transformers' own choice of kernels for the experts of a decode step."""


class StepLayer(CacheLayer, Protocol):
    """A layer of the step's cache."""

    update: Callable[..., tuple[Tensor, Tensor]]
    get_seq_length: Callable[[], Tensor]


class Shape(NamedTuple):
    """What the tensors of a step depend on."""

    batch: int
    length: int
    """Slots of the cache."""
    eos: int
    """The number of end-of-sequence ids."""
    patterns: tuple[str, ...]
    """The kinds of attention of the model."""
    by_pattern: bool
    """Whether the model takes its masks as a dictionary."""
    window: int
    mask_dtype: torch.dtype
    blocked: float
    """What masks add to scores that do not count: the value that the model's attention adds."""


def slot_layer(length: int, slot: Tensor, like: CacheLayer) -> StepLayer:
    """A static layer with heads like another's that writes one token to ``slot``, which the step moves on.

    Layers that count for themselves would spend three launches each. The class stays transformers', because a patched
    model writes into its tensors directly, at the slot.
    """
    static = StaticLayer(max_cache_len=length)
    static.lazy_initialization(like.keys, like.values)
    layer = cast(StepLayer, static)
    layer.cumulative_length = slot
    setattr(layer, OUTSIDE, True)
    keys, values = layer.keys, layer.values  # a reference to the layer would be a cycle, and keep its memory

    def update(key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return keys.index_copy_(2, slot, key_states), values.index_copy_(2, slot, value_states)

    layer.update = update
    layer.get_seq_length = lambda: slot.view(())
    return layer


class State:
    """The tensors of one decode step, and the step."""

    def __init__(
        self,
        shape: Shape,
        source: Cache,
        config: ModelConfig,
        device: torch.device,
        warpers: Sequence[Callable[..., Any]],
        sampling: bool,
    ) -> None:
        self.shape = shape
        self.warpers, self.sampling = list(warpers), sampling
        batch, length = shape.batch, shape.length
        # Tensors of inference mode could not be written outside of it by a later call.
        with torch.inference_mode(mode=False):
            # One addition moves all positions on: the slot, the row of the history, and each sequence's position.
            self.counters = torch.zeros(2 + batch, dtype=torch.long, device=device)
            self.slot, self.row = self.counters[0:1], self.counters[1:2]
            self.positions = self.counters[2:].view(batch, 1)
            self.layers = [slot_layer(length, self.slot, like) for like in source.layers]
            self.cache = StaticCache(config=cast("PreTrainedConfig", config), max_cache_len=length)
            self.cache.layers = cast(list[Any], self.layers)
            self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
            self.running = torch.ones(batch, dtype=torch.bool, device=device)
            self.eos = torch.zeros(max(1, shape.eos), dtype=torch.long, device=device)
            self.pad = torch.zeros(1, dtype=torch.long, device=device)
            self.slots = torch.arange(length, device=device)
            # Masks are what is added to scores: torch would make that of a boolean mask in every layer.
            self.full = torch.zeros(batch, 1, 1, length, dtype=shape.mask_dtype, device=device)
            self.sliding = torch.zeros_like(self.full)
            self.blocked = torch.full((), shape.blocked, dtype=shape.mask_dtype, device=device)
            self.history = torch.zeros(length, batch, dtype=torch.long, device=device)
        self.generator = torch.Generator(device) if sampling else None

    def load(self, prompt: Cache, mask: Tensor, positions: Tensor, eos: Sequence[int], pad: int) -> None:
        """Start behind a prompt: its cache, its mask [batch, tokens], the positions of its last tokens."""
        tokens = mask.shape[1]
        for layer, source in zip(self.layers, prompt.layers, strict=True):
            held = min(tokens, source.keys.shape[2])  # of a window, the last tokens
            for ours, theirs in ((layer.keys, source.keys), (layer.values, source.values)):
                # Masked entries count as zero only while they are finite, so nothing old may stay.
                ours[:, :, : tokens - held].zero_()
                ours[:, :, tokens - held : tokens].copy_(theirs[:, :, :held])
                ours[:, :, tokens:].zero_()
        self.full.fill_(self.shape.blocked)
        self.full[:, 0, 0, :tokens].masked_fill_(mask.bool(), 0.0)
        self.slot.fill_(tokens - 1)
        self.row.zero_()
        self.running.fill_(True)
        self.positions.copy_(positions)
        if eos:
            self.eos.copy_(torch.tensor(list(eos)))
            self.pad.fill_(pad)
        self._cut_window()

    def save(self) -> Callable[[], None]:
        """A function that restores what a step changes, except for entries and tokens that the next step overwrites."""
        tensors = [self.tokens, self.counters, self.running, self.full, self.sliding]
        copies = [tensor.clone() for tensor in tensors]

        def restore() -> None:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)

        return restore

    @property
    def masks(self) -> Tensor | dict[str, Tensor]:
        """What the model takes as ``attention_mask``."""
        every = {FULL: self.full, SLIDING: self.sliding}
        masks = {name: every[name] for name in self.shape.patterns}
        return masks if self.shape.by_pattern else masks[self.shape.patterns[0]]

    def step(self, model: Model) -> None:
        """Run the model on the last tokens, and choose the next ones."""
        self.choose(model(**self.inputs(), return_dict=True).logits[:, -1])

    def inputs(self) -> dict[str, Any]:
        """The arguments of the model."""
        return {
            "input_ids": self.tokens,
            "attention_mask": self.masks,
            "position_ids": self.positions,
            "past_key_values": self.cache,
            "use_cache": True,
        }

    def choose(self, logits: Tensor) -> None:
        """Choose the next tokens, record them, and go on by one position."""
        chosen = self._sampled(logits) if self.sampling else logits.argmax(-1)
        if self.shape.eos:
            chosen = torch.where(self.running, chosen, self.pad)
            self.running.logical_and_((chosen.unsqueeze(1) != self.eos).all(1))
        self.history.index_copy_(0, self.row, chosen.unsqueeze(0))
        self.tokens.copy_(chosen.unsqueeze(1))
        self.counters.add_(1)
        self.full.index_fill_(3, self.slot, 0.0)
        self._cut_window()

    def filtered(self, logits: Tensor) -> Tensor:
        """The float32 logits behind temperature, top-k and top-p, which are transformers' own."""
        scores = logits.to(dtype=torch.float32)
        for warper in self.warpers:
            scores = warper(None, scores)
        return scores

    def _sampled(self, logits: Tensor) -> Tensor:
        """Draw a token, as `torch.multinomial` does; that function also reads its argument on the host."""
        probabilities = self.filtered(logits).softmax(-1)
        noise = torch.empty_like(probabilities).exponential_(1, generator=self.generator)
        return probabilities.div_(noise).argmax(-1)

    def _cut_window(self) -> None:
        if SLIDING in self.shape.patterns:
            within = self.slots > self.slot - self.shape.window
            torch.where(within, self.full, self.blocked, out=self.sliding)

    def store(self, cache: Cache, tokens: int) -> None:
        """Write the entries of the first ``tokens`` tokens into a cache that the caller passed."""
        for layer, target in zip(self.layers, cache.layers, strict=True):
            held = tokens
            if isinstance(target, StaticLayer):
                held = min(tokens, target.max_cache_len)
            elif isinstance(target, DynamicSlidingWindowLayer):
                held = min(tokens, target.sliding_window - 1)
            keys, values = (part[:, :, tokens - held : tokens] for part in (layer.keys, layer.values))
            if isinstance(target, StaticLayer):
                target.keys[:, :, :held].copy_(keys)
                target.values[:, :, :held].copy_(values)
                target.cumulative_length.fill_(held)
                if isinstance(target, StaticSlidingWindowLayer):
                    target.cumulative_length_int = tokens
            else:
                target.keys, target.values = keys.clone(), values.clone()
                if isinstance(target, DynamicSlidingWindowLayer):
                    target.cumulative_length = tokens
