"""Measured thresholds and tiles, one module per chip. Results do not depend on them.

To tune another GPU, add a module with its `CHIPS` and its `TUNING`. Chips without a module use the
H200's table.
"""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ..chip import Chip
from . import h200
from .table import Tuning


@cache
def _tables() -> dict[tuple[str, int | str], Tuning]:
    modules = [import_module(f"{__name__}.{table.name}") for table in iter_modules(__path__)]
    return {chip: module.TUNING for module in modules for chip in getattr(module, "CHIPS", ())}


@cache
def tuning(chip: Chip) -> Tuning:
    """The table of a chip, or the default."""
    return _tables().get((chip.backend, chip.arch), h200.TUNING)
