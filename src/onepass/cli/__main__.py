"""``python -m onepass.cli`` is the ``onepass`` command."""

from .main import main

if __name__ == "__main__":
    main()
