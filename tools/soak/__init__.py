"""Decode for minutes while requests come and go: nothing may drift, leak or slow down. ``python -m tools.soak``."""
