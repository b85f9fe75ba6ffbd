"""Every script in examples/ runs in its own process and prints what it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"mla_decode.py"}  # tests/ops/test_mla_cache.py runs it
EXAMPLES = sorted({path.name for path in (ROOT / "examples").glob("*.py")} - ELSEWHERE)
PRINTS = {
    "fp8_linear.py": r"(decoded|_scaled_mm): \[32, 512\] torch\.bfloat16, ([\d.]+)% from bfloat16",
    "prologue.py": r"largest difference from torch: 0\.0\d+; codes torch\.float8_e4m3fn, scale \[128, 1\]",
    "ten_lines.py": r"h is x \+ residual: True; fp8 is within ([\d.]+)% of y's largest",
    "tensor_parallel.py": r"q: (\d+)\.\d+% of this rank's values equal.*\nk: (\d+)\.\d+%",
}


def run(name: str) -> str:
    command = [sys.executable]
    if name == "tensor_parallel.py":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(ROOT / "examples" / name)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_has_an_expected_output() -> None:
    assert set(EXAMPLES) == set(PRINTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_prints_what_it_should(name: str) -> None:
    found = re.search(PRINTS[name], run(name))
    assert found is not None
    if name == "fp8_linear.py":
        assert 0.5 < float(found[2]) < 6
    elif name == "tensor_parallel.py":
        assert int(found[1]) >= 99 and int(found[2]) >= 99
    elif name == "ten_lines.py":
        assert 0 < float(found[1]) < 6
