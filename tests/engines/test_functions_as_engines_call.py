"""Compatibility functions with static scales, rotations, caches and projections, compared with plain torch.

The references are written from the semantics of vLLM's, FlashInfer's and SGLang's kernels.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass import ContractError, Unsupported
from onepass.core.backend import launching_with
from onepass.engines import flashinfer, sglang, vllm
from onepass.engines.flashinfer import norm as flashinfer_norm
from onepass.testing.tensors import same_bytes
from tests.helpers.interpreting import interpret
from tools.vllm_bytes import rows_that_differ

EPS = 1e-5
BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
MIXED = [(BF16, BF16), (F16, F16), (F32, F32), (F16, BF16), (F32, BF16)]
"""Dtypes of the input and of the weight."""


def inputs(dtype: torch.dtype, weight: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, residual = (torch.randn(*shape, generator=generator).to(dtype) for _ in range(2))
    return x, residual, (1 + 0.2 * torch.randn(shape[-1], generator=generator)).to(weight)


def near(h: Tensor) -> list[Tensor]:
    """Float32 roots within a few units of the exact one: the order of a sum and the hardware choose among them."""
    exact = (h.double().square().mean(-1, keepdim=True) + torch.tensor(EPS)).rsqrt().float()
    return [(exact.view(torch.int32) + step).view(torch.float32) for step in range(-4, 5)]


def fp8(values: Tensor, dtype: torch.dtype = F8) -> Tensor:
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def assert_close(got: Tensor, expected: Tensor, equal: float = 0.998) -> None:
    """Equal but for a value in 500, which may differ by one unit in the last place. Zeros fail."""
    assert got.dtype == expected.dtype and got.shape == expected.shape and expected.float().abs().max() > 0.5
    if got.dtype is F32:
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)
        return
    assert (got == expected).float().mean() >= equal
    spacing = expected.float().abs().clamp(min=2.0**-10) * torch.finfo(got.dtype).eps
    assert ((got.float() - expected.float()).abs() <= spacing).all()


# --- static scales ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)  # each compiles a kernel
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXED)
def test_vllm_static_codes(dtype: torch.dtype, weight_dtype: torch.dtype, added: bool) -> None:
    """``fp8(round(round(h * rs) * w) * (1 / scale))``, of the rounded sum: all bytes, for some root."""
    x, residual, weight = inputs(dtype, weight_dtype, 24, 640)
    out, scale = torch.empty(24, 640, dtype=F8), torch.tensor([0.013])
    total = (x.float() + residual.float()).to(dtype) if added else x
    before, stored = x.clone(), residual.clone()
    if added:
        vllm.fused_add_rms_norm_static_fp8_quant(out, x, stored, weight, scale, EPS)
        assert same_bytes(stored, total)
    else:
        vllm.rms_norm_static_fp8_quant(result=out, input=x, weight=weight, scale=scale, epsilon=EPS)
    assert same_bytes(x, before)

    def codes(rs: Tensor, once: bool = False) -> Tensor:
        normed = total.float() * rs
        y = (normed if once else normed.to(dtype).float()) * weight.float()
        return fp8(y.to(dtype).float() * (1.0 / scale))

    assert rows_that_differ([out], ([codes(rs)] for rs in near(total))) == []
    if dtype is BF16:
        assert len(rows_that_differ([out], ([codes(rs, once=True)] for rs in near(total)))) > 20
    assert out.float().abs().max() > 50


@pytest.mark.sampled(5)  # each compiles a kernel
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXED)
@pytest.mark.parametrize(("scale", "stored_as"), [(0.0625, F8), (0.013, F8), (0.0625, torch.float8_e5m2)])
def test_flashinfer_static_codes(
    dtype: torch.dtype, weight_dtype: torch.dtype, scale: float, stored_as: torch.dtype, added: bool
) -> None:
    """``fp8(((h * rs) * w) * (1 / scale))`` in float32, of the unrounded sum."""
    x, residual, weight = inputs(dtype, weight_dtype, 24, 640)
    out = torch.empty(24, 640, dtype=stored_as)
    total = x.float() + residual.float() if added else x.float()
    before, stored = x.clone(), residual.clone()
    if added:
        flashinfer.fused_add_rmsnorm_quant(out, x, stored, weight, torch.tensor([scale]), EPS)
        assert same_bytes(stored, total.to(dtype))
    else:
        flashinfer_norm.rmsnorm_quant(out, x, weight, scale, EPS, enable_pdl=True)
    assert same_bytes(x, before)

    def codes(rs: Tensor) -> Tensor:
        return fp8(total * rs * weight.float() * (1.0 / torch.tensor(scale)), stored_as)

    wrong = rows_that_differ([out], ([codes(rs)] for rs in near(total)))
    assert wrong == [] if scale == 0.0625 else len(wrong) <= 1, "another scale may change a code at a boundary"
    assert (out.float() - codes(near(total)[4]).float()).abs().max() <= 32 and out.float().abs().max() > 20


def statistics(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Rows minus their mean, and roots within a few units of that of the variance."""
    d = x.float() - x.double().mean(-1, keepdim=True).float()
    return d, near(d)


@pytest.mark.sampled(3)  # each compiles a kernel
@pytest.mark.parametrize(("dtype", "weight_dtype"), [*MIXED, (BF16, F32)])
def test_flashinfer_layernorm(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """``round((d * rs) * gemma + beta)``; a mean in another order may move a value at a boundary."""
    x, beta, gemma = inputs(dtype, weight_dtype, 24, 640)
    x, beta = x + 3, beta[0].to(weight_dtype)
    before = x.clone()
    y = flashinfer.layernorm(x, gemma, beta, EPS)
    d, roots = statistics(x)
    expected = ((d * roots[4]) * gemma.float() + beta.float()).to(dtype)
    if dtype is F32:
        torch.testing.assert_close(y, expected, rtol=2e-5, atol=5e-6)
    else:
        assert_close(y, expected, 0.995)
    assert same_bytes(x, before) and y.float().abs().max() > 2
    assert same_bytes(flashinfer.layernorm(x[5:6], gemma, beta, EPS), y[5:6])


@pytest.mark.sampled(3)  # each compiles a kernel
@pytest.mark.parametrize("stored_as", [F8, torch.float8_e5m2])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, F32), (F16, F16), (F32, F32)])
def test_flashinfer_layernorm_codes(dtype: torch.dtype, weight_dtype: torch.dtype, stored_as: torch.dtype) -> None:
    """Codes of what `layernorm` stores: ``fp8(y * (1 / scale))``, every byte."""
    x, beta, gemma = inputs(dtype, weight_dtype, 24, 640)
    beta, scale = beta[0].to(weight_dtype), torch.tensor([0.013])
    out = torch.empty(24, 640, dtype=stored_as)
    assert flashinfer.layernorm_quant(out, x, gemma, beta, scale, EPS) is None
    y = flashinfer.layernorm(x, gemma, beta, EPS)
    assert same_bytes(out, fp8(y.float() * (1.0 / scale), stored_as))
    assert out.float().abs().max() > 50
    again = torch.empty_like(out)
    flashinfer.layernorm_quant(again, x, gemma, beta, 0.013, EPS)
    assert same_bytes(out, again)


@pytest.mark.parametrize("shape", [(24, 64), (5, 3, 64), (7, 640)])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_flashinfer_sigmoid_gate(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """In place, between the other columns of a projection."""
    both = inputs(dtype, dtype, *shape[:-1], 2 * shape[-1])[0]
    before = both.clone()
    x, gate = both[..., : shape[-1]], both[..., shape[-1] :]
    flashinfer.rmsnorm_sigmoid_gate(x, gate, EPS, enable_pdl=False)
    h = before[..., : shape[-1]].float()
    expected = (h * near(h)[4] * torch.sigmoid(gate.double()).float()).to(dtype)
    assert_close(x, expected, 0.99)
    assert same_bytes(gate, before[..., shape[-1] :])


@pytest.mark.sampled(3)  # each compiles a kernel
@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXED)
def test_flashinfer_fp8_blocks(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """The norm of the unrounded sum; scales and codes of what is stored; a group of zeros has the smallest scale."""
    x, residual, weight = inputs(dtype, weight_dtype, 9, 512)
    x[3, 128:256], residual[3, 128:256] = 0.0, 0.0
    out, normed = torch.empty(9, 512, dtype=F8), torch.empty_like(x)
    scale, stored, total = torch.full((4, 12), 7.0), residual.clone(), x.float() + residual.float()
    flashinfer.fused_add_rmsnorm_fp8_block_quant(out, scale, normed, x, stored, weight, EPS)
    assert same_bytes(stored, total.to(dtype))
    assert rows_that_differ([normed], ([(total * rs * weight.float()).to(dtype)] for rs in near(total))) == []
    groups = normed.float().unflatten(-1, (4, 128))
    expected = groups.abs().amax(-1).clamp(min=1e-4) / 448
    torch.testing.assert_close(scale[:, :9].t(), expected, rtol=2e-7, atol=0.0)
    assert scale[1, 3] == torch.tensor(1e-4 / 448) and (scale[:, 9:] == 7.0).all()
    codes = fp8((groups * (1.0 / scale[:, :9].t().unsqueeze(-1))).flatten(1))
    assert same_bytes(out, codes) and out.float().abs().amax() == 448
    with pytest.raises(ContractError, match=r"`block_scale` must be \[4, 12\] with contiguous rows, got"):
        flashinfer.fused_add_rmsnorm_fp8_block_quant(out, scale[:, :9], normed, x, stored, weight)


def packed(y: Tensor, group: int, least: float = 1e-10) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and their exponents as vLLM packs them, of float32 rows: by a division, with scales rounded up to powers of two."""
    groups = y.unflatten(-1, (-1, group))
    scale = torch.exp2(torch.ceil(torch.log2((groups.abs().amax(-1) / 448).clamp(min=least).double()))).float()
    exponents = torch.nn.functional.pad((scale.view(torch.int32) >> 23) & 0xFF, (0, -scale.shape[-1] % 4))
    words = (exponents.unflatten(-1, (-1, 4)) << torch.tensor([0, 8, 16, 24])).sum(-1)
    return fp8((groups / scale.unsqueeze(-1)).flatten(-2)), scale, words & 0xFFFFFFFF


def test_packed_scales_of_a_norm() -> None:
    """One call for a norm and vLLM's ``per_token_group_quant_fp8_packed_for_deepgemm`` of its result: the same bytes."""
    x, _, weight = inputs(BF16, BF16, 9, 640)
    x[4, 128:256] = 0.0
    options: dict[str, Any] = {"group_size": 128, "scale_format": "ue8m0", "scale_layout": "column_packed"}
    codes, words = onepass.rms_norm_fused_quant(x, weight, EPS, rounding="stored", min_scale=1e-10, **options)
    expected, scale, exponents = packed(onepass.rms_norm(x, weight, EPS).float(), 128)
    assert same_bytes(codes, expected) and scale[4, 1] == 2.0**-33
    assert words.dtype == torch.int32 and words.shape == (9, 2) and words.stride() == (1, 12)
    assert torch.equal(words.long() & 0xFFFFFFFF, exponents) and (words != 0).all()
    separate = vllm.per_token_group_quant_fp8_packed_for_deepgemm(onepass.rms_norm(x, weight, EPS), 128)
    assert same_bytes(separate[0], codes) and torch.equal(separate[1], words) and separate[1].stride() == (1, 12)


@pytest.mark.parametrize(("dtype", "group", "lead"), [(BF16, 128, (9,)), (F16, 16, (3, 5)), (F32, 64, (2, 1, 3))])
def test_packed_scales_without_a_norm(dtype: torch.dtype, group: int, lead: tuple[int, ...]) -> None:
    x = 3 * inputs(dtype, dtype, *lead, 384)[0]
    x.view(-1, 384)[1, :group] = 0.0
    out = torch.empty_like(x, dtype=F8)
    codes, words = vllm.per_token_group_quant_fp8_packed_for_deepgemm(x, group, out_q=out)
    expected, scale, exponents = packed(x.float(), group)
    rows = x.numel() // 384
    assert codes is out and same_bytes(codes, expected) and scale.view(rows, -1)[1, 0] == 2.0**-33
    assert words.shape == (rows, -(-384 // group // 4)) and words.stride() == (1, -(-rows // 4) * 4)
    assert torch.equal(words.long() & 0xFFFFFFFF, exponents.view(rows, -1)) and (words != 0).all()
    larger = vllm.per_token_group_quant_fp8_packed_for_deepgemm(x, group, eps=448.0)
    assert same_bytes(larger[0], packed(x.float(), group, 1.0)[0]) and not same_bytes(larger[0], codes)


def test_packed_scales_of_a_gated_product() -> None:
    gate_up = 2 * inputs(BF16, BF16, 7, 512)[0]
    gate, up = gate_up.chunk(2, -1)
    codes, words = vllm.silu_mul_quant_fp8_packed_triton(gate_up)
    product = (up.float() * (gate.double() * torch.sigmoid(gate.double())).float()).to(BF16)
    expected, scale, exponents = packed(product.float(), 128)
    assert torch.equal(words.long() & 0xFFFFFFFF, exponents) and (scale > 0).all()
    assert (
        codes.view(torch.uint8) == expected.view(torch.uint8)
    ).float().mean() >= 0.998  # silu is not correctly rounded
    assert codes.float().abs().amax(-1).min() >= 224
    both = onepass.quantize(
        up, gate=gate, group_size=128, scale_format="ue8m0", scale_layout="column_packed", rounding="stored",
        quantize="divide", min_scale=1e-10,
    )  # fmt: skip
    assert same_bytes(codes, both[0]) and torch.equal(words, both[1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x: vllm.per_token_group_quant_fp8_packed_for_deepgemm(x, 100),
            "per_token_group_quant_fp8_packed_for_deepgemm: `group_size` must be 16, 32, 64 or 128, got 100",
        ),
        (
            lambda x: vllm.per_token_group_quant_fp8_packed_for_deepgemm(x, 128, use_ue8m0=False),
            "per_token_group_quant_fp8_packed_for_deepgemm: `use_ue8m0` must be True or None, got False",
        ),
        (
            lambda x: vllm.per_token_group_quant_fp8_packed_for_deepgemm(x, 128, eps=float("nan")),
            "per_token_group_quant_fp8_packed_for_deepgemm: `eps` must be a finite number of at least 0, got nan",
        ),
        (
            lambda x: vllm.per_token_group_quant_fp8_packed_for_deepgemm(x, 128, out_q=x),
            "per_token_group_quant_fp8_packed_for_deepgemm: `out_q` must ",
        ),
        (
            lambda x: vllm.silu_mul_quant_fp8_packed_triton(x, clamp_limit=7.0),
            "silu_mul_quant_fp8_packed_triton: `clamp_limit` must be None, got 7.0",
        ),
        (
            lambda x: vllm.silu_mul_quant_fp8_packed_triton(x, alpha=1.702),
            "silu_mul_quant_fp8_packed_triton: `alpha` must be 1, got 1.702",
        ),
        (
            lambda x: vllm.silu_mul_quant_fp8_packed_triton(x, expert_ends=torch.tensor([1])),
            "silu_mul_quant_fp8_packed_triton: `expert_ends` must be None, got ",
        ),
        (
            lambda x: vllm.silu_mul_quant_fp8_packed_triton(x[:, :255]),
            "silu_mul_quant_fp8_packed_triton: `input` must be bfloat16 [tokens, 2 * columns], got ",
        ),
        (
            lambda x: vllm.silu_mul_quant_fp8_packed_triton(x[:, :256], 128, x[:, :128]),
            "silu_mul_quant_fp8_packed_triton: `output_q` must ",
        ),
    ],
)
def test_packed_scales_are_refused(call: Any, words: str) -> None:
    with pytest.raises((ContractError, Unsupported), match=f"^{re.escape(words)}"):
        call(torch.ones(3, 384, dtype=BF16))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x, w: vllm.rms_norm_static_fp8_quant(x, x, w, torch.ones(1), EPS),
            "rms_norm_static_fp8_quant: `result`",
        ),
        (
            lambda x, w: vllm.fused_add_rms_norm_static_fp8_quant(x.to(torch.int8), x, x, w, torch.ones(1), EPS),
            "fused_add_rms_norm_static_fp8_quant: `result`",
        ),
        (lambda x, w: flashinfer.rmsnorm_quant(x.to(torch.int8), x, w, 1.0), "rmsnorm_quant: `out`"),
        (
            lambda x, w: vllm.concat_and_cache_mla(
                x, x, x.new_zeros(1, 4, 128), torch.zeros(2), "fp8_e5m2", torch.ones(1)
            ),
            "concat_and_cache_mla: `kv_cache_dtype`",
        ),
        (
            lambda x, w: vllm.concat_and_cache_mla(
                x, x, torch.zeros(1, 4, 656, dtype=torch.uint8), torch.zeros(2), "fp8_ds_mla", torch.ones(1)
            ),
            "concat_and_cache_mla: `kv_cache_dtype` must be auto, fp8 or fp8_e4m3, got 'fp8_ds_mla'",
        ),
    ],
)
def test_what_is_not_supported_is_named(call: Any, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        call(torch.ones(2, 64), torch.ones(64))


# --- norms of q and k -------------------------------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor, neox: bool, columns: int) -> Tensor:
    """Rotate the first columns of [..., heads, head_dim] in float64, pair by pair."""
    x, cos, sin = x.double().clone(), cos.double(), sin.double()
    for i in range(columns // 2):
        first, second = (i, i + columns // 2) if neox else (2 * i, 2 * i + 1)
        a, b = x[..., first].clone(), x[..., second].clone()
        x[..., first] = a * cos[:, None, i] - b * sin[:, None, i]
        x[..., second] = b * cos[:, None, i] + a * sin[:, None, i]
    return x


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("dtype", "cache", "columns"), [(BF16, F32, 64), (F16, F16, 32), (BF16, BF16, 64)])
def test_fused_qk_norm_rope(dtype: torch.dtype, cache: torch.dtype, columns: int, neox: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    heads, dim, tokens = (4, 2, 2), 64, 9
    qkv = torch.randn(tokens, sum(heads) * dim, generator=generator).to(dtype)
    weights: Any = [(1 + 0.3 * torch.randn(dim, generator=generator)).to(dtype) for _ in range(2)]
    angle = torch.rand(40, columns // 2, generator=generator) * 6
    table = torch.cat((angle.cos(), angle.sin()), -1).to(cache)
    positions = torch.randint(0, 40, (tokens,), generator=generator)
    before = qkv.clone()
    arguments: tuple[Any, ...] = (qkv, *heads, dim, EPS, *weights, table, neox, positions)
    vllm.fused_qk_norm_rope(*arguments)
    cos, sin = table[positions].chunk(2, -1)
    assert same_bytes(qkv[:, 6 * dim :], before[:, 6 * dim :]), "v is not touched"
    for part, weight in ((slice(0, 4), weights[0]), (slice(4, 6), weights[1])):
        x = before.view(tokens, 8, dim)[:, part].double()
        y = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        expected = rotated(y, cos, sin, neox, columns).to(dtype)
        assert_close(qkv.view(tokens, 8, dim)[:, part], expected)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("dtype", "cache"), [(BF16, BF16), (BF16, F32), (F32, F16)])
def test_fused_qk_norm_rope_has_the_bytes_of_the_op(dtype: torch.dtype, cache: torch.dtype, neox: bool) -> None:
    """Those of `qk_rms_norm` with a table of pairs, for tokens in any order."""
    qkv, _, weight = inputs(dtype, dtype, 7, 8 * 64)
    table, weights = torch.randn(40, 48).to(cache), (weight[:64].clone(), weight[64:128].clone())
    positions = torch.tensor([39, 0, 7, 7, 2, 1, 20], dtype=torch.int32)
    expected = qkv.clone()
    q, k = expected[:, : 4 * 64], expected[:, 4 * 64 : 6 * 64]
    pairs = torch.stack(table.float().chunk(2, -1), -1).flatten(-2)
    rope = onepass.Rope(pairs, positions, "half" if neox else "interleaved", head_dim=64)
    onepass.qk_rms_norm(q, k, *weights, EPS, rope=rope, per_head=True, out=(q, k))
    vllm.fused_qk_norm_rope(qkv, 4, 2, 2, 64, EPS, *weights, table, neox, positions)
    assert same_bytes(qkv, expected) and qkv.float().abs().max() > 0.5


def test_fused_qk_norm_rope_compiles_in_one_graph() -> None:
    qkv, _, weight = inputs(BF16, BF16, 7, 8 * 64)
    arguments = (4, 2, 2, 64, EPS, weight[:64], weight[:64], torch.randn(40, 64), True, torch.arange(7))
    results = [qkv.clone() for _ in range(2)]
    vllm.fused_qk_norm_rope(results[0], *arguments)
    torch.compile(vllm.fused_qk_norm_rope, fullgraph=True, backend="aot_eager")(results[1], *arguments)
    assert same_bytes(*results) and not same_bytes(results[0], qkv)


def test_fused_qk_norm_rope_checks_its_arguments() -> None:
    qkv, weight = torch.zeros(3, 8 * 64), torch.ones(64)
    table, positions = torch.ones(4, 64), torch.zeros(3, dtype=torch.long)
    for wrong, words in (
        ((qkv[:, :-1], weight, table, positions), "`qkv`"),
        ((qkv, weight, table[:, :63], positions), "`cos_sin_cache`"),
        ((qkv, weight, table, positions[:2]), "`position_ids`"),
    ):
        a, w, t, p = wrong
        with pytest.raises(ContractError, match=f"fused_qk_norm_rope: {words}"):
            vllm.fused_qk_norm_rope(a, 4, 2, 2, 64, EPS, w, w, t, True, p)


@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXED)
def test_fused_q_kv_rmsnorm(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    both, _, weight = inputs(dtype, weight_dtype, 7, 192 + 64 + 8)
    q, kv = both[:, :192], both[:, 192:256]  # slices of one projection
    results = vllm.fused_q_kv_rmsnorm(q, kv, weight[:192].clone(), weight[192:256].clone(), EPS)
    for x, got, w in zip((q, kv), results, (weight[:192], weight[192:256]), strict=True):
        made = ([(x.float() * rs * w.float()).to(dtype)] for rs in near(x.float()))
        assert got.is_contiguous() and rows_that_differ([got], made) == []


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXED)
def test_sglang_qknorm(dtype: torch.dtype, weight_dtype: torch.dtype, flat: bool) -> None:
    qkv, _, _ = inputs(dtype, dtype, 7, 8 * 64)
    _, _, weight = inputs(dtype, weight_dtype, 1, 64)
    before = qkv.clone()
    q, k = qkv[:, : 4 * 64], qkv[:, 4 * 64 : 6 * 64]
    if flat:
        sglang.fused_inplace_qknorm(q, k, weight, weight * 2, EPS, head_dim=64)
    else:
        sglang.fused_inplace_qknorm(q.unflatten(1, (4, 64)), k.unflatten(1, (2, 64)), weight, weight * 2, EPS)
    assert same_bytes(qkv[:, 6 * 64 :], before[:, 6 * 64 :])
    for heads, w in ((slice(0, 4), weight), (slice(4, 6), weight * 2)):
        x = before.view(7, 8, 64)[:, heads].reshape(-1, 64).float()
        got = qkv.view(7, 8, 64)[:, heads].reshape(-1, 64)
        assert rows_that_differ([got], ([(x * rs * w.float()).to(dtype)] for rs in near(x))) == []


def test_sglang_norms_are_flashinfers() -> None:
    names = ("rmsnorm", "fused_add_rmsnorm", "gemma_rmsnorm", "gemma_fused_add_rmsnorm")
    assert all(getattr(sglang, name) is getattr(flashinfer_norm, name) for name in names)
    with pytest.raises(ContractError, match="fused_inplace_qknorm: `k`"):
        sglang.fused_inplace_qknorm(torch.ones(2, 64), torch.ones(2, 60), torch.ones(32), torch.ones(32), head_dim=32)


# --- MLA --------------------------------------------------------------------------------------------------------------


def latents(dtype: torch.dtype, tokens: int = 6, columns: tuple[int, int] = (48, 16)) -> tuple[Tensor, Tensor]:
    """Parts of one projection."""
    generator = torch.Generator().manual_seed(2)
    both = torch.randn(tokens, sum(columns), generator=generator).to(dtype)
    return both[:, : columns[0]], both[:, columns[0] :]


def pages_after(
    kind: str,
    slots: list[int],
    dtype: torch.dtype = BF16,
    columns: tuple[int, int] = (48, 16),
    index: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """Pages that `concat_and_cache_mla` has written, and what a loop over tokens writes."""
    kv_c, k_pe = latents(dtype, columns=columns)
    kv_c[0, :3], k_pe[1, 0] = torch.tensor([3e4, -3e4, torch.nan], dtype=dtype), torch.inf
    width = sum(columns)
    pages = (
        torch.randn(3, 5, width).to(dtype) if kind == "auto" else torch.randint(0, 120, (3, 5, width)).to(torch.uint8)
    )
    cache, scale = pages[:, :4], torch.tensor([0.37])  # pages with a stride of their own
    expected, before = pages.clone(), kv_c.clone()
    for token, slot in enumerate(slots):
        if 0 <= slot < 12:
            entry = torch.cat((kv_c[token], k_pe[token]))
            expected[slot // 4, slot % 4] = entry if kind == "auto" else fp8(entry.float() / scale).view(torch.uint8)
    rope = k_pe.unsqueeze(1) if kind == "fp8" else k_pe
    vllm.concat_and_cache_mla(kv_c, rope, cache, torch.tensor(slots, dtype=index), kind, scale)
    assert same_bytes(kv_c, before) and pages.view(torch.uint8).any()
    return pages, expected


@pytest.mark.sampled(5)  # each compiles a kernel
@pytest.mark.parametrize(
    "slots", [[5, 0, 11, 7, 2, 9], [5, -1, 0, 12, 3, 10**6], [-1] * 6, [-1, 0, -1, 4], []], ids=lambda slots: str(slots)
)
@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e4m3"])
def test_concat_and_cache_mla(kind: str, slots: list[int]) -> None:
    """Values beyond fp8 saturate, NaN stays NaN, and tokens without a slot in the cache are not stored."""
    assert same_bytes(*pages_after(kind, slots))


@pytest.mark.sampled(2)  # each compiles a kernel
@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_concat_and_cache_mla_of_a_model(dtype: torch.dtype, kind: str) -> None:
    assert same_bytes(*pages_after(kind, [5, -1, 0, 11, 3, 8], dtype, (512, 64), torch.int32))


def test_functions_are_one_launch() -> None:
    launched: list[str] = []
    kv_c, k_pe = latents(BF16)
    qkv, weight, table = torch.ones(3, 4 * 16), torch.ones(16), torch.ones(9, 16)
    with launching_with(lambda family: lambda *_: launched.append(family)):
        vllm.concat_and_cache_mla(kv_c, k_pe, torch.zeros(3, 4, 64, dtype=F8), torch.arange(6), "fp8", torch.ones(1))
        vllm.fused_qk_norm_rope(qkv, 2, 1, 1, 16, EPS, weight, weight, table, True, torch.arange(3))
    assert launched == ["qk_cache"] * 2


@pytest.mark.slow  # Triton's interpreter
def test_gpu_kernel_writes_the_same_entries() -> None:
    code = (
        "import torch\n"
        "from onepass.testing.runner import running_on\n"
        "from onepass.testing.tensors import same_bytes\n"
        "from tests.engines.test_functions_as_engines_call import pages_after\n"
        "with running_on('interpreter'):\n"
        "    for kind in ('auto', 'fp8'):\n"
        "        print(same_bytes(*pages_after(kind, [5, -1, 0, 12, 3, 10], columns=(512, 64))))\n"
    )
    assert interpret("-c", code).split() == ["True", "True"]


def test_concat_and_cache_mla_skips_a_scale_of_one() -> None:
    kv_c, k_pe = latents(BF16)
    caches = [torch.zeros(3, 4, 64, dtype=F8) for _ in range(2)]
    slots = torch.arange(6)
    vllm.concat_and_cache_mla(kv_c, k_pe, caches[0], slots, "fp8", torch.ones(1))
    vllm.concat_and_cache_mla(kv_c, k_pe, caches[1], slots, "fp8", torch.full((1,), torch.nan), skip_scale=True)
    assert same_bytes(*caches) and caches[0].float().abs().sum() > 0


def test_concat_and_cache_mla_compiles_in_one_graph() -> None:
    kv_c, k_pe = latents(BF16)
    caches = [torch.zeros(3, 4, 64, dtype=F8) for _ in range(2)]
    slots, scale = torch.tensor([3, -1, 8, 1, 0, 7]), torch.tensor([0.5])
    vllm.concat_and_cache_mla(kv_c, k_pe, caches[0], slots, "fp8", scale)
    compiled: Any = torch.compile(vllm.concat_and_cache_mla, fullgraph=True, backend="aot_eager")
    compiled(kv_c, k_pe, caches[1], slots, "fp8", scale)
    assert same_bytes(*caches) and caches[0].float().abs().sum() > 0


def test_concat_and_cache_mla_checks_its_arguments() -> None:
    kv_c, k_pe = latents(BF16)
    good = torch.zeros(3, 4, 64, dtype=BF16)
    for cache, slots, kind, words in (
        (good[..., :63], [0] * 6, "auto", "`kv_cache`"),
        (good, [0] * 7, "auto", "`slot_mapping`"),
        (good, [0] * 6, "fp8", "`kv_cache`"),
    ):
        with pytest.raises(ContractError, match=f"concat_and_cache_mla: {words}"):
            vllm.concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor(slots), kind, torch.ones(1))


def test_dsv3_fused_a_gemm() -> None:
    generator = torch.Generator().manual_seed(6)
    a, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((5, 256), (96, 256)))
    output = torch.zeros(5, 96, dtype=BF16)
    vllm.dsv3_fused_a_gemm(output, a, weight.t(), enable_pdl=True)
    expected = (a.double() @ weight.double().t()).to(BF16)
    assert_close(output, expected, 0.97)
    assert same_bytes(sglang.dsv3_fused_a_gemm(a, weight.t()), output)
    again = torch.zeros_like(output)
    assert sglang.dsv3_fused_a_gemm(a, weight.t(), again) is again and same_bytes(again, output)
    with pytest.raises(ContractError, match="dsv3_fused_a_gemm: `mat_b`"):
        vllm.dsv3_fused_a_gemm(output, a, weight.t().contiguous())
