"""The kernel of qk_norm_rope_cache without a GPU: machine code, programs and arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import onepass
from benchmarks.suite import qk_cache as bench
from onepass.core.backend import launching_with
from onepass.errors import ContractError, Unsupported
from onepass.gpu.chip import Chip
from onepass.gpu.compile import Build, Launcher, compile_build, is_unproven
from onepass.ops.qk_cache import gpu as backend
from onepass.ops.qk_cache.gpu_tile import qk_cache_config
from onepass.ops.qk_cache.launch import QkCacheCall, Turn
from onepass.testing import runner
from tests.gpu.test_other_chips import OTHER_CHIPS
from tests.helpers.interpreting import broken_promise, passed_checks
from tests.qk_cache import checks as qk_cache
from tests.qk_cache.cases import CASES
from tests.qk_cache.checks import Angles, QkCacheCase
from tools.evidence import attentions, proof, records
from tools.evidence.records import lowered

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def build_of(tokens: int, heads: tuple[int, int] = (32, 8), d: int = 128, cache: torch.dtype = BF16) -> Build:
    """The build that a call of the benchmark runs on an H200."""
    p = bench.problem(tokens, *heads, d, cache, "cpu")
    (build,) = records.builds_of(lambda: bench.ours(p), records.H200)
    return build


@pytest.mark.sampled(3)  # each compiles a kernel
@pytest.mark.parametrize(("tokens", "heads"), [(1, 4), (64, 8)])
@pytest.mark.parametrize("cache", [BF16, FP8], ids=str)
def test_hot_kernels_use_wide_accesses_and_few_registers(tokens: int, heads: int, cache: torch.dtype) -> None:
    """16-byte loads, stores as wide as possible, few registers, and no shared memory."""
    compiled = compile_build(build_of(tokens, cache=cache), records.H200)
    usage = records.resources(compiled)
    assert usage["REG"] <= 96 and usage["STACK"] == usage["LOCAL"] == usage["SHARED"] == 0
    ptx = compiled.asm["ptx"]
    assert not re.findall(r"(?:ld|st)\.shared|bar\.sync", ptx)
    tile = heads * 128 // 256  # loads of 8 columns for each of q, k and v by 32 threads
    # of q, k, v and both gammas, which every head of a tile needs
    assert len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", ptx)) >= 3 * tile
    stores = re.findall(r"st\.global[.\w]*", ptx)
    wide = {BF16: {"st.global.v4.b32"}, FP8: {"st.global.v4.b32", "st.global.v2.b32"}}[cache]
    assert set(stores) == wide and len(stores) == 3 * tile


@pytest.mark.sampled(2)  # each compiles a kernel
@pytest.mark.parametrize("style", ["contiguous", "interleaved"])
def test_three_positions_exchange_nothing_between_threads(style: str) -> None:
    """Every thread loads the angles that its pairs need."""
    sections = (16, 24, 24) if style == "contiguous" else (24, 20, 20)
    turn = Angles(128, sections=sections, section_style=style)
    case = QkCacheCase("mrope", (64,), 32, 8, 128, angles=turn, page=16, memory="packed")
    (build,) = proof.builds(case, records.H200)
    compiled = compile_build(build, records.H200)
    usage = records.resources(compiled)
    assert usage["REG"] <= 96 and usage["STACK"] == usage["LOCAL"] == usage["SHARED"] == 0
    assert not re.findall(r"(?:ld|st)\.shared|bar\.sync", compiled.asm["ptx"])


def test_products_are_rounded_before_they_are_added() -> None:
    """Other contractions than the rotation's two would depend on the layout of columns."""
    build = build_of(64)
    assert not build.contracts
    fused = lowered(build, records.H200, "ptx").count("fma.rn.f32")
    contracted = lowered(replace(build, contracts=True), records.H200, "ptx")
    assert 0 < fused < contracted.count("fma.rn.f32")


def test_stepwise_rotations_fuse_nothing() -> None:
    """A fused product would not be rounded, and a model's bits would change."""
    case = next(c for c in CASES if c.rounding == "hf" and c.norm == "none" and c.x == F32)
    (build,) = proof.builds(case, records.H200)
    assert "fma.rn.f32" not in lowered(build, records.H200, "ptx")


@pytest.mark.sampled(5)  # one kind of norm stays
@pytest.mark.parametrize("norm", ["head", "whole"])
def test_every_reduction_adds_two_numbers(norm: str) -> None:
    """Floats are added in the pairs that `gpu.lib.reduce` defines for any tile, never in an order set by a layout."""
    for case in (c for c in CASES if c.group == "columns" and c.norm == norm and c.head in (80, 128)):
        (build,) = proof.builds(case, records.H200)
        summed = re.findall(r"\(tensor<([\dx]+)xf32>\) -> ", lowered(build, records.H200, "ttir"))
        assert summed
        assert all(re.fullmatch(r"(\d+x)?(2x\d+|\d+x2)|2x\d+x\d+", shape) for shape in summed), summed


def test_every_case_has_one_configuration() -> None:
    for case in CASES:
        assert len(proof.builds(case, records.H200)) == (case.group != "empty"), case.name


def test_equal_names_mean_equal_builds() -> None:
    """Of all cases and all published attentions."""
    found: dict[str, Build] = {}
    calls: list[Callable[[], Any]] = [call for case in attentions.work("families") for call in attentions.calls(case)]
    builds = [build for call in calls for build in records.builds_of(call, records.H200)]
    builds += [build for case in CASES for build in proof.builds(case, records.H200)]
    for build in builds:
        other = found.setdefault(build.name, build)
        assert replace(other, kernel=build.kernel) == build, build.name
    assert len(found) > 300


@pytest.mark.full  # 20 CPU-seconds; part of the other families stays
@pytest.mark.parametrize("chip", OTHER_CHIPS, ids=lambda c: str(c.arch))
def test_compiles_for_other_chips(chip: Chip) -> None:
    """Some configurations of each kind, for each chip in turn."""
    cases = [c for c in CASES if c.group in ("model", "fp8") and len(c.lead) == 1]
    builds = list(proof.distinct_builds(cases, chip).values())
    assert len(builds) >= 20
    for build in builds[OTHER_CHIPS.index(chip) :: 8]:
        assert compile_build(build, chip).asm


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
@pytest.mark.slow
def test_interpreted_kernel_passes_its_cases() -> None:
    groups = {"model", "fp8", "dense", "layouts"}
    cases = [case.group for case in CASES if case.group in groups]
    assert passed_checks(qk_cache.OP, match="|".join(f"{group}: " for group in groups)) == len(cases)
    assert {*cases} == groups


NEW_OPTIONS: dict[str, dict[str, Any]] = {
    "axes=3,1,31,2,32": {"angles": Angles(64, sections=(12, 10, 10), section_style="interleaved")},
    "vnorm": {"norm_v": True},
    "keys": {"keys": True},
    "scales=head,head": {"cache": FP8, "scale": "kv", "scaling": "head"},
    "scales=own,own": {"cache": FP8, "scale": "kv", "scaling": "own"},
}


@pytest.mark.parametrize("word", NEW_OPTIONS)
def test_kernels_of_new_options_raise_until_they_have_run(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names say so, and those of other kernels have none of these words."""
    (build,) = proof.builds(QkCacheCase("new", **NEW_OPTIONS[word]), records.H200)
    assert build.name.startswith(f"qk_cache {word} x=") and is_unproven(build)
    monkeypatch.delenv("ONEPASS_UNPROVEN", raising=False)
    with pytest.raises(Unsupported, match=f"^qk_cache {word} x=.*has not run on a GPU yet; ONEPASS_UNPROVEN=1 runs"):
        Launcher(build, 0)
    old: dict[str, Any] = {"cache": FP8, "scale": "kv"} if "scales" in word else {}
    (plain,) = proof.builds(QkCacheCase("old", **old), records.H200)
    assert plain.name.startswith("qk_cache x=") and not is_unproven(plain)


def test_onepass_check_leaves_out_only_these_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEPASS_UNPROVEN", raising=False)
    groups = [{case.group for case in runner.select([qk_cache.OP], device=device)} for device in ("cpu", "cuda")]
    assert groups[0] - groups[1] == {"mrope", "norm of v", "scales", "keys alone"}
    monkeypatch.setenv("ONEPASS_UNPROVEN", "1")
    assert groups[0] == {case.group for case in runner.select([qk_cache.OP], device="cuda")}


# --- programs -------------------------------------------------------------------------------------------------------


def test_programs_of_a_decode_step() -> None:
    """One warp for four heads of 128 columns; a whole row has one program."""
    turn = Turn("half", 128, F32)
    config = qk_cache_config(512, 32, 8, 128, 128, "head", turn, records.H200)
    assert (config.q[:3], config.k[:3], config.v[:2], config.warps) == ((4, 8, True), (4, 2, True), (4, 2), 1)
    whole = qk_cache_config(512, 32, 32, 128, 128, "whole", turn, records.H200)
    assert (whole.q[:4], whole.programs, whole.warps) == ((32, 1, True, False), 4, 4)
    long = qk_cache_config(512, 160, 8, 128, 128, "whole", turn, records.H200)
    assert long.q.long and long.q.heads * 128 == long.q.row == 8192 and not long.k.long


@pytest.mark.parametrize("heads", range(1, 70))
def test_programs_cover_every_head(heads: int) -> None:
    for head in (32, 96, 256):
        config = qk_cache_config(1024, heads, heads, head, head, "head", None, records.H200)
        side = config.q
        assert (side.pieces - 1) * side.heads < heads <= side.pieces * side.heads
        assert side.heads & (side.heads - 1) == 0


def call_of(**changes: Any) -> QkCacheCall:
    p = bench.problem(4, 8, 2, 64, BF16, "cpu")
    found: list[QkCacheCall] = []
    with launching_with(lambda family: found.append), torch.inference_mode():
        bench.ours(p)
    return found[0]._replace(rows=found[0].rows._replace(**changes))


def test_too_many_programs_are_rejected() -> None:
    call = call_of(tokens=2**30)
    config = qk_cache_config(512, 8, 2, 64, 64, "head", call.spec.turn, records.H200)
    assert backend._grid(call_of(), config) == (4 * config.programs,)
    with pytest.raises(Unsupported, match=r"at most 2\*\*31 - 2\*\*13 programs"):
        backend._grid(call, config)


@pytest.mark.parametrize(
    ("change", "aligned"),
    [
        ({}, "qkva"),
        ({"q_head": 65}, "kva"),
        ({"q_token": 12}, "kva"),
        ({"k_entry": 4}, "qva"),
        ({"v_page": 3}, "qka"),
        ({"freqs_row": 66}, "qkv"),
        ({"tokens": 1, "q_token": 3, "v_token": 5}, "qkva"),
    ],
)
def test_alignment_follows_strides(change: dict[str, int], aligned: str) -> None:
    known = backend._known(call_of(**change))
    assert "".join(name for name, here in zip("qkva", known, strict=False) if here) == aligned


def test_columns_as_sets_the_programs() -> None:
    call = call_of()
    usual = backend._facts(call, records.H200).columns
    with backend.columns_as(64):
        assert backend._facts(call, records.H200).columns == 64 != usual
    assert backend._facts(call, records.H200).columns == usual
    for wrong in (0, 3, -4, 2.0):
        with pytest.raises(ContractError, match="`columns` must be a power of two"), backend.columns_as(wrong):  # type: ignore[arg-type]
            pytest.fail("it was accepted")


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
@pytest.mark.slow
def test_programs_of_any_size_give_the_same_bytes() -> None:
    """The promise that is also checked on GPUs, in the interpreter."""
    assert broken_promise("qk_cache", "_programs") == "None"


def test_a_single_token_needs_no_division() -> None:
    """Neither by the length of a sequence nor by the size of a page that is a power of two."""
    q, k, v = torch.empty(3, 1, 12, 64, dtype=BF16).split((8, 2, 2), 2)
    caches = [torch.empty(3, 2, 9, 64, dtype=BF16) for _ in range(2)]
    pair = onepass.Rope(cos=torch.empty(3, 1, 64, dtype=BF16), sin=torch.empty(3, 1, 64, dtype=BF16))
    call = lambda: onepass.qk_norm_rope_cache(q, k, v, *caches, rope=pair, layout="dense")  # noqa: E731
    (build,) = records.builds_of(call, records.H200)
    assert dict(build.constants)["rows.sequence"] == 1
    assert not re.findall(r"(?:div|rem)\.[su](?:32|64)", lowered(build, records.H200, "ptx"))
