"""The benchmark suite, and the results that the documents quote (``cpu/``, ``h200/``)."""
