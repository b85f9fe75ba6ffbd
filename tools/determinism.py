"""One promise for every op: a row's bytes depend on the row alone; part of ``python -m tools.checks --promises``.

They do not depend on the time (repeats), the number of rows (M, a split batch), the row's index or order, its address (alignment,
strides) or, on a CPU, the number of threads. The same tests run for all forms of ``ROWS`` in tests/<op>/inputs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Final

import torch
from torch import Tensor

from onepass.formats import FLOATS
from onepass.testing.tensors import same_bytes
from tests.inputs import Rows
from tests.ops import each

REPEATS: Final = 1000
Promise = Callable[[], str | None]
SUBJECTS: Final[tuple[Rows, ...]] = tuple(chain(*each("inputs", "ROWS")))


def _differing(some: list[Tensor], others: list[Tensor]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=True)) if not same_bytes(a, b)), None)


def repeats(subject: Rows, device: str, n: int, dtype: torch.dtype) -> str | None:
    """The same call a thousand times."""
    t = subject.inputs(device, 3, n, dtype)
    first = subject.call(t)
    for repeat in range(REPEATS):
        wrong = _differing(subject.call(t), first)
        if wrong is not None:
            return f"result {wrong} differs in repeat {repeat}"
    return None


def batches(subject: Rows, device: str, n: int, dtype: torch.dtype) -> str | None:
    """Some rows alone, the batch in two parts, and its rows in another order."""
    count = min(300 if device == "cuda" else 40, subject.most)
    t = subject.inputs(device, count, n, dtype)
    whole = subject.call(t)
    for rows in (1, 2, 3, 7, 16, 33):
        for begin in {0, 1, count // 2, count - rows}:
            if 0 <= begin <= count - rows:
                part = slice(begin, begin + rows)
                wrong = _differing(subject.call(subject.part(t, part)), [w[part] for w in whole])
                if wrong is not None:
                    return f"result {wrong} of rows {begin} to {begin + rows} differs from the whole batch's"
    parts = [subject.call(subject.part(t, part)) for part in (slice(0, count // 3), slice(count // 3, count))]
    joined = [torch.cat([_bytes(a), _bytes(b)]) for a, b in zip(*parts, strict=True)]
    wrong = _differing(joined, [_bytes(w) for w in whole])
    if wrong is not None:
        return f"result {wrong} differs when the batch is split"
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count)).to(device)
    wrong = _differing([_bytes(t) for t in subject.call(subject.part(t, order))], [_bytes(w)[order] for w in whole])
    return None if wrong is None else f"result {wrong} differs when rows are reordered"


def _bytes(t: Tensor) -> Tensor:
    """Rows as bytes, since fp8 tensors cannot be indexed."""
    return t.contiguous().view(torch.uint8).reshape(t.shape[0], -1)


def alignment(subject: Rows, device: str, n: int, dtype: torch.dtype) -> str | None:
    """Move each tensor, then all of them, with gaps between rows."""
    t = subject.inputs(device, 5, n, dtype)
    expected = subject.call(t)

    def moved(tensor: Tensor, shift: int) -> Tensor:
        *lead, columns = tensor.shape
        memory = torch.empty(*lead, columns + 2 * shift, dtype=tensor.dtype, device=device)
        return memory[..., shift : shift + columns].copy_(tensor)

    for shift in (1, 2, 3, 4, 8):
        for names in (*([name] for name in t), list(t)):
            there = {name: moved(tensor, shift) if name in names else tensor for name, tensor in t.items()}
            wrong = _differing(subject.call(there), expected)
            if wrong is not None:
                return f"result {wrong} differs with {', '.join(names)} moved by {shift} elements"
    return None


def threads(subject: Rows, dtype: torch.dtype) -> str | None:
    """On a CPU: enough rows for several threads, with different numbers of threads."""
    n = subject.shared_out
    t = subject.inputs("cpu", min(subject.most, 280_000 // n + 1), n, dtype)
    before, seen = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            seen.append(subject.call(t))
    finally:
        torch.set_num_threads(before)
    wrong = next((w for other in seen[1:] if (w := _differing(other, seen[0])) is not None), None)
    return None if wrong is None else f"result {wrong} depends on the number of threads"


LENGTHS: Final = (100, 640)


def determinism_promises(device: str) -> Iterator[tuple[str, Promise]]:
    """Name and test of every promise, for each op and dtype."""
    for subject in SUBJECTS:
        for dtype in FLOATS:
            label = f"{subject.name}, {str(dtype).removeprefix('torch.')}"
            yield f"a thousand repeats change no bit: {label}", partial(repeats, subject, device, LENGTHS[0], dtype)
            # each dtype is compiled on a GPU, and float16 takes the same paths as bfloat16
            for n in LENGTHS[1:] if device == "cuda" and dtype == torch.float16 else LENGTHS:
                yield f"a row's bytes are its own: {label}, {n} columns", partial(batches, subject, device, n, dtype)
                yield f"alignment changes no bit: {label}, {n} columns", partial(alignment, subject, device, n, dtype)
            if device == "cpu":
                yield f"threads change no bit: {label}", partial(threads, subject, dtype)
