"""The ops of one decoder layer over paged caches: ragged batches, every result compared with the oracle.

On a GPU, steps with one token per request also run as a captured CUDA graph that is replayed with new inputs and tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from onepass.formats import E4M3FN, FLOATS, ScaleRule
from onepass.kvcache import PagedKVCache, gather_mla
from onepass.ops.gemv_norm.launch import MAX_ROWS
from onepass.ops.gemv_norm.op import gemv_and_partial_norm
from onepass.ops.mla_cache.launch import ScaleKind
from onepass.ops.mla_cache.op import fused_rope_rmsnorm_quantization
from onepass.ops.qk_norm.op import qk_rms_norm
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.ops.rms_norm.op import rms_norm, rms_norm_fused_fp8
from onepass.testing import compare
from onepass.testing.tensors import same_bytes
from tests.gemv_norm import checks as gemv_norm
from tests.mla_cache import checks as mla_cache
from tests.mla_cache.checks import MlaCase
from tests.oracle import bounds
from tests.oracle.bounds import around
from tools.soak.batch import LONGEST, NOWHERE, PAGE, WIDTH, Churn, Ledger, Request, tables

BF16, _, F32 = FLOATS
HIDDEN, Q_RANK, LATENT, ROPE, NOPE, HEADS, GROUP = 256, 96, 128, 32, 16, 4, 128
COLUMNS: Final = LATENT + ROPE
CAPACITY, PAGES = 10, 56
EPS: Final = 1e-6
MOST_ROWS: Final = 6000
"""More shapes than the number of calls that are cached on a GPU."""
POOLS: Final[dict[str, tuple[torch.dtype, ScaleKind]]] = {
    "fp8, a scale each": (E4M3FN.dtype, "token"),
    "fp8, one scale": (E4M3FN.dtype, "tensor"),
    "bf16": (BF16, "none"),
}
"""Caches that share page tables, like the layers of a model."""


class Inputs(NamedTuple):
    """Three rows per token, and the tables of their requests."""

    hidden: Tensor
    residual: Tensor
    attended: Tensor
    offsets: Tensor
    lengths: Tensor
    table: Tensor


class Outputs(NamedTuple):
    """What each op returned, in call order."""

    act: Tensor
    h: Tensor
    y: Tensor | None
    q_latent: Tensor
    kv: Tensor
    wide: Tensor
    q_rope: list[Tensor]
    q_normed: Tensor
    k_normed: Tensor
    codes: Tensor
    scale: Tensor
    h2: Tensor
    normed: Tensor


class Pool:
    """One cache whose entries have spare bytes; the last four hold the token's scale."""

    def __init__(self, name: str, dtype: torch.dtype, scale: ScaleKind, device: str) -> None:
        self.dtype, self.kind = dtype, scale
        size = COLUMNS * dtype.itemsize
        room = size + 32
        noise = torch.randint(0, 256, (PAGES, PAGE, room), generator=torch.Generator().manual_seed(room))
        self.memory = noise.to(torch.uint8).to(device)
        self.blocks = self.memory.view(dtype)[..., :COLUMNS]
        self.token_scale = self.memory.view(F32)[..., -1]
        given = {"none": {}, "tensor": {"kv_scale": torch.tensor(mla_cache.KV_SCALE, device=device)}}
        self.scale: dict[str, Any] = {**given, "token": {"per_token_scale": self.token_scale}}[scale]
        gaps = [slice(size, room - 4)] + ([slice(room - 4, room)] if scale != "token" else [])
        self.ledger = Ledger(name, self.memory, gaps)


class Layer:
    """Weights, pools and requests; `step` runs one ragged batch."""

    name = "ops"

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        self.churn = Churn(f"{seed} ops", CAPACITY, PAGES)
        self.generator = torch.Generator().manual_seed(seed)
        self.weight_a = self._normal(Q_RANK + COLUMNS, HIDDEN, spread=HIDDEN**-0.5)
        self.weight_b = self._normal(HEADS * (NOPE + ROPE), Q_RANK, spread=Q_RANK**-0.5)
        widths = (HIDDEN, Q_RANK, LATENT, HEADS * (NOPE + ROPE), LATENT, HIDDEN, 16)
        self.gammas = [1 + self._normal(n, spread=0.2) for n in widths]
        angle = torch.outer(torch.arange(LONGEST), 10000 ** (-torch.arange(0, ROPE, 2) / ROPE))
        self.freqs = torch.stack((angle.cos(), angle.sin()), -1).flatten(-2).to(device)
        self.pools = {name: Pool(name, *kind, device) for name, kind in POOLS.items()}
        self.captured = Captured(self)
        self.replayed = self.tokens = self.compared = 0

    def _normal(self, *shape: int, spread: float = 1.0) -> Tensor:
        return (spread * torch.randn(*shape, generator=self.generator)).to(BF16).to(self.device)

    def caches(self, inputs: Inputs) -> list[PagedKVCache]:
        """The pools with these tables, which are validated on the host."""
        return [PagedKVCache(pool.blocks, inputs.lengths, inputs.table) for pool in self.pools.values()]

    def forward(self, x: Inputs, caches: list[PagedKVCache]) -> Outputs:
        """Call the ops: what a CUDA graph captures."""
        gamma, gamma_q, gamma_kv, gamma_qs, gamma_ks, gamma_o, _ = self.gammas
        act, h = rms_norm(x.hidden, gamma, EPS, residual=x.residual)
        y = None
        if act.shape[0] <= MAX_ROWS:
            q_latent, kv = gemv_and_partial_norm(act, self.weight_a, gamma_q, EPS)
        else:
            y = torch.nn.functional.linear(act, self.weight_a)
            q_latent, kv = rms_norm(y[:, :Q_RANK], gamma_q, EPS), y[:, Q_RANK:]
        wide = torch.nn.functional.linear(q_latent, self.weight_b)
        turning = wide.view(-1, HEADS, NOPE + ROPE)[..., NOPE:]
        q_rope = [
            fused_rope_rmsnorm_quantization(
                None, turning, kv, x.offsets, self.freqs, gamma_kv, cache, EPS, **pool.scale
            )
            for pool, cache in zip(self.pools.values(), caches, strict=True)
        ]
        normed = qk_rms_norm(wide, kv[:, :LATENT], gamma_qs, gamma_ks, EPS)
        last = rms_norm_fused_fp8(x.attended, gamma_o, EPS, residual=h, group_size=GROUP, return_norm=True)
        return Outputs(act, h, y, q_latent, kv, wide, q_rope, *normed, *last)

    def step(self, check: bool) -> list[str]:
        """Run one step and return what is wrong. ``check`` compares the results with the oracle."""
        wrong = list(self._ended())
        planned = self.churn.plan()
        requests = [r for r, _ in planned]
        counts = [new for _, new in planned]
        tokens = sum(counts)
        offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(self.device)
        hidden, residual, attended = (self._normal(tokens, HIDDEN) for _ in range(3))
        x = Inputs(hidden, residual, attended, offsets, *tables(requests, self.device))
        before = {name: pool.memory.clone() for name, pool in self.pools.items()} if check else {}
        if max(counts) == 1 and self.churn.random.random() < 0.5:
            x, out = self.captured(x)
            self.replayed += 1
        else:
            out = self.forward(x, self.caches(x))
        if check:
            batch = [(r.length, new) for r, new in planned]
            wrong += self._check(x, out, batch, before)
        for index, (request, new) in enumerate(planned):
            written = request.slots(request.length, request.length + new)
            for pool in self.pools.values():
                pool.ledger.written.update(written)
            if request.number % 4 == 0:  # tracked: its whole life is compared when it ends
                begin = int(sum(counts[:index]))
                request.kept.append(out.kv[begin : begin + new].cpu().clone())
            request.length += new
        self.tokens += tokens
        wrong += self._odd_calls(check)
        wrong += [found for pool in self.pools.values() if (found := pool.ledger.check())]
        self.compared += check
        return wrong

    def _odd_calls(self, check: bool) -> Iterator[str]:
        """Norms with an unusual number of rows and an unusual epsilon: caches of calls must stay bounded."""
        chance, gamma = self.churn.random, self.gammas[-1].float()
        for rows, eps in ((chance.randint(1, MOST_ROWS), EPS), (3, chance.uniform(1e-6, 1e-5))):
            x = torch.randn(rows, 16, generator=self.generator).to(self.device)
            got = rms_norm(x, gamma, eps)
            if check:
                yield from _prefixed(
                    f"rms_norm of {rows} rows", _stored(got, rms_norm_reference.rms_norm(x.cpu(), gamma.cpu(), eps).y)
                )

    # --- checks -----------------------------------------------------------------------------------------------------

    def _check(self, x: Inputs, out: Outputs, batch: list[tuple[int, int]], before: dict[str, Tensor]) -> Iterator[str]:
        """Compare every op's results with the oracle, from the inputs that it got."""
        x, out = (type(t)(*(_host(v) for v in t)) for t in (x, out))  # type: ignore[assignment]
        gamma, gamma_q, gamma_kv, gamma_qs, gamma_ks, gamma_o, _ = (g.cpu() for g in self.gammas)
        exact = rms_norm_reference.rms_norm(x.hidden, gamma, EPS, residual=x.residual)
        yield from _prefixed("rms_norm", _stored(out.act, exact.y))
        yield from _prefixed("rms_norm, the sum", _stored(out.h, exact.h))
        if out.y is None:
            y = gemv_norm.products({"act": out.act, "weight": self.weight_a.cpu()}, self.weight_a.is_cuda)
            norm, _ = gemv_norm.normed_bounds(y.part(slice(Q_RANK)), gamma_q.double(), EPS)
            yield from _prefixed("gemv, normed", norm.stored(out.q_latent))
            yield from _prefixed("gemv", y.part(slice(Q_RANK, None)).stored(out.kv))
        else:
            normed = rms_norm_reference.rms_norm(out.y[:, :Q_RANK], gamma_q, EPS).y
            yield from _prefixed("rms_norm of a slice", _stored(out.q_latent, normed))
        for side, (got, source, weight) in {
            "q": (out.q_normed, out.wide, gamma_qs),
            "k": (out.k_normed, out.kv[:, :LATENT], gamma_ks),
        }.items():
            yield from _prefixed(
                f"qk_rms_norm, {side}", _stored(got, rms_norm_reference.rms_norm(source, weight, EPS).y)
            )
        exact = rms_norm_reference.rms_norm(x.attended, gamma_o, EPS, residual=out.h)
        yield from _prefixed("rms_norm_fused_fp8, the sum", _stored(out.h2, exact.h))
        yield from _prefixed("rms_norm_fused_fp8, the norm", _stored(out.normed, exact.y))
        amax, rule = bounds.largest(exact.y.abs(), GROUP), ScaleRule("group", F32, GROUP)
        ends = (amax * (1 - bounds.FLOAT32_ERROR), amax * (1 + bounds.FLOAT32_ERROR))
        yield from _prefixed("rms_norm_fused_fp8", bounds.scales(out.scale, *ends, None, E4M3FN.max, rule))
        scale = out.scale.double().repeat_interleave(GROUP, -1)
        coded = torch.where(scale == 0, 0 * exact.y, exact.y / scale)
        error = bounds.FLOAT32_ERROR * coded.abs()
        yield from _prefixed("rms_norm_fused_fp8", compare.between(out.codes, *around(coded, error), E4M3FN))
        for (name, pool), q in zip(self.pools.items(), out.q_rope, strict=True):
            given = {"q_rope": out.wide.view(-1, HEADS, NOPE + ROPE)[..., NOPE:], "kv": out.kv, "gamma": gamma_kv}
            given |= {"input_row_offsets": x.offsets, "cache_lengths": x.lengths, "lookup_table": x.table}
            padding = out.kv.shape[0] - sum(new for _, new in batch)
            yield from _prefixed(
                f"cache write, {name}", self._written(pool, given, q, tuple(batch), padding, before[name])
            )

    def _written(
        self,
        pool: Pool,
        given: dict[str, Tensor],
        q: Tensor,
        batch: tuple[tuple[int, int], ...],
        padding: int,
        before: Tensor,
    ) -> str | None:
        """What is wrong with a cache write: q, the entries, or their neighbours."""
        case = MlaCase(
            "soak", batch, q.shape[1], LATENT, ROPE, cache=pool.dtype, page=PAGE, scale=pool.kind, padding=(0, padding)
        )
        held, now = before.cpu(), pool.memory.cpu()
        arguments = {**given, "freqs_cis": self.freqs.cpu(), "blocks": held.view(pool.dtype)[..., :COLUMNS]}
        results = [q, now.view(pool.dtype)[..., :COLUMNS].contiguous()]
        if pool.kind == "tensor":
            arguments["kv_scale"] = torch.tensor(mla_cache.KV_SCALE)
        if pool.kind == "token":
            arguments["per_token_scale"] = held.view(F32)[..., -1]
            results.append(now.view(F32)[..., -1].contiguous())
        return mla_cache.verify(case, arguments, tuple(results))

    def _ended(self) -> Iterator[str]:
        """Free the pages of requests that end, after reading back everything that tracked ones wrote."""
        ended = self.churn.leaving()
        for request in ended:
            if request.kept:
                yield from self._life(request)
        self.churn.release(ended)

    def _life(self, request: Request) -> Iterator[str]:
        lengths, table = tables([request], self.device)
        length, slots = request.length, request.slots(0, request.length)
        kv = torch.cat(request.kept)
        still = torch.zeros(length, 1, ROPE, dtype=BF16)  # zeros stay zeros
        given = {"q_rope": still, "kv": kv, "gamma": self.gammas[2].cpu(), "lookup_table": table.cpu()}
        given |= {"input_row_offsets": torch.tensor([0, length]), "cache_lengths": torch.tensor([0])}
        for name, pool in self.pools.items():
            wrong = self._written(pool, given, still, ((0, length),), 0, pool.memory)
            yield from _prefixed(f"request {request.number} as it ends, {name}", wrong)
            entries = pool.memory.cpu().flatten(0, 1)[slots]
            expected = entries.view(pool.dtype)[:, :COLUMNS].float()
            if pool.kind != "none":
                expected = expected * (entries.view(F32)[:, -1:] if pool.kind == "token" else mla_cache.KV_SCALE)
            got = gather_mla(PagedKVCache(pool.blocks, lengths, table), 0, F32, **pool.scale).cpu()
            if not same_bytes(got, expected):
                yield f"request {request.number}: gather_mla, {name}: not what its pages hold"


class Captured:
    """A decode step for `CAPACITY` requests at fixed addresses: a CUDA graph, or the same calls again on a CPU."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        device = layer.device
        index: dict[str, Any] = {"dtype": torch.int32, "device": device}
        hidden, residual, attended = (torch.zeros(CAPACITY, HIDDEN, dtype=BF16, device=device) for _ in range(3))
        offsets, lengths = torch.zeros(CAPACITY + 1, **index), torch.zeros(CAPACITY, **index)
        table = torch.full((CAPACITY, WIDTH), NOWHERE, **index)
        self.inputs = Inputs(hidden, residual, attended, offsets, lengths, table)
        self.caches = layer.caches(self.inputs)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs = layer.forward(self.inputs, self.caches)  # no tokens, so no entry is written
        if device == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = layer.forward(self.inputs, self.caches)

    def __call__(self, x: Inputs) -> tuple[Inputs, Outputs]:
        """Run the step, padded to full capacity: the inputs as used, and the results."""
        for mine, given in zip(self.inputs, x, strict=True):
            mine[: given.shape[0]].copy_(given)
        requests = x.lengths.shape[0]
        self.inputs.offsets[requests:].fill_(requests)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.outputs = self.layer.forward(self.inputs, self.caches)
        return self.inputs, self.outputs


def _host(value: Any) -> Any:
    if isinstance(value, list):
        return [_host(v) for v in value]
    return value.cpu() if isinstance(value, Tensor) else value


def _stored(actual: Tensor, exact: Tensor) -> str | None:
    """Each value is stored for a number within float32's error of the exact one."""
    return around(exact, bounds.FLOAT32_ERROR * exact.abs()).stored(actual.cpu())


def _prefixed(what: str, wrong: str | None) -> Iterator[str]:
    if wrong is not None:
        yield f"{what}: {wrong}"
