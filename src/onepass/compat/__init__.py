"""Functions with other libraries' names, argument order, in-place semantics and rounding: change an import, keep the code.

- `onepass.compat.vllm`: ``vllm._custom_ops`` as its kernels are from 0.20 on; `onepass.compat.vllm_0_19` as they were before.
- `onepass.compat.flashinfer`: ``flashinfer.norm``.

Sums are added in onepass's order (a row gives the same bytes in any batch), so results can differ from the originals' in the
last bit where a float32 sum does. Everything else that differs is said in the module's or the function's docstring. None of these
modules needs the library it is named after.
"""
