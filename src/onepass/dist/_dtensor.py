"""DTensors sharded on their last dimension. Their widths are known, so nothing is exchanged."""

from __future__ import annotations

from math import prod
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..core.contract import describe
from ..errors import ContractError


class Shards(NamedTuple):
    """This rank's part of a call with DTensors, as arguments of a call with plain tensors."""

    tensors: list[Tensor]
    weights: list[Tensor]
    group: tuple[DeviceMesh, int]
    counts: tuple[int, ...]
    replicas: int
    like: list[DTensor]

    def wrap(self, *results: Tensor) -> tuple[Tensor, ...]:
        """This rank's results as DTensors, placed like the inputs."""
        return tuple(_wrap(result, like) for result, like in zip(results, self.like, strict=True))


def shards_of(op: str, tensors: dict[str, Tensor], gammas: dict[str, Tensor], refused: dict[str, object]) -> Shards:
    """This rank's parts of one or two DTensors, of which the second may be replicated, and their weights.

    ``refused`` are arguments that must be None, because the DTensors determine them or they are not
    supported.
    """
    for name, value in refused.items():
        if value is not None:
            raise ContractError(f"{op}: `{name}` must be left out with DTensors, got {describe(value)}")
    like = [cast(DTensor, x) for x in tensors.values()]
    first, *others = tensors
    mesh, dimension = _sharded(op, first, like[0])
    copies = False
    for name, x in zip(others, like[1:], strict=True):
        if x.device_mesh != mesh:
            raise ContractError(f"{op}: `{name}` must be on the mesh of `{first}`, {mesh}, got {x.device_mesh}")
        copies = x.placements[dimension].is_replicate()
        if not copies:
            _sharded(op, name, x, dimension)
        for index, (a, b) in enumerate(zip(like[0].placements, x.placements, strict=True)):
            if index != dimension and a != b:
                rule = f"be placed like `{first}` along mesh dimension {index}, {a}"
                raise ContractError(f"{op}: `{name}` must {rule}, got {b}")
    return Shards(
        [x.to_local() for x in like],
        [_local_weight(op, *gamma, x, dimension) for gamma, x in zip(gammas.items(), like, strict=True)],
        (mesh, dimension),
        tuple(x.shape[-1] for x in like),
        mesh.size(dimension) if copies else 1,
        like,
    )


def _sharded(op: str, name: str, x: DTensor, dimension: int | None = None) -> tuple[DeviceMesh, int]:
    """The mesh, and the one of its dimensions over which the last dimension of ``x`` is sharded."""
    over = [i for i, p in enumerate(x.placements) if type(p) is Shard and p.dim in (x.dim() - 1, -1)]
    supported = all(type(p) in (Shard, Replicate) for p in x.placements)
    if not supported or len(over) != 1 or dimension not in (None, over[0]):
        along = "" if dimension is None else f" along mesh dimension {dimension}"
        raise ContractError(
            f"{op}: `{name}` must be a DTensor sharded on its last dimension{along}, got placements {x.placements}"
        )
    mesh = x.device_mesh
    size = mesh.size(over[0])
    if (size - 1) * _chunk(x, size) >= x.shape[-1]:
        # every rank sees this and raises; the op would only raise on the rank without columns
        raise ContractError(f"{op}: `{name}` must have columns on each of the {size} ranks, got {x.shape[-1]} in total")
    return mesh, over[0]


def _chunk(x: DTensor, size: int) -> int:
    """Columns per rank, as Shard distributes them; the last ranks may have fewer."""
    return -(-x.shape[-1] // size)


def _local_weight(op: str, name: str, gamma: Tensor, x: DTensor, dimension: int) -> Tensor:
    """The weight of this rank's columns, from a DTensor sharded like ``x`` or from the whole weight."""
    width = x.to_local().shape[-1]
    if isinstance(gamma, DTensor):
        if gamma.placements[dimension].is_shard(0) and x.placements[dimension].is_shard():
            return gamma.to_local()
        gamma = gamma.full_tensor()
    if gamma.dim() != 1 or gamma.shape[0] not in (width, x.shape[-1]):
        raise ContractError(
            f"{op}: `{name}` must have {x.shape[-1]} elements, or this rank's {width}, got {list(gamma.shape)}"
        )
    if gamma.shape[0] == width:
        return gamma
    begin = _chunk(x, x.device_mesh.size(dimension)) * x.device_mesh.get_local_rank(dimension)
    return gamma[begin : begin + width]


def _wrap(local: Tensor, like: DTensor) -> Tensor:
    shape = like.shape
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    wrapped: Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return wrapped
