"""Reference pages generated from the code: ``python -m tools.docs`` writes them."""
