"""Random calls of every op against the oracle: ``python -m tools.fuzz``.

A case is drawn from a `random.Random`: a seed and a number identify it, and hypothesis can drive the same draws. What
determines machine code (dtypes, options) comes from a bounded pool of configurations; the rest is drawn for each case.
"""

from __future__ import annotations

from tools.fuzz.cases import OPS, Fuzzed, configuration, draw_case, numbered, shrink

__all__ = ["OPS", "Fuzzed", "configuration", "draw_case", "numbered", "shrink"]
