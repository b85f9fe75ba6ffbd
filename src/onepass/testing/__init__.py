"""Correctness: cases, comparison against the oracle, and the runner behind ``onepass check``."""
