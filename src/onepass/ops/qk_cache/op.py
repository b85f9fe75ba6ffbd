"""Norms of q and k, RoPE, and the write of k and v into a cache, in one launch, for attention with grouped heads.

A token has Hq rows of q, Hk rows of k (D columns each) and Hk rows of v::

    x     = (x * rs) * (gamma + weight_offset)          q and k; rs = 1 / sqrt(mean(x^2) + eps), over a head or all of them
    a, b  = a * cos - b * sin, b * cos + a * sin        pairs of the first dim columns of each head of q and k
    q_out = q
    k_cache[entry] = saturate(k / k_scale)              v_cache[entry] = saturate(v / v_scale)

Everything is float32 until the single rounding at the store. ``rounding="hf"`` rounds where transformers does.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.compiler import is_compiling

from ...core.contract import describe
from ...core.op import Op
from ...formats import Rounding
from ...rope import Rope, RopeStyle
from .contract import QK_NORM_ROPE_CACHE
from .launch import CacheLayout, QkCacheArguments, QkCacheCall, QkCacheSpec, Turn, qk_cache_spec, run_qk_cache

__all__ = ["QK_NORM_ROPE_CACHE", "qk_norm_rope_cache"]


def _write_cache(spec_cache: dict[object, QkCacheSpec], a: QkCacheArguments) -> None:
    turn, cached = None, a.k_cache is not None
    if a.freqs is not None:
        at = None if a.positions is None else a.positions.dtype
        turn = Turn(a.style, a.dim or a.freqs.shape[1], a.freqs.dtype, False, at)
    elif a.cos is not None:
        turn = Turn(a.style, a.cos.shape[-1], a.cos.dtype, True)
    k_out, v = (a.k_cache, a.v) if cached else (a.k_out, None)
    tensors = (a.q, a.q_out, k_out, a.gamma_q, a.gamma_k)
    dtypes = tuple([None if t is None else t.dtype for t in tensors])
    indices = (None if a.slots is None else a.slots.dtype, None if a.starts is None else a.starts.dtype)
    scaled = (a.k_scale is not None, a.v_scale is not None)
    key = (dtypes, turn, cached, indices, scaled)
    spec = spec_cache.get(key)
    if spec is None:
        norm = "none" if a.gamma_q is None else "head" if a.per_head else "whole"
        placing = "none" if not cached else "dense" if a.layout == "dense" else "slots"
        spec = spec_cache[key] = qk_cache_spec(*dtypes, norm, turn, placing, *indices, *scaled, a.rounding)
    inputs = (a.q, a.k, v, a.gamma_q, a.gamma_k, a.freqs, a.positions, a.cos, a.sin, a.slots, a.starts)
    outputs = (a.k_scale, a.v_scale, a.q_out, a.k_out, a.k_cache, a.v_cache)
    call = QkCacheCall(spec, *inputs, *outputs, a.eps, a.weight_offset)
    run_qk_cache(QK_NORM_ROPE_CACHE, call, a.first, a.layout)


_qk_norm_rope_cache = Op(QK_NORM_ROPE_CACHE, _write_cache)


def qk_norm_rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    *,
    gamma_q: Tensor | None = None,
    gamma_k: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    per_head: bool = True,
    rope: Rope | None = None,
    slots: Tensor | None = None,
    start: int | Tensor | None = None,
    layout: CacheLayout = "NHD",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rounding: Rounding = "once",
    out: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Norms of q and k, RoPE, and the write of k and v into a cache, in one launch. Returns q and, without a cache, k.

    ``q`` [..., Hq, D], ``k`` [..., Hk, D] and ``v`` [..., Hk, Dv] have the tokens [T] or [B, S] as leading dimensions
    and may be slices of one packed projection. D and Dv are at most 1024. Hq need not be a multiple of Hk.

    Norms: ``gamma_q`` and ``gamma_k`` have the D columns of one head, or with ``per_head=False`` the columns of all
    heads of a token, which then share statistics. Without them nothing is normed, and eps is ignored.

    ``rope`` rotates the first dim columns of each head by the angles of a table or by each token's ``cos`` and ``sin``.

    ``k_cache`` and ``v_cache`` receive k and v. Their last dimension is contiguous, all others may have any stride:

    - ``layout="NHD"`` [pages, page_size, Hk, D] and "HND" [pages, Hk, page_size, D]: ``slots``, int32 or int64 with the
      leading shape of q, has each token's slot, page times page size plus entry. A token whose slot is negative or
      beyond the cache is not stored. Ragged batches are tokens [T] with slots, and a block table becomes slots by
      `PagedKVCache.slot_mapping`.
    - ``layout="dense"`` [B, Hk, L, D], such as transformers' StaticCache: token s of sequence b goes to entry
      ``start[b] + s``. ``start`` is an int (default 0), or a tensor with one element or B, int32 or int64, which is
      read on the device. Entries outside 0 to L - 1 are not stored. Compiled and captured code keeps the value of an
      int, so a decode loop passes a tensor.

    If two tokens have the same entry, it holds one of them, but k and v may be of different ones. q is written for
    every token. Caches have any float dtype or fp8. With fp8, values are divided by ``k_scale`` and ``v_scale``
    (float32, one element, default 1), then saturate and are rounded once.

    Without caches the second result is k, and v is not read. Otherwise it is None. ``out`` is the tensor for q's
    result, of any float dtype, which may be q itself; without a cache also a pair of tensors for both results.

    Rounding: "once" computes in float32 and rounds at each store and nowhere else. "hf" keeps the bits of transformers: the
    norm rounds as "hf" of `rms_norm`, cos and sin are rounded to q's dtype, and so are each product of the rotation
    and their sum, then k is scaled and stored. "hf_rope" rotates like that, but the norm is rounded once (Gemma,
    OLMo-2). A token's bytes depend only on that token.

    A position outside a Rope's freqs uses the nearest row. With ``ONEPASS_DEBUG=1`` in the environment that raises
    instead, and so does a slot beyond the cache.

    >>> import torch, onepass
    >>> q, k, v = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.0, 2.0]]]), torch.tensor([[[5.0, 6.0]]])
    >>> k_cache, v_cache = torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1, 2)
    >>> turn = onepass.Rope(torch.tensor([[0.0, 1.0]]))  # a quarter turn at position 0
    >>> norms = {"gamma_q": torch.ones(2), "gamma_k": torch.ones(2), "eps": 0.0}
    >>> onepass.qk_norm_rope_cache(q, k, v, k_cache, v_cache, **norms, rope=turn, slots=torch.tensor([2]))
    (tensor([[[-1.1314,  0.8485]]]), None)
    >>> k_cache[1, 0], v_cache[1, 0]
    (tensor([[-1.4142,  0.0000]]), tensor([[5., 6.]]))
    """
    fail = QK_NORM_ROPE_CACHE.fail
    freqs = positions = cos = sin = dim = None
    style: RopeStyle = "half"
    if rope is not None:
        if not isinstance(rope, Rope):
            fail("rope", "be a Rope or None", describe(rope))
        freqs, positions, style, dim, cos, sin = rope.freqs, rope.positions, rope.style, rope.dim, rope.cos, rope.sin
        if cos is not None or sin is not None:
            cos, sin = _per_token(cos, q), _per_token(sin, q)
        elif freqs is None:
            fail("rope", "have freqs, or cos and sin", "neither")
        if rope.head_dim is not None and isinstance(q, Tensor) and rope.head_dim != q.shape[-1]:
            fail("head_dim", "be None or q's last dimension", describe(rope.head_dim))
    starts, first = (start, 0) if isinstance(start, Tensor) else (None, 0 if start is None else start)
    if starts is not None and starts.dim() == 0:
        starts = starts.view(1)
    if isinstance(out, (tuple, list)):
        if len(out) != 2:
            fail("out", "be a tensor or a pair of tensors", describe(out))
        q_out, k_out = out
    else:
        q_out, k_out = out, None
    tensors = (q, k, v, gamma_q, gamma_k, freqs, positions, cos, sin, slots, starts, k_scale, v_scale, k_cache, v_cache)
    options = (eps, weight_offset, per_head, style, dim, first, layout, rounding)
    arguments = (*tensors, *options, q_out, k_out)
    repeated = None if is_compiling() else _qk_norm_rope_cache.repeat(*arguments)
    q_result, k_result = repeated or _qk_norm_rope_cache(*arguments)
    return cast(Tensor, q_result), k_result


def _per_token(angles: Tensor | None, q: object) -> Tensor | None:
    """Cosines or sines with q's leading shape: a row for every sequence serves all of them."""
    if not isinstance(angles, Tensor) or not isinstance(q, Tensor) or (angles.dim(), q.dim()) != (3, 4):
        return angles
    return angles.expand(q.shape[0], -1, -1) if angles.shape[0] == 1 != q.shape[0] else angles
