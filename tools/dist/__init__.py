"""Checks of tensor parallelism."""
