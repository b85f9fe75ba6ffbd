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
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.__main__ import main
from onepass.cli import common, env, source
from onepass.core.backend import launching_with
from onepass.testing import runner
from tests.helpers import command
from tests.helpers.command import Result

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120", "NO_COLOR": "1"}


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


def invoke(*arguments: str) -> Result:
    return command.invoke(main, *arguments)


def onepass_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "onepass", *arguments]
    return subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, check=False)


# --- check ----------------------------------------------------------------------------------------------------------


def test_check_passes() -> None:
    result = invoke("check", "--op", "rms_norm", "--match", "short: |wide: ")
    assert result.exit_code == 0, result.output
    assert re.search(r"short +1/1", result.output) and re.search(r"wide +1/1", result.output)
    assert "2 of 2 passed on cpu" in result.output


def test_check_estimates_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal: the number of cases first, then lines. By a faked clock each case takes 6 seconds."""
    clock = itertools.count(0.0, 6.0)
    monkeypatch.setattr(runner, "select", lambda *_: runner.CASES[:6])
    monkeypatch.setattr(
        runner, "run_case", lambda case, device: runner.Result(case.op, case.name, device, True, "", 6.0)
    )
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    lines = invoke("check").output.splitlines()
    assert lines[0].startswith("6 cases on cpu;")
    assert lines[1] == "3 of 6 after 18 s, about 18 s left" and " left" not in lines[2]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_in_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a faked clock each step takes 15 seconds. The line is replaced, and removed at the end."""
    clock = itertools.count(0.0, 15.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    stream = Terminal()
    progress = common.Progress(3, stream)
    for _ in range(3):
        progress.step()
    clear = "\r\033[K"
    shown = [f"{done} of 3 after {15 * done} s, about {15 * (3 - done)} s left" for done in (1, 2)]
    assert stream.getvalue() == f"{clear}{shown[0]}{clear}{shown[1]}{clear}"


def test_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = common.table(
        [("op", "n", "about"), ("rms_norm", "10", "one two three four five six seven eight")], right=(1,)
    )
    lines = text.splitlines()
    assert lines[:2] == ["op         n  about", "rms_norm  10  one two three four five"]
    assert lines[2:] == [" " * 14 + "six seven eight"]


def test_check_runs_few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all ops, or with ``--op`` of one."""
    monkeypatch.setattr(
        runner, "run_case", lambda case, device: runner.Result(case.op, case.name, device, True, "", 0.0)
    )

    def count(*arguments: str) -> int:
        return int(invoke("check", *arguments).output.split()[0])

    assert count() == len(runner.CASES) < 200
    assert count("--op", "linear") == sum(case.op == "linear" for case in runner.CASES)


def test_check_reports_failures(wrong_kernel: None) -> None:
    result = invoke("check", "--match", "short: x=bf16[5,33]")
    assert result.exit_code == 1
    assert "0/1" in result.output
    assert "0 of 3 passed" in result.output
    assert "FAILED rms_norm short: x=bf16[5,33]" in result.output
    assert "out of bounds" in result.output


def test_check_json(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert invoke("check", "--match", "short: x=bf16[5,33]", "--json", str(file)).exit_code == 0
    report = json.loads(file.read_text())
    assert set(report) == {"device", "passed", "failed", "left_out", "seconds", "results"}
    assert (report["device"], report["passed"], report["failed"], report["left_out"]) == ("cpu", 3, 0, 0)
    assert {r["op"] for r in report["results"]} == {"rms_norm", "rms_norm_fused_fp8", "layer_norm"}
    assert set(report["results"][0]) == {"op", "case", "device", "passed", "message", "seconds"}


def test_check_json_with_failures(wrong_kernel: None) -> None:
    result = invoke("check", "--match", "short: x=bf16[5,33]", "--json", "-")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["failed"] == 3
    assert all(r["message"] for r in report["results"])


def test_check_process() -> None:
    """With JSON on stdout the table goes to stderr."""
    good = onepass_process("check", "--match", "short: x=bf16[5,33]", "--json", "-")
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["passed"] == 3
    assert "3 of 3 passed" in good.stderr


def test_failed_checks_set_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["onepass", "check", "--match", "short: x=bf16[5,33]"])
    with launching_with(lambda family: lambda *_: None):
        assert main() == 1
    assert "0 of 3 passed" in capsys.readouterr().out


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
@pytest.mark.skipif(not common.backend_status()["interpreter"][0], reason="needs Triton's interpreter")
def test_check_interprets_the_gpu_kernels() -> None:
    """A short product runs; what needs a GPU is left out and counted."""
    match = "activation: |static: "
    done = onepass_process("check", "--device", "interpreter", "--op", "linear", "--match", match, "--json", "-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["device"], report["failed"], report["left_out"]) == ("interpreter", 0, 1)
    assert "1 case left out" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "--op", "nonsense"), "no op 'nonsense'; choose from rms_norm"),
        (("check", "--match", "nonsense"), "no case has 'nonsense' in its name"),
        (("check", "--device", "tpu"), "'tpu' is not one of cpu, cuda, interpreter"),
        (("check", "--match", "short: x=bf16[5,33]", "--json", "/nonexistent/file"), "cannot write"),
        (("source", "nonsense"), "no op 'nonsense'; choose from rms_norm"),
        (("source", "rms_norm", "--part", "nonsense"), "choose from 'validation', 'cpu', 'triton'"),
        (("check", "--mat", "short"), "unrecognized arguments: --mat"),
        (("nonsense",), "choose from 'check', 'invariance', 'trace', 'source', 'env'"),
        (("invariance",), "the following arguments are required: --model"),
        (("invariance", "--model", "/nonexistent"), "argument --model: there is no /nonexistent"),
        (("invariance", "--model", "/dev/null"), "argument --model: no config of a model in /dev/null"),
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


# --- invariance -----------------------------------------------------------------------------------------------------


def test_invariance(tmp_path: Path) -> None:
    """A random model of a config, and the same model saved."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 200, "head_dim": 32}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    few = ("--prompts", "4", "--longest", "60", "--new", "3", "--batches", "4", "--chunks", "7", "--device", "cpu")
    files = ("--json", str(tmp_path / "counts.json"), "--markdown", str(tmp_path / "page.md"))
    reports = []
    for _ in range(2):
        result = invoke("invariance", "--model", str(tmp_path), *few, *files)
        assert result.exit_code == 0, result.output
        assert "Qwen3ForCausalLM, bfloat16, cpu: 4 prompts" in result.output
        report = json.loads((tmp_path / "counts.json").read_text())
        assert len(report["patched"]) == 5
        for name, (logits, tokens) in report["patched"].items():
            scored = name.startswith("scored")
            assert (logits, tokens) == (4, None if scored else 4), name
            assert f"| {name} |" in (tmp_path / "page.md").read_text()
            (line,) = [line for line in result.stdout.splitlines() if line.startswith(name)]
            assert line.split()[-2:] == ["4", "-" if scored else "4"]
        assert any(logits < 4 for logits, _ in report["unpatched"].values()), (
            "some logits of the unpatched model differ"
        )
        reports.append(report)
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert reports[0] == reports[1]


def save_config(folder: Path) -> None:
    """Save the config of a tiny Llama."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)


def test_invariance_fails_if_logits_depend_on_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    save_config(tmp_path)
    forward = transformers.LlamaForCausalLM.forward

    @functools.wraps(forward)
    def off(self: Any, input_ids: Tensor, *arguments: Any, **options: Any) -> Any:
        out = forward(self, input_ids, *arguments, **options)
        if len(input_ids) > 1:
            out.logits[-1, -1, 0] += 1.0
        return out

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", off)
    few = ("--prompts", "2", "--longest", "9", "--new", "2", "--batches", "2", "--chunks", "4", "--device", "cpu")
    result = invoke("invariance", "--model", str(tmp_path), *few, "--patched-only", "--json", str(tmp_path / "counts"))
    assert result.exit_code == 1, result.output
    report = json.loads((tmp_path / "counts").read_text())
    assert report["unpatched"] is None
    assert {name: logits for name, (logits, _) in report["patched"].items() if logits < 2} == {
        "generated in batches of 2": 1,
        "prompts in right-padded batches of 2": 1,
    }


def test_invariance_names_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    save_config(tmp_path)
    few = ("--prompts", "1", "--longest", "3", "--new", "1", "--batches", "1", "--chunks", "1", "--device", "cpu")
    result = invoke("invariance", "--model", str(tmp_path), *few, "--json", str(tmp_path / "absent" / "counts"))
    assert result.exit_code == 2
    assert "argument --json: cannot write" in result.output


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


@pytest.mark.parametrize(("part", "text"), [("validation", "def "), ("cpu", "define void")])
def test_source_of_one_part(part: str, text: str) -> None:
    result = invoke("source", "rms_norm", "--part", part)
    assert result.exit_code == 0, result.output
    assert set(re.findall(r"^[#;] --- (\w+):", result.output, re.MULTILINE)) == {part}
    assert text in result.output


# --- importing ------------------------------------------------------------------------------------------------------

STEPS = {
    "import": "import onepass; dir(onepass)",
    "dist": "onepass.dist.qk_rms_norm",
    "parallel": "onepass.dist.QKNormParallel; import onepass.dist",
    "others": "onepass.engines.vllm, onepass.nn; import llvmlite",
}
"""What a new process does after `import torch`, step by step."""
HEAVY = ("cli", "cpu", "dist", "engines", "gpu", "models", "nn", "testing")


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
    assert {"onepass.engines.vllm", "onepass.nn", "llvmlite"} <= set(loaded["others"])


def test_dir_shows_public_names() -> None:
    shown = dir(onepass)
    assert {"dist", "engines", "models", "nn", "patch", "prologues", "rms_norm"} <= set(shown)
    assert not {"checker", "contract", "eager", "library", "ops", "process", "TYPE_CHECKING"} & set(shown)
    assert [name for name in shown if name.startswith("_")] == ["__version__"]
    for name in shown:
        getattr(onepass, name)
    for module in (onepass.engines, onepass.dist, onepass.models):
        assert dir(module) == sorted(module.__all__)
        for name in module.__all__:
            if name != "MlaCache":  # needs transformers
                getattr(module, name)


def test_submodules_are_attributes() -> None:
    """Every module in the README is an attribute of `onepass`, whether or not it was imported before."""
    names = ["engines.vllm", "engines.vllm_0_19", "engines.flashinfer", "engines.sglang", "dist", "models", "nn"]
    for name in names:
        assert attrgetter(name)(onepass).__name__ == f"onepass.{name}"
    assert onepass.__getattr__("dist") is onepass.dist and onepass.engines.__getattr__("vllm") is onepass.engines.vllm
    for module in (onepass, onepass.engines, onepass.dist):
        with pytest.raises(AttributeError, match="has no attribute 'tensorrt'"):
            module.tensorrt  # noqa: B018


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
def test_python_m_onepass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["onepass", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("onepass", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out) == (0, f"onepass {onepass.__version__}\n")
