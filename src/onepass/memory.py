"""Which tensors share memory: outputs may be an input itself, and otherwise must lie apart."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .errors import ContractError


def check_outputs(op: str, inputs: Mapping[str, object], outputs: Mapping[str, Tensor | None]) -> None:
    """Refuse outputs that overlap themselves, one another, or an input other than exactly.

    An output may be an input itself (same memory, dtype, shape and strides): kernels read an element before they
    write it.
    """
    given = [(name, t) for name, t in outputs.items() if t is not None and t.numel()]
    for index, (name, out) in enumerate(given):
        if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
            raise ContractError(f"{op}: `{name}` must not overlap itself, got strides {list(out.stride())}")
        for other, tensor in given[:index]:
            if _overlap(out, tensor):
                raise ContractError(f"{op}: `{name}` must not overlap `{other}`, got memory they share")
        for other, source in inputs.items():
            if isinstance(source, Tensor) and _overlap(out, source) and not _same(out, source):
                raise ContractError(f"{op}: `{name}` must not overlap `{other}` unless it is that very tensor, got memory they share")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def _extent(t: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share a byte; column slices of one parent are told apart."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    (a_start, a_end), (b_start, b_end) = _extent(a), _extent(b)
    if a_end <= b_start or b_end <= a_start:
        return False
    if a.dim() > 1 and b.dim() > 1:
        steps = {s * t.element_size() for t in (a, b) for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1}
        period = min(steps, default=0)
        if period and all(s % period == 0 for s in steps):
            offset = (b_start - a_start) % period
            widths = [t.shape[-1] * t.element_size() for t in (a, b)]
            if all(t.stride(-1) == 1 for t in (a, b)) and offset >= widths[0] and offset + widths[1] <= period:
                return False
    return True
