"""Launches of `linear` without a GPU: kernels, grids, arguments, alignment, and the norm apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from onepass.gpu import counters
from onepass.ops.linear import gpu as linear
from onepass.ops.linear.launch import LinearCall, linear_spec
from onepass.ops.rms_norm import gpu as rms_norm
from tests.gemv_norm.test_gpu import BF16, F8, F16, F32, INT8
from tests.gemv_norm.test_gpu_launch import OnDevice
from tests.gpu.launches import Recorder, record
from tools.evidence import records


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, linear.DECODE, linear.KERNELS, rms_norm.KERNELS)


def made_call(m: int, n: int = 96, k: int = 640, *, add: bool = False, shift: int = 0, **dtypes: Any) -> LinearCall:
    """A call with contiguous tensors; x begins ``shift`` elements into its memory."""
    dtype = dtypes.pop("x", BF16)
    spec = linear_spec(dtype, dtypes.pop("weight", BF16), add=BF16 if add else None, **dtypes)
    x = torch.zeros(m * k + 16, dtype=dtype)[shift : shift + m * k].view(m, k).as_subclass(OnDevice)
    out = torch.empty(m, n // 2 if spec.activation else n, dtype=spec.out)
    optional = {"gamma": (k,), "residual": (m, k), "bias": (n,), "add": out.shape}
    given: dict[str, Any] = {
        name: torch.zeros(shape, dtype=getattr(spec, name))
        for name, shape in optional.items()
        if getattr(spec, name) is not None
    }
    if spec.residual is not None:
        given["residual_out"] = torch.empty_like(given["residual"])
    if spec.weight_scale != "none":
        given["weight_scale"] = torch.empty((-(-n // 128), -(-k // 128)) if spec.weight_scale == "block" else n)
    weight = torch.empty(n, k, dtype=spec.weight).as_subclass(OnDevice)
    return LinearCall(spec, x, weight, out, eps=1e-6, **given)


def apart(rows: int, columns: int, gap: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose rows are ``gap`` elements apart."""
    return torch.empty(rows, columns + gap, dtype=dtype)[:, :columns]


@pytest.mark.parametrize("m", [3, 40], ids=["few rows", "many rows"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_kernel_receives_every_argument(dtype: torch.dtype, m: int) -> None:
    """Few float32 rows are normed by the same kernel."""
    n, k, normed = 96, 640, m == 3 and dtype == F32
    first = F32 if normed else None
    spec = linear_spec(dtype, F8, "block", first, first, F16, "gelu_mul", F32, F32)
    tensors = {
        "x": apart(m, k, 16, dtype).as_subclass(OnDevice),
        "weight": apart(n, k, 32, torch.uint8).view(F8),
        "weight_scale": apart(1, 5, 2, F32),
        "bias": torch.empty(n, dtype=F16),
        "add": apart(m, n // 2, 7, F32),
        "out": apart(m, n // 2, 9, F32),
    }
    if normed:
        rows = {"residual": apart(m, k, 4, F32), "residual_out": apart(m, k, 8, F32)}
        tensors |= rows | {"gamma": torch.empty(k)}
    linear.launch(LinearCall(spec, eps=0.25, weight_offset=2.0, **tensors))
    ((grid, got),) = Recorder.calls
    assert {name: got[name] for name in tensors} == {name: t.data_ptr() for name, t in tensors.items()}
    numbers: dict[str, float] = {
        "m": m, "n": n // 2, "k": k, "strides.x": 656, "strides.weight": 672, "strides.weight_scale": 7,
        "strides.add": 55, "strides.out": 57,
    }  # fmt: skip
    if normed:
        numbers |= {"strides.residual": 644, "strides.residual_out": 648, "eps": 0.25, "weight_offset": 2.0}
    assert {name: got[name] for name in numbers} == numbers
    constants = {"MATH.weight": "fp8", "MATH.scaled": "block", "MATH.activation": "gelu_mul", "MATH.gated": True}
    constants |= {"TILE.pieces": 8, "TILE.grain": 128} if dtype == BF16 else {"TILE.pieces": 16, "TILE.block": 128}
    constants |= {"MATH.hf": False, "MATH.regroups": True}
    assert {name: got[name] for name in constants} == constants
    assert (got["MATH.normed"], got["MATH.residual"], got["MATH.offset"]) == (normed, normed, True)
    # a program has half as many columns of the result as it has weight rows
    assert grid == -(-n // got["TILE.columns"]) * -(-m // got["TILE.rows"])
    assert ("TILE.kind" in got) == (dtype == BF16) and ("STATS.bins" in got) == normed


def test_missing_tensors_are_passed_as_none() -> None:
    linear.launch(made_call(1, x=F32, weight=INT8))
    linear.launch(made_call(1, weight=INT8))
    (_, streamed), (grid, got) = Recorder.calls
    assert all(streamed[name] is None for name in ("gamma", "residual", "residual_out"))
    absent = ("weight_scale", "bias", "add")
    assert all(given[name] is None for name in absent for given in (streamed, got))
    assert all(got[f"strides.{name}"] == 0 for name in ("weight_scale", "residual", "add", "residual_out"))
    assert (got["MATH.normed"], got["MATH.residual"], got["MATH.gated"], got["MATH.scaled"]) == (
        False,
        False,
        False,
        "none",
    )
    assert grid == 96 // got["TILE.columns"]


def test_copy_engine_receives_both_matrices() -> None:
    x, weight = apart(300, 640, 16, BF16).as_subclass(OnDevice), apart(96, 640, 32, BF16)
    call = LinearCall(linear_spec(BF16, BF16, activation="silu_mul"), x, weight, apart(300, 48, 8, BF16))
    linear.launch(call)
    ((grid, got),) = Recorder.calls
    assert got["TILE.kind"] == "descriptors" and got["MATH.gated"]
    columns, rows, step = (got[f"TILE.{name}"] for name in ("columns", "rows", "step"))
    for tiles, tensor, block in (("x_tiles", x, [rows, step]), ("weight_tiles", weight, [columns // 2, step])):
        assert got[tiles].base.data_ptr() == tensor.data_ptr()
        assert list(got[tiles].shape) == list(tensor.shape) and list(got[tiles].strides) == list(tensor.stride())
        assert got[tiles].block_shape == block
    assert (got["m"], got["n"], got["k"], got["strides.out"]) == (300, 48, 640, 56)
    assert grid == -(-96 // columns) * -(-300 // rows)


def test_programs_of_pieces_have_memory_for_sums_and_a_counter_per_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def take(device: int, number: int) -> tuple[Tensor, None]:
        taken.append(number)
        return torch.zeros(number, dtype=torch.int32), None

    sizes: list[int] = []

    def empty(size: int, **options: Any) -> Tensor:
        sizes.append(size)
        return torch.Tensor.new_empty(torch.zeros(0), size)

    monkeypatch.setattr(counters, "take", take)
    call = made_call(100, n=2080, k=640)
    monkeypatch.setattr(torch, "empty", empty)
    linear.launch(call)
    ((grid, got),) = Recorder.calls
    assert got["TILE.kind"] == "split" and got["TILE.pieces"] == 4
    columns, rows = got["TILE.columns"], got["TILE.rows"]
    tiles = -(-2080 // columns) * -(-100 // rows)
    assert (grid, taken, sizes) == (4 * tiles, [tiles], [4 * tiles * columns * rows])
    assert got["sums"] and got["counter"] and got["sums"] != got["counter"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_counters_of_a_failed_launch_are_not_used_again(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    discarded: list[Any] = []

    def fail(self: Any, grid: int, arguments: Any) -> None:
        raise error

    monkeypatch.setattr(counters, "take", lambda device, number: (torch.zeros(number, dtype=torch.int32), "key"))
    monkeypatch.setattr(counters, "discard", discarded.append)
    monkeypatch.setattr(Recorder, "__call__", fail)
    with pytest.raises(error):
        linear.launch(made_call(100, n=2080, k=640))
    assert discarded == ["key"]


@pytest.mark.parametrize(
    ("dtype", "weight"), [(BF16, BF16), (BF16, F8), (BF16, INT8), (F32, F32), (F32, INT8)], ids=str
)
@pytest.mark.parametrize("m", [1, 4, 5, 17, 300])
def test_norm_is_a_launch_of_its_own_except_for_few_float32_rows(
    m: int, dtype: torch.dtype, weight: torch.dtype
) -> None:
    call = made_call(m, x=dtype, weight=weight, gamma=BF16, residual=F32, activation="silu_mul")
    fused = m <= 4 and dtype == F32
    linear.launch(call)
    *first, (_, product) = Recorder.calls
    decodes = m == 300 and dtype == BF16 and weight != BF16
    if decodes:
        *first, (grid, decoding) = first
        assert decoding["weight"] == call.weight.data_ptr() and grid == 96 // linear.DECODE_TILE.rows * 2
        assert (decoding["n"], decoding["k"], decoding["stride"]) == (96, 640, 640)
        assert product["weight_tiles"].base.data_ptr() == decoding["out"] and product["TILE.kind"] == "decoded"
        assert product["weight_tiles"].base.dtype == BF16 and product["TILE.pieces"] == 8
    assert len(first) == (0 if fused else 1)
    assert product["MATH.normed"] == product["MATH.residual"] == fused
    if first:
        ((_, norm),) = first
        assert "STATS.bins" not in product and Recorder.made[0].name.startswith("rms_norm_row ")
        pointers = {value for value in norm.values() if isinstance(value, int)}
        given = (call.x, call.gamma, call.residual, call.residual_out)
        assert {t.data_ptr() for t in given if t is not None} <= pointers
        # the product reads what the norm wrote
        read = product["x"] if "x" in product else product["x_tiles"].base.data_ptr()
        assert read in pointers and read != call.x.data_ptr() and product["strides.x"] == 640
    else:
        assert product["x"] == call.x.data_ptr() and product["STATS.rows"] >= m
    assert linear.builds(records.H200, call) == Recorder.made, "builds are what launch runs"


@pytest.mark.parametrize("m", [1, 4, 5])
def test_in_place_residual_has_a_launch_of_its_own(m: int) -> None:
    """Programs read the residual while one of them writes the sum."""
    call = made_call(m, x=F32, weight=F8, gamma=BF16, residual=BF16)
    linear.launch(call._replace(residual_out=call.residual))
    assert len(Recorder.calls) == 2 and not Recorder.calls[1][1]["MATH.normed"]
    Recorder.calls.clear()
    linear.launch(call)
    assert len(Recorder.calls) == (1 if m <= 4 else 2)


@pytest.mark.parametrize(("m", "in_place"), [(2, False), (2, True), (5, False), (5, True)])
def test_residual_without_a_norm(m: int, in_place: bool) -> None:
    call = made_call(m, x=F32, weight=F8, residual=F32)
    assert call.residual is not None and call.residual_out is not None
    call.x.fill_(1.5)
    call.residual.fill_(0.25)
    call.residual_out.zero_()
    linear.launch(call._replace(residual_out=call.residual) if in_place else call)
    ((_, got),) = Recorder.calls
    fused = m <= 4 and not in_place
    assert got["MATH.residual"] == fused and (got["x"] == call.x.data_ptr()) == fused
    written = call.residual if in_place else call.residual_out
    assert written.unique().tolist() == [0.0 if fused else 1.75], "the kernel, which did not run, writes the sum"


def test_kernel_is_loaded_once() -> None:
    for m, n, k in ((9, 96, 640), (16, 96, 640), (12, 304, 1008), (9, 96, 640)):
        linear.launch(made_call(m, n, k))
    assert len(Recorder.made) == 1 and len(Recorder.calls) == 4
    for m in (500, 300, 400):
        linear.launch(made_call(m, 8192, 640))
    assert len(Recorder.made) == 2
    linear.launch(made_call(9, shift=1))
    linear.launch(made_call(1, bias=BF16))
    linear.launch(made_call(1, bias=F32))
    assert len(Recorder.made) == len(set(Recorder.made)) == 5


def shifted(t: Tensor) -> Tensor:
    """A copy one element into its memory."""
    return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)


def with_tensor(call: LinearCall, name: str, tensor: Tensor) -> LinearCall:
    changed: dict[str, Any] = {name: tensor}
    return call._replace(**changed)


def test_alignment() -> None:
    """What is read in 16 bytes is aligned, or else another kernel is chosen."""
    whole = made_call(2, gamma=BF16, residual=F32, add=True)
    facts = linear._facts(whole, records.H200)
    assert facts.aligned and facts.even and not facts.offset
    for name in ("x", "weight", "gamma", "residual", "residual_out"):
        moved = linear._facts(with_tensor(whole, name, shifted(getattr(whole, name))), records.H200)
        assert not moved.aligned and moved.even, name
    for name in ("out", "add"):
        moved = linear._facts(with_tensor(whole, name, shifted(getattr(whole, name))), records.H200)
        assert moved.aligned and not moved.even, name
    for name, gap in (("x", 1), ("weight", 1), ("residual", 2), ("residual_out", 2)):
        given = getattr(whole, name)
        wide = with_tensor(whole, name, apart(given.shape[0], given.shape[1], gap, given.dtype))
        assert not linear._facts(wide, records.H200).aligned, name
        if name != "weight":  # the distance to a second row does not count if there is none
            single = {n: getattr(wide, n)[:1] for n in ("x", "residual", "residual_out", "add", "out")}
            assert linear._facts(wide._replace(**single), records.H200).aligned, name
    assert not linear._facts(whole._replace(out=apart(2, 96, 1, BF16)), records.H200).even
    assert linear._facts(whole._replace(weight_offset=1.0), records.H200).offset
    for n, even in ((96, True), (88, False)):
        assert linear._facts(made_call(2, n), records.H200).even == even
    for k, aligned in ((640, True), (648, False), (641, False)):
        assert linear._facts(made_call(2, 96, k), records.H200).aligned == aligned


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_builds_assume_the_alignment_of_a_call(dtype: torch.dtype) -> None:
    fused = dtype == F32
    call = made_call(2, x=dtype, weight=F8, weight_scale="row", residual=F32 if fused else None, add=True)
    (build,) = linear.builds(records.H200, call)
    divisible = dict(build.divisible)
    expected = {"x": 16, "weight": 16, "k": 16, "strides.x": 16 // dtype.itemsize, "strides.weight": 16}
    expected |= {"n": 16, "out": 16, "strides.out": 16 // dtype.itemsize, "add": 16, "strides.add": 8}
    if fused:
        expected |= {"residual": 16, "residual_out": 16, "strides.residual": 4, "strides.residual_out": 4}
    assert {name: divisible.get(name) for name in expected} == expected
    (build,) = linear.builds(records.H200, call._replace(x=shifted(call.x), out=shifted(call.out)))
    assert not dict(build.divisible).keys() & expected.keys()
