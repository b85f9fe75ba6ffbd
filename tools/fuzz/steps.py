"""A case in steps, so that many cases share one wait for a GPU.

A case makes its calls, yields groups of tensors, and continues with copies of them on the CPU (`fetched`). What it returns
is None, or what is wrong. A wait takes long when several processes share a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence

from torch import Tensor

from tests.oracle.memory import fetched

Steps = Generator[tuple[Iterable[Tensor], ...], list[tuple[Tensor, ...]], str | None]


class InSteps(ABC):
    """A case that makes its calls in steps."""

    @abstractmethod
    def steps(self, device: str) -> Steps:
        """What `run` does."""

    def run(self, device: str) -> str | None:
        """None, or what is wrong."""
        return finish(self.steps(device), device)


def finish(steps: Steps, device: str) -> str | None:
    """Run one case to its end. Exceptions of the case are raised."""
    try:
        groups = next(steps)
        while True:
            groups = steps.send(fetched(device, *groups))
    except StopIteration as end:
        found: str | None = end.value
        return found


def finish_all(cases: Sequence[Steps], device: str) -> list[str | None]:
    """Run cases to their ends, with one wait for each of their steps. An exception is what is wrong with its case."""
    found: list[str | None] = [None] * len(cases)
    copies: dict[int, list[tuple[Tensor, ...]] | None] = dict.fromkeys(range(len(cases)))
    while copies:
        asked: dict[int, tuple[tuple[Tensor, ...], ...]] = {}
        for number, copy in copies.items():
            try:
                groups = next(cases[number]) if copy is None else cases[number].send(copy)
                asked[number] = tuple(tuple(group) for group in groups)
            except StopIteration as end:
                found[number] = end.value
            except Exception as error:
                found[number] = told(error)
        try:
            all_groups = iter(fetched(device, *(group for groups in asked.values() for group in groups)))
        except Exception as error:  # of a kernel of any of them
            return [told(error) if number in asked else wrong for number, wrong in enumerate(found)]
        copies = {number: [next(all_groups) for _ in groups] for number, groups in asked.items()}
    return found


def told(error: Exception) -> str:
    """An exception as a message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
