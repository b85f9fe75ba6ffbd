"""Correctness: cases, comparison against each op's ``reference.py``, and the runner behind ``onepass check``."""
