"""The ratchet for figures: the committed tables agree with the results, and what gets worse is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suite import gemv_norm, linear, qk_cache, qk_norm, rms_norm
from benchmarks.suite.results import OURS, WAYS, load
from benchmarks.suite.workload import Problem
from tools.bench import figures, formats, headlines, report
from tools.bench import linear as tables
from tools.bench.figures import Figure
from tools.bench.headlines import FILE, main, problems, raised, row_of

ROOT = Path(__file__).parents[2]
CHIPS = ("h200", "cpu")
Plant = Callable[[str, Callable[[Any], None]], Path]


def table(chip: str) -> headlines.Rows:
    return headlines.parse((ROOT / "benchmarks" / chip / FILE).read_text())


# --- the committed tables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", CHIPS)
def test_the_committed_table_is_that_of_the_committed_results(chip: str) -> None:
    old = table(chip)
    found = figures.figures(ROOT / "benchmarks" / chip)
    new = {f.key: row_of(f, old.get(f.key), old.get(f.key, {}).get("commit", "")) for f in found}
    assert new == headlines.measured(old), f"run python -m tools.bench.headlines --folder benchmarks/{chip} --update"


@pytest.mark.parametrize("chip", CHIPS)
def test_committed_figures_keep_their_bars_and_beat_their_alternatives(chip: str) -> None:
    """Or they say why not. A bar that the last change of the table raised has a reason."""
    assert problems(table(chip)) == []
    assert raised(headlines.before(ROOT / "benchmarks" / chip / FILE), table(chip)) == []


def numbers(text: str) -> list[str]:
    """Decimals that are no part of a version, a range of versions or a date."""
    text = re.sub(r"(Python|torch|Triton|transformers|MAX) [\d.+a-z]+( to [\d.]+)?", "", text)
    return re.findall(r"(?<![\w./-])\d+\.\d+(?![\w./]*\d)", text)


def covers(row: dict[str, Any], number: str) -> bool:
    """Whether a row has a number, in the digits it is quoted with, as a time, a ratio or its inverse."""
    digits = len(number.partition(".")[2])
    times = [row["value"], *row.get("must_beat", {}).values(), row.get("was")]
    values = [way for value in times if value for way in (value, 1 / value)]
    return any(abs(value - float(number)) <= 0.51 * 10**-digits for value in values)


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_every_number_of_the_prose_is_in_a_table(page: str) -> None:
    text = (ROOT / page).read_text()
    text = re.sub(r"<!-- (?!models)([\w-]+):begin -->.*?<!-- \1:end -->|```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`torch.compile` reaches [\d.]+ to [\d.]+", "", text)  # a peer's
    rows = [row for chip in CHIPS for row in headlines.measured(table(chip)).values()]
    missing = [number for number in numbers(text) if not any(covers(row, number) for row in rows)]
    assert missing == []


def test_every_time_of_the_generated_tables_is_in_a_table() -> None:
    rows = table("h200")
    short = report.headlines(load(report.sources(ROOT / "benchmarks/h200/README.md")))
    for row in short:
        assert rows[f"{row.op} {row.words}", figures.CHAIN]["value"] == headlines.rounded(row.ours)
        assert rows[f"{row.op} {row.words}", figures.BEHIND]["value"] == headlines.rounded(row.behind_kernel.ours)
    goals = (*(("linear", goal[:2]) for goal in tables.GOALS), *(("formats", goal[:2]) for goal in formats.GOALS))
    names = {figure for figure, _ in rows}
    assert all(f"{op}: {what}, {words}, reached" in names for op, (what, words) in goals)


# --- planted regressions --------------------------------------------------------------------------------------------


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """A copy of the H200's results in which one file was changed."""
    folder = tmp_path / "h200"
    folder.mkdir()
    for path in (ROOT / "benchmarks/h200").iterdir():
        (folder / path.name).symlink_to(path)

    def change(name: str, edit: Callable[[Any], None]) -> Path:
        document = json.loads((folder / name).read_text())
        edit(document)
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(document))
        if (folder / FILE).is_symlink():
            text = (folder / FILE).read_text()
            (folder / FILE).unlink()
            (folder / FILE).write_text(text)
        return folder

    return change


def times(op: str, shape: list[int], by: float, of: str = OURS) -> Callable[[Any], None]:
    def edit(document: Any) -> None:
        (row,) = (row for row in document["rows"] if (row["op"], row["shape"]) == (op, shape) and "with" not in row)
        row["us"][of] = [us * by for us in row["us"][of]]

    return edit


def run(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["--folder", str(folder), *words])
    return status, capsys.readouterr().out


def test_a_figure_that_is_4_percent_slower_fails_and_is_named(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plant("bench.json", times("rms_norm", [1, 7168], 1.04))
    before = (folder / FILE).read_text()
    for words in ((), ("--update",)):
        status, out = run(folder, capsys, *words)
        assert (status, out.count("WORSE")) == (1, 1) and "rms_norm 1 x 7168, chain: 1.359 us" in out
    assert (folder / FILE).read_text() == before, "nothing is written"


def test_2_percent_pass_and_cannot_add_up(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plant("bench.json", times("rms_norm", [1, 7168], 1.02))
    assert run(folder, capsys, "--update")[0] == 0
    row = headlines.parse((folder / FILE).read_text())["rms_norm 1 x 7168", figures.CHAIN]
    assert (row["value"], row["bar"]) == (1.333, 1.307)
    plant("bench.json", times("rms_norm", [1, 7168], 1.02))
    assert "the bar is 1.307 (4.1%)" in run(folder, capsys)[1]


def test_a_reason_is_stored_with_the_figure(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plant("bench.json", times("rms_norm", [1, 7168], 1.04))
    assert run(folder, capsys, "--update", "--reason", "for NaN", "--match", "qk_rms_norm")[0] == 1
    assert run(folder, capsys, "--update", "--reason", "for NaN", "--match", "^rms_norm 1 x")[0] == 0
    row = headlines.parse((folder / FILE).read_text())["rms_norm 1 x 7168", figures.CHAIN]
    assert (row["value"], row["bar"], row["was"], row["reason"]) == (1.359, 1.359, 1.307, "for NaN")


def test_a_faster_figure_sets_the_bar(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plant("bench.json", times(gemv_norm.OP, [1, 2112, 5120], 0.7))
    assert run(folder, capsys, "--update")[0] == 0
    row = headlines.parse((folder / FILE).read_text())["gemv_and_partial_norm 1 x 2112 x 5120, 1536 normed", "chain"]
    assert row["bar"] == row["value"] == 4.346 and "reason" not in row and "was" not in row


def test_an_op_that_loses_to_its_own_launches_fails(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plant("bench.json", times(qk_norm.FUSED, [1, 6144, 1024], 0.5, qk_norm.HALVES))
    status, out = run(folder, capsys)
    assert status == 1 and "LOSES  qk_rms_norm 1 x (6144 + 1024), chain" in out and qk_norm.HALVES in out


def test_an_alternative_that_is_measured_for_the_first_time_counts(
    plant: Plant, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(document: Any) -> None:
        row = next(row for row in document["rows"] if row.get("with") == rms_norm.MORE["rms_norm"])
        row["us"][rms_norm.SEPARATE] = [1.542, 1.55]

    status, out = run(plant("bench.json", add), capsys)
    assert status == 1 and out.count("LOSES") == 1 and f"`{rms_norm.SEPARATE}` takes 1.542 (2.6%)" in out


def test_a_slower_model_and_one_that_is_gone_fail(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    def slower(document: Any) -> None:
        document["rows"][0]["us"]["decode"] *= 1.04
        del document["rows"][1]

    status, out = run(plant("models.json", slower), capsys)
    assert status == 1 and "WORSE  Llama 3 8B, 8 layers, batch 1, decode, captured step" in out
    assert "GONE   Llama 3 8B, 8 layers, batch 4, decode, captured step" in out
    folder = plant("models.json", lambda _: None)
    assert run(folder, capsys, "--update", "--reason", "too small", "--match", "Llama")[0] == 0
    table = headlines.parse((folder / FILE).read_text())
    assert table["Llama 3 8B, 8 layers, batch 4, decode", "captured step"]["gone"] == "too small"
    assert run(folder, capsys)[0] == 0, "it stays gone"


@pytest.mark.parametrize("unit, value, expected", [("us", 1.04, True), ("us", 0.9, False), ("share", 0.9, True)])
def test_better_depends_on_the_unit(unit: str, value: float, expected: bool) -> None:
    assert headlines.worse(value, 1.0, unit) is expected
    assert headlines.worse(1, 0, figures.AHEAD) and not headlines.worse(0, 0, figures.REACHED)


def test_a_bar_that_is_raised_by_hand_needs_a_new_reason() -> None:
    old = row_of(Figure("a", "chain", 1.0, "x.json"), None, "")
    key = ("a", "chain")
    by_hand: dict[str, Any] = {**old, "bar": 1.02, "value": 1.02}
    assert len(raised({key: old}, {key: by_hand})) == 1
    assert raised({key: old}, {key: {**by_hand, "reason": "why"}}) == []
    assert len(raised({key: {**old, "reason": "why"}}, {key: {**by_hand, "reason": "why"}})) == 1
    assert raised({key: by_hand}, {key: old}) == []


# --- alternatives ---------------------------------------------------------------------------------------------------


def problem_of(op: str, kind: str) -> Problem:
    """A small problem of an op with alternatives."""
    if op in (gemv_norm.OP, gemv_norm.FP8):
        return gemv_norm.problem(2, 24, 64, 16, "cpu", kind)
    if op == qk_norm.FUSED:
        return qk_norm.problem(op, 3, 64, 32, "cpu")
    if op == qk_cache.OP:
        return qk_cache.contest(3, 4, 2, 32, torch.bfloat16, "cpu")
    if op == linear.FUSED:
        (weight,) = linear.weights(128, 256, linear.weight_format(kind), "cpu", 1)
        return linear.problem(2, kind, weight, "cpu")
    return rms_norm.problem(op, 3, 64, "cpu", more=True)


@pytest.mark.parametrize(
    "op, kind",
    # those of linear compile kernels
    [pytest.param(*row, marks=[pytest.mark.full] if row[0] == linear.FUSED else []) for row in figures.ALTERNATIVES],
)
def test_alternatives_are_in_the_bench_and_do_the_same(op: str, kind: str) -> None:
    problem = problem_of(op, kind)

    def results(name: str) -> list[torch.Tensor]:
        found: Any = problem.ours[name]()
        return [t.float().clone() for t in (found if isinstance(found, tuple | list) else (found,))]

    for name in figures.ALTERNATIVES[op, kind]:
        assert name in WAYS, "it would count as a peer"
        torch.testing.assert_close(results(name), results(OURS), rtol=0.02, atol=0.02)
