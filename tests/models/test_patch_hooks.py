"""Hooks on a patched model see what they see on the unpatched one, and fused launches come back when the hooks are gone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import onepass
from onepass.integrations import forwards

pytest.importorskip("transformers")

from tests.helpers.models import CONFIGS, small, tokens

NAMES = list(CONFIGS)
Event = tuple[str, str, Any]


def fresh(name: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> Any:
    """A model of this test's own: hooks of one test must not be another's."""
    return copy.deepcopy(small(name, dtype, layers))


def seen(value: Any) -> Any:
    """What a hook was given, as data that can be compared: tensors cloned, other objects by type."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [seen(item) for item in value]
    if isinstance(value, dict):
        return {key: seen(item) for key, item in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def record(model: nn.Module, events: list[Event], only: str | None = None) -> list[Any]:
    """Hook every module, or one; each call adds its inputs and its output to ``events``. Returns the handles."""
    handles: list[Any] = []
    for name, module in model.named_modules():
        if only is not None and name != only:
            continue

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            events.append((name, "in", (seen(args), seen(kwargs))))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            events.append((name, "out", (seen(args), seen(kwargs), seen(output))))

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    return handles


def run(model: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(ids, use_cache=True).logits
    return logits


def traffic(model: Any, ids: Tensor, only: str | None = None) -> list[Event]:
    """What hooks see in one call; they are removed again."""
    events: list[Event] = []
    handles = record(model, events, only)
    run(model, ids)
    for handle in handles:
        handle.remove()
    return events


def compare(got: Any, expected: Any, same: Callable[[Tensor, Tensor], None], path: str = "") -> None:
    """The same structure, and tensors that are the ``same``."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), f"{path}: {type(got).__name__} instead of a tensor"
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), path
        same(got, expected)
    elif isinstance(expected, (tuple, list)):
        assert type(got) is type(expected) and len(got) == len(expected), path
        for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            compare(mine, theirs, same, f"{path}/{index}")
    elif isinstance(expected, dict):
        assert list(got) == list(expected), path
        for key, theirs in expected.items():
            compare(got[key], theirs, same, f"{path}/{key}")
    else:
        assert got == expected, path


def identical(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got, expected)


def close(got: Tensor, expected: Tensor) -> None:
    """To float32's last digits, as a share of the largest: sums in another order. Zeros are not close."""
    if expected.is_floating_point():
        size = float(expected.abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-4 * size)
    else:
        identical(got, expected)


# --- what hooks see -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["model", "once"])
@pytest.mark.parametrize("name", NAMES)
def test_hooks_on_every_module(name: str, rounding: Any) -> None:
    """The calls, their order and their arguments are the unpatched model's; the values are those of its norms replaced alone.

    Norms replaced alone (fuse=False) differ from the model's own in the order of float32 sums, so bytes are compared with
    them, and in float32 all values with the unpatched model's too.
    """
    ids = tokens(2, 5)
    for dtype, tolerance in ((torch.float32, close), (torch.bfloat16, None)):
        model = fresh(name, dtype)
        expected = traffic(model, ids)
        with onepass.patch(model, rounding=rounding, fuse=False):
            alone = traffic(model, ids)
        with onepass.patch(model, rounding=rounding):
            got = traffic(model, ids)
        compare(got, alone, identical)
        assert [event[:2] for event in got] == [event[:2] for event in expected]
        compare(got, expected, tolerance or (lambda *_: None))
        assert len(got) > 50


@pytest.mark.parametrize("rounding", ["model", "once"])
@pytest.mark.parametrize("name", NAMES)
def test_a_hook_on_one_module(name: str, rounding: Any) -> None:
    """Each module of a layer in turn, and the layer: one hook sees the unpatched model's values, the rest may be fused."""
    model = fresh(name)
    ids = tokens(2, 5)
    places = [place for place, _ in model.named_modules() if place.startswith("model.layers.1")]
    expected = {place: traffic(model, ids, place) for place in places}
    with onepass.patch(model, rounding=rounding):
        for place in places:
            compare(traffic(model, ids, place), expected[place], close)
    assert sum(map(len, expected.values())) >= 20


@pytest.fixture
def clean_global_hooks() -> Iterator[None]:
    yield
    assert not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks


@pytest.mark.usefixtures("clean_global_hooks")
@pytest.mark.parametrize("name", NAMES)
def test_hooks_for_all_modules(name: str) -> None:
    """torch's global hooks: the same classes in the same order, with the same values."""
    model = fresh(name)
    ids = tokens(2, 5)

    def watched(before: bool) -> list[Event]:
        events: list[Event] = []
        if before:
            handle = torch_module.register_module_forward_pre_hook(
                lambda module, args: events.append((type(module).__name__, "in", seen(args)))
            )
        else:
            handle = torch_module.register_module_forward_hook(
                lambda module, args, output: events.append((type(module).__name__, "out", (seen(args), seen(output))))
            )
        try:
            run(model, ids)
        finally:
            handle.remove()
        return events

    for before in (True, False):
        expected = watched(before)
        with onepass.patch(model, rounding="once"):
            compare(watched(before), expected, close)
        assert len(expected) > 25


SKIPPED = [
    ("Llama", "model.layers.0.post_attention_layernorm"),
    ("Gemma 3", "model.layers.1.pre_feedforward_layernorm"),
    ("Qwen3", "model.layers.0.self_attn.q_norm"),
    ("OLMo-2", "model.layers.1.self_attn.k_norm"),
    ("DeepSeek-V3", "model.layers.0.self_attn.q_a_proj"),
    ("DeepSeek-V3", "model.layers.0.self_attn.kv_a_proj_with_mqa"),
    ("DeepSeek-V3", "model.layers.1.self_attn.q_a_layernorm"),
    ("DeepSeek-V3", "model.layers.1.self_attn.kv_a_layernorm"),
]
"""A module of each kind that a fused launch does without."""


def steer(kind: str, module: nn.Module, by: Tensor) -> Any:
    """A hook that changes what a module returns, or what it is given."""
    if kind == "output":
        return module.register_forward_hook(lambda _, args, output: output + by)
    if kind == "output, with kwargs":
        return module.register_forward_hook(lambda _, args, kwargs, output: output + by, with_kwargs=True)
    if kind == "input":
        return module.register_forward_pre_hook(lambda _, args: (args[0] * 2 + 1,))
    return module.register_forward_pre_hook(lambda _, args, kwargs: ((args[0] * 2 + 1,), kwargs), with_kwargs=True)


@pytest.mark.parametrize("kind", ["output", "output, with kwargs", "input", "input, with kwargs"])
@pytest.mark.parametrize(("name", "place"), SKIPPED)
def test_hooks_that_change_values(name: str, place: str, kind: str) -> None:
    """Steering: a vector added to a norm's output, or another input, has the effect that it has on the unpatched model."""
    model = fresh(name)
    ids = tokens(2, 5)
    module = model.get_submodule(place)
    plain = run(model, ids)
    by = 0.5 * torch.randn(module.weight.shape[0], generator=torch.Generator().manual_seed(1))
    hook = steer(kind, module, by)
    expected = run(model, ids)
    assert (expected - plain).abs().max() > 1e-3 * plain.abs().max(), "the hook must change something"
    with onepass.patch(model, rounding="once"):  # hooked before it was patched
        close(run(model, ids), expected)
        hook.remove()
        close(run(model, ids), plain)
        hook = steer(kind, module, by)  # and afterwards
        close(run(model, ids), expected)
    hook.remove()
    assert torch.equal(run(model, ids), plain)


def note(order: list[str], place: str, word: str) -> Callable[..., None]:
    return lambda *_: order.append(f"{place} {word}")


def test_order_of_hooks_and_hooks_that_are_always_called() -> None:
    """``prepend`` and ``always_call`` are torch's business, also in a call that fails."""
    model = fresh("Qwen3")
    ids = tokens(2, 5)

    def told() -> list[str]:
        order: list[str] = []

        def fail(*_: object) -> None:
            order.append("fail")
            raise RuntimeError("a hook that fails")

        handles: list[Any] = []
        for place in ("model.layers.0.post_attention_layernorm", "model.layers.1.self_attn.k_norm"):
            module = model.get_submodule(place)
            say = partial(note, order, place)
            handles.append(module.register_forward_hook(say("second")))
            handles.append(module.register_forward_hook(say("first"), prepend=True))
            handles.append(module.register_forward_pre_hook(say("pre, second")))
            handles.append(module.register_forward_pre_hook(say("pre, first"), prepend=True))
            handles.append(module.register_forward_hook(say("always"), always_call=True))
        run(model, ids)
        handles.append(model.model.layers[0].post_attention_layernorm.register_forward_hook(fail, prepend=True))
        with pytest.raises(RuntimeError, match="a hook that fails"):
            run(model, ids)
        for handle in handles:
            handle.remove()
        return order

    expected = told()
    with onepass.patch(model):
        assert told() == expected
    assert len(expected) == 14 and expected[-2:] == ["fail", "model.layers.0.post_attention_layernorm always"]


def test_backward_hooks_change_nothing() -> None:
    """Without gradients torch runs none of them, so nothing has to be called for their sake."""
    model = fresh("Qwen3")
    ids = tokens(2, 5)
    with onepass.patch(model) as handle:
        expected = run(model, ids)
        hooks = [m.register_full_backward_hook(lambda *_: None) for m in model.model.layers.modules()]
        assert torch.equal(run(model, ids), expected)
        assert "unfused" not in repr(handle)
    for hook in hooks:
        hook.remove()


# --- when launches are fused ----------------------------------------------------------------------------------------


class Launches:
    """Counts of fused launches: what `forwards` calls, and whether an addition was in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, int] = {}
        for name in ("rms_norm", "qk_rms_norm", "gemv_and_partial_norm"):
            monkeypatch.setattr(forwards, name, self._counted(name, getattr(forwards, name)))

    def _counted(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            key = "add + norm" if kwargs.get("residual") is not None else name
            self.counts[key] = self.counts.get(key, 0) + 1
            return op(*args, **kwargs)

        return counted

    def of(self, model: Any, ids: Tensor) -> dict[str, int]:
        self.counts = {}
        run(model, ids)
        return self.counts


@pytest.mark.parametrize(
    ("name", "place", "hooked", "free"),
    [
        ("Llama", "model.layers.0.post_attention_layernorm", (1, 0, 0, 4), (2, 0, 0, 3)),
        ("Llama", "model.layers.0.self_attn", (2, 0, 0, 3), (2, 0, 0, 3)),
        ("Llama", "model.layers.0.input_layernorm", (2, 0, 0, 3), (2, 0, 0, 3)),
        ("Qwen3", "model.layers.1.self_attn.q_norm", (2, 1, 0, 5), (2, 2, 0, 3)),
        ("Qwen3", "model.layers.1.self_attn.q_proj", (2, 2, 0, 3), (2, 2, 0, 3)),
        ("DeepSeek-V3", "model.layers.0.self_attn.kv_a_proj_with_mqa", (2, 0, 2, 5), (2, 0, 4, 3)),
        ("DeepSeek-V3", "model.layers.0.self_attn.kv_b_proj", (2, 0, 4, 3), (2, 0, 4, 3)),
    ],
)
def test_fused_launches_return_when_a_hook_is_removed(
    name: str, place: str, hooked: tuple[int, ...], free: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches: additions with their norm, q with k, projections with their norm, norms alone.

    Only what would skip the hooked module is split up; a hook on a module that is called anyway costs no fusion.
    """
    launches = Launches(monkeypatch)
    model = fresh(name)
    ids = tokens(2, 5)
    kinds = ("add + norm", "qk_rms_norm", "gemv_and_partial_norm", "rms_norm")

    def counted() -> tuple[int, ...]:
        counts = launches.of(model, ids)
        return tuple(counts.get(kind, 0) for kind in kinds)

    with onepass.patch(model, rounding="once") as handle:
        assert counted() == free
        for register in ("register_forward_hook", "register_forward_pre_hook"):
            hook = getattr(model.get_submodule(place), register)(lambda *_: None)
            assert counted() == hooked
            assert ("unfused now 1 x" in repr(handle)) == (hooked != free)
            hook.remove()
            assert counted() == free
            assert "unfused now" not in repr(handle)


def test_a_norm_whose_forward_or_module_is_replaced_after_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the norm's place is called, as in the unpatched model, with one tensor."""
    launches = Launches(monkeypatch)
    model = fresh("Llama")
    ids = tokens(2, 5)
    layer = model.model.layers[0]
    norm = layer.post_attention_layernorm

    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    layer.post_attention_layernorm = Double()
    expected = run(model, ids)
    layer.post_attention_layernorm = norm
    with onepass.patch(model):
        layer.post_attention_layernorm = Double()
        assert launches.of(model, ids)["add + norm"] == 1
        close(run(model, ids), expected)
        layer.post_attention_layernorm = norm
        assert launches.of(model, ids)["add + norm"] == 2
        ours = norm.forward
        norm.forward = lambda x: x * 2
        close(run(model, ids), expected)
        norm.forward = ours
        assert launches.of(model, ids)["add + norm"] == 2


def test_copies_keep_their_hooks() -> None:
    """A deep copy of a hooked, patched model runs its hook; taking it off the copy leaves the original's."""
    model = fresh("Qwen3")
    ids = tokens(2, 5)
    plain = run(model, ids)
    q_norm = model.model.layers[0].self_attn.q_norm
    hook = q_norm.register_forward_hook(lambda _, args, output: output * 3)
    expected = run(model, ids)
    handle = onepass.patch(model)
    other = copy.deepcopy(model)
    for each in (model, other):
        close(run(each, ids), expected)
    other.model.layers[0].self_attn.q_norm._forward_hooks.clear()
    close(run(other, ids), plain)
    close(run(model, ids), expected)
    handle.undo()
    assert torch.equal(run(model, ids), expected)
    hook.remove()
    assert torch.equal(run(model, ids), plain)


@pytest.mark.parametrize("interleaved", [True, False])
def test_hooks_that_come_and_go_over_an_mla_cache(interleaved: bool) -> None:
    """Entries of an `MlaCache` are written in one launch or by the model's own code, as hooks allow, within one generation."""
    from onepass.integrations import MlaCache

    model = fresh("DeepSeek-V3")
    model.config.rope_interleave = interleaved
    ids = tokens(2, 9)

    def logits(cache: Any, prepare: Callable[[int], None] = lambda _: None) -> Tensor:
        found = []
        with torch.inference_mode():
            for step in range(5):
                prepare(step)
                part = ids[:, :5] if step == 0 else ids[:, 4 + step : 5 + step]
                found.append(model(part, past_key_values=cache, use_cache=True).logits[:, -1])
        return torch.stack(found)

    from transformers import DynamicCache

    expected = logits(DynamicCache(config=model.config))
    for first in (0, 1):  # hooked in every other step, beginning with the prompt or the one after
        hooks: list[Any] = []
        calls: list[int] = []

        def prepare(step: int, first: int = first, hooks: list[Any] = hooks, calls: list[int] = calls) -> None:
            while hooks:
                hooks.pop().remove()
            if step % 2 == first:
                norm = model.model.layers[1].self_attn.kv_a_layernorm
                hooks.append(norm.register_forward_hook(lambda *_: calls.append(step)))

        with onepass.patch(model, rounding="once"):
            close(logits(MlaCache(2, 16), prepare), expected)
        assert calls == [step for step in range(5) if step % 2 == first]
        while hooks:
            hooks.pop().remove()
    with onepass.patch(model, rounding="once") as handle:  # undone in the middle of a generation
        close(logits(MlaCache(2, 16), lambda step: handle.undo() if step == 2 else None), expected)


# --- compiled -------------------------------------------------------------------------------------------------------


class Compiled:
    """A model of one layer as one graph without breaks."""

    def __init__(self, model: Any) -> None:
        torch._dynamo.reset()
        self.graphs: list[torch.fx.GraphModule] = []
        self.call: Any = torch.compile(model, fullgraph=True, backend=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    def fused(self) -> int:
        """Additions that are in the launch of a norm, in the latest graph."""
        nodes = [node for node in self.graphs[-1].graph.nodes if str(node.target) == "onepass.rms_norm.default"]
        assert nodes
        return sum(node.args[2] is not None for node in nodes)


@pytest.fixture
def steerable() -> Iterator[tuple[Any, Callable[[Any], Tensor], Callable[[], Any]]]:
    """A model, how to get its logits, and how to hook it so that they change."""
    model = fresh("Qwen3", layers=1)
    ids = tokens(2, 8)
    norm = model.model.layers[0].post_attention_layernorm

    def logits(call: Any) -> Tensor:
        found: Tensor = call(ids, use_cache=False).logits
        return found

    with torch.no_grad():
        yield model, logits, lambda: norm.register_forward_hook(lambda _, args, output: output + 1)
    torch._dynamo.reset()


def test_a_compiled_model_runs_the_hooks_it_was_compiled_with(steerable: Any) -> None:
    model, logits, steer = steerable
    plain = logits(model)
    hook = steer()
    expected = logits(model)
    assert (expected - plain).abs().max() > 1e-2 * plain.abs().max()
    with onepass.patch(model):
        compiled = Compiled(model)
        close(logits(compiled.call), expected)
        assert compiled.fused() == 0
        hook.remove()
        compiled = Compiled(model)
        close(logits(compiled.call), plain)
        assert compiled.fused() == 1


@pytest.mark.usefixtures("clean_global_hooks")
def test_a_compiled_model_runs_global_hooks(steerable: Any) -> None:
    model, logits, _ = steerable
    norm = type(model.model.norm)

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if type(module) is norm else None

    hook = torch_module.register_module_forward_hook(double)
    try:
        expected = logits(model)
        with onepass.patch(model):
            compiled = Compiled(model)
            close(logits(compiled.call), expected)
            assert compiled.fused() == 0
    finally:
        hook.remove()


def test_a_compiled_model_sees_later_hooks_where_torch_looks_for_them(steerable: Any) -> None:
    """By default torch.compile does not notice hooks that come later, in any model; told to, it notices them in a patched one."""
    model, logits, steer = steerable
    plain = logits(model)
    hook = steer()
    expected = logits(model)
    hook.remove()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False), onepass.patch(model):
        compiled = Compiled(model)
        close(logits(compiled.call), plain)
        assert compiled.fused() == 1
        hook = steer()
        close(logits(compiled.call), expected)
        assert compiled.fused() == 0 and len(compiled.graphs) == 2
        hook.remove()
        close(logits(compiled.call), plain)
        assert len(compiled.graphs) == 2  # the first graph again
