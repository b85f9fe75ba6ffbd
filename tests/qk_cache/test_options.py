"""Three positions per token, a norm of v, scales of heads and of entries, keys alone, and what needs no option: the bits
of the separate calls, of views, and of transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.formats import FLOATS, FP8_FORMATS
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.testing.tensors import same_bytes

BF16, F16, F32 = FLOATS
FP8 = torch.float8_e4m3fn
SLOTS = torch.tensor([[7, -1, 2], [0, 99, 11]])


def tokens(*lead: int, heads: tuple[int, int] = (4, 2), d: int = 64, dtype: torch.dtype = BF16) -> list[Tensor]:
    """q, k and v."""
    return [torch.randn(*lead, count, d).to(dtype) for count in (heads[0], heads[1], heads[1])]


def gammas(d: int = 64, dtype: torch.dtype = BF16) -> dict[str, Any]:
    return {"gamma_q": torch.randn(d).to(dtype), "gamma_k": torch.randn(d).to(dtype)}


def table_of(inv_freq: Tensor, positions: int = 50) -> Tensor:
    """The angles of each position, as a table."""
    angle = torch.arange(float(positions)).unsqueeze(1) * inv_freq
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)


def stored(t: Tensor, slots: Tensor = SLOTS) -> Tensor:
    """The entries of a cache or of its scales, in token order."""
    return t.flatten(0, 1)[slots[(slots >= 0) & (slots < t.shape[0] * t.shape[1])]]


def present(t: Tensor) -> Tensor:
    """The rows of tokens with an entry in a cache of 12."""
    return t[(SLOTS >= 0) & (SLOTS < 12)]


def encoded(y: Tensor, scale: Tensor, dtype: torch.dtype = FP8) -> Tensor:
    fmt = FP8_FORMATS[dtype]
    quotient = rms_norm_reference.divided(y.float(), scale).float().double()
    return rms_norm_reference.encode(quotient, fmt.bias, fmt.max, fmt.nan_code, fmt.has_negative_zero).view(dtype)


# --- three positions per token --------------------------------------------------------------------------------------

MROPE = {
    "qwen2_vl": ("Qwen2VLTextConfig", "Qwen2VLRotaryEmbedding", (16, 24, 24), "contiguous", 1.0),
    "qwen2_5_vl": ("Qwen2_5_VLTextConfig", "Qwen2_5_VLRotaryEmbedding", (16, 24, 24), "contiguous", 1.0),
    "qwen3_vl": ("Qwen3VLTextConfig", "Qwen3VLTextRotaryEmbedding", (24, 20, 20), "interleaved", 1.0),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5TextRotaryEmbedding", (11, 11, 10), "interleaved", 0.5),
}
"""Configuration and rotary embedding of each model, its sections, their style, and the part of a head that rotates."""


@pytest.mark.sampled(4)  # each compiles a kernel
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("family", MROPE)
def test_sections_keep_the_bits_of_transformers(family: str, dtype: torch.dtype) -> None:
    """The model's own angles and rotation, from a table of angles; and from those angles as a pair."""
    pytest.importorskip("transformers")
    config_class, rotary_class, sections, style, part = MROPE[family]
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections), "partial_rotary_factor": part}
    config = getattr(import_module(f"transformers.models.{family}.configuration_{family}"), config_class)(
        hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=rope
    )
    rotary = getattr(module, rotary_class)(config)
    q, k, _ = tokens(2, 7, d=128, dtype=dtype)
    positions = torch.randint(0, 50, (3, 2, 7))
    cos, sin = rotary(q, positions)
    expected = module.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    by_table = onepass.Rope(table_of(rotary.inv_freq), positions, sections=sections, section_style=style)  # type: ignore[arg-type]
    for turn in (by_table, onepass.Rope(cos=cos, sin=sin)):
        got = onepass.qk_norm_rope_cache(q, k, rope=turn, rounding="hf")
        assert got[1] is not None
        assert same_bytes(got[0].transpose(1, 2), expected[0]) and same_bytes(got[1].transpose(1, 2), expected[1])


@pytest.mark.parametrize(
    ("sections", "style", "axes"),
    [
        ((3, 2, 1), "contiguous", [0, 0, 0, 1, 1, 2]),
        ((2, 2, 2), "interleaved", [0, 1, 2, 0, 1, 2]),
        ((4, 1, 1), "interleaved", [0, 1, 2, 0, 0, 0]),
        ((3, 2, 1), "interleaved", [0, 1, 2, 0, 1, 0]),
    ],
)
@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_each_pair_turns_by_one_position(sections: Any, style: Any, axes: list[int], pairs: Any) -> None:
    """Bit-identical to the plain rotation by the position that the pair's axis has."""
    q, k, _ = tokens(5, d=12, dtype=F32)
    freqs, positions = torch.randn(20, 12), torch.randint(-2, 22, (3, 5))
    got = onepass.qk_norm_rope_cache(
        q, k, rope=onepass.Rope(freqs, positions, pairs, sections=sections, section_style=style)
    )
    plain = [onepass.qk_norm_rope_cache(q, k, rope=onepass.Rope(freqs, row, pairs)) for row in positions]
    for side in range(2):
        for pair, axis in enumerate(axes):
            columns = [pair, pair + 6] if pairs == "half" else [2 * pair, 2 * pair + 1]
            mine, alone = got[side], plain[axis][side]
            assert mine is not None and alone is not None and same_bytes(mine[..., columns], alone[..., columns])


def test_positions_may_have_any_strides() -> None:
    q, k, _ = tokens(2, 3)
    freqs, positions = torch.randn(20, 64), torch.randint(0, 20, (3, 2, 3))
    others = [positions.movedim(0, -1).contiguous().movedim(-1, 0), positions.int(), positions[:, :1].expand(3, 2, 3)]
    for rows in (*others, positions.transpose(1, 2).contiguous().transpose(1, 2)):
        turns = [onepass.Rope(freqs, t, sections=(12, 10, 10)) for t in (rows, rows.contiguous().long())]
        one, two = (onepass.qk_norm_rope_cache(q, k, rope=turn)[0] for turn in turns)
        assert same_bytes(one, two)


_TABLE, _ROWS = torch.zeros(20, 64), torch.zeros(3, 2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"sections": (12, 10)}, r"`sections` must be None or three positive ints, got \(12, 10\)"),
        ({"sections": (32, 0, 0)}, "`sections` must be None or three positive ints"),
        ({"sections": 32}, "`sections` must be None or three positive ints, got 32"),
        ({"sections": (12, 10, 11)}, "`sections` must add up to half of the 64 rotated columns"),
        ({"sections": (10, 11, 11), "section_style": "mixed"}, "`section_style` must be 'contiguous' or 'interleaved'"),
        ({"sections": (8, 12, 12), "section_style": "interleaved"}, "`sections` must fit into half of the rotated columns, 32"),
        ({"sections": (12, 10, 10), "positions": _ROWS[0]}, "`positions` must have three rows with sections, and only then"),
        ({"sections": (12, 10, 10), "positions": None}, "`positions` must be given with sections, got None"),
        ({}, "`positions` must have three rows with sections, and only then"),
        ({"sections": (12, 10, 10), "positions": _ROWS[:2]}, r"`positions` must have shape \[...\] or \[3, ...\]"),
    ],
)  # fmt: skip
def test_sections_that_do_not_fit_are_named(rope: dict[str, Any], message: str) -> None:
    q, k, _ = tokens(2, 3)
    with pytest.raises(onepass.ContractError, match="^qk_norm_rope_cache: " + message):
        onepass.qk_norm_rope_cache(q, k, rope=onepass.Rope(**{"freqs": _TABLE, "positions": _ROWS, **rope}))


def test_other_ops_refuse_sections() -> None:
    q, k, _ = tokens(2, 3)
    with pytest.raises(
        onepass.ContractError, match=r"^qk_rms_norm: `sections` must be None \(qk_norm_rope_cache takes"
    ):
        onepass.qk_rms_norm(q, k, **gammas(), per_head=True, rope=onepass.Rope(_TABLE, _ROWS, sections=(12, 10, 10)))


# --- a norm of v ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)  # each compiles kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rounding", ["once", "hf", "hf_rope"])
@pytest.mark.parametrize("value", [48, 64, 33])
def test_norm_of_v_has_the_bits_of_a_norm_without_weight(dtype: torch.dtype, rounding: Any, value: int) -> None:
    q, k, _ = tokens(2, 3, dtype=dtype)
    v = torch.randn(2, 3, 2, value).to(dtype)
    for cache in (dtype, F32, FP8):
        caches = [torch.zeros(3, 4, 2, n).to(cache) for n in (64, value)]
        onepass.qk_norm_rope_cache(q, k, v, *caches, slots=SLOTS, norm_v=True, rounding=rounding, eps=1e-5)
        ones = torch.ones(value, dtype=dtype)
        wide = F32 if rounding == "once" else dtype
        expected = onepass.qk_rms_norm(v, v, ones, ones, 1e-5, per_head=True, out_dtype=wide)[1]
        assert same_bytes(expected, onepass.rms_norm(v, None, 1e-5, out_dtype=wide))
        want = encoded(expected, torch.tensor(1.0)) if cache == FP8 else expected.to(cache)
        assert same_bytes(stored(caches[1].view(torch.uint8) if cache == FP8 else caches[1]).view(cache), present(want))
        assert same_bytes(stored(caches[0].float()), present(k.float().to(cache).float()))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_norms_of_gemma_4(dtype: torch.dtype) -> None:
    """Its own norms and rotation, up to the write: the norm's sum has another order, which may change a last bit."""
    gemma = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    q, k, v = tokens(2, 3, d=256, dtype=dtype)
    norms = [gemma.Gemma4RMSNorm(256), gemma.Gemma4RMSNorm(256), gemma.Gemma4RMSNorm(256, with_scale=False)]
    for norm in norms[:2]:
        nn.init.normal_(norm.weight)
        norm.to(dtype)
    angle = torch.rand(2, 3, 128) * 6.3
    angle = torch.cat((angle, angle), -1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    with torch.no_grad():
        theirs = [norm(t) for norm, t in zip(norms, (q, k, v), strict=True)]
        expected = [gemma.apply_rotary_pos_emb(t, cos, sin, unsqueeze_dim=2) for t in theirs[:2]] + theirs[2:]
        weights: dict[str, Any] = {"gamma_q": norms[0].weight, "gamma_k": norms[1].weight}
        caches = [torch.zeros(2, 2, 5, 256, dtype=dtype) for _ in range(2)]
        options: dict[str, Any] = {"rounding": "hf_rope", "norm_v": True, "layout": "dense"}
        got, _ = onepass.qk_norm_rope_cache(
            q, k, v, caches[0], caches[1], **weights, rope=onepass.Rope(cos=cos, sin=sin), **options
        )
    step = torch.finfo(dtype).eps
    for mine, their in zip((got, *(c[:, :, :3].transpose(1, 2) for c in caches)), expected, strict=True):
        assert their.abs().max() > 1 and (mine == their).double().mean() > (0.98 if dtype == BF16 else 0.3)
        torch.testing.assert_close(mine, their, rtol=4 * step, atol=4 * step)


# --- scales ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND", "dense"])
@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
def test_scales_of_heads_are_those_of_the_heads_alone(layout: Any, fmt: torch.dtype) -> None:
    q, k, v = tokens(2, 3)
    shape = {"NHD": (3, 4, 2, 64), "HND": (3, 2, 4, 64), "dense": (2, 2, 5, 64)}[layout]
    together, alone = ([torch.zeros(shape).to(fmt) for _ in range(2)] for _ in range(2))
    where: dict[str, Any] = {"layout": layout} if layout == "dense" else {"layout": layout, "slots": SLOTS}
    scales = torch.tensor([0.021, 0.013]), torch.tensor([0.017, 0.029])
    weights = gammas()
    strided = torch.stack((scales[1], scales[1]), 1)[:, 0]
    onepass.qk_norm_rope_cache(
        q, k, v, together[0], together[1], **weights, **where, k_scale=scales[0], v_scale=strided
    )
    by_head = 2 if layout == "NHD" else 1
    for head in range(2):
        parts = [t[:, :, head : head + 1] for t in (k, v)]
        caches = [c.narrow(by_head, head, 1) for c in alone]
        given: dict[str, Any] = {f"{name}_scale": scale[head] for name, scale in zip("kv", scales, strict=True)}
        onepass.qk_norm_rope_cache(q, parts[0], parts[1], caches[0], caches[1], **weights, **where, **given)
    assert all(same_bytes(a, b) for a, b in zip(together, alone, strict=True)) and together[0].float().any()


@pytest.mark.sampled(3)  # each compiles kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=str)
@pytest.mark.parametrize("rounding", ["once", "hf"])
def test_scales_of_entries_are_those_of_qk_rms_norm(dtype: torch.dtype, fmt: torch.dtype, rounding: Any) -> None:
    """The codes and scales of its heads, and those of v as it is or normed."""
    q, k, v = tokens(2, 3, dtype=dtype)
    weights, ones = gammas(dtype=dtype), torch.ones(64)
    expected = onepass.qk_rms_norm(q, k, **weights, per_head=True, out_dtype=fmt, rounding=rounding)
    normed = onepass.qk_rms_norm(v, v, ones, ones, per_head=True, out_dtype=fmt, rounding=rounding)
    amax = v.float().abs().amax(-1, keepdim=True) / FP8_FORMATS[fmt].max
    for norm_v, codes, scale in ((True, normed[1], normed[3]), (False, encoded(v, amax, fmt), amax)):
        caches = [torch.zeros(3, 4, 2, 64).to(fmt) for _ in range(2)]
        scales = torch.full((3, 4, 2), 7.0), torch.full((3, 4, 2), 7.0)
        options: dict[str, Any] = {"slots": SLOTS, "norm_v": norm_v, "scale_out": scales, "rounding": rounding}
        onepass.qk_norm_rope_cache(q, k, v, caches[0], caches[1], **weights, **options)
        for cache, own, want, want_scale in zip(
            caches, scales, (expected[1], codes), (expected[3], scale), strict=True
        ):
            got = stored(cache.view(torch.uint8))
            assert same_bytes(got, present(want.view(torch.uint8)))
            assert same_bytes(stored(own).unsqueeze(-1), present(want_scale))
            assert int((own == 7).sum()) == 2 * 8  # of the entries without a token


def test_scales_may_lie_between_the_codes() -> None:
    """16 bytes behind each head's codes, as FlashInfer #3617 asks: views of one tensor of bytes."""
    q, k, v = tokens(2, 3)
    parent = torch.zeros(2, 3, 4, 2, 64 + 16, dtype=torch.uint8)
    caches = [part[..., :64].view(FP8) for part in parent]
    scales = [part.view(F32)[..., 16] for part in parent]
    onepass.qk_norm_rope_cache(q, k, v, *caches, slots=SLOTS, scale_out=(scales[0], scales[1]))
    apart = [torch.zeros(3, 4, 2, 64).to(FP8) for _ in range(2)], [torch.zeros(3, 4, 2) for _ in range(2)]
    onepass.qk_norm_rope_cache(q, k, v, *apart[0], slots=SLOTS, scale_out=(apart[1][0], apart[1][1]))
    assert all(same_bytes(a, b) for a, b in zip((*caches, *scales), (*apart[0], *apart[1]), strict=True))
    assert scales[0].any() and not parent[..., 68:].any()


def test_what_a_scale_cannot_be_is_stored_as_nan_or_zero() -> None:
    q, k, v = tokens(1)
    k[0, 0], k[0, 1, 3], v[0, 0, 5] = 0.0, float("inf"), float("nan")
    caches = [torch.ones(1, 1, 2, 64).to(FP8) for _ in range(2)]
    scales = torch.ones(1, 1, 2), torch.ones(1, 1, 2)
    onepass.qk_norm_rope_cache(q, k, v, *caches, slots=torch.tensor([0]), scale_out=scales)
    assert scales[0][0, 0, 0] == 0 and not caches[0][0, 0, 0].float().any()
    assert scales[0][0, 0, 1].isnan() and caches[0][0, 0, 1].float().isnan().all()
    assert scales[1][0, 0, 0].isnan() and caches[1][0, 0, 0].float().isnan().all()
    assert scales[1][0, 0, 1].isfinite() and caches[1][0, 0, 1].float().abs().max() == 448


# --- keys alone, and what needs no option ---------------------------------------------------------------------------


def test_keys_alone_are_the_keys_of_the_full_write() -> None:
    q, k, v = tokens(2, 3)
    weights, turn = gammas(), onepass.Rope(torch.randn(9, 64), torch.randint(0, 9, (2, 3)))
    full = [torch.zeros(3, 4, 2, 64, dtype=BF16) for _ in range(2)]
    keys = torch.zeros(3, 4, 2, 64, dtype=BF16)
    one, _ = onepass.qk_norm_rope_cache(q, k, v, *full, **weights, rope=turn, slots=SLOTS)
    two, none = onepass.qk_norm_rope_cache(q, k, None, keys, **weights, rope=turn, slots=SLOTS)
    assert none is None and same_bytes(one, two) and same_bytes(full[0], keys) and keys.any()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_index_branch_of_minimax_m3(dtype: torch.dtype) -> None:
    """Its own rotation after our norm: q and the one key of its indexer, which has a cache of keys alone."""
    minimax = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    q, k, _ = tokens(2, 3, heads=(4, 1), d=128, dtype=dtype)
    angle = torch.rand(2, 3, 32) * 6.3
    angle = torch.cat((angle, angle), -1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    weights: dict[str, Any] = {**gammas(128, dtype), "weight_offset": 1.0}
    normed = onepass.qk_rms_norm(q, k, **weights, per_head=True)
    expected = minimax.apply_rotary_pos_emb(normed[0].transpose(1, 2), normed[1].transpose(1, 2), cos, sin)
    cache = torch.zeros(2, 1, 5, 128, dtype=dtype)
    options: dict[str, Any] = {"rope": onepass.Rope(cos=cos, sin=sin), "rounding": "hf_rope", "layout": "dense"}
    got, _ = onepass.qk_norm_rope_cache(q, k, None, cache, **weights, **options)
    assert same_bytes(got.transpose(1, 2), expected[0]) and same_bytes(cache[:, :, :3], expected[1])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_gated_queries_are_a_view(dtype: torch.dtype) -> None:
    """Qwen3-Next and Qwen3.5: the projection has q and a gate for each head. In place, the gate stays as it is."""
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    _, k, v = tokens(2, 3, d=64, dtype=dtype)
    projected = torch.randn(2, 3, 4 * 2 * 64).to(dtype)
    q, gate = projected.view(2, 3, 4, 128).chunk(2, -1)
    kept, weights = gate.clone(), {**gammas(64, dtype), "weight_offset": 1.0}
    angle = torch.rand(2, 3, 8) * 6.3
    angle = torch.cat((angle, angle), -1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    normed = onepass.qk_rms_norm(q.contiguous(), k, **weights, per_head=True)
    expected = qwen.apply_rotary_pos_emb(normed[0].transpose(1, 2), normed[1].transpose(1, 2), cos, sin)
    caches = [torch.zeros(3, 4, 2, 64, dtype=dtype) for _ in range(2)]
    options: dict[str, Any] = {"rope": onepass.Rope(cos=cos, sin=sin), "rounding": "hf_rope", "slots": SLOTS}
    out, _ = onepass.qk_norm_rope_cache(q, k, v, caches[0], caches[1], **weights, **options)
    assert out.is_contiguous() and same_bytes(out.transpose(1, 2), expected[0])
    assert same_bytes(stored(caches[0]), present(expected[1].transpose(1, 2)))
    onepass.qk_norm_rope_cache(q, k, v, caches[0], caches[1], **weights, **options, out=q)
    assert same_bytes(q, out) and same_bytes(gate, kept)


_Q, _K, _V = (torch.zeros(2, 3, count, 8) for count in (4, 2, 2))
_CODES: dict[str, Any] = {f"{name}_cache": torch.zeros(5, 4, 2, 8).to(FP8) for name in "kv"}
_FULL: dict[str, Any] = {"v": _V, **_CODES, "slots": SLOTS}
_OWN = torch.zeros(5, 4, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_v": True}, "`norm_v` must be False without v_cache, got True"),
        (_FULL | {"norm_v": 1}, "`norm_v` must be a bool, got 1"),
        (_FULL | {"v": None, "v_cache": None, "norm_v": True}, "`norm_v` must be False without v_cache"),
        (_FULL | {"v": None}, "`v` must be given with v_cache, got None"),
        (_FULL | {"v_cache": None}, "`v_cache` must be given with k_cache and v, got None"),
        ({"v": _V, "v_cache": _CODES["v_cache"]}, "`v_cache` must be None without k_cache"),
        (_FULL | {"k_scale": torch.ones(3)}, r"`k_scale` must have shape \[\] or \[Hk\] with Hk=2, got \[3\]"),
        (_FULL | {"k_scale": torch.ones(2, 1)}, r"`k_scale` must have shape \[\] or \[Hk\] with Hk=2, got \[2, 1\]"),
        (_FULL | {"scale_out": _OWN}, "`scale_out` must be a pair of tensors"),
        (_FULL | {"scale_out": (_OWN, None)}, "`v_scale_out` must be a tensor, got None"),
        (_FULL | {"scale_out": (_OWN, _OWN)}, "`v_scale_out` must not overlap `k_scale_out`|`k_scale_out` must not overlap"),
        (_FULL | {"scale_out": (_OWN[:4], _OWN)}, r"`k_scale_out` must have shape \[A0, A1, A2\] with A0=5, A1=4, A2=2"),
        (_FULL | {"scale_out": (_OWN.double(), _OWN)}, "`k_scale_out` must have dtype float32, got float64"),
        (_FULL | {"scale_out": (_OWN, _OWN.clone()), "k_scale": torch.tensor(1.0)}, "`k_scale` must be None with scale_out"),
        (_FULL | {"scale_out": (_OWN, _OWN), "k_cache": torch.zeros(5, 4, 2, 8), "v_cache": torch.zeros(5, 4, 2, 8)},
         "`scale_out` must be None unless the cache is fp8"),
        (_FULL | {"v": None, "v_cache": None, "scale_out": (_OWN, _OWN)}, "`v_scale_out` must be None unless own_scales"),
    ],
)  # fmt: skip
def test_error_messages(change: dict[str, Any], message: str) -> None:
    with pytest.raises(onepass.ContractError, match="^qk_norm_rope_cache: " + message):
        onepass.qk_norm_rope_cache(**{"q": _Q, "k": _K, **change})


# --- torch ----------------------------------------------------------------------------------------------------------


def step(q: Tensor, k: Tensor, v: Tensor, caches: list[Tensor], scales: list[Tensor], rope: Any) -> Tensor:
    options: dict[str, Any] = {"norm_v": True, "scale_out": (scales[0], scales[1]), "slots": SLOTS}
    got, _ = onepass.qk_norm_rope_cache(q * 2, k, v, caches[0], caches[1], rope=rope, **options)
    return got + scales[0].sum() + scales[1].sum()


def test_compiles_as_one_graph() -> None:
    """The write of codes and scales, with three positions per token."""
    q, k, v = tokens(2, 3)
    turn = onepass.Rope(torch.randn(9, 64), torch.randint(0, 9, (3, 2, 3)), sections=(12, 10, 10))
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        made = [([torch.zeros(3, 4, 2, 64).to(FP8) for _ in "kv"], [torch.zeros(3, 4, 2) for _ in "kv"]) for _ in "12"]
        assert torch.equal(compiled(q, k, v, *made[0], turn), step(q, k, v, *made[1], turn))
        for one, two in zip((*made[0][0], *made[0][1]), (*made[1][0], *made[1][1]), strict=True):
            assert same_bytes(one, two) and one.float().any()
