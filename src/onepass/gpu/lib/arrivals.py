"""How the last programs of a launch to arrive share what remains.

A counter is an int32 that is zero before and after a launch. Programs add 1 when their sums are stored. The last
``sharing`` of them have a share each. All but the very last wait for the others.

**No wait can hang.** A program that has polled `MOST_POLLS` times gives its share up, in case those that it waits for
need its place on a multiprocessor: it sets the share's bit and leaves. The last to arrive reads those bits when it
arrives, and waits for nobody. A bit is set by compare-and-swap, so never after that.

**Zero again.** Whoever leaves adds LEFT. The last to arrive subtracts everything that the others add, so the counter is
zero when all have left, whatever their order. Until then its arrivals are all of them, or 0 if the last one left first.
"""

import triton
import triton.language as tl

ARRIVED = tl.constexpr(0xFFF)
GIVEN_UP = tl.constexpr(0xFFFF << 12)
"""A bit for each share."""
LEFT = tl.constexpr(1 << 28)
MOST_POLLS = tl.constexpr(100)
"""Almost 0.1 ms on an H200, where the last 16 of 528 programs arrive within 2 us."""


@triton.jit
def await_all(counter, state, count, sharing):
    """Wait until all ``count`` programs have arrived; ``state`` is the counter before this one did, one of the last.

    Returns ``begin``, ``end`` and bits: this program has the shares from ``begin`` to ``end`` whose bit is set, and none if
    it gave up. What all have stored is then visible.
    """
    begin = (state & ARRIVED) - (count - sharing)
    end = begin + 1
    mine = 1 << begin
    if end == sharing:
        given_up = state & GIVEN_UP
        tl.atomic_add(counter, -(count + given_up + (sharing - 1) * LEFT), sem="relaxed", scope="gpu")
        if given_up != 0:
            mine |= given_up >> 12
            begin = 0
    else:
        polls = 0
        waits = True
        while waits:
            seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
            arrived = seen & ARRIVED
            waits = (arrived != count) & (arrived != 0)
            polls += 1
            if waits & (polls > MOST_POLLS):
                if tl.atomic_cas(counter, seen, seen + (mine << 12) + LEFT, sem="relaxed", scope="gpu") == seen:
                    waits = False
                    end = begin
        if begin != end:
            tl.atomic_add(counter, LEFT, sem="relaxed", scope="gpu")
    return begin, end, mine
