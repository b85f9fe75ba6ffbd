"""Promises: guarantees about results that are tested without an oracle. Those of an op are in tests/<op>/promises.py."""
