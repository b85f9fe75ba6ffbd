"""What all CPU kernel families share: argument blocks, generated code, LLVM IR."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")

import onepass
from onepass.cpu import launch as launcher
from onepass.ops.gemv_norm import cpu as gemv_norm
from onepass.ops.linear import cpu as linear
from onepass.ops.mla_cache import cpu as mla_cache
from onepass.ops.mla_cache.spec import mla_spec
from onepass.ops.qk_norm import cpu as qk_norm
from onepass.ops.qk_norm.spec import RopeRule, qk_spec
from onepass.ops.rms_norm import cpu as rms_norm
from tests.cpu import reference as cpu_reference
from tests.gemv_norm import cpu_reference as cpu_gemv_reference
from tests.linear import cpu_reference as cpu_linear_reference

BF16, F32 = torch.bfloat16, torch.float32
SPECS: dict[str, tuple[launcher.Family, Any]] = {
    **{f"rms_norm {name}": (rms_norm.FAMILY, spec) for name, spec in cpu_reference.SPECS.items()},
    **{f"gemv_norm {name}": (gemv_norm.FAMILY, spec) for name, spec in cpu_gemv_reference.SPECS.items()},
    **{f"linear {name}": (linear.FAMILY, spec) for name, spec in cpu_linear_reference.SPECS.items()},
    "qk_norm means": (qk_norm.FAMILY, qk_spec("means", BF16)),
    "qk_norm rope": (qk_norm.FAMILY, qk_spec("fused", BF16, F32, BF16, rope=RopeRule("half", 64, 32, torch.int64))),
    "mla_cache": (mla_cache.FAMILY, mla_spec(BF16, BF16, BF16, BF16, BF16, slots=torch.int64)),
}


@pytest.mark.parametrize("name", SPECS)
def test_packer_fills_every_field_once(name: str) -> None:
    """The generated code passes as many values as the block has fields."""
    family, spec = SPECS[name]
    before = set(launcher.generated_sources())
    family.packer(spec)
    (source,) = (text for file, text in launcher.generated_sources().items() if file not in before)
    values = source[source.index("return pack(") :].splitlines()[1:-1]
    assert 8 * (len(values) - 1) == max(family.offsets(spec).values())
    assert source.startswith("# The argument block of ")


@pytest.mark.parametrize("name", ["rms_norm norm_bf16", "gemv_norm bf16", "linear gelu", "qk_norm rope", "mla_cache"])
def test_ir_of_defines_the_kernels_symbols(name: str) -> None:
    family, spec = SPECS[name]
    text = launcher.ir_of(spec)
    assert set(re.findall(r'define void @"(\w+)"', text)) == set(family.symbols)
    assert "define internal void" in text


def test_tracebacks_show_generated_code() -> None:
    x = torch.ones(2, 8)
    onepass.rms_norm(x, x[0])
    kernel = next(iter(rms_norm.FAMILY.kernels.values()))
    with pytest.raises(TypeError) as caught:
        kernel.pack(0, (1, 2, 3, 0), None)
    assert any("= call" in line for line in traceback.format_tb(caught.tb))


def test_specs_that_share_code_share_a_kernel() -> None:
    """MLA's index tensors do not shape code."""
    specs = [mla_spec(BF16, BF16, BF16, BF16, BF16, F32, slots=dtype) for dtype in (None, torch.int32, torch.int64)]
    assert len({mla_cache.FAMILY.kernel(spec) for spec in specs}) == 1


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
