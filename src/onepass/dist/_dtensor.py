"""The same calls for DTensors that are sharded on their last dimension: the widths are known, so nothing is exchanged."""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..contract.declaration import describe
from ..errors import ContractError
from ._norm import (qk_rms_norm, rms_norm)

_GIVEN = ("group", "plan", "counts", "kv_replicas", "out", "per_head")


def qk_rms_norm_of_dtensors(
    q: Tensor,
    k: Tensor,
    gamma_q: Tensor,
    gamma_k: Tensor,
    eps: float,
    given: tuple[Any, ...],
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`qk_rms_norm`; k may also be replicated over the ranks that share q's columns."""
    op = "dist.qk_rms_norm"
    q, k = cast(DTensor, q), cast(DTensor, k)
    _refuse(op, given)
    mesh, dimension = _sharded(op, "q", q)
    if k.device_mesh != mesh:
        raise ContractError(f"{op}: `k` must be on the mesh of `q`, {mesh}, got {k.device_mesh}")
    copies = k.placements[dimension].is_replicate()
    if not copies:
        _sharded(op, "k", k, dimension)
    for index, (a, b) in enumerate(zip(q.placements, k.placements, strict=True)):
        if index != dimension and a != b:
            raise ContractError(f"{op}: `k` must be placed as `q` is along mesh dimension {index}, {a}, got {b}")
    q_out, k_out = qk_rms_norm(
        q.to_local(),
        k.to_local(),
        _local_weight(op, "gamma_q", gamma_q, q, dimension),
        _local_weight(op, "gamma_k", gamma_k, k, dimension),
        eps,
        group=(mesh, dimension),
        counts=(q.shape[-1], k.shape[-1]),
        kv_replicas=mesh.size(dimension) if copies else 1,
        **options,
    )
    return _wrap(q_out, q), _wrap(k_out, k)


def rms_norm_of_dtensor(x: Tensor, gamma: Tensor, eps: float, given: tuple[Any, ...], **options: Any) -> Tensor:
    """`rms_norm` of one DTensor."""
    op = "dist.rms_norm"
    x = cast(DTensor, x)
    _refuse(op, given)
    mesh, dimension = _sharded(op, "x", x)
    y = rms_norm(
        x.to_local(),
        _local_weight(op, "gamma", gamma, x, dimension),
        eps,
        group=(mesh, dimension),
        count=x.shape[-1],
        **options,
    )
    return _wrap(y, x)


def _refuse(op: str, given: tuple[Any, ...]) -> None:
    for name, value in zip(_GIVEN, given, strict=False):
        if value is not None:
            raise ContractError(f"{op}: `{name}` must be left out with DTensors, got {describe(value)}")


def _sharded(op: str, name: str, x: DTensor, dimension: int | None = None) -> tuple[DeviceMesh, int]:
    """The mesh and its dimension along which the last dimension of ``x`` is shared out, in one piece a rank."""
    last = x.dim() - 1
    placements = list(x.placements)
    over = [i for i, p in enumerate(placements) if type(p) is Shard and p.dim in (last, -1)]
    clean = all(type(p) in (Shard, Replicate) for p in placements)
    if not clean or len(over) != 1 or dimension not in (None, over[0]):
        where = "" if dimension is None else f" along mesh dimension {dimension}"
        raise ContractError(
            f"{op}: `{name}` must be a DTensor sharded on its last dimension{where}, got placements {x.placements}"
        )
    mesh = x.device_mesh
    size = mesh.size(over[0])
    if size * _chunk(x, size) - x.shape[-1] >= _chunk(x, size):
        # every rank sees this and refuses; left to the op, only the rank with nothing would
        raise ContractError(f"{op}: `{name}` must have columns on each of the {size} ranks, got {x.shape[-1]} in all")
    return mesh, over[0]


def _chunk(x: DTensor, size: int) -> int:
    """Columns of every rank but the last ones, as Shard deals them out."""
    return -(-x.shape[-1] // size)


def _local_weight(op: str, name: str, gamma: Tensor, x: DTensor, dimension: int) -> Tensor:
    """The weight of this rank's columns: from a DTensor sharded alike, or from the whole weight."""
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
