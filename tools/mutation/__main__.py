"""``python -m tools.mutation``: see `campaign`."""

from tools.mutation.campaign import main

main()
