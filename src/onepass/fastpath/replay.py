"""A launch remembered: what a call on a GPU came to, so that the next one like it need not find out again.

Of two calls whose tensors agree in dtype, shape, strides, device and alignment, and whose options are equal, everything
but the addresses is the same: the kernel, the grid, every number that is passed. So the first such call is recorded, and
those after it check no more than that what they write lies apart from all else where it did, allocate the same outputs
and launch the same kernel on other addresses.

Only what is sure to be the same is recorded: one launch, whose every address is that of one argument or output, or of
memory whose owner says how to ask for it (`mark`). What repeats a call is straight-line code, written once for all calls of
that form.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .memory import extent

Launch = tuple[Any, int, Sequence[Any]]
"""A launcher, its grid and its arguments."""
Source = tuple[Callable[[], tuple[Tensor, Any]], Callable[[Any], None]]
"""``take() -> memory, key`` for a launch, and ``discard(key)`` should the launch fail."""
Replay = Callable[..., tuple[Tensor | None, ...] | None]
"""``replay(*tensors of the call, None where there is none)``: allocate, launch, return the outputs; None: nothing was done."""


class Tape(threading.local):
    """The launches of the call that this thread is recording."""

    on = False

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.sources: dict[int, Source] = {}


tape: Final = Tape()


class Switch:
    """Whether calls are recorded and replayed at all: not while something else than a backend takes the launches."""

    on = True


switch: Final = Switch()


def note(launcher: Any, grid: int, arguments: Sequence[Any]) -> None:
    """Write a launch down."""
    tape.launches.append((launcher, grid, arguments))


def mark(address: int, source: Source) -> None:
    """Say where memory at ``address``, which is none of the call's tensors, comes from."""
    if tape.on:
        tape.sources[address] = source


def record(
    run: Callable[[], None],
    before: Sequence[Tensor | None],
    after: Sequence[Tensor | None],
    written: Sequence[int],
    outputs: int,
) -> Replay | None:
    """Run a call and return what repeats it, or None where that cannot be told from what was launched.

    ``before`` are the caller's tensors, its outputs last, and ``after`` the same with those outputs allocated that it did not
    give; ``written`` are the places of those the kernel writes.
    """
    tape.launches, tape.sources, tape.on = [], {}, True
    try:
        run()
        launches, sources = tape.launches, tape.sources
    finally:
        tape.launches, tape.sources, tape.on = [], {}, False
    if len(launches) != 1:
        return None
    launcher, grid, arguments = launches[0]
    owners = {t.data_ptr(): i for i, t in enumerate(after) if t is not None and t.numel()}
    moved: list[tuple[int, int]] = []
    asked: list[tuple[int, Source]] = []
    for place in launcher.addresses:
        address = arguments[place]
        if address in owners:
            moved.append((place, owners[address]))
        elif address in sources:
            asked.append((place, sources[address]))
        elif address:
            return None
    given = [(i, t) for i, t in enumerate(before) if t is not None and t.numel()]
    apart, fixed = _relations(given, written)
    made = [(i, *_like(given, t)) for i, t in enumerate(after) if t is not None and before[i] is None]
    form = _Form(
        len(before),
        tuple(i for i, t in given if t.shape[-1:].numel() == 1 and t.is_floating_point()),
        tuple(pair for pair, _ in fixed),
        tuple(pair for pair, _ in apart),
        tuple((place, model, same) for place, model, same, _ in made),
        tuple(index for _, index in moved),
        len(asked),
        outputs,
    )
    return _writer(form)(
        launcher.prepare(grid, arguments, [place for place, _ in moved] + [place for place, _ in asked]),
        [distance for _, distance in fixed],
        [size for _, sizes in apart for size in sizes],
        [make for *_, make in made],
        [source for _, source in asked],
    )


def _relations(
    given: Sequence[tuple[int, Tensor]], written: Sequence[int]
) -> tuple[list[tuple[tuple[int, int], tuple[int, int]]], list[tuple[tuple[int, int], int]]]:
    """How the caller's tensors must lie: pairs that lie apart (with their bytes), and pairs at a fixed distance.

    What was found right of the first call is right wherever these hold: tensors that meet one that is written, as slices of
    one parent or as one and the same, must do so at the same distance.
    """
    apart, fixed = [], []
    for position, (a, first) in enumerate(given):
        for b, second in given[position + 1 :]:
            (start, end), (other_start, other_end) = extent(first), extent(second)
            meet = start < other_end and other_start < end
            if start == other_start or (meet and (a in written or b in written)):
                fixed.append(((a, b), other_start - start))
            elif a in written or b in written:
                apart.append(((a, b), (end - start, other_end - other_start)))
    return apart, fixed


def _like(given: Sequence[tuple[int, Tensor]], out: Tensor) -> tuple[int, bool, Any]:
    """How to allocate a tensor like ``out``: like the tensor at a place, its dtype the same or given, or by a function (-1)."""
    shape, strides, dtype, device = out.shape, out.stride(), out.dtype, out.device
    for place, tensor in given:
        if tensor.shape == shape and tensor.stride() == strides and tensor.is_contiguous() and tensor.device == device:
            return place, tensor.dtype == dtype, dtype
    return -1, False, lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)


class _Form(NamedTuple):
    """What the code of a replay depends on: how many tensors, which relations, which outputs are made and like what.

    The ``narrow`` have one column, so they might be views that torch negates when it reads them: those are not replayed.
    """

    tensors: int
    narrow: tuple[int, ...]
    fixed: tuple[tuple[int, int], ...]
    apart: tuple[tuple[int, int], ...]
    made: tuple[tuple[int, int, bool], ...]
    moved: tuple[int, ...]
    asked: int
    outputs: int


@cache
def _writer(form: _Form) -> Callable[..., Replay]:
    """``make(launch, distances, sizes, makers, sources) -> replay`` for calls of this form."""
    lines = ["def make(launch, distances, sizes, makers, sources):"]
    for name, count in (
        ("distance", len(form.fixed)),
        ("size", 2 * len(form.apart)),
        ("maker", len(form.made)),
        ("source", form.asked),
    ):
        if count:
            lines.append(f"    {', '.join(f'{name}{i}' for i in range(count))}, = {name}s")
    lines.append(f"    def replay({', '.join(f't{i}' for i in range(form.tensors))}):")
    made = {place for place, _, _ in form.made}
    pairs = [i for pair in (*form.fixed, *form.apart) for i in pair]
    body = [f"p{i} = t{i}.data_ptr()" for i in sorted({*pairs, *form.moved} - made)]
    body += [f"if t{i}.is_neg(): return None" for i in form.narrow]
    for i, (a, b) in enumerate(form.fixed):
        body.append(f"if p{b} - p{a} != distance{i}: return None")
    for i, (a, b) in enumerate(form.apart):
        body.append(f"if -size{2 * i + 1} < p{b} - p{a} < size{2 * i}: return None")
    for i, (place, model, same) in enumerate(form.made):
        like = f"empty_like(t{model})" if same else f"empty_like(t{model}, dtype=maker{i})"
        body.append(f"t{place} = {like if model >= 0 else f'maker{i}()'}")
    body += [f"p{i} = t{i}.data_ptr()" for i in sorted(made & {*form.moved})]
    addresses = [f"p{i}" for i in form.moved]
    if form.asked:
        body.append(
            f"launch_with(launch, ({', '.join(addresses)},), ({', '.join(f'source{i}' for i in range(form.asked))},))"
        )
    else:
        body.append(f"launch({', '.join(addresses)})")
    body.append(f"return {', '.join(f't{i}' for i in range(form.tensors - form.outputs, form.tensors))},")
    lines += [f"        {line}" for line in body] + ["    return replay"]
    scope: dict[str, Any] = {"empty_like": torch.empty_like, "launch_with": _launch_with}
    exec("\n".join(lines), scope)
    make: Callable[..., Replay] = scope["make"]
    return make


def _launch_with(launch: Callable[..., None], addresses: Sequence[int], sources: Sequence[Source]) -> None:
    """Launch with memory taken for it, which is never used again if the launch fails."""
    taken = [(*take(), discard) for take, discard in sources]
    try:
        launch(*addresses, *[memory.data_ptr() for memory, _, _ in taken])
    except BaseException:
        for _, key, discard in taken:
            discard(key)
        raise
