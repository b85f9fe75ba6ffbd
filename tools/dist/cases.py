"""Promises of sharded norms, each tested by all ranks of the default group at once.

Every rank makes the whole q and k from the same seed, norms its own columns together with the others, and compares
with the float64 oracle on the whole and with the unsharded op. A check returns None or an error message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from onepass import dist
from onepass.ops.qk_norm.op import apply_qk_rms_norm, qk_rms_norm, row_sum_of_squares_qk
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.testing.tensors import same_bytes
from tests.oracle.bounds import FLOAT32_ERROR
from tools.dist.ranks import Place
from tools.ulps import floats

UNIT = 2.0**-24
"""Half the distance between 1 and the next float32: the relative error of one rounded operation."""

EPS = 1e-6


def depth(columns: int) -> int:
    """The most rounded operations between a value and a rank's sum of squares.

    The square and, on the CPU, 32 additions in a lane, one for each 1024 columns, 6 to join lanes; a GPU's tree has fewer.
    """
    return 1 + 32 + -(-columns // 1024) + 6


def agreement(columns: int, *sizes: int) -> float:
    """The relative distance that float32 norms of one row may have over these numbers of ranks.

    A sum of squares has positive terms, so it is within (d + W - 1) u of the exact one; the root halves that. The quotient,
    eps and two products round once each, the root to 2 ulp on a GPU: 7 u more (docs/scaling.md).
    """
    return sum((depth(columns) + size - 1) * UNIT / 2 + 7 * UNIT for size in sizes)


@dataclass(frozen=True)
class Problem:
    """Whole q and k with their weights, and this rank's columns."""

    q: Tensor
    k: Tensor
    gamma_q: Tensor
    gamma_k: Tensor
    mine_q: slice
    mine_k: slice

    @property
    def local(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """This rank's columns, as non-contiguous slices."""
        return (
            self.q[..., self.mine_q],
            self.k[..., self.mine_k],
            self.gamma_q[self.mine_q],
            self.gamma_k[self.mine_k],
        )

    @property
    def counts(self) -> tuple[int, int]:
        """Total columns."""
        return self.q.shape[-1], self.k.shape[-1]

    def verify(self, q_out: Tensor, k_out: Tensor, size: int) -> str | None:
        """Compare with the oracle on whole rows and, in float32, with the unsharded op."""
        parts = ((q_out, self.q, self.gamma_q, self.mine_q), (k_out, self.k, self.gamma_k, self.mine_k))
        for name, (out, whole, gamma, mine) in zip("qk", parts, strict=True):
            exact = rms_norm_reference.rms_norm(whole, gamma, EPS).y[..., mine]
            wrong = floats(out, exact, error=max(FLOAT32_ERROR, agreement(whole.shape[-1], size)))
            if wrong:
                return f"{name}_out against the oracle: {wrong}"
        if self.q.dtype == torch.float32:
            whole_q, whole_k = qk_rms_norm(self.q, self.k, self.gamma_q, self.gamma_k, EPS)
            for name, got, want in (("q", q_out, whole_q[..., self.mine_q]), ("k", k_out, whole_k[..., self.mine_k])):
                wrong = apart(got, want, agreement(self.q.shape[-1], 1, size))
                if wrong:
                    return f"{name}_out against the unsharded op: {wrong}"
        return None


def apart(got: Tensor, want: Tensor, bound: float) -> str | None:
    """None, or that two float32 results differ by more than this, relatively."""
    worst = float(((got.double() - want.double()).abs() / want.double().abs().clamp(min=1e-30)).max())
    return None if worst <= bound else f"{worst:.1e} apart, the bound is {bound:.1e}"


def spans(widths: Sequence[int]) -> list[slice]:
    """The slices of consecutive parts with these widths."""
    ends = list(accumulate(widths))
    return [slice(end - width, end) for width, end in zip(widths, ends, strict=True)]


def problem(
    place: Place,
    lead: tuple[int, ...],
    q_widths: Sequence[int],
    k_widths: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    kv_replicas: int = 1,
) -> Problem:
    """Random values, the same on all ranks. ``k_widths`` has one entry per set of replicas."""
    generator = torch.Generator().manual_seed(1234)
    q, k = (torch.randn(*lead, sum(w), generator=generator) for w in (q_widths, k_widths))
    # columns of very different size, so that a rank that is left out or counted twice shows
    q = q * torch.linspace(0.2, 3.0, q.shape[-1])
    k = k * torch.linspace(2.0, 0.1, k.shape[-1])
    gammas = [torch.randn(t.shape[-1], generator=generator) for t in (q, k)]
    q, k, gamma_q, gamma_k = (
        t.to(place.device, d)
        for t, d in ((q, dtype), (k, dtype), (gammas[0], torch.float32), (gammas[1], torch.float32))
    )
    rank = place.rank
    return Problem(q, k, gamma_q, gamma_k, spans(q_widths)[rank], spans(k_widths)[rank // kv_replicas])


def shares(columns: int, size: int, unit: int = 1) -> list[int]:
    """Columns split in whole units, as equally as possible."""
    whole = columns // unit
    return [(whole // size + (rank < whole % size)) * unit for rank in range(size)]


def _world() -> Any:
    return c10d.group.WORLD


def equals_unsharded(place: Place) -> str | None:
    """All dtypes and some leading shapes, against the oracle and the unsharded op."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for lead in ((1,), (70,), (2, 50)):
            p = problem(place, lead, [96] * place.size, [32] * place.size, dtype)
            got = dist.qk_rms_norm(*p.local, EPS, group=_world())
            wrong = p.verify(*got, place.size)
            if wrong:
                return f"{dtype} {lead}: {wrong}"
            if place.size == 1 and not all(map(same_bytes, got, qk_rms_norm(*p.local, EPS))):
                return f"{dtype} {lead}: a group of one rank differs from the unsharded op"
            if not all(map(same_bytes, got, qk_rms_norm(*p.local, EPS, group=_world()))):
                return f"{dtype} {lead}: onepass.qk_rms_norm with a group differs"
        for weight in (torch.bfloat16, torch.float16):
            q, k, first, second = p.local
            pairs = [(first.to(weight), second.to(weight))]
            pairs.append((pairs[0][0].float(), pairs[0][1].float()))
            found = [dist.qk_rms_norm(q, k, one, other, EPS, group=_world()) for one, other in pairs]
            alone = [dist.rms_norm(q, one, EPS, group=_world()) for one, _ in pairs]
            if not all(map(same_bytes, *found)) or not same_bytes(*alone):
                return f"{dtype} with gammas of {weight}: another result than with the same gammas in float32"
    return None


def minimax_m2(place: Place) -> str | None:
    """48 query heads, 8 key heads, head dimension 128, bfloat16; on 3 ranks the key heads go 3, 3, 2."""
    p = problem(place, (17,), shares(6144, place.size, 128), shares(1024, place.size, 128), torch.bfloat16)
    return p.verify(*dist.qk_rms_norm(*p.local, EPS, group=_world(), counts=p.counts), place.size)


def unequal_shards(place: Place) -> str | None:
    """Every rank has a different width, which the plan discovers."""
    p = problem(
        place, (5,), [64 * r + 33 for r in range(place.size)], [7 * (place.size - r) for r in range(place.size)]
    )
    made = dist.plan(_world(), *(t.shape[-1] for t in p.local[:2]))
    if made.totals != p.counts:
        return f"the plan found {made.totals} columns, there are {p.counts}"
    return p.verify(*dist.qk_rms_norm(*p.local, EPS, plan=made), place.size)


def replicated_kv(place: Place) -> str | None:
    """Fewer key heads than ranks: one on 2 or 3 ranks, two on 4."""
    heads = 2 if place.size == 4 else 1
    copies = place.size // heads
    p = problem(place, (6,), [128] * place.size, [64] * heads, kv_replicas=copies)
    q_out, k_out = dist.qk_rms_norm(*p.local, EPS, group=_world(), kv_replicas=copies)
    wrong = p.verify(q_out, k_out, place.size)
    if wrong:
        return wrong
    everyone = [torch.empty_like(k_out) for _ in range(place.size)]
    c10d.all_gather(everyone, k_out)
    first = everyone[place.rank - place.rank % copies]
    return None if same_bytes(first, k_out) else "ranks with copies of k disagree"


def in_place_and_strided(place: Place) -> str | None:
    """q and k as slices of one projection, overwritten by their norms."""
    p = problem(place, (9,), [160] * place.size, [32] * place.size, torch.bfloat16)
    q, k, gamma_q, gamma_k = p.local
    expected = dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, group=_world())
    qkv = torch.full((9, 160 + 32 + 16), 7.0, dtype=torch.bfloat16, device=place.device)
    q2, k2 = qkv[:, :160].copy_(q), qkv[:, 160:192].copy_(k)
    got = dist.qk_rms_norm(q2, k2, gamma_q, gamma_k, EPS, group=_world(), out=(q2, k2))
    if got[0] is not q2 or got[1] is not k2 or not qkv[:, 192:].eq(7).all():
        return "the outputs are not the caller's, or more than them was written"
    return None if all(map(same_bytes, got, expected)) else "in place differs from out of place"


def start_and_finish(place: Place) -> str | None:
    """start and finish, with other work in between."""
    p = problem(place, (33,), [96] * place.size, [32] * place.size)
    q, k, gamma_q, gamma_k = p.local
    pending = dist.start_qk_stats(q, k, group=_world())
    between = q @ q.mT  # other work
    got = dist.finish_qk_rms_norm(pending, gamma_q, gamma_k, EPS)
    again = dist.finish_qk_rms_norm(pending, gamma_q, gamma_k, EPS)
    expected = dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, group=_world())
    if not all(map(same_bytes, (*got, *again), expected * 2)) or not between.isfinite().all():
        return "started and finished differs from all at once"
    return p.verify(*got, place.size)


def reproducible(place: Place) -> str | None:
    """The bytes are those of a tree over the ranks, computed here; a row alone has the bytes it has in a batch."""
    q_widths, k_widths = shares(1000, place.size), shares(300, place.size)
    p = problem(place, (50,), q_widths, k_widths)
    q, k, gamma_q, gamma_k = p.local
    made = dist.plan(_world(), q.shape[-1], k.shape[-1])
    got = dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, plan=made, reproducible=True)
    sums = [
        row_sum_of_squares_qk(p.q[..., a], p.k[..., b]) for a, b in zip(spans(q_widths), spans(k_widths), strict=True)
    ]
    while len(sums) > 1:
        pairs = [sums[i] + sums[i + 1] for i in range(0, len(sums) - 1, 2)]
        sums = pairs + sums[len(sums) - len(sums) % 2 :]
    means = sums[0] / torch.tensor(p.counts, dtype=torch.float32, device=place.device)
    expected = torch.empty_like(got[0]), torch.empty_like(got[1])
    apply_qk_rms_norm(*expected, gamma_q, gamma_k, means, q, k, EPS)
    if not all(map(same_bytes, got, expected)):
        return "the sums were not added in the stated tree"
    for row in (0, 13, 49):
        alone = dist.qk_rms_norm(
            q[row : row + 1], k[row : row + 1], gamma_q, gamma_k, EPS, plan=made, reproducible=True
        )
        if not all(same_bytes(a, b[row : row + 1]) for a, b in zip(alone, got, strict=True)):
            return f"row {row} alone differs from the row in a batch"
    return p.verify(*got, place.size)


def repeats(place: Place) -> str | None:
    """The same call gives the same bytes again; on up to two ranks, so does a row by itself."""
    p = problem(place, (64,), [1024] * place.size, [256] * place.size, torch.bfloat16)
    made = dist.plan(_world(), 1024, 256)
    first = dist.qk_rms_norm(*p.local, EPS, plan=made)
    for repeat in range(20):
        if not all(map(same_bytes, dist.qk_rms_norm(*p.local, EPS, plan=made), first)):
            return f"repeat {repeat} differs"
    if place.size <= 2:
        q, k, gamma_q, gamma_k = p.local
        for row in (0, 31, 63):
            alone = dist.qk_rms_norm(q[row : row + 1], k[row : row + 1], gamma_q, gamma_k, EPS, plan=made)
            if not all(same_bytes(a, b[row : row + 1]) for a, b in zip(alone, first, strict=True)):
                return f"row {row} alone differs from the row in a batch"
    return None


def special_values(place: Place) -> str | None:
    """A NaN or infinity on one rank makes the row NaN on all; zeros stay zeros; other rows keep their bytes."""
    p = problem(place, (6,), [64] * place.size, [32] * place.size)
    made = dist.plan(_world(), 64, 32)
    clean = dist.qk_rms_norm(*p.local, EPS, plan=made, reproducible=True)
    last = place.size - 1
    p.q[1, 64 * last + 3], p.q[2, 64 * last + 5], p.k[4, 1] = torch.nan, torch.inf, -torch.inf
    p.q[3].zero_()
    q_out, k_out = dist.qk_rms_norm(*p.local, EPS, plan=made, reproducible=True)
    if not (q_out[1].isnan().all() and q_out[2].isnan().all() and k_out[4].isnan().all()):
        return "a row with a NaN or infinity on one rank is not NaN on this one"
    if not q_out[3].eq(0).all():
        return "a row of zeros is not zero"
    kept_q, kept_k = [0, 4, 5], [0, 1, 2, 3, 5]
    same = same_bytes(q_out[kept_q], clean[0][kept_q]) and same_bytes(k_out[kept_k], clean[1][kept_k])
    return None if same else "rows beside them changed"


def no_rows(place: Place) -> str | None:
    """A call without rows sends nothing and returns nothing."""
    p = problem(place, (0,), [64] * place.size, [32] * place.size)
    q_out, k_out = dist.qk_rms_norm(*p.local, EPS, group=_world())
    return None if q_out.shape == (0, 64) and k_out.shape == (0, 32) else f"shapes {q_out.shape}, {k_out.shape}"


def one_tensor(place: Place) -> str | None:
    """`dist.rms_norm`, with an offset, also in place."""
    p = problem(place, (3, 5), shares(700, place.size), [8] * place.size)
    q, _, gamma_q, _ = p.local
    exact = rms_norm_reference.rms_norm(p.q, p.gamma_q, EPS, weight_offset=1.0).y[..., p.mine_q]
    y = dist.rms_norm(q, gamma_q, EPS, group=_world(), weight_offset=1.0)
    wrong = floats(y, exact, error=max(FLOAT32_ERROR, agreement(700, place.size)))
    if wrong:
        return wrong
    mine = q.clone()
    written = dist.rms_norm(mine, gamma_q, EPS, group=_world(), count=700, weight_offset=1.0, out=mine)
    return None if written is mine and same_bytes(mine, y) else "in place differs from out of place"


def groups(place: Place) -> str | None:
    """Accept a mesh, a mesh and a dimension and, on 4 ranks, two groups of 2."""
    p = problem(place, (4,), [64] * place.size, [32] * place.size)
    expected = dist.qk_rms_norm(*p.local, EPS, group=_world())
    mesh = init_device_mesh(place.device.type, (place.size,), mesh_dim_names=("tp",))
    for group in (mesh, (mesh, 0), (mesh, "tp")):
        if not all(map(same_bytes, dist.qk_rms_norm(*p.local, EPS, group=group), expected)):
            return f"{type(group)} differs from the process group"
    if place.size != 4:
        return None
    square = init_device_mesh(place.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    half = Place(square.get_local_rank("tp"), 2, place.device, place.backend)
    p = problem(half, (4,), [64] * 2, [32] * 2)
    return p.verify(*dist.qk_rms_norm(*p.local, EPS, group=(square, "tp")), 2)


class Collectives(TorchDispatchMode):
    """Lists the collectives that are called within it: all_reduce, all_gather_into_tensor, ..."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).rpartition(".")[2].rstrip("_")
        if "c10d" in func.namespace and not name.startswith(("wait", "_wrap")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def one_collective(place: Place) -> str | None:
    """With a plan, a call sends one all-reduce or one all-gather; a group of one sends nothing."""
    p = problem(place, (4,), [64] * place.size, [32] * place.size)
    mesh = init_device_mesh(place.device.type, (place.size,))
    gathering = "all_reduce" if place.backend == "gloo" and place.device.type == "cuda" else "all_gather_into_tensor"
    for group in (_world(), mesh, (mesh, 0)):
        dist.qk_rms_norm(*p.local, EPS, group=group)
        for gather, name in ((False, "all_reduce"), (True, gathering)):
            with Collectives() as seen:
                dist.qk_rms_norm(*p.local, EPS, group=group, reproducible=gather)
            if seen.names != ([name] if place.size > 1 else []):
                return f"collectives {seen.names}, expected {name}"
    return None


def dtensors(place: Place) -> str | None:
    """DTensors in, DTensors out: q and k sharded, k replicated, one tensor; the weight whole or sharded."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh(place.device.type, (place.size,))
    p = problem(place, (3, 4), [96] * place.size, [32] * place.size)
    local_q, local_k, local_gamma, _ = p.local
    q = DTensor.from_local(local_q, mesh, [Shard(2)])
    gamma_q = DTensor.from_local(local_gamma, mesh, [Shard(0)])
    q_want, k_want = qk_rms_norm(p.q, p.k, p.gamma_q, p.gamma_k, EPS)
    bound = agreement(p.counts[0], 1, place.size)
    for k, want in (
        (DTensor.from_local(local_k, mesh, [Shard(2)]), k_want[..., p.mine_k]),
        (DTensor.from_local(p.k, mesh, [Replicate()]), k_want),
    ):
        results = dist.qk_rms_norm(q, k, gamma_q, p.gamma_k, EPS)
        for got, given, expected in zip(results, (q, k), (q_want[..., p.mine_q], want), strict=True):
            if not isinstance(got, DTensor) or got.placements != given.placements or got.shape != given.shape:
                return f"the result is not a DTensor with the placement of its input: {got}"
            wrong = apart(got.to_local(), expected, bound)
            if wrong:
                return f"against the unsharded op with k {k.placements}: {wrong}"
    one = dist.rms_norm(q, gamma_q, EPS)
    if not isinstance(one, DTensor) or one.placements != q.placements or one.shape != q.shape:
        return f"the result is not a DTensor with the placement of its input: {one}"
    return apart(one.to_local(), q_want[..., p.mine_q], bound)


Check = Callable[[Place], str | None]

_ORDER = (
    "equals_unsharded minimax_m2 unequal_shards replicated_kv in_place_and_strided start_and_finish reproducible "
    "repeats special_values no_rows one_tensor groups one_collective dtensors"
)
CHECKS: dict[str, Check] = {name: globals()[name] for name in _ORDER.split()}
