"""Proof that compiled kernels ran on a GPU."""
