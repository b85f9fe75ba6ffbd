"""What the inventories of valid calls share. Those of an op are in tests/<op>/inputs.py, beside its matrix of cases
(cases.py), what the fuzzer draws (fuzz.py) and its promises (promises.py).

An inventory has `FORMS`, calls of the op in each of its forms with small inputs, `BY_CONTRACT`, arguments of what torch
dispatches, and `ROWS`, forms whose results have one row per row of the inputs, of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from onepass.core.check import validation_of
from onepass.core.contract import Contract
from tests.helpers.contract_oracle import faults
from tests.oracle.samples import sample

BF16, F32, I32, FP8 = torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn
Arguments = dict[str, Any]
Build = Callable[[str], Arguments]
"""From a device to a valid call's arguments, by the contract's names."""
Call = Callable[[Arguments], Any]
Tensors = dict[str, Tensor]


def names(contract: Contract) -> list[str]:
    return [*contract.args, *contract.options, *contract.out_names]


def sampled_arguments(
    contract: Contract,
    sizes: dict[str, int],
    lead: tuple[int, ...],
    device: str,
    optional: tuple[str, ...] = (),
    **changes: Any,
) -> Arguments:
    """Sampled tensors and default options. ``changes`` are options, and dtypes of tensors."""
    first = next(iter(contract.args))
    dtypes = {first: BF16, **{n: v for n, v in changes.items() if n in contract.args and isinstance(v, torch.dtype)}}
    tensors = sample(contract, sizes, lead, device=device, dtypes=dtypes, optional=optional)
    values: Arguments = {n: () if a.many else tensors.get(n) for n, a in contract.args.items()}
    values |= {n: option.default for n, option in contract.options.items()}
    return values | {n: v for n, v in changes.items() if n not in dtypes}


def random(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)


def with_outputs(contract: Contract, arguments: Arguments) -> Arguments:
    """Add caller-allocated outputs, filled with a pattern."""
    values = {**arguments, **{out.argument: None for out in contract.outs.values()}}
    outputs = validation_of(contract).prepare(*[values[name] for name in names(contract)])
    for out, tensor in zip(contract.outs.values(), outputs, strict=True):
        values[out.argument] = None if tensor is None else poisoned(tensor)
    return values


def poisoned(tensor: Tensor) -> Tensor:
    whole(tensor).fill_(0x5A)
    return tensor


# --- forms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A form of an op: its contract, a valid call's arguments, and how to call it with them."""

    name: str
    op: str
    contract: Contract
    build: Build
    call: Call
    required: tuple[str, ...] = ()
    """Outputs that this form does not allocate."""
    fixed: tuple[str, ...] = ()
    """Names of the contract that are not arguments of this form."""
    volatile: tuple[str, ...] = ()
    """Arguments that two equal calls fill differently."""
    tensors_only: bool = False
    contract_of: Callable[[Arguments], Contract] | None = None
    own_rules: Callable[[Arguments], list[str]] = field(default=lambda arguments: [])
    """Arguments that the public function rejects although the contract allows them."""
    derived: Callable[[Arguments], Arguments] = field(default=lambda arguments: arguments)

    @cached_property
    def good_values(self) -> Arguments:
        """The arguments of one valid call on the CPU."""
        return self.build("cpu")

    def wrong(self, changes: Mapping[str, Any]) -> set[str]:
        """The names that an error about the changed call may mention; empty for a legal call."""
        arguments = self.derived({**self.good_values, **changes})
        contract = self.contract if self.contract_of is None else self.contract_of(arguments)
        blamed = faults(contract, {name: arguments[name] for name in names(contract)})
        blamed += [name for name in self.required if arguments[name] is None]
        blamed += self.own_rules(arguments)
        carriers = [p for p, carried in self.contract.carried.items() if set(carried) & set(blamed)]
        return {*blamed, *carriers}

    def takes(self, changes: Mapping[str, Any]) -> bool:
        """Whether a call of this form can have such changes."""
        if any(name in self.fixed for name in changes):
            return False
        if self.tensors_only:
            many = [name for name, arg in self.contract.args.items() if arg.many]
            return all(_dispatchable(value, name in many) for name, value in changes.items())
        # the public function takes an object instead of a key
        return "prologue" not in changes or not isinstance(changes["prologue"], (str, type(None)))


def _dispatchable(value: object, many: bool) -> bool:
    """Whether torch passes a value to our implementation unchanged."""
    if many:
        return isinstance(value, (list, tuple)) and all(_dispatchable(item, False) for item in value)
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_neg()


def writing(name: str, contract: Contract, build: Build, call: Call, **rest: Any) -> Form:
    """A form that writes to the caller's tensors."""
    return Form(name, contract.name, contract, lambda device: with_outputs(contract, build(device)), call, **rest)


def both(name: str, contract: Contract, build: Build, call: Call, **rest: Any) -> list[Form]:
    """A form that writes to the caller's tensors, and one that allocates its outputs."""
    outs = [out.argument for out in contract.outs.values()]
    one_argument = {"fixed": tuple(outs)} if "out" in contract.carried else {}
    allocating = Form(
        f"{name}, allocating",
        contract.name,
        contract,
        lambda device: {**build(device), **dict.fromkeys(outs)},
        call,
        **rest | one_argument,
    )
    return [writing(name, contract, build, call, **rest), allocating]


# --- any number of rows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """An op in one form. Tensors in ``rows``, and all results, have one row per row; other tensors are shared."""

    name: str
    rows: Mapping[str, int]
    """Columns of each tensor that has rows; 0: the length of a row."""
    shared: Mapping[str, tuple[int, ...]]
    """Shapes of the shared tensors; 0 as above."""
    call: Callable[[Tensors], list[Tensor]]
    most: int = 1 << 20
    """The most rows that a call may have."""
    own: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtypes that differ from x's."""
    shared_out: int = 640
    """Row length for which a CPU splits 280,000 elements of x among threads."""

    def inputs(self, device: str, count: int, n: int, dtype: torch.dtype, seed: int = 0) -> Tensors:
        """Random tensors."""
        generator = torch.Generator().manual_seed(seed + n)
        tensors = {}
        shapes = {**{name: (count, columns) for name, columns in self.rows.items()}, **self.shared}
        for name, (*lead, columns) in shapes.items():
            t = torch.randn(*lead, columns or n, generator=generator)
            tensors[name] = t.to(self.own.get(name, dtype)).to(device)
        return tensors

    def part(self, tensors: Tensors, rows: Any) -> Tensors:
        """The tensors of some rows."""
        return {name: t[rows] if name in self.rows else t for name, t in tensors.items()}


def angles(like: Tensor) -> Tensor:
    return torch.arange(16.0, device=like.device).unsqueeze(1).expand(16, 32).cos().contiguous()


def positions(t: Tensors) -> Tensor:
    """A position per row, computed from the row so that it moves with it."""
    return (t["q"][:, 0].float().abs() * 8).long()


# --- memory ---------------------------------------------------------------------------------------------------------


def tensors_of(arguments: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor that owns memory."""
    tensors: list[Tensor] = []
    for value in arguments.values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if type(item) in (Tensor, torch.nn.Parameter) and item.layout is torch.strided and not item.is_meta:
                tensors.append(item.detach())
    return tensors


def whole(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def memory(arguments: Mapping[str, Any]) -> dict[int, Tensor]:
    return {t.untyped_storage().data_ptr(): whole(t) for t in tensors_of(arguments)}


def copied(arguments: Arguments) -> Arguments:
    return {
        n: [t.clone() for t in v] if isinstance(v, list) else v.clone() if isinstance(v, Tensor) else v
        for n, v in arguments.items()
    }
