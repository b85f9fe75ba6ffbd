"""The fast path of plain eager calls."""
