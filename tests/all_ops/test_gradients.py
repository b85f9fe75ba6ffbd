"""There is no backward: every request for a derivative raises, and none is lost silently."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import onepass

REFUSED = r"rms_norm: `{}` must not require a gradient \(there is no backward: .*\), got {}"


@onepass.prologue
def scaled(x, gate):  # type: ignore[no-untyped-def]
    return x * gate


X, GAMMA = torch.randn(3, 64), torch.ones(64)


def needing_grad(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def norm(x: Tensor) -> Tensor:
    return onepass.rms_norm(x, GAMMA)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda: onepass.rms_norm(needing_grad(3, 64), GAMMA)),
        ("gamma", lambda: onepass.rms_norm(X, torch.nn.Parameter(GAMMA))),
        ("residual", lambda: onepass.rms_norm(X, GAMMA, residual=needing_grad(3, 64))),
        ("out", lambda: onepass.rms_norm(X, GAMMA, out=needing_grad(3, 64))),
        ("out", lambda: onepass.rms_norm(X, GAMMA, out=needing_grad(3, 64) * 2)),
        (
            "gamma",
            lambda: torch.ops.onepass.rms_norm(
                X,
                torch.nn.Parameter(GAMMA),
                None,
                None,
                None,
                None,
                1e-6,
                0.0,
                "once",
                None,
                "after",
                "silu",
                None,
                False,
            ),
        ),
        ("x", lambda: torch.func.grad(lambda x: norm(x).sum())(X)),
        ("x", lambda: torch.func.vjp(norm, X)),
    ],
    ids=["x", "gamma", "residual", "out, a leaf", "out, no leaf", "dispatcher", "func.grad", "func.vjp"],
)
def test_backward_raises(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(onepass.ContractError, match=REFUSED.format(argument, "requires_grad=True")):
        call()


def test_lists_of_tensors_are_checked() -> None:
    with pytest.raises(onepass.ContractError, match="rms_norm_fused_fp8: `prologue_args` must not require a gradient"):
        onepass.rms_norm_fused_fp8(X, GAMMA, prologue=scaled, prologue_args=(needing_grad(3, 64),))


def test_forward_mode_raises() -> None:
    message = REFUSED.format("x", "a tensor with a tangent")
    with forward_ad.dual_level():
        with pytest.raises(onepass.ContractError, match=message):
            norm(forward_ad.make_dual(X, torch.ones_like(X)))
        assert torch.equal(norm(X), norm(X.clone()))  # no tangent: nothing to lose
    with pytest.raises(onepass.ContractError, match=message):
        torch.func.jvp(norm, (X,), (torch.ones_like(X),))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_runs_without_gradients(guard: Callable[[], torch.no_grad]) -> None:
    x, gamma = needing_grad(3, 64), torch.nn.Parameter(GAMMA.clone())
    expected = norm(x.detach())
    with guard():
        for y in (
            onepass.rms_norm(x, gamma),
            torch.ops.onepass.rms_norm(
                x, gamma, None, None, None, None, 1e-6, 0.0, "once", None, "after", "silu", None, False
            )[0],
        ):
            assert not y.requires_grad and torch.equal(y, expected)
    assert torch.equal(norm(x.detach()), expected)


def test_compiled_calls_raise_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, gamma: onepass.rms_norm(x, gamma), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="rms_norm: `gamma` must not require a gradient"):
        compiled(X, torch.nn.Parameter(GAMMA))
    with torch.no_grad():
        assert torch.equal(compiled(X, torch.nn.Parameter(GAMMA)), norm(X))


def test_autocast_does_not_affect_the_ops() -> None:
    """Inputs are not converted, and results have x's dtype."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(onepass.rms_norm(X, GAMMA), norm(X))
        low = onepass.rms_norm(X.bfloat16(), GAMMA)
        assert low.dtype is torch.bfloat16
        through_dispatcher = torch.ops.onepass.rms_norm(
            X.bfloat16(), GAMMA, None, None, None, None, 1e-6, 0.0, "once", None, "after", "silu", None, False
        )[0]
    assert torch.equal(low, onepass.rms_norm(X.bfloat16(), GAMMA)) and torch.equal(low, through_dispatcher)
