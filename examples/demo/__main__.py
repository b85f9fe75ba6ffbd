"""``python -m examples.demo``, which ``make demo`` runs."""

import sys

from examples.demo.demo import main

if __name__ == "__main__":
    sys.exit(main())
