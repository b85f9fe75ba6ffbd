"""A product per head, for MLA's absorbed weights."""
