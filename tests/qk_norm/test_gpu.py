"""The QK-RMSNorm kernel without a GPU: order of summation, machine code, tiles, arguments."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import onepass
from onepass.core.layout import Geometry
from onepass.errors import Unsupported
from onepass.gpu.chip import Chip
from onepass.gpu.compile import Build, compile_build
from onepass.gpu.lib import reduce as _tree
from onepass.ops.qk_norm import gpu as backend
from onepass.ops.qk_norm.gpu_tile import QK_FOLD, qk_config
from onepass.ops.qk_norm.launch import QkCall, QkRows, RopeRule, qk_spec
from tests.gpu.launches import Recorder, record
from tests.gpu.test_other_chips import OTHER_CHIPS
from tests.helpers.interpreting import interpret
from tests.qk_norm.cases import CASES
from tools.evidence import proof, records
from tools.evidence.records import lowered

ROOT = Path(__file__).parents[2]
BF16, F32 = torch.bfloat16, torch.float32


def stats_build(nq: int, nk: int, dtype: torch.dtype = BF16, vec: int | None = None) -> Build:
    vec = vec or 16 // dtype.itemsize
    config = qk_config(nq, nk, (vec, vec), records.H200, False, 0, 16 // dtype.itemsize)
    return backend.build_for(qk_spec("means", dtype), config, 1, records.H200)


def tree(x: Tensor) -> Tensor:
    """The float32 sum of squares of [N], in the order of `_tree.sum_columns`."""
    squares = x.float() ** 2
    blocks = torch.nn.functional.pad(squares, (0, -len(x) % QK_FOLD)).view(-1, QK_FOLD)
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    for _ in range(3):
        total = total[0::2] + total[1::2]
    while len(total) > 1:
        first, second = total.chunk(2)
        total = first + second
    return total[0]


def test_interpreted_kernel_sums_in_the_documented_order(tmp_path: Path) -> None:
    """Each row is summed by the tree over its columns, whatever the other row of the call."""
    given = {n: torch.randn(3, n) for n in (1, 7, 100, 1000, 4099, 8192, 12345, 20000)}
    torch.save(given, tmp_path / "given")
    code = (
        "import sys, torch, onepass\n"
        "from tests.oracle.runner import running_on\n"
        "given = torch.load(sys.argv[1] + '/given')\n"
        "with running_on('interpreter'):\n"
        "    sums = {n: onepass.row_sum_of_squares_qk(x, torch.ones(3, 33)) for n, x in given.items()}\n"
        "torch.save(sums, sys.argv[1] + '/sums')\n"
    )
    interpret("-c", code, str(tmp_path))
    for n, sums in torch.load(tmp_path / "sums").items():
        assert sums[:, 0].tolist() == [float(tree(row)) for row in given[n]]
        assert sums[:, 1].eq(33).all()


def test_fold_constants_agree() -> None:
    assert _tree.FOLD.value == QK_FOLD


@pytest.mark.sampled(5)  # each lowers a kernel
@pytest.mark.parametrize("vec", [1, 8])
@pytest.mark.parametrize(("nq", "nk"), [(6144, 1024), (4096, 4096), (1536, 256), (128, 64), (16384, 1024)])
def test_sums_need_no_layout_conversions(nq: int, nk: int, vec: int) -> None:
    """Every step of the tree uses the tile's layout; only the result may be converted."""
    build = stats_build(nq, nk, vec=vec)
    text = lowered(build, records.H200, "ttgir")
    moved = re.findall(r"ttg.convert_layout %\w+ : tensor<([\dx]+)xf32", text)
    constants = dict(build.constants)
    folds = 0
    for side in "QK":
        chunk, count = constants[f"{side}.chunk"], constants[f"{side}.count"]
        folds += 3 * count + chunk.bit_length() - 4
    assert text.count('"tt.reduce"') == folds
    assert all("x" not in shape for shape in moved), moved


@pytest.mark.parametrize(("nq", "nk"), [(6144, 1024), (64, 32)])
def test_products_are_rounded_before_they_are_added(nq: int, nk: int) -> None:
    """A contraction would depend on which columns a thread holds."""
    build = stats_build(nq, nk, F32)
    assert "fma" not in lowered(build, records.H200, "ptx")
    assert "fma" in lowered(replace(build, contracts=True), records.H200, "ptx")


HOT: dict[str, tuple[Any, int]] = {
    "stats": (lambda q, k, g, h: onepass.row_mean_of_squares_qk(q, k), 40),
    "apply": (lambda q, k, g, h: onepass.apply_qk_rms_norm(q, k, g, h, torch.ones(len(q), 2), q, k, 1e-6), 64),
    "fused": (lambda q, k, g, h: onepass.qk_rms_norm(q, k, g, h), 96),
}


@pytest.mark.sampled(4)  # each compiles a kernel
@pytest.mark.parametrize("name", HOT)
@pytest.mark.parametrize(("nq", "nk"), [(6144, 1024), (1536, 256)])
def test_hot_kernels_use_wide_accesses_and_few_registers(name: str, nq: int, nk: int) -> None:
    """16-byte loads and stores of rows, few registers, nothing spilled."""
    call, registers = HOT[name]
    q, k = torch.randn(16, nq + nk).bfloat16().split([nq, nk], -1)
    (build,) = records.builds_of(lambda: call(q, k, torch.ones(nq), torch.ones(nk)), records.H200)
    compiled = compile_build(build, records.H200)
    usage = records.resources(compiled)
    assert usage["REG"] <= registers and usage["STACK"] == 0
    ptx = compiled.asm["ptx"]
    loads, stores = set(re.findall(r"ld\.global[.\w]*", ptx)), set(re.findall(r"st\.global[.\w]*", ptx))
    # gamma of a shared tile may use narrower loads, and statistics are single numbers
    assert loads - {"ld.global.v2.b32", "ld.global.b32"} == {"ld.global.v4.b32"}
    assert stores == ({"st.global.b32"} if name == "stats" else {"st.global.v4.b32"})
    assert ("ld.global.b32" in loads) == (name == "apply")


def test_every_case_has_one_configuration() -> None:
    for case in CASES:
        assert len(proof.builds(case, records.H200)) == (case.group != "empty"), case.name


@pytest.mark.sampled(4)  # one chip stays
@pytest.mark.parametrize("chip", OTHER_CHIPS, ids=lambda c: str(c.arch))
def test_compiles_for_other_chips(chip: Chip) -> None:
    cases = [c for c in CASES if c.group == "model" and c.nq == 6144]
    cases += [c for c in CASES if c.group == "heads" and c.layout == "packed" and c.turn]
    builds = proof.distinct_builds(cases, chip)
    assert len(builds) == 5
    for build in builds.values():
        assert compile_build(build, chip).asm


@pytest.mark.parametrize("head", [0, 64, 96, 128])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("vec", [1, 4, 8])
@pytest.mark.parametrize("warp_size", [32, 64])
def test_configurations_are_valid(warp_size: int, vec: int, given: bool, head: int) -> None:
    chip = Chip("cuda", 90, 32) if warp_size == 32 else Chip("hip", "gfx942", 64)
    widths = [head * i for i in (1, 2, 3, 48, 100, 300)] if head else [1, 31, 33, 512, 1536, 6144, 7168, 16384, 16385]
    for nq in widths:
        for nk in widths:
            config = qk_config(nq, nk, (vec, 1), chip, given, head)
            assert config.warps * warp_size <= 1024 and config.warps & (config.warps - 1) == 0 < config.warps
            for n, side in ((nq, config.q), (nk, config.k)):
                assert side.block & (side.block - 1) == 0 and 0 < side.step <= side.block
                assert given or side.long or side.block >= n
                assert given or side.long or (side.count - 1) * side.chunk < n <= side.count * side.chunk
                assert side.chunk & (side.chunk - 1) == 0 and side.count <= max(4, side.block // side.chunk)
                assert not head or side.step % head == 0
                assert side.rows >= 1 and side.rows & (side.rows - 1) == 0
                assert not given or side.rows * side.block >= 1024


def test_model_widths_are_split_evenly() -> None:
    for nq, nk in ((6144, 1024), (4096, 4096), (1536, 256), (7168, 512)):
        config = qk_config(nq, nk, (8, 8), records.H200, True, 0)
        assert nq % config.q.step == 0 and nk % config.k.step == 0


# --- the launch path -------------------------------------------------------------------------------------------------


class OnDevice:
    """The part of a CUDA tensor that a launch uses."""

    def __init__(self, address: int, *shape: int) -> None:
        self.address, self.shape = address, shape

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.address

    def stride(self, dim: int) -> int:
        assert dim == 0
        return 77


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, backend.KERNELS)


@pytest.mark.usefixtures("recorded")
def test_kernel_receives_every_argument() -> None:
    spec = qk_spec("fused", BF16, F32, BF16, "hf", True, RopeRule("half", 128, 64, torch.int32))
    tensors = {
        name: OnDevice(0x1000 * (i + 1)) for i, name in enumerate(("q", "k", "gamma_q", "gamma_k", "q_out", "k_out"))
    }
    freqs, positions = OnDevice(0x9000, 40, 64), OnDevice(0xA000)
    strides = [(80 * i, 80 * i + 8, 80 * i + 16) for i in range(1, 7)]
    rows = QkRows(Geometry(30, 3, 2), strides, (48, 8), (128, 128), (128, 136, 144, 152), 5)
    call: Any = QkCall
    backend.launch(call(spec, *tensors.values(), None, freqs, positions, 1e-5, 0.5, rows))
    ((grid, got),) = Recorder.calls
    found = {name: got[name if name.startswith("gamma") else f"{name}.at"] for name in tensors}
    assert found == {name: t.address for name, t in tensors.items()}
    assert (got["freqs.at"], got["positions.at"], got["stats.at"], got["freqs.row"]) == (0x9000, 0xA000, None, 77)
    for name, triple in zip(("q", "k", "q_out", "k_out", "positions"), [*strides[:4], strides[5]], strict=True):
        assert tuple(got[f"{name}.s{level}"] for level in range(3)) == triple
    assert [got[f"{name}.head"] for name in ("q", "k", "q_out", "k_out")] == [128, 136, 144, 152]
    expected: dict[str, float] = {
        "tokens": 30,
        "q_heads": 48,
        "k_heads": 8,
        "nq": 128,
        "nk": 128,
        "n1": 3,
        "n2": 2,
        "limit": 40,
    }
    expected |= {"q_divisor": 128.0, "k_divisor": 128.0, "eps": 1e-5, "weight_offset": 0.5}
    assert {name: got[f"shape.{name}"] for name in expected} == expected
    programs = got["shape.q_programs"]
    assert programs == -(-30 * 48 // got["Q.rows"]) and grid == programs + -(-30 * 8 // got["K.rows"])


def stats(
    address: int = 16, tokens: int = 100, nq: int = 6144, step: int = 7168, stage: Any = "means"
) -> dict[str, Any]:
    rows = QkRows(Geometry(tokens, 1, 1), [(step, 0, 0)] * 6, (1, 1), (nq, 1024), (0, 0, 0, 0), tokens)
    call: Any = QkCall
    tensors = (OnDevice(address), OnDevice(32), *[None] * 4, OnDevice(20), None, None)
    backend.launch(call(qk_spec(stage, BF16), *tensors, 0.0, 0.0, rows))
    return Recorder.calls[-1][1]


@pytest.mark.usefixtures("recorded")
def test_sums_and_means_share_a_kernel() -> None:
    assert [stats(stage=stage)["shape.q_divisor"] for stage in ("means", "sums")] == [6144.0, 1.0]
    assert stats(nq=5120)["shape.nq"] == 5120
    assert len(Recorder.made) == 1
    stats(address=18)
    stats(step=7169)
    q, k = "1x8192=3*2048", "4x1024=2*512"
    expected = [f"{q}v8+{k}v8/8w", f"{q}v1+{k}v8/8w", f"{q}v1+{k}v1/8w"]
    assert [build.name.split()[-1] for build in Recorder.made] == expected
    stats(step=7169, tokens=1)
    assert len(Recorder.made) == 3


@pytest.mark.usefixtures("recorded")
def test_too_many_rows_are_rejected() -> None:
    with pytest.raises(Unsupported, match=r"at most 2\*\*31 - 2\*\*13 rows"):
        stats(tokens=2**31 - 1)
