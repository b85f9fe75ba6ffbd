"""The attention of decode steps to latents without a GPU: machine code, and what is refused. `attention/test_gpu.py` interprets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from onepass.core.backend import launching_with
from onepass.errors import Unsupported
from onepass.gpu.chip import Chip
from onepass.gpu.compile import compile_build
from onepass.ops.attention.launch import SPLIT
from onepass.ops.latent_attention import reference
from onepass.ops.latent_attention.launch import LatentCall
from onepass.ops.latent_attention.op import attend_latents, attends_latents
from tests.attention.checks import Mask
from tests.attention.shared import orders_of_products, refuses_wrong_results
from tests.latent_attention import checks as latent_attention
from tests.latent_attention.checks import DEEPSEEK, LatentCase
from tools.evidence import proof, records

BF16 = torch.bfloat16
HOT = [LatentCase("short", 1, 128, 1, context, DEEPSEEK, mask="zeros") for context in (128, 1024)]


def test_verification_finds_wrong_results() -> None:
    case = LatentCase("short", context=SPLIT + 44, mask="each")
    no_rotation = torch.zeros_like(latent_attention.inputs(case, "cpu")["k_rot"])
    refuses_wrong_results(latent_attention, reference.attend_latents, case, k_rot=no_rotation)


@pytest.mark.sampled(1)  # each compiles a kernel
@pytest.mark.parametrize("case", HOT, ids=lambda case: case.name)
def test_hot_kernels_hold_everything_in_registers(case: LatentCase) -> None:
    """DeepSeek-V3's sizes. Two programs share a multiprocessor."""
    (build,) = proof.builds(case, records.H200)
    compiled = compile_build(build, records.H200)
    usage = records.resources(compiled)
    assert usage["STACK"] == usage["LOCAL"] == 0 and usage["REG"] <= 255
    assert compiled.metadata.shared <= 112 << 10
    assert not build.contracts
    ptx = compiled.asm["ptx"]
    assert "prefetch.global.L2" in ptx and "griddepcontrol.wait" in ptx and "cp.async.cg.shared" in ptx


@pytest.mark.sampled(1)  # each compiles a kernel
@pytest.mark.parametrize("arch", [80, 89, 120])
def test_chips_with_less_shared_memory(arch: int) -> None:
    """The smallest have 99 KB for a program."""
    chip = Chip("cuda", arch, 32)
    (build,) = proof.builds(HOT[1], chip)
    compiled = compile_build(build, chip)
    assert compiled.metadata.shared + (1024 if chip.has_pdl else 0) <= 99 << 10
    assert "griddepcontrol" not in compiled.asm["ptx"] or chip.has_pdl


def test_products_add_in_one_order() -> None:
    """With and without a mask, for one token and several."""
    kinds: list[tuple[int, Mask]] = [(1, "none"), (1, "each"), (3, "each")]
    cases = [
        LatentCase("short", tokens=tokens, context=2 * SPLIT, columns=DEEPSEEK, mask=mask) for tokens, mask in kinds
    ]
    ((widths, *_),) = orders_of_products(cases)
    assert widths == ("2", "2", "2", "2")


def tensors(**changes: Any) -> dict[str, Any]:
    """Arguments that the kernel takes, with changes."""
    given = latent_attention.inputs(LatentCase("short", tokens=2, mask="each"), "cpu")
    del given["scale"]
    return given | {name: change(given[name]) for name, change in changes.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"q": torch.Tensor.float},
        {"latent": torch.Tensor.half},
        {"k_rot": torch.Tensor.half},
        {"latent": lambda t: t[:, :, :-1]},
        {"latent": lambda t: t[..., :40]},
        {"latent": lambda t: t.expand(-1, 2, -1, -1)},
        {"latent": lambda t: t.squeeze(1)},
        {"latent": lambda t: t.mT.contiguous().mT},
        {"k_rot": lambda t: t[..., :8]},
        {"q_rot": lambda t: t[:, :3]},
        {"q_rot": lambda t: t[..., 1:]},
        {"q": lambda t: t[:1]},
        {"q": lambda t: torch.cat((t, t[..., :1]), -1)[..., 1:]},
        {"mask": lambda mask: None},
        {"mask": lambda mask: mask == 0},
        {"mask": lambda mask: mask[..., :-1]},
    ],
)
def test_other_tensors_are_refused(changes: dict[str, Any]) -> None:
    given = tensors(**changes)
    assert attends_latents(**tensors()) and not attends_latents(**given)
    with pytest.raises(Unsupported, match=r"^attend_latents: no kernel takes q torch\.\w+ \[.*\].*, mask "):
        attend_latents(**given, scale=1.0)


def test_wide_latents_are_refused() -> None:
    q, latent = torch.empty(1, 4, 1, 520, dtype=BF16), torch.empty(1, 1, 9, 520, dtype=BF16)
    q_rot, k_rot = torch.empty(1, 4, 1, 72, dtype=BF16), torch.empty(1, 1, 9, 72, dtype=BF16)
    assert attends_latents(q[..., :512], q_rot[..., :64], latent[..., :512], k_rot[..., :64], None)
    assert not attends_latents(q, q_rot[..., :64], latent, k_rot[..., :64], None)
    assert not attends_latents(q[..., :512], q_rot, latent[..., :512], k_rot, None)


def test_strides_are_those_of_the_tensors() -> None:
    """A cache's latents and keys, and queries as the model has them."""
    made: list[LatentCall] = []
    given = latent_attention.inputs(LatentCase("short", 3, tokens=2, part=True), "cpu")
    with launching_with(lambda _: made.append):
        attend_latents(**given)
    rows = made[0].rows
    assert rows[:8] == (3, 1, 5, 2, 70, 64, 16, 1)
    assert (rows.q_rot_batch, rows.q_rot_head, rows.q_rot_token) == (2 * 5 * 48, 48, 5 * 48)
    assert (rows.latent_batch, rows.latent_entry, rows.k_rot_batch, rows.k_rot_entry) == (94 * 64, 64, 94 * 16, 16)
    assert (rows.mask_batch, rows.mask_token) == (140, 70)


def test_a_cpu_has_no_kernel() -> None:
    with pytest.raises(Unsupported, match=r"^latent_attention: there is no kernel for cpu$"):
        attend_latents(**tensors(), scale=1.0)


def test_compilers_know_the_result() -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device="meta")

    given = empty(3, 8, 2, 64), empty(3, 8, 2, 16), empty(3, 1, 40, 64), empty(3, 1, 40, 16), empty(3, 1, 2, 40)
    made = torch.ops.onepass.attend_latents(*given, 0.125)
    assert made.shape == (3, 2, 8, 64) and made.dtype is BF16 and made.is_contiguous()
