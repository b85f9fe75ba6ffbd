"""Requests that arrive and end at random over pages that are freed and taken again, and a record of what pages held."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

PAGE: Final = 4
"""Entries a page: few, so that requests cross pages often."""
LONGEST: Final = 44
WIDTH: Final = LONGEST // PAGE
MOST_PROMPT: Final = 20
CANCELLED: Final = 0.01
"""Share of requests that a step ends before they are done."""
ARRIVING: Final = 0.4
NOWHERE: Final = 2**30
"""What tables hold where a request has no page: no entry of it may be followed."""


@dataclass(eq=False)
class Request:
    """A prompt, how long it may grow, what of it is cached and where; ``kept`` is for whoever runs it."""

    number: int
    prompt: int
    target: int
    length: int = 0
    pages: list[int] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def slots(self, first: int, end: int) -> list[int]:
        """Where its tokens from ``first`` up to ``end`` lie."""
        return [self.pages[p // PAGE] * PAGE + p % PAGE for p in range(first, end)]


class Churn:
    """Up to ``capacity`` requests over ``pages`` pages, too few for all of them to grow long: some are evicted."""

    def __init__(self, seed: str, capacity: int, pages: int) -> None:
        self.random = random.Random(seed)
        self.capacity = capacity
        self.free = list(range(pages))
        self.active: list[Request] = []
        self.dropped: list[Request] = []
        """Those that the last `plan` evicted."""
        self.begun = self.served = self.cancelled = self.evicted = 0

    def leaving(self) -> list[Request]:
        """Requests that end now; they have their pages until `release`."""
        done = [r for r in self.active if r.length >= r.target]
        gone = [r for r in self.active if r.length < r.target and self.random.random() < CANCELLED]
        self.served += len(done)
        self.cancelled += len(gone)
        return done + gone

    def release(self, requests: Iterable[Request]) -> None:
        """Give their pages back."""
        for request in requests:
            self.active.remove(request)
            self.free += request.pages
            request.pages = []

    def plan(self) -> list[tuple[Request, int]]:
        """Who gets how many tokens in this step: the whole prompt at first, then one. Each has the pages for them."""
        while len(self.active) < self.capacity and (not self.active or self.random.random() < ARRIVING):
            prompt = self.random.randint(1, MOST_PROMPT)
            self.active.append(Request(self.begun, prompt, self.random.randint(prompt + 1, LONGEST)))
            self.begun += 1
        self.random.shuffle(self.active)
        planned, self.dropped = [], []
        for request in list(self.active):
            new = 1 if request.length else request.prompt
            needed = -(-(request.length + new) // PAGE) - len(request.pages)
            if needed > len(self.free):
                self.evicted += 1
                self.dropped.append(request)
                self.release([request])
                continue
            for _ in range(needed):
                request.pages.append(self.free.pop(self.random.randrange(len(self.free))))
            planned.append((request, new))
        return planned


def tables(requests: Sequence[Request], device: str) -> tuple[Tensor, Tensor]:
    """Lengths and page numbers of these requests, as a `PagedKVCache` has them."""
    rows = [r.pages + [NOWHERE] * (WIDTH - len(r.pages)) for r in requests]
    lengths = torch.tensor([r.length for r in requests], dtype=torch.int32)
    return lengths.to(device), torch.tensor(rows, dtype=torch.int32).view(-1, WIDTH).to(device)


class Ledger:
    """The bytes of a pool's entries as they were, and which entries were to be written since."""

    def __init__(self, name: str, memory: Tensor, gaps: Sequence[slice] = ()) -> None:
        self.name = name
        self.memory = memory
        self.gaps = gaps
        self.before = self._bytes().clone()
        self.written: set[int] = set()

    def _bytes(self) -> Tensor:
        """[entries, bytes] on the host; on a CPU the memory itself."""
        return self.memory.view(torch.uint8).flatten(0, 1).cpu()

    def check(self) -> str | None:
        """None, or what changed that nobody was to write: entries of others, or ``gaps`` between what entries hold."""
        now = self._bytes()
        changed = now != self.before
        mine = torch.tensor(sorted(self.written), dtype=torch.int64)
        spilt = [int(changed[mine][:, gap].sum()) for gap in self.gaps]
        changed[mine] = False
        foreign = changed.any(-1).nonzero().flatten().tolist()
        self.before = now.clone()
        self.written.clear()
        if foreign:
            return f"{self.name}: {int(changed.sum())} bytes changed in entries that were not to be written, slots {foreign[:5]}"
        return f"{self.name}: {sum(spilt)} bytes changed between entries" if any(spilt) else None
