"""The benchmark suite: contenders, measuring, results and pages. ``python -m benchmarks`` runs it."""
