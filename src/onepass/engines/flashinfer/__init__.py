"""``flashinfer``: ``from onepass.engines import flashinfer`` replaces ``import flashinfer``.

- `onepass.engines.flashinfer.norm`: ``flashinfer.norm``.
- `onepass.engines.flashinfer.fp4`: its norms with FP4 quantization.

Their functions are also here, where FlashInfer has them too.
"""

from . import fp4, norm
from .fp4 import *  # noqa: F403 (every function of its `__all__`)
from .norm import *  # noqa: F403

__all__ = ["fp4", "norm"]
__all__ += fp4.__all__
__all__ += norm.__all__
