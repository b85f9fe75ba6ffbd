"""`tools.sanitize_native`: the extension that it compiles is the one that runs, and a mistake in its sources ends the process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onepass.core import build
from tools import sanitize_native

CALLS = """
import torch, onepass
from onepass.core import native
for x in (torch.randn(2, 64), torch.empty(0, 1, 1).expand(0, 2**40, 2**40)):
    for _ in range(3):
        try:
            onepass.rms_norm(x, torch.ones(64))
        except onepass.ContractError:
            pass
print(native.describe(), native._native.__file__)
"""

MISTAKES = {
    "none": ("", "", "", ""),
    "signed overflow": (
        "key.c",
        "expected *= (uint64_t)size;",
        "expected = (uint64_t)((int64_t)expected * size);",
        "signed integer overflow",
    ),
    "a short allocation": (
        "module.c",
        "calloc(1, sizeof(Entry) + size)",
        "calloc(1, sizeof(Entry) + size - 8)",
        "heap-buffer-overflow",
    ),
}


@pytest.mark.full  # compiles the extension; `make sanitize-native` runs one without mistakes
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_the_process(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    file, right, wrong, report = MISTAKES[mistake]
    digest = build.digest()
    shutil.copytree(build.HERE / "csrc", tmp_path / "csrc")
    if mistake != "none":
        text = (tmp_path / "csrc" / file).read_text()
        assert text.count(right) == 1
        (tmp_path / "csrc" / file).write_text(text.replace(right, wrong))
    monkeypatch.setattr(build, "HERE", tmp_path)
    try:
        sanitize_native.compile_into(tmp_path, "-USOURCES_DIGEST", f'-DSOURCES_DIGEST="{digest}"')
    except FileNotFoundError as error:
        pytest.skip(f"nothing to build with: {error}")
    environment = sanitize_native.environment(tmp_path)
    environment["PYTHONPATH"] += f":{Path(__file__).parents[2] / 'src'}"
    done = subprocess.run([sys.executable, "-c", CALLS], env=environment, capture_output=True, text=True, check=False)
    if mistake == "none":
        assert (done.returncode, done.stdout.split()) == (0, ["on", str(tmp_path / build.NAME)]), done.stderr
    else:
        assert done.returncode != 0 and report in done.stderr and file in done.stderr, done.stderr
