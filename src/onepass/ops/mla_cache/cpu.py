"""MLA's cache write on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from ...cpu.launch import Family, Fields, share
from .spec import MlaCall, MlaRows, MlaSpec, mla_spec

INDICES: Final = ("offsets", "lengths", "table", "slots", "positions")
_WIDTHS: Final = {torch.int64: 0, torch.int32: 1, torch.uint32: 2}
_REQUIRED: Final = ("q", "kv", "gamma", "q_out", "blocks")
_TENSORS: Final = ("q", "kv", "gamma", "freqs", *INDICES, "kv_scale", "q_out", "blocks", "token_scale")


def _fields(spec: MlaSpec) -> tuple[Fields, Sequence[str]]:
    """The same for every spec: the kernel checks which index tensors exist and how wide their elements are."""
    fields: Fields = {"next": "0", "chunk": "chunk", "steps": "rows.requests.bit_length()"}
    fields["rows"] = ("rows", len(MlaRows._fields))
    for name in _TENSORS:
        given = "" if name in _REQUIRED else f"{name} is not None and "
        fields[f"{name}.at"] = f"{given}{name}.data_ptr()"
    fields |= {f"{name}.width": f"{name} is not None and widths[{name}.dtype]" for name in INDICES}
    return fields, ("eps", "weight_offset")


def _config(call: MlaCall) -> tuple[int, int, int]:
    rows = call.rows
    threads, chunk = share(rows.tokens, (rows.heads + 1) * rows.rope + rows.latent)
    return threads, 0, chunk


def _canonical(spec: MlaSpec) -> MlaSpec:
    """Index tensors do not affect the code. Specs without a rotation share the code of an arbitrary one."""
    style = spec.style if spec.freqs is not None else "interleaved"
    outputs = {"style": style, "scale": spec.scale, "rounding": spec.rounding}
    return mla_spec(spec.q, spec.q_out, spec.kv, spec.gamma, spec.cache, spec.freqs or torch.float32, **outputs)


FAMILY: Final = Family(
    MlaCall, _fields, _config, ("threads", "size", "chunk"), canonical=_canonical, constants={"widths": _WIDTHS}
)
launch = FAMILY.launcher()
precompile = FAMILY.precompile
