"""The attention of decode steps without a GPU: results in Triton's interpreter, machine code, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from onepass.core.backend import launching_with
from onepass.errors import Unsupported
from onepass.gpu.compile import compile_build
from onepass.ops.attention import reference
from onepass.ops.attention.launch import SPLIT, AttentionCall
from onepass.ops.attention.op import attend, attends
from tests import matrix
from tests.attention import checks as attention
from tests.attention.checks import AttentionCase, Mask
from tests.attention.shared import orders_of_products, refuses_wrong_results
from tests.helpers.interpreting import passed_checks
from tools.evidence import proof, records

BF16 = torch.bfloat16
HOT = [AttentionCase("short", 1, (32, 8), 1, context, 128, mask=mask) for context in (128, 1024) for mask in ("zeros",)]


@pytest.mark.full  # all_ops/test_interpreter.py interprets cases of every op
def test_interpreted_kernels_agree_with_the_formula() -> None:
    """Also that bytes depend on neither the batch, other tokens, nor the length of a cache. All kernels of this kind."""
    ops = {"attend": 8, "attend_latents": 8, "head_product": 11}
    cases = [case for case in matrix.GPU_CASES if case.interpretable]
    assert {op: sum(case.op == op for case in cases) for op in ops} == ops
    assert passed_checks(*ops) == len(cases)


def test_verification_finds_wrong_results() -> None:
    case = AttentionCase("short", context=SPLIT + 44, mask="each")
    refuses_wrong_results(attention, reference.attend, case)


@pytest.mark.parametrize("case", HOT, ids=lambda case: case.name)
def test_hot_kernels_hold_everything_in_registers(case: AttentionCase) -> None:
    (build,) = proof.builds(case, records.H200)
    compiled = compile_build(build, records.H200)
    usage = records.resources(compiled)
    assert usage["REG"] <= 128 and usage["STACK"] == usage["LOCAL"] == 0
    assert compiled.metadata.shared <= 76 << 10, "three programs per multiprocessor"
    assert not build.contracts
    assert "prefetch.global.L2" in compiled.asm["ptx"] and "griddepcontrol.wait" in compiled.asm["ptx"]


@pytest.mark.parametrize("columns", [64, 128])
def test_products_add_in_one_order(columns: int) -> None:
    """With and without a mask, for one token and several."""
    kinds: list[tuple[int, Mask]] = [(1, "none"), (1, "each"), (3, "each")]
    cases = [
        AttentionCase("short", tokens=tokens, context=2 * SPLIT, columns=columns, mask=mask) for tokens, mask in kinds
    ]
    ((widths, *_),) = orders_of_products(cases)
    assert widths == ("2", "2", "2")


def tensors(**changes: Any) -> dict[str, Any]:
    """Arguments that the kernel takes, with changes."""
    given = attention.inputs(AttentionCase("short", tokens=2, columns=16, mask="each"), "cpu")
    del given["scale"]
    return given | {name: change(given[name]) for name, change in changes.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"q": torch.Tensor.float},
        {"k": torch.Tensor.half},
        {"k": lambda k: k[:, :, :-1]},
        {"k": lambda k: k.mT.contiguous().mT},
        {"v": lambda v: v[..., :8]},
        {"q": lambda q: q[:1]},
        {"q": lambda q: q[:, :3]},
        {"q": lambda q: torch.cat((q, q[..., :1]), -1)[..., 1:]},
        {"mask": lambda mask: None},
        {"mask": lambda mask: mask == 0},
        {"mask": lambda mask: mask[..., :-1]},
        {"mask": lambda mask: mask.expand(-1, 4, -1, -1)},
        {"mask": lambda mask: mask[0]},
    ],
)
def test_other_tensors_are_refused(changes: dict[str, Any]) -> None:
    given = tensors(**changes)
    assert attends(**tensors()) and not attends(**given)
    with pytest.raises(Unsupported, match=r"^attend: no kernel takes q torch\.\w+ \[.*\] with mask "):
        attend(**given, scale=1.0)


def test_strides_of_single_elements_mean_nothing() -> None:
    given = attention.inputs(AttentionCase("short", 1, columns=16, mask="each"), "cpu")
    scale = given.pop("scale")
    odd = {name: t.as_strided(t.shape, (3, *t.stride()[1:2], 5 if t.shape[2] == 1 else t.stride(2), 1))
           for name, t in given.items()}  # fmt: skip
    assert attends(**odd)
    made = []

    def launch(call: AttentionCall) -> None:
        made.append(call.rows)

    for tensors_ in (given, odd):
        with launching_with(lambda _: launch):
            attend(**tensors_, scale=scale)
    assert made[0] == made[1] and made[0].q_batch == made[0].q_token == made[0].k_batch == 0


def test_long_heads_are_refused() -> None:
    q, k = torch.empty(1, 4, 1, 264, dtype=BF16), torch.empty(1, 2, 9, 264, dtype=BF16)
    assert not attends(q, k, k, None) and attends(q[..., :256], k[..., :256], k[..., :256], None)


def test_a_cpu_has_no_kernel() -> None:
    with pytest.raises(Unsupported, match=r"^attention: there is no kernel for cpu$"):
        attend(**tensors(), scale=1.0)


def test_compilers_know_the_result() -> None:
    q, k = torch.empty(3, 8, 2, 64, dtype=BF16, device="meta"), torch.empty(3, 2, 40, 64, dtype=BF16, device="meta")
    mask = torch.empty(3, 1, 2, 40, dtype=BF16, device="meta")
    made = torch.ops.onepass.attend(q, k, k, mask, 0.125)
    assert made.shape == (3, 2, 8, 64) and made.dtype is BF16 and made.is_contiguous()
