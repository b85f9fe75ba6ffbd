"""Norms of q and k, with rotary embedding, on one GPU or over ranks."""
