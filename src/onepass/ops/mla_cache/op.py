"""MLA's cache write in one launch: RoPE of q, RMSNorm of the latent, RoPE of k, and the store into the cache."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...core.op import Op
from ...formats import Rounding
from ...kvcache import DS_MLA, PagedKVCache, gather_mla
from ...rope import RopeStyle
from .contract import FUSED_ROPE_RMSNORM_QUANTIZATION
from .launch import MlaArguments, MlaSpec, MlaTensors, ScaleKind, mla_spec, run_mla

__all__ = ["FUSED_ROPE_RMSNORM_QUANTIZATION", "PagedKVCache", "fused_rope_rmsnorm_quantization", "gather_mla"]


def _write_cache(spec_cache: dict[object, MlaSpec], a: MlaArguments) -> None:
    freqs, positions = a.freqs_cis, a.positions
    offsets, lengths, table, slots = a.input_row_offsets, a.cache_lengths, a.lookup_table, a.slot_mapping
    turned = 0 if freqs is None else freqs.shape[1] if a.rope_dim is None else a.rope_dim
    if not turned:
        freqs = positions = None
    if slots is not None:
        table = None
        if positions is not None or not turned:
            offsets = lengths = None
    scale: ScaleKind = "tensor" if a.kv_scale is not None else "token" if a.per_token_scale is not None else "none"
    blocks = a.blocks
    if a.entry_format == DS_MLA:
        blocks, scale = blocks.view(torch.float8_e4m3fn), "tile"
    indices = (freqs, offsets, lengths, table, slots, positions)
    dtypes = tuple(
        [None if t is None else t.dtype for t in (a.q_rope, a.q_rope_output, a.kv, a.gamma, blocks, *indices)]
    )
    spec = spec_cache.get((dtypes, scale))
    if spec is None:
        spec = spec_cache[dtypes, scale] = mla_spec(*dtypes, a.rope_style, scale, a.rounding)
    cache = (a.kv_scale, a.q_rope_output, blocks, a.per_token_scale)
    tensors = MlaTensors(a.q_rope, a.kv, a.gamma, *indices, *cache)
    run_mla(FUSED_ROPE_RMSNORM_QUANTIZATION, spec, tensors, turned, a.epsilon, a.weight_offset)


_write = Op(FUSED_ROPE_RMSNORM_QUANTIZATION, _write_cache)


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
    rounding: Rounding = "once",
    out_dtype: torch.dtype | None = None,
    kv_norm_dim: int | None = None,
) -> Tensor:
    """RoPE of MLA's queries, and RMSNorm and RoPE of its kv into a paged cache, in one launch. Returns q_rope_output.

    A row of kv has L columns of a latent x, and R columns k that are rotated like q's::

        q_rope_output = rope(q_rope)
        latent        = (x * rs) * (gamma + weight_offset)          rs = 1 / sqrt(mean(x^2) + epsilon)
        entry         = concat(latent, rope(k))
        blocks[slot]  = saturate(entry / scale)                     1, kv_scale, or amax(|entry|) / fp8_max of the token

    Args:
        q_rope_output: Receives the rotated q; may be q_rope itself or a slice of a wider tensor. None: a new tensor.
        q_rope: [T, H, R]; may be a slice of a wider tensor. H is at most 256, and R at most 1024, or 0.
        kv: [T, L + R]; its rows may be slices. L is at most 2048 and may be odd.
        input_row_offsets: [B + 1]. Tokens ``input_row_offsets[b]`` up to ``input_row_offsets[b + 1]`` follow those that
            request b has in ``k_cache``. Tokens outside all requests are padding. May be None with slots and positions.
        freqs_cis: [max_seq, >= rope_dim], (cos, sin) interleaved. May be None if ``rope_dim`` is 0.
        gamma: Weight [L] of the latent's norm.
        k_cache: The cache to write. Its lengths do not change (`PagedKVCache.append`).
        epsilon: Added to the mean of squares.
        rope_style: Pairs of neighbors ("interleaved"), or of columns i and i + rope_dim / 2 ("half").
        rope_dim: Columns to rotate, the first of R; the others are copied. None: freqs_cis' width. 0: none.
        kv_scale: One float32 that entries of an fp8 cache are divided by.
        per_token_scale: [pages, page_size] float32, receives ``amax / fp8_max`` of each entry written to an fp8 cache.
        slot_mapping: [T], each token's slot, page times page size plus entry, in place of ``input_row_offsets``. A negative
            slot means padding.
        positions: [T], each token's row of freqs_cis. None: its index in its request; padding has position 0.
        weight_offset: Added to gamma in float32.
        rounding: "once" or "reference", see below.
        out_dtype: Dtype of a new q_rope_output, also fp8; None: q_rope's.
        kv_norm_dim: Must be gamma's length. kv may then have more columns: those between the normed ones and the last R
            are converted to the cache's dtype (and scaled) without norm or rotation.

    Returns:
        q_rope_output. An fp8 result is cast with saturation.

    Rounding:
        "once" rounds at the store and nowhere else. "reference" rounds ``x * rs`` to kv's dtype, its product with gamma
        again, and rotated values to their input's dtype, then scales and casts. A token's results depend only on that
        token. An entry of format "fp8_ds_mla" (`PagedKVCache`) holds a scale for each 128 columns of its latent.

    Padding does not touch the cache, but its q is written. Nothing is written outside the blocks: tokens whose page or slot
    does not exist are skipped, and a position outside freqs_cis uses the nearest row. With ``ONEPASS_DEBUG=1`` in the
    environment both raise instead. `gather_mla` reads entries back.

    >>> import torch, onepass
    >>> cache = onepass.PagedKVCache(torch.zeros(2, 4, 4), torch.tensor([1]), torch.tensor([[1]]))
    >>> quarter = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # no rotation at position 0, a quarter turn at 1
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
    inputs = (q_rope, kv, gamma, freqs_cis)
    indices = (input_row_offsets, k_cache.cache_lengths, k_cache.lookup_table, slot_mapping, positions)
    cache = (kv_scale, k_cache.blocks, per_token_scale)
    options = (epsilon, rope_style, rope_dim, weight_offset, rounding, out_dtype, kv_norm_dim, k_cache.entry_format)
    arguments = (*inputs, *indices, *cache, *options, q_rope_output)
    repeated = None if is_compiling() else _write.repeat(*arguments)
    return cast(Tensor, (repeated or _write(*arguments))[0])
