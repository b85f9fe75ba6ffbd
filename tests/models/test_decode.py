"""`onepass.patch(model, decode=True)` on small models of every family: launches, logits, tokens, undo, batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.models import NothingPatchedWarning

pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from onepass.models import MlaCache
from onepass.models.forwards import latent
from tests.helpers.models import CONFIGS, close, fresh, logits, small, tokens
from tools.architectures.small import ARCHITECTURES, build

NAMES = [name for name in CONFIGS if name != "gpt-oss"]
"""gpt-oss's attention has sinks, and its MLP is a mixture: only its head is replaced."""
SANDWICHES = ("Gemma 2", "Gemma 3", "OLMo-2", "GLM-4")


class Launches(TorchDispatchMode):
    """Counts the operations of a block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(function).removesuffix(".default")] += 1
        return function(*args, **(kwargs or {}))


def step_counts(model: Any) -> Counter[str]:
    """The operations of one step of one token."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.inference_mode():
        model(tokens(1, 4), past_key_values=cache)
        launches = Launches()
        with launches:
            model(tokens(1, 1), past_key_values=cache)
    return launches.count


@pytest.mark.sampled(40)  # test_decode_launches.py counts the launches of others
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_a_chain_of_linear(name: str) -> None:
    """Four calls per layer and one for logits. No projection is left to torch."""
    model = small(name, torch.float32)
    dense = [hasattr(layer.mlp, "down_proj") for layer in model.model.layers]
    latent = name == "DeepSeek-V3"
    with onepass.patch(model, decode=True):
        count = step_counts(model)
    assert count["onepass.linear"] == 1 + sum((3 if latent else 2) + 2 * is_dense for is_dense in dense)
    if all(dense) and not latent:
        assert not {"aten.linear", "aten.mm", "aten.addmm"} & count.keys()
    if all(dense) and name not in SANDWICHES:
        assert count["onepass.rms_norm"] == 1, "all norms but the last are part of a projection"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [  # each compiles kernels
        pytest.param({}, marks=pytest.mark.sampled(3), id="few"),
        pytest.param({"batch_invariant": True}, marks=pytest.mark.sampled(5), id="all"),
        pytest.param({"rounding": "once"}, marks=pytest.mark.full, id="once"),
    ],
)
def test_float32_logits_and_tokens_are_the_models_own(name: str, options: dict[str, Any]) -> None:
    model = small(name, torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    few, many = tokens(2, 5), tokens(3, 9)
    asked = {"max_new_tokens": 5, "do_sample": False, "disable_compile": True}
    caches: list[dict[str, Any]] = [{}, {"cache_implementation": "static"}]
    with torch.inference_mode():
        expected = [logits(model, ids) for ids in (few, many)]
        expected_tokens = [model.generate(few, **asked, **cache) for cache in caches]
        with onepass.patch(model, decode=True, **options):
            got = [logits(model, ids) for ids in (few, many)]
            got_tokens = [model.generate(few, **asked, **cache) for cache in caches]
            state = model.state_dict()
        after = [logits(model, ids) for ids in (few, many)]
    for mine, theirs, restored in zip(got, expected, after, strict=True):
        assert theirs.abs().max() > 1
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-6 * float(theirs.abs().max()))
        assert torch.equal(restored, theirs), "undo must restore the bytes"
    assert all(map(torch.equal, got_tokens, expected_tokens))
    assert list(state) == list(before) and all(torch.equal(state[key], before[key]) for key in before)


@pytest.mark.sampled(8)  # each compiles kernels
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_as_accurate_as_the_model(name: str) -> None:
    """Only the order of sums differs from the model, so the error against float32 is about the model's own."""
    low = small(name, torch.bfloat16)
    ids = tokens(4, 4)
    truth = logits(fresh(name, torch.bfloat16).float(), ids)
    own = logits(low, ids).float()
    with onepass.patch(low, decode=True):
        got = logits(low, ids).float()
    error, usual = ((found - truth).norm(dim=-1).median() for found in (got, own))
    assert 0 < usual < 0.1 * truth.norm(dim=-1).median()
    assert error <= 1.2 * usual


@pytest.mark.sampled(11)  # each compiles kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma 3", "OLMo-2", "Phi-3", "GLM-4"])
def test_batch_invariance(name: str, dtype: torch.dtype) -> None:
    """A sequence has the bytes that it has alone in every batch, also beyond the rows of a decode step."""
    model = small(name, dtype)
    ids = tokens(24, 1)
    with onepass.patch(model, decode=True, batch_invariant=True), torch.inference_mode():
        alone = torch.cat([model(row[None]).logits for row in ids])
        for rows in (2, 7, 16, 24):
            assert torch.equal(model(ids[:rows]).logits, alone[:rows])
    assert alone.abs().max() > 1


def test_prefill_and_decode_have_the_same_bytes() -> None:
    """Projections, norms and rotations of a token do not depend on the tokens that are computed with it."""
    model = small("Llama", torch.bfloat16, layers=1)
    ids = tokens(2, 12)
    caches: list[Any] = []
    with onepass.patch(model, decode=True, batch_invariant=True), torch.inference_mode():
        for pieces in (ids.split(12, 1), ids.split(5, 1), ids.split(1, 1)):
            cache = StaticCache(config=model.config, max_cache_len=16)
            for piece in pieces:
                model(piece, past_key_values=cache)
            caches.append(cache.layers[0])
    first = caches[0]
    assert first.keys.abs().max() > 1
    for other in caches[1:]:
        assert torch.equal(other.keys, first.keys) and torch.equal(other.values, first.values)
        assert int(other.cumulative_length) == 12


@pytest.mark.sampled(3)  # some models stay
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_one_launch_rotates_and_writes_as_the_model_does(name: str, static: bool) -> None:
    """`qk_norm_rope_cache` has the bytes of the model's own rotation and of its cache's update.

    Gemma's windows have 8 tokens, so they are full after some steps.
    """
    model = fresh(name, torch.bfloat16)
    found = []
    with onepass.patch(model, decode=True), torch.inference_mode():
        for in_one_launch in (True, False):
            kind: Any = StaticCache if static else DynamicCache
            cache = kind(config=model.config, **({"max_cache_len": 16} if static else {}))
            pieces = [model(tokens(2, count, seed=count), past_key_values=cache).logits for count in (3, 1, 2, 1, 2, 1)]
            layers = [(layer.keys, layer.values) for layer in cache.layers]
            found.append([*pieces, *(tensor for pair in layers for tensor in pair)])
            assert int(cache.get_seq_length()) == 10
            for attention in (layer.self_attn.__dict__ for layer in model.model.layers if name != "DeepSeek-V3"):
                record = attention["_onepass"]
                assert (record.step.turn is not None) == in_one_launch
                attention["_onepass"] = record._replace(turn=None, step=record.step._replace(turn=None))
    assert all(map(torch.equal, *found))
    assert all(tensor.abs().max() > 0 for tensor in found[0])


def test_caches_of_transformers_4_57_get_angles_and_positions() -> None:
    """Where the form says so. Its attentions have other fingerprints and the same arithmetic."""
    given: list[dict[str, Any]] = []

    class Recording(DynamicCache):  # type: ignore[misc]
        def update(self, k: Tensor, v: Tensor, layer: int, *more: Any) -> Any:
            given.extend(more)
            return super().update(k, v, layer)

    model = fresh("Llama", torch.float32)
    at, ids = torch.arange(3), tokens(1, 3)
    with torch.inference_mode():
        expected = model(ids).logits
        with onepass.patch(model, decode=True):
            for layer in model.model.layers:
                own = layer.self_attn.__dict__
                own["_onepass"] = own["_onepass"]._replace(cache_position=True)
            got = model(ids, past_key_values=Recording(config=model.config), cache_position=at).logits
    close(got, expected)
    cos, sin = model.model.rotary_emb(expected, at[None])
    assert len(given) == 2 and all(more["cache_position"] is at for more in given)
    assert all(torch.equal(more["cos"], cos) and torch.equal(more["sin"], sin) for more in given)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_latents_are_rotated_and_written_as_by_the_model(
    static: bool, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh("DeepSeek-V3", torch.bfloat16)
    model.config.rope_interleave = interleaved
    found = []
    own = latent._rotate_as_the_model
    with onepass.patch(model, decode=True), torch.inference_mode():
        for in_one_launch in (True, False):
            if not in_one_launch:

                def by_the_model(self: Any, q: Tensor, *others: Any) -> Any:
                    return own(self, q[..., self.qk_nope_head_dim :], *others)

                monkeypatch.setattr(latent, "_rotate_latent", by_the_model)
            kind: Any = StaticCache if static else DynamicCache
            cache = kind(config=model.config, **({"max_cache_len": 16} if static else {}))
            pieces = [model(tokens(2, count, seed=count), past_key_values=cache).logits for count in (3, 1, 2)]
            found.append([*pieces, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))])
            assert [int(layer.get_seq_length()) for layer in cache.layers] == [6] * len(cache.layers)
    assert all(map(torch.equal, *found))
    assert all(tensor.abs().max() > 0 for tensor in found[0])


def test_a_mask_that_is_changed_between_steps_is_converted_again() -> None:
    """A mask is converted once per step. The caller may write the next step's mask into the same tensor."""
    model = small("Llama", torch.float32)
    found: list[list[Tensor]] = []
    with torch.inference_mode():
        for patched in (False, True):
            cache = StaticCache(config=model.config, max_cache_len=8)
            mask = torch.zeros(1, 1, 1, 8, dtype=torch.bool)
            handle = onepass.patch(model, decode=True) if patched else None
            found.append([])
            launches = Launches()
            for step in range(4):
                mask[..., step] = True
                mask[..., 1] = step == 1  # forget the second token
                with launches:
                    found[-1].append(model(tokens(1, 1, seed=step), attention_mask=mask, past_key_values=cache).logits)
            if handle is not None:
                handle.undo()
                assert launches.count["aten.log.out"] == 4, "once per step, not per layer"
    for mine, theirs in zip(found[1], found[0], strict=True):
        close(mine, theirs)


OTHERS = [
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "glm4_moe",
    "granite",
    "smollm3",
    "seed_oss",
    "ernie4_5",
    "olmo3",
    "helium",
]


@pytest.mark.sampled(3)  # some architectures stay
@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_with_the_same_code(name: str) -> None:
    model = build(name)
    few, many = tokens(2, 5), tokens(3, 9)
    asked = {"max_new_tokens": 4, "do_sample": False}
    with torch.inference_mode():
        expected, expected_tokens = [logits(model, ids) for ids in (few, many)], model.generate(few, **asked)
        with onepass.patch(model, decode=True) as handle:
            got, got_tokens = [logits(model, ids) for ids in (few, many)], model.generate(few, **asked)
    assert sum(change.what == "decode attention" for change in handle.replaced) == 2
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert torch.equal(got_tokens, expected_tokens)


@pytest.mark.full  # test_other_architectures_with_the_same_code has some of them
@pytest.mark.filterwarnings("ignore::onepass.models.NothingPatchedWarning")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_architectures_agree(name: str) -> None:
    """Also where only the head, or with batch_invariant every torch.nn.Linear, is replaced."""
    model = build(name)
    ids = tokens(2, 5)
    expected = logits(model, ids)
    options: list[dict[str, Any]] = [{}, {"batch_invariant": True}]
    for option in options:
        with onepass.patch(model, decode=True, **option):
            got = logits(model, ids)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("options", [{}, {"rounding": "once"}, {"batch_invariant": True}], ids=str)
def test_latent_caches(options: dict[str, Any]) -> None:
    """An `MlaCache` is written as without decode, transformers' caches by their own update."""
    model = small("DeepSeek-V3", torch.float32)
    makes: list[Callable[[], Any]] = [lambda: DynamicCache(config=model.config), lambda: MlaCache(2, 16)]

    def run(cache: Any) -> Tensor:
        return torch.cat([model(tokens(2, n, seed=n), past_key_values=cache).logits for n in (5, 1, 2)], dim=1)

    with torch.inference_mode():
        expected = run(makes[0]())
        with onepass.patch(model, decode=True, **options):
            for make in makes:
                close(run(make()), expected)


def test_padding_and_windows_are_respected() -> None:
    """Masks of padded prompts, and sliding windows that are shorter than the prompt."""
    for name in ("Qwen2", "Gemma 3"):
        model = small(name, torch.float32)
        ids = tokens(2, 12)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        asked = {"max_new_tokens": 4, "do_sample": False, "disable_compile": True, "attention_mask": mask}
        for cache in ({}, {"cache_implementation": "static"}):
            options: dict[str, Any] = {**asked, **cache, "return_dict_in_generate": True, "output_logits": True}
            with torch.inference_mode():
                expected = model.generate(ids, **options)
                with onepass.patch(model, decode=True):
                    got = model.generate(ids, **options)
            assert torch.equal(got.sequences, expected.sequences)
            for mine, theirs in zip(got.logits, expected.logits, strict=True):
                close(mine, theirs)


def test_mixtures_keep_their_experts() -> None:
    model = small("MiniMax-M2", torch.float32)
    with onepass.patch(model, decode=True) as handle:
        report = repr(handle)
    assert "replaced 2 x MiniMaxM2Attention decode attention" in report
    assert "left 2 x MiniMaxM2SparseMoeBlock decode: its code is not one of the supported forms" in report


LAUNCHES = {
    "Llama": "norm + qkv, o + residual, norm + gate-up + silu_mul, down + residual",
    "Phi-3": "norm + qkv, o + residual, norm + gate-up + silu_mul, down + residual",
    "Gemma 3": "norm + qkv, o, gate-up + gelu_tanh_mul, down",
    "OLMo-2": "qkv, o, gate-up + silu_mul, down",
    "GLM-4": "norm + qkv, o, norm + gate-up + silu_mul, down",
    "MiniMax-M2": "norm + qkv, o + residual",
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_report_says_what_runs_how(name: str) -> None:
    model = small(name, torch.float32)
    with onepass.patch(model, decode=True) as handle:
        report = repr(handle)
    layer = type(model.model.layers[0]).__name__
    assert f"  replaced 2 x {layer} decode: {LAUNCHES[name]}: one linear each, for up to 16 tokens" in report
    assert "  replaced 1 x Linear decode layer: linear, for up to 16 tokens" in report


def test_layers_that_cannot_be_merged_stay_as_they_are() -> None:
    """q has a bias and k has none."""
    model = fresh("Llama")
    attention = model.model.layers[0].self_attn
    attention.q_proj.bias = torch.nn.Parameter(torch.ones(64))
    expected = logits(model, tokens(2, 4))
    with onepass.patch(model, decode=True) as handle:
        close(logits(model, tokens(2, 4)), expected)
    assert "left 1 x LlamaAttention decode: MergedLinear: `linears` must have the same bias" in repr(handle)


def test_models_without_decode_steps_are_reported() -> None:
    model = small("gpt-oss", torch.float32)
    reason = "no layer of GptOssForCausalLM runs as a decode step .2 x GptOssAttention decode: its code"
    with pytest.warns(NothingPatchedWarning, match=reason):
        handle = onepass.patch(model, decode=True)
    assert handle.replaced
    handle.undo()
    with pytest.raises(onepass.ContractError, match=reason):
        onepass.patch(model, decode=True, strict=True)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_bad_arguments_are_rejected() -> None:
    model = small("Llama", torch.float32)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"decode": 1}, "`decode` must be a bool, got 1"),
        ({"decode": True, "batch_invariant": "yes"}, "`batch_invariant` must be a bool, got 'yes'"),
        ({"decode": True, "weights": "int4"}, "`weights` must be None or 'fp8', got 'int4'"),
        ({"batch_invariant": True}, "`batch_invariant` must not be given without decode=True"),
        ({"weights": "fp8"}, "`weights` must not be given without decode=True"),
        ({"decode": True, "fuse": False}, "`fuse` must be True with decode=True, got False"),
    ]
    for options, message in wrong:
        with pytest.raises(onepass.ContractError, match=f"patch: {message}"):
            onepass.patch(model, **options)
    assert "forward" not in model.lm_head.__dict__


@pytest.mark.parametrize("name", ["Llama", "DeepSeek-V3"])
def test_gradients_are_rejected(name: str) -> None:
    model = small(name, torch.float32)
    layer, h = model.model.layers[0], torch.randn(1, 4, 64)
    angles = model.model.rotary_emb(h, torch.arange(4)[None])
    with onepass.patch(model, decode=True):
        calls: list[Callable[[], Any]] = [
            lambda: layer(h, position_embeddings=angles),
            lambda: layer.self_attn(h, position_embeddings=angles, attention_mask=None),
            lambda: layer.mlp(h),
            lambda: model.lm_head(h),
        ]
        for call in calls:
            with pytest.raises(onepass.ContractError, match=r"was patched by onepass\.patch"):
                call()
            with torch.no_grad():
                call()
