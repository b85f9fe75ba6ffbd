"""Model benchmarks and generated benchmark pages."""
