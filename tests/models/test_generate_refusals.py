"""What `onepass.models.generate` cannot record, and names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass

pytest.importorskip("transformers")

from transformers.cache_utils import StaticCache

from onepass.models import MlaCache
from onepass.models.generation import request as generation_request
from tests.helpers.generating import OURS, both, prompts
from tests.helpers.models import fresh, small

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("`num_beams` is not supported, got 3", {"num_beams": 3}),
    ("`return_dict_in_generate`", {"return_dict_in_generate": True}),
    ("`output_scores`", {"output_scores": True, "return_dict_in_generate": False}),
    ("`prompt_lookup_num_tokens`", {"prompt_lookup_num_tokens": 3}),
    ("RepetitionPenaltyLogitsProcessor", {"repetition_penalty": 1.2}),
    ("NoRepeatNGramLogitsProcessor", {"no_repeat_ngram_size": 2}),
    ("MinLengthLogitsProcessor", {"min_new_tokens": 2, "eos_token_id": 5}),
    ("MinPLogitsWarper", {"min_p": 0.1, "do_sample": True}),
    ("TypicalLogitsWarper", {"typical_p": 0.5, "do_sample": True}),
    ("UnbatchedClassifierFreeGuidance", {"guidance_scale": 2.0}),
    ("MaxTimeCriteria", {"max_time": 10.0}),
    ("`use_cache=False`", {"use_cache": False}),
    ("`prefill_chunk_size`", {"prefill_chunk_size": 4}),
    ("`synced_gpus`", {"synced_gpus": True}),
    ("an offloaded DynamicCache", {"cache_implementation": "offloaded"}),
    ("the model argument `inputs_embeds`", {"inputs_embeds": torch.zeros(1, 12, 64)}),
]


@pytest.mark.parametrize(("words", "options"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_cannot_be_recorded_is_refused_by_name(
    words: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # an offloaded cache makes one, which CUDA builds of torch cannot do without a GPU
    monkeypatch.setattr(torch, "Stream", lambda *_, **__: None)
    model = small("Llama", torch.float32)
    inputs: dict[str, Any] = dict(prompts(1))
    if "inputs_embeds" in options:
        del inputs["input_ids"]
    with pytest.raises(onepass.ContractError, match=r"^generate: ") as refused:
        model.generate(**inputs, **{"max_new_tokens": 3, "do_sample": False, **options}, custom_generate=OURS)
    assert words in str(refused.value)


def test_models_and_caches_that_cannot_be_recorded_are_refused() -> None:
    def refused(model: Any, words: str, **options: Any) -> None:
        with pytest.raises(onepass.ContractError, match=r"^generate: ") as error:
            model.generate(**prompts(1), max_new_tokens=3, do_sample=False, custom_generate=OURS, **options)
        assert words in str(error.value)

    model = fresh("Llama")
    refused(model, "assistant_model", assistant_model=small("Llama", torch.float32))
    refused(model, "a cache of class MlaCache", past_key_values=MlaCache(2, 64))
    model.config._attn_implementation = "flex_attention"
    refused(model, "'flex_attention'")
    model = fresh("Llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    refused(model, "`rope_type` 'dynamic'")


def test_a_model_with_inputs_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' masks for the first step are compared with ours."""
    model = fresh("Llama")
    right = model.prepare_inputs_for_generation

    def other(input_ids: Tensor, **kwargs: Any) -> Any:
        made = right(input_ids, **kwargs)
        if isinstance(kwargs.get("past_key_values"), StaticCache):
            made["attention_mask"] = made["attention_mask"] & False
        return made

    model.prepare_inputs_for_generation = other
    with pytest.raises(onepass.ContractError, match="prepares `attention_mask`"):
        both(model, prompts())


def test_hooks_are_refused_where_replays_would_skip_them(clean_global_hooks: None) -> None:
    model = fresh("Llama")
    generation_request._check_hooks(model)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    with pytest.raises(onepass.ContractError, match="got one on all modules: replays would not call it"):
        generation_request._check_hooks(model)
    hook.remove()
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    expected, got = both(model, prompts())
    assert torch.equal(got, expected), "a CPU calls them"
    cuda = torch.device("cuda", 0)
    on_a_gpu: Any = SimpleNamespace(
        config=model.config, named_modules=model.named_modules, parameters=lambda: [SimpleNamespace(device=cuda)]
    )
    with pytest.raises(onepass.ContractError, match=r"a forward hook .* got one on model.layers.1.mlp"):
        generation_request._check_model(on_a_gpu, cuda)
    with pytest.raises(onepass.ContractError, match="must be on one device, got cpu and cuda:0"):
        generation_request._check_model(model, cuda)
