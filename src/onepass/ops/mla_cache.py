"""MLA's cache write in one launch: RoPE of q, RMSNorm of the latent, RoPE of k, and both into the token's cache entry.

A token has H rows of q, ``q_rope`` [T, H, R], and one row of kv [T, L + R]: a latent x and the columns k that may turn::

    q      = rope(q)                                      to q_rope_output
    latent = (x * rs) * (gamma + weight_offset)           rs = 1 / sqrt(mean(x^2) + epsilon), over L columns
    entry  = concat(latent, rope(k))                      L + R columns
    blocks[page, place] = saturate(entry / scale)         scale 1 unless given, or amax(|entry|) / fp8_max of the token

With ``kv_norm_dim`` only the first columns of kv are x; the others before k go into the entry as they are.

RoPE turns pairs of the first ``rope_dim`` columns by the angle of the token's position, ``a, b = a*cos - b*sin, b*cos +
a*sin``; the others are copied. Where the token's entry lies: `onepass.kvcache`.

Everything is float32 until the one rounding at the store. ``rounding="reference"`` rounds ``x * rs`` and its product
with gamma to kv's dtype, and what was turned to the dtype that it came in, before scale and store.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..kvcache import PagedKVCache, gather_mla
from ..rope import RopeStyle
from ..specs.mla_cache import MlaCall, MlaRounding, MlaSpec, ScaleKind, mla_spec
from .mla_cache_call import run_mla
from .mla_cache_contract import FUSED_ROPE_RMSNORM_QUANTIZATION
from .registration import Op

__all__ = ["FUSED_ROPE_RMSNORM_QUANTIZATION", "PagedKVCache", "fused_rope_rmsnorm_quantization", "gather_mla"]

Notes = dict[object, MlaSpec]
"""Kernels of one combination of options, by the tensors' dtypes."""


def _kernel(
    notes: Notes, q: Tensor, kv: Tensor, gamma: Tensor, freqs: Tensor | None, offsets: Tensor | None, lengths: Tensor | None,
    table: Tensor | None, slots: Tensor | None, positions: Tensor | None, kv_scale: Tensor | None, blocks: Tensor,
    token_scale: Tensor | None, epsilon: float, style: RopeStyle, rope_dim: int | None, weight_offset: float,
    rounding: MlaRounding, q_dtype: torch.dtype | None, kv_norm_dim: int | None, q_out: Tensor,
) -> None:  # fmt: skip
    turned = 0 if freqs is None else freqs.shape[1] if rope_dim is None else rope_dim
    if not turned:
        freqs = positions = None
    if slots is not None:
        table = None
        if positions is not None or not turned:
            offsets = lengths = None
    dtypes = (
        q.dtype, q_out.dtype, kv.dtype, gamma.dtype, blocks.dtype, None if freqs is None else freqs.dtype,
        None if offsets is None else offsets.dtype, None if lengths is None else lengths.dtype,
        None if table is None else table.dtype, None if slots is None else slots.dtype,
        None if positions is None else positions.dtype,
    )  # fmt: skip
    scale: ScaleKind = "tensor" if kv_scale is not None else "token" if token_scale is not None else "none"
    key = (dtypes, scale)
    spec = notes.get(key)
    if spec is None:
        spec = notes[key] = mla_spec(*dtypes, style, scale, rounding)
    call = MlaCall(
        spec, q, kv, gamma, freqs, offsets, lengths, table, slots, positions, kv_scale, q_out, blocks, token_scale, epsilon,
        weight_offset,
    )  # fmt: skip
    run_mla(FUSED_ROPE_RMSNORM_QUANTIZATION, call, turned)


_write = Op(FUSED_ROPE_RMSNORM_QUANTIZATION, _kernel)


def fused_rope_rmsnorm_quantization(
    q_rope_output: Tensor | None,
    q_rope: Tensor,
    kv: Tensor,
    input_row_offsets: Tensor | None,
    freqs_cis: Tensor | None,
    gamma: Tensor,
    k_cache: PagedKVCache,
    epsilon: float = 1e-6,
    *,
    rope_style: RopeStyle = "interleaved",
    rope_dim: int | None = None,
    kv_scale: Tensor | None = None,
    per_token_scale: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    positions: Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: MlaRounding = "once",
    q_dtype: torch.dtype | None = None,
    kv_norm_dim: int | None = None,
) -> Tensor:
    """RoPE of MLA's queries, and RMSNorm and RoPE of its kv into a paged cache, in one launch. Returns q_rope_output.

    ``q_rope`` [T, H, R] and ``q_rope_output`` may be slices of wider tensors, and the output q_rope itself; with None
    it is allocated, contiguous, in ``q_dtype`` (by default q_rope's). An fp8 output is cast, saturating. ``kv`` [T, L + R]
    is a latent of gamma's length and R columns that turn as q's do; its rows may be slices too. H is at most 256, R
    256 and L 2048; L may be odd, R 0. With ``kv_norm_dim``, which then is gamma's length, kv may have more columns: those
    between the normed ones and the last R are converted to the cache's dtype (and scaled) without being normed or turned.

    ``input_row_offsets`` [B + 1]: tokens ``input_row_offsets[b]`` up to ``input_row_offsets[b + 1]`` follow those that
    request b has in ``k_cache`` (`PagedKVCache`), whose lengths stay as they are (`PagedKVCache.append`). Tokens
    outside all requests are padding. ``slot_mapping`` [T] names places instead, page times page size plus entry; a
    negative one is padding. Padding leaves the cache alone, and its q is written. ``positions`` [T] are the rows of
    ``freqs_cis`` [max_seq, >= rope_dim], (cos, sin) interleaved, where they are not the token's place in its request;
    padding has position 0. With both, ``input_row_offsets`` may be None.

    Of the R columns the first ``rope_dim`` turn (by default as many as freqs_cis has; 0: none, and freqs_cis may be None),
    in pairs of neighbours ("interleaved") or of i and i + rope_dim/2 ("half").

    An fp8 cache may have ``kv_scale``, one float32 that entries are divided by, or ``per_token_scale`` [pages, page_size]
    float32, which receives ``amax / fp8_max`` of each entry written. `gather_mla` reads entries back.

    Rounding: "once" rounds at the store and nowhere else; "reference" rounds ``x * rs`` to kv's dtype, its product with
    gamma again, and what was turned to its input's dtype, then scales and casts. A token's bytes depend on that token
    alone.

    Nothing is written outside the blocks: a page, place or slot that does not exist is skipped, and a position outside
    freqs_cis takes its nearest row; with ``ONEPASS_DEBUG=1`` in the environment both raise instead.

    >>> import torch, onepass
    >>> cache = onepass.PagedKVCache(torch.zeros(2, 4, 4), torch.tensor([1]), torch.tensor([[1]]))
    >>> quarter = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # no turn at position 0, a quarter turn at position 1
    >>> q, kv = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[3.0, 4.0, 5.0, 6.0]])
    >>> offsets = torch.tensor([0, 1])
    >>> onepass.fused_rope_rmsnorm_quantization(None, q, kv, offsets, quarter, torch.ones(2), cache, 0.0)
    tensor([[[-2.,  1.]]])
    >>> cache.append()
    >>> onepass.gather_mla(cache, 0, torch.float32)[1]
    tensor([ 0.8485,  1.1314, -6.0000,  5.0000])
    """
    if not isinstance(k_cache, PagedKVCache):
        FUSED_ROPE_RMSNORM_QUANTIZATION.fail("k_cache", "be a PagedKVCache", repr(type(k_cache).__name__))
    results = _write.call(
        q_rope, kv, gamma, freqs_cis, input_row_offsets, k_cache.cache_lengths, k_cache.lookup_table, slot_mapping, positions,
        kv_scale, k_cache.blocks, per_token_scale, epsilon, rope_style, rope_dim, weight_offset, rounding, q_dtype,
        kv_norm_dim, q_rope_output,
    )  # fmt: skip
    return cast(Tensor, results[0])
