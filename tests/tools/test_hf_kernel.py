"""The kernel that is assembled for the Hugging Face Hub is complete and depends on torch and Triton alone."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import hf_kernel
from tools.hf_kernel import SOURCE

ALLOWED = {"cuda": {"torch", "triton"}, "cpu": {"torch", "llvmlite"}}
"""What each build may import besides the standard library. The CPU kernels alone import llvmlite, where it is installed."""
UNUSED = {"numpy": {"gpu/launch.py"}, "transformers": {"engines/fused.py"}}
"""Imports that a kernel does without, and where: numpy is for Triton's interpreter, and transformers' names of weights are
read by transformers alone."""
LOADER = """
import importlib.util, json, pathlib, sys

sys.modules.update(dict.fromkeys(BLOCKED))
variant = pathlib.Path(FOLDER)
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
import torch
"""
"""Loads a build as ``kernels`` does, where some packages cannot be imported."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("hub") / "onepass"
    hf_kernel.assemble(folder)
    return folder


def foreign(variant: Path) -> Iterator[tuple[str, str]]:
    """The packages that the files of a build import, except the standard library, and the files."""
    for path in variant.rglob("*.py"):
        tree = ast.parse(path.read_text())
        typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node)]
        unseen = {inner for node in typing for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""] if not node.level else []
            else:
                continue
            for name in names if node not in unseen else []:
                package = name.split(".")[0]
                if package not in sys.stdlib_module_names:
                    yield package, str(path.relative_to(variant))


@pytest.mark.parametrize("backend", sorted(ALLOWED))
def test_a_build_imports_torch_and_its_compiler_alone(repository: Path, backend: str) -> None:
    imported = set(foreign(repository / f"build/torch-{backend}"))
    packages = {package for package, file in imported if file not in UNUSED.get(package, ())}
    assert packages == ALLOWED[backend]
    assert all("cpu" in file for package, file in imported if package == "llvmlite")


def test_files_are_copies(repository: Path) -> None:
    """Nothing but two generated files and empty ``__init__.py`` differs from the sources; builds hold parts of torch-ext."""
    whole = repository / "torch-ext/onepass"
    for path in whole.rglob("*.py"):
        name = path.relative_to(whole)
        if str(name) not in ("__init__.py", "layers.py"):
            text = path.read_text()
            assert text == (SOURCE / name).read_text() or (name.name == "__init__.py" and not text), name
    for variant in (repository / "build").iterdir():
        for path in variant.rglob("*.py"):
            assert path.read_bytes() == (whole / path.relative_to(variant)).read_bytes()


def test_backends_have_their_kernels(repository: Path) -> None:
    for backend, own, other in (("cpu", "cpu", "gpu"), ("cuda", "gpu", "cpu")):
        variant = repository / f"build/torch-{backend}"
        assert (variant / own).is_dir() and not (variant / other).exists()
        assert (variant / f"ops/rms_norm/{own}_kernel.py").exists()
        assert {path.name for path in (variant / "ops").iterdir()} < {path.name for path in (SOURCE / "ops").iterdir()}


def test_metadata(repository: Path) -> None:
    """By the fields that Hugging Face documents; `tests/engines` has its own package read them."""
    build = tomllib.loads((repository / "build.toml").read_text())
    assert build["general"]["edition"] == 5 and build["torch-noarch"] == {}
    for backend in build["general"]["backends"]:
        variant = repository / f"build/torch-{backend}"
        data = json.loads((variant / "metadata.json").read_text())
        assert all(data[key] == build["general"][key] for key in ("name", "version", "license"))
        assert data["backend"] == {"type": backend} and data["python-depends"] == []
        assert re.fullmatch(rf"_onepass_{backend}_[0-9a-f]{{7}}", data["id"])
        files = [path for path in variant.rglob("*") if path.is_file() and path.name != "metadata.json"]
        digests = {str(f.relative_to(variant)): hashlib.sha256(f.read_bytes()).digest() for f in files}
        assert data["digest"]["files"] == {name: base64.b64encode(d).decode() for name, d in digests.items()}
    card = (repository / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n") and "{{" not in card
    assert (repository / "LICENSE").read_text().strip().startswith("Apache License")


def test_folder_must_be_empty(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        hf_kernel.assemble(tmp_path)


def run(repository: Path, backend: str, code: str, *blocked: str) -> str:
    """What a program prints that loaded a build where ``onepass`` and ``blocked`` cannot be imported."""
    names = f"BLOCKED = {['onepass', 'transformers', 'kernels', *blocked]}\n"
    program = f"FOLDER = {str(repository / f'build/torch-{backend}')!r}\n{names}{LOADER}{code}"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


NORM = """
class LlamaRMSNorm(torch.nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(hidden_size))
        self.variance_epsilon = eps
    def forward(self, hidden_states):
        return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

norm, x = LlamaRMSNorm(64).requires_grad_(False), torch.randn(5, 64)
"""


def test_rms_norm_runs_on_a_cpu(repository: Path) -> None:
    """The op is called: it has its own namespace, named after the id, so copies of onepass do not clash."""
    code = """
from unittest.mock import patch
layers = sys.modules[name + ".engines.layers"]
with patch.object(layers, "form_of", lambda cls: ("hf", 0.0, "variance_epsilon")):
    y = kernel.layers.RMSNorm.forward(norm, x)
compiled = torch.compile(lambda x: kernel.rms_norm(x, norm.weight, 1e-6), backend="eager", fullgraph=True)
print(bool((y - norm(x)).abs().max() < 1e-5), torch.equal(y, compiled(x)), hasattr(getattr(torch.ops, name), "rms_norm"),
      hasattr(torch.ops.onepass, "rms_norm"), "llvmlite" in sys.modules)
"""
    assert run(repository, "cpu", NORM + code, "triton") == "True True True False True\n"


@pytest.mark.parametrize("backend", sorted(ALLOWED))
def test_layer_runs_the_modules_forward_without_kernels(repository: Path, backend: str) -> None:
    code = """
layers = sys.modules[name + ".engines.layers"]
layers.form_of = lambda cls: ("hf", 0.0, "variance_epsilon")
print(torch.equal(kernel.layers.RMSNorm.forward(norm, x), norm(x)))
try:
    kernel.rms_norm(x, norm.weight, 1e-6)
except kernel.Unsupported as error:
    print(error)
"""
    message = {
        "cpu": "the CPU backend needs llvmlite: pip install llvmlite",
        "cuda": "rms_norm: there is no kernel for cpu",
    }
    sources = ["numpy", "llvmlite", "triton"]
    assert run(repository, backend, NORM + code, *sources) == f"True\n{message[backend]}\n"
