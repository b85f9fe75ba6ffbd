"""Norms of q and k, RoPE and the cache write on the CPU, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..specs.qk_cache import QkCacheCall, QkCacheRows, QkCacheSpec
from .launcher import Family, Fields, share


def _fields(spec: QkCacheSpec) -> tuple[Fields, Sequence[str]]:
    turn, cached = spec.turn, spec.placing != "none"
    fields: Fields = {"next": "0", "chunk": "chunk", "tokens": "rows.tokens"}
    fields["rows"] = ("rows", len(QkCacheRows._fields))
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
    fields |= {name: f"{name}.data_ptr()" for name, here in present.items() if here}
    return fields, ("eps", "weight_offset")


def _config(call: QkCacheCall) -> tuple[int, int, int]:
    rows = call.rows
    threads, chunk = share(rows.tokens, (rows.q_heads + rows.k_heads) * rows.head + rows.k_heads * rows.value)
    return threads, 0, chunk


FAMILY: Final = Family(QkCacheCall, _fields, _config, ("threads", "size", "chunk"))
launch = FAMILY.launcher()
precompile = FAMILY.precompile
