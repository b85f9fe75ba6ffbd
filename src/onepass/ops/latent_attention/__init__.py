"""Attention of decode steps to MLA's latents."""
