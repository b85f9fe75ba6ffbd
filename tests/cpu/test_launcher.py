"""What all CPU kernels share: argument blocks, LLVM IR."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from onepass.core.backend import launching_with
from onepass.cpu import launch as launcher
from onepass.ops.gemv_norm import cpu as gemv_norm
from onepass.ops.linear import cpu as linear
from onepass.ops.mla_cache import cpu as mla_cache
from onepass.ops.mla_cache.launch import mla_spec
from onepass.ops.qk_norm import cpu as qk_norm
from onepass.ops.qk_norm.launch import RopeRule, qk_spec
from onepass.ops.rms_norm import cpu as rms_norm
from onepass.testing import runner
from onepass.testing.call import Case
from tests.cpu import reference as cpu_reference
from tests.gemv_norm import cpu_reference as cpu_gemv_reference
from tests.linear import cpu_reference as cpu_linear_reference

BF16, F32 = torch.bfloat16, torch.float32
SPECS: dict[str, tuple[launcher.CpuKernels[Any, Any, Any], Any]] = {
    **{f"rms_norm {name}": (rms_norm.KERNELS, spec) for name, spec in cpu_reference.SPECS.items()},
    **{f"gemv_norm {name}": (gemv_norm.KERNELS, spec) for name, spec in cpu_gemv_reference.SPECS.items()},
    **{f"linear {name}": (linear.KERNELS, spec) for name, spec in cpu_linear_reference.SPECS.items()},
    "qk_norm means": (qk_norm.KERNELS, qk_spec("means", BF16)),
    "qk_norm rope": (qk_norm.KERNELS, qk_spec("fused", BF16, F32, BF16, rope=RopeRule("half", 64, 32, torch.int64))),
    "mla_cache": (mla_cache.KERNELS, mla_spec(BF16, BF16, BF16, BF16, BF16, slots=torch.int64)),
}

CASES = runner.CASES[::4]


def launched(case: Case) -> list[tuple[str, Any]]:
    """The ops that a case launches on the CPU, and their calls."""
    calls: list[tuple[str, Any]] = []
    with torch.inference_mode(), launching_with(lambda op: lambda call: calls.append((op, call))):
        runner.call(case, case.draw("cpu"))
    return calls


def expected(call: Any, field: str) -> list[float] | None:
    """The words of a field that has the name of something in the call."""
    name, _, part = field.removesuffix(".at").partition(".")
    index = re.fullmatch(r"(gamma|normed|operand)(\d)", name)
    if index is not None:
        name = {"gamma": "gammas", "normed": "normed", "operand": "operands"}[index[1]]
    named = call._asdict()
    if "tensors" in named:
        named |= named["tensors"]._asdict()
    value = named.get(name)
    if index is not None and value is not None:
        value = value[int(index[2])]
    if isinstance(value, Tensor) and not part:
        return [value.data_ptr()]
    if isinstance(value, Tensor) and part == "stride":
        return [value.stride(0)]
    return [value] if isinstance(value, (int, float)) and not part else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.name}")
def test_fields_hold_what_their_names_say(case: Case) -> None:
    """And the block has as many values as fields."""
    for op, call in launched(case):
        kernels = import_module(f"onepass.ops.{op}.cpu").KERNELS
        layout = kernels.layout(call.spec)
        values = kernels.pack(call, kernels.work(call), 64)
        block = layout.struct.pack(*values)
        assert 8 * len(values) == len(block) == max(layout.offsets.values()) + 8
        named = {field: words for field in layout.offsets if (words := expected(call, field)) is not None}
        assert len(named) > 3 and {layout.offsets[field] // 8 for field in named} & {*layout.addresses}
        for field, words in named.items():
            start = layout.offsets[field] // 8
            assert values[start : start + len(words)] == words, field


@pytest.mark.parametrize("name", ["rms_norm norm_bf16", "gemv_norm bf16", "linear gelu", "qk_norm rope", "mla_cache"])
def test_ir_of_defines_the_kernels_symbols(name: str) -> None:
    kernels, spec = SPECS[name]
    text = launcher.ir_of(spec)
    assert set(re.findall(r'define void @"(\w+)"', text)) == set(kernels.symbols)
    assert "define internal void" in text


def test_specs_that_share_code_share_a_kernel() -> None:
    """MLA's index tensors do not shape code."""
    specs = [mla_spec(BF16, BF16, BF16, BF16, BF16, F32, slots=dtype) for dtype in (None, torch.int32, torch.int64)]
    assert len({mla_cache.KERNELS.kernel(spec) for spec in specs}) == 1


_SCARCE = """
import resource
import torch, onepass
x, gamma = torch.randn(2, 7168), torch.ones(7168)
onepass.rms_norm(x[:, :64], gamma[:64])  # loads LLVM
_, most = resource.getrlimit(resource.RLIMIT_AS)
taken = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (taken + 2**20, most))
try:
    onepass.rms_norm(x.bfloat16(), gamma.bfloat16())
except MemoryError as error:
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    print(error, onepass.rms_norm(x.bfloat16(), gamma.bfloat16()).shape)
"""


@pytest.mark.full  # starts a process
def test_too_little_memory_to_compile_raises(tmp_path: Path) -> None:
    """LLVM itself would end the process. With memory the same call succeeds."""
    environment = os.environ | {"ONEPASS_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", _SCARCE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout == "onepass: compiling a kernel needs 32 MiB of memory, which are not free torch.Size([2, 7168])\n"
    )
