"""Requests that arrive and end at random over reused pages, and a record of what the pages held."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

PAGE: Final = 4
"""Entries per page: few, so that requests often cross pages."""
LONGEST: Final = 44
WIDTH: Final = LONGEST // PAGE
MOST_PROMPT: Final = 20
CANCELLED: Final = 0.01
"""Fraction of requests that a step ends early."""
ARRIVING: Final = 0.4
NOWHERE: Final = 2**30
"""What tables hold where a request has no page; it must never be followed."""


@dataclass(eq=False)
class Request:
    """A prompt, its maximum length, what is cached and where; ``kept`` belongs to the engine."""

    number: int
    prompt: int
    target: int
    length: int = 0
    pages: list[int] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def slots(self, first: int, end: int) -> list[int]:
        """The slots of its tokens from ``first`` up to ``end``."""
        return [self.pages[p // PAGE] * PAGE + p % PAGE for p in range(first, end)]


class Churn:
    """Up to ``capacity`` requests over ``pages`` pages, too few for all to grow long: some are evicted."""

    def __init__(self, seed: str, capacity: int, pages: int) -> None:
        self.random = random.Random(seed)
        self.capacity = capacity
        self.free = list(range(pages))
        self.active: list[Request] = []
        self.dropped: list[Request] = []
        """Requests that the last `plan` evicted."""
        self.begun = self.served = self.cancelled = self.evicted = 0

    def leaving(self) -> list[Request]:
        """Requests that end now; they keep their pages until `release`."""
        done = [r for r in self.active if r.length >= r.target]
        gone = [r for r in self.active if r.length < r.target and self.random.random() < CANCELLED]
        self.served += len(done)
        self.cancelled += len(gone)
        return done + gone

    def release(self, requests: Iterable[Request]) -> None:
        """Free their pages."""
        for request in requests:
            self.active.remove(request)
            self.free += request.pages
            request.pages = []

    def plan(self) -> list[tuple[Request, int]]:
        """Tokens per request in this step: first the whole prompt, then one. Each request has pages for them."""
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
    """Lengths and page numbers of these requests, as in a `PagedKVCache`."""
    rows = [r.pages + [NOWHERE] * (WIDTH - len(r.pages)) for r in requests]
    lengths = torch.tensor([r.length for r in requests], dtype=torch.int32)
    return lengths.to(device), torch.tensor(rows, dtype=torch.int32).view(-1, WIDTH).to(device)


class Ledger:
    """The earlier bytes of a pool's entries, and the entries that may have been written since."""

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
        """None, or what changed unexpectedly: other entries, or the ``gaps`` within entries."""
        now = self._bytes()
        changed = now != self.before
        mine = torch.tensor(sorted(self.written), dtype=torch.int64)
        spilt = [int(changed[mine][:, gap].sum()) for gap in self.gaps]
        changed[mine] = False
        foreign = changed.any(-1).nonzero().flatten().tolist()
        self.before = now.clone()
        self.written.clear()
        if foreign:
            return f"{self.name}: {int(changed.sum())} bytes changed in entries that must not be written, slots {foreign[:5]}"
        return f"{self.name}: {sum(spilt)} bytes changed between entries" if any(spilt) else None
