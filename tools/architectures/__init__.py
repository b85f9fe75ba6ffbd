"""How `onepass.patch` does on every architecture of transformers that has an RMSNorm.

``python -m tools.architectures`` builds a tiny model of each, compares it with and without
`onepass.patch`, and lists every RMSNorm class. `make docs` makes a page of the result.
"""
