"""`onepass.models.generate`: tokens of transformers' own loop, from steps that could be recorded.

A CPU has no CUDA graphs. With the fixture `graphs` a stand-in records steps, so that the host looks at tokens
every few steps and has to drop those behind the end.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import onepass

pytest.importorskip("transformers")

import transformers
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.generation import logits_process

from onepass.models.generation import generate as generation
from onepass.models.generation import request as generation_request
from onepass.models.generation import state as decode_state
from tests.helpers.generating import OURS, both, prompts
from tests.helpers.models import CONFIGS, fresh, small
from tests.helpers.stand_in_graph import StandIn

EOS = [5, 7, 9, 11]
PATCHES: list[dict[str, Any]] = [{}, {"decode": True}, {"decode": True, "weights": "fp8"}]
FAMILIES = [name for name in CONFIGS if name != "MiniMax-M2"]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    generation._KEPT.clear()
    return StandIn().install(monkeypatch)


@pytest.mark.sampled(3)  # one family in three stays
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_plain_loop(name: str, graphs: StandIn) -> None:
    """Rows end at different steps. The windows of Gemma and gpt-oss (8) fill up on the way."""
    model = small(name, torch.float32)
    inputs = prompts()
    free = model.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0)[:, 12:]
    assert len(free.unique()) > 3
    for eos in (None, [int(free[0, 3]), int(free[1, 9]), 121]):
        expected, got = both(model, inputs, eos_token_id=eos)
        assert torch.equal(got, expected) and got.dtype == expected.dtype
    assert graphs.recorded == 2 and graphs.warm_up == 2 * generation.WARM_UP
    assert graphs.replayed >= 2 * 19 - 2 * generation.STEPS_PER_LOOK


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GLM-4", "DeepSeek-V3"])
def test_bfloat16_tokens_are_those_of_a_static_cache_of_this_length(name: str) -> None:
    """Attention adds in an order that depends on the length of the cache, so this one has the same."""
    length = generation_request.ROUND_TO
    expected, got = both(
        small(name, torch.bfloat16), prompts(), cache_implementation="static", max_cache_len=length, eos_token_id=EOS
    )
    assert torch.equal(got, expected)


def test_eager_attention_and_no_mask() -> None:
    model = fresh("Gemma 3")
    model.set_attn_implementation("eager")
    for inputs in (prompts(), {"input_ids": prompts(1)["input_ids"]}):
        expected, got = both(model, inputs)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_are_those_of_transformers_at_every_step(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh(name)
    model.set_attn_implementation(attention)
    inputs = prompts()
    checked: list[int] = []

    def checking(state: decode_state.State, model: Any) -> None:
        tokens = 12 + len(checked)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, tokens + 1 - 12, dtype=torch.long)], 1)
        made = model.prepare_inputs_for_generation(
            state.tokens, next_sequence_length=1, attention_mask=mask, past_key_values=state.cache
        )["attention_mask"]
        assert generation_request._same(state.masks, made)
        checked.append(tokens)
        right(state, model)

    right = decode_state.State.step
    monkeypatch.setattr(decode_state.State, "step", checking)
    both(model, inputs)
    assert len(checked) == 19


def test_lengths_and_ends(graphs: StandIn) -> None:
    """One token, `max_length`, an end at the first token, and one within the steps between two looks."""
    model, inputs = small("Llama", torch.float32), prompts(1)
    free = both(model, inputs)[0][0, 12:].tolist()
    for options in (
        {"max_new_tokens": 1},
        {"max_new_tokens": None, "max_length": 15},
        {"eos_token_id": free[0]},
        {"eos_token_id": [free[2], free[5]], "max_new_tokens": 40},
        {"eos_token_id": free[0], "pad_token_id": None},
    ):
        expected, got = both(model, inputs, **options)
        assert torch.equal(got, expected)
    expected, got = both(model, inputs, eos_token_id=free[2], max_new_tokens=50)
    assert torch.equal(got, expected) and got.shape[1] == 15 + free.index(free[2]) - 2


@pytest.mark.parametrize("make", [DynamicCache, partial(StaticCache, max_cache_len=70)], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_a_given_cache_is_continued_and_holds_all_tokens(name: str, make: Any, graphs: StandIn) -> None:
    """Two turns of a conversation. The caches are compared after each one."""
    model = small(name, torch.float32)
    caches = [make(config=model.config) for _ in range(2)]
    ways: tuple[dict[str, Any], ...] = ({}, {"custom_generate": OURS})
    inputs = prompts()
    for _ in range(2):
        results = []
        for cache, way in zip(caches, ways, strict=True):
            options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "past_key_values": cache}
            results.append(model.generate(**inputs, **options, **way))
        assert torch.equal(*results)
        for expected, got in zip(caches[0].layers, caches[1].layers, strict=True):
            assert int(got.get_seq_length()) == int(expected.get_seq_length()) == results[0].shape[1] - 1
            shown = min(int(expected.get_seq_length()), expected.keys.shape[2])
            assert got.keys.shape == expected.keys.shape
            for a, b in ((got.keys, expected.keys), (got.values, expected.values)):
                torch.testing.assert_close(a[:, :, :shown], b[:, :, :shown])
        ids = torch.cat([results[0], prompts(seed=2)["input_ids"][:, -3:]], 1)
        mask = torch.cat(
            [inputs["attention_mask"], torch.ones(3, ids.shape[1] - inputs["input_ids"].shape[1]).long()], 1
        )
        inputs = {"input_ids": ids, "attention_mask": mask}


SAMPLING: list[dict[str, Any]] = [
    {"top_k": 0},
    {"temperature": 0.7, "top_k": 0},
    {"top_k": 7},
    {"top_k": 0, "top_p": 0.6},
    {"temperature": 1.8, "top_k": 20, "top_p": 0.9},
]


@pytest.mark.parametrize("options", SAMPLING)
def test_sampling_draws_the_same_tokens_in_every_form(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From one seed: transformers' loop, our step called, recorded, replayed again, and with a generator."""
    model, inputs = small("Llama", torch.float32), prompts()
    options = {"max_new_tokens": 20, "do_sample": True, "pad_token_id": 0, "eos_token_id": EOS, **options}

    def drawn(**more: Any) -> Tensor:
        torch.manual_seed(3)
        found: Tensor = model.generate(**inputs, **options, **more)
        return found

    expected = drawn()
    after = torch.rand(4)
    assert torch.equal(drawn(custom_generate=OURS), expected)
    assert torch.equal(torch.rand(4), after), "the default generator goes on where transformers' loop leaves it"
    generation._KEPT.clear()
    StandIn().install(monkeypatch)
    assert torch.equal(drawn(custom_generate=OURS), expected)
    assert torch.equal(drawn(custom_generate=OURS), expected)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(drawn(custom_generate=OURS, generator=generator), expected)
    assert not torch.equal(drawn(custom_generate=OURS, generator=generator), expected)


@pytest.mark.parametrize("options", SAMPLING[1:])
def test_filtered_logits_are_transformers_own(options: dict[str, Any]) -> None:
    """Byte for byte, also for equal logits and for logits that are far apart."""
    make = {
        "temperature": logits_process.TemperatureLogitsWarper,
        "top_k": logits_process.TopKLogitsWarper,
        "top_p": logits_process.TopPLogitsWarper,
    }
    warpers = [make[name](value) for name, value in options.items() if value]
    model, inputs = small("Llama", torch.bfloat16), prompts()
    model.generate(**inputs, **options, do_sample=True, max_new_tokens=2, pad_token_id=0, custom_generate=OURS)
    state = next(reversed(generation._KEPT[model].values())).state
    logits = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for given in (logits, logits.round(), logits * 50):
        expected = logits_process.LogitsProcessorList(warpers)(None, given.float())  # type: ignore[arg-type]
        got = state.filtered(given)
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
        if set(options) != {"temperature", "top_k"} or options["top_k"]:
            assert 0 < int(got.isinf().sum()) < got.numel()


class Recording:
    """A streamer that records what it gets, and calls a function at the first token."""

    def __init__(self, first: Any = None) -> None:
        self.tokens: list[list[int]] = []
        self.ended, self.first = 0, first

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.tokens.append(value.flatten().tolist())
        if len(self.tokens) == 2 and self.first is not None:
            self.first()

    def end(self) -> None:
        self.ended += 1


def test_streamers_get_every_token_once(graphs: StandIn) -> None:
    model, inputs = small("Qwen2", torch.float32), prompts(1)
    free = both(model, inputs)[0]
    eos = int(free[0, -3])
    streams = [Recording(), Recording()]
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False, eos_token_id=eos, streamer=streams[0])
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": eos, "custom_generate": OURS}
    got = model.generate(**inputs, **options, streamer=streams[1])
    assert torch.equal(got, plain) and streams[0].tokens == streams[1].tokens
    assert streams[1].ended == 1 and len(streams[1].tokens) == 1 + got.shape[1] - 12


def test_a_call_within_a_call_uses_another_step(graphs: StandIn) -> None:
    """As two threads would."""
    model = small("Llama", torch.float32)
    (outer, _), (inner, _) = (both(model, prompts(1, seed=seed)) for seed in (1, 2))
    assert not torch.equal(outer[:, 12:], inner[:, 12:])
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "custom_generate": OURS}
    found: list[Tensor] = []
    stream = Recording(lambda: found.append(model.generate(**prompts(1, seed=2), **options)))
    got = model.generate(**prompts(1, seed=1), **options, streamer=stream)
    assert torch.equal(got, outer) and torch.equal(found[0], inner)


def test_steps_are_kept_and_renewed(graphs: StandIn) -> None:
    """Calls of one shape share a recording. Whatever a recording depends on makes a new one."""
    model = fresh("Llama")

    def recordings(batch: int = 2, **options: Any) -> int:
        before = graphs.recorded
        expected, got = both(model, prompts(batch, options.pop("length", 12)), **options)
        assert torch.equal(got, expected)
        return graphs.recorded - before

    assert recordings() == 1
    assert recordings() == 0 and recordings(length=9, max_new_tokens=30) == 0, "similar lengths share a step"
    assert recordings(3) == 1 and recordings(max_new_tokens=60) == 1 and recordings(eos_token_id=EOS) == 1
    assert recordings(eos_token_id=[7, 8, 9, 10]) == 0, "ids are not part of a recording"
    assert recordings() == 0
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert recordings() == 0, "weights changed in place are read where they were"
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(2 * model.model.layers[0].mlp.up_proj.weight)
    assert recordings() == 1
    for options in PATCHES[:2]:
        with onepass.patch(model, **options):
            assert recordings() == 1 and recordings() == 0
        assert recordings() == 1
    with onepass.patch(model, decode=True, weights="fp8"):
        assert recordings() == 1
        (codes, *_) = model.model.layers[0].mlp._onepass.parts.projections
        before = codes.weight.data_ptr(), codes.weight  # as long as it is alive, the new codes lie elsewhere
        codes.merge()
        assert codes.weight.data_ptr() != before[0]
        assert recordings() == 1 and recordings() == 0, "weights of a patched model may be at new addresses"
    model.model.layers[1].register_forward_hook(lambda *_: None)
    assert recordings() == 1
    model.double()
    assert recordings() == 1
    with torch.inference_mode():
        assert recordings() == 0
    assert recordings() == 0
    for batch in range(1, 8):
        recordings(batch)
    assert len(generation._KEPT[model]) == generation.KEPT


def test_memory_is_released_with_the_model() -> None:
    generation._KEPT.clear()
    model = fresh("Llama")
    with onepass.patch(model, decode=True):
        both(model, prompts())
    cache = weakref.ref(next(iter(generation._KEPT[model].values())).state.layers[0].keys)
    assert cache() is not None
    del model
    gc.collect()
    assert cache() is None and not len(generation._KEPT)


def test_memory_of_a_replaced_step_is_released_at_once() -> None:
    """Without waiting for Python's collector of cycles: the next step may need the memory."""
    model = fresh("Llama")
    both(model, prompts())
    caches = [weakref.ref(layer.keys) for kept in generation._KEPT[model].values() for layer in kept.state.layers]
    gc.disable()
    try:
        generation._KEPT[model].clear()
        assert caches and all(cache() is None for cache in caches)
    finally:
        gc.enable()


def test_a_failed_call_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generation._KEPT.clear()
    model = small("Llama", torch.float32)

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(decode_state.State, "step", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        both(model, prompts())
    assert not generation._KEPT.get(model)


def test_a_step_that_cannot_be_recorded_is_named(graphs: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = fresh("Llama"), decode_state.State.step

    def reading(state: decode_state.State, model: Any) -> None:
        if graphs.capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nand a long trace")
        right(state, model)

    monkeypatch.setattr(decode_state.State, "step", reading)
    with pytest.raises(
        onepass.Unsupported, match=r"cannot be recorded .*\(operation not permitted when stream is capturing\)"
    ):
        both(model, prompts())


class NoHostReads(TorchDispatchMode):
    """Raises where a value of a tensor would reach the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        reads = ("_local_scalar_dense", "aten.item", "nonzero", "masked_select", "is_nonzero", "aten.equal", "unique")
        if any(part in name for part in reads):
            raise AssertionError(f"{name} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.sampled(8)  # one case in eight stays
@pytest.mark.parametrize("options", [None, *PATCHES], ids=str)
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma 3", "OLMo-2", "Phi-3", "GLM-4"])
def test_a_step_reads_nothing_on_the_host(
    name: str, options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it could not be recorded. Choice, filters, masks and the model are all part of it."""
    model, steps = fresh(name), []
    right = decode_state.State.step

    def watched(state: decode_state.State, model: Any) -> None:
        with NoHostReads():  # type: ignore[no-untyped-call]
            right(state, model)
        steps.append(state)

    with pytest.raises(AssertionError, match="on the host"), NoHostReads():  # type: ignore[no-untyped-call]
        torch.ones(1).item()
    monkeypatch.setattr(decode_state.State, "step", watched)
    call = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": EOS, "custom_generate": OURS}
    if options is not None:
        onepass.patch(model, **options)
    model.generate(**prompts(), **call, do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
    model.generate(**prompts(), **call, do_sample=False)
    assert len(steps) >= 4


@pytest.mark.sampled(3)  # one case in three stays
@pytest.mark.parametrize("options", PATCHES, ids=str)
@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "DeepSeek-V3"])
def test_patched_models_generate_the_tokens_of_their_plain_loop(
    name: str, options: dict[str, Any], graphs: StandIn
) -> None:
    model = fresh(name)
    with onepass.patch(model, **options):
        expected, got = both(model, prompts(), eos_token_id=EOS)
    assert torch.equal(got, expected)


def test_transformers_passes_what_is_expected() -> None:
    """`generate` finds the streamer in the caller, because transformers does not pass it to functions."""
    seen: dict[str, Any] = {}

    def custom(model: Any, input_ids: Tensor, generator: Any = None, **rest: Any) -> Tensor:
        seen.update(rest, generator=generator)
        return input_ids

    stream, generator = Recording(), torch.Generator()
    small("Llama", torch.float32).generate(
        **prompts(1), max_new_tokens=2, custom_generate=custom, streamer=stream, generator=generator
    )
    assert seen["generator"] is generator and seen.keys() >= {"logits_processor", "stopping_criteria"}
    assert type(seen["past_key_values"]) is DynamicCache and seen["position_ids"].shape == (1, 12)
    assert isinstance(seen["generation_config"], transformers.GenerationConfig)


def test_several_sequences_per_prompt() -> None:
    model = small("Llama", torch.float32)
    found = []
    for way in ({}, {"custom_generate": OURS}):
        torch.manual_seed(0)
        options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "pad_token_id": 0, **way}
        found.append(model.generate(**prompts(2), max_new_tokens=6, **options))
    assert torch.equal(*found) and len(found[1]) == 6 and not torch.equal(found[1][0], found[1][1])
