"""Benchmarks, run by ``onepass bench``."""
