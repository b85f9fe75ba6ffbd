"""Timestamps written by a GEMV kernel (`GmemTrace`), and what they show (`Timeline`)."""

from typing import TYPE_CHECKING

from .buffers import GEMV_TRACE_EVENTS_PER_BLOCK, GemvEvent, GmemTrace, NullTrace, TraceBuf

if TYPE_CHECKING:
    from .timeline import PHASES, Block, Phase, PhaseRow, Span, Summary, Timeline, percent

__all__ = ["GEMV_TRACE_EVENTS_PER_BLOCK", "GemvEvent", "GmemTrace", "NullTrace", "TraceBuf"]
__all__ += ["PHASES", "Block", "Phase", "PhaseRow", "Span", "Summary", "Timeline", "percent"]


def __getattr__(name: str) -> object:
    """Import the analysis at first use: ops need only the buffers."""
    if name in __all__:
        from . import timeline

        return getattr(timeline, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
