"""QK-RMSNorm on the CPU and under torch: results, rejected calls, and that the two halves equal the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core import op as registration
from onepass.core.backend import launching_with
from onepass.core.check import validation_of
from onepass.core.contract import Contract
from onepass.errors import ContractError
from onepass.formats import FLOATS
from onepass.ops.qk_norm import reference as qk_norm_reference
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.testing.tensors import same_bytes
from tests.helpers.mistakes import Mistake, mistakes
from tests.oracle.samples import sample
from tests.qk_norm.promises import promises
from tools.ulps import floats

OPS = {op.contract.name: op for op in registration.ops if "q" in op.contract.args and not op.contract.in_place}
SIZES = {"Nq": 96, "Nk": 32, "Gq": 96, "Gk": 32, "Hq": 3, "Hk": 1, "D": 32, "P": 4, "R": 16}


def positional(contract: Contract, lead: tuple[int, ...] = (3, 4), rope: bool = True, **changes: Any) -> dict[str, Any]:
    """Every argument of a good call by name, in the contract's order."""
    optional = ["freqs", "positions"] if rope and "freqs" in contract.args else []
    tensors = sample(contract, SIZES, lead, dtypes={"q": torch.bfloat16}, optional=optional)
    values: dict[str, Any] = {name: tensors.get(name) for name in contract.args}
    values |= {name: option.default for name, option in contract.options.items()}
    if optional and "head_dim" in values:
        values["head_dim"] = 32
    return {**values, **changes}


def qk(rows: int, nq: int, nk: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(rows, nq).to(dtype), torch.randn(rows, nk).to(dtype), torch.randn(nq), torch.randn(nk)


def angles(positions: int, dim: int) -> Tensor:
    angle = torch.rand(positions, dim // 2) * 6.3
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)


# --- refusals -------------------------------------------------------------------------------------------------------


def all_mistakes() -> list[Any]:
    found = []
    for name, op in OPS.items():
        for mistake in mistakes(op.contract, positional(op.contract)):
            found.append(pytest.param(name, mistake, id=f"{name}-{mistake.label}"))
    return found


@pytest.mark.parametrize(("name", "mistake"), all_mistakes())
def test_bad_argument_is_named(name: str, mistake: Mistake) -> None:
    nothing = [None] * len(OPS[name].contract.outs)
    with torch.enable_grad(), pytest.raises(ContractError) as caught:
        OPS[name](*mistake.arguments.values(), *nothing)
    public = OPS[name].contract.public_name
    assert str(caught.value).startswith(f"{public}: `{mistake.argument}` must "), str(caught.value)


def test_there_are_many_bad_arguments_and_good_calls_pass() -> None:
    assert len(all_mistakes()) > 150
    for op in OPS.values():
        op(*positional(op.contract).values(), *[None] * len(op.contract.outs))


FREQS = angles(8, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.ones(2, 64)}, r"`k` must have shape \[\.\.\., Nk\] with \.\.\.=\[3\]"),
        ({"gamma_q": torch.ones(64)}, "`gamma_q` must have q's number of columns"),
        ({"gamma_k": torch.ones(32)}, "`gamma_k` must have k's number of columns"),
        ({"per_head": True, "gamma_q": torch.ones(24)}, "`gamma_q` must have q's number of columns, Nq=128 .per_head: divide it"),
        ({"per_head": True, "gamma_q": torch.ones(32)}, "`gamma_k` must have k's number of columns, Nk=64 .per_head: gamma_q's"),
        ({"rope": onepass.Rope(FREQS)}, "`head_dim` must be even and at most 4096"),
        ({"rope": onepass.Rope(FREQS, head_dim=48)}, "`head_dim` must divide the columns"),
        ({"rope": onepass.Rope(FREQS, head_dim=16)}, "`dim` must be at most head_dim"),
        ({"rope": onepass.Rope(FREQS, head_dim=64, dim=7)}, "`dim` must be even"),
        ({"rope": onepass.Rope(FREQS, head_dim=64, dim=64)}, "`dim` must be even and at most freqs' width"),
        ({"rope": onepass.Rope(FREQS, head_dim=64, style="whole")}, "`style` must be 'half' or 'interleaved'"),  # type: ignore[arg-type]
        ({"rope": onepass.Rope(FREQS, torch.zeros(4, dtype=torch.int64), head_dim=64)}, r"`positions` must have shape \[\.\.\.\]"),
        ({"rope": onepass.Rope(FREQS[:0], head_dim=64)}, "`freqs` must have at least one row"),
        ({"rope": FREQS}, "`rope` must be a Rope or None"),
        ({"out": torch.ones(3, 128)}, "`out` must be a pair of tensors"),
        ({"out": (torch.ones(3, 128), torch.ones(3, 64).half())}, "`k_out` must have dtype float32, got float16"),
        ({"out": (torch.ones(3, 128, dtype=torch.int32), torch.ones(3, 64))}, "`q_out` must have dtype float32, got int32"),
        ({"out_dtype": torch.int8}, "`out_dtype` must be bfloat16 or float16 or float32"),
    ],
)  # fmt: skip
def test_error_messages(change: dict[str, Any], message: str) -> None:
    good = {"q": torch.ones(3, 128), "k": torch.ones(3, 64), "gamma_q": torch.ones(128), "gamma_k": torch.ones(64)}
    with pytest.raises(ContractError, match="qk_rms_norm: " + message):
        onepass.qk_rms_norm(**{**good, **change})


@pytest.mark.parametrize("columns", [2**24, 2**24 + 1])
@pytest.mark.parametrize("long", ["q", "k", "heads"])
def test_limit_of_columns(long: str, columns: int) -> None:
    """For q, for k, and for a head of both."""
    nq, nk = (2 if long == "k" else columns), (2 if long == "q" else columns)
    q, k = torch.empty(1, 3, nq, device="meta"), torch.empty(1, 3, nk, device="meta")
    call = partial(onepass.qk_rms_norm, q, k, q[0, 0], k[0, 0], per_head=long == "heads")
    if columns == 2**24:
        assert [t.shape for t in call()] == [q.shape, k.shape]
    else:
        with pytest.raises(ContractError, match=f"`{'k' if long == 'k' else 'q'}` must have 1 to 2..24 columns"):
            call()


def test_apply_needs_its_outputs() -> None:
    q, k, gq, gk = qk(3, 64, 32)
    with pytest.raises(ContractError, match="apply_qk_rms_norm: `k_out` must be a tensor, got None"):
        onepass.apply_qk_rms_norm(q, None, gq, gk, torch.ones(3, 2), q, k, 1e-6)  # type: ignore[arg-type]


def test_positions_outside_raise_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, gq, gk = qk(3, 64, 32)
    rope = onepass.Rope(FREQS, torch.tensor([-3, 8, 2]), head_dim=32)
    nearest = onepass.Rope(FREQS, torch.tensor([0, 7, 2]), head_dim=32)
    for a, b in zip(
        onepass.qk_rms_norm(q, k, gq, gk, rope=rope), onepass.qk_rms_norm(q, k, gq, gk, rope=nearest), strict=True
    ):
        assert same_bytes(a, b)
    monkeypatch.setenv("ONEPASS_DEBUG", "1")
    with pytest.raises(ContractError, match="`positions` must lie within the 8 rows of freqs, got -3 to 8"):
        onepass.qk_rms_norm(q, k, gq, gk, rope=rope)
    onepass.qk_rms_norm(q, k, gq, gk, rope=nearest)


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "promise"), [pytest.param(n, p, id=n) for n, p in promises("cpu")])
def test_promise(name: str, promise: Callable[[], str | None]) -> None:
    assert promise() is None


def test_threads_do_not_change_results() -> None:
    q, k, gq, gk = qk(300, 1024, 256)
    rope = onepass.Rope(angles(300, 64), head_dim=128)
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append([onepass.row_mean_of_squares_qk(q, k), *onepass.qk_rms_norm(q, k, gq, gk, rope=rope)])
    finally:
        torch.set_num_threads(before)
    assert all(same_bytes(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))


def test_product_is_grouped_as_documented() -> None:
    """(x * rs) * gamma, not x * (rs * gamma): the inputs contain values for which they differ."""
    q, k, gq, gk = qk(50, 640, 64, torch.float32)
    var = torch.rand(50, 2) + 0.5
    out = torch.empty_like(q), torch.empty_like(k)
    onepass.apply_qk_rms_norm(*out, gq, gk, var, q, k, 1e-6)
    root = (var[:, :1] + torch.tensor(1e-6)).double().sqrt().float()  # rounded as float32's own root would be
    rs = (1 / root.double()).float()
    assert same_bytes(out[0], (q * rs) * gq)
    assert not torch.equal(out[0], q * (rs * gq))


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rotation_uses_the_unrounded_norm(style: Any) -> None:
    q, k, gq, gk = qk(64, 256, 128)
    freqs = angles(64, 128)
    rope = onepass.Rope(freqs, style=style, head_dim=128)
    exact = qk_norm_reference.rotate(rms_norm_reference.rms_norm(q, gq, 1e-6).y, freqs, 128, style=style)
    rounded = qk_norm_reference.rotate(rms_norm_reference.rms_norm(q, gq, 1e-6).y.bfloat16(), freqs, 128, style=style)
    y, _ = onepass.qk_rms_norm(q, k, gq, gk, rope=rope)
    assert floats(y, exact.y, size=exact.size) is None
    assert floats(y, rounded.y, size=rounded.size) is not None
    hf, _ = onepass.qk_rms_norm(q, k, gq, gk, rope=rope, rounding="hf")
    assert floats(hf, exact.y, size=exact.size) is not None


def test_rotation_by_complex_numbers() -> None:
    """The interleaved style against torch's complex product, the half style against that of reordered columns."""
    freqs, position = angles(16, 64), torch.randint(0, 16, (2, 5))
    q, k = torch.randn(2, 5, 4, 64), torch.randn(2, 5, 2, 64)
    one = torch.ones(64)
    turn = torch.view_as_complex(freqs.unflatten(-1, (-1, 2)).contiguous())[position][..., None, :]
    norm = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = torch.view_as_real(torch.view_as_complex(norm.unflatten(-1, (-1, 2))) * turn).flatten(-2)
    y, _ = onepass.qk_rms_norm(q, k, one, one, per_head=True, rope=onepass.Rope(freqs, position, "interleaved"))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    order = torch.arange(64).view(32, 2).t().flatten()
    halves, _ = onepass.qk_rms_norm(q[..., order], k, one, one, per_head=True, rope=onepass.Rope(freqs, position))
    torch.testing.assert_close(halves, expected[..., order], rtol=1e-5, atol=1e-5)


def test_heads_dimension_is_optional() -> None:
    q, k, gamma = torch.randn(2, 7, 4 * 64).bfloat16(), torch.randn(2, 7, 2 * 64).bfloat16(), torch.randn(64)
    rope = onepass.Rope(angles(7, 32))
    flat = onepass.qk_rms_norm(q, k, gamma, gamma, per_head=True, rope=rope)
    heads = onepass.qk_rms_norm(
        q.unflatten(-1, (4, 64)), k.unflatten(-1, (2, 64)), gamma, gamma, per_head=True, rope=rope
    )
    for a, b in zip(flat, heads, strict=True):
        assert b.dim() == 4 and same_bytes(a, b.flatten(-2))
    one = onepass.rms_norm(q.unflatten(-1, (4, 64)), gamma)
    plain, _ = onepass.qk_rms_norm(q, k, gamma, gamma, per_head=True)
    assert floats(plain, rms_norm_reference.rms_norm(q.unflatten(-1, (4, 64)), gamma, 1e-6).y.flatten(-2)) is None
    assert (plain.unflatten(-1, (4, 64)) == one).double().mean() > 0.999


def test_one_head_per_token() -> None:
    """Rows of gamma's length are tokens with one head, or heads, depending on positions; two dimensions are tokens."""
    q, k, gamma, freqs = torch.randn(5, 64), torch.randn(5, 64), torch.randn(64), angles(9, 64)
    tokens = onepass.qk_rms_norm(q, k, gamma, gamma, per_head=True, rope=onepass.Rope(freqs))
    whole = onepass.qk_rms_norm(q, k, gamma, gamma, rope=onepass.Rope(freqs, head_dim=64))
    counted = onepass.Rope(freqs, torch.arange(5))
    named = onepass.qk_rms_norm(q, k, gamma, gamma, per_head=True, rope=counted)
    stacked = onepass.qk_rms_norm(q[:, None], k[:, None], gamma, gamma, per_head=True, rope=counted)
    heads = onepass.qk_rms_norm(q, k, gamma, gamma, per_head=True, rope=onepass.Rope(freqs, torch.tensor(3)))
    assert all(same_bytes(a, b) for a, b in zip(tokens, whole, strict=True))
    assert all(same_bytes(a, b) for a, b in zip(tokens, named, strict=True))
    assert all(same_bytes(a, b[:, 0]) for a, b in zip(tokens, stacked, strict=True))
    assert same_bytes(heads[0][3], tokens[0][3]) and not torch.equal(heads[0], tokens[0])


@pytest.mark.parametrize("heads", [False, True])
def test_in_place_in_a_packed_projection(heads: bool) -> None:
    """q and k are written in place, and v next to them does not change."""
    qkv = torch.randn(9, 4 * 64 + 2 * 64 + 2 * 64).bfloat16()
    gamma = torch.randn(64)

    def parts(t: Tensor) -> tuple[Tensor, Tensor]:
        q, k, _ = t.split([256, 128, 128], -1)
        return (q.unflatten(-1, (4, 64)), k.unflatten(-1, (2, 64))) if heads else (q, k)

    expected = onepass.qk_rms_norm(*parts(qkv.clone()), gamma, gamma, per_head=True)
    v = qkv[:, 384:].clone()
    got = onepass.qk_rms_norm(*parts(qkv), gamma, gamma, per_head=True, out=parts(qkv))
    for a, b, c in zip(expected, got, parts(qkv), strict=True):
        assert same_bytes(a, b) and same_bytes(a, c)
    assert same_bytes(qkv[:, 384:], v)


def test_overlap_is_rejected() -> None:
    q, k, gq, gk = qk(4, 96, 96)
    with pytest.raises(ContractError, match="`k_out` must not overlap `q`"):
        onepass.qk_rms_norm(q, k, gq, gk, out=(q, q))
    with pytest.raises(ContractError, match="`q_out` must not overlap `k`"):
        onepass.qk_rms_norm(q, k[:, :64], gq, gk[:64], out=(k, q[:, :64]))


@pytest.mark.parametrize(("nq", "nk"), [(96, 64), (64, 96)])
def test_head_dim_must_divide_both_rows(nq: int, nk: int) -> None:
    q, k, gq, gk = qk(4, nq, nk)
    with pytest.raises(ContractError, match="`head_dim` must divide the columns of q and of k"):
        onepass.qk_rms_norm(q, k, gq, gk, rope=onepass.Rope(angles(4, 32), head_dim=64))


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_out_dtype(dtype: torch.dtype) -> None:
    q, k, gq, gk = qk(4, 96, 32)
    by_name = onepass.qk_rms_norm(q, k, gq, gk, out_dtype=dtype)
    given = torch.empty(4, 96, dtype=dtype), torch.empty(4, 32, dtype=dtype)
    by_out = onepass.qk_rms_norm(q, k, gq, gk, out=given)
    assert by_out[0] is given[0] and by_name[0].dtype == by_name[1].dtype == dtype
    assert all(same_bytes(a, b) for a, b in zip(by_name, by_out, strict=True))


def test_overflow_gives_a_nan_row_and_an_infinite_sum() -> None:
    q = torch.full((2, 64), 1.0)
    q[1] = 1e25
    assert onepass.row_sum_of_squares_qk(q, q)[1].isinf().all()
    y, _ = onepass.qk_rms_norm(q, q.clone(), torch.ones(64), torch.ones(64))
    assert y[1].isnan().all() and floats(y[0], torch.full((64,), (1 + 1e-6) ** -0.5).double()) is None


def test_eps_is_at_least_the_smallest_normal_number() -> None:
    q, k, gq, gk = qk(2, 64, 32)
    passed: list[float] = []
    with launching_with(lambda family: lambda call: passed.append(call.eps)):
        onepass.qk_rms_norm(q, k, gq, gk, 0.0)
        onepass.apply_qk_rms_norm(q, k, gq, gk, torch.ones(2, 2), q, k, 1e-6)
    assert passed == [2.0**-126, 1e-6]


def test_one_launch_each() -> None:
    q, k, gq, gk = qk(2, 64, 32)
    rope = onepass.Rope(angles(2, 32), head_dim=32)
    launches: list[str] = []
    with launching_with(lambda family: lambda call: launches.append(call.spec.stage)):
        onepass.row_sum_of_squares_qk(q, k)
        onepass.row_mean_of_squares_qk(q, k)
        onepass.apply_qk_rms_norm(q, k, gq, gk, torch.ones(2, 2), q, k, 1e-6, rope=rope)
        onepass.qk_rms_norm(q, k, gq, gk, rope=rope)
        onepass.qk_rms_norm(q[:0], k[:0], gq, gk)
    assert launches == ["sums", "means", "apply", "fused"]


# --- torch ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)  # four signatures stay
@pytest.mark.parametrize("lead", [(), (2, 3)])
@pytest.mark.parametrize(
    ("name", "rope"), [(name, rope) for name, op in OPS.items() for rope in {False, "freqs" in op.contract.args}]
)
def test_opcheck(name: str, rope: bool, lead: tuple[int, ...]) -> None:
    contract = OPS[name].contract
    arguments = tuple(positional(contract, lead, rope).values())
    torch.library.opcheck(getattr(torch.ops.onepass, name).default, arguments)
    outs = tuple(None if t is None else torch.empty_like(t) for t in validation_of(contract).prepare(*arguments))
    torch.library.opcheck(getattr(torch.ops.onepass, f"{name}_out").default, (*arguments, *outs))


def everything(qkv: Tensor, gq: Tensor, gk: Tensor, freqs: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    q, k, _ = qkv.split([128, 64, 64], -1)
    rope = onepass.Rope(freqs, positions, head_dim=64)
    var = onepass.row_mean_of_squares_qk(q, k)
    a, b = torch.empty_like(q), torch.empty_like(k)
    onepass.apply_qk_rms_norm(a, b, gq, gk, var, q, k, 1e-6, rope=rope)
    heads = onepass.qk_rms_norm(q.unflatten(-1, (2, 64)), k.unflatten(-1, (1, 64)), gk, gk, per_head=True)
    wide = onepass.qk_rms_norm(q, k, gq, gk, rope=rope, out_dtype=torch.float32)
    onepass.qk_rms_norm(q, k, gq, gk, out=(q, k))
    return var, a, b, *heads, *wide, qkv, onepass.row_sum_of_squares_qk(q * 2, k)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compile_whole_graph_dynamic(backend: str) -> None:
    torch._dynamo.reset()
    compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(
        everything, fullgraph=True, dynamic=True, backend=backend
    )
    gq, gk, freqs = torch.randn(128), torch.randn(64), angles(9, 64)
    with torch.no_grad():
        for rows in (3, 7):
            qkv, positions = torch.randn(rows, 256).bfloat16(), torch.randint(0, 9, (rows,))
            expected = everything(qkv.clone(), gq, gk, freqs, positions)
            got = compiled(qkv.clone(), gq, gk, freqs, positions)
            assert all(same_bytes(a, b) for a, b in zip(got, expected, strict=True))


def test_fake_and_inference_tensors() -> None:
    q, k, gq, gk = qk(3, 96, 32)
    with torch._subclasses.FakeTensorMode() as mode:
        a, b, c, d = (mode.from_tensor(t) for t in (q, k, gq, gk))
        fake = onepass.qk_rms_norm(a, b, c, d, out_dtype=torch.float32)
    with torch.inference_mode():
        real = onepass.qk_rms_norm(q, k, gq, gk, out_dtype=torch.float32)
        assert real[0].is_inference()
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype, r.device) == (f.shape, f.stride(), f.dtype, f.device)


def test_group_is_passed_to_dist(monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass import dist

    seen: dict[str, Any] = {}

    def stand_in(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        seen.update(options, arguments=arguments)
        return arguments[0], arguments[1]

    monkeypatch.setattr(dist, "qk_rms_norm", stand_in)
    q, k, gq, gk = qk(3, 96, 32)
    group: Any = object()
    got = onepass.qk_rms_norm(q, k, gq, gk, 1e-5, group=group, rounding="hf")
    assert got[0] is q and seen["group"] is group and seen["rounding"] == "hf" and seen["arguments"][4] == 1e-5
