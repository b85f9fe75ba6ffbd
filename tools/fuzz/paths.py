"""The path in C against Python's, over the calls of the fuzzer: ``python -m tools.fuzz.paths --cases 20000``.

Every eager call is made on copies of its tensors: by Python, then by the path in C three times, so that the third repeats
what the second recorded. Results, their strides, everything that was written and errors must be equal.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.fastpath import native, replay
from onepass.ops import registration
from onepass.testing.case import moved
from tools.fuzz import OPS, cases, numbered

TIMES = ("noted", "recorded", "repeated")


@dataclass
class Tally:
    """Calls by op, those that were repeated in C, and differences."""

    calls: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    errors: int = 0
    wrong: list[str] = field(default_factory=list)


def _flat(arguments: tuple[Any, ...]) -> list[Any]:
    return [t for a in arguments for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, Tensor)]


def _bytes(tensor: Tensor) -> bytes:
    """All memory that a tensor shares, also what lies between its elements."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return bytes(whole.numpy())


def _outcome(call: Callable[..., Any], arguments: tuple[Any, ...], traced: frozenset[int]) -> Any:
    """What a call does to copies of its arguments: its results and all memory, or its error."""
    copies = tuple(moved({str(i): a for i, a in enumerate(arguments)}).values())
    try:
        results = call(*copies)
    except Exception as error:
        return type(error), str(error)
    found: list[Any] = []
    for result in results:
        if result is None:
            found.append(None)
            continue
        given = [i for i, a in enumerate(copies) if a is result]
        about = (result.dtype, result.shape, result.stride(), result.requires_grad, type(result))
        found.append((*about, given or bytes(result.contiguous().reshape(-1).view(torch.uint8).numpy())))
    written = [_bytes(t) for i, a in enumerate(copies) if i not in traced for t in _flat((a,))]
    return found, written


def _both(op: registration.Op, original: Callable[..., Any], tally: Tally, *arguments: Any) -> Any:
    """Compare both paths on copies, then make the call."""
    name = op.contract.name
    plain = all(type(t) in registration.PLAIN and t.layout is torch.strided for t in _flat(arguments))
    if replay.switch.on and plain:
        traced = frozenset(i for i, n in enumerate(op.contract.args) if n in ("trace", "units"))
        replay.switch.on = False
        try:
            expected = _outcome(original, arguments, traced)
        finally:
            replay.switch.on = True
        before = op.table.counts()["hits"]
        for time in TIMES:
            if _outcome(original, arguments, traced) != expected:
                tally.wrong.append(f"{name}, {time}: other results than Python's")
        tally.calls[name] += 1
        tally.repeated[name] += op.table.counts()["hits"] > before
        tally.errors += isinstance(expected[0], type)
    return original(*arguments)


@contextmanager
def compared() -> Iterator[Tally]:
    """While it lasts, compare both paths at every eager call."""
    tally = Tally()
    registration.write_eager_entries()
    saved = [(op, op.call) for op in registration._ops]
    for op, call in saved:
        op.call = partial(_both, op, call, tally)
    try:
        yield tally
    finally:
        for op, call in saved:
            op.call = call


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.paths", description=__doc__)
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=2028)
    parser.add_argument("--configurations", type=int, default=12, help="per op; each is compiled")
    options = parser.parse_args()
    if native.describe() != "on":
        print(f"the path in C: {native.describe()}")
        return 1
    failed = 0
    with compared() as tally:
        for index in range(options.cases):
            case = numbered(options.seed, index, tuple(OPS), options.configurations, False)
            assert case is not None
            wrong = cases.run(case, "cpu")
            if wrong is not None or tally.wrong:
                failed += 1
                print(f"case {index}: {wrong}; {tally.wrong}\n{case}")
                tally.wrong.clear()
    for name, count in tally.calls.items():
        print(f"{name}: {count} calls, {tally.repeated[name]} repeated in C")
    print(f"{tally.errors} errors, {failed} failed cases")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
