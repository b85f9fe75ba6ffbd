"""Norms and rotary embedding of q and k, and the write to a paged cache."""
