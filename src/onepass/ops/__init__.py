"""The public ops, one file a family: the maths, the contract, the functions."""
