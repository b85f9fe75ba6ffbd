"""Assembles a kernel for the Hugging Face Hub from src/: ``python -m tools.hf_kernel OUT``.

::

    OUT/build.toml, CARD.md            a project of kernel-builder, section torch-noarch
    OUT/torch-ext/onepass/             its sources, for all backends
    OUT/README.md                      the card
    OUT/build/torch-cpu, torch-cuda/   what the package ``kernels`` loads: the sources that the backend needs, metadata.json

The sources are the modules of onepass that the layers need, unchanged. A module that another imports, at its top or inside a
function, is needed. So are the ones that onepass imports by name (`KERNELS`). The ``__init__.py`` of a package is copied
if something imports a name that it defines, else an empty one stands for it.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = ROOT / "src/onepass"
NAME: Final = "onepass"
VERSION: Final = 0
"""Of the kernel's interface; by Hugging Face's convention 0 is a version that may still change."""
LICENSE: Final = "Apache-2.0"
LAYERS: Final = ("engines.layers", "engines.fused")
OPS: Final = ("rms_norm", "linear")
KERNELS: Final = {
    "cpu": [f"ops.{op}.{module}" for op in OPS for module in ("cpu", "cpu_kernel")],
    "cuda": [f"ops.{op}.gpu" for op in OPS],
}
"""The modules of each backend that are imported by name."""
INIT: Final = '''"""onepass: RMSNorm for transformers models. `layers` has the layers for `kernels.kernelize`."""

from . import layers
from .errors import ContractError, Unsupported
from .ops.rms_norm.op import rms_norm

__all__ = ["ContractError", "Unsupported", "layers", "rms_norm"]
'''
EXPORTS: Final = '''"""Layers for `kernels.kernelize`."""

from .engines.fused import RMSNormMLP
from .engines.layers import RMSNorm

__all__ = ["RMSNorm", "RMSNormMLP"]
'''
BUILD: Final = f"""[general]
name = "{NAME}"
version = {VERSION}
edition = 5
license = "{LICENSE}"
backends = {json.dumps([*KERNELS])}

[torch-noarch]
"""
CARD: Final = f"""---
library_name: kernels
license: {LICENSE.lower()}
tags:
- kernels
---

# onepass

RMSNorm, alone or with the MLP after it, for inference with transformers: in one pass, rounded as the layer it replaces. A row
is bit-identical alone and in any batch.

```python
from pathlib import Path
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping

layer = LocalLayerRepository(Path("this/folder"), layer_name="RMSNorm")
modes = {{Mode.INFERENCE: layer, Mode.INFERENCE | Mode.TORCH_COMPILE: layer}}
with use_kernel_mapping({{"RMSNorm": {{"cuda": modes}}}}, inherit_mapping=False):
    model = kernelize(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE, device="cuda")
```

## Layers and functions

- `layers.RMSNorm` replaces every layer that transformers registers as "RMSNorm". It reads the code of each class to learn
  how that class rounds, and calls the module's own forward if the code is unknown, the weight's dtype differs from the
  input's, or a gradient is needed. It works under `torch.compile` without graph breaks.
- `layers.RMSNormMLP` is for the n-to-1 form of transformers' `KernelConfig`: Llama's MLP and the norm before it, in two
  launches for up to 16 tokens. For more tokens it calls the modules' own forward.
- `rms_norm(x, weight, eps)` is the function, with arguments for residual addition, gates and both roundings.

## Hardware

- `torch-cuda` needs Triton 3.6 or later, which CUDA builds of PyTorch include, and nothing else. onepass's GPU kernels
  were run on an H200 and compile for an A100 and a B200. This repository itself was never loaded on a GPU.
- `torch-cpu` compiles its kernels with llvmlite (`pip install llvmlite`) on Linux. Without llvmlite the layer calls the
  module's own forward, and `rms_norm` raises `Unsupported`.

## Limits

- Python 3.11 or later, PyTorch 2.11 or later. Inference only: there is no backward.
- bfloat16, float16 and float32.
- A CUDA build of PyTorch loads `torch-cuda`, which has no CPU kernels: layers on the CPU keep their own forward.
"""


def _path(module: str) -> Path | None:
    """The file of a module of onepass, by its dotted name inside the package."""
    path = SOURCE.joinpath(*module.split("."))
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if file.exists()), None)


def imports(text: str, module: str, is_package: bool) -> Iterator[str]:
    """The modules of onepass that a module imports, except those that only type checkers see."""
    parts = module.split(".")
    package = parts if is_package else parts[:-1]
    tree = ast.parse(text)
    checked = (
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    unseen = {inner for node in checked for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and node not in unseen:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            source = ".".join(filter(None, base))
            for alias in node.names:
                submodule = f"{source}.{alias.name}".strip(".")
                yield submodule if _path(submodule) else source


def closure(modules: Iterable[str]) -> dict[str, Path]:
    """These modules and all that they need, by dotted name."""
    needed: dict[str, Path] = {}
    waiting = [*modules]
    while waiting:
        module = waiting.pop()
        if module not in needed:
            path = _path(module)
            if path is None:
                raise FileNotFoundError(f"onepass has no module {module!r}")
            needed[module] = path
            waiting += imports(path.read_text(), module, path.name == "__init__.py")
    return needed


def sources(backends: Iterable[str]) -> dict[str, str]:
    """The files of the kernel for some backends: text by path."""
    modules = closure([*LAYERS, *(module for backend in backends for module in KERNELS[backend])])
    files = {str(path.relative_to(SOURCE)): path.read_text() for path in modules.values()}
    for path in [Path(file) for file in files]:
        for folder in path.parents[:-1]:
            files.setdefault(str(folder / "__init__.py"), "")
    return dict(sorted((files | {"__init__.py": INIT, "layers.py": EXPORTS}).items()))


def metadata(files: dict[str, str], backend: str) -> str:
    """metadata.json: the id, which is the module's name and the namespace of its ops, follows from the contents."""
    hashes = {path: hashlib.sha256(text.encode()).digest() for path, text in files.items()}
    identity = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:7]
    content = {
        "name": NAME,
        "id": f"_{NAME}_{backend}_{identity}",
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {path: base64.b64encode(digest).decode() for path, digest in hashes.items()},
        },
    }
    return json.dumps(content, indent=2) + "\n"


def assemble(folder: Path) -> None:
    """Write the repository into an empty or new folder."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    _write(folder, {"build.toml": BUILD, "CARD.md": CARD, "README.md": CARD, "LICENSE": (ROOT / "LICENSE").read_text()})
    _write(folder / "torch-ext" / NAME, sources(KERNELS))
    for backend in KERNELS:
        files = sources([backend])
        _write(folder / "build" / f"torch-{backend}", files | {"metadata.json": metadata(files, backend)})


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.hf_kernel", description="Assemble a kernel for the Hub.")
    parser.add_argument("out", type=Path, help="an empty or new folder")
    out: Path = parser.parse_args().out
    assemble(out)
    for variant in sorted((out / "build").iterdir()):
        files = [path for path in variant.rglob("*") if path.is_file()]
        print(f"{variant}: {len(files)} files, {sum(path.stat().st_size for path in files) >> 10} KiB")


if __name__ == "__main__":
    main()
