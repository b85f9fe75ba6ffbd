"""The documentation site: ``make site``. Its tools live in an environment of their own, so only mkdocs imports `hooks`."""
