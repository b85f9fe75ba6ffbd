"""Memory safety on the CPU: run the cases with every tensor between inaccessible pages: ``python -m tools.fence``.

Memory ends exactly where such a page begins and, in a second run, begins exactly where one ends: a kernel that reads or
writes one byte outside kills the process. Scratch memory is fenced too. In a third run, for some cases, memory begins at
an odd address. Inputs, and gaps between the rows of outputs, must keep their bytes. Each case is printed before it runs.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import math
import mmap
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from torch import Tensor

from onepass.ops.gemv_norm.op import gemv_and_partial_norm_with_scratch, gemv_trace_blocks
from onepass.ops.rms_norm.cpu import scratch
from onepass.testing.tensors import same_bytes
from onepass.trace import GmemTrace, NullTrace
from tests.gemv_norm import checks as gemv_norm
from tests.linear import checks as linear
from tests.matrix import select
from tests.mla_cache import checks as mla_cache
from tests.oracle.case import Check
from tests.oracle.runner import MODULES
from tests.qk_cache import checks as qk_cache
from tests.qk_norm import checks as qk_norm
from tests.rms_norm import checks as rms_norm

Edge = Literal["end", "start", "odd"]
PAGE: Final = mmap.PAGESIZE
POISON: Final = 0xA5
GAP: Final = 5
"""Elements between the rows of outputs."""
ODD: Final = ("dtypes", "layouts", "values", "fp8 weights", "int8 weights", "block scales", "fp8 output", "scales")
"""Groups that also run at odd addresses."""

_libc = ctypes.CDLL(None, use_errno=True)


def fenced(size: int, edge: Edge) -> Tensor:
    """Poisoned bytes between two inaccessible pages; the mapping lives as long as the tensor's memory."""
    if not size:
        return torch.zeros(0, dtype=torch.uint8)  # torch.empty may be fenced itself
    pages = -(-(size + 1) // PAGE) if edge == "odd" else -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + (pages + 1) * PAGE):
        if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = {"end": (pages + 1) * PAGE - size, "start": PAGE, "odd": PAGE + 1}[edge]
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset).fill_(POISON)


def _reach(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage from a tensor's first element to the end of its last."""
    begin = int(tensor.storage_offset())
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    return begin * tensor.element_size(), (begin + last + 1) * tensor.element_size()


class Place:
    """Fenced copies of tensors, which keep shared memory shared, and their bytes before a call."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.memory: list[tuple[Tensor, Tensor]] = []

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """The same arguments in fenced memory."""
        groups: dict[int, list[Tensor]] = {}
        for value in given.values():
            for t in value if isinstance(value, list) else [value]:
                if isinstance(t, Tensor):
                    groups.setdefault(t.untyped_storage().data_ptr(), []).append(t)
        copies: dict[int, Tensor] = {}
        for group in groups.values():
            copies |= self._together(group)
        return {
            name: [copies[id(t)] for t in value]
            if isinstance(value, list)
            else copies[id(value)]
            if isinstance(value, Tensor)
            else value
            for name, value in given.items()
        }

    def _together(self, tensors: list[Tensor]) -> dict[int, Tensor]:
        begin = min(_reach(t)[0] for t in tensors)
        end = max(begin, *(_reach(t)[1] for t in tensors))
        memory = fenced(end - begin, self.edge)
        whole = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
        memory.copy_(whole[begin:end])
        self.memory.append((memory, memory.clone()))
        return {id(t): _view(memory, t.dtype, (_reach(t)[0] - begin) // t.element_size(), t) for t in tensors}

    def output(self, like: Tensor, gaps: bool = True) -> Tensor:
        """Memory for such a result, with ``GAP`` elements between rows if it is contiguous and may have ``gaps``."""
        if gaps and like.dim() > 1 and like.is_contiguous() and like.numel():
            like = torch.empty(*like.shape[:-1], like.shape[-1] + GAP, dtype=like.dtype)[..., : like.shape[-1]]
        memory = fenced(_reach(like)[1], self.edge)
        self.memory.append((memory, memory.clone()))
        return _view(memory, like.dtype, 0, like)

    def written_beside(self, outputs: list[Tensor]) -> int:
        """The number of changed bytes that belong to none of these."""
        count = 0
        for memory, before in self.memory:
            changed = memory != before
            for out in outputs:
                if out.numel() and out.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
                    flags = _view(changed.view(torch.uint8), out.dtype, int(out.storage_offset()), out)
                    flags.unsqueeze(-1).view(torch.uint8).zero_()
            count += int(changed.sum())
        return count


def _view(memory: Tensor, dtype: torch.dtype, offset: int, like: Tensor) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, like.shape, like.stride())


@contextmanager
def fenced_scratch(edge: Edge) -> Iterator[None]:
    """Fence what kernels and launches allocate; the rows' scratch begins at a cache line."""
    empty, held = torch.empty, []

    def fenced_empty(*size: int, dtype: torch.dtype = torch.float32, device: object = "cpu") -> Tensor:
        return fenced(math.prod(size) * dtype.itemsize, edge).view(dtype).view(size)

    def grow(size: int) -> None:
        held.append(fenced((4 * size + 63) // 64 * 64, "end" if edge == "odd" else edge))
        scratch.address, scratch.size = held[-1].data_ptr(), size

    scratch.size, scratch.grow = 0, grow  # type: ignore[method-assign]
    torch.empty = fenced_empty  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = empty
        del scratch.grow
        scratch.size = 0


# --- one case -------------------------------------------------------------------------------------------------------


def run_fenced(case: Any, edge: Edge) -> str | None:
    """Run a case in fenced memory; None, or what is wrong. Touching the fence ends the process."""
    module = MODULES[case.op]
    arguments = module.inputs(case, "cpu")
    expected = module.call(case, arguments)
    place = Place(edge)
    given = place.arguments(arguments)
    if module in (mla_cache, qk_cache):
        with fenced_scratch(edge):
            got = module.call_with(case, given)
        wrong = module.verify(case, arguments, got)
        if wrong is not None:
            return str(wrong)
        outputs = list(got)
    else:
        outputs, got = _call_into(case, place, given, expected)
    tiled = _tiled_scale(case)
    if tiled is not None and (wrong := module.verify(case, arguments, got)) is not None:
        return str(wrong)
    for index, (first, second) in enumerate(zip(expected, got, strict=True)):
        if index == tiled:  # rows that fill a tile are not written
            continue
        if not same_bytes(first, second):
            return f"result {index} differs in fenced memory"
    spilt = place.written_beside(outputs)
    return f"{spilt} bytes beside the outputs were written" if spilt else None


def _tiled_scale(case: Any) -> int | None:
    """The index of scales in tiles of 128 x 4 among a case's results."""
    tiled = MODULES[case.op] is rms_norm and case.options.get("scale_layout") == "128x4"
    return rms_norm.result_names(case).index("scale_out") if tiled else None


def _call_into(
    case: Any, place: Place, given: dict[str, Any], expected: tuple[Tensor, ...]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Call with fenced outputs: all that was written, and the results."""
    tiled = _tiled_scale(case)
    outs = [place.output(t, gaps=index != tiled) for index, t in enumerate(expected)]
    module = MODULES[case.op]
    if module is qk_norm:
        with fenced_scratch(place.edge):
            return outs, module.call(case, given, tuple(outs))
    if module is rms_norm:
        static = "static_scale" in given
        named = dict(zip(rms_norm.result_names(case), outs, strict=True))
        if static:
            del named[rms_norm.SCALE_NAMES[case.op]]
        with fenced_scratch(place.edge):
            return outs, rms_norm.call(case, {**given, **named})
    if module is linear:
        with fenced_scratch(place.edge):
            return outs, linear.call_into(given, tuple(outs))
    assert module is gemv_norm
    if not case.fused:
        with fenced_scratch(place.edge):
            gemv_norm.call_two_launches(given, outs[0], outs[1])
        return outs, tuple(outs)
    return _call_gemv(case, place, given, outs)


def _call_gemv(
    case: Any, place: Place, given: dict[str, Any], outs: list[Tensor]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    rest = list(outs)
    normed, unnormed = rest.pop(0), rest.pop()
    scale = rest.pop(0) if case.codes is not None else None
    segments = given.get("segments", [])
    counter = place.arguments({"counter": torch.zeros(len(case.widths), dtype=torch.int32)})["counter"]
    trace: GmemTrace | NullTrace = NullTrace()
    traces: list[Tensor] = []
    if case.traced:
        blocks = gemv_trace_blocks(given["act"], given["weight"], given["gamma"], segments)
        plain = GmemTrace.allocate(blocks, "cpu")
        kept = place.arguments({"buffer": plain.buffer, "units": plain.units})
        trace, traces = GmemTrace(**kept), list(kept.values())
    with fenced_scratch(place.edge):
        named = (given["act"], given["weight"], given["gamma"], 1e-6, counter, trace)
        more = {"segments": segments, "segment_outputs": rest, "weight_scale": given.get("weight_scale")}
        gemv_and_partial_norm_with_scratch(normed, unnormed, *named, scale_output=scale, **more)
    return [*outs, counter, *traces], tuple(outs)


# --- all of them ----------------------------------------------------------------------------------------------------


def fenced_cases(ops: list[str], match: str = "") -> list[Check]:
    """All but the largest, which differ from others only in size."""
    return [case for case in select(ops, match) if case.group != "large"]


def edges(case: Check) -> tuple[Edge, ...]:
    """Where a case's memory lies."""
    return ("end", "start", "odd") if case.group in ODD else ("end", "start")


def trespass(how: str) -> None:
    """Touch the byte after, before or inside fenced memory, as a faulty kernel would."""
    edge: Edge = "start" if how.endswith("before") else "end"
    memory = fenced(100, edge)
    at = memory.data_ptr() + {"before": -1, "after": 100, "inside": 99}[how.split()[1]]
    if how.startswith("read"):
        ctypes.string_at(at, 1)
    else:
        ctypes.memset(at, 0, 1)


def main() -> int:
    """Run the cases; the exit status is 1 if one fails, or that of a fault if a kernel leaves its memory."""
    parser = argparse.ArgumentParser(prog="python -m tools.fence", description=__doc__)
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--match", default="", help="run only cases whose name contains this")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trespass", help="'read after', 'write before', ...: touch the fence, to show that it kills")
    options = parser.parse_args()
    faulthandler.enable()
    if options.trespass:
        trespass(options.trespass)
        print("survived")
        return 0
    torch.set_num_threads(options.threads)
    start, runs, failed = time.perf_counter(), 0, 0
    with torch.inference_mode():
        for case in fenced_cases(options.op, options.match):
            for edge in edges(case):
                print(f"{case.op}, {edge}: {case.name}", flush=True)
                wrong = run_fenced(case, edge)
                runs += 1
                if wrong is not None:
                    failed += 1
                    print(f"FAILED {case.op}, {edge}: {case.name}: {wrong}", flush=True)
    print(f"{runs - failed} passed, {failed} failed in {time.perf_counter() - start:.1f} s")
    return 1 if failed or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
