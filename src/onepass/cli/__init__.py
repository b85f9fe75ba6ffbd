"""The ``onepass`` command: one module per subcommand. Nothing else in the package imports rich or typer."""
