"""The ``onepass`` command."""
