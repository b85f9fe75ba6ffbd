"""How cases are called and verified: what those of all ops share. An op's part is tests/<op>/checks.py."""
