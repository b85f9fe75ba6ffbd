"""``onepass.patch(model, decode=True)`` under torch.compile and with hooks, replaced modules and autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass

pytest.importorskip("transformers")

import transformers
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import StaticCache

from tests.helpers.models import close, fresh, logits, small, tokens

IDS = tokens(2, 4)


@torch.no_grad()
def steps(model: Any, call: Any, count: int = 4) -> Tensor:
    """The logits of some steps after a prompt, each with the token that the last one chose."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(tokens(1, 6), past_key_values=cache)
    found, ids = [], tokens(1, 1)
    for _ in range(count):
        found.append(call(ids, past_key_values=cache).logits)
        ids = found[-1].argmax(-1)
    return torch.cat(found)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("name", "options"), [("Qwen3", {}), pytest.param("OLMo-2", {"weights": "fp8"}, marks=pytest.mark.full)]
)
def test_one_graph_for_all_steps(name: str, options: dict[str, Any]) -> None:
    """No graph breaks, and no recompilation from token to token. Weights are inputs of fixed address."""
    model = fresh(name, layers=1)
    with onepass.patch(model, decode=True, **options):
        expected = steps(model, model)
        got = steps(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
        weight = model.model.layers[0].self_attn._onepass.step.qkv.weight
        assert weight._dynamo_static_input_type == "unguarded"  # CUDA graphs of torch.compile do not copy it
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-6 * float(expected.abs().max()))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.full  # test_one_graph_for_all_steps compiles the same step
@pytest.mark.usefixtures("fresh_compiler")
def test_generate_compiles_one_graph() -> None:
    """transformers compiles the step over its static cache itself."""
    model = fresh("Llama", layers=1)
    make: Any = transformers.CompileConfig
    config = make(backend="aot_eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(IDS, **options, disable_compile=True)
    with onepass.patch(model, decode=True), torch.inference_mode():
        got = model.generate(IDS, **options, compile_config=config)
    assert torch.equal(got, expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_fake_tensors_and_export_leave_the_weights_alone() -> None:
    """A fake step is a decode step. An exported program runs as without decode, because it has the model's parameters."""
    model = fresh("Llama", layers=1)
    expected = logits(model, IDS)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), onepass.patch(model, decode=True):
        made = model(torch.ones(2, 8, dtype=torch.int64), use_cache=False).logits
    assert made.shape == (2, 8, 128) and type(made).__name__ == "FakeTensor"
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    with torch.no_grad(), onepass.patch(model, decode=True):
        program = torch.export.export(Logits(model), (IDS,))
        close(program.module()(IDS), expected)
        assert not any(name.startswith("merged") for name in program.state_dict)
    assert torch.equal(logits(model, IDS), expected)


class Logits(nn.Module):
    """A model that returns logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Any:
        return self.model(ids, use_cache=False).logits


HOOKED = ["self_attn", "self_attn.q_proj", "input_layernorm"]
MORE_HOOKED = ["self_attn.o_proj", "mlp", "mlp.gate_proj", "mlp.act_fn", "post_attention_layernorm"]


@pytest.mark.parametrize("options", [{}, {"weights": "fp8"}], ids=str)
@pytest.mark.parametrize("where", [*HOOKED, *(pytest.param(where, marks=pytest.mark.full) for where in MORE_HOOKED)])
def test_hooks_see_the_calls_of_the_model(where: str, options: dict[str, Any]) -> None:
    """A hook on any module of a layer sees its inputs and outputs, and can change them."""
    model = fresh("Llama", layers=1)
    calls: list[tuple[Tensor, Tensor]] = []

    def hook(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        made = output[0] if isinstance(output, tuple) else output
        calls.append((given, made))
        return (made * 2, *output[1:]) if isinstance(output, tuple) else made * 2

    def run() -> Tensor:
        module = model.get_submodule(f"model.layers.0.{where}")
        with module.register_forward_hook(hook, with_kwargs=True):
            return logits(model, IDS)

    quantized = bool(options)
    plain = logits(model, IDS)
    expected = run()
    with onepass.patch(model, decode=True, **options) as handle:
        fused = logits(model, IDS)
        got = run()
        assert "unfused" not in repr(handle)
    assert len(calls) == 2
    if quantized:
        assert not torch.equal(got, fused)
        return
    for mine, theirs in zip(calls[1], calls[0], strict=True):
        close(mine, theirs)
    close(got, expected)
    assert (got - plain).abs().max() > 1e-3 * plain.abs().max(), "the hook must change something"


def test_hooks_are_reported_while_they_are_there() -> None:
    model = fresh("Llama")
    with onepass.patch(model, decode=True) as handle:
        hook = model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: None)
        report = repr(handle)
        hook.remove()
        assert "unfused" not in repr(handle)
    reason = "a module that it would skip has a hook, or was replaced after patch"
    for line in ("1 x LlamaMLP decode MLP", "1 x LlamaDecoderLayer decode"):
        assert f"  unfused now {line}: {reason}" in report


class Adapter(nn.Module):
    """A layer around another, as adapters of PEFT are."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Any:
        return self.base(x) * 1.5


@pytest.mark.parametrize("where", ["self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"])
def test_replaced_modules_are_called(where: str) -> None:
    model = fresh("Llama")
    parent, _, name = f"model.layers.0.{where}".rpartition(".")
    owner = model.get_submodule(parent)
    base = getattr(owner, name)
    plain = logits(model, IDS)
    with onepass.patch(model, decode=True):
        setattr(owner, name, Adapter(base))
        got = logits(model, IDS)
        setattr(owner, name, base)
        close(logits(model, IDS), plain)
    setattr(owner, name, Adapter(base))
    close(got, logits(model, IDS))
    assert not torch.allclose(got, plain)


@pytest.mark.parametrize("where", ["mlp.act_fn", "mlp", "self_attn", "self_attn.o_proj", "input_layernorm"])
def test_replaced_forwards_are_called(where: str) -> None:
    model = fresh("Llama")
    plain = logits(model, IDS)
    with onepass.patch(model, decode=True) as handle:
        module = model.get_submodule(f"model.layers.0.{where}")
        bound, own = module.__dict__.get("forward"), module.forward

        def doubled(*args: Any, **kwargs: Any) -> Any:
            made = own(*args, **kwargs)
            return (made[0] * 2, *made[1:]) if isinstance(made, tuple) else made * 2

        module.forward = doubled
        got = logits(model, IDS)
        assert "unfused now 1 x LlamaDecoderLayer decode" in repr(handle)
        del module.__dict__["forward"]
        if bound is not None:
            module.forward = bound
        close(logits(model, IDS), plain)
    module = model.get_submodule(f"model.layers.0.{where}")
    with module.register_forward_hook(
        lambda _, __, made: (made[0] * 2, *made[1:]) if isinstance(made, tuple) else made * 2
    ):
        close(got, logits(model, IDS))
    assert not torch.allclose(got, plain)


def test_autocast_runs_as_without_decode() -> None:
    model = small("Llama", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with onepass.patch(model):
            expected = logits(model, IDS)
        with onepass.patch(model, decode=True):
            assert torch.equal(logits(model, IDS), expected)


def test_recorded_hidden_states_prevent_no_step() -> None:
    """transformers' hooks stay on attentions after they were asked for once."""
    model = fresh("Qwen3")
    with torch.inference_mode():
        expected = model(IDS, output_hidden_states=True).hidden_states
        with onepass.patch(model, decode=True):
            got = model(IDS, output_hidden_states=True).hidden_states
    for mine, theirs in zip(got, expected, strict=True):
        close(mine, theirs)
