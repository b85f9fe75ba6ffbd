"""Products of each head without a GPU: machine code, and what is refused. `attention/test_gpu.py` interprets them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from onepass.core.backend import launching_with
from onepass.errors import Unsupported
from onepass.gpu.compile import compile_build
from onepass.ops.head_product.launch import HeadCall
from onepass.ops.head_product.op import head_product, multiplies_heads
from tests.head_product import checks as cases
from tests.head_product.cases import CASES
from tests.head_product.checks import HeadCase
from tools.evidence import proof, records

BF16 = torch.bfloat16
HOT = [case for case in CASES if case.group == "large" and case.rows == 16]


def test_verification_finds_wrong_results() -> None:
    case = HeadCase("short", 5, 3, 200, 72)
    given = cases.inputs(case, "cpu")
    x, weight = given["x"].double(), given["weight"].double()
    right = torch.einsum("rhk,hkn->rhn", x, weight).to(BF16)
    assert cases.verify(case, given, (right,)) is None
    short = torch.einsum("rhk,hkn->rhn", x[..., :-1], weight[:, :-1]).to(BF16)
    for wrong in (torch.zeros_like(right), right * 1.02, right.flip(1), right.flip(0), short):
        assert cases.verify(case, given, (wrong,)) is not None


@pytest.mark.parametrize("case", HOT, ids=lambda case: case.name)
def test_hot_kernels_hold_everything_in_registers(case: HeadCase) -> None:
    """DeepSeek-V3's sizes: four programs share a multiprocessor, so that all of them run at once."""
    (build,) = proof.builds(case, records.H200)
    compiled = compile_build(build, records.H200)
    usage = records.resources(compiled)
    assert usage["STACK"] == usage["LOCAL"] == 0 and usage["REG"] <= 128
    assert compiled.metadata.shared <= 56 << 10 and " even" in build.name and not build.contracts
    ptx = compiled.asm["ptx"]
    assert "prefetch.global.L2" in ptx and "griddepcontrol.wait" in ptx and "cp.async.cg.shared" in ptx


def test_the_machine_code_does_not_depend_on_rows() -> None:
    found = {rows: proof.builds(HeadCase("short", rows, 4, 128, 128), records.H200) for rows in (1, 16, 17, 300)}
    assert all(builds == found[1] for builds in found.values())
    orders = re.findall(r"tt\.dot .*?kWidth = (\d)", records.lowered(found[1][0], records.H200, "ttgir"))
    assert orders == ["2"]


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.Tensor.float, torch.Tensor.float),
        (lambda x: x, torch.Tensor.half),
        (lambda x: x[:, :1], lambda weight: weight),
        (lambda x: x[..., 8:], lambda weight: weight),
        (lambda x: x[0], lambda weight: weight),
        (lambda x: x, lambda weight: weight[..., :12]),
        (lambda x: x[..., 4:12], lambda weight: weight[:, :8]),
        (lambda x: x[..., :0], lambda weight: weight[:, :0]),
        (lambda x: x, lambda weight: weight.repeat_interleave(2, 2)[..., ::2]),
    ],
)
def test_other_tensors_are_refused(x: Any, weight: Any) -> None:
    given = cases.inputs(HeadCase("short"), "cpu")
    assert multiplies_heads(given["x"], given["weight"])
    changed = x(given["x"]), weight(given["weight"])
    assert not multiplies_heads(*changed)
    with pytest.raises(Unsupported, match=r"^head_product: no kernel takes x torch\.\w+ \[.*\].* and weight torch"):
        head_product(*changed)


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_both_halves_of_a_projection_are_used_where_they_are(order: Any) -> None:
    """`kv_b_proj` has the rows of a head's keys, then those of its values."""
    made: list[HeadCall] = []
    both = torch.empty(6, 24 + 40, 72, dtype=BF16)
    weight = both[:, :24] if order == "rows" else both[:, 24:].transpose(1, 2)
    x = torch.empty(5, 6, 192, dtype=BF16)[..., : weight.shape[1]]
    with launching_with(lambda _: made.append):
        out = head_product(x, weight)
    (call,) = made
    assert out.shape == (5, 6, weight.shape[2]) and out.is_contiguous()
    assert call.spec.order == order and call.weight.data_ptr() == weight.data_ptr()
    assert call.rows == (5, 6, *weight.shape[1:], 6 * 192, 192, 64 * 72, 72)


def test_a_cpu_has_no_kernel() -> None:
    given = cases.inputs(HeadCase("short"), "cpu")
    with pytest.raises(Unsupported, match=r"^head_product: there is no kernel for cpu$"):
        head_product(**given)


def test_compilers_know_the_result() -> None:
    x, weight = (torch.empty(shape, dtype=BF16, device="meta") for shape in ((3, 8, 128), (8, 128, 64)))
    made = torch.ops.onepass.head_product(x, weight)
    assert made.shape == (3, 8, 64) and made.dtype is BF16 and made.is_contiguous()
