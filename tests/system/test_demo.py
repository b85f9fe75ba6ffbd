"""The demo: what it shows, its report and its exit status."""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import re
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

import onepass
from benchmarks.suite import console as consoles
from examples.demo import demo, screen
from examples.demo import generate as demo_generate
from examples.demo import model as demo_model
from onepass.testing import runner
from tests.helpers.command import Result, invoke


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


def run_demo(*arguments: str) -> Result:
    return invoke(demo.main, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu"), "neither cpu nor cuda"),
        (("--model", "gpt5"), "choose from 'deepseek-v3', 'olmo2', 'gemma3', 'llama'"),
        (("--rounding", "twice"), "choose from 'hf', 'once'"),
        (("--path", "/nonexistent"), "/nonexistent has no config.json"),
    ],
)
def test_usage_errors_are_friendly(arguments: tuple[str, ...], message: str) -> None:
    result = run_demo(*arguments)
    assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output


def test_demo_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "transformers" else find(name))
    result = run_demo("--device", "cpu")
    assert result.exit_code == 2 and "pip install '.[models]'" in result.output


def test_a_progress_bar_estimates_the_time_left() -> None:
    seconds = itertools.chain([0.0, 0.0], itertools.repeat(30.0))
    console = Console(width=90, file=io.StringIO(), force_terminal=True, color_system=None)
    bar = consoles.progress_bar(console, get_time=lambda: next(seconds), auto_refresh=False)
    task = bar.add_task("rms_norm", total=10)
    for _ in range(2):
        bar.update(task, advance=1)
    console.print(bar.get_renderable())
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert re.search(r"2/10 0:00:30 0:0[0-9]:[0-9]{2} left", shown), shown
    assert max(map(len, shown.splitlines())) <= 90


def test_the_demo_names_a_command_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the environment is not activated, its path."""
    installed = Path(sys.executable).with_name("onepass")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert demo._command() == (os.path.relpath(installed) if installed.exists() else "onepass")
    monkeypatch.setenv("PATH", str(installed.parent))
    assert demo._command() == "onepass"


def test_demo_cases_exist() -> None:
    assert set(demo.SHOWN_CASES) <= {(case.op, case.group) for case in runner.CASES}
    assert len(set(demo.SHOWN_CASES)) == 12


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes and few repetitions."""
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    monkeypatch.setattr(demo_model, "_SIZES", {**demo_model._SIZES, **sizes})
    monkeypatch.setattr(demo_generate, "SIZES", {**demo_generate.SIZES, **sizes, "num_key_value_heads": 16})
    monkeypatch.setattr(demo_generate, "NEW_TOKENS", 5)
    monkeypatch.setattr(demo_model, "ROUNDS", 1)
    monkeypatch.setattr(demo_model, "NEW_TOKENS", 6)
    monkeypatch.setattr(screen, "SECONDS", 0.01)
    monkeypatch.setattr(demo, "SHAPES", ((1, 256),))


@pytest.mark.full  # test_bench_claims.py runs the comparisons of the demo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rounding", "ops"),
    [
        ("llama", "hf", {"rms_norm, 128": 3, "rms_norm with residual, 128": 2}),
        ("olmo2", "hf", {"rms_norm, 128": 5, "qk_rms_norm, 128 + 64": 2}),
        ("gemma3", "once", {"rms_norm, 128": 7, "rms_norm with residual, 128": 2, "qk_rms_norm, 512 + 256": 2}),
        (
            "deepseek-v3",
            "once",
            {
                "rms_norm, 128": 3,
                "rms_norm with residual, 128": 2,
                "gemv_and_partial_norm, 256 x 128": 2,
                "gemv_and_partial_norm, 160 x 128": 2,
            },
        ),
    ],
)
def test_demo_of_each_model(
    model: str, rounding: str, ops: dict[str, int], small_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has what the table shows: same tokens, close logits, a time per op and its number of calls."""
    monkeypatch.setattr(demo, "SHOWN_CASES", demo.SHOWN_CASES[:1])
    file = tmp_path / "report.json"
    result = run_demo("--model", model, "--rounding", rounding, "--device", "cpu", "--report", str(file))
    assert result.exit_code == 0, result.output
    assert "same tokens, float32" in result.output and "WRONG" not in result.output
    report = json.loads(file.read_text())
    assert report["fine"] and report["same_tokens"] and len(report["tokens"]) == 6
    assert 0 < report["max_difference"] < 1e-4 * report["largest_logit"]
    assert {op["op"]: op["calls"] for op in report["ops"]} == ops
    assert all(op["plain_us"] > 0 and op["onepass_us"] > 0 for op in report["ops"])
    assert set(report["milliseconds_a_token"]) == {"without onepass", "with onepass"}
    assert report["patch"]["replaced"] and report["patch"]["left"]
    assert report["cache"] == ("MlaCache" if model == "deepseek-v3" else "the model's own")
    if rounding == "hf":
        assert report["bfloat16_equal"] > 0.5


@pytest.mark.full  # test_demo stays
@pytest.mark.slow
def test_demo_of_local_weights(small_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHOWN_CASES", ())
    demo_model.load("llama", None, "cpu").save_pretrained(tmp_path / "weights")
    file = tmp_path / "deep" / "report.json"
    result = run_demo("--path", str(tmp_path / "weights"), "--device", "cpu", "--report", str(file))
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["model"] == str(tmp_path / "weights")


@pytest.mark.slow
def test_demo(small_model: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = run_demo("--device", "cpu", "--report", str(tmp_path / "report.json"))
    assert result.exit_code == 0, result.output
    checks = result.output[result.output.index("A dozen checks") :]
    assert sum(line.startswith("ok ") for line in checks.splitlines()) == len(demo.SHOWN_CASES)
    assert "WRONG" not in result.output
    for rows, columns in demo.SHAPES:
        assert f"{rows} x {columns}" in result.output
    assert "16 of 16" in result.output
    assert "What to try next" in result.output
    assert "with fp8 weights" in result.output and "of 5 next tokens, logits within" in result.output
    generated = json.loads((tmp_path / "report.json").read_text())["generate"]
    assert demo_generate.passages().text(demo_generate.passages().ids[0]) in " ".join(result.output.split())
    ways = [(run["way"], run["batch"]) for run in generated["runs"]]
    assert ways == [(way, batch) for way in demo_generate.WAYS for batch in demo_generate.BATCHES]
    assert all(run["tokens_per_second"] > 0 and run["tokens"] == 5 * run["batch"] for run in generated["runs"])
    assert all(run["same_tokens"] == run["tokens"] for run in generated["runs"])
    errors = generated["largest_difference_of_logits"]
    assert 0 <= errors["with onepass"] < errors["with fp8 weights"] < 0.3, "fp8 weights are used"


@pytest.mark.parametrize("norms", [False, True])
def test_demo_fails_where_nothing_is_patched(
    norms: bool, small_model: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with transformers 5.23, when its wrappers were unknown: no row and no "ok" for what did not run."""
    from transformers.models.llama import modeling_llama

    def wrapped(own: Any) -> Any:
        return functools.wraps(own)(lambda *args, **named: own(*args, **named))

    for cls in (modeling_llama.LlamaDecoderLayer, *[modeling_llama.LlamaRMSNorm] * norms):
        monkeypatch.setattr(cls, "forward", wrapped(cls.forward))
    monkeypatch.setattr(demo, "SHOWN_CASES", ())
    file = tmp_path / "report.json"
    result = run_demo("--device", "cpu", "--report", str(file))
    assert result.exit_code == 1 and "The demo failed." in result.output
    _, rates, model, *_ = re.split(r"Tokens per second: |  What onepass.patch|A dozen checks", result.output)
    for way in ("with onepass", "with fp8 weights"):
        (line,) = [line for line in rates.splitlines() if f"{way}:" in line or f" {way} " in line]
        assert line.startswith("WRONG") and "no layer of LlamaForCausalLM runs as a decode step" in line
    assert not re.search(r"^ok", rates, re.MULTILINE)
    assert bool(re.search(r"^ok", model, re.MULTILINE)) == (not norms)
    assert ("WRONG  nothing was compared: onepass.patch replaced nothing in LlamaForCausalLM" in model) == norms
    report = json.loads(file.read_text())
    assert not report["fine"] and not report["generate"]["fine"]
    assert {run["way"] for run in report["generate"]["runs"]} == {demo_generate.WITHOUT}


def test_demo_notices_weights_that_are_not_fp8(small_model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if `patch` loses the option."""
    model = demo_generate.load(None, "cpu")
    options = demo_generate.WAYS["with fp8 weights"]
    with demo_model.patched(model, **options) as (_, nothing):
        assert nothing == ""
    monkeypatch.setattr(demo_model, "patch", lambda model, **_: onepass.patch(model, decode=True))
    with demo_model.patched(model, **options) as (_, nothing):
        assert nothing == "no weight of LlamaForCausalLM is fp8"


def test_passages_are_long_enough() -> None:
    assert demo_generate.passages().ids.shape == (
        max(demo_generate.BATCHES),
        demo_generate.PROMPT + demo_generate.NEW_TOKENS,
    )


def test_demo_counts_tokens_up_to_the_first_that_differs() -> None:
    expected = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert demo_generate.agreeing(expected.clone(), expected) == 8
    assert demo_generate.agreeing(torch.tensor([[1, 2, 0, 4], [0, 6, 7, 8]]), expected) == 2


def test_demo_bars_show_tokens_per_second() -> None:
    """The rate of a batch, without the time of the prompt and the first token."""
    progress = Progress()
    meter = demo_generate.Meter(progress, progress.add_task("", total=3, rate=""), batch=4)
    for _ in range(4):
        meter.put(torch.zeros(4))
    assert progress.tasks[0].completed == 3 and "tokens/s" in progress.tasks[0].fields["rate"]
    meter.times = [0.0, 10.0, 10.5, 11.0]
    assert meter.rate == 8.0


def test_demo_reports_a_wrong_kernel(
    wrong_kernel: None, small_model: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "SHOWN_CASES", demo.SHOWN_CASES[-1:])
    result = run_demo("--device", "cpu", "--report", str(tmp_path / "report.json"))
    assert result.exit_code == 1
    model, checks = result.output.split("A dozen checks")
    assert "WRONG  same tokens" in model and "WRONG  largest difference" in model
    assert "WRONG  with onepass: " in model
    assert "WRONG" in checks
    assert not json.loads((tmp_path / "report.json").read_text())["fine"]
