"""Attention on a CPU, for prompts and steps. Its results depend only on a query and the keys that it sees."""
