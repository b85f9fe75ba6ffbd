"""Norms of q and k, RoPE, and the write of k and v into a cache, in one launch, for attention with grouped heads."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.compiler import is_compiling

from ...core.contract import describe
from ...core.op import Op
from ...formats import Rounding
from ...rope import Rope, RopeStyle, SectionStyle
from .contract import QK_NORM_ROPE_CACHE
from .launch import (
    CacheLayout,
    QkCacheArguments,
    QkCacheCall,
    QkCacheSpec,
    Scaling,
    Turn,
    axes_of,
    qk_cache_spec,
    run_qk_cache,
)

__all__ = ["QK_NORM_ROPE_CACHE", "qk_norm_rope_cache"]


def _write_cache(spec_cache: dict[object, QkCacheSpec], a: QkCacheArguments) -> None:
    turn, cached = None, a.k_cache is not None
    if a.freqs is not None:
        at = None if a.positions is None else a.positions.dtype
        dim = a.dim or a.freqs.shape[1]
        axes = axes_of(a.section_style, dim // 2, a.height, a.width)
        turn = Turn(a.style, dim, a.freqs.dtype, False, at, axes)
    elif a.cos is not None:
        turn = Turn(a.style, a.cos.shape[-1], a.cos.dtype, True)
    k_out = a.k_cache if cached else a.k_out
    v = None if a.v_cache is None else a.v
    tensors = (a.q, a.q_out, k_out, a.gamma_q, a.gamma_k)
    dtypes = tuple([None if t is None else t.dtype for t in tensors])
    indices = (None if a.slots is None else a.slots.dtype, None if a.starts is None else a.starts.dtype)
    scales = _scaling(a.k_scale, a.k_scale_out), _scaling(a.v_scale, a.v_scale_out)
    key = (dtypes, turn, cached, indices, scales, v is not None)
    spec = spec_cache.get(key)
    if spec is None:
        norm = "none" if a.gamma_q is None else "head" if a.per_head else "whole"
        placing = "none" if not cached else "dense" if a.layout == "dense" else "slots"
        options = (a.rounding, v is not None, a.norm_v)
        spec = spec_cache[key] = qk_cache_spec(*dtypes, norm, turn, placing, *indices, *scales, *options)
    inputs = (a.q, a.k, v, a.gamma_q, a.gamma_k, a.freqs, a.positions, a.cos, a.sin, a.slots, a.starts)
    outputs = (a.k_scale, a.v_scale, a.q_out, a.k_out, a.k_cache, a.v_cache)
    call = QkCacheCall(spec, *inputs, *outputs, a.eps, a.weight_offset)
    if a.own_scales:
        call = call._replace(k_scale_out=a.k_scale_out, v_scale_out=a.v_scale_out)
    run_qk_cache(QK_NORM_ROPE_CACHE, call, a.first, a.layout)


def _scaling(given: Tensor | None, own: Tensor | None) -> Scaling:
    """What values of a cache are divided by."""
    if own is not None:
        return "own"
    return "none" if given is None else "tensor" if given.numel() == 1 else "head"


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
    norm_v: bool = False,
    scale_out: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Norms of q and k, RoPE, and the write of k and v into a cache, in one launch. Returns q and, without a cache, k.

    For each token::

        x     = (x * rs) * (gamma + weight_offset)          q and k; rs = 1 / sqrt(mean(x^2) + eps)
        v     = v * rs                                      each head, with norm_v
        a, b  = a * cos - b * sin, b * cos + a * sin        pairs of the first dim columns of each head of q and k
        k_cache[entry] = saturate(k / k_scale)              v_cache[entry] = saturate(v / v_scale)

    Args:
        q: [..., Hq, D] with tokens [T] or [B, S] as leading dimensions; may be a slice of a packed projection.
        k: [..., Hk, D] in q's dtype. Hq need not be a multiple of Hk, and D is at most 1024.
        v: [..., Hk, Dv] in q's dtype, Dv at most 1024. Not read without a cache.
        k_cache: Receives k: any float dtype or fp8. The last dimension is contiguous, all others may have any stride.
        v_cache: Receives v; k_cache's dtype. None, with ``v`` None too, for a cache of keys alone, as an indexer has.
        gamma_q: Weight of q: the D columns of one head, or with ``per_head=False`` all of a token's. None: no norm.
        gamma_k: Weight of k, likewise.
        eps: Added to the mean of squares; ignored without gammas.
        weight_offset: Added to gamma in float32.
        per_head: False norms all heads of a token together.
        rope: Rotation by a table, or by each token's cos and sin. None: none.
        slots: [T] or [B, S], int32 or int64, each token's slot in a paged cache, page times page size plus entry. A token
            whose slot is negative or beyond the cache is not stored. `PagedKVCache.slot_mapping` computes slots.
        start: First entry to write in a dense cache: an int (None: 0), or a tensor with one element or B, int32 or int64,
            that is read on the device. Compiled and captured code keeps the value of an int, so a decode loop passes a tensor.
        layout: "NHD" [pages, page_size, Hk, D] or "HND" [pages, Hk, page_size, D], with ``slots``; or "dense"
            [B, Hk, L, D], as in transformers' StaticCache: token s of sequence b goes to entry ``start[b] + s``, and is
            not stored outside 0 to L - 1.
        k_scale: What k is divided by in an fp8 cache: one float32, or [Hk], one for each head; None: 1.
        v_scale: The same for v.
        rounding: "once", "hf" or "hf_rope", see below.
        out: Receives q, in any float dtype; may be q itself. Without a cache also a pair of tensors for both results.
        norm_v: Norm each head of v too, with ``eps`` and without a weight, before it is stored (Gemma 4).
        scale_out: Pair of float32 tensors for scales of the entries: shaped and laid out like k_cache and v_cache without the last
            dimension, with any strides. Each head of a token in an fp8 cache is divided by ``amax(abs(y)) / fp8_max``, which
            is stored at its entry. Without v_cache the second is None.

    Returns:
        ``(q, None)``, or without a cache ``(q, k)``.

    Rounding:
        "once" computes in float32 and rounds at each store and nowhere else. "hf" is bit-identical to transformers: the
        norm rounds as "hf" of `rms_norm`, cos and sin are rounded to q's dtype, and so are each product of the rotation
        and their sum, then k is scaled and stored. "hf_rope" rotates like that, but the norm is rounded once (Gemma,
        OLMo-2). Both round the norm of v once, to its dtype. fp8 values saturate and are rounded once. A token's results depend
        only on that token.

    The GPU kernels for `Rope.sections`, ``norm_v``, ``scale_out``, scales per head and caches of keys alone have not run yet:
    on a GPU these raise `Unsupported`, unless ONEPASS_UNPROVEN=1 is set.

    If two tokens have the same entry, it holds one of them, but k and v may be of different ones. q is written for every
    token. A position outside a Rope's freqs uses the nearest row. With ``ONEPASS_DEBUG=1`` in the environment that raises
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
    sections: tuple[int, int, SectionStyle] = (0, 0, "contiguous")
    if rope is not None:
        if not isinstance(rope, Rope):
            fail("rope", "be a Rope or None", describe(rope))
        freqs, positions, style, dim, cos, sin = rope.freqs, rope.positions, rope.style, rope.dim, rope.cos, rope.sin
        if cos is not None or sin is not None:
            cos, sin = _per_token(cos, q), _per_token(sin, q)
        elif freqs is None:
            fail("rope", "have freqs, or cos and sin", "neither")
        if rope.sections is not None:
            sections = _sections(rope)
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
    k_scale_out = v_scale_out = None
    if scale_out is not None:
        if not isinstance(scale_out, (tuple, list)) or len(scale_out) != 2:
            fail("scale_out", "be a pair of tensors", describe(scale_out))
        k_scale_out, v_scale_out = scale_out
        for name, scales, cache in (("k_scale_out", k_scale_out, k_cache), ("v_scale_out", v_scale_out, v_cache)):
            if scales is None and cache is not None:
                fail(name, "be a tensor", "None")
    tensors = (q, k, v, gamma_q, gamma_k, freqs, positions, cos, sin, slots, starts, k_scale, v_scale, k_cache, v_cache)
    options = (eps, weight_offset, per_head, style, dim, first, layout, rounding, *sections, norm_v)
    arguments = (*tensors, *options, scale_out is not None, q_out, k_out, k_scale_out, v_scale_out)
    repeated = None if is_compiling() else _qk_norm_rope_cache.repeat(*arguments)
    results = repeated or _qk_norm_rope_cache(*arguments)
    return cast(Tensor, results[0]), results[1]


def _sections(rope: Rope) -> tuple[int, int, SectionStyle]:
    """The pairs that turn by the height and by the width, and which these are."""
    sections, fail = rope.sections, QK_NORM_ROPE_CACHE.fail
    ints = isinstance(sections, (tuple, list)) and all(type(n) is int and n > 0 for n in sections)
    if sections is None or not ints or len(sections) != 3:
        fail("sections", "be None or three positive ints", describe(sections))
    columns = rope.dim or (rope.freqs.shape[-1] if isinstance(rope.freqs, Tensor) and rope.freqs.dim() else None)
    if isinstance(columns, int) and 2 * sum(sections) != columns:
        fail("sections", f"add up to half of the {columns} rotated columns", describe(sections))
    return sections[1], sections[2], rope.section_style


def _per_token(angles: Tensor | None, q: object) -> Tensor | None:
    """Cosines or sines with q's leading shape: a row for every sequence serves all of them."""
    if not isinstance(angles, Tensor) or not isinstance(q, Tensor) or (angles.dim(), q.dim()) != (3, 4):
        return angles
    return angles.expand(q.shape[0], -1, -1) if angles.shape[0] == 1 != q.shape[0] else angles
