"""MLA's norm, rotary embedding, quantization and cache write."""
