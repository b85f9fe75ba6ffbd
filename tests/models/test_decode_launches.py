"""How many kernels a decode step launches, per layer and per step, and how static caches are counted."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass

pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from onepass.core.backend import launching_with
from onepass.models.forwards.cache import Counts
from onepass.models.patching.forms import OTHER_ANGLES
from onepass.ops.linear.launch import LinearSpec
from tests.helpers.models import close, fresh, small, tokens

LINEAR, CACHE, ATTENTION, NORM = (
    "onepass.linear",
    "onepass.qk_norm_rope_cache",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "onepass.rms_norm",
)
CHAIN = {LINEAR: 4, CACHE: 1, ATTENTION: 1}
SANDWICH = {**CHAIN, "onepass.rms_norm_add_rms_norm": 1, NORM: 1, "aten.add.Tensor": 1}
PER_LAYER = {
    "Llama": CHAIN,
    "Mistral": CHAIN,
    "Qwen2": CHAIN,
    "Qwen3": CHAIN,
    "Phi-3": CHAIN,
    "Gemma 3": SANDWICH,
    "GLM-4": {**CHAIN, NORM: 2, "aten.add.Tensor": 1},
    "OLMo-2": {**CHAIN, "onepass.qk_rms_norm": 1, NORM: 2, "aten.add.Tensor": 2},
}
ANGLES = {"aten.mul.Tensor": 1, "aten.cos.out": 1, "aten.sin.out": 1}


class Kernels(TorchDispatchMode):
    """Counts the operations that compute something: no views, no empty tensors. Under `torch.no_grad` it sees aten's own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removesuffix(".default")
        views = [made.alias_info for made in function._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in views)
        if not is_view and "empty" not in name:
            self.count[name] += 1
        return function(*args, **(kwargs or {}))


def step(model: Any, cache: Any, length: int) -> Counter[str]:
    """The kernels of one step whose mask and positions are given, as in a captured step."""
    kernels = Kernels()
    mask = torch.zeros(1, 1, 1, length, dtype=model.dtype)
    kinds = getattr(model.config, "layer_types", None)
    masks = mask if kinds is None else dict.fromkeys(kinds, mask)
    asked = {"attention_mask": masks, "position_ids": torch.tensor([[5]]), "past_key_values": cache}
    with torch.no_grad(), kernels:
        model(torch.tensor([[7]]), **asked)
    return kernels.count


def steps(name: str, layers: int, static: bool) -> Counter[str]:
    model = fresh(name, torch.bfloat16, layers)
    with onepass.patch(model, decode=True):
        cache: Any = StaticCache(config=model.config, max_cache_len=8) if static else DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens(1, 3), past_key_values=cache)
        step(model, cache, 8 if static else 4)
        return step(model, cache, 8 if static else 5)


@pytest.mark.sampled(5)  # some families stay
@pytest.mark.parametrize("name", PER_LAYER)
def test_kernels_per_layer_and_per_step(name: str) -> None:
    """With a static cache a layer launches nothing but its calls of onepass, attention, and sums that stand alone."""
    one, two = steps(name, 1, static=True), steps(name, 2, static=True)
    assert two - one == Counter(PER_LAYER[name])
    rest = one - Counter(PER_LAYER[name])
    outside = {LINEAR: 1, NORM: 1, "aten.embedding": 1, "aten._foreach_add_.Scalar": 1}
    own = {"aten.mul.Tensor": 1} if name == "Gemma 3" else {}  # it scales embeddings
    assert rest == Counter(outside) + Counter(ANGLES) + Counter(own)


def specs_of(call: Callable[[], Any]) -> list[LinearSpec]:
    """The specs of all products that ``call`` makes, which are not computed."""
    found: list[LinearSpec] = []

    def recorder(family: str) -> Callable[[Any], None]:
        return lambda call: found.append(call.spec) if family == "linear" else None

    with launching_with(recorder), torch.no_grad():
        call()
    return found


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_weights_of_a_model_are_static(weights: Any) -> None:
    """A GPU may read them before the previous kernel has ended."""
    model = fresh("Qwen3", torch.bfloat16, 2)
    with onepass.patch(model, decode=True, weights=weights):
        found = specs_of(lambda: model(tokens(2, 3)))
    assert len(found) == 2 * 4 + 1 and all(spec.static for spec in found)


def test_weights_of_a_module_are_static_unless_they_are_computed() -> None:
    layer = onepass.nn.Linear(16, 8, dtype=torch.bfloat16)
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    assert [spec.static for spec in specs_of(lambda: layer(x))] == [True]
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Tanh())
    assert [spec.static for spec in specs_of(lambda: layer(x))] == [False]
    assert [spec.static for spec in specs_of(lambda: onepass.linear(x, layer.weight))] == [False]


def test_kernels_of_a_dynamic_cache() -> None:
    """transformers' own cache concatenates keys and values."""
    one, two = steps("Llama", 1, static=False), steps("Llama", 2, static=False)
    assert two - one == Counter({**CHAIN, "aten.cat": 2})


def lengths(cache: Any) -> list[int]:
    return [int(layer.cumulative_length) for layer in cache.layers]


def test_every_layer_is_counted_after_every_step() -> None:
    """Also where a layer runs its own code in between, because it has a hook, and after `undo`."""
    model = fresh("Llama", torch.float32, layers=3)
    expected: list[Tensor] = []
    found: list[Tensor] = []
    with torch.inference_mode():
        for patched in (False, True):
            cache = StaticCache(config=model.config, max_cache_len=24)
            handle = onepass.patch(model, decode=True) if patched else None
            made = expected if not patched else found
            total = 0
            for number, count in enumerate((3, 1, 1, 2, 1, 1, 1, 1, 1)):
                hook = None
                if number in (4, 5, 6):  # the first, the second, the last layer
                    projection = model.model.layers[number - 4].self_attn.o_proj
                    hook = projection.register_forward_hook(lambda *_: None)
                if number == 8 and handle is not None:
                    handle.undo()
                made.append(model(tokens(1, count, seed=number), past_key_values=cache).logits)
                total += count
                assert lengths(cache) == [total] * 3
                if hook is not None:
                    hook.remove()
    for mine, theirs in zip(found, expected, strict=True):
        close(mine, theirs)


def test_steps_that_end_early_are_counted() -> None:
    """A step of fewer layers than the one before is counted by the next step at the latest, and then at once."""

    class Layer:
        def __init__(self) -> None:
            self.cumulative_length = torch.zeros((), dtype=torch.long)

    layers: list[Any] = [Layer() for _ in range(3)]
    counts = Counts()

    def run(end: int, tokens: int = 1) -> list[int]:
        for index in range(end):
            counts.add(index, layers[index], tokens)
        return [int(layer.cumulative_length) for layer in layers]

    assert run(3) == [1, 1, 1] and run(3, 4) == [5, 5, 5]
    run(2)
    assert run(2) == [7, 7, 5], "the step before had ended early: nothing waits"
    assert run(2) == [8, 8, 5] and run(3) == [9, 9, 6] and run(3) == [10, 10, 7]


def test_a_captured_step_counts_nothing() -> None:
    """`generate` moves one slot on; its layers have no counters of their own."""
    model = fresh("Qwen3", torch.bfloat16)
    kernels = Kernels()
    with onepass.patch(model, decode=True), torch.no_grad(), kernels:
        asked = {"max_new_tokens": 4, "do_sample": False}
        model.generate(tokens(1, 3), **asked, custom_generate=onepass.models.generate)
    assert kernels.count["aten._foreach_add_.Scalar"] == 0 and kernels.count["aten.add_.Tensor"] == 4


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Gemma 3", "OLMo-2", "DeepSeek-V3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_have_the_bits_of_the_models_own(name: str, dtype: torch.dtype) -> None:
    model = fresh(name, dtype)
    rotary = model.model.rotary_emb
    kinds: list[tuple[str, ...]] = [()] if isinstance(rotary.rope_type, str) else [(kind,) for kind in rotary.rope_type]
    x = torch.zeros(2, 3, 8, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with onepass.patch(model, decode=True) as handle:
        assert "cosines and sines" in repr(handle)
        for kind in kinds:
            for high in (100, 100_000):
                at = torch.randint(0, high, (2, 3), generator=generator)
                expected = type(rotary).forward(rotary, x, at, *kind)
                assert_same(rotary(x, at, *kind), expected)
                assert_same(copy.deepcopy(rotary)(x, at, *kind), expected)
                assert_same(pickle.loads(pickle.dumps(rotary))(x, at, *kind), expected)
                prefix = f"{kind[0]}_" if kind else ""
                getattr(rotary, f"{prefix}inv_freq").mul_(0.5)  # changed frequencies are noticed
                assert_same(rotary(x, at, *kind), type(rotary).forward(rotary, x, at, *kind))
    assert not {"forward", "_onepass"} & rotary.__dict__.keys()


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype is theirs.dtype and torch.equal(mine, theirs) and theirs.abs().max() > 0.5


def test_scaled_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Yarn scales cosines and sines in float32."""
    rotary = fresh("Llama", torch.bfloat16).model.rotary_emb
    model = fresh("Llama", torch.bfloat16)
    monkeypatch.setattr(model.model.rotary_emb, "attention_scaling", 1.2079)
    rotary.attention_scaling = 1.2079
    x, at = torch.zeros(1, 2, 8, dtype=torch.bfloat16), torch.tensor([[3, 7]])
    with onepass.patch(model, decode=True):
        assert_same(model.model.rotary_emb(x, at), rotary(x, at))


def test_rotary_embeddings_that_are_left_are_in_the_report() -> None:
    """Frequencies that depend on the length, other code, other wrappers, and a forward that something else replaced."""

    def why_left(rotary: Any) -> str:
        model = copy.deepcopy(small("Llama", torch.float32))
        model.model.rotary_emb = rotary
        with onepass.patch(model, decode=True) as handle:
            assert "_onepass" not in rotary.__dict__
            assert any(change.what == "decode" for change in handle.replaced)
        (left,) = [change for change in handle.left if change.what == "decode cosines and sines"]
        assert left.where == "model.rotary_emb"
        return left.why

    own = small("Llama", torch.float32).model.rotary_emb
    dynamic, replaced = copy.deepcopy(own), copy.deepcopy(own)
    dynamic.rope_type = "dynamic"
    replaced.forward = type(own).forward.__get__(replaced)
    assert why_left(dynamic) == "its rope_type is 'dynamic'"
    assert why_left(replaced) == "its forward was replaced by other code"

    class Other(type(own)):  # type: ignore[misc]
        def forward(self, x: Tensor, position_ids: Tensor) -> Any:
            return super().forward(x, 2 * position_ids)

    class Wrapped(type(own)):  # type: ignore[misc]
        @functools.wraps(type(own).forward)
        def forward(self, x: Tensor, position_ids: Tensor) -> Any:
            return super().forward(x, 2 * position_ids)

    assert why_left(Other(own.config)) == OTHER_ANGLES
    assert why_left(Wrapped(own.config)) == f"its forward is wrapped by code of {__name__}"
