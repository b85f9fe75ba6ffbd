"""linear on the CPU: every option gives the bytes of the separate steps, whatever the batch; special values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.backend import launching_with
from onepass.errors import ContractError
from onepass.formats import FLOATS
from onepass.ops.linear.launch import ACTIVATIONS, LinearCall
from onepass.testing.tensors import same_bytes
from tests.helpers.pairs import Pair, covering, every_pair, pairs_of
from tests.linear.promises import promises
from tests.oracle.memory import poison
from tests.oracle.weights import scales, whole_numbers

BF16, F16, F32 = FLOATS
F8, E8M0, I8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8
K = 300


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def product_of(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """`linear` without a residual."""
    y = onepass.linear(x, weight, **options)
    assert isinstance(y, Tensor)
    return y


def weights(kind: str, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Weights and their scale; ``kind`` is e.g. "fp8 block"."""
    name, _, scale = kind.partition(" ")
    values = torch.randn(n, k)
    made = {"float": values * 0.1, "fp8": values, "int8": values}[name]
    weight = whole_numbers(made) if name == "int8" else made.to(F8 if name == "fp8" else dtype)
    return weight, scales(scale, n, k, torch.Generator().manual_seed(1)) if scale else None


# --- fused is separate ----------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """One call: dtypes of what is present, and options."""

    x: torch.dtype
    weight: str
    gamma: torch.dtype | None
    residual: str
    bias: torch.dtype | None
    activation: Any
    add: str
    rounding: Any
    out: torch.dtype | None


CHOICES = Options(
    x=FLOATS,  # type: ignore[arg-type]
    weight=("float", "float row", "fp8", "fp8 tensor", "fp8 row", "fp8 block", "fp8 ue8m0", "int8", "int8 row"),  # type: ignore[arg-type]
    gamma=(None, *FLOATS),  # type: ignore[arg-type]
    residual=("", "x", "float32"),  # type: ignore[arg-type]
    bias=(None, *FLOATS),  # type: ignore[arg-type]
    activation=(None, *ACTIVATIONS),
    add=("", "x", "float32"),  # type: ignore[arg-type]
    rounding=("once", "hf"),
    out=(None, F32),  # type: ignore[arg-type]
)


def legal(pair: Pair) -> bool:
    return pair[2:] != ("hf", F32)


SOME = [Options(*values) for values in covering(CHOICES, legal, seed=5)]  # type: ignore[arg-type]


def test_combinations_contain_every_pair_of_values() -> None:
    expected = every_pair(CHOICES, legal)  # type: ignore[arg-type]
    assert len(expected) > 400 and set().union(*map(pairs_of, SOME)) == expected


def given(o: Options, m: int = 5, columns: int = 66) -> dict[str, Any]:
    """Arguments with these options."""
    n = 2 * columns if o.activation else columns
    weight, scale = weights(o.weight, n, K, o.x)
    named = {"x": o.x, "float32": F32}
    return {
        "x": torch.randn(m, K).to(o.x),
        "weight": weight,
        "weight_scale": scale,
        "gamma": None if o.gamma is None else (1 + torch.randn(K) / 4).to(o.gamma),
        "eps": 1e-3,
        "weight_offset": 0.5,
        "residual": torch.randn(m, K).to(named[o.residual]) if o.residual else None,
        "bias": None if o.bias is None else torch.randn(n).to(o.bias),
        "activation": o.activation,
        "add": torch.randn(m, columns).to(named[o.add]) if o.add else None,
        "rounding": o.rounding,
        "out_dtype": o.out,
    }


def multiplied(a: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """What weight is multiplied by, and the new residual."""
    x, gamma, residual = a["x"], a["gamma"], a["residual"]
    if gamma is not None:
        names = ("eps", "weight_offset", "residual", "rounding")
        results = onepass.rms_norm(x, gamma, **{name: a[name] for name in names})
        return results if isinstance(results, tuple) else (results, None)
    if residual is None:
        return x, None
    h = x.float() + residual.float()
    return h.to(x.dtype), h.to(residual.dtype)


def separate(a: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The same result, with one call per product and everything else in torch.

    The product with a float32 identity is exact, so it computes an activation alone.
    """
    dtype = a["x"].dtype

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).float() if a["rounding"] == "hf" else t

    first, new_residual = multiplied(a)
    y = product_of(first, a["weight"], weight_scale=a["weight_scale"], out_dtype=F32)
    if a["bias"] is not None:
        y = y + a["bias"].float()
    y = rounded(y)
    if a["activation"]:
        gate, up = y.chunk(2, -1)
        ones = torch.cat((gate, torch.ones_like(gate)), -1)
        act = product_of(ones, torch.eye(ones.shape[1]), activation=a["activation"])
        y = rounded(rounded(act) * up)
    if a["add"] is not None:
        y = rounded(y + a["add"].float())
    return y.to(a["out_dtype"] or dtype), new_residual


@pytest.mark.sampled(60)  # each compiles three kernels
@pytest.mark.parametrize("options", SOME, ids=lambda o: " ".join(str(v).removeprefix("torch.") for v in o))
def test_fused_is_separate(options: Options) -> None:
    a = given(options)
    results = onepass.linear(**a)
    y, new_residual = results if isinstance(results, tuple) else (results, None)
    expected, expected_residual = separate(a)
    assert y.dtype == (options.out or options.x) and y.float().abs().amax() > 0
    assert same_bytes(y, expected)
    if new_residual is None or expected_residual is None:
        assert new_residual is expected_residual is None
    else:
        assert same_bytes(new_residual, expected_residual)


# --- one order of summation -----------------------------------------------------------------------------------------

KINDS = CHOICES.weight


@pytest.mark.sampled(31)  # each compiles three kernels
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, BF16) for kind in KINDS), *itertools.product(("float", "fp8 block", "int8 row"), (F16, F32))],
)
def test_bytes_are_those_of_the_gemv(kind: str, dtype: torch.dtype) -> None:
    gamma = torch.ones(1)
    for k in (1, 31, 128, 300, 1029):
        weight, scale = weights(kind, 71, k, dtype)
        x = torch.randn(11, k).to(dtype)
        unnormed = onepass.gemv_and_partial_norm(x, weight, gamma, weight_scale=scale)[1]
        assert same_bytes(product_of(x, weight, weight_scale=scale)[:, 1:], unnormed)
        if kind != "float":  # torch's product otherwise
            unfused = onepass.gemv_and_partial_norm(x, weight, gamma, weight_scale=scale, fused=False)[1]
            assert same_bytes(unfused, unnormed)


@pytest.mark.sampled(13)  # each compiles a kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [False, True])
def test_bytes_of_a_row_are_its_own(kind: str, norm: bool) -> None:
    weight, scale = weights(kind, 96, K, BF16)
    x, add = torch.randn(130, K).bfloat16(), torch.randn(130, 48)
    gamma = torch.ones(K) if norm else None
    options: dict[str, Any] = {"gamma": gamma, "weight_scale": scale, "activation": "silu_mul"}
    whole = product_of(x, weight, add=add, **options)
    for m in (1, 2, 3, 4, 5, 8, 16, 17, 33, 64):
        for begin in {0, 1, 130 - m}:
            rows = slice(begin, begin + m)
            assert same_bytes(product_of(x[rows], weight, add=add[rows], **options), whole[rows]), (m, begin)


def test_columns_do_not_depend_on_other_columns() -> None:
    """On a CPU: a slice of weight gives a slice of the result."""
    weight, _ = weights("float", 300, K, BF16)
    x = torch.randn(3, K).bfloat16()
    whole = product_of(x, weight)
    for part in (slice(0, 1), slice(5, 38), slice(299, 300)):
        assert same_bytes(product_of(x, weight[part]), whole[:, part])


def test_block_scales_are_fused_multiply_adds_from_the_left() -> None:
    """One column per block is not zero, so partial sums are exact. Another grouping gives other bytes."""
    n, blocks = 512, 5
    x, weight = torch.zeros(1, 128 * blocks), torch.randn(n, 128 * blocks).to(F8)
    x[0, ::128] = torch.randn(blocks)
    scale = torch.rand(4, blocks) + 0.5
    partial = x[0, ::128].bfloat16().double() * weight[:, ::128].double()
    factor = scale.double().repeat_interleave(128, 0)
    total, apart = torch.zeros(n).double(), torch.zeros(n)
    for b in range(blocks):
        total = (partial[:, b] * factor[:, b] + total).float().double()
        apart = apart + (partial[:, b] * factor[:, b]).float()
    y = product_of(x.bfloat16(), weight, weight_scale=scale, out_dtype=F32)
    assert same_bytes(y[0], total.float()) and not same_bytes(y[0], apart)


def test_scale_and_bias_are_two_roundings() -> None:
    x, weight = torch.ones(1, 1), torch.randn(400, 1)
    scale, bias = torch.rand(400), torch.randn(400)
    y = product_of(x, weight, weight_scale=scale, bias=bias)
    product = weight[:, 0] * scale
    assert same_bytes(y[0], product + bias)
    assert not same_bytes(y[0], (weight[:, 0].double() * scale.double() + bias.double()).float())


def test_a_column_of_scales_is_a_scale_per_row() -> None:
    weight, scale = weights("fp8 row", 200, K, BF16)
    assert scale is not None
    x = torch.randn(3, K).bfloat16()
    expected = product_of(x, weight, weight_scale=scale)
    assert same_bytes(product_of(x, weight, weight_scale=scale.unsqueeze(1)), expected)
    one = torch.tensor([0.25])
    expected = product_of(x, weight, weight_scale=one.expand(200).contiguous())
    assert same_bytes(product_of(x, weight, weight_scale=one), expected)


def test_powers_of_two_scale_as_float32_does() -> None:
    weight, scale = weights("fp8 ue8m0", 200, K, BF16)
    assert scale is not None and scale.dtype == E8M0
    x = torch.randn(3, K).bfloat16()
    assert same_bytes(
        product_of(x, weight, weight_scale=scale), product_of(x, weight, weight_scale=scale.to(torch.float32))
    )


PROMISES = dict(promises("cpu"))


@pytest.mark.sampled(31)  # one size stays
@pytest.mark.parametrize(
    "name",
    # test_fused_is_separate and test_bytes_are_those_of_the_gemv have other sizes
    [pytest.param(name, marks=[pytest.mark.full] if name.startswith("linear: ") else []) for name in PROMISES],
)
def test_promise(name: str) -> None:
    assert PROMISES[name]() is None


# --- special values -------------------------------------------------------------------------------------------------


class TestSpecialValues:
    @pytest.mark.parametrize("code", [0x7F, 0xFF])
    @pytest.mark.parametrize("kind", ["fp8", "fp8 row", "fp8 block", "fp8 ue8m0"])
    def test_nan_weight_spoils_its_column(self, kind: str, code: int) -> None:
        weight, scale = weights(kind, 140, K, BF16)
        x = torch.randn(3, K).bfloat16()
        expected = product_of(x, weight, weight_scale=scale)
        weight.view(torch.uint8)[7, 200] = code
        y = product_of(x, weight, weight_scale=scale)
        assert y[:, 7].isnan().all()
        others = [i for i in range(140) if i != 7]
        assert same_bytes(y[:, others], expected[:, others])

    @pytest.mark.sampled(5)  # each compiles a kernel
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("options", [{}, {"gamma": torch.ones(K)}, {"activation": "gelu_mul"}])
    @pytest.mark.parametrize("kind", ["float", "fp8 block", "int8 row"])
    def test_bad_row_does_not_affect_others(self, kind: str, options: dict[str, Any], bad: float) -> None:
        weight, scale = weights(kind, 66, K, BF16)
        x = torch.randn(5, K).bfloat16()
        expected = product_of(x, weight, weight_scale=scale, **options)
        x[2, 17] = bad
        y = product_of(x, weight, weight_scale=scale, **options)
        assert same_bytes(y[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
        if options.get("gamma") is not None or bad != bad:
            assert y[2].isnan().all()
        elif kind == "float" and not options:
            assert not y[2].isfinite().any()

    def test_zero_and_nan_scales(self) -> None:
        """Each block contributes on its own: zero times a finite sum is nothing, and NaN is NaN."""
        weight, scale = weights("fp8 block", 256, 384, BF16)
        assert scale is not None
        x = torch.randn(2, 384).bfloat16()
        scale[0, 1], scale[1, 2] = 0.0, torch.nan
        y = product_of(x, weight, weight_scale=scale)
        without = scale.clone()
        without[1, 2] = 1.0
        hidden = weight.clone()
        hidden.view(torch.uint8)[:128, 128:256] = 0
        assert same_bytes(y[:, :128], product_of(x, hidden, weight_scale=without)[:, :128])
        assert y[:, 128:].isnan().all()
        x[1, 130] = torch.inf
        assert product_of(x, weight, weight_scale=scale)[1, :128].isnan().all()
        zero = product_of(x[:1], weight, weight_scale=torch.zeros(1))
        assert zero.eq(0).all()

    def test_nan_power_of_two(self) -> None:
        weight, scale = weights("fp8 ue8m0", 256, 256, BF16)
        assert scale is not None
        scale.view(torch.uint8)[0, 1] = 255
        y = product_of(torch.randn(2, 256).bfloat16(), weight, weight_scale=scale)
        assert y[:, :128].isnan().all() and y[:, 128:].isfinite().all()

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations_of_large_and_small_gates(self, activation: Any) -> None:
        gate = torch.tensor([0.0, 1e-30, -1e-30, 1.0, -1.0, 20.0, 1e4, 3e38, -1e4, -3e38, torch.inf, torch.nan])
        x = torch.stack((gate, torch.ones_like(gate)), 1)
        y = product_of(x, torch.eye(2), activation=activation)[:, 0]
        functional = torch.nn.functional
        if activation == "silu_mul":
            expected = functional.silu(gate.double())
        else:
            expected = functional.gelu(gate.double(), approximate="tanh" if "tanh" in activation else "none")
        # x @ eye: infinity times zero is NaN
        assert y[10:].isnan().all()
        torch.testing.assert_close(y[:10].double(), expected[:10], rtol=1e-6, atol=1e-30)

    def test_no_rows(self) -> None:
        weight, gamma = torch.randn(8, 4), torch.ones(4)
        launches: list[str] = []
        with launching_with(lambda family: lambda *_: launches.append(family)):
            y, h = onepass.linear(torch.empty(2, 0, 4), weight, gamma=gamma, residual=torch.empty(2, 0, 4))
        assert (y.shape, h.shape, launches) == ((2, 0, 8), (2, 0, 4), [])

    def test_huge_strides(self) -> None:
        """Rows 2**31 elements apart; the memory in between is never touched."""
        step = 2**31 + 64

        def apart(rows: Tensor) -> Tensor:
            return torch.empty(step + 64, dtype=BF16).as_strided(rows.shape, (step, 1)).copy_(rows)

        x, weight, residual, add = (torch.randn(2, 64).bfloat16() for _ in range(4))
        add = add[:, :2]
        expected = onepass.linear(x, weight, residual=residual, add=add)
        for moved in ("x", "weight", "residual", "add"):
            tensors = {"x": x, "weight": weight, "residual": residual, "add": add}
            tensors[moved] = apart(tensors[moved])
            got: Any = onepass.linear(**tensors)  # type: ignore[call-overload]
            assert all(same_bytes(a, b) for a, b in zip(got, expected, strict=True)), moved
        out, residual_out = apart(torch.zeros(2, 2)), apart(torch.zeros(2, 64))
        onepass.linear(x, weight, residual=residual, add=add, out=out, residual_out=residual_out)
        assert same_bytes(out, expected[0]) and same_bytes(residual_out, expected[1])


# --- memory ---------------------------------------------------------------------------------------------------------


class TestMemory:
    def test_rows_fold_into_one_launch_where_they_can(self) -> None:
        seen: list[LinearCall] = []
        weight = torch.randn(6, 4)
        x = torch.randn(2, 3, 5, 4)
        with launching_with(lambda family: seen.append):
            for given in (x, x[0, 0], x[0, 0, 0], x.expand(2, 3, 5, 4), x[..., 1:2, :]):
                onepass.linear(given, weight)
            assert [call.x.shape for call in seen] == [(30, 4), (5, 4), (1, 4), (30, 4), (6, 4)]
            assert seen[-1].x.stride() == (20, 1) and seen[-1].out.stride() == (6, 1)
            seen.clear()
            onepass.linear(x.transpose(0, 1), weight)  # the rows of x and of the result lie in different orders
            assert [call.x.shape for call in seen] == [(5, 4)] * 6

    @pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (2, 1, 3, 2)])
    def test_leading_dimensions(self, lead: tuple[int, ...]) -> None:
        x, weight = torch.randn(*lead, 40).bfloat16(), torch.randn(12, 40).bfloat16()
        residual, add = torch.randn(*lead, 40), torch.randn(*lead, 6)
        options: dict[str, Any] = {"gamma": torch.ones(40), "activation": "silu_mul"}
        y, h = onepass.linear(x, weight, residual=residual, add=add, **options)
        assert (y.shape, h.shape) == ((*lead, 6), (*lead, 40))
        rows = [t.reshape(-1, t.shape[-1]) for t in (x, residual, add)]
        expected = onepass.linear(rows[0], weight, residual=rows[1], add=rows[2], **options)
        assert same_bytes(y.reshape(-1, 6), expected[0]) and same_bytes(h.reshape(-1, 40), expected[1])

    def test_any_strides(self) -> None:
        x, weight = torch.randn(3, 4, 2, 40).bfloat16(), torch.randn(12, 40).bfloat16()
        expected = product_of(x, weight)
        for order in itertools.permutations(range(3)):
            moved = x.permute(*order, 3).contiguous().permute(*(order.index(d) for d in range(3)), 3)
            assert same_bytes(product_of(moved, weight), expected)
            out = poison(torch.empty(*(expected.shape[d] for d in order), 14, dtype=BF16))
            view = out[..., 1:13].permute(*(order.index(d) for d in range(3)), 3)
            product_of(x, weight, out=view)
            assert same_bytes(view, expected) and bool(out[..., 13:].contiguous().view(torch.uint8).eq(0xFF).all())

    def test_in_place(self) -> None:
        x, weight = torch.randn(5, 40).bfloat16(), torch.randn(12, 40).bfloat16()
        residual, add = torch.randn(5, 40), torch.randn(5, 12).bfloat16()
        expected = onepass.linear(x, weight, residual=residual, add=add)
        got = onepass.linear(x, weight, residual=residual, add=add, out=add, residual_out=residual)
        assert got[0] is add and got[1] is residual
        assert same_bytes(add, expected[0]) and same_bytes(residual, expected[1])

    def test_other_overlaps_are_refused(self) -> None:
        x, weight = torch.randn(12, 12), torch.randn(12, 12)
        shared = torch.randn(13, 12)
        for name, tensors in {
            "out": {"x": x, "weight": weight, "out": x},
            "out`.*`weight": {"x": x, "weight": weight, "out": weight},
            "out`.*`residual": {"x": x, "weight": weight, "residual": shared[1:], "out": shared[1:]},
            "out`.*`add` unless": {"x": x, "weight": weight, "add": shared[1:], "out": shared[:-1]},
            "residual_out`.*`x": {"x": x, "weight": weight, "residual": x.clone(), "residual_out": x},
            "residual_out`.*`add": {
                "x": x,
                "weight": weight,
                "residual": x.clone(),
                "add": shared[1:],
                "residual_out": shared[1:],
            },
        }.items():
            before = {key: t.clone() for key, t in tensors.items()}
            with pytest.raises(ContractError, match=f"^linear: `{name}"):
                onepass.linear(**tensors)  # type: ignore[call-overload]
            assert all(same_bytes(t, before[key]) for key, t in tensors.items())
        same = torch.randn(12, 12)
        with pytest.raises(ContractError, match=r"^linear: `residual_out` must not overlap `out`"):
            onepass.linear(x, weight, residual=x.clone(), out=same, residual_out=same)
