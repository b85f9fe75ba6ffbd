"""The kernel of MLA's cache write without a GPU: machine code, tiles, search for requests, arguments."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import onepass
from benchmarks.suite import mla_cache
from onepass.core.backend import launching_with
from onepass.errors import ContractError, Unsupported
from onepass.gpu.chip import Chip, tuning
from onepass.gpu.compile import Build, compile_build
from onepass.ops.mla_cache import gpu as backend
from onepass.ops.mla_cache.gpu_tile import MlaCut, mla_config, mla_cut, search_width
from onepass.ops.mla_cache.launch import MlaCall, MlaRows, MlaTensors, mla_spec
from tests.gpu.launches import Recorder, record
from tests.gpu.test_other_chips import OTHER_CHIPS
from tests.helpers.interpreting import broken_promise, interpret, passed_checks
from tests.mla_cache.cases import CASES
from tools.evidence import proof, records
from tools.evidence.records import lowered

ROOT = Path(__file__).parents[2]
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
TENSORS = MlaTensors._fields


def build_of(tokens: int, heads: int, dtype: torch.dtype = FP8, **options: Any) -> Build:
    """The build that a call of the benchmark runs on an H200."""
    p = mla_cache.problem(tokens, heads, dtype, mla_cache.angles("cpu"), "cpu")
    if options.pop("scaled", False):
        options["per_token_scale"] = torch.empty(p.cache.blocks.shape[:2])
    (build,) = records.builds_of(
        lambda: onepass.fused_rope_rmsnorm_quantization(
            p.out, p.q, p.kv, p.offsets, p.freqs, p.gamma, p.cache, **options
        ),
        records.H200,
    )
    return build


@pytest.mark.sampled(3)  # each compiles a kernel
@pytest.mark.parametrize("style", ["interleaved", "half"])
@pytest.mark.parametrize(
    ("tokens", "heads", "of_q", "of_kv"), [(1, 128, 2, 2), (64, 128, 4, 2), (2048, 128, 8, 4), (2048, 16, 8, 4)]
)
def test_hot_kernels_use_wide_accesses_and_few_registers(
    tokens: int, heads: int, of_q: int, of_kv: int, style: str
) -> None:
    """16-byte loads, stores as wide as possible, few registers, and no shared memory."""
    compiled = compile_build(build_of(tokens, heads, rope_style=style), records.H200)
    usage = records.resources(compiled)
    assert usage["REG"] <= 96 and usage["STACK"] == 0 and usage["LOCAL"] == 0
    ptx = compiled.asm["ptx"]
    assert not re.findall(r"(?:ld|st)\.shared", ptx)
    of_gamma = 2
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == of_q + of_kv + of_gamma
    stores = re.findall(r"st\.global[.\w]*", ptx)
    assert stores.count("st.global.v4.b32") == of_q
    assert set(stores) - {"st.global.v4.b32"} == {"st.global.v2.b32", f"st.global.b{8 if style == 'half' else 16}"}


def test_products_are_rounded_before_they_are_added() -> None:
    """Other contractions than the rotation's two would depend on the layout of columns."""
    build = build_of(64, 16)
    assert not build.contracts
    fused = lowered(build, records.H200, "ptx").count("fma.rn.f32")
    contracted = lowered(replace(build, contracts=True), records.H200, "ptx")
    assert 0 < fused < contracted.count("fma.rn.f32")


def test_every_case_has_one_configuration() -> None:
    for case in CASES:
        assert len(proof.builds(case, records.H200)) == (case.group != "empty"), case.name


@pytest.mark.full  # 20 CPU-seconds; part of the other families stays
@pytest.mark.parametrize("chip", OTHER_CHIPS, ids=lambda c: str(c.arch))
def test_compiles_for_other_chips(chip: Chip) -> None:
    """Each configuration for one chip of each vendor, in turn.

    A vendor's chips differ in how they cast to fp8, and each half has casts to every format.
    """
    cases = [c for c in CASES if c.group == "model"]
    cases += [c for c in CASES if c.group == "scales" and c.latent == 128]
    builds = list(proof.distinct_builds(cases, chip).values())
    assert len(builds) >= 8
    for build in builds[OTHER_CHIPS.index(chip) % 2 :: 2]:
        assert compile_build(build, chip).asm


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
@pytest.mark.slow
def test_interpreted_kernel_passes_its_cases() -> None:
    groups = {"model", "slots", "reference", "layouts"}
    cases = [case.group for case in CASES if case.group in groups]
    match = "|".join(f"{group}: " for group in groups)
    assert passed_checks("fused_rope_rmsnorm_quantization", match=match) == len(cases)
    assert {*cases} == groups


SEARCH = """
import sys, torch
from tests.oracle.runner import running_on
from dataclasses import replace
from onepass.ops.mla_cache import gpu_tile as mla_cache_config
from onepass.gpu.chip import INTERPRETER
from onepass.gpu.chip import tuning
import onepass
table = tuning(INTERPRETER)
narrow = replace(table, mla=replace(table.mla, search_widths=(1, 4)))
mla_cache_config.tuning = lambda chip: narrow
given = torch.load(sys.argv[1] + "/given")
with running_on("interpreter"):
    for case in given:
        pages, entries = case["blocks"].shape[:2]
        cache = onepass.PagedKVCache(case["blocks"], case["lengths"], torch.arange(pages).view(len(case["lengths"]), -1))
        onepass.fused_rope_rmsnorm_quantization(
            None, case["q"], case["kv"], case["offsets"], None, torch.ones(8), cache, rope_dim=0
        )
torch.save([case["blocks"] for case in given], sys.argv[1] + "/found")
"""


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
def test_multi_level_search_finds_the_request_of_each_token(tmp_path: Path) -> None:
    """Searches four requests at a time, among many requests, among empty ones, and with no tokens in any."""
    given = []
    for counts in ([1] * 21, [0, 0, 3, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0], [0] * 5, [2, 0, 0, 0, 0]):
        offsets = torch.tensor([1, *counts]).cumsum(0)  # the first and the last token belong to no request
        tokens = int(offsets[-1]) + 1
        kv = torch.arange(1, tokens + 1).float()[:, None].expand(tokens, 9).contiguous()
        given.append({
            "q": torch.zeros(tokens, 1, 1), "kv": kv, "offsets": offsets, "lengths": torch.arange(len(counts)) % 3,
            "blocks": torch.zeros(len(counts), 8, 9),
        })  # fmt: skip
    torch.save(given, tmp_path / "given")
    interpret("-c", SEARCH, str(tmp_path))
    for case, blocks in zip(given, torch.load(tmp_path / "found"), strict=True):
        expected = torch.zeros_like(blocks[..., 8])
        for request, (begin, end) in enumerate(zip(case["offsets"][:-1], case["offsets"][1:], strict=True)):
            for token in range(int(begin), int(end)):
                expected[request, int(case["lengths"][request]) + token - int(begin)] = token + 1
        assert torch.equal(blocks[..., 8], expected)


@pytest.mark.parametrize("requests", [1, 2, 32, 33, 128, 129, 16384, 16385, 2**20])
def test_search_reaches_every_request(requests: int) -> None:
    width, levels = search_width(requests, records.H200)
    assert width**levels >= requests and (levels == 1 or width ** (levels - 1) < requests)
    assert (width == 1) == (requests == 1)


@pytest.mark.parametrize(
    "cut", sorted({mla_cut(t, 16, 64, records.H200) for t in (1, 512, 2048, 8192)}, key=str), ids=str
)
@pytest.mark.parametrize("warp_size", [32, 64])
def test_configurations_are_valid(warp_size: int, cut: MlaCut) -> None:
    chip = Chip("cuda", 90, 32) if warp_size == 32 else Chip("hip", "gfx942", 64)
    most_tokens = tuning(chip).mla.most_tokens
    for heads in (1, 3, 8, 16, 24, 40, 65, 128, 256):
        for rope in (0, 1, 2, 64, 96, 256):
            for latent in (1, 33, 512, 1536, 2048):
                for tokens in (1, 2, 1024):
                    config = mla_config(cut, tokens, heads, latent, rope, 2, chip)
                    assert config.warps & (config.warps - 1) == 0 < config.warps * warp_size <= 1024
                    assert config.heads * config.pieces >= heads > config.heads * (config.pieces - 1)
                    assert config.guard == (heads % config.heads != 0)
                    assert config.heads & (config.heads - 1) == 0 < config.heads
                    assert 1 <= config.q_tokens <= min(tokens, most_tokens)
                    assert 1 <= config.kv_tokens <= min(tokens, most_tokens)
                    assert config.block >= max(8, latent)


def test_larger_calls_have_larger_programs() -> None:
    assert list(inspect.signature(mla_cut).parameters) == ["tokens", "heads", "rope", "chip"]
    for heads in (1, 16, 128, 256):
        cuts = [mla_cut(1 << i, heads, 64, records.H200) for i in range(32)]
        for name in ("q_columns", "kv_columns"):
            sizes = [getattr(cut, name) for cut in cuts]
            assert sizes == sorted(sizes) and sizes[0] == 512 < sizes[-1] == 2048


# --- the launch path -------------------------------------------------------------------------------------------------


class OnDevice:
    """The part of a CUDA tensor that a launch uses."""

    def __init__(self, address: int) -> None:
        self.address = address

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, backend.KERNELS)


def launched(address: int = 0, tokens: int = 100, requests: int = 5, **changes: int) -> tuple[int, dict[str, Any]]:
    """Grid and arguments of one call whose tensors are ``address`` bytes past 16-byte alignment."""
    spec = mla_spec(BF16, BF16, BF16, F32, FP8, F32, torch.uint32, torch.int32, torch.int64, scale="token")
    strides = {name: 16 * (i + 2) for i, name in enumerate(MlaRows._fields[11:])}
    rows = MlaRows(tokens, 128, 512, 64, 64, requests, 9, 50, 64, 4096, 512, **strides)._replace(**changes)
    tensors: list[Any] = [OnDevice(0x1000 * (i + 1) + address) for i in range(13)]
    for absent in ("slots", "positions", "kv_scale"):
        tensors[TENSORS.index(absent)] = None
    backend.launch(MlaCall(spec, MlaTensors(*tensors), 1e-5, 0.5, rows))
    return Recorder.calls[-1]


@pytest.mark.usefixtures("recorded")
def test_kernel_receives_every_argument() -> None:
    grid, got = launched()
    for i, name in enumerate(TENSORS):
        absent = name in ("slots", "positions", "kv_scale")
        assert got[f"tensors.{name}"] == (None if absent else 0x1000 * (i + 1))
    unread = {"latent", "normed", "rope", "turned", "page_size"}
    sizes = (100, 128, 512, 64, 64, 5, 9, 50, 64, 4096, 512, *range(32, 208, 16))
    for name, size in zip(MlaRows._fields, sizes, strict=True):
        assert got[f"rows.{name}"] == (0 if name in unread else size)
    numbers = {name: got[f"numbers.{name}"] for name in ("page_shift", "eps", "weight_offset", "kv_programs")}
    programs = -(-100 // got["TILE.kv_tokens"])
    assert numbers == {"page_shift": 6, "eps": 1e-5, "weight_offset": 0.5, "kv_programs": programs}
    assert grid == programs + -(-100 // got["TILE.q_tokens"]) * got["TILE.pieces"]
    (build,) = Recorder.made
    constants = dict(build.constants)
    assert constants.keys() & {f"rows.{name}" for name in MlaRows._fields} == {f"rows.{name}" for name in unread}
    assert all(got[name] == value for name, value in constants.items())


@pytest.mark.usefixtures("recorded")
def test_calls_of_similar_size_share_a_kernel() -> None:
    for tokens in (65, 100, 128):
        for requests in (3, 4):
            launched(tokens=tokens, requests=requests)
    assert len(backend.KERNELS.plans) == len(Recorder.made) == 1
    launched(requests=1)
    launched(requests=0)
    assert len(Recorder.made) == 2  # a single request needs no search
    launched(address=8)
    launched(q_head=33)
    launched(kv_token=33)
    name = Recorder.made[0].name
    assert [build.name for build in Recorder.made[2:]] == [
        name.replace("vfq", "vnn").replace("vk", "vn"), name.replace("vfq", "vfn"), name.replace("vk", "vn")
    ]  # fmt: skip


@pytest.mark.usefixtures("recorded")
def test_too_many_programs_are_rejected() -> None:
    with pytest.raises(Unsupported, match=r"at most 2\*\*31 - 2\*\*13 programs"):
        launched(tokens=2**30)


@pytest.mark.parametrize("cut", [MlaCut(32, 1024, 512), MlaCut(128, 4096, 2048)], ids=str)
def test_every_reduction_adds_two_numbers(cut: MlaCut) -> None:
    """Floats are added in the pairs that `_tree` defines for any tile, never in an order set by a layout."""
    p = mla_cache.problem(64, 16, FP8, mla_cache.angles("cpu"), "cpu")
    found: list[MlaCall] = []
    with launching_with(lambda family: found.append), torch.inference_mode():
        mla_cache.ours(p)
    spec = found[0].spec
    config = backend.config_of(spec, backend._facts(found[0], records.H200)._replace(cut=cut), records.H200)
    build = backend.build_for(spec, config, 64, 64, backend.Known(True, True, True, True, True), records.H200)
    text = lowered(build, records.H200, "ttir")
    summed = re.findall(r"\(tensor<([\dx]+)xf32>\) -> ", text)
    assert summed and all(re.fullmatch(r"(1x)?(2x\d+|\d+x2)", shape) for shape in summed), summed


@pytest.mark.usefixtures("recorded")
def test_norm_of_fewer_columns_uses_another_kernel() -> None:
    launched()
    _, got = launched(normed=500)
    whole, part = Recorder.made
    assert (dict(whole.constants)["MATH.part"], dict(part.constants)["MATH.part"], got["rows.normed"]) == (
        False,
        True,
        500,
    )
    assert whole.name != part.name and "rows.normed" not in dict(part.constants)


# --- other cuts ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("recorded")
def test_cut_as_sets_threads_and_blocks() -> None:
    usual, _ = launched()
    with backend.cut_as(backend.MlaCut(128, 512, 1024)):
        cut, got = launched()
        assert (got["TILE.kv_tokens"], got["TILE.q_tokens"] * got["TILE.heads"]) == (2, 8)
        assert cut == 50 + 100 * 16
    assert launched()[0] == usual != cut
    assert [build.warps for build in Recorder.made] == [1, 4]


@pytest.mark.parametrize("cut", [(33, 512, 512), (16, 512, 512), (32, 500, 512), (32, 512, 0), (2048, 512, 512)])
def test_invalid_cuts_are_rejected(cut: tuple[int, int, int]) -> None:
    refused = pytest.raises(ContractError, match=r"^cut_as: `(threads|q_columns|kv_columns)` must be a power of two")
    with refused, backend.cut_as(backend.MlaCut(*cut)):
        pytest.fail("it was accepted")
    assert backend._Forced.cut is None


@pytest.mark.full  # interprets a kernel with every tile size
@pytest.mark.slow
def test_cuts_do_not_change_results() -> None:
    """The promise that is also checked on GPUs, in the interpreter."""
    assert broken_promise("mla_cache", "_cuts") == "None"


@pytest.mark.parametrize("cut", [(64, 4096, 4096), (256, 256, 512)])
def test_other_cuts_compile(cut: tuple[int, int, int]) -> None:
    case = next(c for c in CASES if c.group == "model")
    with backend.cut_as(backend.MlaCut(*cut)):
        (build,) = proof.builds(case, records.H200)
    assert build.warps == cut[0] // 32 and compile_build(build, records.H200).asm
