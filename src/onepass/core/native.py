"""The fast path in C: an optional extension module that repeats calls that are like earlier ones.

`onepass.core._native` holds a table per op. Its key is everything that a call's launches depend on,
except addresses: options, and dtype, shape, strides, alignment and device of every tensor, and which
tensors overlap. A call is noted when it is first met, recorded when it is met again, and from then on
repeated without Python: outputs are allocated, addresses filled in, kernels launched.

Without the extension (it was not built, or from other sources than those next to it, torch lacks DLPack's table of C
functions, or the environment has ``ONEPASS_NATIVE=0``) Python does all of this, with the same results and errors.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from . import build, process, recording
from .contract import Contract

if TYPE_CHECKING:
    from ._native import Table

try:
    from . import _native
except ImportError:  # it was not built
    _native = None  # type: ignore[assignment]

_LIST, _WRITTEN = 1, 2
_OF_A_TENSOR: Final = (
    "_ZN2at6native6is_negERKNS_6TensorE",
    "_ZN2at6native12is_inferenceERKNS_6TensorE",
    "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
)
"""``at::native::is_neg``, ``at::native::is_inference`` and ``torch::autograd::impl::bump_version``, as libtorch exports them."""
FIRST: Final = 1
"""The answer of a table to a call that it meets for the first time."""
RECORD: Final = 2
"""The answer to a call that should be recorded."""


@cache
def _load() -> tuple[Any, str]:
    """The extension module, or None and the reason."""
    if os.environ.get("ONEPASS_NATIVE") == "0":
        return None, "off (ONEPASS_NATIVE=0)"
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None, "off (this torch has no DLPack functions for C)"
    module = _native
    if module is None:
        return None, "not built (python -m onepass.core.build builds it)"
    built_from = getattr(module, "SOURCES", "")
    if not built_from or built_from != (build.digest() or built_from):
        return None, "not used: it was built from other sources (python -m onepass.core.build builds it anew)"
    if type(process.ENVIRONMENT) is not dict:
        return None, "off (os.environ is not the usual one)"
    functions = (
        torch._C._len_torch_dispatch_stack,
        torch._C._len_torch_function_stack,
        torch._C._functorch.peek_interpreter_stack,
        torch._C._get_tracing_state,
        torch.is_grad_enabled,
        torch.is_inference_mode_enabled,
        torch.get_num_threads,
        Tensor.is_neg,
        Tensor.is_inference,
        increment_version,
        fail,
    )
    dual = (vars(forward_ad), "_current_level")
    environment = (process.ENVIRONMENT, process.DEBUG_NAME, process.DEBUG_ON)
    profile = (vars(profiler), "_is_profiler_enabled", recording.Event)
    try:
        module.set_up(capsule, (Tensor, Parameter, torch.dtype), functions, dual, environment, profile)
    except (RuntimeError, ValueError) as error:
        return None, f"off ({error})"
    module.set_direct(*direct())
    cuda = driver() if torch.version.cuda else None
    if cuda is not None:
        functions_of_cuda = cuda.cuLaunchKernelEx, cuda.cuCtxGetDevice, cuda.cuStreamIsCapturing
        module.set_cuda(*map(_address, functions_of_cuda))
    recording.switch.listeners.append(module.set_enabled)
    return module, "on"


@cache
def driver() -> Any:
    """The CUDA driver that torch has loaded; None if there is none, or if it lacks this launch function."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        _ = library.cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    return library


def fail(error: int) -> None:
    """Raise for a launch that CUDA rejected."""
    raise RuntimeError(f"a kernel could not be launched: CUDA error {error}, {_message(error)}")


def _message(error: int) -> str:
    text = ctypes.c_char_p()
    driver().cuGetErrorString(error, ctypes.byref(text))
    return (text.value or b"unknown").decode()


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def direct() -> tuple[int, int, int, int]:
    """Where a Python tensor holds libtorch's, in bytes, and the addresses of libtorch's functions of it.

    Zeros if this torch has others: then Python's functions are called, which cost 70 ns each.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = [library[name] for name in _OF_A_TENSOR]
    except (OSError, AttributeError):
        return 0, 0, 0, 0
    with torch.inference_mode(False):
        plain, parameter = torch.ones(1, device="cpu"), Parameter(torch.ones(1, device="cpu"))
        negated = torch._neg_view(plain)
    with torch.inference_mode():
        tensors = (plain, parameter, negated, torch.ones(1, device="cpu"))
    words = range(0, Tensor.__basicsize__, ctypes.sizeof(ctypes.c_void_p))
    places = [at for at in words if all(ctypes.c_void_p.from_address(id(t) + at).value == t._cdata for t in tensors)]
    is_neg, is_inference, bump = functions
    is_neg.restype = is_inference.restype = ctypes.c_bool
    bump.restype = None
    for place in places:
        answers = [(is_neg(at), is_inference(at)) for t in tensors for at in [ctypes.c_void_p(id(t) + place)]]
        version = plain._version
        bump(ctypes.c_void_p(id(plain) + place))
        if answers == [(t.is_neg(), t.is_inference()) for t in tensors] and plain._version == version + 1:
            return place, _address(is_neg), _address(is_inference), _address(bump)
    return 0, 0, 0, 0


def forget() -> None:
    """Drop per-stream scratch memory; the next launch reallocates it."""
    module = _load()[0]
    if module is not None:
        module.forget()


def describe() -> str:
    """Whether calls take the path in C, and if not why."""
    return _load()[1]


def table(contract: Contract) -> Table | None:
    """A table for the calls of an op, or None if Python makes them."""
    module = _load()[0]
    if module is None:
        return None
    flags: list[int] = []
    for arg in contract.args.values():
        flags.append(_LIST * arg.many | _WRITTEN * arg.mutable)
    flags += [_WRITTEN] * len(contract.outs)
    reads_values = any(arg.sample == "index" or arg.debugged for arg in contract.args.values())
    sizes = len(contract.args), len(contract.options), len(contract.outs)
    calls: Table = module.Table(*sizes, reads_values, bytes(flags), f"onepass::{contract.name}")
    return calls


def remember(
    table: Table,
    run: Callable[[], None],
    arguments: tuple[Any, ...],
    before: Sequence[Any],
    after: Sequence[Any],
    models: Mapping[int, int],
) -> None:
    """Run a call and store in ``table`` how to repeat it, or that it cannot be repeated.

    ``arguments`` are those of the call. ``before`` are its tensors, outputs last, and ``after`` the same
    with allocated outputs in place of None. ``models`` maps the positions of outputs to those of the
    tensors that they are allocated like.
    """
    set_recording = _load()[0].set_recording
    set_recording(True)
    try:
        launches, sources = recording.traced(run)
    finally:
        set_recording(False)
    table.store(arguments, recording.plan(launches, sources, before, after, models))
