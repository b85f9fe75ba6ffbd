"""float16 on CPUs without F16C: the same bytes as with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from llvmlite import ir

from onepass.cpu import compile as compiler
from onepass.cpu.llvm import bits, emit, half
from onepass.ops.rms_norm.launch import row_spec
from tests.cpu.reference import F16, F32
from tests.cpu.test_numbers import all_values, elementwise, neighbours, pad

ROOT = Path(__file__).parents[2]
X86 = "x86" in compiler._llvm().get_process_triple()
pytestmark = pytest.mark.skipif(not X86, reason="runs code for x86 CPUs")


def removed(features: str) -> str:
    """A feature list with float16 conversions disabled."""
    return ",".join(f"-{f[1:]}" if f[1:].startswith(("f16c", "avx512")) else f for f in features.split(","))


def without() -> tuple[str, str]:
    cpu, features = compiler.host()
    return cpu, removed(features)


CPUS: dict[str, Callable[[], tuple[str, str]]] = {
    "this one without F16C": without,
    "the oldest x86-64": lambda: ("x86-64", ""),
}


def widened(value: emit.Float) -> emit.Value:
    """The float32 of the float16 in the low bits of a word."""
    word = value.builder.bitcast(
        value.builder.trunc(value.bits().ir, ir.VectorType(emit.I16, value.lanes)), ir.VectorType(emit.F16, value.lanes)
    )
    return emit.Float(value.builder, bits._cast(emit.Float(value.builder, word), emit.F32, "fpext")).bits()


def narrowed(value: emit.Float) -> emit.Value:
    """The float16 of a float32, in the low bits of a word."""
    word = value.builder.bitcast(bits._cast(value, emit.F16, "fptrunc"), ir.VectorType(emit.I16, value.lanes))
    return emit.Int(value.builder, value.builder.zext(word, ir.VectorType(emit.I32, value.lanes)))


def words(values: Tensor) -> Tensor:
    """The float32 with these bits, of integers below 2**32."""
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32).view(F32)


def expected_float(patterns: Tensor) -> Tensor:
    """The float32 bits by the definition of float16; a signalling NaN becomes quiet."""
    size, sign = patterns & 0x7FFF, (patterns >> 15) << 31
    nan = (size & 0x3FF) << 13 | 0x7FC00000
    value = torch.where(size < 0x400, size * 2.0**-24, (0x400 + size % 0x400) * 2.0 ** (size.double() // 0x400 - 25))
    found = torch.where(size == 0x7C00, 0x7F800000, value.float().view(torch.int32).long())
    return torch.where(size > 0x7C00, nan, found) | sign


@pytest.mark.parametrize("cpu", CPUS)
def test_every_float16_is_widened(cpu: str) -> None:
    target = CPUS[cpu]()
    assert not compiler._converts_half(*target)
    patterns = torch.arange(2**16)
    got = elementwise(widened, words(patterns), target).long() & 0xFFFFFFFF
    assert torch.equal(got, expected_float(patterns))
    if compiler._converts_half(*compiler.host()):
        assert torch.equal(got, elementwise(widened, words(patterns)).long() & 0xFFFFFFFF)


@pytest.mark.parametrize("cpu", CPUS)
def test_float32_is_narrowed(cpu: str) -> None:
    """A dense sample of bit patterns, every float16, every tie, their neighbours, and both ends of every exponent."""
    exact = all_values(F16)
    exact = exact[exact.isfinite()].sort().values
    middles = (exact[1:].double() + exact[:-1].double()).div(2).float()
    ends = torch.arange(512) << 23
    x = torch.cat(
        [
            words(torch.arange(0, 2**32, 4099)),
            neighbours(exact),
            neighbours(middles),
            words(torch.cat([ends, ends + 1, ends + 0x7FFFFF, torch.arange(0x7F800000, 0x7F800000 + 2**23, 1021)])),
            torch.tensor([65519.996, 65520.0, 65536.0, 2.0**-24, 2.0**-25, 2.0**-26, 2.0**-149]),
        ]
    )
    x = pad(x)
    got = elementwise(narrowed, x, CPUS[cpu]()).long()
    raw = x.view(torch.int32).long() & 0xFFFFFFFF
    nan = (raw >> 16) & 0x8000 | 0x7E00 | (raw >> 13) & 0x3FF
    want = torch.where(x.isnan(), nan, x.to(F16).view(torch.int16).long() & 0xFFFF)
    assert torch.equal(got, want)
    assert got.unique().numel() == 2**16 - 2 * 511  # every pattern but the signalling NaNs
    if compiler._converts_half(*compiler.host()):
        assert torch.equal(got, elementwise(narrowed, x).long())


def test_only_conversions_of_float16_are_rewritten() -> None:
    text = (
        'x = fpext <32 x half> %".4" to <32 x float>\ny = fptrunc double %".5" to float\nz = fptrunc float %z to half\n'
    )
    lines = half.in_software(text).splitlines()
    assert lines[:3] == [
        'x = call <32 x float> @onepass_widen_32(<32 x half> %".4")',
        'y = fptrunc double %".5" to float',
        "z = call half @onepass_narrow_0(float %z)",
    ]
    assert sum("define private" in line for line in lines) == 2


def test_other_cpu_features_have_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    spec = row_spec(F16, F16, None, F16, "once")
    host = compiler.host()
    files = set()
    for target in (host, (host[0], removed(host[1])), ("x86-64", host[1])):
        monkeypatch.setattr(compiler, "host", lambda target=target: target)
        files.add(compiler.cache_file(spec))
    assert len(files) == 3


CALLS = """
import hashlib, sys, torch, onepass
from onepass.cpu import compile as compiler
host = compiler.host()
if sys.argv[1] == "without":
    features = ",".join(f"-{f[1:]}" if f[1:].startswith(("f16c", "avx512")) else f for f in host[1].split(","))
    compiler.host = lambda: (host[0], features)
    assert not compiler._converts_half(*compiler.host())
torch.manual_seed(0)
f16 = torch.float16
x, r, g = (torch.randn(*shape).to(f16) for shape in ((7, 333), (7, 333), (333,)))
x[0] *= 1e-5
x[1] *= 6e4
q, k, gq = (torch.randn(*shape).to(f16) for shape in ((5, 256), (5, 64), (64,)))
act, weight = torch.randn(3, 128).to(f16), torch.randn(40, 128)
with torch.inference_mode():
    results = [
        *onepass.rms_norm(x, g, residual=r, rounding="hf"),
        *onepass.rms_norm_fused_fp8(x, g, scales_dtype=f16),
        *onepass.qk_rms_norm(q, k, gq, gq, per_head=True),
        *onepass.gemv_and_partial_norm(act, weight.to(f16), g[:24]),
        *onepass.gemv_and_partial_norm(act, weight.to(torch.float8_e4m3fn), g[:24]),
    ]
for t in results:
    print(hashlib.sha256(bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist())).hexdigest())
"""


@pytest.mark.full  # compiles every op twice
def test_ops_give_the_same_bytes_without_f16c(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "ONEPASS_CACHE_DIR": str(tmp_path)}
    outputs = []
    for way in ("with", "without"):
        command = [sys.executable, "-W", "ignore", "-c", CALLS, way]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.split())
    assert outputs[0] == outputs[1] and len(set(outputs[0])) == 10
