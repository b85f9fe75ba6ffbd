"""Every RMSNorm class of the installed transformers, and the form that `onepass.patch` finds for it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from torch import nn

from onepass.models.patching.forms import Norm, OtherNorm, match

_TIMES = {"hf": "twice", "once": "once"}


def modeling_modules() -> Iterator[str]:
    """The Python modules that define models."""
    import transformers

    root = Path(transformers.__file__).parent
    for path in sorted(root.glob("models/*/modeling_*.py")):
        yield ".".join(("transformers", *path.relative_to(root).with_suffix("").parts))


def rms_norms() -> Iterator[type[nn.Module]]:
    """The classes with "RMSNorm" in their name. Modules that need packages that are missing are skipped."""
    for name in modeling_modules():
        try:
            module = import_module(name)
        except ImportError:
            continue
        defined = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]
        yield from (cls for cls in defined if issubclass(cls, nn.Module) and "RMSNorm" in cls.__name__)


def describe(cls: type[nn.Module]) -> str:
    """The form of a norm's class in words, "" if there is none."""
    form = match(cls, Norm).form or match(cls, OtherNorm).form
    if isinstance(form, OtherNorm):
        what = ["gated"] * bool(form.gate) + ["in groups"] * bool(form.groups or form.group_size)
        what += ["without a weight"] * (not form.weighted) + ["if the weight has x's dtype"] * form.same_dtype
        offset = f", offset {form.weight_offset:g}" if form.weight_offset else ""
        return f"{_TIMES[form.rounding]}{offset}, {' and '.join(what)}"
    if not isinstance(form, Norm):
        return ""
    offset = f", offset {form.weight_offset:g}" if form.weight_offset else ""
    flag = f", if {form.flag}" if form.flag else ""
    return f"{_TIMES[form.rounding]}{offset}{flag}"
