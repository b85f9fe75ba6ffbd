"""vLLM serves small models with onepass as the provider of its norms: the same tokens as with its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engines.serve import LENGTHS, NEW_TOKENS
from tests.engines.small_models import CONFIGS, LAYERS, WIDE, saved

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 600


class Served:
    """What one server process reported, and its log."""

    def __init__(self, report: dict[str, Any], log: str) -> None:
        self.report = report
        self.log = log

    def __getattr__(self, name: str) -> Any:
        return self.report[name]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def served(directory: Path, family: str, *words: str, attempt: int = 1, **settings: str) -> Served:
    """Start a server, serve, and stop it. ``attempt`` 2 is a restart."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "WARNING"} | settings
    # A file, because processes of vLLM write their logs to the same output.
    file = directory / f"report-{len(list(directory.glob('report-*')))}.json"
    command = [sys.executable, "-m", "tests.engines.serve", str(saved(family, directory)), str(file), *words]
    done = subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(file.read_text())
    how = " ".join((*words, *(f"{name}={value}" for name, value in settings.items())))
    print(f"\n{family} {how or 'native'}: {report['per_second']:.0f} tokens/s on this machine, {len(LENGTHS)} requests")
    return Served(report, done.stdout + done.stderr)


def onepass(directory: Path, family: str, **settings: Any) -> Served:
    return served(directory, family, "--provider", "onepass", **settings)


@pytest.mark.parametrize("family", CONFIGS)
def test_tokens_are_those_of_vllms_own_norms(models: Path, family: str) -> None:
    mine, theirs = onepass(models, family), served(models, family)
    assert mine.tokens == theirs.tokens and mine.alone == theirs.alone
    assert [len(tokens) for tokens in mine.tokens] == [NEW_TOKENS] * len(LENGTHS)
    assert len({tuple(tokens) for tokens in mine.tokens}) == len(LENGTHS), "a model that repeats itself shows nothing"


@pytest.mark.parametrize("family", CONFIGS)
def test_every_norm_is_computed_by_the_provider(models: Path, family: str) -> None:
    mine, theirs = onepass(models, family).calls, served(models, family).calls
    for op in ("rms_norm", "fused_add_rms_norm"):
        assert mine[f"{op}: onepass"] == theirs[f"{op}: native"] > 0
    assert all(name.endswith("onepass") for name in mine) and all(name.endswith("native") for name in theirs)


def test_restarted_server_gives_the_same_tokens(models: Path) -> None:
    first, second = onepass(models, "qwen3"), onepass(models, "qwen3", attempt=2)
    assert first.tokens == second.tokens and first.alone == second.alone


def test_engine_in_its_own_process_loads_the_plugin(models: Path) -> None:
    """As `vllm serve` runs: the model is in a child process, which calls the entry point itself."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    apart = onepass(models, "llama", **settings)
    assert apart.tokens == onepass(models, "llama").tokens
    lines = [line for line in apart.log.splitlines() if "provides rms_norm and fused_add_rms_norm" in line]
    assert any("EngineCore" in line for line in lines), lines


def test_tensor_parallel_ranks_serve(models: Path) -> None:
    """Two processes that add their parts with Gloo: vLLM's tokens, and every norm of each rank is onepass's."""
    cores = sorted(os.sched_getaffinity(0))
    settings = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}  # one for each, or they wait for one another
    mine = served(models, "llama", "--provider", "onepass", "--ranks", "2", **settings)
    theirs = served(models, "llama", "--ranks", "2", **settings)
    assert mine.tokens == theirs.tokens and mine.alone == theirs.alone
    assert [len(tokens) for tokens in mine.tokens] == [NEW_TOKENS] * len(LENGTHS)
    norms = onepass(models, "llama").calls
    assert mine.calls_of_ranks == [norms] * 2 and all(name.endswith("onepass") for name in norms)


def test_batch_invariant_mode_creates_our_layer(models: Path) -> None:
    """On a CPU the layer's forward is vLLM's, which calls the IR op. onepass computes the products too."""
    settings = {"VLLM_BATCH_INVARIANT": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    invariant = onepass(models, "qwen3", **settings)
    created = [line for line in invariant.log.splitlines() if "plugin_layer.OnepassRMSNorm" in line]
    assert len(created) == 4 * LAYERS + 1, "two norms of a layer, two of its heads, and the last"
    assert [len(tokens) for tokens in invariant.tokens] == [NEW_TOKENS] * len(LENGTHS)
    products = 4 * LAYERS + 1  # q, k and v are one, gate and up another; the last one is the head's
    assert invariant.operators["onepass::linear"] == products * NEW_TOKENS


def test_batch_invariant_mode_gives_the_same_logits(models: Path) -> None:
    """Bit for bit, whether eight requests are served at once or one by one; vLLM's attention must not split keys."""
    settings = {"VLLM_CPU_ATTN_SPLIT_KV": "0"}
    mine = served(models, WIDE, "--provider", "onepass", "--logits", VLLM_BATCH_INVARIANT="1", **settings)
    assert len(mine.logits) == NEW_TOKENS and len(mine.logits_alone) == NEW_TOKENS * len(LENGTHS)
    assert by_request(mine.logits) == alone_by_request(mine.logits_alone) and mine.tokens == mine.alone
    assert len({digest for step in mine.logits for digest in step}) > NEW_TOKENS, "constant logits show nothing"
    theirs = served(models, WIDE, "--provider", "onepass", "--logits", **settings)
    pairs = zip(by_request(theirs.logits), alone_by_request(theirs.logits_alone), strict=True)
    equal = sum(a == b for together, alone in pairs for a, b in zip(together, alone, strict=True))
    print(f"with vLLM's products {equal} of {NEW_TOKENS * len(LENGTHS)} rows of logits do not depend on the batch")


def by_request(steps: list[list[str]]) -> list[list[str]]:
    """Digests of each request, from those of the steps in which all were served."""
    return [[step[request] for step in steps] for request in range(len(LENGTHS))]


def alone_by_request(steps: list[list[str]]) -> list[list[str]]:
    """The same from the steps of one request after the other."""
    digests = [digest for (digest,) in steps]
    return [digests[start : start + NEW_TOKENS] for start in range(0, len(digests), NEW_TOKENS)]


def test_command_line_chooses_the_provider(models: Path) -> None:
    """The options in docs/engines.md."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = re.search(r"vllm serve MODEL (--.*)", (ROOT / "docs/engines.md").read_text())
    assert options is not None
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    chosen = EngineArgs.from_cli_args(
        parser.parse_args([*options[1].split(), "--model", str(saved("llama", models))])
    ).ir_op_priority
    assert chosen.rms_norm == chosen.fused_add_rms_norm == ["onepass", "native"]


def test_vllm_plugins_can_leave_it_out(models: Path) -> None:
    """`VLLM_PLUGINS` names the plugins to load; without onepass in it, the provider does not exist."""
    with pytest.raises(AssertionError, match="must be registered implementations"):
        onepass(models, "llama", VLLM_PLUGINS="none")


def test_compiled_model_calls_the_provider(models: Path) -> None:
    """Inductor's code calls onepass once per norm and step. So do eager calls, which are events of a profile too.

    Tokens need not be those of eager mode. With vLLM's native ops they are not either.
    """
    settings = {"VLLM_DISABLE_COMPILE_CACHE": "1"}
    compiled = served(models, "llama", "--provider", "onepass", "--compile", **settings)
    norms = 2 * LAYERS + 1
    assert sum(compiled.operators.values()) == norms * NEW_TOKENS, compiled.operators
    assert sum(onepass(models, "llama").operators.values()) == norms * NEW_TOKENS
    assert [len(tokens) for tokens in compiled.tokens] == [NEW_TOKENS] * len(LENGTHS)
    agree = sum(a == b for a, b in zip(compiled.tokens, onepass(models, "llama").tokens, strict=True))
    print(f"compiled: {agree} of {len(LENGTHS)} sequences equal those of eager mode")
