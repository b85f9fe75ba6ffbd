"""Schemas of ``torch.ops.onepass`` only grow: a call that was recorded in an exported graph still runs.

schemas.txt has every schema as it was first published. New arguments have defaults and follow the recorded ones. Outputs
are passed by name, so new options may precede them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import FunctionSchema, Tensor

import onepass.ops.attention.op
import onepass.ops.head_product.op
import onepass.ops.latent_attention.op  # noqa: F401
from onepass.core import op as registration
from onepass.core.contract import Arg, Contract, Option, Out
from onepass.formats import FLOATS
from tests.all_ops.bad_input import DISPATCHED
from tests.inputs import Form, memory

INTERNAL = ("attend", "attend_latents", "head_product")
"""Ops without a contract."""
CONTRACTS = {op.contract.name: op.contract for op in registration.ops}
RECORDED: dict[str, FunctionSchema] = {
    schema.name.removeprefix("onepass::"): schema
    for schema in map(torch._C.parse_schema, (Path(__file__).parent / "schemas.txt").read_text().splitlines())
}


def overload(name: str) -> Any:
    return getattr(torch.ops.onepass, name).default


def split(name: str, schema: FunctionSchema) -> tuple[list[Any], list[Any]]:
    """The arguments and the outputs of a schema."""
    contract = CONTRACTS.get(name.removesuffix("_out"))
    outs = contract.out_names if contract is not None and (contract.in_place or name.endswith("_out")) else []
    split_at = next((i for i, a in enumerate(schema.arguments) if a.name in outs), len(schema.arguments))
    return list(schema.arguments[:split_at]), list(schema.arguments[split_at:])


def described(argument: Any) -> tuple[Any, ...]:
    written = argument.alias_info is not None and argument.alias_info.is_write
    return argument.name, str(argument.type), written, argument.has_default_value(), argument.default_value


def changed(recorded: list[Any], current: list[Any]) -> list[str]:
    """The recorded arguments that are another now, and new ones without a default."""
    pairs = list(zip(recorded, current, strict=False))
    wrong = [r.name for r, c in pairs if described(r) != described(c)]
    wrong += [f"{r.name} (missing)" for r in recorded[len(pairs) :]]
    return wrong + [f"{c.name} (no default)" for c in current[len(pairs) :] if not c.has_default_value()]


def test_every_schema_is_recorded() -> None:
    names = {*INTERNAL}
    for contract in CONTRACTS.values():
        names |= {contract.name} if contract.in_place else {contract.name, f"{contract.name}_out"}
    assert names == RECORDED.keys()


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_schema_begins_the_current_one(name: str) -> None:
    current = overload(name)._schema
    assert [str(r.type) for r in current.returns] == [str(r.type) for r in RECORDED[name].returns]
    for recorded, now in zip(split(name, RECORDED[name]), split(name, current), strict=True):
        assert not changed(recorded, now)


def test_changes_are_noticed() -> None:
    def parse(arguments: str) -> list[Any]:
        return list(torch._C.parse_schema(f"onepass::f({arguments}) -> ()").arguments)

    before = parse("Tensor x, float eps=1e-06")
    assert not changed(before, before) and not changed(before, parse("Tensor x, float eps=1e-06, int? n=None"))
    assert changed(before, parse("Tensor x, int? n=None, float eps=1e-06")) == ["eps"]
    assert changed(before, parse("Tensor x, float eps=1e-05")) == ["eps"]
    assert changed(before, parse("Tensor(a!) x, float eps=1e-06")) == ["x"]
    assert changed(before, parse("Tensor x")) == ["eps (missing)"]
    assert changed(parse("Tensor x"), parse("Tensor x, Tensor y")) == ["y (no default)"]


def test_defaults_follow_the_last_required_argument() -> None:
    args = {"x": Arg("N", "", FLOATS), "y": Arg("N", "", FLOATS, optional=True), "z": Arg("N", "", FLOATS, many=True)}
    args["u"] = Arg("N", "", FLOATS, optional=True)
    options = {"a": Option("float", 0.5, ""), "b": Option("bool", None, "", optional=True), "c": Option("str", "d", "")}
    contract = Contract("f", args, options, {"out": Out("N", "x.dtype", "", "out")}, "")
    assert contract.schema == (
        'f(Tensor x, Tensor? y, Tensor[] z, Tensor? u=None, float a=0.5, bool? b=None, str c="d") -> Tensor[]'
    )
    assert contract.out_schema.endswith('str c="d", Tensor(a!)? out=None) -> ()')


# --- calls ----------------------------------------------------------------------------------------------------------


def call(subject: Form, name: str, by_name: bool) -> list[Tensor]:
    """What a call writes and returns, as bytes. Arguments are those recorded, by position, or those without defaults."""
    values = subject.build("cpu")
    if not name.endswith("_out") and "scale_layout" in values:
        values["scale_layout"] = "row"  # tiles that are allocated have unwritten padding
    if by_name:
        arguments = overload(name)._schema.arguments
        returned = overload(name)(**{a.name: values[a.name] for a in arguments if not usual(a, values[a.name])})
    else:
        inputs, outs = split(name, RECORDED[name])
        returned = overload(name)(*(values[a.name] for a in inputs), **{a.name: values[a.name] for a in outs})
    lasting = {name: value for name, value in values.items() if name not in subject.volatile}
    found = [*memory(lasting).values(), *(returned or ())]
    return [t.contiguous().reshape(-1).view(torch.uint8) for t in found]


def usual(argument: Any, value: object) -> bool:
    """Whether a value is the argument's default. A default dtype is a number."""
    default = argument.default_value
    return bool(argument.has_default_value() and not isinstance(value, Tensor) and value == default)


@pytest.mark.parametrize("subject", DISPATCHED, ids=lambda s: s.contract.name)
@torch.inference_mode()
def test_recorded_calls_run(subject: Form) -> None:
    contract = subject.contract
    for name in {contract.name, contract.name if contract.in_place else f"{contract.name}_out"}:
        results = call(subject, name, by_name=False)
        assert all(map(torch.equal, results, call(subject, name, by_name=True)))


def test_recorded_calls_of_internal_ops_run() -> None:
    """Only GPUs have kernels of these."""
    calls: dict[str, tuple[list[tuple[int, ...]], tuple[Any, ...]]] = {
        "attend": ([(1, 4, 2, 16), (1, 2, 3, 16), (1, 2, 3, 16)], (None, 0.25)),
        "attend_latents": ([(1, 2, 1, 8), (1, 2, 1, 8), (1, 1, 3, 8), (1, 1, 3, 8)], (None, 0.25)),
        "head_product": ([(3, 2, 8), (2, 8, 16)], ()),
    }
    assert calls.keys() == set(INTERNAL)
    for name, (shapes, rest) in calls.items():
        assert len(RECORDED[name].arguments) == len(shapes) + len(rest)
        made = overload(name)(*(torch.empty(shape, device="meta") for shape in shapes), *rest)
        assert made.numel()
