"""The GEMV kernel without a GPU: its machine code, its configurations, its order of summation, its arguments."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import onepass
from onepass.specs.gemv_norm import MAX_ROWS, GemvCall, GemvSpec, gemv_spec, tiles
from onepass.triton import compiler, counters, gemv_norm, gemv_norm_config, gemv_norm_kernels
from onepass.triton.compiler import Build, compile_build
from onepass.triton.config import Chip
from onepass.triton.device import gemv_stream as _gemv_stream
from onepass.triton.gemv_norm_config import GemvConfig, gemv_config
from tests.ops.test_gemv_norm_refusals import Gpu, pretend_gpu
from tools.evidence import records
from tools.evidence.records import lowered

ROOT = Path(__file__).parents[2]
OTHER_CHIPS = [Chip("cuda", 80, 32), Chip("cuda", 100, 32), Chip("hip", "gfx942", 64)]
BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
PAIRS = [(BF16, BF16), (F16, F16), (F32, F32), (BF16, F8), (F16, F8), (F32, F8)]
NAMES = gemv_norm._NAMES


def plain_spec(gammas: int = 1, traced: bool = False) -> GemvSpec:
    return gemv_spec(BF16, BF16, "none", (BF16,) * gammas, None, traced)


def build(
    spec: GemvSpec, m: int, n: int, k: int, widths: tuple[int, ...], chip: Chip = records.H200, aligned: bool = True
) -> Build:
    config = gemv_config(spec.act, spec.weight, m, n, k, widths, aligned)
    return gemv_norm.build_for(spec, config, aligned, not any(w % 16 for w in widths), chip)


# --- traces --------------------------------------------------------------------------------------------------------


def without_traces(source: str) -> str:
    """The kernels' source with every statement that only traces taken out, and blocks under ``if TRACED`` with it."""
    kept: list[str] = []
    block: int | None = None
    for line in source.splitlines():
        indent = len(line) - len(line.lstrip())
        if block is not None and (not line.strip() or indent > block):
            continue
        block = indent if line.strip() == "if TRACED:" else None
        if block is None and not re.match(r"\s*(stamp|name_unit)\(.*\)$|from \._trace import", line):
            kept.append(line)
    return "\n".join(kept) + "\n"


@pytest.fixture
def untraceable(tmp_path: Path) -> Any:
    """The kernel of a source in which nothing is ever traced."""
    source = Path(gemv_norm_kernels.__file__).read_text()
    bare = without_traces(source)
    assert source.count("\n") - bare.count("\n") > 12
    assert not re.search(r"stamp\(|name_unit\(|if TRACED|_trace\b", bare)
    file = tmp_path / "_gemv_without_trace.py"
    file.write_text(bare)
    spec = importlib.util.spec_from_file_location("onepass.triton._gemv_without_trace", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._gemv_partial_norm_kernel


@pytest.mark.parametrize(
    ("m", "n", "k", "widths"), [(1, 2112, 7168, (1536,)), (2, 100, 640, (40, 30))], ids=["decode", "two segments"]
)
def test_an_untraced_kernel_is_one_that_cannot_trace(
    m: int, n: int, k: int, widths: tuple[int, ...], untraceable: Any
) -> None:
    """To the byte of its PTX, and it reads no clock; a traced one does."""
    shipped = build(plain_spec(len(widths)), m, n, k, widths)
    bare = replace(shipped, kernel=untraceable)
    texts = [lowered(b, records.H200, "ptx") for b in (shipped, bare)]
    assert texts[0] == texts[1]
    assert "globaltimer" not in texts[0] and "smid" not in texts[0]
    traced = lowered(build(plain_spec(len(widths), True), m, n, k, widths), records.H200, "ptx")
    # six of any block, four of the norm that follows in each segment's own branch
    assert traced.count("globaltimer") == 6 + 4 * len(widths) and "smid" in traced


# --- configurations ------------------------------------------------------------------------------------------------

WIDTHS: list[tuple[int, ...]] = [(), (1,), (512,), (513, 3), (1536, 512), (4096,), (4097,), (9000, 1, 1, 1)]


def configurations(act: torch.dtype, weight: torch.dtype, widths: tuple[int, ...]) -> list[tuple[Any, GemvConfig]]:
    """The sizes and configuration of many calls: (m, n, k, aligned) and what was chosen for them."""
    found = []
    lengths = (1, 33, 255, 256, 1001, 2048, 2560, 4096, 7168, 16384, 28672, 40000)
    for m, tail, k in itertools.product((*range(1, 17), 17, 40, 1000), (0, 5, 64, 2112, 5000), lengths):
        for aligned in (True, False) if k % 16 == 0 else (False,):
            n = sum(widths) + tail or 1
            found.append(((m, n, k, aligned), gemv_config(act, weight, m, n, k, widths, aligned)))
    return found


@pytest.mark.parametrize(("act", "weight"), PAIRS)
def test_what_decides_bits_follows_from_the_dtypes(act: torch.dtype, weight: torch.dtype) -> None:
    """Elements a load, tensor cores or not; the norm's block from its width as well. Warps and parts are constants."""
    decided = set()
    for widths in WIDTHS:
        chosen = [config for _, config in configurations(act, weight, widths)]
        decided |= {(config.vec, config.dot) for config in chosen}
        assert len({(config.chunks, config.longs) for config in chosen}) == 1
        assert len(set(chosen)) > 4, "the rest follows the sizes"
    assert len(decided) == 1
    vec, dot = decided.pop()
    assert dot == (act != F32) and vec * weight.itemsize <= 16


def test_constants_agree() -> None:
    assert _gemv_stream.PIECES.value * 4 == gemv_norm_config.STEP
    assert gemv_norm_kernels.CHUNK.value == gemv_norm_config.CHUNK
    for m, warps in ((1, 4), (2, 4), (3, 8), (8, 8), (9, 16), (16, 16)):
        made = build(plain_spec(), m, 40, 1024, (24,))
        assert made.warps == dict(made.constants)["WARPS"] == warps


@pytest.mark.parametrize(("act", "weight"), PAIRS)
def test_configurations_are_sound(act: torch.dtype, weight: torch.dtype) -> None:
    for widths in WIDTHS:
        for (m, n, k, aligned), config in configurations(act, weight, widths):
            step = gemv_norm_config.STEP * config.vec
            parts = _gemv_stream.PIECES.value // config.warps
            assert config.rows & (config.rows - 1) == 0
            if config.dot:  # whole fragments
                assert config.columns % (16 // parts) == 0 and config.rows % (8 // parts) == 0
                assert (8 if m > MAX_ROWS else m) <= config.rows <= 32, "all of a program is unrolled"
            else:
                assert (config.warps, config.columns) == (4, 4)
            assert 1 <= config.depth <= config.steps and 1 <= config.ahead <= config.steps
            assert 0 <= config.pace <= config.depth
            # without a loop the steps are all there is; without a mask they never reach beyond k
            assert config.long or config.steps * step == k
            assert config.mask or k % (config.steps * step) == 0
            assert aligned or (config.long and config.pace == 0)
            assert len(config.chunks) == len(config.longs) == len(widths)
            side = config.warps // 4
            for width, chunks, long in zip(widths, config.chunks, config.longs, strict=True):
                assert long == (chunks * gemv_norm_config.CHUNK < width) and chunks <= gemv_norm_config.MOST_CHUNKS
                held = config.group // side * 4 * chunks
                assert config.group == side or held <= gemv_norm_config.MOST_VALUES
            assert config.group & (config.group - 1) == 0
            assert config.group % side == 0 if widths else config.group == 1
            if m <= MAX_ROWS:
                other = gemv_config(act, weight, m, n, k, widths, not aligned)
                assert (other.columns, other.rows) == (config.columns, config.rows), "the blocks of a trace"
                programs = sum(tiles(n, widths, config.columns)) * -(-m // config.rows)
                assert gemv_norm_config.blocks(act, weight, m, n, k, widths) == programs


def test_tiles_do_not_span_segments() -> None:
    assert tiles(100, (60, 1), 8) == [8, 1, 5]
    assert tiles(61, (60, 1), 4) == [15, 1, 0]
    assert tiles(7, (), 4) == [2]


# --- the order of the norm's sum -----------------------------------------------------------------------------------


def chunk_sum(squares: Tensor) -> Tensor:
    """The order of `_sum_chunk`, written once more: [512] to one number."""
    total = squares.view(-1, 4, 32, 4)[0]
    total = (total[..., 0] + total[..., 1]) + (total[..., 2] + total[..., 3])
    while total.shape[1] > 1:
        first, second = total.chunk(2, 1)
        total = first + second
    return (total[0, 0] + total[1, 0]) + (total[2, 0] + total[3, 0])


def test_the_norm_adds_in_the_stated_order(tmp_path: Path) -> None:
    given = torch.randn(4, 512)
    torch.save(given, tmp_path / "given")
    code = (
        "import sys, torch, triton, triton.language as tl\n"
        "from onepass.triton.gemv_norm_kernels import _sum_chunk\n"
        "@triton.jit\n"
        "def kernel(x, y):\n"
        "    row = tl.arange(0, 4)\n"
        "    tl.store(y + row, _sum_chunk(tl.load(x + row[:, None] * 512 + tl.arange(0, 512)[None, :]), 4))\n"
        "sums = torch.empty(4)\n"
        "kernel[(1,)](torch.load(sys.argv[1] + '/given'), sums)\n"
        "torch.save(sums, sys.argv[1] + '/sums')\n"
    )
    (tmp_path / "adds.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", str(tmp_path / "adds.py"), str(tmp_path)]
    subprocess.run(command, env=environment, check=True)
    assert torch.load(tmp_path / "sums").tolist() == [float(chunk_sum(row)) for row in given]


@pytest.mark.parametrize("codes", [None, F8], ids=["norm", "codes"])
@pytest.mark.parametrize(("m", "aligned"), [(1, True), (1, False), (4, True), (16, True), (16, False)])
def test_no_layout_decides_the_order_of_a_sum(m: int, aligned: bool, codes: torch.dtype | None) -> None:
    """Floating-point reductions are of two numbers, but for one number among the zeros of a fragment."""
    made = build(
        gemv_spec(BF16, BF16, "none", (BF16,), codes, False), m, 96, 1024 if aligned else 1001, (64,), aligned=aligned
    )
    assert not made.contracts
    text = lowered(made, records.H200, "ttgir")
    reductions = re.findall(
        r'"tt.reduce"\(%\w+\) <\{axis = (\d) : i32\}> .*?arith\.(\w+) .*?: \(tensor<([\dx]+)xf32', text, re.DOTALL
    )
    assert len(reductions) >= 7
    parts = _gemv_stream.PIECES.value // made.warps
    for axis, kind, shape in reductions:
        size = [int(v) for v in shape.split("x")][int(axis)]
        assert kind == "addf" and (size == 2 or (size == parts and shape.startswith(f"{made.warps}x16x"))), (
            kind,
            shape,
        )


# --- other chips ---------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Chip], Build]] = {
    "aligned": lambda chip: build(plain_spec(2), 1, 96, 3072, (64, 16), chip),
    "8 rows, misaligned": lambda chip: build(plain_spec(), 8, 97, 1001, (65,), chip, aligned=False),
    "fp8 weights and codes": lambda chip: build(
        gemv_spec(BF16, F8, "row", (BF16,), F8, False), 1, 96, 2048, (64,), chip
    ),
    "float32": lambda chip: build(gemv_spec(F32, F32, "none", (F32,), None, False), 1, 96, 1024, (64,), chip),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chip", OTHER_CHIPS, ids=lambda c: str(c.arch))
def test_compiles_for_other_chips(chip: Chip, kind: str) -> None:
    text = compile_build(KINDS[kind](chip), chip).asm["amdgcn" if chip.backend == "hip" else "ptx"]
    if chip.backend == "hip":  # its matrix cores have no product of 8 columns: float32 products instead
        assert re.search(r"v_(pk_)?fmac?_f32", text)
    else:
        assert ("mma.sync.aligned.m16n8k16" in text) == (kind != "float32")
    assert ("griddepcontrol" in text) == chip.has_pdl


def test_a_traced_kernel_is_refused_on_amd() -> None:
    """The stamps are NVIDIA's: handed to AMD's assembler they would end the process."""
    with pytest.raises(onepass.Unsupported, match="traces need an NVIDIA GPU or a CPU"):
        build(plain_spec(traced=True), 1, 64, 1024, (32,), Chip("hip", "gfx942", 64))


# --- launching -----------------------------------------------------------------------------------------------------


class OnDevice(Tensor):
    """A tensor that says it is on the first GPU."""

    def get_device(self) -> int:
        return 0


class Recorder:
    """Stands in for a loaded kernel."""

    made: list[str]
    calls: list[tuple[int, dict[str, Any]]]
    broken = False

    def __init__(self, build: Build, device: int) -> None:
        Recorder.made.append(build.name)

    def __call__(self, grid: int, arguments: list[Any]) -> None:
        if Recorder.broken:
            raise RuntimeError("out of resources")
        Recorder.calls.append((grid, dict(zip(NAMES, arguments, strict=True))))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    Recorder.made, Recorder.calls = [], []
    monkeypatch.setattr(Recorder, "broken", False)
    monkeypatch.setattr(compiler, "Launcher", Recorder)
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(gemv_norm, "_launchers", {})
    monkeypatch.setattr(gemv_norm, "_chips", {0: records.H200})
    return pretend_gpu(monkeypatch)


def launch(
    m: int = 1, n: int = 100, k: int = 640, widths: tuple[int, ...] = (60, 30), counter: Tensor | None = None, shift: int = 0
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """One launch on tensors of these sizes; act is ``shift`` elements off."""
    act = torch.empty(m * k + 8, dtype=BF16)[shift : shift + m * k].view(m, k).as_subclass(OnDevice)
    weight = torch.empty(n, k, dtype=BF16)
    gammas = [torch.empty(w, dtype=BF16) for w in widths]
    normed = [torch.empty(m, w, dtype=BF16) for w in widths]
    y = torch.empty(m, 16 * n) if widths else None
    unnormed = torch.empty(m, n - sum(widths), dtype=BF16)
    spec = plain_spec(len(widths))
    gemv_norm.launch(
        GemvCall(spec, widths, act, weight, None, gammas, y, normed, None, unnormed, counter, None, None, 1e-6)
    )
    return Recorder.calls[-1]


def test_every_argument_in_its_place(gpu: Gpu) -> None:
    m, n, k, widths = 16, 100, 640, (60, 30)
    spec = gemv_spec(BF16, F8, "row", (BF16, F32), F8, True)
    act = torch.empty(m, k + 16, dtype=BF16)[:, :k].as_subclass(OnDevice)
    weight = torch.empty(n, k + 32, dtype=torch.uint8)[:, :k].view(F8)
    weight_scale, gammas = torch.empty(n), [torch.empty(60, dtype=BF16), torch.empty(30)]
    normed = [torch.empty(m, 61, dtype=torch.uint8)[:, :60].view(F8), torch.empty(m, 33, dtype=BF16)[:, :30]]
    y, scale, unnormed = torch.empty(m, 96), torch.empty(m, 2)[:, :1], torch.empty(m, 15, dtype=BF16)[:, :10]
    counter, trace, units = (torch.zeros(448, dtype=t) for t in (torch.int32, torch.int64, torch.int32))
    gemv_norm.launch(
        GemvCall(
            spec, widths, act, weight, weight_scale, gammas, y, normed, scale, unnormed, counter, trace, units, 0.25
        )
    )
    ((grid, got),) = Recorder.calls
    assert grid == 4 + 2 + 1
    tensors = {
        "act": act, "weight": weight, "weight_scale": weight_scale, "y": y, "unnormed": unnormed, "scale": scale,
        "counter": counter, "trace": trace, "units": units, "gamma0": gammas[0], "gamma1": gammas[1],
        "normed0": normed[0], "normed1": normed[1],
    }  # fmt: skip
    assert {name: got[name] for name in tensors} == {name: t.data_ptr() for name, t in tensors.items()}
    assert all(got[f"{name}{i}"] is None for name in ("gamma", "normed", "width", "stride") for i in (2, 3))
    numbers = {
        "m": 16, "k": 640, "tail": 10, "width0": 60, "width1": 30, "act_stride": 656, "weight_stride": 672,
        "y_stride": 96, "tail_stride": 15, "scale_stride": 2, "stride0": 61, "stride1": 33, "eps": 0.25,
    }  # fmt: skip
    assert {name: got[name] for name in numbers} == numbers
    constants = {
        "SEGMENTS": 2,
        "COLUMNS": 16,
        "ROWS": 16,
        "SCALED": "row",
        "FP8": True,
        "FP8_MAX": 448.0,
        "TRACED": True,
    }
    assert {name: got[name] for name in constants} == constants
    assert not counters._streams, "the caller's counter was there"


def test_what_is_absent_is_not_passed(gpu: Gpu) -> None:
    grid, got = launch(widths=())
    assert grid == 25
    absent = (
        "weight_scale",
        "y",
        "scale",
        "counter",
        "trace",
        "units",
        "gamma0",
        "normed0",
        "y_stride",
        "scale_stride",
    )
    assert all(got[name] is None for name in absent)
    assert (got["tail"], got["SEGMENTS"], got["TRACED"]) == (100, 0, False)
    assert not counters._streams


def test_grid_is_what_a_trace_is_made_for(gpu: Gpu) -> None:
    for m, n, widths in itertools.product((1, 2, 3, 8, 9, 16), (100, 3000), ((60,), (60, 30))):
        act, weight = torch.empty(m, 640, dtype=BF16, device="meta"), torch.empty(n, 640, dtype=BF16, device="meta")
        gamma, *more = (torch.empty(w, dtype=BF16, device="meta") for w in widths)
        for shift in (0, 1):
            grid, _ = launch(m, n, 640, widths, shift=shift)
            assert grid == onepass.gemv_trace_blocks(act, weight, gamma, more)


def test_streams_have_counters_of_their_own(gpu: Gpu) -> None:
    seen = []
    for gpu.stream in (1, 2, 1, 3, 2):
        seen.append(launch()[1]["counter"])
    assert seen[0] == seen[2] and seen[1] == seen[4] and len(set(seen)) == 3
    gpu.capturing = True
    captured = [launch()[1]["counter"] for _ in range(3)]
    assert len({*seen, *captured}) == 6
    mine = torch.zeros(2, dtype=torch.int32)
    assert launch(counter=mine)[1]["counter"] == mine.data_ptr()


def test_a_launch_that_fails_costs_its_counter(gpu: Gpu) -> None:
    gpu.stream = 1
    other = launch()[1]["counter"]
    gpu.stream = 2
    launch()
    before = counters._streams[0, 2]
    Recorder.broken = True
    for counter in (torch.zeros(2, dtype=torch.int32), None):
        with pytest.raises(RuntimeError, match="out of resources"):
            launch(counter=counter)
        assert ((0, 2) in counters._streams) == (counter is not None)
    Recorder.broken = False
    assert launch()[1]["counter"] != before.data_ptr()
    gpu.stream = 1
    assert launch()[1]["counter"] == other


def test_a_kernel_is_loaded_once(gpu: Gpu) -> None:
    for m, n, k in ((9, 100, 640), (16, 100, 640), (12, 300, 1280), (9, 100, 640)):
        launch(m, n, k)
    assert len(Recorder.made) == 1 and len(Recorder.calls) == 4
    launch(9, 100, 640, shift=1)
    launch(1)
    launch(1, widths=(64, 32))
    assert len(Recorder.made) == len(set(Recorder.made)) == 4


def test_alignment_is_seen(gpu: Gpu) -> None:
    """A build for aligned rows promises 16 bytes of every row of act and weight, and whole loads of k."""
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"shift": 1}, False),
        ({"k": 641}, False),
        ({"k": 648}, False),
        ({"shift": 8}, True),
    ]
    for sizes, aligned in cases:
        Recorder.made.clear()
        gemv_norm._launchers.clear()
        compiler._loaded.clear()
        launch(**sizes)
        assert ("/v8/" in Recorder.made[0]) == aligned and ("/v8u/" in Recorder.made[0]) != aligned
    divisible = dict(build(plain_spec(), 1, 96, 1024, (64,)).divisible)
    assert {divisible[name] for name in ("act", "weight")} == {16} and divisible["k"] == 8
    assert not {"act", "weight", "k"} & dict(build(plain_spec(), 1, 96, 1001, (64,), aligned=False).divisible).keys()


# --- the interpreter -----------------------------------------------------------------------------------------------

INTERPRETED = [
    ("rows: 1x", "rows: 5x", "k: 2x20x513", "segments: 1x80x300 15"),
    ("values: 9x48x256 24+8 bf16",),
]


@pytest.mark.slow
@pytest.mark.parametrize("matches", INTERPRETED, ids=["sizes", "values"])
def test_interpreted_kernel_passes_its_cases(matches: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "from onepass.testing.runner import run_cases, select\n"
        "cases = [case for match in sys.argv[1:] for case in select(['gemv_and_partial_norm'], match)]\n"
        "assert all(case.interpretable for case in cases)\n"
        "for result in run_cases(cases, 'interpreter'):\n"
        "    print(result.passed, result.case, result.message)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, *matches]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(matches) and all(line.startswith("True ") for line in lines), done.stdout
