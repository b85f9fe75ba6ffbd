"""Mutation testing: put one small mistake into a copy of the library and see whether a test fails.

``python -m tools.mutation --sample 300 --seed 1``, or ``make mutate``; `mutants` makes the mistakes, `campaign` runs tests.
"""
