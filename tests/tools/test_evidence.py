"""What the evidence from a GPU covers, and that CI without a GPU knows whether it still holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import onepass

pytest.importorskip("triton")

import triton

from onepass.gpu import chip
from onepass.gpu import compile as compiler
from onepass.gpu.chip import Chip
from onepass.gpu.compile import Build
from onepass.ops.rms_norm import gpu_kernel as kernels
from onepass.ops.rms_norm.gpu import build_for
from onepass.ops.rms_norm.gpu_tile import row_config
from onepass.testing.runner import OPS, Result
from tests import matrix
from tests.helpers.families import FAMILIES
from tests.mla_cache.checks import MlaCase
from tests.oracle import runner
from tests.oracle.case import Check
from tests.rms_norm.cases import CASES
from tests.rms_norm.test_gpu import norm_spec
from tools import checks
from tools.evidence import families, proof, published, records
from tools.evidence.chips import MACHINES, Machine
from tools.evidence.digest import SourceDigests

BF16 = torch.bfloat16
EVIDENCE = MACHINES["h200"].evidence


def norm_build(n: int = 512, residual: bool = False) -> Build:
    return build_for(norm_spec(residual), row_config(n, 2, records.H200, "norm", "large"), 1, True, records.H200)


class TestPublishedModels:
    """The table of published sizes, the calls it implies, and the cases made from it."""

    @pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
    def test_every_configuration_ran_on_a_gpu(self, machine: Machine) -> None:
        """For every published size: norms, fp8 forms, q and k, projections, the cache write; all batch regimes."""
        needed = {name: b for builds in families.needed(machine.chip).values() for name, b in builds.items()}
        assert len(needed) > 500
        proofs = records.read(machine.evidence)
        absent = [name for name, build in needed.items() if name not in proofs and not compiler.is_unproven(build)]
        assert not absent, f"{len(absent)} of {len(needed)} configurations never ran on a GPU; make gpu records them"

    def test_the_families_are_those_that_patch_supports(self) -> None:
        rows = {family.name: family for family in FAMILIES if family.name != "torch.nn"}
        assert {family.name for family in published.FAMILIES} == set(rows)
        for family in published.FAMILIES:
            row = rows[family.name]
            assert (family.rounding, family.weight_offset) == (row.form.rounding, row.form.weight_offset), family.name
            norms = "" if row.attention is None else "heads" if row.attention.per_head else "whole"
            assert family.norms == norms, family.name
            assert any(model.latent for model in family.models) == (row.mla is not None), family.name
            for model in family.models:
                assert bool(model.heads and model.kv_heads and model.head_dim) == bool(norms), model

    @pytest.mark.full  # test_every_configuration_ran_on_a_gpu stays
    def test_cases_need_what_calls_of_the_models_need(self) -> None:
        """Running the cases on a GPU proves all that the calls need."""
        needed = {name for builds in families.needed(records.H200).values() for name in builds}
        light = [case for case in families.least_cases(records.H200) if not _heavy(case)]
        found: dict[str, int] = {}
        for case in light:
            for build in proof.builds(case, records.H200):
                found[build.name] = found.get(build.name, 0) + 1
        by_case = families.needed(records.H200)
        heavy = {n for case in families.WORK if _heavy(case) for n in by_case[f"{case.op} {case.name}"]}
        assert set(found) <= needed and needed - set(found) <= heavy and len(heavy) < 20

    def test_no_case_is_redundant(self) -> None:
        found = families.needed(records.H200)
        least = families.least_cases(records.H200)
        assert len({case.name for case in least}) <= len(least) < len(families.WORK)
        times: dict[str, int] = {}
        for case in least:
            for name in found[f"{case.op} {case.name}"]:
                times[name] = times.get(name, 0) + 1
        assert set(times) == {name for builds in found.values() for name in builds}
        for case in least:
            assert any(times[name] == 1 for name in found[f"{case.op} {case.name}"]), case.name

    def test_gpu_runs_include_these_cases(self) -> None:
        on_gpu, elsewhere = checks.published(MACHINES["h200"]), matrix.select(device="cuda")
        assert {case.group for case in on_gpu} - {case.group for case in elsewhere} == {families.GROUP}
        assert not any(case.interpretable for case in on_gpu if case.group == families.GROUP)

    @pytest.mark.full  # all_ops/test_cases.py has the same for other cases
    def test_one_case_of_every_form_passes_and_fails_with_zeros(self) -> None:
        """On the CPU: these cases can fail like all others."""
        seen = set()
        for case in families.WORK:
            form = (
                case.op,
                str(getattr(case, "options", "")),
                getattr(case, "residual", None),
                getattr(case, "turn", None),
            )
            if form in seen or _heavy(case) or (case.op.startswith("gemv") and case.m > 1):  # type: ignore[attr-defined]
                continue
            seen.add(form)
            with runner.running_on("cpu"):
                assert runner.run_case(case, "cpu").message == ""
                module = runner.MODULES[case.op]
                arguments = module.inputs(case, "cpu")
                results = list(module.call(case, arguments))
                index, _ = module.zeroable(case)[0]
                results[index] = torch.zeros_like(results[index])
                assert module.verify(case, arguments, tuple(results)) is not None, case.name
        assert len(seen) > 30


def _heavy(case: Check) -> bool:
    """Prompts of thousands of tokens, which take seconds on a CPU."""
    return isinstance(case, MlaCase) and case.tokens > 1000


def test_unproven_calls_are_reported(tmp_path: Path) -> None:
    x, gamma = torch.empty(4, 4096, dtype=BF16), torch.empty(4096, dtype=BF16)
    assert records.unproven(lambda: onepass.rms_norm(x, gamma), EVIDENCE) == []
    records.write(tmp_path / "evidence.json", {}, {})
    (told,) = records.unproven(lambda: onepass.rms_norm(x, gamma), tmp_path / "evidence.json")
    assert told.startswith("rms_norm_row x=bf16") and told.endswith(": never run on a GPU")


# --- digests of sources ---------------------------------------------------------------------------------------------

HELPERS = '''
"""A docstring."""
import triton
import triton.language as tl

WIDTH = tl.constexpr(4)


@triton.constexpr_function
def twice(n):
    """Doubled."""
    return 2 * n


@triton.jit
def inner(x):
    """A docstring."""
    # a comment
    return x + WIDTH


@triton.jit
def outer(pointer, OPTION: tl.constexpr):
    value = inner(tl.load(pointer)) * twice(OPTION)
    tl.store(pointer, value)
'''


@pytest.fixture
def module_of(tmp_path: Path) -> Iterator[Any]:
    """Writes sources as a new module and imports it."""
    made: list[str] = []

    def make(source: str) -> ModuleType:
        name = f"digested_{len(made)}"
        (tmp_path / f"{name}.py").write_text(source)
        made.append(name)
        found = __import__(name)
        for function in (found.outer, found.inner, found.twice):
            function.__module__ = function.fn.__module__ = "digested"  # as if the same module had been edited
        return found

    sys.path.insert(0, str(tmp_path))
    yield make
    sys.path.remove(str(tmp_path))
    for name in made:
        sys.modules.pop(name, None)


class TestSourceDigests:
    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("return x + WIDTH", "return x - WIDTH"),
            ("constexpr(4)", "constexpr(8)"),
            ("return 2 * n", "return 3 * n"),
            ("tl.store(pointer, value)", "tl.store(pointer + 1, value)"),
            ("@triton.jit\ndef inner", "@triton.jit(noinline=True)\ndef inner"),
        ],
        ids=["device function", "global constant", "constexpr function", "kernel", "decorator"],
    )
    def test_changes_with_everything_the_kernel_reaches(self, module_of: Any, old: str, new: str) -> None:
        assert old in HELPERS
        before, after = (SourceDigests().of(module_of(text).outer) for text in (HELPERS, HELPERS.replace(old, new)))
        assert before != after

    def test_layout_comments_and_docstrings_do_not_count(self, module_of: Any) -> None:
        other = HELPERS.replace("# a comment", "# another").replace('"""A docstring."""', '"""Other words."""')
        other = "\n\n\n" + other.replace("inner(tl.load(pointer)) *", "inner(\n        tl.load(pointer)\n    ) *")
        other += "\n\n@triton.jit\ndef unused(x):\n    return x\n"
        assert SourceDigests().of(module_of(HELPERS).outer) == SourceDigests().of(module_of(other).outer)

    def test_a_changed_device_function_of_a_kernel_changes_its_builds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a real kernel: a device function with another body."""
        build = norm_build()
        before = records.digest(build, records.H200)
        assert records.digest(build, records.H200) == before
        scope = kernels._rms_norm_row_kernel.fn.__globals__
        name = next(
            n for n in sorted(scope) if isinstance(scope[n], triton.runtime.jit.JITFunction) and "kernel" not in n
        )

        @triton.jit
        def changed(x):  # type: ignore[no-untyped-def]
            return x

        monkeypatch.setitem(scope, name, changed)
        after = records.digest(build, records.H200)
        assert after != before
        proof_of_before = records.Proof("0" * 24, (), "0" * 24, 0, before)
        monkeypatch.setattr(records, "ir_hash", lambda *_: "1" * 24)
        monkeypatch.setattr(records, "compiled_hash", lambda *_: "1" * 24)
        assert records.missing([build], {build.name: proof_of_before}, records.H200)

    def test_a_digest_covers_the_whole_build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        build = norm_build(1536)
        others = [
            norm_build(1536, residual=True),
            replace(build, divisible=()),
            replace(build, warps=2 * build.warps),
            replace(build, pdl=not build.pdl),
            replace(build, registers=128),
            replace(build, contracts=not build.contracts),
            replace(build, constants=tuple((k, True if k == "MATH.hf" else v) for k, v in build.constants)),
            replace(build, signature=tuple((k, "*fp32" if k == "gamma" else v) for k, v in build.signature)),
        ]
        found = [records.digest(b, records.H200) for b in (build, *others)]
        found.append(records.digest(build, Chip("cuda", 100, 32)))
        assert records.digest(replace(build, name="other"), records.H200) == found[0]
        monkeypatch.setattr("triton.__version__", "0")
        found.append(records.digest(build, records.H200))
        assert len(set(found)) == len(found) == len(others) + 3

    def test_a_digest_covers_the_prologue(self) -> None:
        cases = [case for case in CASES if case.operands == ("full",) and case.n == 1536]
        prologues = {case.options["prologue"].key for case in cases}
        builds = [next(b for b in proof.builds(case, records.H200)) for case in cases]
        assert len(prologues) > 1
        names = {build.name for build in builds}
        assert len({records.digest(build, records.H200) for build in builds}) == len(names) > len(prologues)

    @pytest.mark.full  # starts two processes
    def test_digests_are_the_same_in_every_process(self) -> None:
        """Sets have another order in each process."""
        program = (
            "from tests import matrix; from tools.evidence import proof, records as evidence\n"
            "firsts = {case.op: case for case in reversed(matrix.CASES)}.values()\n"
            "for build in proof.distinct_builds(firsts, evidence.H200).values():\n"
            "    print(build.name, evidence.digest(build, evidence.H200))"
        )
        told = {
            subprocess.run(
                [sys.executable, "-W", "ignore", "-c", program],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("1", "2")
        }
        assert len(told) == 1 and told.pop().count("\n") > len(OPS)

    def test_a_constant_of_an_unknown_kind_is_rejected(self) -> None:
        with pytest.raises(TypeError, match="no rule for a constant of type dict"):
            SourceDigests().value({})

    def test_a_proven_source_is_neither_lowered_nor_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        build = norm_build()
        proofs = {build.name: records.Proof("0" * 24, (), "0" * 24, 0, records.digest(build, records.H200))}
        monkeypatch.setattr(records, "lowered", None)
        monkeypatch.setattr(records, "compile_build", None)
        assert not records.missing([build], proofs, records.H200)


class TestFile:
    def test_passing_configurations_are_recorded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a simulated GPU: configurations of a failed case are left out."""
        cases = [case for case in CASES if case.group == "short" and case.n in (64, 512)][:2]
        results = [Result(case.op, case.name, "cuda", case.n == 512, "", 0.0) for case in cases]
        monkeypatch.setattr(chip, "current_chip", lambda _: records.H200)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "one")
        where = proof.builds
        monkeypatch.setattr(proof, "builds", lambda case, chip, _: where(case, chip, "cpu"))
        file = tmp_path / "evidence.json"
        passed, failed = (where(case, records.H200) for case in sorted(cases, key=lambda case: -case.n))
        told = proof.record(file, cases, results)
        assert told.startswith(f"{len(passed)} configurations proven, {len(failed)} not")
        named = (f"rms_norm {max(cases, key=lambda case: case.n).name}",)
        assert records.read(file) == {b.name: records.prove(b, records.H200, named) for b in passed}

    def test_shares_are_joined(self) -> None:
        """A configuration that failed in one share is not proven by another share or by an earlier proof."""

        def proof_of(*cases: str) -> records.Proof:
            return records.Proof("m", cases, "i", 0, "s")

        kept = {"old": proof_of("c0"), "old, failed": proof_of("c0"), "both": proof_of("c0")}
        shares: list[dict[str, object]] = [
            {"failed": [], "proofs": {"both": asdict(proof_of("c1")), "half": asdict(proof_of("c2"))}},
            {"failed": ["half", "old, failed"], "proofs": {"new": asdict(proof_of("c3"))}},
        ]
        proofs, failed = proof.joined(kept, shares)
        assert proofs == {"old": proof_of("c0"), "both": proof_of("c0", "c1"), "new": proof_of("c3")}
        assert failed == {"half", "old, failed"}

    def test_only_unproven_cases_run_again(self, tmp_path: Path) -> None:
        cases = [case for case in CASES if case.group == "short" and case.n in (64, 512)][:2]
        builds = {case.name: proof.builds(case, records.H200) for case in cases}
        known = {b.name: b for b in builds[cases[0].name]}
        digest = records.digest(next(iter(known.values())), records.H200)
        told = {name: records.Proof("m", (), "i", 0, records.digest(b, records.H200)) for name, b in known.items()}
        file = tmp_path / "evidence.json"
        records.write(file, {}, told)
        kept, needed = proof.unproven(file, cases, records.H200)
        assert set(kept) == set(known) and needed == cases[1:]
        records.write(file, {}, {name: replace(one, source=digest[::-1]) for name, one in told.items()})
        assert proof.unproven(file, cases, records.H200) == ({}, cases)

    def test_a_file_without_digests_is_read(self, tmp_path: Path) -> None:
        file = tmp_path / "evidence.json"
        old = {"format": 1, "builds": {"a": {"machine_code": "m", "ir": "i", "stack": 0, "cases": ["c"]}}}
        file.write_text(json.dumps(old))
        assert records.read(file) == {"a": records.Proof("m", ("c",), "i", 0, None)}
        file.write_text('{"format": 3}')
        with pytest.raises(ValueError, match="evidence format 3, expected 1 or 2"):
            records.read(file)

    def test_refresh_updates_a_source_by_its_ir(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is compiled if the IR is the proven one; an IR that compiles to something else is reported."""
        cases = [case for case in CASES if case.group == "short" and case.n in (1, 512)][:2]
        first, second = list(proof.distinct_builds(cases, records.H200).values())[:2]
        same = records.Proof("m", ("c",), records.ir_hash(first, records.H200), 0)
        other = records.Proof("m", ("c",), "i", 0)
        file = tmp_path / "evidence.json"
        records.write(file, {"gpu": "one"}, {first.name: same, second.name: other})
        monkeypatch.setattr(records, "prove", lambda build, *_: replace(other, machine_code="another"))
        told = proof.refresh(file, cases, records.H200)
        assert told.startswith("1 configurations") and "1 have new machine code" in told
        noted = replace(same, source=records.digest(first, records.H200))
        assert records.read(file) == {first.name: noted, second.name: other}
