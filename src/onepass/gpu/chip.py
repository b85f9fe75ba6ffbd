"""What kernels and their configurations need to know about a GPU: what it can do, and its measured tiles."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Final, NamedTuple

import torch

from . import tuning as tables
from .tuning import h200
from .tuning.table import Tuning


class Chip(NamedTuple):
    """A compilation target: ``cuda`` 90, ``hip`` gfx942, or Triton's interpreter."""

    backend: str
    arch: int | str
    warp_size: int

    @property
    def has_pdl(self) -> bool:
        """Whether the chip supports programmatic dependent launch."""
        return self.backend == "cuda" and int(self.arch) >= 90

    @property
    def casts_e4m3fn(self) -> bool:
        """Whether Triton's own cast to e4m3fn is a saturating hardware instruction here."""
        return self.backend == "cuda" and int(self.arch) >= 89

    @property
    def sums_sixteen(self) -> bool:
        """Whether tensor cores add sixteen products at once, in any order, with the same result for
        every instruction and tile. Measured on this chip only.
        """
        return self.backend == "cuda" and self.arch == 90

    @property
    def rounds_casts(self) -> bool:
        """Whether float casts round to nearest even; the interpreter truncates to bfloat16."""
        return self.backend != "interpreter"


INTERPRETER: Final = Chip("interpreter", 0, 32)


def current_chip(device: int) -> Chip:
    """The chip of a torch CUDA (or ROCm) device."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Chip("hip", properties.gcnArchName.split(":")[0], 64)
    return Chip("cuda", properties.major * 10 + properties.minor, 32)


@cache
def _tables() -> dict[tuple[str, int | str], Tuning]:
    modules = [import_module(f"{tables.__name__}.{table.name}") for table in iter_modules(tables.__path__)]
    return {chip: module.TUNING for module in modules for chip in getattr(module, "CHIPS", ())}


@cache
def tuning(chip: Chip) -> Tuning:
    """The table of a chip, or the default."""
    return _tables().get((chip.backend, chip.arch), h200.TUNING)
