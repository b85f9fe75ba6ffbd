"""Functions with other libraries' names, argument order, in-place semantics and rounding: change an import, keep the code.

- `onepass.compat.vllm`: ``vllm._custom_ops`` as its kernels are from 0.20 on; `onepass.compat.vllm_0_19` as they were before.
- `onepass.compat.flashinfer`: ``flashinfer.norm``.

Sums are added in onepass's order (a row gives the same bytes in any batch), so results can differ from the originals' in the
last bit where a float32 sum does. Everything else that differs is said in the module's or the function's docstring. None of these
modules needs the library it is named after.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import flashinfer as flashinfer
    from . import vllm as vllm
    from . import vllm_0_19 as vllm_0_19

__all__ = ["flashinfer", "vllm", "vllm_0_19"]


def __getattr__(name: str) -> object:
    """Each module is imported at first use."""
    if name in __all__:
        from importlib import import_module

        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The libraries whose functions are here."""
    return list(__all__)
