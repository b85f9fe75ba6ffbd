"""Norms of q and k, RoPE and the cache write on the CPU, in one launch."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from ...cpu.launch import CpuKernels, Field, Layout, Work, addresses, integers, share
from .launch import QkCacheCall, QkCacheRows, QkCacheSpec, qk_cache_spec


def layout(spec: QkCacheSpec) -> Layout:
    """The argument block of a spec's kernel, which `pack` fills."""
    turn, cached = spec.turn, spec.placing != "none"
    fields = [*integers("next", "chunk", "tokens"), Field("rows", len(QkCacheRows._fields))]
    present = {
        "q": True,
        "k": True,
        "v": spec.values,
        "gamma_q": spec.norm != "none",
        "gamma_k": spec.norm != "none",
        "freqs": turn is not None and not turn.pair,
        "positions": turn is not None and turn.positions is not None,
        "cos": turn is not None and turn.pair,
        "sin": turn is not None and turn.pair,
        "slots": spec.placing == "slots",
        "starts": spec.starts is not None,
        "k_scale": spec.k_scale in ("tensor", "head"),
        "v_scale": spec.v_scale in ("tensor", "head"),
        "q_out": True,
        "k_out": not cached,
        "k_cache": cached,
        "v_cache": spec.values,
        "k_scale_out": spec.k_scale == "own",
        "v_scale_out": spec.v_scale == "own",
    }
    fields += addresses(*(name for name, here in present.items() if here))
    if turn is not None:
        fields += integers("dim")
    return Layout(fields, ("eps", "weight_offset"))


def pack(call: QkCacheCall, work: Work, scratch: int) -> list[float]:
    """The values of a call's argument block, in the order of `layout`. Calls have the tensors of their specs alone."""
    spec, turn = call.spec, call.spec.turn
    values: list[float] = [0, work.chunk, call.rows.tokens, *call.rows, call.q.data_ptr(), call.k.data_ptr()]
    tensors = (
        call.v,
        call.gamma_q,
        call.gamma_k,
        call.freqs,
        call.positions,
        call.cos,
        call.sin,
        call.slots,
        call.starts,
    )
    outputs = (call.k_scale, call.v_scale, call.q_out, None if spec.placing != "none" else call.k_out)
    for tensor in (*tensors, *outputs, call.k_cache, call.v_cache, call.k_scale_out, call.v_scale_out):
        if tensor is not None:
            values.append(tensor.data_ptr())
    if turn is not None:
        values.append(turn.dim)
    values += (call.eps, call.weight_offset)
    return values


def _work(call: QkCacheCall) -> Work:
    rows = call.rows
    threads, chunk = share(rows.tokens, (rows.q_heads + rows.k_heads) * rows.head + rows.k_heads * rows.value)
    return Work(threads, 0, chunk)


def _canonical(spec: QkCacheSpec) -> QkCacheSpec:
    """The number of columns that rotate does not affect the code."""
    if spec.turn is None or not spec.turn.dim:
        return spec
    values = {each.name: getattr(spec, each.name) for each in fields(spec)}
    return qk_cache_spec(**{**values, "turn": spec.turn._replace(dim=0)})


KERNELS: Final = CpuKernels("qk_cache", layout, _work, pack, canonical=_canonical)
launch = KERNELS.launch
