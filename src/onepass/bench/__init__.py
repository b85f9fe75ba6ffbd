"""Speed: a timing protocol, peers, ceilings measured in the same run, and result files."""
