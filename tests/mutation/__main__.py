"""``python tests/mutation``: see `campaign`."""

from campaign import main

main()
