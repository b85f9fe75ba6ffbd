"""What is published, and by which recipe: metadata, workflows, templates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import onepass

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHECK = "import sys; sys.path.insert(0, '.ci'); import dist_contents as d; print(d.glibc(sys.argv[1]))"


def steps(name: str) -> list[dict[str, Any]]:
    workflow = yaml.safe_load((ROOT / ".github/workflows" / name).read_text())
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_the_version_is_in_one_place() -> None:
    """setuptools and the release workflow read it from the package."""
    project = PYPROJECT["project"]
    assert project["dynamic"] == ["version"] and "version" not in project
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "onepass.__version__"}
    assert "version:" not in (ROOT / "CITATION.cff").read_text().replace("cff-version:", "")
    (text,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "src/onepass/__init__.py").read_text(), re.MULTILINE)
    assert text == onepass.__version__
    assert re.search(rf"^## {re.escape(text)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_no_address_is_invented() -> None:
    """There is no repository, site or mailbox to name yet; CONTRIBUTING.md lists where theirs go."""
    project = PYPROJECT["project"]
    assert project["authors"] == [{"name": "onepass contributors"}] and "urls" not in project
    for name in ("pyproject.toml", "CITATION.cff", "SECURITY.md", "mkdocs.yml"):
        assert not re.search(r"[\w.]+@[\w-]+\.\w|https?://", (ROOT / name).read_text()), name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_few_rights_and_a_limit(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert name == "publish" or job["timeout-minutes"] <= 90


def test_every_python_is_tested() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    run = [*jobs["other-pythons"]["strategy"]["matrix"]["python"]]
    run += [step["with"]["python-version"] for step in jobs["all"]["steps"] if "python-version" in step.get("with", {})]
    minors = [int(version.split(".")[1]) for version in PYPROJECT["tool"]["onepass"]["tested"]["python"]]
    assert sorted(run) == [f"3.{minor}" for minor in range(minors[0], minors[1] + 1)]


def test_a_release_is_built_where_glibc_is_old_and_proven() -> None:
    (build,) = (step["run"] for step in steps("release.yml") if ".ci/dist" in step.get("run", ""))
    limit = re.search(r"GLIBC=(\d+\.\d+)", build)
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    (container,) = re.findall(r"^ +container: (.*)$", workflow, re.MULTILINE)
    assert limit and limit[1] in container
    assert "__version__" in workflow and "CHANGELOG.md" in workflow and "password" not in workflow.split("jobs:")[1]


@pytest.mark.parametrize(
    ("name", "lowest"),
    [
        ("onepass-0.1.0-cp311-abi3-manylinux_2_34_x86_64.whl", "(2, 34)"),
        ("onepass-0.1.0-cp311-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", "(2, 17)"),
        ("onepass-0.1.0-cp311-abi3-linux_x86_64.whl", "None"),
    ],
)
def test_a_wheel_says_which_glibc_it_needs(name: str, lowest: str) -> None:
    command = [sys.executable, "-B", "-c", CHECK, name]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == lowest


def test_templates_and_hooks_are_valid() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        template = yaml.safe_load(path.read_text())
        assert path.name == "config.yml" or all({"type", "attributes"} <= part.keys() for part in template["body"])
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff", "ruff-format", "mypy"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == PYPROJECT["project"]["license"]


def test_make_assigns_each_variable_once() -> None:
    """`?=` leaves a variable as it is, so two uses of one name give a target the value of another."""
    names = re.findall(r"^(\w+) *[?:]?= *", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(names) > 20 and {name for name in names if names.count(name) > 1} == set()


@pytest.mark.parametrize("target", ["newest", "fuzz", "mutate", "demo", "bench"])
def test_make_passes_no_arguments_by_itself(target: str) -> None:
    command = ["make", "-n", "-C", str(ROOT), "--no-print-directory", target]
    alone = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # no options of the make above
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=alone).stdout
    words = printed.replace("\\\n", " ").splitlines()[-1].split()
    module = words[words.index("-m") + 1 :]
    assert module[0] in (f"tools.{target}", "tools.mutation", "examples.demo", "benchmarks")
    assert all(word.startswith("-") or words[words.index(word) - 1].startswith("-") for word in module[1:])
