"""What `onepass.patch` does to a model: forms of code, what is matched, bound and reported, and how it is undone."""
