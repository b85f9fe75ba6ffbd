"""qk_norm_rope_cache on the CPU: the bytes of the separate calls and of transformers, places in caches, and torch's modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.formats import FLOATS, FP8_FORMATS
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.testing.tensors import same_bytes
from tests.qk_cache import checks as qk_cache
from tests.qk_cache.checks import Angles, QkCacheCase
from tests.qk_cache.promises import promises

BF16, F16, F32 = FLOATS
FP8 = torch.float8_e4m3fn


def tokens(*lead: int, heads: tuple[int, int] = (4, 2), d: int = 64, dtype: torch.dtype = BF16) -> list[Tensor]:
    """q, k and v as slices of one projection."""
    packed = torch.randn(*lead, heads[0] + 2 * heads[1], d).to(dtype)
    return list(packed.split((heads[0], heads[1], heads[1]), -2))


def angles(positions: int, dim: int) -> Tensor:
    angle = torch.rand(positions, dim // 2) * 6.3
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)


# --- the separate calls ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(40)  # each compiles kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("style", ["half", "interleaved", None])
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize(("d", "dim"), [(64, 64), (64, 32), (80, 40)])
def test_bytes_are_those_of_the_separate_calls(
    dtype: torch.dtype, style: Any, per_head: bool, d: int, dim: int
) -> None:
    """The norm and rotation of qk_rms_norm, then a plain copy or an fp8 cast, for every cache dtype and layout."""
    q, k, v = tokens(2, 3, heads=(5, 2), d=d, dtype=dtype)
    positions = torch.tensor([[3, 0, 9], [1, 4, 99]])
    rope = None if style is None else onepass.Rope(angles(10, dim), positions, style, head_dim=d)
    sizes = (d, d) if per_head else (5 * d, 2 * d)
    gammas = [torch.randn(n).to(dtype) for n in sizes]
    given: dict[str, Any] = {"gamma_q": gammas[0], "gamma_k": gammas[1], "eps": 1e-5, "weight_offset": 1.0}
    options: dict[str, Any] = given | {"rope": rope, "per_head": per_head}
    expected = onepass.qk_rms_norm(q.flatten(-2), k.flatten(-2), **options)
    wide = onepass.qk_rms_norm(q.flatten(-2), k.flatten(-2), **options, out_dtype=F32)[1].view(k.shape)
    plain = onepass.qk_norm_rope_cache(q, k, **given, per_head=per_head, rope=rope)
    assert plain[1] is not None
    assert same_bytes(plain[0].flatten(-2), expected[0]) and same_bytes(plain[1].flatten(-2), expected[1])
    slots = torch.tensor([[7, -1, 2], [0, 99, 11]])
    scales = {"k_scale": torch.tensor(0.0371), "v_scale": torch.tensor(0.0219)}
    for layout in ("NHD", "HND", "dense"):
        for cache in (*FLOATS, *FP8_FORMATS) if dtype == BF16 else (dtype, FP8):
            shape = {"NHD": (3, 4, 2, d), "HND": (3, 2, 4, d), "dense": (2, 2, 5, d)}[layout]
            caches = [torch.zeros(shape).to(cache) for _ in range(2)]
            divided = scales if cache in FP8_FORMATS else {}
            where: dict[str, Any] = {"start": 1} if layout == "dense" else {"slots": slots}
            where |= {"layout": layout, **divided}
            got, none = onepass.qk_norm_rope_cache(q, k, v, caches[0], caches[1], **options, **where)
            assert none is None and same_bytes(got.flatten(-2), expected[0])
            for name, values, made in (("k", wide, caches[0]), ("v", v.float(), caches[1])):
                want = torch.zeros(shape).to(cache)
                _put(want, layout, slots, _stored(values, divided.get(f"{name}_scale"), cache))
                assert same_bytes(made, want), (layout, cache, name)


def _stored(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    fmt = FP8_FORMATS.get(dtype)
    if fmt is None:
        return values.to(dtype)
    quotient = values / scale if scale is not None else values
    codes = rms_norm_reference.encode(quotient.double(), fmt.bias, fmt.max, fmt.nan_code, fmt.has_negative_zero)
    return codes.view(dtype)


def _put(cache: Tensor, layout: str, slots: Tensor, values: Tensor) -> None:
    """Token by token."""
    to, what = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (cache, values))
    for b in range(values.shape[0]):
        for s in range(values.shape[1]):
            if layout == "dense":
                to[b, :, 1 + s] = what[b, s]
                continue
            page, entry = divmod(int(slots[b, s]), 4)
            if 0 <= page < cache.shape[0]:
                (to[page, entry] if layout == "NHD" else to[page, :, entry]).copy_(what[b, s])


# --- transformers ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)  # each compiles a kernel
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("norm", ["none", "head", "gemma"])
def test_hf_keeps_the_bits_of_transformers(dtype: torch.dtype, norm: str) -> None:
    """The rotation of Llama, Qwen3 and Gemma, after our norm in their rounding, up to the write into a static cache."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    batch, length, d = 3, 5, 32
    q, k, v = tokens(batch, length, d=d, dtype=dtype)
    angle = torch.rand(batch, length, d // 2) * 6.3
    angle = torch.cat((angle, angle), -1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    given: dict[str, Any] = {}
    rows: tuple[Tensor, ...] = (q, k)
    rounding: Any = "hf_rope" if norm == "gemma" else "hf"
    if norm != "none":
        given = {"gamma_q": torch.randn(d).to(dtype), "gamma_k": torch.randn(d).to(dtype)}
        given["weight_offset"] = float(norm == "gemma")
        rows = onepass.qk_rms_norm(q, k, **given, per_head=True, rounding="hf" if norm == "head" else "once")
    with torch.no_grad():
        expected = llama.apply_rotary_pos_emb(*(t.transpose(1, 2) for t in rows), cos, sin)
    caches = [torch.zeros(batch, 2, 9, d, dtype=dtype) for _ in range(2)]
    got, _ = onepass.qk_norm_rope_cache(
        q,
        k,
        v,
        *caches,
        **given,
        rope=onepass.Rope(cos=cos, sin=sin),
        rounding=rounding,
        layout="dense",
        start=torch.tensor([4]),
    )
    assert same_bytes(got.transpose(1, 2), expected[0])
    assert same_bytes(caches[0][:, :, 4:], expected[1]) and same_bytes(caches[1][:, :, 4:], v.transpose(1, 2))
    assert not caches[0][:, :, :4].any()


@pytest.mark.sampled(3)  # each compiles a kernel
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("family", "style"), [("phi3", "half"), ("glm4", "interleaved")])
def test_hf_keeps_the_bits_of_partial_rotations(dtype: torch.dtype, family: str, style: Any) -> None:
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    q, k, _ = tokens(2, 3, dtype=dtype)
    angle = torch.rand(1, 3, 16) * 6.3
    angle = torch.cat((angle, angle), -1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    expected = module.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    got = onepass.qk_norm_rope_cache(q, k, rope=onepass.Rope(style=style, cos=cos, sin=sin), rounding="hf")
    assert got[1] is not None
    assert same_bytes(got[0].transpose(1, 2), expected[0]) and same_bytes(got[1].transpose(1, 2), expected[1])


# --- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, -2, 3, 100, torch.tensor(-1), torch.tensor([2]), torch.tensor([5, -3]).int()])
def test_dense_entries_outside_the_cache_are_not_stored(start: Any) -> None:
    q, k, v = tokens(2, 4)
    caches = [torch.full((2, 2, 6, 64), 7.0, dtype=BF16) for _ in range(2)]
    onepass.qk_norm_rope_cache(q, k, v, *caches, layout="dense", start=start)
    first = [start, start] if isinstance(start, int) else start.expand(2).tolist()
    for values, cache in ((k, caches[0]), (v, caches[1])):
        want = torch.full_like(cache, 7.0)
        for b in range(2):
            for s in range(4):
                if 0 <= first[b] + s < 6:
                    want[b, :, first[b] + s] = values[b, s]
        assert same_bytes(cache, want)


def test_empty_calls_do_nothing() -> None:
    for lead in ((0,), (0, 3), (2, 0)):
        q, k, v = tokens(*lead)
        slots = torch.zeros(lead, dtype=torch.int64)
        cache = torch.zeros(0, 4, 2, 64, dtype=BF16)
        got, _ = onepass.qk_norm_rope_cache(q, k, v, cache, cache.clone(), slots=slots)
        assert got.shape == q.shape
    q, k, v = tokens(3)
    got, _ = onepass.qk_norm_rope_cache(q, k, v, cache, cache.clone(), slots=torch.tensor([0, 1, -1]))
    assert same_bytes(got, q)  # a cache without pages stores nothing


def test_debug_mode_names_wrong_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_DEBUG", "1")
    q, k, v = tokens(3)
    caches = [torch.zeros(2, 4, 2, 64, dtype=BF16) for _ in range(2)]
    table = angles(4, 64)
    with pytest.raises(onepass.ContractError, match=r"`slots` must be below 8, got 8"):
        onepass.qk_norm_rope_cache(q, k, v, *caches, slots=torch.tensor([0, 8, 1]))
    with pytest.raises(onepass.ContractError, match=r"`positions` must lie within the 4 rows of freqs, got 0 to 4"):
        onepass.qk_norm_rope_cache(q, k, rope=onepass.Rope(table, torch.tensor([0, 4, 1])))
    with pytest.raises(onepass.ContractError, match=r"`freqs` must have a row for every token of a sequence"):
        onepass.qk_norm_rope_cache(q, k, rope=onepass.Rope(table[:2]))
    onepass.qk_norm_rope_cache(q, k, v, *caches, rope=onepass.Rope(table), slots=torch.tensor([0, -5, 1]))


@pytest.mark.parametrize("memory", ["in one tensor", "heads first in shape, last in memory"])
def test_caches_may_share_a_tensor(memory: str) -> None:
    """As in serving engines: k and v of a page next to each other."""
    q, k, v = tokens(3)
    parent = torch.zeros(4, 2, 8, 2, 64, dtype=BF16)
    layout: Any = "NHD"
    caches = [parent[:, 0], parent[:, 1]]
    if memory != "in one tensor":
        layout, caches = "HND", [t.transpose(1, 2) for t in caches]
    onepass.qk_norm_rope_cache(q, k, v, *caches, slots=torch.tensor([9, 31, 0]), layout=layout)
    assert same_bytes(parent[:, 0].flatten(0, 1)[[9, 31, 0]], k)
    assert same_bytes(parent[:, 1].flatten(0, 1)[[9, 31, 0]], v)
    assert int(parent.flatten(3).any(-1).sum()) == 6


@pytest.mark.parametrize("case", ["the same", "shifted by an entry", "rows of q"])
def test_overlapping_outputs_are_rejected(case: str) -> None:
    q, k, v = tokens(3)
    parent = torch.zeros(9, 4, 2, 64, dtype=BF16)
    caches = {
        "the same": (parent, parent),
        "shifted by an entry": (parent[:-1], parent.view(36, 2, 64)[1:33].view(8, 4, 2, 64)),
    }
    given = caches.get(case, (parent, torch.zeros_like(parent)))
    out = torch.as_strided(q, q.shape, q.stride(), 8) if case == "rows of q" else None
    with pytest.raises(onepass.ContractError, match=r"`\w+` must not overlap `\w+`"):
        onepass.qk_norm_rope_cache(q, k, v, *given, slots=torch.tensor([0, 1, 2]), out=out)


_Q, _K, _V = (torch.zeros(2, 3, heads, 8) for heads in (4, 2, 2))


def _pair(angles: Tensor, **options: Any) -> onepass.Rope:
    return onepass.Rope(cos=angles, sin=angles, **options)


_PAGED = {"v": _V, "k_cache": torch.zeros(5, 4, 2, 8), "v_cache": torch.zeros(5, 4, 2, 8)}
_DENSE = {"v": _V, "k_cache": torch.zeros(2, 2, 9, 8), "v_cache": torch.zeros(2, 2, 9, 8), "layout": "dense"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma_q": torch.ones(8)}, "`gamma_k` must be given with gamma_q, or both be None"),
        ({"gamma_q": torch.ones(32), "gamma_k": torch.ones(8)}, "`gamma_q` must have q's columns per head, D=8"),
        ({"gamma_q": torch.ones(8), "gamma_k": torch.ones(8), "per_head": False}, "`gamma_q` must have q's columns per head"),
        ({"rope": 3}, "`rope` must be a Rope or None, got 3"),
        ({"rope": (_Q, _Q)}, "`rope` must be a Rope or None"),
        ({"rope": onepass.Rope(cos=_V[:, :, 0])}, "`sin` must come with cos"),
        ({"rope": onepass.Rope(cos=_V[:, :, 0], sin=_V[:, :, 0].half())}, "`sin` must have cos' dtype"),
        ({"rope": _pair(torch.zeros(2, 3, 10))}, "`dim` must be at most q's columns per head, D=8"),
        ({"rope": _pair(torch.zeros(2, 3, 7))}, "`dim` must be even"),
        ({"rope": onepass.Rope()}, "`rope` must have freqs, or cos and sin"),
        ({"rope": _pair(_V[:, :, 0], dim=4)}, "`dim` must be None without freqs"),
        ({"rope": _pair(_V[:, :, 0], style="both")}, "`style` must be 'half' or 'interleaved'"),
        ({"rope": onepass.Rope(torch.zeros(4, 8), head_dim=4)}, "`head_dim` must be None or q's last dimension"),
        ({"rope": onepass.Rope(torch.zeros(4, 8), dim=9)}, "`dim` must be even and at most the width of the angles"),
        (_PAGED, "`slots` must be given with a paged cache, and only then, got None"),
        ({"slots": torch.zeros(2, 3, dtype=torch.int64)}, "`slots` must be given with a paged cache, and only then"),
        (_PAGED | {"v_cache": None}, "`v_cache` must be given with k_cache and v, got None"),
        (_PAGED | {"v": None}, "`v` must be given with v_cache, got None"),
        (_PAGED | {"layout": "HND"}, "`k_cache` must have k's heads, Hk=2"),
        (_PAGED | {"start": 1, "slots": torch.zeros(2, 3, dtype=torch.int64)}, "`start` must be None without a dense cache"),
        (_PAGED | {"layout": "paged"}, "`layout` must be 'NHD' or 'HND' or 'dense'"),
        (_DENSE | {"start": 1.5}, "`start` must be an int"),
        (_DENSE | {"start": torch.zeros(3, dtype=torch.int64)}, "`start` must have one element, or one for each sequence"),
        (_DENSE | {"start": torch.zeros(1)}, "`start` must have dtype int32 or int64"),
        (_DENSE | {"k_scale": torch.ones(1)}, "`k_scale` must be None unless the cache is fp8"),
        ({"q": _Q[:, 0], "k": _K[:, 0], **_DENSE, "v": _V[:, 0]}, r"`q` must have shape \[B, S, Hq, D\] with a dense cache"),
        ({"q": _Q[0, 0], "k": _K[0, 0]}, r"`q` must have shape \[T, Hq, D\] or \[B, S, Hq, D\]"),
        ({"out": (_Q,)}, "`out` must be a tensor or a pair of tensors"),
        (_DENSE | {"out": (_Q, _K)}, "`k_out` must be None unless k_cache is None"),
        ({"rounding": "twice"}, "`rounding` must be 'once' or 'hf' or 'hf_rope'"),
    ],
)  # fmt: skip
def test_error_messages(change: dict[str, Any], message: str) -> None:
    with pytest.raises(onepass.ContractError, match="^qk_norm_rope_cache: " + message):
        onepass.qk_norm_rope_cache(**{"q": _Q, "k": _K, **change})


def test_whole_rows_need_adjacent_heads() -> None:
    q = torch.zeros(2, 4, 3, 8).transpose(1, 2)
    gammas: dict[str, Any] = {"gamma_q": torch.ones(32), "gamma_k": torch.ones(16)}
    with pytest.raises(onepass.ContractError, match="`q` must have adjacent heads with per_head=False"):
        onepass.qk_norm_rope_cache(q, _K, **gammas, per_head=False)


# --- torch ----------------------------------------------------------------------------------------------------------


def compiled_step(q: Tensor, k: Tensor, v: Tensor, caches: list[Tensor], rope: Any, start: Tensor) -> Tensor:
    got, _ = onepass.qk_norm_rope_cache(q * 2, k, v, *caches, rope=rope, layout="dense", start=start, rounding="hf")
    return got + caches[0].float().sum() + caches[1].float().sum()


def test_compiles_as_one_graph() -> None:
    q, k, v = tokens(2, 1)
    rope = onepass.Rope(cos=torch.rand(1, 1, 64).to(BF16), sin=torch.rand(1, 1, 64).to(BF16))
    compiled = torch.compile(compiled_step, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        some, others = ([torch.zeros(2, 2, 6, 64, dtype=BF16) for _ in range(2)] for _ in range(2))
        for step in range(3):
            start = torch.tensor([step])
            got = compiled(q, k, v, some, rope, start)
            assert torch.equal(got, compiled_step(q, k, v, others, rope, start))
    assert all(same_bytes(a, b) for a, b in zip(some, others, strict=True)) and some[0].any()


def test_opcheck() -> None:
    q, k, v = tokens(3)
    caches = [torch.zeros(2, 4, 2, 64, dtype=BF16) for _ in range(2)]
    nothing = [None] * 6
    slots = torch.tensor([1, -1, 6])
    arguments = (q, k, v, *nothing, slots, None, None, None, *caches)
    options = (1e-6, 0.0, True, "half", None, 0, "NHD", "once", 0, 0, "contiguous", False, False)
    outs = (torch.empty_like(q), None, None, None)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.onepass.qk_norm_rope_cache.default, (*arguments, *options, *outs), test_utils=tests)


def test_fake_tensors_have_the_results_shapes() -> None:
    q, k, v = (t.to("meta") for t in tokens(2, 3))
    made, none = onepass.qk_norm_rope_cache(q, k, v, *[torch.empty(2, 2, 9, 64, device="meta")] * 2, layout="dense")
    assert made.shape == q.shape and none is None
    both = onepass.qk_norm_rope_cache(q, k)
    assert both[1] is not None and both[1].shape == k.shape


@pytest.mark.full  # test_determinism.py has its batches, layouts and threads
@pytest.mark.parametrize("promise", [pytest.param(test, id=name) for name, test in promises("cpu")])
def test_promises(promise: Callable[[], str | None]) -> None:
    assert promise() is None


@pytest.mark.parametrize("wrong", ["entry", "scale", "rounding", "rotation"])
def test_verification_fails_for_wrong_results(wrong: str) -> None:
    """The check of a case notices each kind of mistake."""
    case = QkCacheCase("mistakes", (4,), angles=Angles(64), cache=FP8, scale="kv", rounding="hf")
    arguments = qk_cache.inputs(case, "cpu")
    changed = dict(arguments)
    if wrong == "entry":
        changed["slots"] = arguments["slots"].flip(0)
    elif wrong == "scale":
        changed["k_scale"] = arguments["k_scale"] * 1.5
    elif wrong == "rounding":
        changed["rounding"] = "once"
    else:
        changed["positions"] = arguments["positions"].flip(0)
    assert qk_cache.verify(case, arguments, qk_cache.call(case, arguments)) is None
    assert qk_cache.verify(case, arguments, qk_cache.call(case, changed)) is not None
