"""Correctness: calls of every op, compared with each op's ``reference.py``, and the runner behind ``onepass check``."""
