"""What torch learns of a call: which tensors it wrote, and an event in a profile. And views that torch negates when it reads them.

Three paths make a call: C repeats it, Python makes it, or torch's dispatcher does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core import native, recording
from onepass.core import op as registration
from tests.all_ops.bad_input import DISPATCHED
from tests.inputs import names

pytest.importorskip("llvmlite")

Path = Callable[[registration.Op, tuple[Any, ...]], None]


@contextmanager
def without_libtorchs_functions() -> Iterator[None]:
    """The path in C asks Python about tensors."""
    module = native._load()[0]
    module.set_direct(0, 0, 0, 0)
    try:
        yield
    finally:
        module.set_direct(*native.direct())


def in_c(op: registration.Op, arguments: tuple[Any, ...]) -> None:
    op(*arguments)


def in_c_through_python(op: registration.Op, arguments: tuple[Any, ...]) -> None:
    with without_libtorchs_functions():
        op(*arguments)


def in_python(op: registration.Op, arguments: tuple[Any, ...]) -> None:
    recording.switch.on = False
    try:
        op(*arguments)
    finally:
        recording.switch.on = True


def dispatched(op: registration.Op, arguments: tuple[Any, ...]) -> None:
    op.out(*arguments)


PATHS: list[Any] = [in_python, dispatched]
if native.describe() == "on":
    PATHS += [in_c, in_c_through_python]
paths = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
SUBJECTS = {subject.contract.name: subject for subject in DISPATCHED}
OPS = {op.contract.name: op for op in registration.ops}
NORM = OPS["rms_norm"]


def norm_arguments(x: Tensor, out: Tensor | None, gamma: Tensor | None = None) -> tuple[Any, ...]:
    """The arguments of `rms_norm`, which C knows after this."""
    gamma = torch.ones(x.shape[-1]) if gamma is None else gamma
    options = (1e-6, 0.0, "once", None, "after", "silu", None, False)
    call = (x, gamma, None, None, None, None, *options, out, None, None)
    for _ in range(2):
        plain = [torch.ones_like(t) if isinstance(t, Tensor) else t for t in call]
        NORM(*plain)
    return call


class TestVersions:
    @paths
    @pytest.mark.parametrize("inference", [False, True], ids=["", "in inference mode"])
    @pytest.mark.parametrize("name", OPS)
    def test_every_written_tensor_has_a_new_one(self, name: str, inference: bool, path: Path) -> None:
        subject, op = SUBJECTS[name], OPS[name]
        given = subject.build("cpu")
        arguments = tuple(given[argument] for argument in names(op.contract))
        written = [given[n] for n, arg in op.contract.args.items() if arg.mutable]
        written += [given[n] for n in op.contract.out_names]
        with torch.inference_mode(inference):
            for _ in range(3):
                before = [None if t is None else t._version for t in written]
                path(op, arguments)
                after = [None if t is None else t._version - 1 for t in written]
                assert after == before and any(version is not None for version in after)
        read = [t for n, t in given.items() if isinstance(t, Tensor) and not any(t is w for w in written)]
        assert read and all(t._version <= 1 for t in read)  # a sample may be filled after its allocation

    @paths
    def test_overwriting_what_backward_needs_raises(self, path: Path) -> None:
        weight = torch.ones(3, 64, requires_grad=True)
        saved = torch.ones(3, 64)
        product = (weight * saved).sum()
        path(NORM, norm_arguments(torch.randn(3, 64), saved))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    @pytest.mark.skipif(native.describe() != "on", reason=f"the extension: {native.describe()}")
    def test_torch_has_the_functions_that_are_looked_for(self) -> None:
        assert all(native.direct())


class TestInferenceTensors:
    @paths
    def test_are_refused_as_outputs_elsewhere(self, path: Path) -> None:
        with torch.inference_mode():
            out = torch.zeros(3, 64)
            path(NORM, norm_arguments(torch.randn(3, 64), out))
            written = out.clone()
        arguments = norm_arguments(torch.randn(3, 64), out)
        message = "rms_norm: `out` must not be an inference tensor outside inference mode"
        for _ in range(2):
            with pytest.raises(onepass.ContractError, match=message):
                path(NORM, arguments)
        assert torch.equal(out, written) and written.any()

    def test_are_refused_as_caches(self) -> None:
        given = SUBJECTS["qk_norm_rope_cache"].build("cpu")
        with torch.inference_mode():
            given["k_cache"] = given["k_cache"].clone()
        with pytest.raises(onepass.ContractError, match="`k_cache` must not be an inference tensor"):
            OPS["qk_norm_rope_cache"](*[given[name] for name in names(OPS["qk_norm_rope_cache"].contract)])


def over_columns(shape: tuple[int, int]) -> Tensor:
    """A negated view of contiguous rows in the memory of complex numbers: all 1."""
    numbers = torch.complex(torch.full(shape, -1.0), torch.full(shape, -1.0))
    return numbers.conj().imag.as_strided(shape, (shape[1], 1))


class TestNegatedViews:
    @paths
    @pytest.mark.parametrize("view", [torch._neg_view(torch.full((3, 64), -1.0)), over_columns((3, 64))])
    @pytest.mark.parametrize("argument", ["x", "out", "gamma"])
    def test_are_refused_where_tensors_are_written(self, argument: str, view: Tensor, path: Path) -> None:
        assert view.is_neg() and torch.equal(view, torch.ones(3, 64))
        view = view[0] if argument == "gamma" else view
        changed = {"x": torch.ones(3, 64), "out": torch.zeros(3, 64), "gamma": torch.ones(64)} | {argument: view}
        arguments = norm_arguments(changed["x"], changed["out"], changed["gamma"])
        with pytest.raises(onepass.ContractError, match=f"rms_norm: `{argument}` must not be a negated view"):
            path(NORM, arguments)

    def test_the_dispatcher_resolves_those_that_are_only_read(self) -> None:
        x = torch.randn(3, 64)
        inputs = norm_arguments(torch._neg_view(x), None)[:-3]
        assert torch.equal(NORM.functional(*inputs)[0], onepass.rms_norm(-x, torch.ones(64)))


def events(call: Callable[[], Any]) -> list[tuple[str, list[Any]]]:
    """The events of a call that are about an op of onepass, with the shapes of its first two tensors."""
    with torch.profiler.profile(record_shapes=True) as profile:
        call()
    return [(event.name, event.input_shapes[:2]) for event in profile.events() if event.name.startswith("onepass::")]


class TestProfile:
    @paths
    def test_a_call_has_one_event(self, path: Path) -> None:
        arguments = norm_arguments(torch.randn(3, 64), torch.empty(3, 64))
        name = "onepass::rms_norm_out" if path is dispatched else "onepass::rms_norm"
        assert events(lambda: path(NORM, arguments)) == [(name, [[3, 64], [64]])]

    @paths
    def test_so_has_one_that_raises(self, path: Path) -> None:
        arguments = (*norm_arguments(torch.randn(3, 64), None)[:-3], torch.empty(3, 63), None, None)

        def call() -> None:
            with pytest.raises(onepass.ContractError, match="`out` must have shape"):
                path(NORM, arguments)

        assert len(events(call)) == 1

    @pytest.mark.skipif(native.describe() != "on", reason=f"the extension: {native.describe()}")
    def test_known_calls_are_repeated_in_c(self) -> None:
        arguments = norm_arguments(torch.randn(3, 64), None)
        assert NORM.table is not None
        before = NORM.table.counts()["hits"]
        assert len(events(lambda: [NORM(*arguments) for _ in range(3)])) == 3
        assert NORM.table.counts()["hits"] == before + 3
