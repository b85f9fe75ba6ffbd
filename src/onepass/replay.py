"""A launch remembered: what a call on a GPU came to, so that the next one like it need not find out again.

Of two calls whose tensors agree in dtype, shape, strides, device and alignment, and whose options are equal, everything
but the addresses is the same: the kernel, the grid, every number that is passed. So the first such call is recorded, and
those after it check nothing, allocate the same outputs and launch the same kernel on other addresses.

Only what is sure to be the same is recorded: one launch, whose every address is that of one argument or output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

Launch = tuple[Any, int, Sequence[Any]]
"""A launcher, its grid and its arguments."""


tapes: dict[int, list[Launch]] = {}
"""For each thread whose call is being recorded, what it launched; most of the time empty, which is quick to ask."""


def note(launcher: Any, grid: int, arguments: Sequence[Any]) -> None:
    """Write a launch down, if it is one of a call that is being recorded."""
    tape = tapes.get(get_ident())
    if tape is not None:
        tape.append((launcher, grid, arguments))


Replay = Callable[..., tuple[Tensor | None, ...]]
"""``replay(*tensors of the call, None where there is none)``: allocate, launch, return the outputs."""


def record(run: Callable[[], None], inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> Replay | None:
    """Run a call and return what repeats it, or None where that cannot be told from what was launched."""
    thread = get_ident()
    launches: list[Launch] = []
    try:
        tapes[thread] = launches
        run()
    finally:
        tapes.pop(thread, None)
    if len(launches) != 1:
        return None
    launcher, grid, arguments = launches[0]
    return _replay(launcher, grid, arguments, inputs, outputs)


def _replay(
    launcher: Any,
    grid: int,
    arguments: Sequence[Any],
    inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
) -> Replay | None:
    owners: dict[int, int] = {}
    for index, tensor in enumerate((*inputs, *outputs)):
        if tensor is None:
            continue
        if tensor.data_ptr() in owners or not tensor.numel():
            return None  # two names for one address: another call may have two addresses
        owners[tensor.data_ptr()] = index
    addresses = launcher.addresses
    places = [(place, owners.get(arguments[place])) for place in addresses if arguments[place] is not None]
    if any(owner is None for _, owner in places):
        return None  # scratch memory, a counter
    makers = [_maker(inputs, out) for out in outputs]
    template = list(arguments)
    count = len(inputs)
    from_inputs = [(place, owner) for place, owner in places if owner is not None and owner < count]
    from_outputs = [(place, owner - count) for place, owner in places if owner is not None and owner >= count]

    def replay(*tensors: Any) -> tuple[Tensor | None, ...]:
        made = [None if maker is None else maker(tensors) for maker in makers]
        arguments = template.copy()
        for place, index in from_inputs:
            arguments[place] = tensors[index].data_ptr()
        for place, index in from_outputs:
            arguments[place] = made[index].data_ptr()  # type: ignore[union-attr]
        launcher(grid, arguments)
        return tuple(made)

    return replay


def _maker(inputs: Sequence[Tensor | None], out: Tensor | None) -> Callable[[Sequence[Any]], Tensor] | None:
    """What allocates a tensor like ``out``: like an input where one has its shape and strides, which is cheapest."""
    if out is None:
        return None
    shape, strides, dtype, device = out.shape, out.stride(), out.dtype, out.device
    for index, tensor in enumerate(inputs):
        if tensor is not None and tensor.shape == shape and tensor.stride() == strides and tensor.is_contiguous():
            if tensor.dtype == dtype:
                return lambda tensors: torch.empty_like(tensors[index])
            return lambda tensors: torch.empty_like(tensors[index], dtype=dtype)
    return lambda tensors: torch.empty_strided(shape, strides, dtype=dtype, device=device)
