"""Benchmarks; ``onepass bench`` or ``python -m onepass.bench`` runs them. Results are in the repository's benchmarks/."""
