"""Attention to a cache: which kernel computes it, and masks in the form that it takes.

For few queries torch splits a long context. cuDNN, its first choice on NVIDIA GPUs, is then not run-to-run deterministic,
and flash splits by the batch. `ops.attention` has a kernel for up to 16 tokens of heads with up to 256 columns, in 16
bits. `attend_unsplit` is for all others where bytes must not depend on the batch. torch's memory-efficient kernel gives a
block of queries of one head to one program, which goes through the keys in order. The blocks depend on the dtype and the
columns of a head, and on nothing else. A masked entry adds zero. So a token also has the same bytes among other tokens of
a step, and in a static cache of any length. On a CPU `ops.sequence_attention` takes its place, for prompts and steps.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...ops.attention.launch import ROWS, SPLIT
from ...ops.attention.op import attend as attend_in_splits
from ...ops.attention.op import attends
from ...ops.sequence_attention.op import attend_sequence, attends_sequence
from .norm import FUSED_ROWS

SHORT: Final = 128
"""Programs up to which onepass's kernel, with what it saves around it, takes less time than torch's on an H200."""

Attended: TypeAlias = tuple[Tensor, Tensor | None]
"""What an attention returns: its output and, if available, the attention weights."""
CosSin: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of the positions."""


class Config(Protocol):
    """What is read of a model's configuration."""

    _attn_implementation: str
    rope_interleave: bool


class AttentionModule(nn.Module):
    """What is read of an attention."""

    config: Config
    layer_idx: int
    scaling: float
    attention_dropout: float


# --- kernels -----------------------------------------------------------------------------------------------------------


def attend(
    self: AttentionModule,
    namespace: str,
    states: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    kwargs: dict[str, Any],
    invariant: bool = False,
) -> Attended:
    """Attention of few tokens, or of any number if ``invariant``, as rows [batch, tokens, columns].

    On a GPU onepass's kernel is used for short contexts, and for any context if the bytes must not depend on the batch,
    ``invariant``. A CPU then sums the keys that a query sees. Next comes torch's attention, which needs no copies of keys
    and values for groups of query heads.
    transformers makes them if there is a mask. Where it relies on causality instead, or has other arguments, its
    function is called.
    """
    q, k, v = states
    batch, _, length, _ = q.shape
    plain = self.config._attn_implementation == "sdpa" and (length == 1 or mask is not None)
    plain = plain and kwargs.get("softcap") is None and kwargs.get("position_bias") is None
    if plain:
        if length <= FUSED_ROWS and (invariant or _is_short(q, k)) and has_kernels(q):
            bias = None if mask is None else biases.of(mask, q.dtype, self.layer_idx)
            if attends(q, k, v, bias):
                return attend_in_splits(q, k, v, bias, self.scaling).view(batch, length, -1), None
        if invariant and takes_unsplit(q, v, mask):
            return attend_unsplit(q, k, v, mask, self.scaling, self.layer_idx), None
    if invariant and takes_sequence(self, states, mask, kwargs):
        if mask is not None and length <= FUSED_ROWS:
            k, v, mask = _in_use(k, v, mask, mask.dtype, self.layer_idx)
        softcap = kwargs.get("softcap") if self.config._attn_implementation == "eager" else None
        return attend_sequence(q, k, v, mask, self.scaling, softcap or 0.0).flatten(2), None
    if not plain:
        return attend_as_model(self, namespace, states, mask, kwargs)
    if length == 1 and q.device.type == "cpu" and (mask is None or mask.shape[1] == 1):
        if mask is not None:
            k, v, mask = _in_use(k, v, mask, q.dtype if mask.dtype is torch.bool else mask.dtype, self.layer_idx)
        return _attend_in_groups(q, k, v, mask, self.scaling).reshape(batch, length, -1), None
    if mask is not None and mask.dtype is torch.bool and not torch.compiler.is_compiling():
        mask = biases.of(mask, q.dtype, self.layer_idx)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling, enable_gqa=grouped)
    return out.transpose(1, 2).reshape(batch, length, -1), None


_REFUSED: Final = ("position_bias", "s_aux", "output_attentions", "head_mask")
"""Arguments of an attention function that `attend_sequence` does not have."""


def takes_sequence(
    self: AttentionModule, states: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, kwargs: dict[str, Any]
) -> bool:
    """Whether `attend_sequence` computes what the attention function that the model is configured for computes."""
    q, k, v = states
    if has_kernels(q) or self.config._attn_implementation not in ("sdpa", "eager"):
        return False
    if any(kwargs.get(name) not in (None, False) for name in _REFUSED) or getattr(
        self.config, "output_attentions", False
    ):
        return False
    causal = kwargs.get("is_causal")
    causal = getattr(self, "is_causal", True) if causal is None else causal
    return (q.shape[2] == 1 or mask is not None or causal) and attends_sequence(q, k, v, mask)


def attend_as_model(
    self: AttentionModule,
    namespace: str,
    states: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    kwargs: dict[str, object],
) -> Attended:
    """The attention function that the model is configured for, as rows [batch, tokens, columns]."""
    batch, _, length, _ = states[0].shape
    model, implementation = sys.modules[namespace], self.config._attn_implementation
    functions = model.ALL_ATTENTION_FUNCTIONS
    if hasattr(functions, "get_interface"):
        function = functions.get_interface(implementation, model.eager_attention_forward)
    else:  # transformers 4.57
        function = model.eager_attention_forward if implementation == "eager" else functions[implementation]
    dropout = self.attention_dropout if self.training else 0.0
    out, weights = function(self, *states, mask, dropout=dropout, scaling=self.scaling, **kwargs)
    return out.reshape(batch, length, -1).contiguous(), weights


def _is_short(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel would have few programs."""
    batch, heads, context, _ = k.shape
    rows = q.shape[1] // heads * q.shape[2]
    return batch * heads * -(-rows // ROWS) * -(-context // SPLIT) <= SHORT


def _in_use(k: Tensor, v: Tensor, mask: Tensor, dtype: torch.dtype, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and a mask of this dtype without the blocks behind the last entry that counts.

    Results keep their bits: torch sums `BLOCK` entries at a time, and a block in which none counts adds zero.
    """
    if torch.compiler.is_compiling():
        return k, v, mask
    bias = biases.in_use(mask, dtype, layer)
    end = bias.shape[-1]
    return (k, v, bias) if end == mask.shape[-1] else (k[:, :, :end], v[:, :, :end], bias)


def _attend_in_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """torch's attention of one query per head on a CPU, as heads of keys whose queries are a group of heads.

    With rows of one query torch takes five to twelve times as long for groups of heads, and its float32 results for a
    sequence depend on the batch. Without groups each 16-bit query is there twice, which takes half as long as once.
    """
    batch, heads, _, columns = q.shape
    rows = q.view(batch, k.shape[1], heads // k.shape[1], columns)
    if rows.shape[2] == 1 and q.dtype is not torch.float32:
        rows = rows.repeat(1, 1, 2, 1)
        return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scaling)[:, :, :1]
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scaling)


KERNEL: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
"""(q, k, v, bias, whether to return sums, scale=...), all [batch, heads, tokens, columns]. The first result is the output."""

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_chips: dict[int, bool] = {}


def takes_unsplit(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel takes these queries, values and mask."""
    if q.dtype not in _DTYPES or (mask is not None and mask.dim() != 4):
        return False
    return q.shape[-1] % ALIGNED == 0 and v.shape[-1] % ALIGNED == 0 and has_kernels(q)


def has_kernels(q: Tensor) -> bool:
    """Whether queries are on an NVIDIA GPU since Ampere. torch is asked once: that costs the host more than a call."""
    if not q.is_cuda:
        return False
    device = q.get_device()
    capable = _chips.get(device)
    if capable is None:
        capable = _since_ampere(device)
        if not torch.compiler.is_compiling():
            _chips[device] = capable
    return capable


def _since_ampere(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_properties(device).major >= 8


def attend_unsplit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, layer: int) -> Tensor:
    """Rows [batch, tokens, columns] of queries that attend to all keys which the mask allows.

    For few tokens the heads of keys are a batch, and query heads that share one are rows: nothing is copied. Many tokens
    get a copy of keys and values per query head, as in the model. A mask with a row per query head would be larger.
    """
    batch, heads, length, columns = q.shape
    keys, context = k.shape[1:3]
    groups, bias = heads // keys, None
    if groups == 1 or length > FUSED_ROWS:
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if mask is not None:
            bias = biases.aligned(mask, q.dtype, layer).expand(batch, heads, length, context)
        out: Tensor = KERNEL(q, k, v, bias, False, scale=scaling)[0]
        return out.transpose(1, 2).reshape(batch, length, -1)
    rows = q.reshape(batch * keys, 1, groups * length, columns)
    if mask is not None:
        bias = biases.grouped(mask, q.dtype, layer, (batch, keys, groups)).expand(
            batch * keys, 1, groups * length, context
        )
    out = KERNEL(rows, k.flatten(0, 1).unsqueeze(1), v.flatten(0, 1).unsqueeze(1), bias, False, scale=scaling)[0]
    return out.reshape(batch, heads, length, -1).transpose(1, 2).reshape(batch, length, -1)


# --- masks -------------------------------------------------------------------------------------------------------------

BLOCKED: Final = -1e30
"""What `Biases.finite` adds to scores that do not count: a row without any that counts must not become NaN."""

BLOCK: Final = 512
"""Entries that torch's attention on a CPU sums as one. Masks are cut at multiples of this."""

ALIGNED: Final = 8
"""torch's memory-efficient attention reads this many entries of a bias at once, so rows start at multiples of it."""


class Biases(threading.local):
    """Masks as what is added to scores, converted once per step and thread instead of once per layer.

    A compiler finds equal expressions itself. Layers are called in order, so a layer that is not behind the last one
    starts a new step. A mask may have been changed since the step before.
    """

    def __init__(self) -> None:
        self.last = -1
        self.biases: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def of(self, mask: Tensor, dtype: torch.dtype, layer: int) -> Tensor:
        """The bias of a mask, boolean (True where attention is allowed) or added to scores, as torch's attention computes it."""
        if mask.dtype is dtype:
            return mask
        allowed = mask.dtype is torch.bool
        if torch.compiler.is_compiling():
            return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf) if allowed else mask.to(dtype)

        return self._once(mask, dtype, layer, (), lambda: _bias(mask, dtype))

    def in_use(self, mask: Tensor, dtype: torch.dtype, layer: int) -> Tensor:
        """The mask as a bias, or unchanged if this is its dtype, up to the end of the last block with an entry that counts.

        The host reads the mask once per step.
        """
        if mask.shape[-1] <= BLOCK:
            return self.of(mask, dtype, layer)

        def make() -> Tensor:
            part = mask[..., : _end(mask)]
            return part if mask.dtype is dtype else _bias(part, dtype)

        return self._once(mask, dtype, layer, (BLOCK,), make)

    def finite(self, mask: Tensor, layer: int) -> Tensor:
        """The float32 bias of a mask, boolean or added to scores, without infinities."""

        def make() -> Tensor:
            added = torch.log(mask) if mask.dtype is torch.bool else mask
            return added.float().clamp(min=BLOCKED)

        return make() if torch.compiler.is_compiling() else self._once(mask, torch.float32, layer, (), make)

    def aligned(self, mask: Tensor, dtype: torch.dtype, layer: int) -> Tensor:
        """The bias of a mask, boolean or added to scores, with rows that start at multiples of `ALIGNED` entries."""
        if torch.compiler.is_compiling():
            return _aligned(mask, dtype)
        if mask.dtype is dtype and _is_aligned(mask):
            return mask
        return self._once(mask, dtype, layer, (0,), lambda: _aligned(mask, dtype))

    def grouped(self, mask: Tensor, dtype: torch.dtype, layer: int, heads: tuple[int, int, int]) -> Tensor:
        """The same for queries [batch * heads, 1, groups * tokens, columns], whose heads of keys are a batch.

        ``heads`` is (batch, heads, groups). The bias can be expanded to all scores.
        """
        batch, keys, groups = heads
        batches, own, length, context = mask.shape
        same = batches == 1 and own == 1
        if same and length == 1:
            return self.aligned(mask, dtype, layer)

        def make() -> Tensor:
            split = mask.unsqueeze(1) if own == 1 else mask.view(batches, keys, groups, length, context)
            repeats = 1 if own == 1 and length == 1 else groups
            shape = (1, 1) if same else (batch, keys)
            bias = _aligned(split.expand(*shape, repeats, length, context), dtype)
            return bias.flatten(2, 3).flatten(0, 1).unsqueeze(1)

        return make() if torch.compiler.is_compiling() else self._once(mask, dtype, layer, heads, make)

    def _once(
        self, mask: Tensor, dtype: torch.dtype, layer: int, form: tuple[int, ...], make: Callable[[], Tensor]
    ) -> Tensor:
        if layer <= self.last:
            self.biases.clear()
        self.last = layer
        source, bias = self.biases.get((id(mask), *form), (None, mask))
        if source is not mask or bias.dtype is not dtype:
            bias = make()
            self.biases[id(mask), *form] = mask, bias
        return bias


biases = Biases()


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What a mask adds to scores: the logarithm of one is zero, and that of zero is -inf, in one launch."""
    allowed = mask.dtype is torch.bool
    return torch.log(mask, out=torch.empty_like(mask, dtype=dtype)) if allowed else mask.to(dtype)


def _end(mask: Tensor) -> int:
    """How many entries the blocks up to the last one that counts have; all where a query sees no entry."""
    seen = (mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min).flatten(0, -2)
    if not seen.any(1).all():
        return mask.shape[-1]
    last = int(seen.any(0).nonzero()[-1])
    return min((last // BLOCK + 1) * BLOCK, mask.shape[-1])


def _is_aligned(bias: Tensor) -> bool:
    """Whether torch's memory-efficient attention can read a bias where it is."""
    steps = (bias.storage_offset(), *bias.stride()[:-1])
    return bias.stride(-1) == 1 and all(step % ALIGNED == 0 for step in steps)


def _aligned(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as a new bias whose rows start at multiples of `ALIGNED` entries. What is between rows is not read."""
    columns = mask.shape[-1]
    if torch.compiler.is_compiling():
        allowed = mask.dtype is torch.bool
        bias = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf) if allowed else mask.to(dtype)
        return F.pad(bias, (0, -columns % ALIGNED))[..., :columns]
    bias = mask.new_empty(*mask.shape[:-1], columns + -columns % ALIGNED, dtype=dtype)[..., :columns]
    return torch.log(mask, out=bias) if mask.dtype is torch.bool else bias.copy_(mask)
