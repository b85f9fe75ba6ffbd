"""The CPU backend's number formats and functions, bit by bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from onepass.cpu import compile as compiler
from onepass.cpu.llvm import bits, emit, lookup, math_functions, prologue
from onepass.formats import E4M3FN, E4M3FNUZ, Fp8Format
from onepass.prologues import OPCODES
from tests.cpu.reference import BF16, F16, F32, INF, NAN, random_bits

# --- harness: run a vector function over a float32 tensor ----------------------------------------------------------


def elementwise(function: Callable[[emit.Float], emit.Value], x: Tensor, cpu: tuple[str, str] | None = None) -> Tensor:
    """``function`` of every element of ``x`` [multiple of LANES]; the 32-bit results as int32."""
    cpu = cpu or compiler.host()
    module = emit.Module(cpu[1])
    f = emit.Function(module, "serial", 3)
    source, target, count = f.parameters
    with f.loop(f.index(0), count, emit.LANES) as i:
        value = function(emit.Float(f.builder, f.load(source + i * 4, emit.F32)))
        f.store(value.ir, target + i * 4)
    f.builder.ret_void()
    code = compiler.link(compiler.compile_ir(str(module), *cpu), "serial")
    assert x.dtype == F32 and x.is_contiguous() and x.numel() % emit.LANES == 0
    out = torch.full(x.shape, 0x5A5A5A5A, dtype=torch.int32)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(code["serial"])(x.data_ptr(), out.data_ptr(), x.numel())
    return out


def all_values(dtype: torch.dtype) -> Tensor:
    """Every value of a 16-bit float dtype, as float32."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()


def neighbours(x: Tensor) -> Tensor:
    """``x`` and the float32 values next to it."""
    return torch.cat([x, torch.nextafter(x, torch.tensor(INF)), torch.nextafter(x, torch.tensor(-INF))])


def pad(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros(-x.numel() % emit.LANES)]).contiguous()


# --- number formats ------------------------------------------------------------------------------------------------


def encoder(fmt: Fp8Format, limit: float) -> Callable[[emit.Float], emit.Int]:
    return lambda value: bits.encode(fmt, limit, value).bytes()


@pytest.mark.parametrize("fmt", [E4M3FN, E4M3FNUZ], ids=lambda f: f.name)
def test_encode_agrees_with_torch(fmt: Fp8Format) -> None:
    for limit in fmt.maxima:
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.dtype).float()
        levels = codes[codes.isfinite()].sort().values
        ties = (levels[1:] + levels[:-1]) / 2
        small = random_bits(1 << 18)
        small = small[small.isfinite()]
        x = pad(
            torch.cat([neighbours(levels), neighbours(ties), all_values(BF16), all_values(F16), small]).nan_to_num(
                0.0, limit, -limit
            )
        )
        got = elementwise(encoder(fmt, limit), x)
        want = x.clamp(-limit, limit).to(fmt.dtype).view(torch.uint8).int()
        assert torch.equal(got, want)
        assert got.unique().numel() > 200


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_rounding_agrees_with_torch(dtype: torch.dtype) -> None:
    exact = all_values(dtype)
    exact = exact[exact.isfinite()].sort().values
    ties = (exact[1:].double() + exact[:-1].double()).div(2).float()
    x = pad(
        torch.cat(
            [random_bits(1 << 18), exact, neighbours(ties), torch.tensor([0.0, -0.0, INF, -INF, 65520.0, 3.4e38])]
        )
    )
    got = elementwise(lambda v: bits.round_to(dtype, v), x).view(F32)
    want = x.to(dtype).float()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()].view(torch.int32), want[~want.isnan()].view(torch.int32))


TARGETS = {"this": compiler.host(), "avx2": ("haswell", ""), "avx512": ("skylake-avx512", "")}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("how", ["rounded", "in order", "paired"])
def test_every_way_to_bfloat16_has_the_same_bits(how: str, target: str) -> None:
    """Blocks of random bits, of which many have a NaN or a subnormal; ties; and single ones among plain numbers."""
    needs = {"avx2": "+avx2", "avx512": "+avx512bw"}.get(target, "")
    if needs not in compiler.host()[1]:
        pytest.skip(f"runs code for {target}")
    exact = all_values(BF16)
    ties = (exact.view(torch.int32) + 0x8000).view(F32)  # of NaNs too: their payloads are cut off, not rounded
    few = torch.linspace(-3, 3, 32 * 64).reshape(-1, 32)
    odd = torch.tensor([0x00012345, 0x7F800001, 0x7FFFFFFF, 0x007FFFFF]).to(torch.int32).view(F32)
    few[torch.arange(64), torch.arange(64) % 32] = odd.repeat(16)
    x = pad(torch.cat([random_bits(1 << 17), exact, neighbours(ties), few.flatten()]))

    def columns(value: emit.Float) -> emit.Int:
        """In both orders the bits of a column end up in its lane."""
        if how == "paired":
            value = value.shuffle(value, [*range(0, 32, 2), *range(1, 32, 2)])
        narrow = bits.bf16_columns(value, how == "paired")
        return emit.Int(value.builder, value.builder.zext(narrow, emit.type_of(emit.I32, emit.LANES))) << 16

    got = elementwise(bits.bf16_rounded if how == "rounded" else columns, x, TARGETS[target])
    word = x.view(torch.int32).long() & 0xFFFFFFFF
    want = torch.where(x.isnan(), word | 0x400000, word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000
    assert torch.equal(got.long() & 0xFFFFFFFF, want)


def test_power_of_two_scale() -> None:
    x = pad(
        torch.cat(
            [
                neighbours(2.0 ** torch.arange(-126.0, 120.0)),
                random_bits(1 << 16).abs(),
                torch.tensor([0.0, 2.0**-127, 2.0**-149]),
            ]
        )
    )
    x = x.nan_to_num(1.0, 1.0, 1.0).clamp(max=2.0**126)
    got = elementwise(bits._power_of_two_above, x).view(F32).double()
    exact = x.double().frexp()
    want = torch.where(
        (exact.mantissa == 0.5) & (x >= 2.0**-127), x.double(), (2.0 ** exact.exponent.double()).clamp(min=2.0**-127)
    )
    assert torch.equal(got, torch.where(x == 0, 2.0**-127, want))


@pytest.mark.skipif("+avx512vbmi" not in compiler.host()[1], reason="runs code for a CPU with AVX512-VBMI")
@pytest.mark.parametrize("whole", [True, False])
def test_looked_up_codes(whole: bool) -> None:
    """Every code in every place: lane l has the columns l and l + 16, and l + 32 and l + 48 in a second vector."""
    width = 64 if whole else 32
    codes = (torch.arange(256 * width) // width + torch.arange(256 * width) % width * 3).to(torch.uint8)
    f = emit.Function(emit.Module(compiler.host()[1]), "serial", 3)
    source, target, count = f.parameters
    with f.loop(f.index(0), count, width) as i:
        for place, words in enumerate(lookup.numbers(f, source + i, 1 / 256, whole)):
            f.store((words << 16).ir, target + (i + 32 * place) * 4)
            f.store((words & 0xFFFF0000).ir, target + (i + 32 * place + 16) * 4)
    f.builder.ret_void()
    code = compiler.link(compiler.compile_ir(str(f.builder.module), *compiler.host()), "serial")
    out = torch.zeros(codes.numel())
    entry = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(code["serial"])
    entry(codes.data_ptr(), out.data_ptr(), codes.numel())
    want = codes.view(E4M3FN.dtype).float() / 256
    assert want.isnan().any()
    want[want.isnan()] = torch.nan  # without a sign, whatever the code's
    assert torch.equal(out.view(torch.int32), want.view(torch.int32))


# --- functions of the prologue -------------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[[emit.Float], emit.Float], Callable[[Tensor], Tensor]]] = {
    "exp": (math_functions.exp, torch.exp),
    "log": (math_functions.log, torch.log),
    "tanh": (math_functions.tanh, torch.tanh),
    "erf": (math_functions.erf, torch.erf),
    "sigmoid": (math_functions.sigmoid, lambda x: torch.where(x < 0, x.exp(), 1.0) / (1 + (-x.abs()).exp())),
    "rsqrt": (math_functions.rsqrt, torch.rsqrt),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_within_4_ulp(name: str) -> None:
    function, exact = FUNCTIONS[name]
    line = torch.cat(
        [torch.linspace(-110, 95, 200_000), torch.linspace(-1, 2, 200_000), torch.linspace(0.99, 1.01, 20_000)]
    )
    x = pad(
        torch.cat(
            [
                line,
                random_bits(1 << 18),
                torch.tensor([0.0, -0.0, INF, -INF, NAN, 88.72283, 88.7229, -87.4, -103.9, 2.0**-149]),
            ]
        )
    )
    got = elementwise(function, x).view(F32)
    want = exact(x.double())
    rounded = want.float()
    assert torch.equal(got.isnan(), rounded.isnan())
    assert torch.equal(got.isinf(), rounded.isinf()) and torch.equal(got[got.isinf()], rounded[rounded.isinf()])
    finite = rounded.isfinite()
    step = torch.nextafter(rounded.abs(), torch.tensor(INF)).double() - rounded.abs().double()
    step[step.isinf()] = 2.0**104
    ulps = ((got.double() - want).abs() / step)[finite]
    assert ulps.max() <= 4, f"{name}: {ulps.max():.2f} ulp at {x[finite][ulps.argmax()]}"


def test_every_opcode_has_code() -> None:
    assert set(prologue._OPERATIONS) == OPCODES - {"const"}
