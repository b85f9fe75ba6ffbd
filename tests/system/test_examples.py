"""Every script in examples/ runs as a main program and prints what it should."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LONG = ("fp8_linear.py", "generate.py", "prologue.py", "tensor_parallel.py")
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
PRINTS = {
    "batch_invariant.py": r"alone: 0 of 66 log-probabilities differ\nin batches of 4 and 2: 0 differ",
    "fp8_checkpoint.py": r"1\.50 MiB of weights, bfloat16 would be 3\.00\nwithin ([\d.]+)% of",
    "generate.py": r"without onepass: +[\d.]+ tokens/s\nwith onepass: +[\d.]+ .*\nwith fp8 weights: +[\d.]+ .*, ([1-9]\d*) weights",
    "own_model.py": r"2 x ScaleNorm norm: rms_norm, rounding once\nlargest difference: \de-0[78] of",
    "fp8_linear.py": r"(decoded|_scaled_mm): \[32, 512\] torch\.bfloat16, ([\d.]+)% from bfloat16",
    "mla_decode.py": r"24 tokens cached, latents within (.*)% of float64",
    "prologue.py": r"largest difference from torch: 0\.0\d+; codes torch\.float8_e4m3fn, scale \[128, 1\]",
    "ten_lines.py": r"h is x \+ residual: True; fp8 is within ([\d.]+)% of y's largest",
    "tensor_parallel.py": r"q: (\d+)\.\d+% of this rank's values equal.*\nk: (\d+)\.\d+%",
}


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What an example prints. One with several ranks has processes of its own; the others run in this one."""
    path = str(ROOT / "examples" / name)
    if name == "tensor_parallel.py":
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *ranks, path]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout
    with torch.random.fork_rng():
        runpy.run_path(path, run_name="__main__")
    return capsys.readouterr().out


def test_every_example_has_an_expected_output() -> None:
    assert set(EXAMPLES) == set(PRINTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in LONG else []) for name in EXAMPLES]
)
def test_example_prints_what_it_should(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    printed = run(name, capsys)
    found = re.search(PRINTS[name], printed)
    assert found is not None, printed
    if name == "fp8_linear.py":
        assert 0.5 < float(found[2]) < 6
    elif name == "fp8_checkpoint.py":
        assert 0 < float(found[1]) < 1
    elif name == "mla_decode.py":
        errors = [float(error) for error in re.findall(PRINTS[name], printed)]
        assert len(errors) == 4 and 0 < max(errors) < 4
    elif name == "tensor_parallel.py":
        assert int(found[1]) >= 99 and int(found[2]) >= 99
    elif name == "ten_lines.py":
        assert 0 < float(found[1]) < 6
