"""What is measured: an op at a shape, its inputs, and the same computation in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from onepass.formats import E4M3FN

Call = Callable[[], object]
Stream = Literal["copy", "halve", "read"]
"""The memory stream that a workload is compared with: it writes what it reads, half of it, or nothing."""
DECODE = 128
"""Shapes with up to this many rows count as decode, others as prefill."""
EPS, GROUP = 1e-6, 128


@dataclass(frozen=True)
class Problem:
    """One set of inputs. Peers unpack ``arguments`` by op; ``ours`` maps names to calls, the op itself ("onepass") first."""

    op: str
    ours: Mapping[str, Call]
    composed: Callable[..., object]
    """The op as a user would write it in torch, called with ``arguments``."""
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Workload:
    """An op at a shape: ``make`` makes a set of inputs on a device, ``bytes`` is what an ideal kernel moves."""

    op: str
    shape: tuple[int, ...]
    bytes: int
    make: Callable[[str], Problem]
    stream: Stream = "copy"
    about: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    cold: bool = False
    """Inputs rotate through more than a cache holds, however many sets that takes (a GEMV's weights)."""
    many: Callable[[str, int], list[Problem]] | None = None
    """Makes several sets of inputs at once, where workloads share some of them. It is used instead of ``make``."""
    reads: int = 0
    """Bytes of the stream that this is compared with, if not ``bytes``. Workloads with the same number share its time."""
    sets: int = 0
    """How many sets of inputs rotate. 0 means as many as exceed a cache."""
    slow: bool = True
    """Whether peers that take long to prepare are measured too."""

    @property
    def checked(self) -> tuple[str, ...]:
        """Ops whose checks must pass; by default the op itself."""
        return self.needs or (self.op,)

    @property
    def where(self) -> str:
        """The op, the shape and what belongs to it: ``linear, fp8 1x4096x4096, fp8 rows``."""
        more = f", {self.about['with']}" if "with" in self.about else ""
        return f"{self.op} {'x'.join(map(str, self.shape))}{more}"

    def problems(self, device: str, sets: int) -> list[Problem]:
        """Sets of inputs."""
        return self.many(device, sets) if self.many else [self.make(device) for _ in range(sets)]


@dataclass(frozen=True)
class Family:
    """Ops that share a module: their shapes by op and device, and the workloads of a shape (none where it does not fit).

    ``form`` says in words which shapes fit.
    """

    name: str
    ops: tuple[str, ...]
    shapes: Mapping[tuple[str, str], Sequence[tuple[int, ...]]]
    workloads: Callable[[str, tuple[int, ...]], list[Workload]]
    form: str


def wanted(shapes: str, m: int) -> bool:
    """Whether M rows belong to ``decode``, ``prefill`` or ``all``."""
    return shapes == "all" or (shapes == "decode") == (m <= DECODE)


def parse_shapes(text: str) -> list[tuple[int, ...]] | None:
    """``64x4096,1x2112x7168`` as tuples; None for the words decode, prefill and all.

    >>> parse_shapes("64x4096, 1x2112x7168"), parse_shapes("decode")
    ([(64, 4096), (1, 2112, 7168)], None)
    """
    if text in ("decode", "prefill", "all"):
        return None
    found = []
    for word in text.split(","):
        try:
            found.append(tuple(int(number) for number in word.strip().lower().split("x")))
        except ValueError:
            found.append(())
        if len(found[-1]) < 2 or min(found[-1]) < 1:
            raise ValueError(f"{word.strip()!r} is neither decode, prefill, all nor a shape like 64x4096")
    return found


def randoms(device: str, *sizes: Sequence[int]) -> list[Tensor]:
    """Random bfloat16 tensors."""
    return [torch.randn(*size, device=device, dtype=torch.bfloat16) for size in sizes]


def metas(*sizes: Sequence[int]) -> list[Tensor]:
    """bfloat16 tensors without memory, to count bytes."""
    return [torch.empty(*size, device="meta", dtype=torch.bfloat16) for size in sizes]


# --- what torch code of several ops consists of ---------------------------------------------------------------------


def normed(x: Tensor, gamma: Tensor, eps: float = EPS) -> Tensor:
    """The norm in float32, as a user would write it in torch."""
    h = x.float()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * gamma.float()


def quantized(y: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 codes and one scale per row."""
    scale = y.abs().amax(-1, keepdim=True) / E4M3FN.max
    return (y / scale).clamp(-E4M3FN.max, E4M3FN.max).to(E4M3FN.dtype), scale


def grouped(y: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 codes and one scale per `GROUP` columns."""
    codes, scale = quantized(y.unflatten(-1, (-1, GROUP)))
    return codes.flatten(-2), scale.squeeze(-1)


def moved_bytes(tensors: Sequence[Tensor | None]) -> int:
    """Bytes that an ideal kernel moves: every input is read once and every output written once."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
