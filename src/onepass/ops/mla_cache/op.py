"""MLA's cache write in one launch: RoPE of q, RMSNorm of the latent, RoPE of k, and the store into the cache.

A token has H rows of q, ``q_rope`` [T, H, R], and one row of kv [T, L + R]: a latent x and the columns
k that may be rotated::

    q      = rope(q)                                      to q_rope_output
    latent = (x * rs) * (gamma + weight_offset)           rs = 1 / sqrt(mean(x^2) + epsilon), over L columns
    entry  = concat(latent, rope(k))                      L + R columns
    blocks[page, entry] = saturate(entry / scale)         scale 1 unless given, or amax(|entry|) / fp8_max of the token

With ``kv_norm_dim`` only the first columns of kv are x. The others before k are copied into the entry.

RoPE rotates pairs of the first ``rope_dim`` columns by the angle of the token's position,
``a, b = a*cos - b*sin, b*cos + a*sin``; the others are copied. `onepass.kvcache` defines where the
token's entry is.

Everything is float32 until the single rounding at the store. ``rounding="reference"`` rounds
``x * rs`` and its product with gamma to kv's dtype, and rotated values to the dtype of their input,
before scale and store.
"""

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
from .launch import MlaArguments, MlaCall, MlaSpec, ScaleKind, mla_spec, run_mla

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
    tensors = (a.q_rope, a.q_rope_output, a.kv, a.gamma, blocks, freqs, offsets, lengths, table, slots, positions)
    dtypes = tuple([None if t is None else t.dtype for t in tensors])
    spec = spec_cache.get((dtypes, scale))
    if spec is None:
        spec = spec_cache[dtypes, scale] = mla_spec(*dtypes, a.rope_style, scale, a.rounding)
    indices = (offsets, lengths, table, slots, positions)
    cache = (a.kv_scale, a.q_rope_output, blocks, a.per_token_scale)
    call = MlaCall(spec, a.q_rope, a.kv, a.gamma, freqs, *indices, *cache, a.epsilon, a.weight_offset)
    run_mla(FUSED_ROPE_RMSNORM_QUANTIZATION, call, turned)


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

    ``q_rope`` [T, H, R] and ``q_rope_output`` may be slices of wider tensors, and the output may be
    q_rope itself. With None it is allocated, contiguous, in ``out_dtype`` (default: q_rope's dtype). An
    fp8 output is cast with saturation. ``kv`` [T, L + R] is a latent of gamma's length and R columns
    that are rotated like q's; its rows may be slices too. H is at most 256, R 1024 and L 2048; L may be
    odd, R may be 0. With ``kv_norm_dim``, which must be gamma's length, kv may have more columns: those
    between the normed ones and the last R are converted to the cache's dtype (and scaled) without
    norm or rotation.

    ``input_row_offsets`` [B + 1]: tokens ``input_row_offsets[b]`` up to ``input_row_offsets[b + 1]``
    follow those that request b has in ``k_cache`` (`PagedKVCache`). The cache's lengths are not changed
    (see `PagedKVCache.append`). Tokens outside all requests are padding. Alternatively ``slot_mapping``
    [T] gives each token's slot, page times page size plus entry; a negative slot means padding. Padding
    does not touch the cache, but its q is written. ``positions`` [T] are the rows of ``freqs_cis``
    [max_seq, >= rope_dim], (cos, sin) interleaved, if they differ from the token's index in its
    request; padding has position 0. With slots and positions, ``input_row_offsets`` may be None.

    The first ``rope_dim`` of the R columns are rotated (default: as many as freqs_cis has; 0: none, and
    freqs_cis may be None), in pairs of neighbours ("interleaved") or of i and i + rope_dim/2 ("half").

    An fp8 cache may have ``kv_scale``, one float32 that entries are divided by, or ``per_token_scale``
    [pages, page_size] float32, which receives ``amax / fp8_max`` of each entry written. A cache of format
    "fp8_ds_mla" (`PagedKVCache`) has a scale for each 128 columns of the latent in the entry itself.
    `gather_mla` reads entries back.

    Rounding: "once" rounds at the store and nowhere else; "reference" rounds ``x * rs`` to kv's dtype,
    its product with gamma again, and rotated values to their input's dtype, then scales and casts. A
    token's bytes depend only on that token.

    Nothing is written outside the blocks: tokens whose page or slot does not exist are skipped, and a
    position outside freqs_cis uses the nearest row. With ``ONEPASS_DEBUG=1`` in the environment both
    raise instead.

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
