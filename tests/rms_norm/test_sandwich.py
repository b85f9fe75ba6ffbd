"""A post-norm, the residual add and the next pre-norm in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.backend import launching_with
from onepass.errors import ContractError, Unsupported
from onepass.formats import FLOATS, ROUNDINGS
from onepass.ops.rms_norm import reference
from onepass.testing import runner
from onepass.testing.tensors import same_bytes

BF16, F16, F32 = FLOATS


def tensors(n: int = 256, rows: int = 6, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, both gammas and the residual."""
    generator = torch.Generator().manual_seed(n)
    shapes = ((rows, n), (n,), (n,), (rows, n))
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)  # type: ignore[return-value]


def separate(x: Tensor, post: Tensor, pre: Tensor, eps: float = 1e-6, **options: Any) -> Any:
    """The two calls that the op stands for."""
    shared = {name: options[name] for name in ("weight_offset", "rounding") if name in options}
    return onepass.rms_norm(onepass.rms_norm(x, post, eps, **shared), pre, eps, **options)


def same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return len(ours) == len(theirs) and all(map(same_bytes, ours, theirs))


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 31, 640, 1023, 4099, 20000])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_results_are_those_of_two_calls(n: int, rounding: Any) -> None:
    for dtype in FLOATS:
        x, post, pre, residual = tensors(n, dtype=dtype)
        for round_sum in (None, False, True):
            options: dict[str, Any] = {"rounding": rounding, "round_sum": round_sum, "weight_offset": 1.0}
            ours = onepass.rms_norm_add_rms_norm(x, post, pre, residual=residual, **options)
            assert ours[0].float().abs().max() > 0.1 or n == 1
            assert same(ours, separate(x, post, pre, residual=residual, **options))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_results_are_near_the_reference(rounding: Any) -> None:
    x, post, pre, residual = tensors(640, dtype=F32)
    y, h = onepass.rms_norm_add_rms_norm(x, post, pre, residual=residual, rounding=rounding)
    exact = reference.rms_norm_add_rms_norm(x, post, pre, 1e-6, residual=residual, rounding=rounding)
    assert (y - exact.y).abs().max() < 1e-5 and (h - exact.h).abs().max() < 1e-5
    assert y.abs().max() > 1 and h.abs().max() > 1


def test_once_rounds_the_post_norm() -> None:
    """Unrounded, it would give other sums."""
    x, post, pre, residual = tensors(4096)
    _, h = onepass.rms_norm_add_rms_norm(x, post, pre, residual=residual)
    unrounded = onepass.rms_norm(x, post, out_dtype=F32) + residual.float()
    assert not torch.equal(h, unrounded.bfloat16())
    assert torch.equal(h, onepass.rms_norm(x, post) + residual)


def test_layers_of_gemma_3() -> None:
    """Each norm is rounded once, and the sum before the pre-norm."""
    models = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    x, post, pre, residual = tensors(1152)
    after, before = (models.Gemma3RMSNorm(1152, eps=1e-6).to(BF16) for _ in range(2))
    after.weight.data, before.weight.data = post, pre
    y, h = onepass.rms_norm_add_rms_norm(x, post, pre, residual=residual, weight_offset=1.0, round_sum=True)
    with torch.no_grad():
        agree(h, residual + after(x))
        agree(y, before(h))


def test_layers_of_glm_4() -> None:
    models = pytest.importorskip("transformers.models.glm4.modeling_glm4")
    x, post, pre, residual = tensors(4096)
    after, before = (models.Glm4RMSNorm(4096, eps=1e-5).to(BF16) for _ in range(2))
    after.weight.data, before.weight.data = post, pre
    y, h = onepass.rms_norm_add_rms_norm(x, post, pre, 1e-5, residual=residual, rounding="hf")
    with torch.no_grad():
        agree(h, residual + after(x))
        agree(y, before(h))


def test_layers_of_hyperclova_x() -> None:
    """The only model that scales a post-norm."""
    models = pytest.importorskip("transformers.models.hyperclovax.modeling_hyperclovax")
    x, post, pre, residual = tensors(2048)
    after, before = (models.HyperCLOVAXRMSNorm(2048, eps=1e-5).to(BF16) for _ in range(2))
    after.weight.data, before.weight.data = post, pre
    y, h = onepass.rms_norm_add_rms_norm(x, post, pre, 1e-5, residual=residual, rounding="hf", branch_scale=0.22)
    with torch.no_grad():
        agree(h, residual + after(x) * 0.22)
        agree(y, before(h))


@pytest.mark.parametrize("scale", [0.22, -1.4, 0.0, 1e-3, 1e30])
def test_a_scaled_post_norm_is_that_of_torch(scale: float) -> None:
    for dtype in FLOATS:
        x, post, pre, residual = tensors(640, dtype=dtype)
        for rounding in ROUNDINGS:
            options: dict[str, Any] = {"residual": residual, "rounding": rounding}
            ours = onepass.rms_norm_add_rms_norm(x, post, pre, branch_scale=scale, **options)
            b = onepass.rms_norm(x, post, rounding=rounding)
            assert same(ours, onepass.rms_norm(b * scale, pre, **options))
            one = onepass.rms_norm_add_rms_norm(x, post, pre, branch_scale=1.0, **options)
            assert same(one, onepass.rms_norm(b, pre, **options)) and not same(ours, one)


def agree(ours: Tensor, theirs: Tensor) -> None:
    """Equal but for values next to a rounding boundary."""
    assert ours.dtype == theirs.dtype and ours.float().abs().max() > 0.1
    assert (ours != theirs).float().mean() < 0.01
    assert ((ours.float() - theirs.float()).abs() <= theirs.float().abs() * 2.0**-6 + 2.0**-6).all()


def test_a_row_with_nan_or_infinity_is_nan_and_others_are_unaffected() -> None:
    x, post, pre, residual = tensors()
    clean = onepass.rms_norm_add_rms_norm(x, post, pre, residual=residual)
    x[1, 5], residual[3, 7], x[4, 0] = torch.nan, torch.inf, torch.inf
    y, h = onepass.rms_norm_add_rms_norm(x, post, pre, residual=residual)
    for row in (1, 4):
        assert y[row].isnan().all() and h[row].isnan().all()
    assert y[3].isnan().all() and h[3].isinf().sum() == 1
    for row in (0, 2, 5):
        assert same((y[row], h[row]), (clean[0][row], clean[1][row]))


def test_a_row_of_zeros_leaves_the_residual() -> None:
    x, post, pre, residual = tensors()
    y, h = onepass.rms_norm_add_rms_norm(torch.zeros_like(x), post, pre, 0.0, residual=residual)
    assert torch.equal(h, residual) and same_bytes(y, onepass.rms_norm(residual, pre, 0.0))


@pytest.mark.parametrize("round_sum", [False, True])
def test_rows_alone_and_in_a_batch(round_sum: bool) -> None:
    """Enough rows for several threads."""
    x, post, pre, residual = tensors(1152, 300)
    whole = onepass.rms_norm_add_rms_norm(x, post, pre, residual=residual, round_sum=round_sum)
    for rows in (slice(0, 1), slice(299, 300), slice(17, 34), slice(100, 228)):
        part = onepass.rms_norm_add_rms_norm(x[rows], post, pre, residual=residual[rows], round_sum=round_sum)
        assert same(part, tuple(t[rows] for t in whole))


# --- the caller's tensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("n", [96, 20000])
def test_outputs_may_be_the_inputs(n: int, rounding: Any) -> None:
    x, post, pre, residual = tensors(n)
    y, h = onepass.rms_norm_add_rms_norm(x, post, pre, residual=residual, rounding=rounding)
    ways: tuple[Callable[[Tensor, Tensor], dict[str, Tensor]], ...] = (
        lambda x, r: {"out": x, "residual_out": r},
        lambda x, r: {"out": r, "residual_out": x},
    )
    for way in ways:
        mine, total = x.clone(), residual.clone()
        outs: dict[str, Any] = way(mine, total)
        again = onepass.rms_norm_add_rms_norm(mine, post, pre, residual=total, rounding=rounding, **outs)
        assert again[0] is outs["out"] and again[1] is outs["residual_out"] and same(again, (y, h))


def test_quantized_results_and_their_order() -> None:
    x, post, pre, residual = tensors()
    found = onepass.rms_norm_add_rms_norm_quant(x, post, pre, residual=residual, format="mxfp8", return_norm=True)
    wanted = onepass.rms_norm_fused_quant(
        onepass.rms_norm(x, post), pre, residual=residual, format="mxfp8", return_norm=True
    )
    assert same(found, wanted) and len(found) == 4
    static = torch.tensor(0.02)
    codes, scale, h = onepass.rms_norm_add_rms_norm_quant(x, post, pre, residual=residual, static_scale=static)
    assert scale is static and codes.dtype == torch.float8_e4m3fn and same_bytes(h, found[2])


def test_errors_name_the_op_and_the_argument() -> None:
    x, post, pre, residual = tensors(64)
    call: Any = onepass.rms_norm_add_rms_norm
    with pytest.raises(
        ContractError, match=r"^rms_norm_add_rms_norm: `gamma_pre` must have shape \[N\] with N=64, got \[63\]"
    ):
        call(x, post, pre[:63], residual=residual)
    with pytest.raises(ContractError, match=r"^rms_norm_add_rms_norm: `gamma_post` must be a tensor, got None"):
        call(x, None, pre, residual=residual)
    with pytest.raises(ContractError, match=r"^rms_norm_add_rms_norm: `residual` must "):
        call(x, post, pre, residual=residual.half())
    with pytest.raises(ContractError, match=r"^rms_norm_add_rms_norm: `residual_out` must not overlap `out`"):
        call(x, post, pre, residual=residual, out=x, residual_out=x)
    with pytest.raises(ContractError, match=r"^rms_norm_add_rms_norm_quant: `scale_ub` must be None with static_scale"):
        onepass.rms_norm_add_rms_norm_quant(
            x, post, pre, residual=residual, static_scale=torch.tensor(1.0), scale_ub=torch.tensor(1.0)
        )


# --- launches -------------------------------------------------------------------------------------------------------


def test_a_call_is_one_launch() -> None:
    x, post, pre, residual = tensors(128)
    launches: list[str] = []
    with launching_with(lambda family: lambda call: launches.append(family)):
        onepass.rms_norm_add_rms_norm(x, post, pre, residual=residual)
        onepass.rms_norm_add_rms_norm_quant(x, post, pre, residual=residual, format="nvfp4")
    assert launches == ["rms_norm"] * 2


CALLS: Final[dict[str, Callable[[Tensor, Tensor], object]]] = {
    "norm": lambda x, g: onepass.rms_norm_add_rms_norm(x, g, g, residual=x),
    "hf": lambda x, g: onepass.rms_norm_add_rms_norm(x, g, g, residual=x, rounding="hf"),
    "codes": lambda x, g: onepass.rms_norm_add_rms_norm_quant(x, g, g, residual=x, format="int8"),
    "groups": lambda x, g: onepass.rms_norm_add_rms_norm_quant(x, g, g, residual=x, format="mxfp8"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("n", [128, 5376, 20480])
def test_gpu_kernels_raise_until_they_have_run(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are listed as unproven, and `rms_norm` with a residual is not."""
    pytest.importorskip("triton")
    from onepass.gpu import compile as compiler
    from tools.evidence import records

    x, gamma = torch.empty(4, n, dtype=BF16), torch.empty(n, dtype=BF16)
    (build,) = records.builds_of(lambda: CALLS[name](x, gamma), records.H200)
    assert compiler.is_unproven(build) and records.missing([build], {}, records.H200) == []
    monkeypatch.delenv("ONEPASS_UNPROVEN", raising=False)
    with pytest.raises(
        Unsupported, match=r"^rms_norm_.* post=bf16 .*has not run on a GPU yet; ONEPASS_UNPROVEN=1 runs"
    ):
        compiler.Launcher(build, 0)
    (proven,) = records.builds_of(lambda: onepass.rms_norm(x, gamma, residual=x), records.H200)
    assert not compiler.is_unproven(proven)


def test_onepass_check_leaves_out_what_has_not_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = {"rms_norm_add_rms_norm", "rms_norm_add_rms_norm_quant"}
    monkeypatch.delenv("ONEPASS_UNPROVEN", raising=False)
    assert ops <= {case.op for case in runner.select(device="cpu")} & {
        c.op for c in runner.select(device="interpreter")
    }
    assert not ops & {case.op for case in runner.select(device="cuda")} and ops <= set(runner.left_out("cuda"))
    monkeypatch.setenv("ONEPASS_UNPROVEN", "1")
    assert ops <= {case.op for case in runner.select(device="cuda")}
