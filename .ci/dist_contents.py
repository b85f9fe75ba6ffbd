"""Check what a wheel and an sdist contain: `python dist_contents.py DIRECTORY [GLIBC]`."""

import email
import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

LARGEST = 1 << 20
SHIPPED = (".py", ".pyi", ".c", ".h", ".typed", ".css", ".js", ".html", ".json")
"""Suffixes of the files in src/onepass that belong in the wheel."""
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
NATIVE = "onepass/core/_native.abi3.so"
"""In the wheel if there was a compiler."""


def check(directory: Path, root: Path) -> str:
    """Exit if something is missing or does not belong there; else return a summary."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    version = VERSION.search((root / "src/onepass/__init__.py").read_text())[1]  # type: ignore[index]
    (wheel,) = directory.glob("*.whl")
    (sdist,) = directory.glob("*.tar.gz")
    info = f"onepass-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}  # auditwheel adds folders
        sizes = {item.filename: item.file_size for item in archive.infolist()}
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        commands = archive.read(f"{info}/entry_points.txt").decode()
        license = archive.read(f"{info}/licenses/LICENSE")
    package = (path for path in (root / "src" / "onepass").rglob("*") if path.suffix in SHIPPED)
    sources = {str(path.relative_to(root / "src")) for path in package}
    code = {name for name in names if not name.startswith(f"{info}/")}
    native = NATIVE in code
    code -= {NATIVE}
    if code != sources:  # so nothing of tools/ or tests/ is in it either
        raise SystemExit(f"the wheel differs from src/onepass: {sorted(code ^ sources)}")
    large = [name for name, size in sizes.items() if size > LARGEST]
    if large:
        raise SystemExit(f"larger than {LARGEST} bytes: {large}")
    if license != (root / "LICENSE").read_bytes():
        raise SystemExit("the wheel's license is not LICENSE")
    if "onepass = onepass.__main__:main" not in commands:
        raise SystemExit("the wheel has no onepass command")
    if "onepass = onepass.engines.plugin:register" not in commands:
        raise SystemExit("the wheel has no vLLM plugin")
    plain = {_normal(line) for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    if plain != {_normal(line) for line in project["dependencies"]}:
        raise SystemExit(f"the wheel requires {sorted(plain)}")
    for field, expected in (
        ("Version", version),
        ("Requires-Python", project["requires-python"]),
        ("License-Expression", project["license"]),
        ("Author", project["authors"][0]["name"]),
    ):
        if metadata[field] != expected:
            raise SystemExit(f"{field} is {metadata[field]!r}, not {expected!r}")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    if "-cp311-abi3-" not in wheel.name:
        raise SystemExit(f"the wheel is not for Python 3.11 and later: {wheel.name}")
    for needed in ("LICENSE", "README.md", "pyproject.toml", "setup.py", "src/onepass/py.typed"):
        if needed not in packed:
            raise SystemExit(f"the sdist has no {needed}")
    if native and not glibc(wheel.name):
        raise SystemExit(f"the wheel's tag does not say which glibc its extension needs: {wheel.name}")
    about = f"{len(code)} files, {'with' if native else 'without'} the fast path in C, {wheel.stat().st_size} bytes"
    return f"{wheel.name}: {about}; {sdist.name}: {len(packed)} files"


def glibc(name: str) -> tuple[int, int] | None:
    """The lowest glibc that a wheel's tags name; None if they name none."""
    tags = re.findall(r"manylinux_(\d+)_(\d+)_", name)
    return min(((int(major), int(minor)) for major, minor in tags), default=None)


def _normal(requirement: str) -> str:
    """A requirement with its versions in a fixed order."""
    name, versions = re.match(r"([\w.-]+)\s*(.*)", requirement.replace(" ", "")).groups()  # type: ignore[union-attr]
    return name + ",".join(sorted(versions.split(",")))


if __name__ == "__main__":
    print(check(Path(sys.argv[1]), Path(__file__).parents[1]))
    if len(sys.argv) > 2:  # the newest glibc that the wheel may need, such as 2.28
        (name,) = (path.name for path in Path(sys.argv[1]).glob("*.whl"))
        if (glibc(name) or (0, 0)) > tuple(map(int, sys.argv[2].split("."))):
            raise SystemExit(f"{name} needs a newer glibc than {sys.argv[2]}")
