"""Random inputs made from a `Contract`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from onepass.core.contract import Contract


def sample(
    contract: Contract,
    sizes: Mapping[str, int],
    lead: tuple[int, ...],
    *,
    device: str | torch.device = "cpu",
    dtypes: Mapping[str, torch.dtype] | None = None,
    optional: Collection[str] = (),
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random tensors for the required arguments and the named optional ones."""
    generator = torch.Generator().manual_seed(seed)
    chosen = dict(dtypes or {})
    first = next(iter(contract.args))
    tensors: dict[str, Tensor] = {}
    for name, arg in contract.args.items():
        if arg.many or (arg.optional and name not in optional):
            continue
        dims = arg.dims.split("|")[0].split()
        shape = [s for d in dims for s in (lead if d == "..." else (int(d) if d.isdigit() else sizes[d],))]
        values = torch.randn(shape, generator=generator)
        if arg.sample == "gamma":
            values = 1 + 0.25 * values
        elif arg.sample == "positive":
            values = 0.02 + 0.01 * values.abs()
        elif arg.sample == "index":
            values = values > 0
        # a gamma may have any dtype; by default it has the first argument's
        follows = isinstance(arg.dtypes, str) or arg.sample == "gamma"
        default = chosen.get(first, torch.bfloat16) if follows else arg.dtypes[0]
        tensors[name] = values.to(chosen.get(name, default)).to(device)
    return tensors
