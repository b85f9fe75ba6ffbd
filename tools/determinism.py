"""One promise for every op: a row's bytes depend on the row alone; part of ``python -m tools.checks --promises``.

They do not depend on the time (repeats), the number of rows (M, a split batch), the row's index or order, its address (alignment,
strides) or, on a CPU, the number of threads. A `Subject` is an op in one of its forms; the same tests run for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from onepass.formats import E4M3FN, E4M3FNUZ, FLOATS
from onepass.kvcache import DS_MLA_BYTES, PagedKVCache
from onepass.ops.gemv_norm.op import gemv_and_partial_norm
from onepass.ops.gemv_norm.spec import MAX_ROWS
from onepass.ops.linear.op import linear
from onepass.ops.mla_cache.op import fused_rope_rmsnorm_quantization
from onepass.ops.qk_cache.op import qk_norm_rope_cache
from onepass.ops.qk_norm.op import apply_qk_rms_norm, qk_rms_norm, row_mean_of_squares_qk, row_sum_of_squares_qk
from onepass.ops.rms_norm.finish import layer_norm
from onepass.ops.rms_norm.op import rms_norm, rms_norm_fused_fp8, rms_norm_fused_quant
from onepass.prologues import dequantize
from onepass.rope import Rope
from onepass.testing.case import same_bytes
from onepass.testing.rms_norm import soft_cap_gate

REPEATS: Final = 1000
Promise = Callable[[], str | None]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """An op in one form. Tensors in ``rows``, and all results, have one row per row; other tensors are shared."""

    name: str
    rows: Mapping[str, int]
    """Columns of each tensor that has rows; 0: the length of a row."""
    shared: Mapping[str, tuple[int, ...]]
    """Shapes of the shared tensors; 0 as above."""
    call: Callable[[Tensors], list[Tensor]]
    most: int = 1 << 20
    """The most rows that a call may have."""
    own: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtypes that differ from x's."""
    shared_out: int = 640
    """Row length for which a CPU splits 280,000 elements of x among threads."""

    def inputs(self, device: str, count: int, n: int, dtype: torch.dtype, seed: int = 0) -> Tensors:
        """Random tensors."""
        generator = torch.Generator().manual_seed(seed + n)
        found = {}
        shapes = {**{name: (count, columns) for name, columns in self.rows.items()}, **self.shared}
        for name, (*lead, columns) in shapes.items():
            t = torch.randn(*lead, columns or n, generator=generator)
            found[name] = t.to(self.own.get(name, dtype)).to(device)
        return found

    def part(self, tensors: Tensors, rows: Any) -> Tensors:
        """The tensors of some rows."""
        return {name: t[rows] if name in self.rows else t for name, t in tensors.items()}


def _heads(t: Tensors) -> list[Tensor]:
    """The norms of heads, with statistics and as codes."""
    x, gamma = t["x"].unflatten(-1, (4, 80)), t["gamma"]
    y, rstd = layer_norm(x, gamma, return_rstd=True)
    codes, scale, rms = rms_norm_fused_fp8(x, gamma, return_rstd=True)
    return [rms_norm(x, gamma).flatten(-2), y.flatten(-2), rstd, codes.flatten(-2), scale.squeeze(-1), rms]


def _gated(t: Tensors) -> list[Tensor]:
    given: dict[str, Any] = {"gate": t["z"], "bias": t["bias"]}
    return [
        rms_norm(t["x"], t["gamma"], **given),
        rms_norm(t["x"], t["gamma"], gate_activation="sigmoid", **given),
        *rms_norm_fused_quant(t["x"], t["gamma"], format="int8", gate_activation="sigmoid", **given),
    ]


def _fp8(t: Tensors, **options: Any) -> list[Tensor]:
    return list(rms_norm_fused_fp8(t["x"], t["gamma"], residual=t["r"], return_norm=True, **options))


def _as_vllm(t: Tensors, group: int | None) -> list[Tensor]:
    """The norm of the unrounded sum, divided by a scale with a minimum and a bound in memory."""
    bound = torch.full((1,), 1.5, device=t["x"].device)
    options: dict[str, Any] = {"rounding": "hf", "round_sum": False, "quantize": "divide", "min_scale": 1 / (448 * 512)}
    options |= {"residual": t["r"], "scale_ub": bound, "group_size": group}
    return list(rms_norm_fused_fp8(t["x"], t["gamma"], **options))


def _groups(t: Tensors) -> list[Tensor]:
    return list(rms_norm_fused_fp8(t["x"], t["gamma"], group_size=64, out_dtype=E4M3FNUZ.dtype))


def _static(t: Tensors) -> list[Tensor]:
    return list(rms_norm_fused_fp8(t["x"], t["gamma"], static_scale=torch.full((), 0.02, device=t["x"].device))[:1])


def _quant(t: Tensors, **options: Any) -> list[Tensor]:
    return list(rms_norm_fused_quant(t["x"], t["gamma"], residual=t["r"], return_norm=True, **options))


def _prologue(t: Tensors) -> list[Tensor]:
    return list(
        rms_norm_fused_fp8(t["x"], t["gamma"], prologue=soft_cap_gate, prologue_args=[t["r"], t["bias"], t["s"]])
    )


def _dequantized(t: Tensors) -> list[Tensor]:
    return list(rms_norm_fused_fp8(t["x"], t["gamma"], residual=t["r"], prologue=dequantize, prologue_args=[t["s"]]))


def _angles(like: Tensor) -> Tensor:
    return torch.arange(16.0, device=like.device).unsqueeze(1).expand(16, 32).cos().contiguous()


def _positions(t: Tensors) -> Tensor:
    """A position per row, computed from the row so that it moves with it."""
    return (t["q"][:, 0].float().abs() * 8).long()


def _apply(t: Tensors) -> list[Tensor]:
    outs = torch.empty_like(t["q"].contiguous()), torch.empty_like(t["k"].contiguous())
    apply_qk_rms_norm(*outs, t["gamma"], t["gamma_k"], t["var"].abs(), t["q"], t["k"], 1e-6)
    return list(outs)


def _per_head(t: Tensors) -> list[Tensor]:
    rope = Rope(_angles(t["q"]), _positions(t), "half", 32)
    gamma = t["gamma_k"]
    return list(qk_rms_norm(t["h"], t["k"], gamma, gamma, rope=rope, per_head=True, rounding="hf"))


def _qk_codes(t: Tensors) -> list[Tensor]:
    """Codes and the scale of each head."""
    rope = Rope(_angles(t["q"]), _positions(t), "interleaved", 32)
    gamma = t["gamma_k"]
    return list(qk_rms_norm(t["h"], t["k"], gamma, gamma, rope=rope, per_head=True, out_dtype=E4M3FN.dtype, eps_k=0.01))


def _gemv(t: Tensors, **options: Any) -> list[Tensor]:
    return list(gemv_and_partial_norm(t["act"], t["weight"], t["gamma"], **options))


def _linear(t: Tensors, **options: Any) -> list[Tensor]:
    return list(linear(t["x"], t["weight"], residual=t["r"], add=t["add"], **options))


def _linear_blocks(t: Tensors) -> list[Tensor]:
    """Norm and activation. The scales of blocks depend on the number of columns."""
    blocks = -(-t["x"].shape[1] // 128)
    scale = torch.arange(1, 2 * blocks + 1, device=t["x"].device).float().view(2, blocks) / 64
    named: dict[str, Any] = {"gamma": t["gamma"], "bias": t["bias"], "weight_scale": scale}
    return [linear(t["x"], t["weight"], activation="silu_mul", rounding="hf", **named)]


def _mla(t: Tensors, **options: Any) -> list[Tensor]:
    """q, entries and scales in token order; slots run backwards."""
    count, device = t["kv"].shape[0], t["kv"].device
    blocks = torch.zeros(-(-count // 4) + 1, 4, t["kv"].shape[1], device=device).to(E4M3FN.dtype)
    scale = torch.zeros(blocks.shape[:2], device=device)
    slots = torch.arange(count, device=device).flip(0) + 3
    options |= {"per_token_scale": scale, "slot_mapping": slots, "positions": _positions(t)}
    named = (t["q"].unflatten(1, (2, 32)), t["kv"], None, _angles(t["q"]), t["gamma"], PagedKVCache(blocks))
    q = fused_rope_rmsnorm_quantization(None, *named, **options)
    return [q, blocks.view(torch.uint8).flatten(0, 1)[slots], scale.flatten()[slots]]


def _packed(t: Tensors) -> list[Tensor]:
    """Entries of 656 bytes in token order."""
    count, device = t["kv"].shape[0], t["kv"].device
    blocks = torch.zeros(-(-count // 4) + 1, 4, DS_MLA_BYTES, dtype=torch.uint8, device=device)
    slots = torch.arange(count, device=device).flip(0) + 3
    cache = PagedKVCache(blocks, entry_format="fp8_ds_mla")
    named = (t["q"].unflatten(1, (2, 64)), t["kv"], None, _angles(t["q"]), t["gamma"], cache)
    q = fused_rope_rmsnorm_quantization(None, *named, slot_mapping=slots, positions=_positions(t))
    return [q, blocks.flatten(0, 1)[slots]]


def _write(t: Tensors, layout: Any, cache: torch.dtype, **options: Any) -> list[Tensor]:
    """q and the entries of k and v in token order; slots run backwards. k and v are the columns after q's."""
    count, device = t["q"].shape[0], t["q"].device
    heads = [t[name].unflatten(1, (-1, 32)) for name in ("q", "k", "v")]
    pages = -(-count // 4) + 1
    shape = (pages, 4, 3, 32) if layout == "NHD" else (pages, 3, 4, 32)
    caches = [torch.zeros(shape, device=device).to(cache) for _ in range(2)]
    slots = torch.arange(count, device=device).flip(0) + 3
    rope = Rope(_angles(t["q"]), _positions(t), "half", 32)
    q, _ = qk_norm_rope_cache(*heads, *caches, rope=rope, slots=slots, layout=layout, **options)
    ordered = (c if layout == "NHD" else c.transpose(1, 2) for c in caches)
    return [q, *(c.contiguous().view(torch.uint8).flatten(0, 1)[slots].flatten(1) for c in ordered)]


_ROW, _GAMMA = {"x": 0, "r": 0}, {"gamma": (0,)}
_QK, _GAMMAS = {"q": 0, "k": 96}, {"gamma": (0,), "gamma_k": (96,)}
_MLA = {"q": 64, "kv": 0}
_GEMV: dict[str, Any] = {"rows": {"act": 0}, "shared": {"gamma": (40,), "weight": (70, 0)}, "shared_out": 2000}
_FP8_WEIGHT = {"weight": E4M3FN.dtype}
SUBJECTS: Final = (
    Subject("rms_norm", _ROW, _GAMMA, lambda t: list(rms_norm(t["x"], t["gamma"], residual=t["r"]))),
    Subject("rms_norm, hf", _ROW, _GAMMA, lambda t: [rms_norm(t["x"], t["gamma"], rounding="hf")]),
    Subject(
        "rms_norm, gate and bias",
        {**_ROW, "z": 0},
        {**_GAMMA, "bias": (0,)},
        _gated,
    ),
    Subject(
        "rms_norm, no gamma, statistics",
        _ROW,
        {},
        lambda t: list(rms_norm(t["x"], None, residual=t["r"], return_rstd=True)),
    ),
    Subject("rms_norm, heads", {"x": 320}, {"gamma": (4, 80)}, _heads),
    Subject(
        "layer_norm",
        _ROW,
        {**_GAMMA, "bias": (0,)},
        lambda t: list(layer_norm(t["x"], t["gamma"], t["bias"], residual=t["r"])),
    ),
    Subject("rms_norm_fused_fp8", _ROW, _GAMMA, _fp8),
    Subject("rms_norm_fused_fp8, hf, UE8M0", _ROW, _GAMMA, partial(_fp8, rounding="hf", scale_format="ue8m0")),
    Subject(
        "rms_norm, rounded sum",
        _ROW,
        _GAMMA,
        lambda t: list(rms_norm(t["x"], t["gamma"], residual=t["r"], round_sum=True)),
    ),
    Subject("rms_norm_fused_fp8, as vLLM", _ROW, _GAMMA, partial(_as_vllm, group=None)),
    Subject(
        "rms_norm_fused_fp8, as vLLM, groups", {"x": 320, "r": 320}, {"gamma": (320,)}, partial(_as_vllm, group=64)
    ),
    Subject("rms_norm_fused_fp8, groups", {"x": 320}, {"gamma": (320,)}, _groups),
    Subject("rms_norm_fused_fp8, static scale", {"x": 0}, _GAMMA, _static),
    Subject("rms_norm_fused_quant", _ROW, _GAMMA, partial(_quant, format="int8", rounding="stored")),
    Subject("rms_norm_fused_quant, nvfp4", {"x": 336, "r": 336}, {"gamma": (336,)}, partial(_quant, format="nvfp4")),
    Subject(
        "rms_norm_fused_quant, mxfp4",
        {"x": 320, "r": 320},
        {"gamma": (320,)},
        partial(_quant, format="mxfp4", quantize="divide"),
    ),
    Subject("rms_norm_fused_fp8, prologue", {**_ROW, "s": 1}, {**_GAMMA, "bias": (0,)}, _prologue),
    Subject(
        "rms_norm_fused_fp8, dequantize",
        {"x": 320, "r": 320, "s": 5},
        {"gamma": (320,)},
        _dequantized,
        own={"x": E4M3FN.dtype, "s": torch.float32},
    ),
    Subject("row_sum_of_squares_qk", _QK, {}, lambda t: [row_sum_of_squares_qk(t["q"], t["k"])]),
    Subject("row_mean_of_squares_qk", _QK, {}, lambda t: [row_mean_of_squares_qk(t["q"], t["k"])]),
    Subject("apply_qk_rms_norm", {**_QK, "var": 2}, _GAMMAS, _apply, own={"var": torch.float32}),
    Subject("qk_rms_norm", _QK, _GAMMAS, lambda t: list(qk_rms_norm(t["q"], t["k"], t["gamma"], t["gamma_k"]))),
    Subject("qk_rms_norm, heads and RoPE", {**_QK, "h": 480}, {"gamma_k": (96,)}, _per_head),
    Subject("qk_rms_norm, codes of heads", {**_QK, "h": 480}, {"gamma_k": (96,)}, _qk_codes),
    Subject("gemv_and_partial_norm", call=_gemv, most=MAX_ROWS, **_GEMV),
    Subject(
        "gemv_and_partial_norm, fp8 weights and result",
        call=partial(_gemv, normed_dtype=E4M3FN.dtype),
        most=MAX_ROWS,
        own=_FP8_WEIGHT,
        **_GEMV,
    ),
    Subject(
        "gemv_and_partial_norm, two launches, fp8 weights", call=partial(_gemv, fused=False), own=_FP8_WEIGHT, **_GEMV
    ),
    Subject(
        "linear",
        {"x": 0, "r": 0, "add": 70},
        {"weight": (70, 0)},
        _linear,
        own={"r": torch.float32},
        shared_out=2000,
    ),
    Subject(
        "linear, norm, activation, fp8 weights in blocks",
        {"x": 0},
        {"weight": (140, 0), "gamma": (0,), "bias": (140,)},
        _linear_blocks,
        own=_FP8_WEIGHT,
        shared_out=2000,
    ),
    Subject("fused_rope_rmsnorm_quantization", _MLA, {}, lambda t: _mla({**t, "gamma": _latent(t)})),
    Subject(
        "fused_rope_rmsnorm_quantization, reference",
        _MLA,
        {},
        lambda t: _mla({**t, "gamma": _latent(t)}, rounding="reference", rope_style="half"),
    ),
    Subject("fused_rope_rmsnorm_quantization, packed", {"q": 128, "kv": 576}, {"gamma": (512,)}, _packed),
    Subject(
        "qk_norm_rope_cache",
        {"q": 160, "k": 96, "v": 96},
        {"gamma": (32,), "gamma_k": (32,)},
        lambda t: _write(t, "NHD", t["q"].dtype, gamma_q=t["gamma"], gamma_k=t["gamma_k"], rounding="hf"),
    ),
    Subject(
        "qk_norm_rope_cache, whole rows to fp8",
        {"q": 160, "k": 96, "v": 96},
        {"gamma": (160,), "gamma_k": (96,)},
        lambda t: _write(t, "HND", E4M3FN.dtype, gamma_q=t["gamma"], gamma_k=t["gamma_k"], per_head=False),
    ),
)


def _latent(t: Tensors) -> Tensor:
    """A gamma for the columns that do not rotate."""
    columns = t["kv"].shape[1] - 32
    return torch.arange(columns, device=t["kv"].device).cos().to(t["kv"].dtype)


def _differing(some: list[Tensor], others: list[Tensor]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=True)) if not same_bytes(a, b)), None)


def repeats(subject: Subject, device: str, n: int, dtype: torch.dtype) -> str | None:
    """The same call a thousand times."""
    t = subject.inputs(device, 3, n, dtype)
    first = subject.call(t)
    for repeat in range(REPEATS):
        wrong = _differing(subject.call(t), first)
        if wrong is not None:
            return f"result {wrong} differs in repeat {repeat}"
    return None


def batches(subject: Subject, device: str, n: int, dtype: torch.dtype) -> str | None:
    """Some rows alone, the batch in two parts, and its rows in another order."""
    count = min(300 if device == "cuda" else 40, subject.most)
    t = subject.inputs(device, count, n, dtype)
    whole = subject.call(t)
    for rows in (1, 2, 3, 7, 16, 33):
        for begin in {0, 1, count // 2, count - rows}:
            if 0 <= begin <= count - rows:
                part = slice(begin, begin + rows)
                wrong = _differing(subject.call(subject.part(t, part)), [w[part] for w in whole])
                if wrong is not None:
                    return f"result {wrong} of rows {begin} to {begin + rows} differs from the whole batch's"
    parts = [subject.call(subject.part(t, part)) for part in (slice(0, count // 3), slice(count // 3, count))]
    joined = [torch.cat([_bytes(a), _bytes(b)]) for a, b in zip(*parts, strict=True)]
    wrong = _differing(joined, [_bytes(w) for w in whole])
    if wrong is not None:
        return f"result {wrong} differs when the batch is split"
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count)).to(device)
    wrong = _differing([_bytes(t) for t in subject.call(subject.part(t, order))], [_bytes(w)[order] for w in whole])
    return None if wrong is None else f"result {wrong} differs when rows are reordered"


def _bytes(t: Tensor) -> Tensor:
    """Rows as bytes, since fp8 tensors cannot be indexed."""
    return t.contiguous().view(torch.uint8).reshape(t.shape[0], -1)


def alignment(subject: Subject, device: str, n: int, dtype: torch.dtype) -> str | None:
    """Move each tensor, then all of them, with gaps between rows."""
    t = subject.inputs(device, 5, n, dtype)
    expected = subject.call(t)

    def moved(tensor: Tensor, shift: int) -> Tensor:
        *lead, columns = tensor.shape
        memory = torch.empty(*lead, columns + 2 * shift, dtype=tensor.dtype, device=device)
        return memory[..., shift : shift + columns].copy_(tensor)

    for shift in (1, 2, 3, 4, 8):
        for names in (*([name] for name in t), list(t)):
            there = {name: moved(tensor, shift) if name in names else tensor for name, tensor in t.items()}
            wrong = _differing(subject.call(there), expected)
            if wrong is not None:
                return f"result {wrong} differs with {', '.join(names)} moved by {shift} elements"
    return None


def threads(subject: Subject, dtype: torch.dtype) -> str | None:
    """On a CPU: enough rows for several threads, with different numbers of threads."""
    n = subject.shared_out
    t = subject.inputs("cpu", min(subject.most, 280_000 // n + 1), n, dtype)
    before, seen = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            seen.append(subject.call(t))
    finally:
        torch.set_num_threads(before)
    wrong = next((w for other in seen[1:] if (w := _differing(other, seen[0])) is not None), None)
    return None if wrong is None else f"result {wrong} depends on the number of threads"


LENGTHS: Final = (100, 640)


def determinism_promises(device: str) -> Iterator[tuple[str, Promise]]:
    """Name and test of every promise, for each op and dtype."""
    for subject in SUBJECTS:
        for dtype in FLOATS:
            label = f"{subject.name}, {str(dtype).removeprefix('torch.')}"
            yield f"a thousand repeats change no bit: {label}", partial(repeats, subject, device, LENGTHS[0], dtype)
            # each dtype is compiled on a GPU, and float16 takes the same paths as bfloat16
            for n in LENGTHS[1:] if device == "cuda" and dtype == torch.float16 else LENGTHS:
                yield f"a row's bytes are its own: {label}, {n} columns", partial(batches, subject, device, n, dtype)
                yield f"alignment changes no bit: {label}, {n} columns", partial(alignment, subject, device, n, dtype)
            if device == "cpu":
                yield f"threads change no bit: {label}", partial(threads, subject, dtype)
