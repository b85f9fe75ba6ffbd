"""Builds the fast path in C where a compiler is found. Everything else is in pyproject.toml."""

from setuptools import Extension, setup

NATIVE = Extension(
    "onepass.fastpath._native",
    [f"src/onepass/fastpath/csrc/{name}.c" for name in ("key", "module", "plan")],
    depends=["src/onepass/fastpath/csrc/native.h"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    extra_compile_args=["-std=c11", "-fvisibility=hidden", "-pthread"],
    py_limited_api=True,
    optional=True,  # without a compiler the package is installed without it
)

setup(ext_modules=[NATIVE], options={"bdist_wheel": {"py_limited_api": "cp311"}})
