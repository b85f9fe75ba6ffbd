"""onepass in inference engines. `make engines` runs these in an environment of their own; `make test` does not."""
