"""Which launches of a patched model are fused, with and without hooks, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import onepass
from onepass.models.forwards import attention, latent, norm
from onepass.models.forwards import layer as layers

pytest.importorskip("transformers")

from tests.helpers.models import close, fresh, logits, tokens
from tools.architectures.small import build


class Launches:
    """Counts the ops that forwards call; norms with an addition count separately."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, int] = {}
        ops = {"rms_norm": norm, "qk_norm_rope_cache": attention, "gemv_and_partial_norm": latent}
        for name, module in ops.items():
            monkeypatch.setattr(module, name, self._counted(name, getattr(module, name)))

    def _counted(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            key = "add + norm" if kwargs.get("residual") is not None else name
            self.counts[key] = self.counts.get(key, 0) + 1
            return op(*args, **kwargs)

        return counted

    def of(self, model: Any, ids: Tensor) -> dict[str, int]:
        self.counts = {}
        logits(model, ids)
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
def test_hooks_prevent_the_fusion_of_their_module_only(
    name: str, place: str, hooked: tuple[int, ...], free: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches of additions with their norm, q with k, projections with their norm, and single norms.

    Only the launch that would skip the hooked module is split. Hooks on modules that are called anyway prevent no
    fusion. Once a hook is removed, everything is fused again.
    """
    launches = Launches(monkeypatch)
    model = fresh(name)
    ids = tokens(2, 5)
    kinds = ("add + norm", "qk_norm_rope_cache", "gemv_and_partial_norm", "rms_norm")

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


@pytest.mark.parametrize("rounding", ["hf", "once"])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma 3", "MiniMax-M2"])
def test_the_launch_that_norms_and_rotates_has_the_models_bits(name: str, rounding: Any) -> None:
    """The same logits as with `qk_rms_norm` and the model's own rotation, in prompts and in steps."""
    model = fresh(name, torch.bfloat16)
    found = []
    with onepass.patch(model, rounding=rounding), torch.inference_mode():
        for in_one_launch in (True, False):
            cache: Any = None
            for count in (20, 1, 3):
                out = model(tokens(2, count, seed=count), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                found.append(out.logits)
            for layer in model.model.layers:
                own = layer.self_attn.__dict__
                assert (own["_onepass"].turn is not None) == in_one_launch
                own["_onepass"] = own["_onepass"]._replace(turn=None)
    assert all(torch.equal(one, two) and one.abs().max() > 1 for one, two in zip(found[:3], found[3:], strict=True))


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("rounding", ["hf", "once"])
@pytest.mark.parametrize("name", ["Gemma 2", "Gemma 3", "GLM-4"])
def test_a_post_norm_in_the_launch_changes_no_bit(name: str, rounding: Any, decode: bool, posts: list[int]) -> None:
    """The same logits as with the post-norm as a launch of its own, in prompts and in steps."""
    model = fresh(name, torch.bfloat16)
    found, launches = [], []
    with onepass.patch(model, rounding=rounding, decode=decode), torch.inference_mode():
        for in_one_launch in (True, False):
            cache: Any = None
            for count in (20, 1, 3):
                posts.clear()
                out = model(tokens(2, count, seed=count), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                found.append(out.logits)
                launches.append(len(posts))
            for layer in model.model.layers:
                own = layer.__dict__
                assert own["_onepass"].post == in_one_launch
                own["_onepass"] = own["_onepass"]._replace(post=False)
    in_steps = 0 if decode and (rounding == "once" or name == "GLM-4") else 2  # `linear` adds and norms there
    assert launches == [2, in_steps, in_steps, 0, 0, 0]
    assert all(torch.equal(one, two) and one.abs().max() > 1 for one, two in zip(found[:3], found[3:], strict=True))


def test_a_scaled_post_norm_in_the_launch_changes_no_bit(posts: list[int]) -> None:
    """HyperCLOVA X multiplies it by a number."""
    model = build("hyperclovax").to(torch.bfloat16)
    ids = tokens(2, 5)
    for layer in model.model.layers:
        layer.residual_multiplier = 0.22
    with onepass.patch(model):
        joined = logits(model, ids)
        assert len(posts) == 2
        for layer in model.model.layers:
            layer.__dict__["_onepass"] = layer.__dict__["_onepass"]._replace(post=False)
        assert torch.equal(joined, logits(model, ids)) and len(posts) == 2 and joined.abs().max() > 0.05
        for layer in model.model.layers:
            layer.residual_multiplier = 1.0
        assert not torch.equal(joined, logits(model, ids))


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each launch with a post-norm."""
    seen: list[int] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return onepass.rms_norm_add_rms_norm(*args, **kwargs)

    monkeypatch.setattr(norm, "rms_norm_add_rms_norm", noted)
    return seen


@pytest.mark.parametrize("name", ["post_attention_layernorm", "pre_feedforward_layernorm"])
def test_a_hook_on_either_norm_prevents_the_launch_of_both(name: str, posts: list[int]) -> None:
    model = fresh("Gemma 3")
    ids = tokens(2, 5)
    expected = logits(model, ids)
    with onepass.patch(model) as handle:
        close(logits(model, ids), expected)
        assert len(posts) == 2 and "unfused now" not in repr(handle)
        hook = getattr(model.model.layers[0], name).register_forward_hook(lambda *_: None)
        posts.clear()
        close(logits(model, ids), expected)
        assert len(posts) == 1 and "unfused now 1 x Gemma3DecoderLayer" in repr(handle)
        hook.remove()
        posts.clear()
        close(logits(model, ids), expected)
        assert len(posts) == 2 and "unfused now" not in repr(handle)


def test_a_post_norm_joins_no_launch_on_other_devices() -> None:
    """Its GPU kernels have not run yet."""
    model = fresh("Gemma 3", layers=1)
    with onepass.patch(model):
        found = model.model.layers[0]
        assert layers._post_norm(found, torch.empty(1, 2, 64)) is found.post_attention_layernorm
        assert layers._post_norm(found, torch.empty(1, 2, 64, device="meta")) is None


def test_a_residual_of_another_dtype_is_added_as_in_the_model(posts: list[int]) -> None:
    """Under autocast the attention's output is bfloat16 and the residual float32, and so is the model's sum."""
    model = fresh("Gemma 3")
    ids = tokens(2, 5)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        expected = model(ids).logits
        with onepass.patch(model):
            got = model(ids).logits
    assert got.dtype == expected.dtype and not posts
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


def test_norms_replaced_after_the_patch_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module or forward that replaces the norm is called with one tensor, as in the unpatched model."""
    launches = Launches(monkeypatch)
    model = fresh("Llama")
    ids = tokens(2, 5)
    layer = model.model.layers[0]
    norm = layer.post_attention_layernorm

    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    layer.post_attention_layernorm = Double()
    expected = logits(model, ids)
    layer.post_attention_layernorm = norm
    with onepass.patch(model):
        layer.post_attention_layernorm = Double()
        assert launches.of(model, ids)["add + norm"] == 1
        close(logits(model, ids), expected)
        layer.post_attention_layernorm = norm
        assert launches.of(model, ids)["add + norm"] == 2
        ours = norm.forward
        norm.forward = lambda x: x * 2
        close(logits(model, ids), expected)
        norm.forward = ours
        assert launches.of(model, ids)["add + norm"] == 2


class Compiled:
    """A compiled module: one graph without breaks."""

    def __init__(self, model: Any) -> None:
        torch._dynamo.reset()
        self.graphs: list[torch.fx.GraphModule] = []
        self.call: Any = torch.compile(model, fullgraph=True, backend=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    def fused(self) -> int:
        """How many launches in the latest graph fuse an addition and a norm."""
        nodes = [node for node in self.graphs[-1].graph.nodes if str(node.target) == "onepass.rms_norm.default"]
        assert nodes
        return sum(node.args[2] is not None for node in nodes)


@pytest.fixture
def steerable() -> Iterator[tuple[Any, Callable[[Any], Tensor], Callable[[], Any]]]:
    """A decoder layer, a function that runs it, and one that hooks its norm so that the output changes."""
    model = fresh("Qwen3", layers=1).model
    layer, h = model.layers[0], torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    angles = model.rotary_emb(h, torch.arange(8)[None])
    norm = layer.post_attention_layernorm

    def run(call: Any) -> Tensor:
        found: Tensor = call(h, position_embeddings=angles)
        return found

    with torch.no_grad():
        yield layer, run, lambda: norm.register_forward_hook(lambda _, args, output: output + 1)
    torch._dynamo.reset()


def test_a_compiled_layer_runs_the_hooks_it_was_compiled_with(steerable: Any) -> None:
    layer, run, steer = steerable
    plain = run(layer)
    hook = steer()
    expected = run(layer)
    assert (expected - plain).abs().max() > 1e-2 * plain.abs().max()
    with onepass.patch(layer):
        compiled = Compiled(layer)
        close(run(compiled.call), expected)
        assert compiled.fused() == 0
        hook.remove()
        compiled = Compiled(layer)
        close(run(compiled.call), plain)
        assert compiled.fused() == 1


@pytest.mark.usefixtures("clean_global_hooks")
def test_a_compiled_layer_runs_global_hooks(steerable: Any) -> None:
    layer, run, _ = steerable
    norm = type(layer.input_layernorm)

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if type(module) is norm else None

    hook = torch_module.register_module_forward_hook(double)
    try:
        expected = run(layer)
        with onepass.patch(layer):
            compiled = Compiled(layer)
            close(run(compiled.call), expected)
            assert compiled.fused() == 0
    finally:
        hook.remove()


def test_a_compiled_layer_sees_later_hooks_if_torch_guards_them(steerable: Any) -> None:
    """By default torch.compile ignores hooks that are added later, in any model. With guards on hooks it sees them."""
    layer, run, steer = steerable
    plain = run(layer)
    hook = steer()
    expected = run(layer)
    hook.remove()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False), onepass.patch(layer):
        compiled = Compiled(layer)
        close(run(compiled.call), plain)
        assert compiled.fused() == 1
        hook = steer()
        close(run(compiled.call), expected)
        assert compiled.fused() == 0 and len(compiled.graphs) == 2
        hook.remove()
        close(run(compiled.call), plain)
        assert len(compiled.graphs) == 2  # the first graph again
