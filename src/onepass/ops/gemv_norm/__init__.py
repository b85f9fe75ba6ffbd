"""A matrix-vector product and the norm of its first columns."""
