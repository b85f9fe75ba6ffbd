"""One declaration per op, and the validation code generated from it."""
