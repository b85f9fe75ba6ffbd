"""`tools.bench.scoreboard` on the CPU with a small model: the chain of steps, the gate, the page and the figures."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tools.bench import common, figures, model_tables, scoreboard
from tools.bench.scoreboard import Arm, Decoding, Fixture, Plan

PLAN = Plan(prompts=3, outputs=5, samples=1, capacities=(40, 600))


@pytest.fixture(scope="module")
def model() -> Any:
    _, config, sizes = common.sized(scoreboard.MODEL, 2)
    # with tied embeddings a small random model repeats its token
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return common.build(config, {**common.tiny(sizes), **more}, "cpu")


@pytest.fixture(scope="module")
def some(model: Any) -> list[Fixture]:
    with torch.no_grad():
        return scoreboard.fixtures(model, PLAN)


def arm_of(model: Any, some: list[Fixture], capacity: int = 40) -> Arm:
    step = Decoding(model, "cpu", capacity, some[0].start)
    step.reset()
    return Arm({}, step, *step.captured())


def with_noise(model: Any, share: float) -> Any:
    worse = copy.deepcopy(model)
    for parameter in worse.parameters():
        parameter.mul_(1 + share * torch.randn_like(parameter))
    return worse


def test_steps_depend_on_each_other(model: Any, some: list[Fixture]) -> None:
    """In float32 the chain chooses the reference's tokens, for every prompt, with either cache; its start is shared."""
    with torch.no_grad():
        exact = copy.deepcopy(model).float()
        for capacity in PLAN.capacities:
            arm = arm_of(exact, some, capacity)
            for fixture in (some[1], some[0]):
                entries = [(k.float(), v.float()) for k, v in fixture.start.entries]
                start, tokens, _ = scoreboard.rollout(exact, fixture.start.prompt, PLAN.outputs)
                assert torch.equal(tokens, fixture.tokens) and len(set(tokens.tolist())) > 1
                assert not torch.equal(start.entries[0][0], entries[0][0]), "that of contenders is in bfloat16"
                assert arm.sequence(start, PLAN.outputs - 1) > 0
                used = scoreboard.PROMPT
                assert arm.step.history[0, used : used + PLAN.outputs - 1].tolist() == tokens[1:].tolist()
                torch.testing.assert_close(arm.forced(fixture), fixture.logits, rtol=0, atol=0.02)


def test_the_gate(model: Any, some: list[Fixture]) -> None:
    """A model in float32 passes, and one with disturbed weights does not; the bfloat16 model itself is at the bound."""
    assert all(kl > 1e-8 and nll > 1e-4 for kl, nll in (fixture.native for fixture in some))
    with torch.no_grad():
        verdicts = []
        for each in (copy.deepcopy(model).float(), with_noise(model, 0.05)):
            arm = arm_of(each, some)
            scoreboard.judge(arm, some)
            verdicts.append(arm.row["gate"])
    exact, worse = verdicts
    assert exact["passes"] and not worse["passes"]
    for name in ("kl", "nll"):
        assert exact[name]["error"] < 0.5 * exact[name]["native"] and exact[name]["bound"] < 0
        assert worse[name]["error"] > 2 * worse[name]["native"] and worse[name]["bound"] > 0
    native = [fixture.native for fixture in some]
    assert scoreboard.verdict(native, native)["passes"]
    one_worse = [(native[0][0], native[0][1] * 1.01), *native[1:]]
    assert not scoreboard.verdict(one_worse, native)["passes"], "both errors count"
    assert not scoreboard.verdict([(float("nan"), 0.0), *native[1:]], native)["passes"]


def test_errors_are_those_of_probabilities() -> None:
    reference, got = (
        torch.tensor([[0.0, 0.0], [1.0, 1.0]]),
        torch.tensor([[0.0, 0.0], [0.0, torch.log(torch.tensor(3.0))]]),
    )
    kl, nll = scoreboard.errors(reference, got, torch.tensor([1, 1]))
    half = torch.tensor(0.5, dtype=torch.float64)
    assert kl == pytest.approx(float(0.5 * ((half / 0.25).log() + (half / 0.75).log())) / 2, rel=1e-6)
    assert nll == pytest.approx(float((0.75 / half).log()) / 2, rel=1e-6)
    assert scoreboard.errors(reference, reference + 3, torch.tensor([0, 1])) == (0.0, 0.0), "a shift changes nothing"


def test_the_bound_is_that_of_the_mean() -> None:
    assert scoreboard.upper_bound([-2.0] * 8) == -2.0
    assert scoreboard.upper_bound([-1.0, 1.0] * 4) > 0.3
    values = torch.randn(400, generator=torch.Generator().manual_seed(3)).tolist()
    assert scoreboard.upper_bound(values) - sum(values) / 400 == pytest.approx(1.96 / 20, rel=0.1)


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One row for each contender and cache. One that fails is recorded; one of ours ends with status 1."""
    file = tmp_path / "scoreboard.json"
    line = ["scoreboard", "--device=cpu", "--tiny", "--prompts=2", "--outputs=3", "--samples=1", f"--json={file}"]
    lengths: list[int] = []
    reset = Decoding.reset

    def broken(self: Decoding) -> None:
        lengths.append(self.mask.shape[-1])
        if self.mask.shape[-1] == 50:
            raise RuntimeError("no room\nand a long trace")
        reset(self)

    monkeypatch.setattr(Decoding, "reset", broken)
    status = []
    for capacities in (("40", "600"), ("40", "50")):
        monkeypatch.setattr(sys, "argv", [*line, "--contender", "eager", "decode", "--capacities", *capacities])
        with pytest.raises(SystemExit) as end:
            scoreboard.main()
        status.append(end.value.code)
        rows = json.loads(file.read_text())["rows"]
        ways = ("unpatched", "unpatched", "decode", "decode", scoreboard.GENERATE)
        assert [(row["way"], str(row["capacity"])) for row in rows] == list(
            zip(ways, [*capacities * 2, capacities[1]], strict=True)
        )
        if capacities[1] == "600":
            assert all(row["us"] > 0 and row["of_prompts"][0] <= row["us"] <= row["of_prompts"][1] for row in rows)
            assert all(set(row["gate"]) == {"kl", "nll", "passes"} for row in rows[:4])
        else:
            assert [row.get("failed") for row in rows] == [None, "RuntimeError: no room"] * 2 + [None]
    assert status == [0, 1] and set(lengths) == {40, 50, 600}
    text = capsys.readouterr().out
    assert "capacity    600" in text and "failed: RuntimeError: no room" in text and "gate " in text


def test_generate_has_a_cache_of_the_capacity(model: Any, some: list[Fixture]) -> None:
    from onepass.models.generation import generate
    from tools.bench.ways import WAYS, Models

    models = Models(model)
    with torch.no_grad():
        row = scoreboard.generated(models, some[:1], "cpu", PLAN)
    assert row["us"] > 0 and "failed" not in row
    kept = generate._KEPT[models.of(WAYS["decode"])[0]].values()
    assert [each.state.shape.length for each in kept] == [640], "a multiple of 64, for both calls"


# --- what is made of the rows ---------------------------------------------------------------------------------------


def row_of(way: str, capacity: int, us: float, passes: bool | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model_tables.SCOREBOARD, "way": way, "capacity": capacity, "us": us}
    bounds = {name: {"error": 1.0, "native": 1.0, "bound": -1e-7 if passes else 2e-7} for name in ("kl", "nll")}
    return row if passes is None else row | {"gate": {**bounds, "passes": passes}}


def report_of(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"machine": "NVIDIA H200", "date": "today", "torch": "2", "transformers": "5", "rows": list(rows)}


def test_the_page_says_who_is_ahead() -> None:
    empty = model_tables.scoreboard(None)
    assert empty.endswith("onepass has not been measured under this protocol.")
    assert "| 794.7 | passes |" in empty and "| 759.8 | misses it |" in empty and "github.com/msaroufim" in empty
    rows = [row_of("decode", 256, 750.0, True), row_of("decode", 16384, 765.0, True)]
    rows += [row_of("decode, fp8", 16384, 600.0, False), row_of("captured generate", 16384, 790.0)]
    text = model_tables.scoreboard(report_of(*rows, {"way": "max-autotune", "capacity": 16384, "failed": "E: no"}))
    assert "| `decode=True` | 765.0 | passes | -1.0e-07, -1.0e-07 | 1.020x |" in text
    assert "| 600.0 | misses it | +2.0e-07, +2.0e-07 |  |" in text and "| 790.0 | as `decode=True` |" in text
    assert (
        "`decode`, which passes the gate, is ahead of a CUDA graph with programmatic launch: 765.0 against 794.7 us."
        in text
    )
    assert "is behind Hazy Research's megakernel: 765.0 against 759.8 us." in text and "failed: `E: no`." in text
    rows += [row_of("decode, batch invariant", 16384, 740.0, False)]
    assert model_tables.scoreboard(report_of(*rows)).count("`decode`, which passes") == 2, "the fastest that passes"
    rows[1] = row_of("decode", 16384, 765.0, False)
    text = model_tables.scoreboard(report_of(*rows))
    assert "`decode, batch invariant`, which misses the gate, is ahead of Hazy" in text


def test_figures(tmp_path: Path) -> None:
    path = tmp_path / figures.SCOREBOARD
    assert list(figures._of_scoreboard(path)) == [], "nothing was measured"
    rows = [
        row_of("decode", 16384, 772.5, True),
        row_of("decode", 256, 750.0, True),
        row_of("unpatched", 16384, 9.0, False),
    ]
    path.write_text(json.dumps(report_of(*rows, row_of("captured generate", 16384, 790.0))))
    found = {figure.name.removeprefix("Llama-3.2-1B, whole, "): figure.value for figure in figures._of_scoreboard(path)}
    assert found == {
        "decode, 256 entries": 750.0,
        "decode, 256 entries: gate": 1,
        "decode, 16384 entries": 772.5,
        "decode, 16384 entries: over the shortest cache": pytest.approx(1.03),
        "decode, 16384 entries: gate": 1,
        "captured generate, 16384 entries": 790.0,
    }
