"""`onepass.models.register`: norms, layers and attentions of models that transformers does not have."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.models import Attention, Layer, Mla, Norm, register
from onepass.models.patching import forms


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers ends with it."""
    monkeypatch.setattr(forms, "_registered", dict(forms._registered))


class ScaleNorm(nn.Module):
    """An RMSNorm whose code is not in transformers. It rounds once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.small = 1e-6
        self.weight = nn.Parameter(0.2 * torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide / (wide.square().mean(-1, keepdim=True) + self.small).sqrt()
        y: Tensor = (wide * (1 + self.weight.float())).to(x.dtype)
        return y


class Attend(nn.Module):
    """Instead of an attention, a projection that returns no weights."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.project = nn.Linear(size, size)

    def forward(self, hidden_states: Tensor, gain: float) -> tuple[Tensor, None]:
        return gain * self.project(hidden_states), None


class Block(nn.Module):
    """A decoder layer with names of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = ScaleNorm(size), ScaleNorm(size)
        self.self_attn, self.dense, self.drop = Attend(size), nn.Linear(size, size), nn.Identity()
        self.amount = 0.5

    def forward(self, hidden_states: Tensor, gain: float = 2.0) -> Tensor:
        mixed, _ = self.self_attn(hidden_states=self.first(hidden_states), gain=gain)
        hidden_states = hidden_states + self.drop(mixed) * self.amount
        out: Tensor = hidden_states + self.dense(self.second(hidden_states)) * self.amount
        return out


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + sin, k * cos - sin


def eager_attention_forward(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    assert set(options) == {"dropout", "scaling"}
    return torch.softmax(q @ k.mT * options["scaling"], -1) @ v, None


ALL_ATTENTION_FUNCTIONS = {"negative": lambda *args, **options: (-eager_attention_forward(*args, **options)[0], None)}


class Cache:
    """Keeps what it is called with."""

    def update(self, k: Tensor, v: Tensor, layer: int, more: dict[str, Any]) -> tuple[Tensor, Tensor]:
        self.layer, self.more = layer, more
        return 2 * k, v


class OldAttention(nn.Module):
    """An attention that gives its cache more arguments, as those of transformers 4.57 do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size) for _ in range(4))
        self.head_dim, self.layer_idx, self.scaling, self.attention_dropout = 8, 3, 0.5, 0.0
        self.q_norm, self.k_norm = ScaleNorm(8), ScaleNorm(8)
        self.config = SimpleNamespace(_attn_implementation="eager")

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        cache_position: Any = None,
        **kwargs: Any,
    ) -> Any:
        shape = hidden_states.shape[:-1]
        q, k, v = (
            proj(hidden_states).view(*shape, -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            more = {"sin": sin, "cos": cos, "cache_position": cache_position}
            k, v = past_key_values.update(k, v, self.layer_idx, more)
        function: Any = eager_attention_forward
        if self.config._attn_implementation != "eager":
            function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = function(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*shape, -1)), weights


OPAQUE: Any = type("Opaque", (nn.Module,), {"forward": print})
NORM = Norm(rounding="once", weight_offset=1.0, eps="small")
BLOCK = Layer(norm="second", before="first", mlp="dense", after_attention="drop", multiplier="amount")


@pytest.fixture
def model() -> Iterator[Any]:
    torch.manual_seed(0)
    yield nn.Sequential(Block(32), ScaleNorm(32)).eval()


def output(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(x)
    return found


def test_registered_modules_are_replaced(model: Any) -> None:
    x = torch.randn(3, 32)
    expected = output(model, x)
    with pytest.warns(onepass.models.NothingPatchedWarning):
        onepass.patch(model)
    register(ScaleNorm, NORM)
    with onepass.patch(model) as handle:
        assert [change.where for change in handle.replaced] == ["0.first", "0.second", "1"]
        torch.testing.assert_close(output(model, x), expected, rtol=2e-6, atol=2e-6)
    register(Block, BLOCK)
    with onepass.patch(model, rounding="once") as handle:
        assert [change.where for change in handle.replaced if change.cls == "Block"] == ["0"]
        torch.testing.assert_close(output(model, x), expected, rtol=2e-6, atol=2e-6)
        faster = output(lambda x: model[0](x, 4.0), x)
    assert expected.abs().max() > 1
    torch.testing.assert_close(faster, output(lambda x: model[0](x, gain=4.0), x), rtol=2e-6, atol=2e-6)


def test_the_example_of_models_md_runs(tmp_path: Path) -> None:
    section = (Path(__file__).parents[2] / "docs/models.md").read_text().split("## Your own model")[1]
    (tmp_path / "example.py").write_text("import torch\n" + section.split("```python\n")[1].split("```")[0])
    spec = importlib.util.spec_from_file_location("onepass_example", tmp_path / "example.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    own: Any = nn.Sequential(example.ScaleNorm(8))
    with torch.no_grad():
        own[0].weight.add_(0.2 * torch.randn(8))
    x = torch.randn(3, 8)
    expected = output(own, x)
    with onepass.patch(own) as handle:
        assert [change.why for change in handle.replaced] == ["rms_norm, rounding once"]
        torch.testing.assert_close(output(own, x), expected, rtol=2e-6, atol=2e-6)


def test_other_classes_with_the_same_code_are_replaced(model: Any) -> None:
    """A form is about code."""

    class Inherited(ScaleNorm):
        pass

    register(Inherited, NORM)
    with onepass.patch(model) as handle:
        assert len(handle.replaced) == 3


def test_the_same_again_does_nothing_and_another_form_raises() -> None:
    register(ScaleNorm, NORM)
    register(ScaleNorm, NORM)
    message = r"register: `form` must be the one that ScaleNorm's code already has, Norm\(rounding='once'.*got Norm\(rounding='hf'"
    with pytest.raises(onepass.ContractError, match=message):
        register(ScaleNorm, Norm(rounding="hf", weight_offset=1.0, eps="small"))
    assert forms.match(ScaleNorm, Norm).form == NORM
    register(ScaleNorm, Layer())  # another kind of module
    assert forms.match(ScaleNorm, Norm).form == NORM


def test_forms_of_the_table_cannot_be_changed() -> None:
    llama: Any = pytest.importorskip("transformers.models.llama.modeling_llama")
    register(llama.LlamaRMSNorm, forms.HF)
    with pytest.raises(onepass.ContractError, match="LlamaRMSNorm's code already has"):
        register(llama.LlamaRMSNorm, NORM)


def test_threads_agree_on_one_form() -> None:
    """Of two forms registered at once, one raises."""
    raised: list[Exception] = []
    start = threading.Barrier(2)

    def attempt(offset: float) -> None:
        start.wait()
        try:
            register(ScaleNorm, Norm(rounding="once", weight_offset=offset, eps="small"))
        except onepass.ContractError as error:
            raised.append(error)

    threads = [threading.Thread(target=attempt, args=(offset,)) for offset in (0.0, 1.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: register(ScaleNorm(8), NORM), r"register: `cls` must be a subclass of torch\.nn\.Module, got "),  # type: ignore[arg-type]
        (lambda: register(int, NORM), r"register: `cls` must be a subclass of torch\.nn\.Module, got "),  # type: ignore[arg-type]
        (
            lambda: register(ScaleNorm, "hf"),  # type: ignore[arg-type]
            "register: `form` must be a Norm, OtherNorm, Layer, Attention, PlainAttention, Mla or Mlp, got 'hf'",
        ),
        (lambda: register(OPAQUE, NORM), "register: `cls` must have a forward whose code can be read; Opaque: print"),
        (lambda: Norm(rounding="twice"), "Norm: `rounding` must be 'once' or 'hf', got 'twice'"),  # type: ignore[arg-type]
        (lambda: Norm(rounding="hf", weight_offset=float("inf")), "Norm: `weight_offset` must be a number"),
        (lambda: Norm(rounding="hf", eps=1e-6), "Norm: `eps` must be a str, got 1e-06"),  # type: ignore[arg-type]
        (lambda: Layer(norm=None), "Layer: `norm` must be a str, got None"),  # type: ignore[arg-type]
        (lambda: Attention(per_head="yes"), "Attention: `per_head` must be a bool, got 'yes'"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(onepass.ContractError, match=message):
        make()


@pytest.mark.parametrize("implementation", ["eager", "negative"])
def test_attentions_that_give_their_cache_more_arguments(implementation: str) -> None:
    torch.manual_seed(0)
    attention: Any = OldAttention(32)
    attention.config._attn_implementation = implementation
    register(ScaleNorm, NORM)
    register(OldAttention, Attention(per_head=True, cache_position=True))
    h, angles = torch.randn(2, 5, 32), (torch.rand(5, 8), torch.rand(5, 8))
    position = torch.arange(5)
    caches = Cache(), Cache()

    def run(cache: Cache | None, **options: Any) -> Tensor:
        with torch.no_grad():
            found: Tensor = attention(h, angles, None, past_key_values=cache, **options)[0]
        return found

    expected, alone = run(caches[0], cache_position=position), run(None, cache_position=position)
    with onepass.patch(attention) as handle:
        assert [change.what for change in handle.replaced] == ["norm", "norm", "norms of q and k"]
        got = run(caches[1], cache_position=position)
        torch.testing.assert_close(run(None, cache_position=position), alone, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(run(None), alone, rtol=2e-6, atol=2e-6)
        assert (got - alone).abs().max() > 1e-3
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)
    assert caches[1].layer == 3 and caches[1].more["cache_position"] is position
    assert caches[1].more["cos"] is angles[0] and caches[1].more["sin"] is angles[1]


def test_forms_that_name_missing_attributes_are_left(model: Any) -> None:
    register(ScaleNorm, Norm(rounding="once", weight_offset=1.0, eps="epsilon"))
    with pytest.warns(onepass.models.NothingPatchedWarning, match="3 x ScaleNorm norm: it has no epsilon"):
        onepass.patch(model)


def test_layers_and_attentions_that_lack_something_are_left(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register(ScaleNorm, NORM)
    register(Block, Layer(norm="second", before="zeroth", mlp="dense", multiplier="factor"))
    with onepass.patch(model, rounding="once") as handle:
        (why,) = (change.why for change in handle.left if change.what == "addition after the attention")
    assert why == "it has no zeroth and no factor"
    register(OldAttention, Attention(per_head=True, cache_position=True))
    monkeypatch.delattr(sys.modules[__name__], "eager_attention_forward")
    with onepass.patch(OldAttention(32)) as handle:
        (left,) = handle.left
    assert (left.what, left.why) == ("norms of q and k", "it has no eager_attention_forward")


def test_attentions_call_functions_of_their_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two attentions of the same text may rotate differently. Each runs its own function, also in a subclass elsewhere."""
    pytest.importorskip("transformers")
    from transformers.models.qwen3 import modeling_qwen3

    from tests.helpers.models import close, fresh, logits, tokens

    class Elsewhere(modeling_qwen3.Qwen3Attention):  # type: ignore[misc]
        pass

    model, ids = fresh("Qwen3"), tokens(2, 6)
    usual = logits(model, ids)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Elsewhere
    own = modeling_qwen3.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", lambda q, k, cos, sin: own(q, k, sin, cos))
    expected = logits(model, ids)
    assert (expected - usual).abs().max() > 0.1 * usual.abs().max()
    with onepass.patch(model) as handle:
        assert sum(change.cls == "Elsewhere" for change in handle.replaced) == 2
        close(logits(model, ids), expected)


def test_a_changed_rotation_prevents_fused_cache_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch that writes a latent cache computes the rotation itself, so the rotation is part of the form."""
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    from tests.helpers.models import small

    attention: Any = type(small("DeepSeek-V3", torch.float32).model.layers[0].self_attn)
    assert forms.match(attention, Mla).form == Mla()

    def rotate_half(x: Tensor) -> Tensor:
        return -x

    monkeypatch.setattr(modeling_deepseek_v3, "rotate_half", rotate_half)
    assert forms.match(attention, Mla).why == forms.OTHER_CODE
