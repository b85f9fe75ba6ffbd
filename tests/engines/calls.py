"""Counts the calls of vLLM's IR ops in a process. vLLM can run both functions in each worker of a server."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from vllm.ir.op import IrOp

OPS: Final = ("rms_norm", "fused_add_rms_norm")
CALLS: Final[Counter[str]] = Counter()
"""Calls of this process, by op and provider."""


def count(worker: object = None) -> None:
    """Count the calls of every implementation from now on."""

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            CALLS[name] += 1
            return function(*arguments, **options)

        return call

    for op in OPS:
        for provider, implementation in IrOp.registry[op].impls.items():
            implementation.impl_fn = counted(f"{op}: {provider}", implementation.impl_fn)


def taken(worker: object = None) -> dict[str, int]:
    """The calls since the last time."""
    calls = dict(CALLS)
    CALLS.clear()
    return calls
