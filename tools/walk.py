"""``python -m tools.walk``: how far a call goes through the package, and how the package is laid out.

A walk lists the files of the package whose functions a call runs (``sys.setprofile``), and those that it only imports.
A file hop is a call of a function in another file than that of its nearest caller in the package; imports, code outside
of the package and generated code have none. Each walk has its own process and an empty kernel cache. GPU kernels run in
Triton's interpreter, on one row. The interpreter replaces launches, so the C extension repeats no such call.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module, util
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from tools import compact

ROOT: Final = Path(__file__).parents[1]
LONGEST: Final = 60
"""Lines of code that a function outside of kernels may have."""
FOLDERS: Final = 4
"""A name that occurs in this many folders belongs to an op, if ops have no folders."""
LATER: Final = 6
"""Calls before the one that stands for all later ones: by then it is recorded."""


class Walk(NamedTuple):
    """What a call ran: files with functions that ran, hops between them, and files that it only imported."""

    files: list[str]
    hops: int
    imported: list[str]


# --- calls ----------------------------------------------------------------------------------------------------------


def walk(call: Callable[[], object], package: Path, without: Path | None = None) -> Walk:
    """The walk of one call; the file or folder ``without`` does not count."""
    inside, hops = f"{package.resolve()}{os.sep}", 0
    outside = f"{without.resolve()}" if without else "\0"
    files, imported = dict[str, None](), dict[str, None]()

    def counts(file: str) -> bool:
        return file.startswith(inside) and file != outside and not file.startswith(f"{outside}{os.sep}")

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal hops
        if event != "call" or not counts(frame.f_code.co_filename):
            return
        file, *callers = [code for code in _codes(frame) if counts(code.co_filename)]
        name = file.co_filename.removeprefix(inside)
        if any(code.co_name == "<module>" for code in (file, *callers)):
            imported[name] = None
            return
        files[name] = None
        hops += not callers or callers[0].co_filename != file.co_filename

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return Walk(list(files), hops, [name for name in imported if name not in files])


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def package_folder() -> Path:
    """Where onepass is imported from."""
    spec = util.find_spec("onepass")
    if spec is None or spec.origin is None:
        raise SystemExit("onepass is not installed: set PYTHONPATH=src")
    return Path(spec.origin).parent


def _interpreter(package: Path) -> tuple[AbstractContextManager[None], Path]:
    """The project's own way to interpret GPU kernels, in whichever module it is, and that module's folder or file."""
    for top, prefix in ((package, "onepass"), *((ROOT / name, name) for name in ("benchmarks", "tests", "tools"))):
        for file in sorted(top.rglob("*.py")):
            if re.search(r"^def running_on\(", file.read_text(), re.MULTILINE):
                parts = file.relative_to(top).with_suffix("").parts
                module = import_module(".".join((prefix, *parts)).removesuffix(".__init__"))
                return module.running_on("interpreter"), file if file.parent == package else file.parent
    raise SystemExit("no module has running_on()")


def measure_norm(device: str) -> dict[str, Walk]:
    """The first and a later `onepass.rms_norm` of this process."""
    import torch

    import onepass

    package = package_folder()
    context, harness = (nullcontext(), None) if device == "cpu" else _interpreter(package)
    x, gamma = torch.randn(1, 256).bfloat16(), torch.randn(256).bfloat16()
    with context, torch.inference_mode():
        first = walk(lambda: onepass.rms_norm(x, gamma), package, harness)
        for _ in range(LATER):
            onepass.rms_norm(x, gamma)
        return {"first": first, "later": walk(lambda: onepass.rms_norm(x, gamma), package, harness)}


def measure_decode() -> dict[str, Walk]:
    """`onepass.patch` of a Llama with two layers, and one decode step of it."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import onepass

    package = package_folder()
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32).eval()
    patched = walk(lambda: onepass.patch(model, decode=True), package)
    with torch.inference_mode():
        cache = model(torch.tensor([[3, 5, 7]]), use_cache=True).past_key_values
        token = torch.tensor([[11]])

        def step() -> None:
            model(token, past_key_values=cache, use_cache=True)

        for _ in range(LATER):
            step()
        return {"patch": patched, "step": walk(step, package)}


MEASURES: Final[Mapping[str, tuple[str, Callable[[], dict[str, Walk]], str]]] = {
    "cpu": ("rms_norm, CPU", lambda: measure_norm("cpu"), "1"),
    "cpu, no C": ("rms_norm, CPU, without C", lambda: measure_norm("cpu"), "0"),
    "gpu": ("rms_norm, GPU", lambda: measure_norm("interpreter"), "1"),
    "gpu, no C": ("rms_norm, GPU, without C", lambda: measure_norm("interpreter"), "0"),
    "decode": ("decode=True, CPU", measure_decode, "1"),
    "decode, no C": ("decode=True, CPU, without C", measure_decode, "0"),
}
"""What is walked, by name: its title, what measures it, and ONEPASS_NATIVE."""


def walked(name: str) -> dict[str, Walk]:
    """Measure in a new process."""
    title, _, native = MEASURES[name]
    with tempfile.TemporaryDirectory() as folder:
        setting = {"ONEPASS_NATIVE": native, "ONEPASS_CACHE_DIR": folder, "XDG_CACHE_HOME": folder}
        setting |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if name.startswith("gpu") else {}
        command = [sys.executable, "-m", "tools.walk", "--measure", name]
        ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **setting}, cwd=ROOT)
    if ended.returncode:
        raise SystemExit(f"{title}: {ended.stderr.strip()}")
    walks: dict[str, list[Any]] = json.loads(ended.stdout.splitlines()[-1])
    return {what: Walk(*values) for what, values in walks.items()}


# --- sources --------------------------------------------------------------------------------------------------------


def python_files(package: Path) -> list[Path]:
    """The package's Python files."""
    return sorted(package.rglob("*.py"))


def rooms(package: Path, suffixes: Iterable[str] = (".py",)) -> dict[str, tuple[int, int]]:
    """Lines and files of each folder directly below the package; "." has the files beside these folders."""
    sizes: dict[str, tuple[int, int]] = {}
    for file in sorted(file for file in package.rglob("*") if file.suffix in suffixes):
        place = file.relative_to(package)
        room = place.parts[0] if len(place.parts) > 1 else "."
        lines, files = sizes.get(room, (0, 0))
        sizes[room] = lines + len(file.read_text().splitlines()), files + 1
    return sizes


def exec_sites(package: Path) -> list[str]:
    """Calls of `exec`, as file:line."""
    sites = []
    for file in python_files(package):
        sites += [
            f"{file.relative_to(package)}:{node.lineno}"
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "exec"
        ]
    return sites


def any_annotations(package: Path) -> int:
    """How often `: Any` occurs."""
    return sum(len(re.findall(r":\s*Any\b", file.read_text())) for file in python_files(package))


def op_names(package: Path) -> list[str]:
    """The ops: folders below a folder `ops`, or else names of files that occur in `FOLDERS` folders."""
    folders = {file.parent.name for file in python_files(package) if file.parent.parent.name == "ops"}
    if folders:
        return sorted(folders)
    places: dict[str, set[Path]] = {}
    for file in python_files(package):
        places.setdefault(file.stem, set()).add(file.parent)
    return sorted(name for name, parents in places.items() if len(parents) >= FOLDERS and not name.startswith("_"))


def op_files(package: Path) -> dict[str, list[str]]:
    """The files of each op: those in its folder, and those with its name, or one that begins with it, elsewhere."""
    names = op_names(package)
    files: dict[str, list[str]] = {name: [] for name in names}
    for file in python_files(package):
        place = file.relative_to(package)
        owners = [name for name in names if name in place.parts[:-1]]
        owners = owners or [name for name in names if f"{place.stem}_".startswith(f"{name}_")]
        if owners:
            files[max(owners, key=len)].append(str(place))
    return files


def long_functions(folder: Path) -> dict[str, int]:
    """The lines of code of functions with more than `LONGEST`, outside of kernels and of their files."""
    lengths = {}
    for file in python_files(folder):
        if file.stem.endswith(("_kernel", "_kernels")):
            continue
        source = file.read_text()
        for name, function in _functions(ast.parse(source)):
            if (lines := code_lines(function, source.splitlines())) > LONGEST:
                lengths[f"{file.relative_to(folder)}:{name}"] = lines
    return lengths


def _functions(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions with their qualified names, without jitted ones."""
    for child in ast.iter_child_nodes(node):
        name = scope
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{scope}.{child.name}".lstrip(".")
            if any("jit" in ast.unparse(decorator).split(".") for decorator in child.decorator_list):
                continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, child
        yield from _functions(child, name)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, source: list[str]) -> int:
    """Lines of the body without its docstring, comments and empty lines."""
    body = function.body[ast.get_docstring(function) is not None :]
    if not body:
        return 0
    lines = (line.strip() for line in source[body[0].lineno - 1 : function.end_lineno])
    return sum(bool(line) and not line.startswith("#") for line in lines)


def json_lines(root: Path) -> int:
    """Lines of the JSON files that git knows."""
    listed = ["git", "-C", str(root), "ls-files", "-z", "--cached", "*.json", "*.jsonl"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    files = (root / name for name in names if name)
    return sum(len(file.read_bytes().splitlines()) for file in files if file.exists())


# --- the table ------------------------------------------------------------------------------------------------------


def structure(package: Path, root: Path) -> dict[str, Any]:
    """What sources tell, as plain data."""
    return {
        "rooms": rooms(package),
        "C": rooms(package, (".c", ".h")),
        "exec": exec_sites(package),
        "any": any_annotations(package),
        "ops": op_files(package),
        "long": long_functions(package),
        "json": json_lines(root),
        "built": any(package.rglob("*.so")),
    }


def text(report: Mapping[str, Any]) -> str:
    """A plain table."""
    rows = [("C extension", "built" if report["built"] else "not built, so all walks are without C")]
    for name, walks in report.get("walks", {}).items():
        for what, (files, hops, imported) in walks.items():
            more = f", {len(imported)} more imported" if imported else ""
            rows.append((f"{MEASURES[name][0]}: {what}", f"{len(files)} files, {hops} hops{more}"))
    for room, (lines, files) in report["rooms"].items():
        rows.append((f"src/onepass/{room}", f"{lines:,} lines, {files} files"))
    lines, files = (sum(numbers) for numbers in zip(*report["rooms"].values(), strict=True))
    rows.append(("Python in all", f"{lines:,} lines, {files} files"))
    rows.append(("C in all", f"{sum(lines for lines, _ in report['C'].values()):,} lines"))
    rows += [(f"op {name}", f"{len(files)} files") for name, files in report["ops"].items()]
    rows.append(("exec", f"{len(report['exec'])} sites"))
    rows.append((": Any", str(report["any"])))
    rows.append((f"functions of more than {LONGEST} lines", str(len(report["long"]))))
    rows.append(("committed JSON", f"{report['json']:,} lines"))
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.walk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write everything, with the names of all files, here")
    parser.add_argument("--no-calls", action="store_true", help="only what sources tell")
    parser.add_argument("--measure", choices=tuple(MEASURES), help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(MEASURES[options.measure][1]()))
        return
    report = structure(package_folder(), ROOT)
    if not options.no_calls:
        report = {"walks": {name: walked(name) for name in MEASURES}, **report}
    print(text(report), end="")
    if options.json:
        options.json.write_text(compact.dumps(report))


if __name__ == "__main__":
    main()
