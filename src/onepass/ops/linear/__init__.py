"""A product with a weight, optionally with the norm before it."""
