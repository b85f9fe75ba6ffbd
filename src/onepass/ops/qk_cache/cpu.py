"""Norms of q and k, RoPE and the cache write on the CPU, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from ...cpu.launch import Family, Fields, share
from .spec import QkCacheCall, QkCacheRows, QkCacheSpec, qk_cache_spec


def _fields(spec: QkCacheSpec) -> tuple[Fields, Sequence[str]]:
    turn, cached = spec.turn, spec.placing != "none"
    found: Fields = {"next": "0", "chunk": "chunk", "tokens": "rows.tokens"}
    found["rows"] = ("rows", len(QkCacheRows._fields))
    present = {
        "q": True,
        "k": True,
        "v": cached,
        "gamma_q": spec.norm != "none",
        "gamma_k": spec.norm != "none",
        "freqs": turn is not None and not turn.pair,
        "positions": turn is not None and turn.positions is not None,
        "cos": turn is not None and turn.pair,
        "sin": turn is not None and turn.pair,
        "slots": spec.placing == "slots",
        "starts": spec.starts is not None,
        "k_scale": spec.k_scaled,
        "v_scale": spec.v_scaled,
        "q_out": True,
        "k_out": not cached,
        "k_cache": cached,
        "v_cache": cached,
    }
    found |= {name: f"{name}.data_ptr()" for name, here in present.items() if here}
    if turn is not None:
        found["dim"] = "spec.turn.dim"
    return found, ("eps", "weight_offset")


def _config(call: QkCacheCall) -> tuple[int, int, int]:
    rows = call.rows
    threads, chunk = share(rows.tokens, (rows.q_heads + rows.k_heads) * rows.head + rows.k_heads * rows.value)
    return threads, 0, chunk


def _canonical(spec: QkCacheSpec) -> QkCacheSpec:
    """The number of columns that rotate does not affect the code."""
    if spec.turn is None or not spec.turn.dim:
        return spec
    values = {each.name: getattr(spec, each.name) for each in fields(spec)}
    return qk_cache_spec(**{**values, "turn": spec.turn._replace(dim=0)})


FAMILY: Final = Family(QkCacheCall, _fields, _config, ("threads", "size", "chunk"), canonical=_canonical)
launch = FAMILY.launcher()
precompile = FAMILY.precompile
