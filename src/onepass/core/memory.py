"""Detects tensors that share memory: an output may be an input itself but must not overlap otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import ContractError


def may_write(tensors: Sequence[Tensor]) -> bool:
    """Whether these may be written here: tensors of inference mode only there, because autograd does not see them change."""
    return torch.is_inference_mode_enabled() or not any(t.is_inference() for t in tensors)


def lie_apart(read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    """Whether no element of a written tensor shares memory with any other element: a fast test for the common case.

    False if first and last addresses do not suffice to decide.
    """
    taken: list[tuple[int, int]] = []
    for tensor in written:
        if not tensor.is_contiguous() and _overlaps_itself(tensor):
            return False
        start, stop = extent(tensor)
        for first, last in taken:
            if start < last and first < stop:
                return False
        taken.append((start, stop))
    for tensor in read:
        start, stop = extent(tensor)
        for first, last in taken:
            if start < last and first < stop:
                return False
    return True


def check_outputs(
    op: str,
    inputs: Sequence[tuple[str, Tensor]],
    outputs: Sequence[tuple[str, Tensor]],
    replaces: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Reject outputs that overlap themselves, one another, or part of an input.

    An output may be an input itself (same memory, dtype, shape and strides) if kernels read an element
    before they write it: any input, or those that ``replaces`` lists for it.
    """
    taken = [(*extent(t), False, name, t) for name, t in inputs]
    for name, out in outputs:
        start, end = extent(out)
        if not out.is_contiguous() and _overlaps_itself(out):
            raise ContractError(f"{op}: `{name}` must not overlap itself, got strides {list(out.stride())}")
        for other_start, other_end, written, other_name, other in taken:
            meet = start < other_end and other_start < end and out.device == other.device
            may_be = not written and (replaces is None or other_name in replaces.get(name, ()))
            if meet and _overlap(out, other) and not (may_be and _same(out, other)):
                unless = " unless it is the same tensor" if may_be else ""
                raise ContractError(
                    f"{op}: `{name}` must not overlap `{other_name}`{unless}, got tensors that share memory"
                )
        taken.append((start, end, True, name, out))


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same elements in the same places. Strides of dimensions of size 1 do not matter."""
    if a.data_ptr() != b.data_ptr() or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return all(m == n for m, n, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1)


def _overlaps_itself(t: Tensor) -> bool:
    """Whether two elements may share an address: not if each stride exceeds what the smaller ones span."""
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def extent(t: Tensor) -> tuple[int, int]:
    """The first address and the one after the last; equal if there are no elements."""
    start = t.data_ptr()
    if t.is_contiguous() or not t.numel():
        return start, start + t.nbytes
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose extents overlap may share a byte. Slices of one parent do not.

    They are apart if they occupy different parts of every period, for some stride as the period: all larger strides
    are multiples of it, and the smaller ones stay within a part.
    """
    steps = [
        [(stride * t.element_size(), n) for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (a, b)
    ]
    strides = {step for one in steps for step, _ in one}
    for period in sorted(strides - {0}):
        if any(step > period and step % period for step in strides):
            continue
        first, second = (
            t.element_size() + sum((n - 1) * step for step, n in one if step < period)
            for t, one in zip((a, b), steps, strict=True)
        )
        offset = (b.data_ptr() - a.data_ptr()) % period
        if offset >= first and offset + second <= period:
            return False
    return True
