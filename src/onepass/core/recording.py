"""What a call launches, noted while it is recorded, and the plan by which C repeats it.

If two calls have equal options, and tensors of the same dtype, shape, strides, device and alignment,
then everything but the addresses is the same: the kernel, the grid, every number that is passed. A
backend notes each launch (`note`). Memory that belongs to none of the call's tensors has an owner, which
knows how to take it again (`mark`).

A `plan` says which outputs to allocate and how, which further memory to take, and for every launch its
arguments as 64-bit words, with the places of those that are addresses. An address is that of a tensor of
the call plus a distance, because all shapes and strides are the same when the call is repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from .memory import extent

Event: Any = torch._C._profiler._RecordFunctionFast
"""``with Event(name, tensors)``: an event of torch's profiler."""


class Step(NamedTuple):
    """One launch. ``words`` are its arguments; ``places`` maps indices of recorded arguments to words."""

    cuda: bool
    head: tuple[Any, ...]
    """CPU: addresses of ``serial``, ``prepare``, ``parallel`` and the team's function, the number of threads, bytes of
    scratch memory. CUDA: function, programs, threads, shared memory, whether it is a dependent launch, device."""
    words: bytes
    places: Mapping[int, int] | None
    """None: the same indices."""
    scratch: int = 0
    """The address of the scratch memory that the recorded launch used."""


class Launcher(Protocol):
    """A loaded kernel."""

    @property
    def addresses(self) -> Sequence[int]:
        """The indices of the arguments that are addresses."""

    def step(self, grid: int, arguments: Sequence[Any], /) -> Step | None:
        """The launch as C makes it; None if C cannot."""


Launch = tuple[Launcher | None, int, Sequence[Any]]
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


class Tape(threading.local):
    """The launches of the call that this thread is recording."""

    on = False

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.sources: dict[int, Source] = {}


tape: Final = Tape()


class Switch:
    """Whether calls are recorded and repeated: not while something other than a backend receives the launches."""

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


def note(launcher: Launcher | None, grid: int, arguments: Sequence[Any]) -> None:
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


# --- plans -----------------------------------------------------------------------------------------------------------

RELEASE: Final = 32768
"""Elements from which a call on a CPU releases the interpreter's lock: it then takes about 5 us, releasing 0.1 us."""
MAX_LAUNCHES: Final = 16
MAX_SOURCES: Final = 4
MAX_WORDS: Final = 256
"""Limits of `csrc/native.h`."""
MAX_SHARED: Final = 1 << 20
"""Bytes of temporary memory that a stream keeps."""
_GUARDS: Final = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_FUNCTIONS: Final = {
    kind: function
    for kind in ("cpu", "cuda")
    if (function := getattr(_GUARDS, f"_empty_strided_{kind}", None)) is not None
}
"""Functions of size, strides and dtype that allocate on a kind of device."""


def plan(
    launches: Sequence[Launch],
    sources: Mapping[int, Source],
    before: Sequence[Any],
    after: Sequence[Any],
    models: Mapping[int, int],
) -> tuple[Any, ...] | None:
    """The plan of a call with these launches, or None if it cannot be repeated.

    For the other arguments see `onepass.core.native.remember`.
    """
    if not 0 < len(launches) <= MAX_LAUNCHES:
        return None
    tensors = [(i, *extent(t)) for i, t in enumerate(after) if isinstance(t, Tensor) and t.numel()]
    asked: dict[int, int] = {}
    steps: list[tuple[Any, ...]] = []
    patched: list[tuple[Step, list[tuple[int, int, int]]]] = []
    for launcher, grid, arguments in launches:
        if launcher is None or (step := launcher.step(grid, arguments)) is None or len(step.words) > 8 * MAX_WORDS:
            return None
        patches: list[tuple[int, int, int]] = []
        for index in launcher.addresses:
            address = arguments[index]
            if not address:
                continue
            word = index if step.places is None else step.places[index]
            base = _base(address, tensors)
            if base is not None:
                patches.append((word, *base))
            elif address in sources:
                patches.append((word, -2 - asked.setdefault(address, len(asked)), 0))
            elif address == step.scratch:
                patches.append((word, -1, 0))
            else:
                return None
        patched.append((step, patches))
    if len(asked) > MAX_SOURCES:
        return None
    first = len(after)
    for step, patches in patched:
        placed = tuple(
            (word, base if base >= 0 else first + (len(asked) if base == -1 else -2 - base), offset)
            for word, base, offset in patches
        )
        steps.append((step.cuda, step.head, step.words, placed))
    makes = tuple(
        _make(i, t, after, models) for i, t in enumerate(after) if isinstance(t, Tensor) and before[i] is None
    )
    elements = sum(t.numel() for t in after if isinstance(t, Tensor))
    kept = tuple(launcher for launcher, _, _ in launches)
    temporaries = sum(sources[address].template is not None for address in asked)
    taken = tuple(_source(sources[address], temporaries, len(launches)) for address in asked)
    return makes, tuple(steps), taken, elements >= RELEASE, kept


def _base(address: int, tensors: Sequence[tuple[int, int, int]]) -> tuple[int, int] | None:
    """The tensor that an address belongs to, and the distance from its start. One that starts there is preferred."""
    for index, start, _ in tensors:
        if address == start:
            return index, 0
    for index, start, end in tensors:
        if start < address < end:
            return index, address - start
    return None


def _source(source: Source, temporaries: int, launches: int) -> tuple[Any, ...]:
    """Memory that one launch alone uses can be shared by all calls on a stream: another thread's launches cannot come between."""
    if source.template is None:
        return source.take, source.discard, (), source.per_stream, 0
    function, arguments = _allocation(source.template)
    size = source.template.nbytes
    shared = size if temporaries == launches == 1 and size <= MAX_SHARED else 0
    return function, None, arguments, False, shared


def _make(index: int, out: Tensor, after: Sequence[Any], models: Mapping[int, int]) -> tuple[Any, ...]:
    """How to allocate an output: with the shape and strides that validation gave it.

    Strides of dimensions of size 1 follow those of the output's model. If these are not the usual ones, they may be
    others at the next call.
    """
    model = models.get(index, -1)
    if model >= 0 and after[model].is_contiguous() and after[model].stride() != _natural(after[model]):
        same = after[model].dtype == out.dtype
        return index, model, torch.empty_like, (), None if same else {"dtype": out.dtype}
    return index, -1, *_allocation(out), None


def _allocation(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """A function and arguments that allocate a tensor like this one on the current device.

    torch's compiler has the fastest ones, which skip the dispatcher. Otherwise a template without memory serves.
    """
    size, strides = tuple(tensor.shape), tensor.stride()
    function = _FUNCTIONS.get(tensor.device.type)
    if function is not None:
        try:
            twin = function(size, strides, tensor.dtype)
            if (twin.shape, twin.stride(), twin.dtype, twin.device) == (size, strides, tensor.dtype, tensor.device):
                return function, (size, strides, tensor.dtype)
        except (RuntimeError, TypeError):  # another torch
            pass
    return torch.empty_like, (like(tensor),)


def _natural(tensor: Tensor) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
