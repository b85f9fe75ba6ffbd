"""Random calls of every op against the oracle: ``python -m tools.fuzz``.

A case is drawn from a `random.Random`: a seed and a number identify it, and hypothesis can drive the same draws. What
determines machine code (dtypes, options) comes from a bounded pool of configurations; the rest is drawn for each case.
What is drawn of an op, and the bounds of each value, is in tests/<op>/fuzz.py.
"""
