"""Measures the numbers in benchmarks/ and renders them into the repository's pages."""
