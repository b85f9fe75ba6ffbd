"""QK-RMSNorm on the CPU: q and k in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...core.layout import LEVELS
from ...cpu.launch import Family, Fields, share
from ...cpu.sizes import BLOCK
from .spec import TENSORS, WITH_HEADS, QkCall, QkRows, QkSpec


def _fields(spec: QkSpec) -> tuple[Fields, Sequence[str]]:
    fields: Fields = {"next": "0", "threads": "0", "chunk": "chunk"}
    fields |= {"tokens": "geom[0]", "n1": "geom[1]", "n2": "geom[2]"}
    for i, side in enumerate(("q", "k")):
        fields |= {f"{side}.n": f"widths[{i}]", f"{side}.heads": f"heads[{i}]"}
        if spec.gamma is not None:
            fields[f"gamma_{side}"] = f"gamma_{side}.data_ptr()"
    present = {"q": True, "k": True, "q_out": spec.applies, "k_out": spec.applies}
    present["stats"] = spec.stage != "fused"
    present["positions"] = spec.rope is not None and spec.rope.positions is not None
    present |= dict.fromkeys(("q_scale_out", "k_scale_out"), spec.scale == "row")
    for i, name in enumerate(TENSORS):
        if present[name]:
            fields |= {name: f"{name}.data_ptr()", f"{name}.strides": (f"strides[{i}]", LEVELS)}
            if name in WITH_HEADS:
                fields[f"{name}.step"] = f"steps[{WITH_HEADS.index(name)}]"
    if spec.scale == "tensor":
        fields |= {name: f"{name}.data_ptr()" for name in ("q_scale", "k_scale")}
    if spec.rope is not None:
        fields |= {"freqs": "freqs.data_ptr()", "freqs.stride": "freqs.stride(0)", "limit": "freqs.shape[0]"}
        fields |= {"sequence": "sequence", "scratch": "scratch", "room": "room"}
    return fields, ("eps", "weight_offset", "eps_k") if spec.two_eps else ("eps", "weight_offset")


def _config(call: QkCall) -> tuple[int, int, int, int]:
    """Scratch memory has room for a head per thread, if heads are rotated."""
    rope, rows = call.spec.rope, call.rows
    (q_heads, k_heads), (q_width, k_width) = rows.heads, rows.widths
    threads, chunk = share(rows.geom[0], q_heads * q_width + k_heads * k_width)
    room = 0 if rope is None else rope.head_dim + BLOCK
    return threads, room * threads, chunk, room


FAMILY: Final = Family(QkCall, _fields, _config, ("threads", "size", "chunk", "room"), nested={"rows": QkRows})
launch = FAMILY.launcher()
precompile = FAMILY.precompile
