"""The GPUs that evidence was recorded on. Adding one is one entry here and a run of ``make gpu CHIP=name`` on it."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from onepass.gpu.chip import Chip

BENCHMARKS: Final = Path(__file__).parents[2] / "benchmarks"


class Machine(NamedTuple):
    """A chip and the folder under benchmarks/ that holds what was measured and proven on it."""

    name: str
    chip: Chip

    @property
    def folder(self) -> Path:
        """benchmarks/<name>."""
        return BENCHMARKS / self.name

    @property
    def evidence(self) -> Path:
        """The machine code that passed its cases on this chip."""
        return self.folder / "evidence.json"


MACHINES: Final = {machine.name: machine for machine in (Machine("h200", Chip("cuda", 90, 32)),)}
DEFAULT: Final = "h200"
H200: Final = MACHINES["h200"].chip
