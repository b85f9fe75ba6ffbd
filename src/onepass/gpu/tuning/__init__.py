"""Measured thresholds and tiles, one module per chip. Results do not depend on them.

To tune another GPU, add a module with its `CHIPS` and its `TUNING`. Chips without a module use the H200's table
(`onepass.gpu.chip.tuning`).
"""
