"""What kernels and their configurations need to know about a GPU."""

from typing import Final, NamedTuple

import torch


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
