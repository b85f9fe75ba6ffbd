"""What contracts provide: errors that name the argument and write nothing, schemas, fakes, bytes."""

from __future__ import annotations

import linecache
import math
import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from importlib import import_module
from typing import Any

import numpy
import pytest
import torch

import onepass
from onepass.core.check import validation_of
from onepass.core.contract import Arg, Contract, Option, Out
from onepass.core.op import generated_sources
from onepass.errors import ContractError
from onepass.formats import FLOATS, FP8_CODES
from onepass.ops.rms_norm.op import RMS_NORM, RMS_NORM_FUSED_FP8, RMS_NORM_FUSED_QUANT
from tests.helpers.contract_oracle import option_is_legal
from tests.helpers.mistakes import Mistake, mistakes
from tests.ops import FOLDERS
from tests.oracle.samples import sample

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": onepass.rms_norm,
    "rms_norm_fused_fp8": onepass.rms_norm_fused_fp8,
}


_NAMES = RMS_NORM_FUSED_FP8.names
FP8 = replace(
    RMS_NORM_FUSED_QUANT,
    name="rms_norm_fused_fp8",
    args={n: a for n, a in RMS_NORM_FUSED_QUANT.args.items() if n not in ("global_scale", "gate", "bias")},
    options={
        _NAMES.get(n, n): o
        for n, o in RMS_NORM_FUSED_QUANT.options.items()
        if n not in ("gate_order", "gate_activation", "statistic", "format")
    }
    | {"out_dtype": Option("ScalarType", torch.float8_e4m3fn, "", choices=tuple(FP8_CODES))},
)
"""The contract of the alias: that of the op, by the alias' names."""

CONTRACTS = [
    value
    for folder in FOLDERS
    for value in vars(import_module(f"onepass.ops.{folder}.contract")).values()
    if isinstance(value, Contract)
]


def good_call(contract: Contract) -> dict[str, Any]:
    return dict(sample(contract, {"N": 128}, (3, 4), dtypes={"x": torch.bfloat16}, optional=["gamma", "residual"]))


def all_mistakes() -> list[Any]:
    found = []
    for contract in (RMS_NORM, FP8):
        for mistake in mistakes(contract, good_call(contract)):
            if mistake.argument != "prologue":  # a Prologue object in the public function; tested below
                found.append(pytest.param(contract, mistake, id=f"{contract.name}-{mistake.label}"))
    return found


@pytest.mark.parametrize(("contract", "mistake"), all_mistakes())
def test_bad_argument_is_named(contract: Contract, mistake: Mistake) -> None:
    out = torch.full((3, 4, 128), 7.0).bfloat16()
    if contract is FP8:
        out = out.to(torch.float8_e4m3fn)
    before = out.clone()
    with torch.enable_grad(), pytest.raises(ContractError) as caught:
        FUNCTIONS[contract.name](**mistake.arguments, out=out)
    assert str(caught.value).startswith(f"{contract.name}: `{mistake.argument}` must "), str(caught.value)
    assert ", got " in str(caught.value)
    assert torch.equal(out.view(torch.uint8), before.view(torch.uint8))
    FUNCTIONS[contract.name](**good_call(contract))


def test_there_are_many_bad_arguments() -> None:
    assert len(all_mistakes()) > 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": torch.ones(63)}, r"rms_norm: `gamma` must have shape \[N\] with N=64, got \[63\]"),
        ({"x": torch.ones(3, 0), "gamma": torch.ones(0)}, r"rms_norm: `x` must have 1 to 2\*\*24 columns"),
        ({"eps": -1e-6}, r"rms_norm: `eps` must be a number and satisfy 0 <= eps < 1, got -1e-06"),
        ({"rounding": "twice"}, r"rms_norm: `rounding` must be 'once' or 'hf', got 'twice'"),
        (
            {"x": torch.ones(3, 64, dtype=torch.int32)},
            r"rms_norm: `x` must have dtype bfloat16 or float16 or float32, got int32",
        ),
        ({"x": torch.ones(64, 3).t()}, r"rms_norm: `x` must have a contiguous last dimension, got strides \(1, 3\)"),
        ({"gamma": torch.ones(64, device="meta")}, r"rms_norm: `gamma` must be on cpu, got meta"),
        (
            {"residual": torch.ones(2, 64)},
            r"rms_norm: `residual` must have shape \[\.\.\., N\] with \.\.\.=\[3\], N=64, got \[2, 64\]",
        ),
        ({"residual_out": torch.ones(3, 64)}, r"rms_norm: `residual_out` must be None unless residual is not None"),
        ({"out": torch.ones(3, 64).bfloat16()}, r"rms_norm: `out` must have dtype float32, got bfloat16"),
    ],
)
def test_error_messages(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"x": torch.ones(3, 64), "gamma": torch.ones(64)}
    with pytest.raises(ContractError, match=message):
        onepass.rms_norm(**{**good, **change})


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"group_size": 128}, "group_size"),
        ({"fp8_max": 240.0}, "fp8_max"),
        ({"scale_format": "ue8m0", "scales_dtype": torch.float16}, "scales_dtype"),
        ({"scales_dtype": torch.float8_e8m0fnu}, "scales_dtype"),
        ({"static_scale": torch.ones(()), "scale_ub": 1.0}, "scale_ub"),
        ({"static_scale": torch.ones(()), "group_size": 64}, "group_size"),
        ({"static_scale": torch.ones(2)}, "static_scale"),
        ({"prologue": onepass.prologues.add}, "prologue_args"),
        ({"prologue_args": [torch.ones(3, 192)]}, "prologue_args"),
        ({"prologue": onepass.prologues.add, "prologue_args": [torch.ones(3, 5)]}, "prologue_args"),
        ({"prologue": onepass.prologues.add, "prologue_args": [1.0]}, "prologue_args"),
        ({"prologue": lambda x: x}, "prologue"),
        ({"scale_ub": 0.0}, "scale_ub"),
        ({"static_scale": torch.ones(()), "scale_ub": torch.ones(())}, "scale_ub"),
        ({"scale_ub": torch.ones(2)}, "scale_ub"),
        ({"scale_ub": torch.ones(1).half()}, "scale_ub"),
        ({"scale_ub": torch.ones(1, device="meta")}, "scale_ub"),
        ({"static_scale": torch.ones(()), "min_scale": 1e-6}, "min_scale"),
        ({"min_scale": -1e-9}, "min_scale"),
        ({"min_scale": float("nan")}, "min_scale"),
        ({"quantize": "division"}, "quantize"),
        ({"round_sum": 1}, "round_sum"),
    ],
)
def test_fp8_rules(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ContractError, match=f"rms_norm_fused_fp8: `{argument}` must "):
        onepass.rms_norm_fused_fp8(torch.ones(3, 192), torch.ones(192), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_dtype": torch.int8}, "`out_dtype` must be float8_e4m3fn or float8_e4m3fnuz or float8_e5m2, got int8"),
        ({"out_dtype": [1]}, r"`out_dtype` must be .*, got \[1\]"),
        ({"fp8_max": 240.0}, r"`fp8_max` must be a limit of format's codes \(e4m3fn: 448, .*\), got 240.0"),
        ({"scale_output": torch.ones(2)}, r"`scale_output` must have shape .*, got \[2\]"),
        ({"scale_layout": "column_packed"}, "`scales_dtype` must be int32 for scale_layout 'column_packed'"),
        ({"residual": torch.ones(3, 192, requires_grad=True)}, "`residual` must not require a gradient"),
    ],
)
def test_an_alias_is_named_in_errors(options: dict[str, Any], message: str) -> None:
    x, gamma = torch.ones(3, 192), torch.ones(192)
    for _ in range(3):  # also when the op's table knows calls like the good one
        with torch.enable_grad(), pytest.raises(ContractError, match=f"^rms_norm_fused_fp8: {message}"):
            onepass.rms_norm_fused_fp8(x, gamma, **options)
        onepass.rms_norm_fused_fp8(x, gamma)
    assert not hasattr(torch.ops.onepass, "rms_norm_fused_fp8")


@pytest.mark.parametrize("argument", ["x", "gamma", "residual", "out", "residual_out", "prologue_args"])
def test_negated_view_of_one_column_is_rejected(argument: str) -> None:
    """Its elements lie two apart, which is legal for one column, and have the opposite sign in memory."""
    call: dict[str, Any] = {"x": torch.ones(3, 1), "gamma": torch.ones(1), "residual": torch.ones(3, 1)}
    function: Callable[..., Any] = onepass.rms_norm
    if argument == "prologue_args":
        function, call = onepass.rms_norm_fused_fp8, {**call, "prologue": onepass.prologues.add}
    shape = call.get(argument, call["x"]).shape
    view = torch.complex(torch.zeros(shape), torch.ones(shape)).conj().imag
    assert view.is_neg()
    wrong, right = ([t] if argument == "prologue_args" else t for t in (view, view.resolve_neg()))
    function(**{**call, argument: right})
    with pytest.raises(ContractError, match=f"`{argument}` must not be a negated view"):
        function(**{**call, argument: wrong})


@pytest.mark.parametrize("function", [onepass.rms_norm_fused_fp8, onepass.rms_norm_fused_quant])
def test_a_group_size_in_place_of_eps_is_refused_with_a_hint(function: Callable[..., Any]) -> None:
    x, gamma = torch.ones(3, 128), torch.ones(128)
    hint = r"`eps` must be a number and satisfy 0 <= eps < 1, got 128; did you mean group_size=128\?"
    with pytest.raises(ContractError, match=hint):
        function(x, gamma, 128)
    with pytest.raises(ContractError, match=r"`eps` must be a number and satisfy 0 <= eps < 1, got 1$"):
        function(x, gamma, 1)


def test_numbers_of_other_libraries_are_those_of_python() -> None:
    """From the third call on C repeats them, if it is built."""
    x, gamma = torch.randn(3, 64), torch.ones(64)
    for eps in (numpy.float32(1e-3), numpy.float64(1e-3), numpy.float16(1e-3), Fraction(1, 1000)):
        norm = onepass.nn.RMSNorm(64, eps).requires_grad_(False)  # type: ignore[arg-type]
        for _ in range(4):
            expected = onepass.rms_norm(x, gamma, float(eps))
            assert torch.equal(onepass.rms_norm(x, gamma, eps), expected)  # type: ignore[arg-type]
            assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("columns", [2**24, 2**24 + 1])
def test_limit_of_columns(columns: int) -> None:
    x, gamma = (torch.empty(shape, device="meta") for shape in ((1, columns), (columns,)))
    if columns == 2**24:
        assert onepass.rms_norm(x, gamma).shape == (1, columns)
    else:
        with pytest.raises(ContractError, match="rms_norm: `x` must have 1 to"):
            onepass.rms_norm(x, gamma)


def small_contract(name: str, options: dict[str, Option], out: Out = Out("N", "x.dtype", "", "out")) -> Contract:  # noqa: B008
    return Contract(name, {"x": Arg("N", "", FLOATS)}, options, {"y": out}, "")


def following(value: Any, towards: float, option: Option) -> Any:
    """The next number that the option can be."""
    return value + int(math.copysign(1, towards)) if option.type == "int" else math.nextafter(value, towards)


def test_limits_of_numbers() -> None:
    """Both limits of every option are accepted if it says ``<=``, and the next number beyond them is not."""
    seen = 0
    for contract in CONTRACTS:
        for name, option in contract.options.items():
            limits = re.fullmatch(rf"(\S+) <= {name} (<=?) (\S+)", option.where)
            if limits is None:
                continue
            check = validation_of(small_contract("limits", {name: option})).prepare
            lowest, least, highest = limits.groups()
            for limit, beyond, inclusive in ((lowest, -math.inf, True), (highest, math.inf, least == "<=")):
                value = eval(limit, {"inf": math.inf})
                last = value if inclusive else following(value, -beyond, option)
                check(torch.ones(1), last)
                with pytest.raises(ContractError, match=f"limits: `{name}` must be an? (int|number) and satisfy "):
                    check(torch.ones(1), following(last, beyond, option))
                seen += 1
    assert seen > 20


def test_condition_with_a_string_is_shown() -> None:
    """Strings in a condition are quoted, and so is the message that contains it."""
    out = Out("N", "x.dtype", "", "out", when="mode == 'two'")
    mode = Option("str", "one", "", choices=("one", "two"))
    prepare = validation_of(small_contract("words", {"mode": mode}, out)).prepare
    x = torch.ones(3)
    assert [prepare(x, "one"), prepare(x, "two", x)] == [(None,), (x,)]
    with pytest.raises(ContractError, match='words: `out` must be None unless mode == "two", got a tensor'):
        prepare(x, "one", x)


@pytest.mark.parametrize("contract", [RMS_NORM, FP8], ids=lambda c: c.name)
def test_fake_outputs_match_real_ones(contract: Contract) -> None:
    call = good_call(contract)
    real = FUNCTIONS[contract.name](**call)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = FUNCTIONS[contract.name](**{k: mode.from_tensor(v) for k, v in call.items()})
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype, r.device) == (f.shape, f.stride(), f.dtype, f.device)


def test_meta_tensors() -> None:
    y = onepass.rms_norm(torch.empty(3, 64, device="meta"), torch.empty(64, device="meta"))
    assert y.shape == (3, 64) and y.device.type == "meta"


# --- values in messages -------------------------------------------------------------------------------------------------

LARGE: dict[str, Any] = {
    "a list of 4096 floats": [1.0] * 4096,
    "a list of 1 list": [[1.0] * 4096],
    "a list of 2 Tensors": [torch.ones(3), torch.ones(3)],
    "a tuple of 100 items": (*range(99), "x"),
    "a dict of 4096 items": dict.fromkeys(range(4096)),
    "an int of 16610 bits": 10**5000,
    "a string of 5000 characters that begins with": "ab" * 2500,
    "a torch.nn.modules.container.Sequential": torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(40)]),
}


@pytest.mark.parametrize("shown", LARGE)
def test_messages_describe_large_values(shown: str) -> None:
    """Messages of ops, modules and `patch` show type and size, not thousands of numbers."""
    value = LARGE[shown]
    x, gamma = torch.ones(2, 64), torch.ones(64)
    q = torch.ones(2, 64)
    calls: list[Callable[[], Any]] = [
        lambda: onepass.rms_norm(x, value),
        lambda: onepass.rms_norm(value, gamma),
        lambda: onepass.rms_norm(x, gamma, residual=value),
        lambda: onepass.rms_norm(x, gamma, rounding=value),
        lambda: onepass.rms_norm(x, gamma, out=value),
        lambda: onepass.rms_norm_fused_fp8(x, gamma, group_size=value),
        lambda: onepass.rms_norm_fused_fp8(x, gamma, prologue=value),
        lambda: onepass.qk_rms_norm(q, q, gamma, value),
        lambda: onepass.qk_rms_norm(q, q, gamma, gamma, rope=value),
        lambda: onepass.gemv_and_partial_norm(q, torch.ones(64, 64), gamma, fused=value),
        lambda: onepass.patch(torch.nn.RMSNorm(4), rounding=value),
        lambda: onepass.patch(torch.nn.RMSNorm(4), fuse=value),
        lambda: onepass.nn.RMSNorm(4, elementwise_affine=value),
    ]
    for call in calls:
        with pytest.raises(ContractError) as caught:
            call()
        assert f"got {shown}" in str(caught.value) and len(str(caught.value)) < 300


def test_messages_describe_arrays() -> None:
    array = pytest.importorskip("numpy").ones((7, 500))
    with pytest.raises(ContractError, match=r"got a numpy.ndarray \[7, 500\] of float64$"):
        onepass.rms_norm(torch.ones(2, 64), array)


def test_messages_show_small_values() -> None:
    small: list[Any] = [[1.0, 2.0], "no", 3, None, {"a": 1}]
    for value in small:
        with pytest.raises(ContractError, match=f"`x` must be a tensor, got {re.escape(repr(value))}$"):
            onepass.rms_norm(value, torch.ones(64))


def test_group_size_names_the_number_it_must_divide() -> None:
    with pytest.raises(ContractError, match=r"`group_size` must divide the number of columns, N=100, got 64$"):
        onepass.rms_norm_fused_fp8(torch.ones(2, 100), torch.ones(100), group_size=64)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_heads_without_per_head_get_a_hint(lead: tuple[int, ...]) -> None:
    q, k, gamma = torch.ones(*lead, 8, 64), torch.ones(*lead, 4, 64), torch.ones(64)
    with pytest.raises(ContractError, match=r"pass per_head=True and gammas of 64 elements$"):
        onepass.qk_rms_norm(q, k, gamma, gamma)
    assert onepass.qk_rms_norm(q, k, gamma, gamma, per_head=True)[1].shape == k.shape


@pytest.mark.parametrize("k", [torch.ones(3, 8, 64), torch.ones(2, 4, 48), torch.ones(2, 64), torch.ones(64)])
def test_other_shapes_get_no_hint(k: torch.Tensor) -> None:
    gamma = torch.ones(64)
    with pytest.raises(ContractError, match=r"`k` must have shape .*\]$"):
        onepass.qk_rms_norm(torch.ones(2, 8, 64), k, gamma, torch.ones(k.shape[-1]))


@pytest.mark.parametrize("value", ["no", "", 0, 1, None, torch.tensor(True)], ids=repr)
def test_bool_options_reject_other_types(value: Any) -> None:
    """Every switch of the public functions rejects values that are not bools: "no" would be true."""
    x, gamma, norm = torch.ones(2, 64), torch.ones(64), torch.nn.RMSNorm(64)
    dist, nn, linear = onepass.dist, onepass.nn, torch.nn.Linear(64, 64)
    calls: dict[str, Callable[[], Any]] = {
        "patch: `fuse`": lambda: onepass.patch(norm, fuse=value),
        "qk_rms_norm: `per_head`": lambda: onepass.qk_rms_norm(x, x, gamma, gamma, per_head=value),
        "rms_norm_fused_fp8: `return_norm`": lambda: onepass.rms_norm_fused_fp8(x, gamma, return_norm=value),
        "gemv_and_partial_norm: `fused`": lambda: onepass.gemv_and_partial_norm(
            x, torch.ones(64, 64), gamma, fused=value
        ),
        "dist.qk_rms_norm: `per_head`": lambda: dist.qk_rms_norm(x, x, gamma, gamma, per_head=value),
        "dist.qk_rms_norm: `reproducible`": lambda: dist.qk_rms_norm(x, x, gamma, gamma, reproducible=value),
        "dist.rms_norm: `reproducible`": lambda: dist.rms_norm(x, gamma, reproducible=value),
        "QKNormParallel: `reproducible`": lambda: dist.QKNormParallel(reproducible=value),
        "RMSNorm: `elementwise_affine`": lambda: nn.RMSNorm(64, elementwise_affine=value),
        "QKNorm: `per_head`": lambda: nn.QKNorm.from_modules(norm, norm, per_head=value),
        "LinearFP8: `bias`": lambda: nn.LinearFP8(64, 64, bias=value),
        "Linear: `bias`": lambda: nn.Linear(64, 64, bias=value),
        "MergedLinear: `share`": lambda: nn.MergedLinear.from_linears([linear], share=value),
    }
    for named, call in calls.items():
        with pytest.raises(ContractError, match=f"^{re.escape(named)} must be a bool, got "):
            call()
    with pytest.raises(ContractError, match=r"`reproducible` must be a bool"):
        dist.start_qk_stats(x, x, reproducible=value)
    assert "forward" not in norm.__dict__, "a refused call has patched nothing"


VALUES = (
    None,
    True,
    0,
    1,
    -1,
    64,
    2**70,
    10**400,
    0.0,
    1e-6,
    -3.4e38,
    3.5e38,
    float("nan"),
    float("inf"),
    numpy.float32(0.5),
    numpy.int64(64),
    numpy.bool_(True),
    Fraction(1, 3),
    Fraction(10**400),
    "once",
    "x",
    torch.int8,
)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)
def test_option_accepts_what_its_declaration_allows(contract: Contract) -> None:
    """The same as the generated code and as the independent reading of the declaration."""
    for name, option in contract.options.items():
        check = validation_of(small_contract(f"accepts_{name}", {name: option})).prepare
        for value in (*VALUES, *option.choices, option.default):
            accepted = option.accepts(name, value)
            assert accepted == option_is_legal(option, name, value), (name, value)
            if accepted:
                check(torch.ones(2), value)
            else:
                with pytest.raises(ContractError, match=f"`{name}` must"):
                    check(torch.ones(2), value)


def test_generated_code_is_visible() -> None:
    """`generated_sources` lists it for every public op, and tracebacks show it."""
    for public in {contract.public_name for contract in CONTRACTS}:
        sources = generated_sources(public)
        assert "def prepare(" in sources[f"validation of {public}"]
        assert "*NEGATED" in sources[f"eager validation of {public}"]
        assert all(source == "".join(linecache.getlines(f"<onepass {title}>")) for title, source in sources.items())
    assert "validation of qk_rms_norm_heads" in generated_sources("qk_rms_norm")
    assert {"eager validation of gemv", "validation of gemv_and_partial_norm_unfused"} <= set(
        generated_sources("gemv_and_partial_norm")
    )
    assert generated_sources("no_such_op") == {}
    with pytest.raises(ContractError) as caught:
        onepass.rms_norm(torch.ones(2, 64), torch.ones(63))
    assert "if gamma.shape != (N, ):" in "".join(linecache.getlines("<onepass validation of rms_norm>"))
    assert any("fail_shape('gamma'" in line for line in traceback.format_exception(caught.value))
