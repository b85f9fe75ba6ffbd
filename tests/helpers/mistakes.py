"""Deliberate mistakes, made from a `Contract` and a good call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass.core.contract import Contract, Option


@dataclass(frozen=True)
class Mistake:
    """A call that must be rejected, and the argument that the message must name."""

    label: str
    argument: str
    arguments: dict[str, Any]


def mistakes(contract: Contract, good: Mapping[str, Any]) -> Iterator[Mistake]:
    """Every argument of a good call, changed in every way that its declaration rules out."""
    first, seen = next(iter(contract.args)), set[str]()
    for name, arg in contract.args.items():
        value = good.get(name)
        tokens = set(arg.dims.split())
        binds, seen = bool(tokens - seen - {"..."}) or "|" in tokens, seen | tokens
        if arg.many or not isinstance(value, Tensor):
            continue
        spoiled: dict[str, Any] = {
            "not a tensor": 3.0,
            "a list": [1.0],
            "integers": value.to(torch.int32) if value.is_floating_point() else None,
            "float64": value.double(),
            "bool": value > 0,
            "another device": value.to("meta"),
            "one dimension more": value.unsqueeze(0) if "..." not in arg.dims and value.dim() else None,
            "no columns": value[..., :0] if not binds and value.dim() else None,
            "one column more": torch.cat([value, value], -1) if value.dim() else torch.stack([value, value]),
            "gradient": value.detach().clone().requires_grad_() if value.is_floating_point() else None,
        }
        if not arg.optional:
            spoiled["None"] = None
        if value.dim() and value.shape[-1] > 1 and arg.layout == "rows":
            wide = torch.stack([value, value], -1)
            spoiled["last dimension strided"] = wide[..., 0]
        if "..." in arg.dims and value.dim() > 1 and name != first:
            spoiled["rows missing"] = value[:-1]
        for label, bad in spoiled.items():
            if bad is None and label != "None":
                continue
            if (name == first and label in ("float64", "another device")) or (binds and label == "one column more"):
                continue  # legal for this argument, or reported for the one that no longer fits
            yield Mistake(f"{name}: {label}", name, {**good, name: bad})
    for name, option in contract.options.items():
        for label, bad in _spoiled_option(option):
            yield Mistake(f"{name}: {label}", name, {**good, name: bad})


def _spoiled_option(option: Option) -> Iterator[tuple[str, Any]]:
    yield "wrong type", object()
    if option.type in ("float", "int"):
        yield "a string", "1"
        yield "a tensor", torch.ones(3)
    if option.type == "float" and option.where:
        yield "NaN", float("nan")
        yield "-inf", float("-inf")
    if option.choices:
        yield "unknown choice", {"str": "no such", "int": 7, "float": 7.5, "ScalarType": torch.int8}.get(option.type)
    if not option.optional:
        yield "None", None
