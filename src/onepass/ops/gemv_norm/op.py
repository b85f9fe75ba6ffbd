"""``y = act @ weight.T`` and RMSNorm of its first columns, in one launch.

Each block computes some columns of y. The last block of a segment to finish norms it. A first segment in fp8 has one
scale per row: ``scale = amax / fp8_max``, ``code = saturate((y * gamma) * (rs / scale))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...core import recording
from ...core.backend import launch_for
from ...core.check import validation_of
from ...core.contract import Contract, describe, require_bool, short
from ...core.op import Op, check_memory, plain
from ...core.process import debugging
from ...formats import FLOATS, FP8_FORMATS, SMALLEST_EPS
from ...trace import GmemTrace, NullTrace, TraceBuf
from ..linear.weight_scale import kind_of, split
from ..rms_norm.op import rms_norm
from .contract import FURTHER, GEMV, GEMV_WITH_SCRATCH, blocks_of
from .contract import PLAIN_GEMV as _PLAIN_GEMV
from .contract import UNFUSED as _UNFUSED
from .contract import UNFUSED_WITH_SCRATCH as _UNFUSED_WITH_SCRATCH
from .launch import (
    MOST_COLUMNS,
    MOST_SHARES,
    GemvArguments,
    GemvCall,
    NormedArguments,
    PlainArguments,
    ScratchArguments,
    gemv_spec,
)

__all__ = ["GEMV", "GEMV_WITH_SCRATCH", "gemv_and_partial_norm", "gemv_trace_blocks"]
__all__ += ["gemv_and_partial_norm_unfused_with_scratch", "gemv_and_partial_norm_with_scratch"]


def _fused(spec_cache: object, a: NormedArguments) -> None:
    _run(a, _gammas(a), _normed(a), a.normed_dtype, a.eps, scale=a.scale_output, unnormed=a.unnormed_output)


def _fused_with_scratch(spec_cache: object, a: ScratchArguments) -> None:
    gammas, counter = _gammas(a), a.finish_counter
    if debugging():
        _check_counter(counter, len(gammas))
    scratch = {"counter": counter, "trace": a.trace, "units": a.units}
    outs = {"scale": a.scale_output, "unnormed": a.unnormed_output}
    _run(a, gammas, _normed(a), a.normed_dtype, a.eps, **outs, **scratch)


def _plain_gemv(spec_cache: object, a: PlainArguments) -> None:
    _run(a, [], [], None, 0.0, unnormed=a.y_scratch)


def _gammas(a: NormedArguments) -> list[Tensor]:
    return [g for g in (a.gamma, a.gamma1, a.gamma2, a.gamma3) if g is not None]


def _normed(a: NormedArguments) -> list[Tensor]:
    outs = (a.normed_output, a.normed_output1, a.normed_output2, a.normed_output3)
    return [t for t in outs if t is not None]


def _run(
    a: GemvArguments,
    gammas: list[Tensor],
    normed: list[Tensor],
    codes: torch.dtype | None,
    eps: float,
    **rest: Tensor | None,
) -> None:
    """Launch once, unless there are no rows. In the workspace every segment of y has whole tiles."""
    act, weight = a.act, a.weight
    m = act.shape[0]
    if m == 0:
        return
    kind = kind_of(weight, a.weight_scale, a.block_scale)
    weight_scale = a.block_scale if a.weight_scale is None else a.weight_scale
    dtypes = tuple([g.dtype for g in gammas])
    spec = gemv_spec(act.dtype, weight.dtype, kind, dtypes, codes, rest.get("trace") is not None)
    widths = tuple([g.shape[0] for g in gammas])
    columns = sum([w + MOST_COLUMNS & -16 for w in widths])
    y = None
    if columns:
        y = torch.empty(MOST_SHARES * m, columns, dtype=torch.float32, device=act.device)
        recording.temporary(y)
    eps = max(eps, SMALLEST_EPS)
    launch_for("gemv_norm", act)(GemvCall(spec, widths, act, weight, weight_scale, gammas, y, normed, eps=eps, **rest))


def _check_counter(counter: Tensor, segments: int) -> None:
    """Read the counter on the host, which waits for the device; for debugging only. Captured calls are not checked."""
    if not (counter.is_cuda and torch.cuda.is_current_stream_capturing()) and any(counter[:segments].tolist()):
        GEMV_WITH_SCRATCH.fail("finish_counter", "be zero when a call begins", str(counter[:segments].tolist()))


_gemv = Op(GEMV, _fused)
_with_scratch = Op(GEMV_WITH_SCRATCH, _fused_with_scratch)
_plain = Op(_PLAIN_GEMV, _plain_gemv)
_NONE_FURTHER: Final = (None,) * len(FURTHER)
_NONE_GIVEN: Final = (None,) * len(GEMV.outs)
# generated now: a compiler that traces a call must not trace the generator
_PREPARE = {c.name: validation_of(c).prepare for c in (GEMV, GEMV_WITH_SCRATCH, _UNFUSED, _UNFUSED_WITH_SCRATCH)}


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

    Columns of y form one segment per gamma, and a tail::

        y        = (act @ weight.T) * weight_scale
        normed_i = (y_i * rs_i) * gamma_i               rs_i = 1 / sqrt(mean(y_i^2) + eps)
        unnormed = the remaining columns of y

    Args:
        act: [M, K] with M from 1 to 16, bfloat16, float16 or float32, with any row stride.
        weight: [N, K] in act's dtype, float8_e4m3fn or int8, with any row stride.
        gamma: Weight [Nn] of the first segment's norm, of any float dtype, Nn <= N.
        eps: Added to the mean of squares.
        segments: Up to three further gammas; each norms the columns that follow separately.
        weight_scale: As in `linear`: one float32, one per row, or one per block of 128 x 128.
        normed_dtype: float8_e4m3fn or float8_e4m3fnuz, for codes of the first segment with a float32 scale per row.
            None: act's dtype.
        fused: False uses two launches and takes any M, but no ``segments``, ``normed_dtype`` or ``out``.
        out: Tensors for the results, in their order.

    Returns:
        ``(normed[, scale][, further...], unnormed)``: normed [M, Nn], scale [M, 1], unnormed [M, N - Nn] and a tensor per
            further segment.

    Rounding:
        y is float32, and each stored value is rounded once; the norm reads the unrounded y. The order of the sum depends
        only on K, the dtypes and the kind of scale, so each row is bit-identical to running it alone. On a GPU, 16-bit
        act has an order of its own, so y may differ from `linear`'s in the last bit. With ``fused=False`` y comes
        rounded to act's dtype from `torch.matmul` (for 8-bit weights, from onepass's own kernel), `rms_norm` reads it, and
        unnormed is a view of it.

    On Hopper and later, weights and their block scales are read before the previous kernel has ended. Do not call this
    right after a onepass kernel that writes them (docs/gemv.md).

    >>> import torch, onepass
    >>> act, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> onepass.gemv_and_partial_norm(act, weight, torch.ones(2), eps=0.0)
    (tensor([[0.8485, 1.1314]]), tensor([[3.]]))
    """
    usual = fused is True and out is None and type(segments) is tuple and not segments
    if usual and not is_compiling():
        scales = (None, None) if weight_scale is None else split(weight, weight_scale)
        known = _gemv.repeat(act, weight, gamma, *_NONE_FURTHER, *scales, eps, normed_dtype, *_NONE_GIVEN)
        if known is not None:
            return (known[0], known[-1]) if normed_dtype is None else (known[0], known[1], known[-1])
    require_bool(GEMV.name, "fused", fused)
    further = _further(GEMV, segments)
    if not fused:
        for name, value in (("segments", segments or None), ("normed_dtype", normed_dtype), ("out", out)):
            if value is not None:
                GEMV.fail(name, "be left out with fused=False", "one")
        normed, y = _two_launches(_UNFUSED, act, weight, gamma, weight_scale, eps, None, None)
        return normed, y[:, gamma.shape[0] :]
    given: list[Tensor | None] = [None] * len(GEMV.outs)
    if out is not None:
        if not any(normed_dtype is dtype for dtype in (None, *FP8_FORMATS)):  # decides how many outputs there are
            GEMV.fail("normed_dtype", f"be {' or '.join(map(short, FP8_FORMATS))}", describe(normed_dtype))
        present = [True, normed_dtype is not None, *(g is not None for g in further), True]
        indices = [i for i, here in enumerate(present) if here]
        if not isinstance(out, (list, tuple)) or len(out) != len(indices):
            got = f"{len(out)}" if isinstance(out, (list, tuple)) else repr(type(out))
            GEMV.fail("out", f"hold {len(indices)} tensors", got)
        for index, tensor in zip(indices, out, strict=True):
            given[index] = tensor
    scales = split(weight, weight_scale)
    results = _gemv(act, weight, gamma, *further, *scales, eps, normed_dtype, *given)
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
    """`gemv_and_partial_norm` that writes to the caller's tensors, with the caller's counter and an optional trace.

    The equation, the rounding and the arguments that are not listed are those of `gemv_and_partial_norm`.

    Args:
        normed_output: Receives the first segment: [M, Nn] in act's dtype or fp8.
        unnormed_output: Receives the columns without a norm.
        finish_counter: int32, one element per segment. It must be zero before the first call and is zero again after each
            call. Calls that may overlap in time need separate counters. With ``ONEPASS_DEBUG=1`` in the environment a
            nonzero counter raises.
        trace_buf: `NullTrace` adds nothing to the machine code; `GmemTrace` receives the time of ten events of every block.
            A custom `TraceBuf` that only has `store` receives them from the host, which waits for the launch, so it
            cannot be used in a CUDA graph.
        segment_outputs: One tensor per further segment.
        scale_output: Receives the scales of an fp8 ``normed_output``, [M, 1] float32.

    Returns:
        None.

    >>> import torch, onepass
    >>> act, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> normed, unnormed, counter = torch.empty(1, 2), torch.empty(1, 1), torch.zeros(1, dtype=torch.int32)
    >>> onepass.gemv_and_partial_norm_with_scratch(normed, unnormed, act, weight, torch.ones(2), 0.0, counter)
    >>> normed, unnormed, counter
    (tensor([[0.8485, 1.1314]]), tensor([[3.]]), tensor([0], dtype=torch.int32))
    """
    contract = GEMV_WITH_SCRATCH
    further = _further(contract, segments)
    for name, value in (("normed_output", normed_output), ("unnormed_output", unnormed_output)):
        if not isinstance(value, Tensor):
            contract.fail(name, "be a tensor", describe(value))
    if not isinstance(trace_buf, TraceBuf):
        contract.fail("trace_buf", "be a TraceBuf (NullTrace(), GmemTrace(...))", describe(trace_buf))
    if not isinstance(segment_outputs, (list, tuple)) or not all(isinstance(t, Tensor) for t in segment_outputs):
        contract.fail("segment_outputs", "be a list of tensors", describe(segment_outputs))
    if len(segment_outputs) != len(segments):
        contract.fail("segment_outputs", f"hold {len(segments)} tensors, one per segment", str(len(segment_outputs)))
    codes = normed_output.dtype if normed_output.dtype in FP8_FORMATS else None
    if codes is not None and scale_output is None:
        contract.fail("scale_output", "be given with an fp8 normed_output", "None")
    outputs = [*segment_outputs, *[None] * (len(FURTHER) - len(segment_outputs))]
    tensors = (act, weight, gamma, *further, *split(weight, weight_scale), finish_counter)
    rest = (eps, codes, normed_output, scale_output, *outputs, unnormed_output)
    own = None
    if trace_buf.stored_by_host:
        contract.blame(act=act, weight=weight, gamma=gamma, finish_counter=finish_counter)
        _PREPARE[contract.name](*tensors, None, None, *rest)
        if act.is_cuda and torch.cuda.is_current_stream_capturing():
            contract.fail("trace_buf", "be a NullTrace or GmemTrace while a CUDA graph is captured", repr(trace_buf))
        own = GmemTrace.allocate(blocks_of(act, weight, tuple([g.shape[0] for g in (gamma, *segments)])), act.device)
    _with_scratch(*tensors, *(trace_buf if own is None else own).tensors(), *rest)
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
    """The two-launch baseline: ``y = act @ weight.T``, then RMSNorm of its first columns.

    Args:
        normed_output: Receives the norm, [M, Nn].
        act: [M, K] with any M.
        weight: As in `gemv_and_partial_norm`.
        gamma: Weight [Nn] of the norm.
        eps: Added to the mean of squares.
        y_scratch: Receives all of y, [M, N].
        weight_scale: As in `gemv_and_partial_norm`.

    Returns:
        None.

    Rounding:
        y is rounded to act's dtype before the norm.

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
    """The number of blocks that `gemv_and_partial_norm` runs for these tensors. A trace needs 16 slots for each.

    Args:
        act: As in `gemv_and_partial_norm`.
        weight: As in `gemv_and_partial_norm`.
        gamma: As in `gemv_and_partial_norm`.
        segments: As in `gemv_and_partial_norm`.

    Returns:
        The number of blocks.

    >>> import torch, onepass
    >>> act, weight = torch.zeros(1, 64), torch.zeros(96, 64)
    >>> trace = onepass.GmemTrace.allocate(onepass.gemv_trace_blocks(act, weight, torch.ones(64)), "cpu")
    """
    further = _further(GEMV, segments)
    GEMV.blame(act=act, weight=weight, gamma=gamma, segments=segments)
    _PREPARE[GEMV.name](act, weight, gamma, *further, None, None, 0.0, None)
    return blocks_of(act, weight, tuple([g.shape[0] for g in (gamma, *segments)]))


def _further(contract: Contract, segments: Sequence[Tensor]) -> list[Tensor | None]:
    """The gammas after the first, padded with None to the number that the contract has."""
    if not isinstance(segments, (list, tuple)) or not all(isinstance(g, Tensor) for g in segments):
        contract.fail("segments", "be a list of tensors", describe(segments))
    if len(segments) > len(FURTHER):
        contract.fail("segments", f"hold at most {len(FURTHER)} tensors", str(len(segments)))
    return [*segments, *[None] * (len(FURTHER) - len(segments))]


def _two_launches(
    contract: Contract,
    act: Tensor,
    weight: Tensor,
    gamma: Tensor,
    weight_scale: Tensor | None,
    eps: float,
    *outs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The norm, and all of y rounded to act's dtype. Everything is validated before the first launch."""
    normed, y = outs
    contract.blame(act=act, weight=weight, gamma=gamma, weight_scale=weight_scale, normed_output=normed, y_scratch=y)
    scales = split(weight, weight_scale)
    _PREPARE[contract.name](act, weight, gamma, *scales, eps, normed, y)
    if y is not None and plain(act, weight, gamma, weight_scale, normed, y):
        check_memory(contract, (act, weight, gamma, *scales, eps), (normed, y))
    if weight.dtype in FLOATS and weight_scale is None:
        y = torch.matmul(act, weight.T, out=y)
    else:
        y = cast(Tensor, _plain(act, weight, *scales, y)[0])
    return rms_norm(y[:, : gamma.shape[0]], gamma, eps, out=normed), y
