"""``y = act @ weight.T`` and RMSNorm of its first columns, in one launch.

With ``y = (act @ weight.T) * weight_scale`` in float32 and columns cut into segments, one for each gamma and a tail::

    normed_i = (y_i * rs_i) * gamma_i          rs_i = 1 / sqrt(mean(y_i^2, -1) + eps)
    unnormed = the columns that are left

Everything is float32 until the one rounding of each stored value: the norm is that of the unrounded y. A first segment in
fp8 has a scale a row: ``scale = amax / fp8_max``, ``code = saturate((y * gamma) * (rs / scale))``.

Blocks each compute some columns of y; the last block of a segment to finish norms it. ``fused=False`` is the same in two
launches, where the norm reads y after it was rounded to act's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..contract.declaration import Contract, describe, short
from ..fastpath import replay
from ..fastpath.debug import debugging
from ..formats import FLOATS, FP8_FORMATS, SMALLEST_EPS
from ..specs.gemv_norm import GemvCall, GemvSpec, WeightScale, gemv_spec
from ..trace import GmemTrace, NullTrace, TraceBuf
from .dispatch import Launch
from .gemv_norm_contract import FURTHER, GEMV, GEMV_WITH_SCRATCH, blocks_of
from .gemv_norm_contract import PLAIN_GEMV as _PLAIN_GEMV
from .gemv_norm_contract import UNFUSED as _UNFUSED
from .gemv_norm_contract import UNFUSED_WITH_SCRATCH as _UNFUSED_WITH_SCRATCH
from .registration import Op, check_memory, plain
from .rms_norm import rms_norm

__all__ = [
    "GEMV",
    "GEMV_WITH_SCRATCH",
    "gemv_and_partial_norm",
    "gemv_and_partial_norm_unfused_with_scratch",
    "gemv_and_partial_norm_with_scratch",
    "gemv_trace_blocks",
]

_launch = Launch("gemv_norm")


def _run(
    spec: GemvSpec, act: Tensor, weight: Tensor, weight_scale: Tensor | None, gammas: list[Tensor], normed: list[Tensor],
    scale: Tensor | None, unnormed: Tensor, counter: Tensor | None, trace: Tensor | None, units: Tensor | None, eps: float,
) -> None:  # fmt: skip
    """One launch; none when there are no rows. The workspace holds each segment's y from a multiple of 16 columns on."""
    m = act.shape[0]
    if m == 0:
        return
    widths = tuple([g.shape[0] for g in gammas])
    room = sum([w + 15 & -16 for w in widths])
    y = None
    if room:
        workspace = partial(torch.empty, m, room, dtype=torch.float32, device=act.device)
        y = workspace()
        replay.mark(y.data_ptr(), (lambda: (workspace(), None), lambda key: None))
    eps = max(eps, SMALLEST_EPS)
    call = GemvCall(
        spec, widths, act, weight, weight_scale, gammas, y, normed, scale, unnormed, counter, trace, units, eps
    )
    _launch.on(act)(call)


def _spec(
    act: Tensor, weight: Tensor, weight_scale: Tensor | None, gammas: Sequence[Tensor], codes: torch.dtype | None, traced: bool
) -> GemvSpec:  # fmt: skip
    kind: WeightScale = "none" if weight_scale is None else "tensor" if weight_scale.shape[0] == 1 else "row"
    if kind == "tensor" and weight.shape[0] == 1:
        kind = "row"
    return gemv_spec(act.dtype, weight.dtype, kind, tuple([g.dtype for g in gammas]), codes, traced)


def _kernel(
    notes: dict[Any, Any], act: Tensor, weight: Tensor, gamma: Tensor, gamma1: Tensor | None, gamma2: Tensor | None,
    gamma3: Tensor | None, weight_scale: Tensor | None, eps: float, normed_dtype: torch.dtype | None, normed: Tensor,
    scale: Tensor | None, normed1: Tensor | None, normed2: Tensor | None, normed3: Tensor | None, unnormed: Tensor,
) -> None:  # fmt: skip
    gammas = [g for g in (gamma, gamma1, gamma2, gamma3) if g is not None]
    outs = [t for t in (normed, normed1, normed2, normed3) if t is not None]
    spec = _spec(act, weight, weight_scale, gammas, normed_dtype, False)
    _run(spec, act, weight, weight_scale, gammas, outs, scale, unnormed, None, None, None, eps)


def _scratch_kernel(
    notes: dict[Any, Any], act: Tensor, weight: Tensor, gamma: Tensor, gamma1: Tensor | None, gamma2: Tensor | None,
    gamma3: Tensor | None, weight_scale: Tensor | None, finish_counter: Tensor, trace: Tensor | None, units: Tensor | None, eps: float,
    normed_dtype: torch.dtype | None, normed: Tensor, scale: Tensor | None, normed1: Tensor | None, normed2: Tensor | None,
    normed3: Tensor | None, unnormed: Tensor,
) -> None:  # fmt: skip
    gammas = [g for g in (gamma, gamma1, gamma2, gamma3) if g is not None]
    outs = [t for t in (normed, normed1, normed2, normed3) if t is not None]
    if debugging():
        _check_counter(finish_counter, len(gammas))
    spec = _spec(act, weight, weight_scale, gammas, normed_dtype, trace is not None)
    _run(spec, act, weight, weight_scale, gammas, outs, scale, unnormed, finish_counter, trace, units, eps)


def _check_counter(counter: Tensor, segments: int) -> None:
    """Read the counter on the host, which waits for the device: for debugging only. What is captured runs later."""
    if not (counter.is_cuda and torch.cuda.is_current_stream_capturing()) and any(counter[:segments].tolist()):
        GEMV_WITH_SCRATCH.fail("finish_counter", "be zero when a call begins", str(counter[:segments].tolist()))


def _plain_kernel(notes: dict[Any, Any], act: Tensor, weight: Tensor, weight_scale: Tensor | None, y: Tensor) -> None:
    spec = _spec(act, weight, weight_scale, (), None, False)
    _run(spec, act, weight, weight_scale, [], [], None, y, None, None, None, 0.0)


_gemv = Op(GEMV, _kernel)
_with_scratch = Op(GEMV_WITH_SCRATCH, _scratch_kernel)
_plain = Op(_PLAIN_GEMV, _plain_kernel)


def gemv_and_partial_norm(
    act: Tensor,
    weight: Tensor,
    gamma: Tensor,
    eps: float = 1e-6,
    *,
    segments: Sequence[Tensor] = (),
    weight_scale: Tensor | None = None,
    normed_dtype: torch.dtype | None = None,
    fused: bool = True,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """``act @ weight.T`` with RMSNorm of its first columns, in one launch. Returns (normed, unnormed).

    ``act`` [M, K] and ``weight`` [N, K] are bfloat16, float16 or float32, rows strided as you like; weight may also be
    float8_e4m3fn, with ``weight_scale`` float32 of one element or N. ``gamma`` [Nn] has any float dtype.
    M is 1 to 16; K, N and Nn <= N are any. ``normed`` is [M, Nn] and ``unnormed`` [M, N - Nn].

    ``segments`` are further gammas: each norms, by itself, the columns that follow. ``normed_dtype``, an fp8 dtype, stores
    the first segment as codes with a float32 scale a row. The result is then (normed[, scale][, further...], unnormed),
    and ``out`` takes tensors in that order.

    Rounding: y is float32, summed in an order that depends on K and the dtypes only, and each stored value is rounded
    once; row m of a batch has the bytes it would have alone. With ``fused=False``, which takes any M, y comes rounded from
    `torch.matmul` (or, for fp8 weights, a kernel of ours), `rms_norm` reads it, and unnormed is a view of it.

    >>> import torch, onepass
    >>> act, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> onepass.gemv_and_partial_norm(act, weight, torch.ones(2), eps=0.0)
    (tensor([[0.8485, 1.1314]]), tensor([[3.]]))
    """
    if not isinstance(fused, bool):
        GEMV.fail("fused", "be a bool", describe(fused))
    further = _further(GEMV, segments)
    if not fused:
        return _unfused(act, weight, gamma, eps, segments, weight_scale, normed_dtype, out)
    given: list[Tensor | None] = [None] * len(GEMV.outs)
    if out is not None:
        if not any(normed_dtype is dtype for dtype in (None, *FP8_FORMATS)):  # how many there must be depends on it
            GEMV.fail("normed_dtype", f"be {' or '.join(map(short, FP8_FORMATS))}", describe(normed_dtype))
        present = [True, normed_dtype is not None, *(g is not None for g in further), True]
        places = [i for i, here in enumerate(present) if here]
        if not isinstance(out, (list, tuple)) or len(out) != len(places):
            GEMV.fail(
                "out",
                f"hold {len(places)} tensors",
                repr(type(out)) if not isinstance(out, (list, tuple)) else f"{len(out)}",
            )
        for place, tensor in zip(places, out, strict=True):
            given[place] = tensor
    results = _gemv.call(act, weight, gamma, *further, weight_scale, eps, normed_dtype, *given)
    return tuple([t for t in results if t is not None])


def gemv_and_partial_norm_with_scratch(
    normed_output: Tensor,
    unnormed_output: Tensor,
    act: Tensor,
    weight: Tensor,
    gamma: Tensor,
    eps: float,
    finish_counter: Tensor,
    trace_buf: TraceBuf = NullTrace(),  # noqa: B008
    *,
    segments: Sequence[Tensor] = (),
    segment_outputs: Sequence[Tensor] = (),
    weight_scale: Tensor | None = None,
    scale_output: Tensor | None = None,
) -> None:
    """`gemv_and_partial_norm` into your tensors, counting in your counter, and traced if you like.

    ``finish_counter`` is int32 with an element for each segment. It must be zero before the first call and is zero again
    when a call is done, so nothing is cleared between calls; calls that may overlap in time need counters of their own.
    With ``ONEPASS_DEBUG=1`` in the environment a counter that is not zero raises. ``trace_buf``: `NullTrace` leaves no trace
    in the machine code; `GmemTrace` receives the time of ten events of every block; a `TraceBuf` of yours that has `store`
    alone is handed them by the host, which waits for the launch, so it cannot be used in a CUDA graph.

    >>> import torch, onepass
    >>> act, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> normed, unnormed, counter = torch.empty(1, 2), torch.empty(1, 1), torch.zeros(1, dtype=torch.int32)
    >>> onepass.gemv_and_partial_norm_with_scratch(normed, unnormed, act, weight, torch.ones(2), 0.0, counter)
    >>> normed, unnormed, counter
    (tensor([[0.8485, 1.1314]]), tensor([[3.]]), tensor([0], dtype=torch.int32))
    """
    further = _further(GEMV_WITH_SCRATCH, segments)
    for name, value in (("normed_output", normed_output), ("unnormed_output", unnormed_output)):
        if not isinstance(value, Tensor):
            GEMV_WITH_SCRATCH.fail(name, "be a tensor", describe(value))
    if not isinstance(trace_buf, TraceBuf):
        GEMV_WITH_SCRATCH.fail("trace_buf", "be a TraceBuf (NullTrace(), GmemTrace(...))", describe(trace_buf))
    if not isinstance(segment_outputs, (list, tuple)) or not all(isinstance(t, Tensor) for t in segment_outputs):
        GEMV_WITH_SCRATCH.fail("segment_outputs", "be a list of tensors", describe(segment_outputs))
    if len(segment_outputs) != len(segments):
        GEMV_WITH_SCRATCH.fail(
            "segment_outputs", f"hold {len(segments)} tensors, one a segment", str(len(segment_outputs))
        )
    codes = normed_output.dtype if normed_output.dtype in FP8_FORMATS else None
    if codes is not None and scale_output is None:
        GEMV_WITH_SCRATCH.fail("scale_output", "be given with an fp8 normed_output", "None")
    outputs = [*segment_outputs, *[None] * (len(FURTHER) - len(segment_outputs))]
    given = (normed_output, scale_output, *outputs, unnormed_output)
    own = None
    if trace_buf.stored_by_host:
        GEMV_WITH_SCRATCH.blame(act=act, weight=weight, gamma=gamma, finish_counter=finish_counter)
        GEMV_WITH_SCRATCH.prepare(
            act, weight, gamma, *further, weight_scale, finish_counter, None, None, eps, codes, *given
        )
        if act.is_cuda and torch.cuda.is_current_stream_capturing():
            GEMV_WITH_SCRATCH.fail(
                "trace_buf", "be a NullTrace or GmemTrace while a CUDA graph is captured", repr(trace_buf)
            )
        own = GmemTrace.allocate(blocks_of(act, weight, tuple([g.shape[0] for g in (gamma, *segments)])), act.device)
    trace, units = (trace_buf if own is None else own).tensors()
    _with_scratch.call(
        act, weight, gamma, *further, weight_scale, finish_counter, trace, units, eps, codes, *given
    )  # fmt: skip
    if own is not None:
        own.hand_over(trace_buf)


def gemv_and_partial_norm_unfused_with_scratch(
    normed_output: Tensor,
    act: Tensor,
    weight: Tensor,
    gamma: Tensor,
    eps: float,
    y_scratch: Tensor,
    *,
    weight_scale: Tensor | None = None,
) -> None:
    """The two-launch baseline: matmul into ``y_scratch`` [M, N], which then holds all of y, then the norm of its first columns.

    Any M. y is rounded to act's dtype before it is normed.

    >>> import torch, onepass
    >>> act, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> normed, y = torch.empty(1, 2), torch.empty(1, 3)
    >>> onepass.gemv_and_partial_norm_unfused_with_scratch(normed, act, weight, torch.ones(2), 0.0, y)
    >>> normed, y
    (tensor([[0.8485, 1.1314]]), tensor([[3., 4., 3.]]))
    """
    for name, value in (("normed_output", normed_output), ("y_scratch", y_scratch)):
        if not isinstance(value, Tensor):
            _UNFUSED_WITH_SCRATCH.fail(name, "be a tensor", describe(value))
    _two_launches(_UNFUSED_WITH_SCRATCH, act, weight, gamma, weight_scale, eps, normed_output, y_scratch)


def gemv_trace_blocks(act: Tensor, weight: Tensor, gamma: Tensor, segments: Sequence[Tensor] = ()) -> int:
    """Blocks that a call with these tensors runs; a trace needs 16 slots for each.

    >>> import torch, onepass
    >>> act, weight = torch.zeros(1, 64), torch.zeros(96, 64)
    >>> trace = onepass.GmemTrace.allocate(onepass.gemv_trace_blocks(act, weight, torch.ones(64)), "cpu")
    """
    further = _further(GEMV, segments)
    GEMV.blame(act=act, weight=weight, gamma=gamma, segments=segments)
    GEMV.prepare(act, weight, gamma, *further, None, 0.0, None)
    return blocks_of(act, weight, tuple([g.shape[0] for g in (gamma, *segments)]))


def _further(contract: Contract, segments: Sequence[Tensor]) -> list[Tensor | None]:
    """The gammas after the first, in the places the contract has for them."""
    if not isinstance(segments, (list, tuple)) or not all(isinstance(g, Tensor) for g in segments):
        contract.fail("segments", "be a list of tensors", describe(segments))
    if len(segments) > len(FURTHER):
        contract.fail("segments", f"hold at most {len(FURTHER)} tensors", str(len(segments)))
    return [*segments, *[None] * (len(FURTHER) - len(segments))]


def _two_launches(
    contract: Contract, act: Tensor, weight: Tensor, gamma: Tensor, weight_scale: Tensor | None, eps: float,
    normed: Tensor | None, y: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The norm, and all of y rounded to act's dtype; everything is checked before the first launch."""
    contract.blame(act=act, weight=weight, gamma=gamma, weight_scale=weight_scale, normed_output=normed, y_scratch=y)
    contract.prepare(act, weight, gamma, weight_scale, eps, normed, y)
    if y is not None and plain(act, weight, gamma, weight_scale, normed, y):
        check_memory(contract, (act, weight, gamma, weight_scale, eps), (normed, y))
    if weight.dtype in FLOATS and weight_scale is None:
        y = torch.matmul(act, weight.T, out=y)
    else:
        y = cast(Tensor, _plain.call(act, weight, weight_scale, y)[0])
    return rms_norm(y[:, : gamma.shape[0]], gamma, eps, out=normed), y


def _unfused(
    act: Tensor, weight: Tensor, gamma: Tensor, eps: float, segments: Sequence[Tensor], weight_scale: Tensor | None,
    normed_dtype: torch.dtype | None, out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if segments or normed_dtype is not None or out is not None:
        which = "segments" if segments else "normed_dtype" if normed_dtype is not None else "out"
        GEMV.fail(which, "be left out with fused=False", "one")
    normed, y = _two_launches(_UNFUSED, act, weight, gamma, weight_scale, eps, None, None)
    return normed, y[:, gamma.shape[0] :]
