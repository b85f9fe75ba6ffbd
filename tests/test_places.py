"""The order of a row's sum is one of columns: every tile that a row may get adds it up to the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


def test_every_tile_adds_a_row_up_as_defined() -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(HERE / "places_worker.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    *wrong, tried = done.stdout.splitlines()
    assert not wrong
    assert int(tried.split()[0]) > 150
