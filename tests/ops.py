"""The ops, and what each op's folder of tests adds to a list of all ops."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any, Final

FOLDERS: Final = ("rms_norm", "gemv_norm", "linear", "qk_norm", "mla_cache", "qk_cache")
"""The folders of src/onepass/ops that have a contract, in the order of the matrix."""
GPU_FOLDERS: Final = ("attention", "latent_attention", "head_product")
"""Those that have none: patched models call these kernels, on GPUs only."""
_HELP: Final = 'see "Add an op" in CONTRIBUTING.md'


def parts(name: str, folders: Iterable[str] = FOLDERS) -> list[ModuleType]:
    """tests/<op>/<name>.py of each op."""
    return [_part(folder, name) for folder in folders]


def each(name: str, attribute: str, folders: Iterable[str] = FOLDERS) -> list[Any]:
    """What ``attribute`` is in tests/<op>/<name>.py of each op."""
    values = []
    for module in parts(name, folders):
        if not hasattr(module, attribute):
            raise AttributeError(f"{module.__name__.replace('.', '/')}.py must define {attribute}: {_HELP}")
        values.append(getattr(module, attribute))
    return values


def _part(folder: str, name: str) -> ModuleType:
    module = f"tests.{folder}.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, f"tests.{folder}"):  # something that the file imports
            raise
        raise ModuleNotFoundError(f"the op {folder} needs tests/{folder}/{name}.py: {_HELP}", name=module) from None
