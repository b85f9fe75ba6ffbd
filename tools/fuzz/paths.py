"""The path in C against Python's, over the calls of the fuzzer: ``python -m tools.fuzz.paths --calls 100000``.

Every eager call is made on copies of its tensors: by Python, then by the path in C four times, so that the last two
repeat what the second recorded. Then one argument is spoiled, and the
call is made again by both. Results, their strides, all memory that was written, and errors with their
messages must be equal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.suite import machine
from onepass.core import native, recording
from onepass.core import op as registration
from onepass.testing.quantized import without_padding
from onepass.testing.tensors import moved
from tools import compact
from tools.fuzz import cases
from tools.fuzz.cases import OPS, numbered

ROUNDS: Final = ("noted", "recorded", "repeated")
SHOWN: Final = 20
"""Differences that are printed; more are only counted."""


@dataclass
class Tally:
    """Compared calls by op: all, those that were repeated in C, and those that raise. Differences are in ``wrong``."""

    calls: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    random: Random = field(default_factory=lambda: Random(0))

    @property
    def errors(self) -> int:
        """Calls that raise."""
        return self.raised.total()


def _flat(arguments: tuple[Any, ...]) -> list[Any]:
    return [t for a in arguments for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, Tensor)]


def _bytes(tensor: Tensor) -> bytes:
    """All memory that a tensor shares, also what lies between its elements."""
    if tensor.device.type not in ("cpu", "cuda"):
        return b""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return bytes(whole.cpu().numpy())


def _values(result: Tensor, rows: int | None) -> bytes:
    """The bytes of an allocated result. Of scales in tiles only those of ``rows``: kernels do not write the others."""
    if rows is not None:
        result = without_padding(result, rows)
    flat = result.clone(memory_format=torch.contiguous_format).view(-1)
    return bytes(flat.view(torch.uint8).cpu().numpy())


Spoil = Callable[[tuple[Any, ...]], tuple[Any, ...]]


def _outcome(call: Callable[..., Any], arguments: tuple[Any, ...], traced: frozenset[int], spoil: Spoil | None) -> Any:
    """What a call does to copies of its arguments: its results and all memory, or its error. None: it was not made."""
    copies = tuple(moved({str(i): a for i, a in enumerate(arguments)}).values())
    if spoil is not None:
        copies = spoil(copies)
    try:
        results = call(*copies)
    except Exception as error:
        return type(error), str(error)
    if results is None:
        return None
    found: list[Any] = []
    for position, result in enumerate(results):
        if result is None:
            found.append(None)
            continue
        given = [i for i, a in enumerate(copies) if a is result]
        about = (result.dtype, result.shape, result.stride(), result.device, result.requires_grad, type(result))
        tiled = position == 1 and "128x4" in [a for a in copies if isinstance(a, str)]
        rows = copies[0].shape[:-1].numel() if tiled else None
        found.append((*about, result.is_inference(), given or _values(result, rows)))
    written = [_bytes(t) for i, a in enumerate(copies) if i not in traced for t in _flat((a,))]
    return found, written


def _other(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t.float()


def _shorter(t: Tensor) -> Tensor:
    return t[..., :-1] if t.dim() else t.view(1)


def _needing_gradient(t: Tensor) -> Tensor:
    return t.clone().requires_grad_() if t.is_floating_point() and not t.is_inference() else t.bool()


def _overlapping(t: Tensor) -> Tensor:
    return t.as_strided(t.shape, (*([0] * (t.dim() - 1)), 1)) if t.dim() else t


TENSORS: Final[tuple[Callable[[Tensor], Any], ...]] = (
    _other,
    _shorter,
    _needing_gradient,
    _overlapping,
    lambda t: t.unsqueeze(0),
    lambda t: t.expand(2, *t.shape),
    lambda t: t.t() if t.dim() == 2 else t.reshape(-1),
    lambda t: t.to("meta"),
    lambda t: t.tolist(),
    lambda t: None,
)
"""What a tensor is replaced by."""
OPTIONS: Final = (None, -1, 1 << 70, -0.5, float("nan"), "other", True, torch.int32, [1], b"once")


def _spoiling(arguments: tuple[Any, ...], r: Random) -> Spoil:
    """A function that replaces one argument, mostly by a wrong one."""
    index, way, first = r.randrange(len(arguments)), r.choice(TENSORS), r.random() < 0.1
    option = r.choice(OPTIONS)

    def spoiled(given: tuple[Any, ...]) -> tuple[Any, ...]:
        value = option
        if isinstance(given[index], Tensor):
            try:
                value = given[0] if first else way(given[index])
            except (NotImplementedError, RuntimeError):  # torch cannot do this to such a tensor
                value = 3
        return (*given[:index], value, *given[index + 1 :])

    return spoiled


@contextmanager
def _only_python() -> Iterator[None]:
    """Without the path in C."""
    recording.switch.on = False
    try:
        yield
    finally:
        recording.switch.on = True


def _compare(
    op: registration.Op, call: Callable[..., Any], tally: Tally, arguments: tuple[Any, ...], spoil: Spoil | None = None
) -> None:
    """Make a call by all paths and note differences."""
    name, contract = op.contract.name, op.contract
    traced = frozenset(i for i, n in enumerate(contract.args) if n in ("trace", "units"))
    table = op.table
    assert table is not None
    with _only_python():
        expected = _outcome(call, arguments, traced, spoil)
    before = table.counts()["hits"]
    found = {way: _outcome(call, arguments, traced, spoil) for way in ROUNDS}
    known = _outcome(table.repeat, arguments, traced, spoil)
    if known is not None:
        found["repeated without Python"] = known
    for way, outcome in found.items():
        if outcome != expected:
            tally.wrong.append(f"{name}, {way}: other results than Python's: {_shown(outcome)}, not {_shown(expected)}")
    tally.calls[name] += 1
    tally.repeated[name] += table.counts()["hits"] > before
    tally.raised[name] += isinstance(expected[0], type)


def _shown(outcome: Any) -> str:
    return repr(outcome) if outcome is None or isinstance(outcome[0], type) else "results"


def _both(op: registration.Op, original: Callable[..., Any], tally: Tally, *arguments: Any) -> Any:
    """Compare both paths on copies, then make the call."""
    plain = all(type(t) in registration.PLAIN and t.layout is torch.strided for t in _flat(arguments))
    if recording.switch.on and plain:
        _compare(op, original, tally, arguments)
        _compare(op, original, tally, arguments, _spoiling(arguments, tally.random))
    return original(*arguments)


def _nothing(*arguments: object) -> None:
    """Repeats no call."""


@contextmanager
def compared() -> Iterator[Tally]:
    """While it lasts, compare both paths at every eager call."""
    tally, original = Tally(), registration.Op.__call__

    def both(op: registration.Op, *arguments: Any) -> Any:
        return _both(op, partial(original, op), tally, *arguments)

    for op in registration.ops:
        op.load_table()
    repeats = [op.repeat for op in registration.ops]
    with patch.object(registration.Op, "__call__", both):
        for op in registration.ops:
            op.repeat = _nothing  # so that every call comes here
        try:
            yield tally
        finally:
            for op, repeat in zip(registration.ops, repeats, strict=True):
                op.repeat = repeat


def _run(options: argparse.Namespace) -> dict[str, Any]:
    start = shown = time.perf_counter()
    index = failed = 0
    differences: list[str] = []
    with compared() as tally:
        tally.random = Random(options.seed)
        while tally.calls.total() < options.calls:
            now = time.perf_counter()
            if options.minutes and now - start > 60 * options.minutes:
                break
            case = numbered(options.seed, index, tuple(OPS), options.configurations, options.device == "cuda")
            assert case is not None
            with torch.inference_mode(index % 2 == 0):
                wrong = cases.run(case, options.device)
            if wrong is not None or tally.wrong:
                failed += 1
                message = f"case {index}: {wrong}; {tally.wrong}\n{case}"
                if len(differences) < SHOWN:
                    differences.append(message)
                    print(message, flush=True)
                tally.wrong.clear()
            if now - shown > 30:
                shown = now
                print(f"{tally.calls.total()} calls, {failed} failed, {now - start:.0f} s", file=sys.stderr, flush=True)
            index += 1
    return {
        **machine.describe(options.device),
        "seed": options.seed,
        "configurations": options.configurations,
        "cases": index,
        "calls": tally.calls.total(),
        "repeated": tally.repeated.total(),
        "raised": tally.raised.total(),
        "by op": {
            name: {"calls": count, "repeated": tally.repeated[name], "raised": tally.raised[name]}
            for name, count in sorted(tally.calls.items())
        },
        "failed": failed,
        "differences": differences,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.paths", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--calls", type=int, default=20_000, help="calls to compare, spoiled ones included")
    parser.add_argument("--minutes", type=float, help="start no case after this long")
    parser.add_argument("--seed", type=int, default=2028)
    parser.add_argument("--configurations", type=int, default=12, help="per op; each is compiled")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    if native.describe() != "on":
        print(f"the path in C: {native.describe()}")
        return 1
    torch.set_num_threads(1)
    found = _run(options)
    if options.json:
        options.json.write_text(compact.dumps(found))
    for name, counts in found["by op"].items():
        print(f"{name}: {counts['calls']} calls, {counts['repeated']} repeated in C, {counts['raised']} raise")
    print(f"{found['calls']} calls, {found['failed']} failed cases in {found['seconds']:.0f} s")
    return 1 if found["failed"] or not found["calls"] else 0


if __name__ == "__main__":
    sys.exit(main())
