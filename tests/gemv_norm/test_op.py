"""gemv_and_partial_norm on the CPU: results, the two-launch form, traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass import GmemTrace
from onepass.core.backend import launching_with
from onepass.cpu import sizes
from onepass.errors import ContractError
from onepass.ops.gemv_norm import cpu as cpu_gemv_norm
from onepass.ops.gemv_norm import op as gemv_norm
from onepass.ops.linear import reference as linear_reference
from onepass.ops.rms_norm import reference as rms_norm_reference
from onepass.testing.tensors import same_bytes
from tests.gemv_norm.inputs import all_same, inputs
from tests.gemv_norm.promises import promises
from tests.oracle.memory import poison
from tools.ulps import floats

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
F8 = torch.float8_e4m3fn
OPS = torch.ops.onepass


# --- results -------------------------------------------------------------------------------------------------------


class TestResults:
    def test_order_of_results(self) -> None:
        act, weight, gamma = inputs()
        more = [torch.ones(5), torch.ones(4).bfloat16(), torch.ones(3)]
        results = onepass.gemv_and_partial_norm(act, weight, gamma, segments=more, normed_dtype=F8)
        assert [(tuple(t.shape), t.dtype) for t in results] == [
            ((3, 30), F8),
            ((3, 1), F32),
            ((3, 5), BF16),
            ((3, 4), BF16),
            ((3, 3), BF16),
            ((3, 8), BF16),
        ]
        plain = onepass.gemv_and_partial_norm(act, weight, gamma)
        assert [tuple(t.shape) for t in plain] == [(3, 30), (3, 20)]
        assert same_bytes(results[-1], plain[1][:, 12:])
        for index, begin, width in ((2, 30, 5), (3, 35, 4), (4, 39, 3)):
            alone = onepass.gemv_and_partial_norm(act, weight[begin : begin + width], more[index - 2])
            assert same_bytes(results[index], alone[0])
        y = linear_reference.matmul(act, weight)[0][:, :30]
        norm = rms_norm_reference.rms_norm(y, gamma, 1e-6).y
        assert ((results[0].double() * results[1].double() - norm).abs() <= norm.abs() / 16 + results[1] / 512).all()

    def test_out_is_written_in_place_in_that_order(self) -> None:
        act, weight, gamma = inputs()
        more = [torch.ones(5), torch.ones(4)]
        expected = onepass.gemv_and_partial_norm(act, weight, gamma, segments=more, normed_dtype=F8)
        frames = [poison(torch.empty(3, t.shape[1] + 7, dtype=t.dtype)) for t in expected]
        given = [frame[:, 3 : 3 + t.shape[1]] for frame, t in zip(frames, expected, strict=True)]
        got = onepass.gemv_and_partial_norm(act, weight, gamma, segments=more, normed_dtype=F8, out=given)
        assert all(a is b for a, b in zip(got, given, strict=True))
        assert all_same(given, expected)
        for frame, out in zip(frames, given, strict=True):
            for guard in (frame[:, :3], frame[:, 3 + out.shape[1] :]):
                assert guard.contiguous().view(torch.uint8).eq(0xFF).all()

    def test_outs_are_slices_of_one_parent(self) -> None:
        act, weight, gamma = inputs()
        parent = torch.zeros(3, 50, dtype=BF16)
        onepass.gemv_and_partial_norm(act, weight, gamma, out=(parent[:, :30], parent[:, 30:]))
        assert same_bytes(parent, torch.cat(onepass.gemv_and_partial_norm(act, weight, gamma), 1))

    def test_no_rows(self) -> None:
        _, weight, gamma = inputs()
        normed, scale, unnormed = onepass.gemv_and_partial_norm(weight[:0], weight, gamma, normed_dtype=F8)
        assert (normed.shape, scale.shape, unnormed.shape) == ((0, 30), (0, 1), (0, 20))
        normed, unnormed = onepass.gemv_and_partial_norm(weight[:0], weight, gamma, fused=False)
        assert (normed.shape, unnormed.shape) == ((0, 30), (0, 20))

    def test_no_rows_launch_nothing(self) -> None:
        _, weight, gamma = inputs()
        launches: list[str] = []
        with launching_with(lambda family: lambda *_: launches.append(family)):
            onepass.gemv_and_partial_norm(weight[:0], weight, gamma)
            onepass.gemv_and_partial_norm(weight[:0], weight.to(F8), gamma, fused=False)
        assert not launches

    def test_a_plain_product_is_one_launch(self) -> None:
        """For any number of rows."""
        act, weight, y = (torch.empty(shape) for shape in ((40, 8), (5, 8), (40, 5)))
        seen: list[int] = []
        with launching_with(lambda family: lambda call: seen.append(call.act.shape[0])):
            gemv_norm._plain(act, weight, None, None, y)
        assert seen == [40]

    def test_cpu_splits_a_plain_product_into_kernel_sized_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []
        divide = sizes.row_blocks

        def counted(m: int) -> tuple[int, int]:
            seen.append(m)
            return divide(m)

        monkeypatch.setattr(cpu_gemv_norm, "row_blocks", counted)
        act, weight, gamma = inputs(40)
        onepass.gemv_and_partial_norm(act, weight.to(F8), gamma, fused=False)
        assert seen == [16, 16, 8]

    def test_no_tail(self) -> None:
        act, weight, gamma = inputs(width=50)
        normed, unnormed = onepass.gemv_and_partial_norm(act, weight, gamma)
        assert unnormed.shape == (3, 0)
        assert (
            floats(normed, rms_norm_reference.rms_norm(linear_reference.matmul(act, weight)[0], gamma, 1e-6).y) is None
        )

    def test_norm_uses_the_unrounded_product(self) -> None:
        """y = 1 + j/1024 is exact in float32 for any order of summation, but not in bfloat16."""
        steps = torch.arange(64) % 8
        act = torch.tensor([[1.0, 2.0**-10]]).bfloat16()
        weight = torch.stack([torch.ones(64), steps], 1).bfloat16()
        weight[0] = torch.tensor([3.0, 5.0])
        y = linear_reference.matmul(act, weight)[0]
        gamma = torch.ones(48).bfloat16()
        exact = rms_norm_reference.rms_norm(y[:, :48], gamma, 0.0).y.bfloat16()
        rounded = rms_norm_reference.rms_norm(y[:, :48].bfloat16(), gamma, 0.0).y.bfloat16()
        assert not same_bytes(exact, rounded)
        normed, unnormed = onepass.gemv_and_partial_norm(act, weight, gamma, 0.0)
        assert same_bytes(normed, exact) and same_bytes(unnormed, y[:, 48:].bfloat16())
        unfused, _ = onepass.gemv_and_partial_norm(act, weight, gamma, 0.0, fused=False)
        assert same_bytes(unfused, rounded)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 0.0])
    def test_bad_row_does_not_affect_others(self, bad: float) -> None:
        act, weight, gamma = inputs(5)
        more = [torch.ones(7).bfloat16()]
        good = onepass.gemv_and_partial_norm(act, weight, gamma, segments=more, normed_dtype=F8)
        spoiled = act.clone()
        spoiled[2] = bad
        results = onepass.gemv_and_partial_norm(spoiled, weight, gamma, segments=more, normed_dtype=F8)
        for index, (one, other) in enumerate(zip(results, good, strict=True)):
            assert same_bytes(one[[0, 1, 3, 4]], other[[0, 1, 3, 4]])
            row = one[2].float()
            assert row.eq(0).all() if bad == 0 else not row.isfinite().any(), index

    def test_more_than_two_billion_elements_are_addressed(self) -> None:
        """Rows 2**31 elements apart; the memory in between is never touched."""
        step = 2**31 + 64

        def apart(rows: Tensor) -> Tensor:
            return torch.empty(step + 64, dtype=BF16).as_strided(rows.shape, (step, 1)).copy_(rows)

        act, weight, gamma = inputs(2, 2, 64, 1)
        expected = onepass.gemv_and_partial_norm(act, weight, gamma)
        assert all_same(onepass.gemv_and_partial_norm(act, apart(weight), gamma), expected)
        assert all_same(onepass.gemv_and_partial_norm(apart(act), weight, gamma), expected)
        out = [apart(torch.zeros_like(t)) for t in expected]
        assert all_same(onepass.gemv_and_partial_norm(act, weight, gamma, out=out), expected)


PROMISES = dict(promises("cpu"))


@pytest.mark.parametrize("name", PROMISES)
def test_promise(name: str) -> None:
    assert PROMISES[name]() is None


# --- two launches --------------------------------------------------------------------------------------------------


class TestUnfused:
    @pytest.mark.sampled(5)  # some numbers stay
    @pytest.mark.parametrize("m", [1, 16, 40])
    @pytest.mark.parametrize("weights", ["bf16", "fp8", "fp8 scaled"])
    def test_any_number_of_rows(self, weights: str, m: int) -> None:
        act, weight, gamma = inputs(m)
        weight = weight if weights == "bf16" else weight.to(F8)
        scale = torch.rand(50) + 0.5 if weights == "fp8 scaled" else None
        normed, unnormed = onepass.gemv_and_partial_norm(act, weight, gamma, fused=False, weight_scale=scale)
        y, _ = linear_reference.matmul(act, weight, scale)
        torch.testing.assert_close(unnormed.double(), y[:, 30:], rtol=2.0**-8, atol=1e-4)
        norm = rms_norm_reference.rms_norm(y[:, :30], gamma, 1e-6).y
        torch.testing.assert_close(normed.double(), norm, rtol=2.0**-6, atol=1e-4)
        if m <= 16:
            fused = onepass.gemv_and_partial_norm(act, weight, gamma, weight_scale=scale)
            torch.testing.assert_close((normed, unnormed), fused, rtol=2.0**-6, atol=1e-4)

    @pytest.mark.parametrize("weight_dtype", [BF16, F8])
    def test_unnormed_is_a_view_of_all_of_y(self, weight_dtype: torch.dtype) -> None:
        act, weight, gamma = inputs(20)
        normed, unnormed = onepass.gemv_and_partial_norm(act, weight.to(weight_dtype), gamma, fused=False)
        assert unnormed.untyped_storage().nbytes() == 20 * 50 * 2
        assert (unnormed.stride(), unnormed.storage_offset()) == ((50, 1), 30)
        y = unnormed.as_strided((20, 50), (50, 1), 0)
        assert same_bytes(normed, onepass.rms_norm(y[:, :30], gamma))

    @pytest.mark.parametrize("weight_dtype", [BF16, F8])
    def test_scratch_holds_all_of_y(self, weight_dtype: torch.dtype) -> None:
        act, weight, gamma = inputs(20)
        weight = weight.to(weight_dtype)
        expected = onepass.gemv_and_partial_norm(act, weight, gamma, fused=False)
        normed, y = poison(torch.empty(20, 40, dtype=BF16))[:, 4:34], poison(torch.empty(20, 50, dtype=BF16))
        onepass.gemv_and_partial_norm_unfused_with_scratch(normed, act, weight, gamma, 1e-6, y)
        assert same_bytes(normed, expected[0]) and same_bytes(y[:, 30:], expected[1])
        assert same_bytes(y[:, :30], expected[1].as_strided((20, 30), (50, 1), 0))

    def test_weight_scale(self) -> None:
        act, weight, gamma = inputs(20)
        normed, y, scale = torch.empty(20, 30, dtype=BF16), torch.empty(20, 50, dtype=BF16), torch.rand(50) + 0.5
        onepass.gemv_and_partial_norm_unfused_with_scratch(
            normed, act, weight.to(F8), gamma, 1e-6, y, weight_scale=scale
        )
        expected = onepass.gemv_and_partial_norm(act, weight.to(F8), gamma, fused=False, weight_scale=scale)
        assert same_bytes(normed, expected[0]) and same_bytes(y[:, 30:], expected[1])

    @pytest.mark.parametrize(
        ("argument", "change"),
        [
            ("normed_output", torch.empty(20, 31, dtype=BF16)),
            ("normed_output", torch.empty(20, 30)),
            ("normed_output", None),
            ("y_scratch", torch.empty(20, 49, dtype=BF16)),
            ("y_scratch", torch.empty(20, 50)),
            ("y_scratch", torch.empty(50, 20, dtype=BF16).t()),
            ("y_scratch", None),
            ("act", torch.empty(20, 63, dtype=BF16)),
            ("act", torch.empty(20, 64, dtype=torch.int8)),
            ("act", 3),
            ("weight", torch.empty(50, 64)),
            ("weight", torch.empty(50, dtype=BF16)),
            ("weight", None),
            ("gamma", torch.empty(51, dtype=BF16)),
            ("gamma", torch.empty(0, dtype=BF16)),
            ("gamma", torch.empty(5, 6, dtype=BF16)),
            ("weight_scale", torch.empty(49)),
            ("eps", -1.0),
            ("eps", None),
        ],
    )
    def test_bad_arguments_are_rejected(self, argument: str, change: Any) -> None:
        act, weight, gamma = inputs(20)
        normed, y = torch.full((20, 30), 7.0).bfloat16(), torch.full((20, 50), 7.0).bfloat16()
        good: dict[str, Any] = {
            "normed_output": normed,
            "act": act,
            "weight": weight,
            "gamma": gamma,
            "eps": 1e-6,
            "y_scratch": y,
        }
        onepass.gemv_and_partial_norm_unfused_with_scratch(**good)
        normed.fill_(7.0), y.fill_(7.0)
        blamed = "weight" if argument == "act" and isinstance(change, Tensor) and change.dtype == BF16 else argument
        with pytest.raises(
            ContractError, match=f"^gemv_and_partial_norm_unfused_with_scratch: `{blamed}` must .*, got"
        ):
            onepass.gemv_and_partial_norm_unfused_with_scratch(**{**good, argument: change})
        assert normed.eq(7).all() and y.eq(7).all()
        if not argument.endswith(("output", "scratch")):
            named = {name: value for name, value in good.items() if name not in ("normed_output", "y_scratch")}
            with pytest.raises(ContractError, match=f"^gemv_and_partial_norm: `{blamed}` must .*, got"):
                onepass.gemv_and_partial_norm(**{**named, argument: change}, fused=False)

    @pytest.mark.parametrize(
        ("option", "value"), [("segments", [torch.ones(3)]), ("normed_dtype", F8), ("out", [torch.empty(3)] * 2)]
    )
    def test_options_of_the_fused_form_are_rejected(self, option: str, value: Any) -> None:
        with pytest.raises(ContractError, match=f"gemv_and_partial_norm: `{option}` must be left out with fused=False"):
            onepass.gemv_and_partial_norm(*inputs(), fused=False, **{option: value})


# --- traces --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)  # each lowers a kernel
@pytest.mark.parametrize(
    ("n", "widths"), [(96, (64,)), (2112, (1536, 512)), (5, (1, 1, 1, 1)), (24, (24,)), (25, (1,))]
)
@pytest.mark.parametrize("m", [1, 16])
def test_trace_blocks_counts_the_blocks_that_run(m: int, n: int, widths: tuple[int, ...]) -> None:
    act, weight, gamma = inputs(m, n, 40, widths[0])
    more = [torch.ones(w).bfloat16() for w in widths[1:]]
    blocks = onepass.gemv_trace_blocks(act, weight, gamma, more)
    trace = GmemTrace.allocate(blocks + 3, "cpu")
    assert trace.units is not None
    trace.units.fill_(-1)
    outs = [torch.empty(m, w, dtype=BF16) for w in (*widths, n - sum(widths))]
    scratch = (torch.zeros(len(widths), dtype=I32), trace)
    segments: dict[str, Any] = {"segments": more, "segment_outputs": outs[1:-1]}
    onepass.gemv_and_partial_norm_with_scratch(outs[0], outs[-1], act, weight, gamma, 1e-6, *scratch, **segments)
    events = trace.events()
    assert events[:blocks, 0].all() and not events[blocks:].any()
    assert trace.units[:blocks].ge(0).all() and trace.units[blocks:].eq(-1).all()
    assert all_same(outs, onepass.gemv_and_partial_norm(act, weight, gamma, segments=more))


def test_trace_blocks_rejects_bad_arguments() -> None:
    act, weight, gamma = inputs()
    missing: Any = None
    for arguments in ((act, weight, torch.ones(51)), (act, weight[:, 1:], gamma), (act, weight, missing)):
        with pytest.raises(ContractError, match=r"^gemv_and_partial_norm: `(gamma|weight)` must"):
            onepass.gemv_trace_blocks(*arguments)
