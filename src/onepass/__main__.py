"""``python -m onepass``: the ``onepass`` command."""

from .cli.main import main

if __name__ == "__main__":
    main()
