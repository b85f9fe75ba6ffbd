"""Hooks on a patched model see what they see on the unpatched one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import onepass

pytest.importorskip("transformers")

from tests.helpers.models import CONFIGS, close, fresh, logits, tokens

NAMES = list(CONFIGS)
Event = tuple[str, str, Any]


def seen(value: Any) -> Any:
    """A hook's arguments as data that can be compared: tensors cloned, other objects by type."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [seen(item) for item in value]
    if isinstance(value, dict):
        return {key: seen(item) for key, item in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def record(model: nn.Module, events: list[Event], only: str | None = None) -> list[Any]:
    """Hook every module, or one, to add its inputs and output to ``events``. Returns the handles."""
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


def traffic(model: Any, ids: Tensor, only: str | None = None) -> list[Event]:
    """What temporary hooks see in one call."""
    events: list[Event] = []
    handles = record(model, events, only)
    logits(model, ids)
    for handle in handles:
        handle.remove()
    return events


def compare(got: Any, expected: Any, same: Callable[[Tensor, Tensor], None], path: str = "") -> None:
    """Assert the same structure, and that tensors are the ``same``."""
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


@pytest.mark.sampled(5)  # some models stay
@pytest.mark.parametrize("rounding", ["hf", "once"])
@pytest.mark.parametrize("name", NAMES)
def test_hooks_on_every_module(name: str, rounding: Any) -> None:
    """The calls, their order and their arguments are the unpatched model's; the values are those with fuse=False.

    With fuse=False, which replaces norms only, float32 sums are added in another order than in the model. So bytes
    are compared with that, and in float32 all values also with the unpatched model's.
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


@pytest.mark.sampled(5)  # some models stay
@pytest.mark.parametrize("rounding", ["hf", "once"])
@pytest.mark.parametrize("name", NAMES)
def test_a_hook_on_one_module(name: str, rounding: Any) -> None:
    """On each module of a layer in turn, and on the layer: it sees the unpatched model's values."""
    model = fresh(name)
    ids = tokens(2, 5)
    places = [place for place, _ in model.named_modules() if place.startswith("model.layers.1")]
    expected = {place: traffic(model, ids, place) for place in places}
    with onepass.patch(model, rounding=rounding):
        for place in places:
            compare(traffic(model, ids, place), expected[place], close)
    assert sum(map(len, expected.values())) >= 20


@pytest.mark.usefixtures("clean_global_hooks")
@pytest.mark.parametrize("name", NAMES)
def test_global_hooks(name: str) -> None:
    """They see the same classes in the same order, with the same values."""
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
            logits(model, ids)
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
    ("Gemma 3", "model.layers.1.post_attention_layernorm"),
    ("GLM-4", "model.layers.1.post_self_attn_layernorm"),
    ("Qwen3", "model.layers.0.self_attn.q_norm"),
    ("OLMo-2", "model.layers.1.self_attn.k_norm"),
    ("DeepSeek-V3", "model.layers.0.self_attn.q_a_proj"),
    ("DeepSeek-V3", "model.layers.0.self_attn.kv_a_proj_with_mqa"),
    ("DeepSeek-V3", "model.layers.1.self_attn.q_a_layernorm"),
    ("DeepSeek-V3", "model.layers.1.self_attn.kv_a_layernorm"),
]
"""A module of each kind that a fused launch skips."""


def steer(kind: str, module: nn.Module, by: Tensor) -> Any:
    """Register a hook that changes a module's output or input."""
    if kind == "output":
        return module.register_forward_hook(lambda _, args, output: output + by)
    if kind == "output, with kwargs":
        return module.register_forward_hook(lambda _, args, kwargs, output: output + by, with_kwargs=True)
    if kind == "input":
        return module.register_forward_pre_hook(lambda _, args: (args[0] * 2 + 1,))
    return module.register_forward_pre_hook(lambda _, args, kwargs: ((args[0] * 2 + 1,), kwargs), with_kwargs=True)


@pytest.mark.sampled(5)  # some models stay
@pytest.mark.parametrize("kind", ["output", "output, with kwargs", "input", "input, with kwargs"])
@pytest.mark.parametrize(("name", "place"), SKIPPED)
def test_hooks_that_change_values(name: str, place: str, kind: str) -> None:
    """Steering, a vector added to an output or a changed input, has the same effect as on the unpatched model."""
    model = fresh(name)
    ids = tokens(2, 5)
    module = model.get_submodule(place)
    plain = logits(model, ids)
    by = 0.5 * torch.randn(module.weight.shape[0], generator=torch.Generator().manual_seed(1))
    hook = steer(kind, module, by)
    expected = logits(model, ids)
    assert (expected - plain).abs().max() > 1e-3 * plain.abs().max(), "the hook must change something"
    with onepass.patch(model, rounding="once"):  # hooked before the patch
        close(logits(model, ids), expected)
        hook.remove()
        close(logits(model, ids), plain)
        hook = steer(kind, module, by)  # hooked after the patch
        close(logits(model, ids), expected)
    hook.remove()
    assert torch.equal(logits(model, ids), plain)


def append_to(order: list[str], place: str, word: str) -> Callable[..., None]:
    return lambda *_: order.append(f"{place} {word}")


def test_prepended_hooks_and_hooks_that_are_always_called() -> None:
    """``prepend`` and ``always_call`` work as in the unpatched model, also in a call that fails."""
    model = fresh("Qwen3")
    ids = tokens(2, 5)

    def observed() -> list[str]:
        order: list[str] = []

        def fail(*_: object) -> None:
            order.append("fail")
            raise RuntimeError("a hook that fails")

        handles: list[Any] = []
        for place in ("model.layers.0.post_attention_layernorm", "model.layers.1.self_attn.k_norm"):
            module = model.get_submodule(place)
            record_as = partial(append_to, order, place)
            handles.append(module.register_forward_hook(record_as("second")))
            handles.append(module.register_forward_hook(record_as("first"), prepend=True))
            handles.append(module.register_forward_pre_hook(record_as("pre, second")))
            handles.append(module.register_forward_pre_hook(record_as("pre, first"), prepend=True))
            handles.append(module.register_forward_hook(record_as("always"), always_call=True))
        logits(model, ids)
        handles.append(model.model.layers[0].post_attention_layernorm.register_forward_hook(fail, prepend=True))
        with pytest.raises(RuntimeError, match="a hook that fails"):
            logits(model, ids)
        for handle in handles:
            handle.remove()
        return order

    expected = observed()
    with onepass.patch(model):
        assert observed() == expected
    assert len(expected) == 14 and expected[-2:] == ["fail", "model.layers.0.post_attention_layernorm always"]


def test_backward_hooks_prevent_no_fusion() -> None:
    """Without gradients torch does not run them."""
    model = fresh("Qwen3")
    ids = tokens(2, 5)
    with onepass.patch(model) as handle:
        expected = logits(model, ids)
        hooks = [m.register_full_backward_hook(lambda *_: None) for m in model.model.layers.modules()]
        assert torch.equal(logits(model, ids), expected)
        assert "unfused" not in repr(handle)
    for hook in hooks:
        hook.remove()


def test_copies_keep_their_hooks() -> None:
    """A deep copy of a hooked, patched model runs the hook; removing it from the copy does not affect the original."""
    model = fresh("Qwen3")
    ids = tokens(2, 5)
    plain = logits(model, ids)
    q_norm = model.model.layers[0].self_attn.q_norm
    hook = q_norm.register_forward_hook(lambda _, args, output: output * 3)
    expected = logits(model, ids)
    handle = onepass.patch(model)
    other = copy.deepcopy(model)
    for each in (model, other):
        close(logits(each, ids), expected)
    other.model.layers[0].self_attn.q_norm._forward_hooks.clear()
    close(logits(other, ids), plain)
    close(logits(model, ids), expected)
    handle.undo()
    assert torch.equal(logits(model, ids), expected)
    hook.remove()
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("decode", [False, True])
def test_gradient_checkpointing_is_the_models_own(decode: bool) -> None:
    """In training a layer hands its forward to the checkpointing function without the cache, as in the unpatched model.

    transformers does so in ``__call__``, since 5.23 in a wrapper around ``forward``.
    """
    from transformers import DynamicCache

    model, ids = fresh("Llama").train(), tokens()
    calls: list[Any] = []

    def checkpoint(function: Any, *args: Any) -> Any:
        calls.append(function.keywords["past_key_values"])
        return function(*args)

    for layer in model.model.layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, checkpoint

    def run() -> Tensor:
        cache: Any = DynamicCache()
        with torch.no_grad():
            found: Tensor = model(ids, past_key_values=cache).logits
        assert cache.get_seq_length() == 0
        return found

    expected = run()
    with onepass.patch(model, decode=decode):
        close(run(), expected)
        assert calls == [None] * 4
        with pytest.raises(onepass.ContractError, match="have no backward"):
            model(ids)
