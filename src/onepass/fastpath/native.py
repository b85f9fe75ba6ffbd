"""The fast path in C: an optional extension module that repeats calls that are like earlier ones.

`onepass.fastpath._native` holds a table per op. Its key is everything that a call's launches depend on,
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
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..contract.declaration import Contract
from . import build, cuda_launch, debug, plan, replay
from .process import forked

try:
    from . import _native
except ImportError:  # it was not built
    _native = None  # type: ignore[assignment]

_LIST, _WRITTEN, _MAY_BE_NEGATED = 1, 2, 4
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
        return None, "not built (python -m onepass.fastpath.build builds it)"
    built_from = getattr(module, "SOURCES", "")
    if not built_from or built_from != (build.digest() or built_from):
        return None, "not used: it was built from other sources (python -m onepass.fastpath.build builds it anew)"
    if type(debug._environment) is not dict:
        return None, "off (os.environ is not the usual one)"
    functions = (
        torch._C._len_torch_dispatch_stack,
        torch._C._len_torch_function_stack,
        torch._C._functorch.peek_interpreter_stack,
        torch._C._get_tracing_state,
        torch.is_grad_enabled,
        torch.get_num_threads,
        Tensor.is_neg,
        cuda_launch.fail,
    )
    dual = (vars(forward_ad), "_current_level")
    environment = (debug._environment, debug._KEY, debug._ON)
    try:
        module.set_up(capsule, (Tensor, Parameter, torch.dtype), functions, dual, environment, forked())
    except (RuntimeError, ValueError) as error:
        return None, f"off ({error})"
    driver = cuda_launch.driver() if torch.version.cuda else None
    if driver is not None:
        functions_of_cuda = driver.cuLaunchKernelEx, driver.cuCtxGetDevice, driver.cuStreamIsCapturing
        module.set_cuda(*map(_address, functions_of_cuda))
    replay.switch.listeners.append(module.set_enabled)
    return module, "on"


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def forget() -> None:
    """Let no plan use memory that it has kept for a stream; it is taken anew."""
    module = _load()[0]
    if module is not None:
        module.forget()


def describe() -> str:
    """Whether calls take the path in C, and if not why."""
    return _load()[1]


def table(contract: Contract) -> Any:
    """A table for the calls of an op, or None if Python makes them."""
    module = _load()[0]
    if module is None:
        return None
    flags: list[int] = []
    for arg in contract.args.values():
        checked = arg.layout == "any" and arg.sample != "index"
        flags.append(_LIST * arg.many | _WRITTEN * arg.mutable | _MAY_BE_NEGATED * checked)
    flags += [_WRITTEN] * len(contract.outs)
    reads_values = any(arg.sample == "index" or arg.debugged for arg in contract.args.values())
    return module.Table(len(contract.args), len(contract.options), len(contract.outs), reads_values, bytes(flags))


def remember(
    table: Any,
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
        launches, sources = replay.traced(run)
    finally:
        set_recording(False)
    table.store(arguments, plan.plan(launches, sources, before, after, models))
