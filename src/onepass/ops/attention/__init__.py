"""Attention of decode steps in fixed splits of the context."""
