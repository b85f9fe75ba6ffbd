"""The command line: its output, JSON and exit status, and which modules `import onepass` loads."""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner, Result

import onepass
from onepass.cli import common, demo, demo_generate, demo_model, env, screen, source
from onepass.cli.main import app, main
from onepass.core.backend import launching_with
from onepass.testing import runner

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120", "NO_COLOR": "1"}


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def wrong_kernel() -> Iterator[None]:
    """A kernel that writes zeros."""

    def zeros(call: Any) -> None:
        for name in ("norm", "codes", "scale", "new_residual", "out", "residual_out"):
            tensor = getattr(call, name, None)
            if tensor is not None:
                tensor.view(torch.uint8).zero_()

    with launching_with(lambda family: zeros):
        yield


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def onepass_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onepass.cli", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)


# --- check ----------------------------------------------------------------------------------------------------------


def test_check_passes() -> None:
    result = invoke("check", "--op", "rms_norm", "--match", "short: 5x3")
    assert result.exit_code == 0, result.output
    assert "2/2" in result.output
    assert "2 of 2 passed on cpu" in result.output


def test_check_estimates_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal: the number of cases first, then lines. By a faked clock each case takes 6 seconds."""
    clock = itertools.count(0.0, 6.0)
    cases = [case for case in runner.CASES if case.name.startswith("short: 5x")][:6]
    assert len(cases) == 6
    monkeypatch.setattr(runner, "select", lambda *_: cases)
    monkeypatch.setattr(
        runner, "run_case", lambda case, device: runner.Result(case.op, case.name, device, True, "", 6.0)
    )
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    lines = invoke("check").output.splitlines()
    assert lines[0].startswith("6 cases on cpu;")
    assert lines[1] == "3 of 6 after 18 s, about 18 s left" and " left" not in lines[2]


def test_a_progress_bar_estimates_the_time_left() -> None:
    seconds = itertools.chain([0.0, 0.0], itertools.repeat(30.0))
    console = Console(width=90, file=io.StringIO(), force_terminal=True, color_system=None)
    bar = common.progress_bar(console, get_time=lambda: next(seconds), auto_refresh=False)
    task = bar.add_task("rms_norm", total=10)
    for _ in range(2):
        bar.update(task, advance=1)
    console.print(bar.get_renderable())
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert re.search(r"2/10 0:00:30 0:0[0-9]:[0-9]{2} left", shown), shown
    assert max(map(len, shown.splitlines())) <= 90


def test_check_reports_failures(wrong_kernel: None) -> None:
    result = invoke("check", "--match", "short: 5x33")
    assert result.exit_code == 1
    assert "0/1" in result.output
    assert "0 of 3 passed" in result.output
    assert "FAILED rms_norm short: 5x33 bf16" in result.output
    assert "out of bounds" in result.output


def test_check_json(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert invoke("check", "--match", "short: 5x33", "--json", str(file)).exit_code == 0
    report = json.loads(file.read_text())
    assert set(report) == {"device", "passed", "failed", "left_out", "seconds", "results"}
    assert (report["device"], report["passed"], report["failed"], report["left_out"]) == ("cpu", 3, 0, 0)
    assert {r["op"] for r in report["results"]} == {"rms_norm", "rms_norm_fused_fp8", "layer_norm"}
    assert set(report["results"][0]) == {"op", "case", "device", "passed", "message", "seconds"}


def test_check_json_with_failures(wrong_kernel: None) -> None:
    result = invoke("check", "--match", "short: 5x33", "--json", "-")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["failed"] == 3
    assert all(r["message"] for r in report["results"])


def test_check_process() -> None:
    """With JSON on stdout the table goes to stderr."""
    good = onepass_process("check", "--match", "short: 5x33", "--json", "-")
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["passed"] == 3
    assert "3 of 3 passed" in good.stderr


def test_failed_checks_set_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["onepass", "check", "--match", "short: 5x33"])
    with launching_with(lambda family: lambda *_: None), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "0 of 3 passed" in capsys.readouterr().out


@pytest.mark.full  # triton/test_interpreter.py interprets cases of every op
@pytest.mark.skipif(not common.backend_status()["interpreter"][0], reason="needs Triton's interpreter")
def test_check_interprets_the_gpu_kernels() -> None:
    """5x2 and 5x200 run; 5x20000 is left out and counted."""
    match = "short: 5x2|wide: 5x2"
    done = onepass_process("check", "--device", "interpreter", "--op", "rms_norm", "--match", match, "--json", "-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["device"], report["failed"], report["left_out"]) == ("interpreter", 0, 1)
    assert "1 case left out" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "--op", "nonsense"), "no op 'nonsense'; choose from rms_norm"),
        (("check", "--match", "nonsense"), "no case has 'nonsense' in its name"),
        (("check", "--device", "tpu"), "tpu"),
        (("check", "--match", "short: 5x33", "--json", "/nonexistent/file"), "cannot write"),
        (("demo", "--device", "tpu"), "neither cpu nor cuda"),
        (("demo", "--model", "gpt5"), "'gpt5' is not one of deepseek-v3, olmo2, gemma3, llama"),
        (("demo", "--rounding", "twice"), "'twice' is not one of model, once"),
        (("demo", "--path", "/nonexistent"), "/nonexistent has no config.json"),
        (("source", "nonsense"), "no op 'nonsense'; choose from rms_norm"),
        (("source", "rms_norm", "--part", "nonsense"), "nonsense"),
        (("nonsense",), "No such command"),
    ],
)
def test_usage_errors_are_friendly(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_a_usage_error() -> None:
    result = invoke("check", "--device", "cuda")
    assert result.exit_code == 2
    assert "cuda cannot run here" in result.output


# --- env ------------------------------------------------------------------------------------------------------------


def test_env() -> None:
    result = invoke("env")
    assert result.exit_code == 0, result.output
    for word in (onepass.__version__, metadata.version("torch"), "cpu backend", "triton backend", "float8_e4m3fnuz"):
        assert word in result.output


def test_env_json() -> None:
    result = invoke("env", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["onepass"] == onepass.__version__
    assert set(found["packages"]) == {"torch", "triton", "llvmlite", "numpy", "transformers"}
    assert set(found["backends"]) == {"cpu", "triton", "interpreter"}
    for backend in found["backends"].values():
        assert backend["usable"] == (not backend["why_not"])
    assert found["backends"]["cpu"]["vector"].endswith("bit")


def test_demo_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = invoke("demo")
    assert result.exit_code == 2
    assert "pip install '.[models]'" in result.output
    shown = " ".join(invoke("--help").output.split())
    assert "pip install '.[models]'" in shown, "where the demo is recommended"


def test_env_reports_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status = common.backend_status()
    assert "llvmlite is not installed" in status["cpu"][1]
    assert "Triton is not installed" in status["interpreter"][1]
    assert "llvmlite is not installed" in invoke("check").output


@pytest.mark.parametrize("value", [None, "1"])
def test_env_shows_the_variables(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEPASS_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("ONEPASS_DEBUG", value)
    assert f"ONEPASS_DEBUG {'not set' if value is None else repr(value)} " in " ".join(invoke("env").output.split())
    assert json.loads(invoke("env", "--json").stdout)["environment"]["ONEPASS_DEBUG"] == value


def test_env_knows_every_variable() -> None:
    """The variables that the sources read, and no others."""
    own = Path(env.__file__)
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py") if path != own)
    assert set(re.findall(r"ONEPASS_[A-Z_]+", sources)) == {v for v in env.VARIABLES if v.startswith("ONEPASS_")}


# --- source ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", runner.OPS)
def test_source_of_each_op(op: str) -> None:
    result = invoke("source", op)
    assert result.exit_code == 0, result.output
    parts = re.findall(r"^[#;] --- (\w+): (.+)$", result.output, re.MULTILINE)
    assert [part for part, _ in parts] == sorted((p for p, _ in parts), key=list(source.Part).index)
    assert {part for part, _ in parts} == set(source.Part)
    assert ("cpu", "LLVM IR") in parts and "define void" in result.output
    if not common.backend_status()["triton"][0]:
        assert parts[-1] == ("triton", f"not available: {common.backend_status()['triton'][1]}")


@pytest.mark.parametrize(("part", "text"), [("validation", "def "), ("fastpath", "def "), ("cpu", "define void")])
def test_source_of_one_part(part: str, text: str) -> None:
    result = invoke("source", "rms_norm", "--part", part)
    assert result.exit_code == 0, result.output
    assert set(re.findall(r"^[#;] --- (\w+):", result.output, re.MULTILINE)) == {part}
    assert text in result.output


# --- demo -----------------------------------------------------------------------------------------------------------


def test_demo_cases_exist() -> None:
    names = {(case.op, case.name) for case in runner.CASES}
    assert set(demo.SHOWN_CASES) <= names
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
        ("llama", "model", {"rms_norm, 128": 3, "rms_norm with residual, 128": 2}),
        ("olmo2", "model", {"rms_norm, 128": 5, "qk_rms_norm, 128 + 64": 2}),
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
    result = invoke("demo", "--model", model, "--rounding", rounding, "--device", "cpu", "--report", str(file))
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
    if rounding == "model":
        assert report["bfloat16_equal"] > 0.5


@pytest.mark.full  # test_demo stays
@pytest.mark.slow
def test_demo_of_local_weights(small_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHOWN_CASES", ())
    demo_model.load("llama", None, "cpu").save_pretrained(tmp_path / "weights")
    file = tmp_path / "deep" / "report.json"
    result = invoke("demo", "--path", str(tmp_path / "weights"), "--device", "cpu", "--report", str(file))
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["model"] == str(tmp_path / "weights")


@pytest.mark.slow
def test_demo(small_model: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = invoke("demo", "--device", "cpu", "--report", str(tmp_path / "report.json"))
    assert result.exit_code == 0, result.output
    checks = result.output[result.output.index("A dozen checks") :]
    assert sum(line.startswith("ok ") for line in checks.splitlines()) == len(demo.SHOWN_CASES)
    assert "WRONG" not in result.output
    for rows, columns in demo.SHAPES:
        assert f"{rows} x {columns}" in result.output
    assert "16 of 16" in result.output
    assert "What to try next" in result.output
    assert "with fp8 weights" in result.output and "of 5 next tokens are the same" in result.output
    generated = json.loads((tmp_path / "report.json").read_text())["generate"]
    ways = [(run["way"], run["batch"]) for run in generated["runs"]]
    assert ways == [(way, batch) for way in demo_generate.WAYS for batch in demo_generate.BATCHES]
    assert all(run["tokens_per_second"] > 0 and run["tokens"] == 5 * run["batch"] for run in generated["runs"])
    assert all(run["same_tokens"] == run["tokens"] for run in generated["runs"] if run["way"] == demo_generate.WITHOUT)
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
    result = invoke("demo", "--device", "cpu", "--report", str(file))
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
    result = invoke("demo", "--device", "cpu", "--report", str(tmp_path / "report.json"))
    assert result.exit_code == 1
    model, checks = result.output.split("A dozen checks")
    assert "WRONG  same tokens" in model and "WRONG  largest difference" in model
    assert "WRONG  with onepass: after the same text" in model
    assert "WRONG" in checks
    assert not json.loads((tmp_path / "report.json").read_text())["fine"]


# --- importing ------------------------------------------------------------------------------------------------------

STEPS = {
    "import": "import onepass; dir(onepass)",
    "dist": "onepass.dist.qk_rms_norm",
    "parallel": "onepass.dist.QKNormParallel; import onepass.dist",
    "others": "onepass.compat.vllm, onepass.nn; import rich",
}
"""What a new process does after `import torch`, step by step."""
HEAVY = ("bench", "cli", "compat", "cpu", "dist", "integrations", "nn", "testing", "gpu")


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """The modules that each of the `STEPS` loads."""
    program = "import json, sys, torch\nfound = {}\n"
    for step, code in STEPS.items():
        program += f"before = set(sys.modules)\n{code}\nfound[{step!r}] = sorted(set(sys.modules) - before)\n"
    command = [sys.executable, "-c", f"{program}print(json.dumps(found))"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_import_is_light(loaded: dict[str, list[str]]) -> None:
    """Beyond torch, about fifty modules of onepass, no other package, no backend and no tools."""
    found = loaded["import"]
    assert [name for name in found if name.split(".")[0] != "onepass"] == []
    assert [name for name in found if name.startswith(tuple(f"onepass.{part}" for part in HEAVY))] == []
    assert 20 < len(found) < 80
    assert all((ROOT / "src" / "onepass" / part).is_dir() for part in HEAVY)


def test_dist_loads_dtensors_only_for_its_styles(loaded: dict[str, list[str]]) -> None:
    heavy = {"torch.distributed.tensor", "torch._dynamo"}
    assert "onepass.dist" in loaded["dist"] and not heavy & {*loaded["import"], *loaded["dist"]}
    assert "torch.distributed.tensor" in loaded["parallel"]


def test_the_import_test_sees_heavy_modules(loaded: dict[str, list[str]]) -> None:
    assert {"onepass.compat.vllm", "onepass.nn", "rich"} <= set(loaded["others"])


def test_dir_shows_public_names() -> None:
    shown = dir(onepass)
    assert {"compat", "dist", "integrations", "nn", "patch", "prologues", "rms_norm"} <= set(shown)
    assert not {"checker", "contract", "eager", "library", "ops", "process", "TYPE_CHECKING"} & set(shown)
    assert [name for name in shown if name.startswith("_")] == ["__version__"]
    for name in shown:
        getattr(onepass, name)
    for module in (onepass.compat, onepass.dist, onepass.integrations):
        assert dir(module) == sorted(module.__all__)
        for name in module.__all__:
            if name != "MlaCache":  # needs transformers
                getattr(module, name)


def test_submodules_are_attributes() -> None:
    """Every module in the README is an attribute of `onepass`, whether or not it was imported before."""
    names = ["compat.vllm", "compat.vllm_0_19", "compat.flashinfer", "compat.sglang", "dist", "integrations", "nn"]
    for name in names:
        assert attrgetter(name)(onepass).__name__ == f"onepass.{name}"
    assert onepass.__getattr__("dist") is onepass.dist and onepass.compat.__getattr__("vllm") is onepass.compat.vllm
    for module in (onepass, onepass.compat, onepass.dist):
        with pytest.raises(AttributeError, match="has no attribute 'tensorrt'"):
            module.tensorrt  # noqa: B018


@pytest.mark.parametrize("module", ["onepass", "onepass.cli", "onepass.cli.main"])
@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
def test_python_m_onepass(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The package, its command line and the module of that, each as what ``python -m`` runs."""
    monkeypatch.setattr(sys, "argv", ["onepass", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out) == (0, f"onepass {onepass.__version__}\n")
