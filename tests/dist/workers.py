"""What the ranks in tests/dist do: importable functions, because every rank is a separate process."""

from __future__ import annotations

import copy
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

import onepass
from onepass import dist
from onepass.dist import _norm
from onepass.testing.tensors import same_bytes
from tools.dist.__main__ import run_checks, time_calls
from tools.dist.cases import EPS, Collectives, agreement, apart, problem
from tools.dist.ranks import Place


def _error(call: Any) -> dict[str, Any]:
    """What a call raised, and after how many seconds."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "message": str(error),
            "cause": type(error.__cause__).__name__,
            "seconds": time.monotonic() - begin,
        }
    return {"type": None, "seconds": time.monotonic() - begin}


def _lost(
    place: Place, leave: Callable[[], object], gather: bool, patience: float | None = None
) -> dict[str, Any] | None:
    """Rank 1 leaves after a first successful call; returns what the others see, and whether their outputs changed."""
    p = problem(place, (8,), [64] * place.size, [32] * place.size)
    q, k, gamma_q, gamma_k = (t.contiguous() for t in p.local)
    made = dist.plan(c10d.group.WORLD, 64, 32)  # type: ignore[arg-type]
    with torch.inference_mode():
        dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, plan=made, reproducible=gather)
        before = q.clone(), k.clone()
        if patience is not None:
            _set_pg_timeout(timedelta(seconds=patience))
        if place.rank == 1:
            leave()
            return None
        seen = _error(lambda: dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, plan=made, reproducible=gather, out=(q, k)))
    return {**seen, "untouched": same_bytes(q, before[0]) and same_bytes(k, before[1])}


def killed(place: Place, gather: bool) -> dict[str, Any] | None:
    return _lost(place, lambda: os.kill(os.getpid(), 9), gather)


def late(place: Place, signal: str) -> dict[str, Any] | None:
    """After the first call rank 1 makes no call until rank 0 has timed out, which rank 0 signals by a file."""

    def wait() -> None:
        while not Path(signal).exists():
            time.sleep(0.02)

    seen = _lost(place, wait, False, 1.0)
    Path(signal).touch()
    return seen


def hung(place: Place) -> None:
    if place.rank == 1:
        time.sleep(600)


def debugged(place: Place) -> dict[str, Any]:
    """ONEPASS_DEBUG=1: calls that agree pass; calls that differ raise on every rank."""
    p = problem(place, (6,), [64] * place.size, [32] * place.size)
    q, k, gamma_q, gamma_k = p.local
    made = dist.plan(c10d.group.WORLD, 64, 32)  # type: ignore[arg-type]
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEPASS_DEBUG", "1")
        good = dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, plan=made)
        rows = 5 if place.rank == 1 else 6
        shape = _error(lambda: dist.qk_rms_norm(q[:rows], k[:rows], gamma_q, gamma_k, EPS, plan=made))
        mixed = _error(lambda: dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, plan=made, reproducible=place.rank == 1))
        again = dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, plan=made)
    return {
        "shape": shape,
        "mixed": mixed,
        "good": all(map(same_bytes, good, again)) and p.verify(*good, place.size) is None,
    }


def refused(place: Place) -> dict[str, Any]:
    """The errors of bad calls, by name; every rank makes the same calls."""
    world: Any = c10d.group.WORLD
    p = problem(place, (2,), [64] * place.size, [32] * place.size)
    q, k, gamma_q, gamma_k = p.local
    square = torch.distributed.device_mesh.init_device_mesh("cpu", (1, place.size))
    made = dist.plan(world, 64, 32)
    sharded = torch.distributed.tensor.distribute_tensor(q, square, [torch.distributed.tensor.Replicate()] * 2)

    def norm(weight: Tensor = gamma_q, **options: Any) -> Any:
        return _error(lambda: dist.qk_rms_norm(q, k, weight, gamma_k, EPS, **options))

    with torch.inference_mode():
        return {
            "no group": norm(),
            "group": norm(group="tp"),
            "mesh": norm(group=square),
            "plan": _error(lambda: dist.qk_rms_norm(q[:, :32], k, gamma_q[:32], gamma_k, EPS, plan=made)),
            "both": norm(plan=made, counts=(64, 64)),
            "replicas": norm(group=world, kv_replicas=3),
            "counts": norm(group=world, counts=(10, 64)),
            "too wide": norm(group=world, counts=(2**24 + 1, 64)),
            "gamma": norm(gamma_q[:5], group=world),
            "out": norm(group=world, out=q),
            "codes": norm(group=world, out_dtype=torch.float8_e4m3fn),
            "out dtype": norm(group=world, out=(q.clone(), k.clone()), out_dtype=torch.bfloat16),
            "ranks' replicas": _error(lambda: dist.plan(world, 8, 8, kv_replicas=1 + place.rank)),
            "copies": _error(lambda: dist.plan(world, 8, 8 + place.rank, kv_replicas=2)),
            "tensors": _error(lambda: dist.plan(world, 8, 8 if place.rank else None)),
            "placement": _error(lambda: dist.qk_rms_norm(sharded, sharded, gamma_q, gamma_q, EPS)),
            "per head": _error(lambda: dist.qk_rms_norm(sharded, sharded, gamma_q, gamma_q, EPS, per_head=True)),
            "no gamma": _error(lambda: dist.rms_norm(q, None, EPS, group=world)),  # type: ignore[arg-type]
            "other mixture": _error(lambda: dist.qk_rms_norm(q, sharded, gamma_q, gamma_q, EPS, group=world)),
            "mixture": _error(lambda: dist.qk_rms_norm(sharded, q, gamma_q, gamma_q, EPS)),
        }


def compiled_without_plan(place: Place) -> dict[str, Any]:
    world: Any = c10d.group.WORLD
    p = problem(place, (2,), [52] * place.size, [20] * place.size)  # widths that no other call has
    step = torch.compile(
        lambda q, k, a, b: dist.qk_rms_norm(q, k, a, b, EPS, group=world), fullgraph=True, backend="aot_eager"
    )
    with torch.inference_mode():
        return _error(lambda: step(*p.local))


def passed_on(place: Place) -> list[str]:
    """Which options of the single-device op do not reach it: rounding, rotation, output dtype, norm per head."""
    world: Any = c10d.group.WORLD
    heads = 2 * place.size
    p = problem(place, (5,), [128] * place.size, [64] * place.size, torch.bfloat16)
    q, k, gamma_q, gamma_k = p.local
    rope = onepass.Rope(torch.randn(5, 64, generator=torch.Generator().manual_seed(7)), head_dim=64)
    wrong = []
    with torch.inference_mode():
        variants: dict[str, dict[str, Any]] = {
            "plain": {},
            "hf": {"rounding": "hf"},
            "rope": {"rope": rope},
            "float32": {"out_dtype": torch.float32},
            "offset": {"weight_offset": 1.0},
            "eps of k": {"eps_k": 0.5},
        }
        seen = {}
        for name, options in variants.items():
            got = dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, group=world, **options)
            whole = onepass.qk_rms_norm(p.q, p.k, p.gamma_q, p.gamma_k, EPS, **options)
            for a, b in zip(got, (whole[0][:, p.mine_q], whole[1][:, p.mine_k]), strict=True):
                if a.dtype != b.dtype or (a.float() - b.float()).abs().max() > 0.01 * b.float().abs().max():
                    wrong.append(f"{name} differs from the unsharded op")
                if (a == b).double().mean() < (0.97 if a.dtype == torch.bfloat16 else 0.0):
                    wrong.append(f"{name}: {(a == b).double().mean():.3f} equal")
            seen[name] = got[1].float()
        wrong += [f"{n} changes nothing" for n, y in seen.items() if n != "plain" and torch.equal(y, seen["plain"])]
        scales: dict[str, Any] = {"q_scale": torch.tensor(0.02), "k_scale": torch.tensor(0.03)}
        wide = dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, group=world, out_dtype=torch.float32)
        codes = dist.qk_rms_norm(q, k, gamma_q, gamma_k, EPS, group=world, out_dtype=torch.float8_e4m3fn, **scales)
        expected = [(y / scale).to(torch.float8_e4m3fn) for y, scale in zip(wide, scales.values(), strict=True)]
        if not all(map(same_bytes, codes, expected)) or not codes[1].float().any():
            wrong.append("codes")
        by_head = dist.qk_rms_norm(q, k, gamma_q[:64], gamma_k[:64], EPS, group=world, per_head=True)
        alone = onepass.qk_rms_norm(q, k, gamma_q[:64], gamma_k[:64], EPS, per_head=True)
        if not all(map(same_bytes, by_head, alone)) or heads != 2 * place.size:
            wrong.append("by head")
    return wrong


def olmo2(place: Place) -> dict[str, Any]:
    """Hugging Face's Olmo2Attention, unsharded and sharded in several ways: distances and collectives."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers.models.olmo2.configuration_olmo2 import Olmo2Config
    from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RotaryEmbedding

    torch.manual_seed(5)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
    sizes |= {"attn_implementation": "eager", "eos_token_id": 1, "pad_token_id": 0}
    config = Olmo2Config(**sizes)
    attention: Any = Olmo2Attention(config, layer_idx=0).eval()
    for norm in (attention.q_norm, attention.k_norm):
        torch.nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    x = torch.randn(2, 9, 128)
    position = Olmo2RotaryEmbedding(config)(x, torch.arange(9).expand(2, 9))
    mesh = init_device_mesh("cpu", (place.size,))
    projections = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    norms = {name: dist.QKNormParallel() for name in ("q_norm", "k_norm")}
    styles: dict[str, Any] = {
        "two norms": {**projections, "o_proj": RowwiseParallel(), **norms},
        "dtensors": {**{name: ColwiseParallel(use_local_output=False) for name in ("q_proj", "k_proj")}, **norms},
        "one collective": dist.QKAttentionParallel(),
        "reproducible": dist.QKAttentionParallel(reproducible=True),
    }
    found: dict[str, Any] = {}
    with torch.inference_mode():
        expected = attention(x, position, None)[0]
        q, k = attention.q_norm(attention.q_proj(x)), attention.k_norm(attention.k_proj(x))
    for name, style in styles.items():
        with torch.no_grad():
            sharded: Any = parallelize_module(copy.deepcopy(attention), mesh, style)
            if name == "dtensors":
                # the attention views local tensors as heads, so only the projections and norms are compared
                ours = [sharded.q_norm(sharded.q_proj(x)), sharded.k_norm(sharded.k_proj(x))]
                close = [float((a.full_tensor() - b).abs().max()) for a, b in zip(ours, (q, k), strict=True)]
                found[name] = {"apart": max(close), "scale": float(q.abs().max())}
                continue
            results = []
            for _ in range(3):
                with Collectives() as seen:
                    results.append(sharded(x, position, None)[0])
            found[name] = {
                "apart": float((results[0] - expected).abs().max()),
                "scale": float(expected.abs().max()),
                "collectives": seen.names,
                "steady": all(same_bytes(results[0], other) for other in results),
                "alone": apart(sharded.k_norm(sharded.k_proj(x)), k.chunk(place.size, -1)[place.rank], 1e-5),
                "weight": list(sharded.q_norm.weight.to_local().shape),
            }
    whole = parallelize_module(copy.deepcopy(attention), mesh, dist.QKAttentionParallel())
    with torch.no_grad():
        step = torch.compile(lambda h: whole(h, position, None)[0], backend="aot_eager", fullgraph=True)
        found["compiled"] = {"apart": float((step(x) - expected).abs().max()), "scale": float(expected.abs().max())}
    return found


def gathered_by_adding(place: Place) -> list[Any]:
    """What a Gloo group does on a GPU, done on the CPU: its collectives, and whether the bytes are an all-gather's."""
    p = problem(place, (7,), [64] * place.size, [32] * place.size)
    made = dist.plan(c10d.group.WORLD, 64, 32)  # type: ignore[arg-type]
    with torch.inference_mode():
        p.q[2, 5], p.q[3, 6] = torch.nan, torch.inf
        expected = dist.qk_rms_norm(*p.local, EPS, plan=made, reproducible=True)
        with pytest.MonkeyPatch.context() as patch, Collectives() as seen:
            patch.setattr(_norm, "_gathers_by_adding", lambda plan, sums: True)
            got = dist.qk_rms_norm(*p.local, EPS, plan=made, reproducible=True)
    return [seen.names, all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, expected, strict=True))]


def agreement_of_sizes(place: Place) -> list[float]:
    """The distances of the sharded norms of q and k from the unsharded op's, as fractions of the bound."""
    p = problem(place, (200,), [1536 // place.size] * place.size, [768 // place.size] * place.size)
    with torch.inference_mode():
        got = dist.qk_rms_norm(*p.local, EPS, group=c10d.group.WORLD)
        whole = onepass.qk_rms_norm(p.q, p.k, p.gamma_q, p.gamma_k, EPS)
    bound = agreement(1536, 1, place.size)
    mine = zip(got, (whole[0][:, p.mine_q], whole[1][:, p.mine_k]), strict=True)
    return [float(((a.double() - b.double()).abs() / b.double().abs()).max()) / bound for a, b in mine]


def time_one_row(place: Place) -> list[dict[str, Any]]:
    return time_calls(place, (1,))


WORK: dict[int, tuple[Callable[[Place], Any], ...]] = {
    2: (refused, debugged, passed_on),
    3: (gathered_by_adding,),
    4: (agreement_of_sizes,),
}
"""By number of ranks, functions to run after the checks, because starting ranks takes longer than most of them."""
LONG: tuple[Callable[[Place], Any], ...] = (compiled_without_plan, olmo2, time_one_row)
"""Functions for two ranks that compile graphs, import models or measure times."""


def everything(place: Place, names: list[str]) -> dict[str, Any]:
    """The outcome of each check by its name, and the result of each function in `WORK`, or its error."""
    return {
        "checks": run_checks(place, names),
        "work": {work.__name__: _outcome(work, place) for work in WORK.get(place.size, ())},
    }


def compiled(place: Place, names: list[str]) -> dict[str, Any]:
    """As `everything`, for the checks ``names`` and the functions in `LONG`."""
    return {
        "checks": run_checks(place, names),
        "work": {work.__name__: _outcome(work, place) for work in LONG},
    }


def _outcome(work: Callable[[Place], Any], place: Place) -> dict[str, Any]:
    try:
        return {"value": work(place), "error": ""}
    except Exception:
        return {"value": None, "error": traceback.format_exc()}
