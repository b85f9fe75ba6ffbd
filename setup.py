"""Builds the fast path in C where a compiler is found. Everything else is in pyproject.toml."""

import runpy
from glob import glob

from setuptools import Extension, setup

FOLDER = "src/onepass/core"
# by its path: importing the package would need torch
BUILD = runpy.run_path(f"{FOLDER}/build.py")

NATIVE = Extension(
    "onepass.core._native",
    sorted(glob(f"{FOLDER}/csrc/*.c")),
    depends=glob(f"{FOLDER}/csrc/*.h"),
    define_macros=[*BUILD["macros"]().items()],
    extra_compile_args=["-std=c11", "-fvisibility=hidden", "-pthread"],
    py_limited_api=True,
    optional=True,  # without a compiler the package is installed without it
)

setup(ext_modules=[NATIVE], options={"bdist_wheel": {"py_limited_api": "cp311"}})
