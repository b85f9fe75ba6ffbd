"""Run with TRITON_INTERPRET=1. Prints a line for each prologue whose Triton source differs from its function."""

import torch

from onepass.prologues import prologue
from tests.oracle.runner import running_on
from tests.prologues.reference import define, direct, elements, random_source, same_numbers
from tests.prologues.test_meaning import EXACT, HALF, arguments, kernel

INTERPRETED = 8


def main() -> None:
    """Compare the hand-written functions, then random ones."""
    tried = [(f.__name__, f, arguments(f, torch.float32)) for f in EXACT]
    for seed in range(INTERPRETED):
        source, count = random_source(1000 + seed, exact=True)
        tried.append((source, define(source, HALF=HALF), list(elements(count, torch.float32, seed))))
    with running_on("interpreter"):
        for name, function, given in tried:
            if not same_numbers(kernel(prologue(function), *given), direct(function, *given)):
                print(f"{name}: differs")
    print(f"{len(tried)} compared")


if __name__ == "__main__":
    main()
