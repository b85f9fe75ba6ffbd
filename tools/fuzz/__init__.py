"""Random calls of every op against the oracle: ``python -m tools.fuzz``.

A case is drawn from a `random.Random`, so that a seed and a number name it and hypothesis can drive the same draws. What
shapes machine code (dtypes, options) comes from a bounded pool of configurations; everything else is drawn anew each time.
"""

from __future__ import annotations

from tools.fuzz.cases import OPS, Fuzzed, configuration, draw_case, numbered, shrink

__all__ = ["OPS", "Fuzzed", "configuration", "draw_case", "numbered", "shrink"]
