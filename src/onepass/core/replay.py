"""Remembers the launch of a call on a GPU, so that the next call like it need not prepare it again.

If two calls have equal options, and tensors of the same dtype, shape, strides, device and alignment,
then everything but the addresses is the same: the kernel, the grid, every number that is passed. The
first such call is recorded. Later ones only check that the tensors they write overlap others exactly
where the recorded ones did, allocate the same outputs and launch the same kernel on other addresses.

A call is recorded only if that is certain: it made one launch, and each of its addresses belongs to
an argument, an output, or memory whose owner knows how to allocate it again (`mark`). A call is
replayed by straight-line code, generated once for all calls of the same form.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import count
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .check import run_source
from .memory import extent

Event: Any = torch._C._profiler._RecordFunctionFast
"""``with Event(name, tensors)``: an event of torch's profiler."""
Launch = tuple[Any, int, Sequence[Any]]
"""A launcher, its grid and its arguments."""


class Source(NamedTuple):
    """``take() -> memory, key`` for a launch, and ``discard(key)`` in case the launch fails.

    Memory that nobody reads after the launch is like ``template``, which holds no memory. With ``per_stream`` all launches
    on a stream that are not captured get the same memory, until it is discarded or `onepass.core.native.forget`.
    """

    take: Callable[[], tuple[Tensor, Any]]
    discard: Callable[[Any], None]
    template: Tensor | None = None
    per_stream: bool = False


Replay = Callable[..., tuple[Tensor | None, ...] | None]
"""``replay(*tensors of the call or None)``: allocate, launch and return the outputs; None if nothing was done."""


class Tape(threading.local):
    """The launches of the call that this thread is recording."""

    on = False

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.sources: dict[int, Source] = {}


tape: Final = Tape()
_forms: Final = count(1)


class Switch:
    """Whether calls are recorded and replayed: not while something other than a backend receives the launches."""

    def __init__(self) -> None:
        self._on = True
        self.listeners: list[Callable[[bool], object]] = []

    @property
    def on(self) -> bool:
        """Whether it is on."""
        return self._on

    @on.setter
    def on(self, value: bool) -> None:
        self._on = value
        for listener in self.listeners:
            listener(value)


switch: Final = Switch()


def note(launcher: Any, grid: int, arguments: Sequence[Any]) -> None:
    """Record a launch; one without a launcher cannot be repeated."""
    tape.launches.append((launcher, grid, arguments))


def mark(address: int, source: Source) -> None:
    """Register the source of memory at ``address``, which belongs to none of the call's tensors."""
    if tape.on:
        tape.sources[address] = source


def temporary(tensor: Tensor) -> None:
    """Register memory that launches write and read, and nobody afterwards."""
    if tape.on:
        template = like(tensor)
        tape.sources[tensor.data_ptr()] = Source(lambda: (torch.empty_like(template), None), lambda key: None, template)


def like(tensor: Tensor) -> Tensor:
    """A tensor of the same dtype, shape, strides and device without memory, for `torch.empty_like`."""
    template = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    template.untyped_storage().resize_(0)
    return template


def traced(run: Callable[[], None]) -> tuple[list[Launch], dict[int, Source]]:
    """Run a call and return its launches, and the sources of the memory that it marked."""
    tape.launches, tape.sources, tape.on = [], {}, True
    try:
        run()
        return tape.launches, tape.sources
    finally:
        tape.launches, tape.sources, tape.on = [], {}, False


def record(
    run: Callable[[], None],
    before: Sequence[Tensor | None],
    after: Sequence[Tensor | None],
    written: Sequence[int],
    outputs: int,
) -> Replay | None:
    """Run a call and return a function that repeats it, or None if its launches do not allow that.

    ``before`` are the caller's tensors, outputs last. ``after`` are the same, with allocated outputs
    in place of None. ``written`` are the indices of the tensors that the kernel writes.
    """
    launches, sources = traced(run)
    if len(launches) != 1:
        return None
    launcher, grid, arguments = launches[0]
    if launcher is None:
        return None
    owners = {t.data_ptr(): i for i, t in enumerate(after) if t is not None and t.numel()}
    moved: list[tuple[int, int]] = []
    asked: list[tuple[int, Source]] = []
    for index in launcher.addresses:
        address = arguments[index]
        if address in owners:
            moved.append((index, owners[address]))
        elif address in sources:
            asked.append((index, sources[address]))
        elif address:
            return None
    given = [(i, t) for i, t in enumerate(before) if t is not None and t.numel()]
    apart, fixed = _relations(given, written)
    made = [(i, *_like(given, t)) for i, t in enumerate(after) if t is not None and before[i] is None]
    form = _Form(
        len(before),
        tuple(pair for pair, _ in fixed),
        tuple(pair for pair, _ in apart),
        tuple((index, model, same) for index, model, same, _ in made),
        tuple(index for _, index in moved),
        len(asked),
        outputs,
    )
    return _writer(form)(
        launcher.prepare(grid, arguments, [index for index, _ in (*moved, *asked)]),
        [distance for _, distance in fixed],
        [size for _, sizes in apart for size in sizes],
        [make for *_, make in made],
        [source for _, source in asked],
    )


def _relations(
    given: Sequence[tuple[int, Tensor]], written: Sequence[int]
) -> tuple[list[tuple[tuple[int, int], tuple[int, int]]], list[tuple[tuple[int, int], int]]]:
    """Which tensors must not overlap (with their sizes in bytes), and which must be at a fixed distance.

    If these hold, the validation of the first call applies too. Tensors that overlap a written
    one, as slices of one parent or as the same tensor, must do so at the same distance.
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
    """How to allocate a tensor like ``out``: like the tensor at an index (same dtype, or the one given), or by a function (-1)."""
    shape, strides, dtype, device = out.shape, out.stride(), out.dtype, out.device
    for index, tensor in given:
        if tensor.shape == shape and tensor.stride() == strides and tensor.is_contiguous() and tensor.device == device:
            return index, tensor.dtype == dtype, dtype
    return -1, False, lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)


class _Form(NamedTuple):
    """What the code of a replay depends on: number of tensors, relations, and which outputs are allocated and how."""

    tensors: int
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
    counts = {"distance": len(form.fixed), "size": 2 * len(form.apart), "maker": len(form.made), "source": form.asked}
    for name, size in counts.items():
        if size:
            lines.append(f"    {_numbered(name, range(size))}, = {name}s")
    lines.append(f"    def replay({_numbered('t', range(form.tensors))}):")
    made = {index for index, _, _ in form.made}
    pairs = [i for pair in (*form.fixed, *form.apart) for i in pair]
    body = [f"p{i} = t{i}.data_ptr()" for i in sorted({*pairs, *form.moved} - made)]
    for i, (a, b) in enumerate(form.fixed):
        body.append(f"if p{b} - p{a} != distance{i}: return None")
    for i, (a, b) in enumerate(form.apart):
        body.append(f"if -size{2 * i + 1} < p{b} - p{a} < size{2 * i}: return None")
    for i, (index, model, same) in enumerate(form.made):
        like = f"empty_like(t{model})" if same else f"empty_like(t{model}, dtype=maker{i})"
        body.append(f"t{index} = {like if model >= 0 else f'maker{i}()'}")
    body += [f"p{i} = t{i}.data_ptr()" for i in sorted(made & {*form.moved})]
    addresses = _numbered("p", form.moved)
    sources = _numbered("source", range(form.asked))
    body.append(f"launch_with(launch, ({addresses},), ({sources},))" if form.asked else f"launch({addresses})")
    body.append(f"return {_numbered('t', range(form.tensors - form.outputs, form.tensors))},")
    lines += [f"        {line}" for line in body] + ["    return replay"]
    scope: dict[str, Any] = {"empty_like": torch.empty_like, "launch_with": _launch_with}
    run_source("\n".join(lines) + "\n", f"replay {next(_forms)}", scope)
    make: Callable[..., Replay] = scope["make"]
    return make


def _numbered(name: str, numbers: Iterable[int]) -> str:
    return ", ".join(f"{name}{i}" for i in numbers)


def _launch_with(launch: Callable[..., None], addresses: Sequence[int], sources: Sequence[Source]) -> None:
    """Launch with memory taken for it, which is discarded if the launch fails."""
    taken = [(*source.take(), source.discard) for source in sources]
    try:
        launch(*addresses, *[memory.data_ptr() for memory, _, _ in taken])
    except BaseException:
        for _, key, discard in taken:
            discard(key)
        raise
