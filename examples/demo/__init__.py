"""What the library does, shown by running it: ``make demo``."""
