"""Attention on a CPU whose bytes depend on a query and the keys that it sees, for prompts and steps."""
