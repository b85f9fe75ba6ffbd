"""Evidence: which machine code ran and passed its cases on a GPU, and whether today's sources still compile to it.

`chips` lists the GPUs, `published` the model sizes and `families` the cases made from them, `digest` identifies sources,
`records` compares and stores proofs, `proof` runs the cases. Run it with ``python -m tools.checks --evidence``.
"""
