"""Drop-in replacements: other libraries' names, argument order, in-place semantics, rounding.

- `onepass.engines.vllm`: ``vllm._custom_ops`` of vLLM 0.20 and later; `onepass.engines.vllm_0_19`: of earlier releases.
- `onepass.engines.flashinfer`: ``flashinfer.norm``.
- `onepass.engines.sglang`: the norms of ``sgl_kernel`` and ``fused_inplace_qknorm``.
- `onepass.engines.plugin` makes onepass a provider of vLLM's norms; vLLM discovers it.
- `onepass.engines.sglang_plugin` computes the norms of SGLang's deterministic mode; SGLang discovers it.
- `onepass.engines.kernels`: a layer for Hugging Face ``kernels``.
  `onepass.engines.layers` defines it, and `onepass.engines.fused` one for a norm and an MLP.

Sums are added in onepass's order, in which each row is bit-identical to running it alone, so results can differ from the
originals' in the last bit. Docstrings list all other differences. The libraries themselves need not be installed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import flashinfer as flashinfer
    from . import sglang as sglang
    from . import vllm as vllm
    from . import vllm_0_19 as vllm_0_19

__all__ = ["flashinfer", "sglang", "vllm", "vllm_0_19"]


def __getattr__(name: str) -> object:
    """Import each module at first use."""
    if name in __all__:
        from importlib import import_module

        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The libraries that are covered."""
    return list(__all__)
