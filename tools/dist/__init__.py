"""Sharded norms on real ranks of this machine, checked and timed: ``python -m tools.dist --ranks 2``."""
