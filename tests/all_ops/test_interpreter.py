"""One case of each group of each op, run by Triton's interpreter.

The sweeps over all cases are left out of `make test`.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("triton")

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests import matrix
from tests.helpers.interpreting import interpret
from tests.oracle.case import Check
from tests.oracle.interpreter import _equal_types_accepted, _types_kept, interpreting, quick_interpreter

LEFT_OUT = {
    "gemv_and_partial_norm": {
        "rows",
        "dtypes",
        "gammas",
        "fp8 output",
        "layouts",
        "wide norms",
        "two launches",
        "segments",
    },
    "rms_norm_fused_quant": {"layouts", "outputs", "prologues", "int8"},
    "linear": {"layouts", "bias", "add", "activation"},
    "fused_rope_rmsnorm_quantization": {
        "model",
        "widths",
        "dtypes",
        "gammas",
        "nope",
        "scales",
        "options",
        "packed",
        "ragged",
        "values",
    },
}
"""Groups whose first case takes a second or more in the interpreter."""
INTERPRETED = {
    "rms_norm": 60,
    "rms_norm_fused_fp8": 80,
    "qk_rms_norm": 70,
    "apply_qk_rms_norm": 45,
    "row_mean_of_squares_qk": 20,
}
"""Ops whose cases test_rms_norm.py interprets, all of them, and their least number."""
PROGRAM = """
import json, sys
from tests.oracle.runner import run_cases
from tests.matrix import select
cases = select(device="interpreter")
chosen = [cases[index] for index in json.loads(sys.argv[1])]
print(json.dumps([f"{r.op} {r.case}: {r.message}" for r in run_cases(chosen, "interpreter") if not r.passed]))
"""


def first_of_each_group() -> list[Check]:
    """The first interpretable case of each group of each op."""
    cases = (
        c for c in matrix.select(device="interpreter") if c.interpretable and c.group not in LEFT_OUT.get(c.op, ())
    )
    return list({(case.op, case.group): case for case in reversed(list(cases))}.values())


@pytest.mark.parametrize("part", ["sample", pytest.param("rest", marks=pytest.mark.full)])
def test_one_case_of_each_group_passes(part: str) -> None:
    everything, known = first_of_each_group(), matrix.select(device="interpreter")
    sample = everything[::3]
    assert {case.op for case in sample} == {case.op for case in known} and len(everything) > 80
    rest = [case for case in everything if case not in sample and case.op not in INTERPRETED]
    cases = {"sample": sample, "rest": rest}[part]
    indices = json.dumps([known.index(case) for case in cases])
    assert json.loads(interpret("-c", PROGRAM, indices)) == []


def test_kept_types_are_those_of_triton() -> None:
    """The second type and tensor of a shape take what the first computed; afterwards Triton computes all of it again."""
    kinds = [core.float32, core.bfloat16, core.pointer_type(core.int8), core.pointer_type(core.int8, const=True)]
    shapes: list[list[Any]] = [[8], [2, 4], [core.constexpr(2), 4], [4, 2], [1, 1]]

    def described() -> list[str]:
        made = [core.tensor(None, core.block_type(kind, shape)) for kind in kinds for shape in shapes]
        made += [core.tensor(None, kind) for kind in kinds]
        types = [
            (t.type, t.dtype, t.shape, str(t.shape.type) if t.shape else "", t.numel, interpreter._get_np_dtype(t.type))
            for t in made
        ]
        blocks = [vars(t.type) | {"shape": str(t.type.shape)} for t in made if t.type.is_block()]
        return [*map(repr, types), *map(repr, blocks)]

    owners = (core.block_type, core.tensor)
    originals = [owner.__init__ for owner in owners]
    expected = described()
    with _types_kept():
        assert [owner.__init__ for owner in owners] != originals, "this version of Triton is not known"
        assert described() == described() == expected
        with pytest.raises(ValueError, match="power of 2"):
            core.block_type(core.float32, [3])
    assert [owner.__init__ for owner in owners] == originals


def test_operands_are_converted_as_by_triton() -> None:
    """Numbers of all kinds, scalars and blocks of three shapes, in pairs: the same types, values or error."""
    semantic = TritonSemantic(interpreter.interpreter_builder)
    kinds = [core.float32, core.float16, core.bfloat16, core.int32, core.uint32, core.int64, core.int1]

    def operand(kind: Any, shape: tuple[int, ...]) -> Any:
        data = numpy.ones(shape or (1,), dtype=interpreter._get_np_dtype(kind))
        return core.tensor(interpreter.TensorHandle(data, kind), core.block_type(kind, [*shape]) if shape else kind)

    def outcome(function: Any, *arguments: Any) -> list[str]:
        try:
            found = function(*arguments)
        except Exception as error:
            return [type(error).__name__, str(error)]
        made = found if isinstance(found, tuple) else (found,)
        return [f"{t.type} {t.handle.data.dtype} {t.handle.data.tolist()}" for t in made]

    def described() -> list[list[str]]:
        made = [operand(kind, shape) for kind in kinds for shape in ((), (8,), (2, 4), (4, 2))] + [2, 0.5]
        made.append(operand(core.pointer_type(core.float32), (8,)))
        found = []
        for left, right in product(made, made):
            for divides in (False, True):
                found.append(outcome(semantic.binary_op_type_checking_impl, left, right, True, False, True, divides))
            if isinstance(left, core.tensor) and isinstance(right, core.tensor):
                found.append(outcome(semantic.broadcast_impl_value, left, right))
                found.append(outcome(semantic.cast, left, right.type))
        return found

    names = ("binary_op_type_checking_impl", "broadcast_impl_value", "cast")
    originals = [getattr(TritonSemantic, name) for name in names]
    with _types_kept():
        expected = described()
        with _equal_types_accepted():
            assert not {getattr(TritonSemantic, n) for n in names} & {*originals}, "this version of Triton is not known"
            assert described() == expected
    assert [getattr(TritonSemantic, name) for name in names] == originals
    assert any("incompatible" in text for texts in expected for text in texts)


def test_memory_is_poisoned_while_kernels_are_interpreted() -> None:
    assert not interpreting()
    with quick_interpreter():
        assert interpreting()
        assert torch.empty(64).isnan().all() and torch.empty_like(torch.zeros(9)).isnan().all()
        assert torch.empty_strided((3, 5), (5, 1), dtype=torch.float8_e4m3fn).float().isnan().all()
        assert torch.zeros(4).new_empty(3, 2, dtype=torch.uint8).eq(255).all()
    assert not interpreting() and not torch.are_deterministic_algorithms_enabled()
