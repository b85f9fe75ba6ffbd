"""`onepass.patch` with ``batch_invariant=True`` on a CPU: a token's logits depend on its own sequence alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import onepass
from onepass.core import backend
from onepass.models.forwards import attend
from onepass.ops.sequence_attention import cpu
from onepass.ops.sequence_attention.launch import SequenceCall
from onepass.ops.sequence_attention.op import attend_sequence

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from tests.helpers.models import COMMON, CONFIGS
from tools.architectures.small import randomize

BF16 = torch.bfloat16
PROMPTS, NEW = 16, 4
SIZES = {"hidden_size": 128, "intermediate_size": 160, "max_position_embeddings": 512}
OTHERS: dict[str, dict[str, Any]] = {
    "Gemma 2": {"attn_implementation": "eager", "attn_logit_softcapping": 2.0},
    "Gemma 3": {"layer_types": ["sliding_attention", "full_attention"]},
}
"""Soft-capped scores, and layers with and without a window."""
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 56},
    ),
    "MiniMax-M2": CONFIGS["MiniMax-M2"],
}
FAMILIES = ("Qwen3", "Llama", "Gemma 3", "OLMo-2", "Gemma 2", "DeepSeek-V3", *MIXTURES)
DTYPES = dict.fromkeys(("Gemma 2", "DeepSeek-V3", *MIXTURES), torch.float32)
"""In bfloat16 the logits of these small models are the same without onepass."""


@cache
def model_of(family: str, dtype: torch.dtype | None = None, **more: Any) -> Any:
    """A small model whose prompts may have hundreds of tokens, with weights that make every layer matter."""
    import transformers

    name, special = MIXTURES[family] if family in MIXTURES else CONFIGS[family]
    special = {**special, **OTHERS.get(family, {}), **more}
    implementation = special.pop("attn_implementation", "sdpa")
    config = getattr(transformers, name)(**{**COMMON, **SIZES, "num_hidden_layers": 2, **special})
    torch.manual_seed(0)
    make: Any = transformers.AutoModelForCausalLM.from_config
    model = make(config, dtype=dtype or DTYPES.get(family, BF16), attn_implementation=implementation).eval()
    randomize(model)
    return model


@contextmanager
def invariant(model: Any) -> Iterator[Any]:
    """The model, patched."""
    with onepass.patch(model, decode=True, batch_invariant=True), torch.inference_mode():
        yield model


def prompts_of(model: Any, longest: int = 90, count: int = PROMPTS) -> list[Tensor]:
    """Prompts of 3 tokens and more, the last of which is the longest."""
    generator = torch.Generator().manual_seed(9)
    lengths = [3 + int(torch.randint(longest - 2, (1,), generator=generator)) for _ in range(count - 1)]
    return [torch.randint(2, model.config.vocab_size, (n,), generator=generator) for n in (*lengths, longest)]


def padded(prompts: list[Tensor], left: bool = True, width: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts as a batch, and their mask."""
    width = max(width, *map(len, prompts))
    sides = [(width - len(p), 0) if left else (0, width - len(p)) for p in prompts]
    ids = torch.stack([F.pad(p, side) for p, side in zip(prompts, sides, strict=True)])
    return ids, torch.stack([F.pad(torch.ones_like(p), side) for p, side in zip(prompts, sides, strict=True)])


def generated(model: Any, prompts: list[Tensor], **options: Any) -> list[tuple[Tensor, Tensor]]:
    """For each prompt the logits of greedy steps and all tokens."""
    ids, mask = padded(prompts)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    logits = torch.stack(out.logits, 1)
    return [(row, tokens[-NEW - len(p) :]) for row, tokens, p in zip(logits, out.sequences, prompts, strict=True)]


def equal_to_alone(model: Any, size: int, prompts: list[Tensor], **options: Any) -> int:
    """How many prompts have the same logits and tokens in batches as alone."""
    alone = [generated(model, [prompt], **options)[0] for prompt in prompts]
    batches = [generated(model, prompts[i : i + size], **options) for i in range(0, len(prompts), size)]
    pairs = zip(alone, [row for batch in batches for row in batch], strict=True)
    return sum(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def in_chunks(model: Any, prompts: list[Tensor], lengths: tuple[int, ...], static: bool = False) -> list[Tensor]:
    """The logits of prompts that go through the model in chunks of these lengths; the last is repeated."""
    ids, mask = padded(prompts)
    width = ids.shape[1]
    kind: Any = StaticCache if static else DynamicCache
    past = kind(config=model.config, **({"max_cache_len": width + 37} if static else {}))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits: list[Tensor] = []
    start = 0
    while start < width:
        length = lengths[min(len(logits), len(lengths) - 1)]
        own = slice(start, start + length)
        step = {"attention_mask": mask[:, : own.stop], "position_ids": positions[:, own], "past_key_values": past}
        logits.append(model(ids[:, own], **step).logits)
        start += length
    rows = torch.cat(logits, 1)
    return [row[width - len(p) :] for row, p in zip(rows, prompts, strict=True)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether all logits have the same bytes."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 8, 16])
def test_unpatched_logits_depend_on_the_batch(family: str, size: int) -> None:
    """Otherwise the tests below would show nothing."""
    model = model_of(family)
    assert equal_to_alone(model, size, prompts_of(model)) < PROMPTS


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 8, 16])
def test_generation_does_not_depend_on_the_batch(family: str, size: int) -> None:
    with invariant(model_of(family)) as model:
        assert equal_to_alone(model, size, prompts_of(model)) == PROMPTS


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    with invariant(model_of("Qwen3", dtype)) as model:
        assert equal_to_alone(model, 8, prompts_of(model)) == PROMPTS


@pytest.mark.parametrize("columns", [64, 72, 128, 256])
def test_heads(columns: int) -> None:
    with invariant(model_of("Qwen3", head_dim=columns)) as model:
        assert equal_to_alone(model, 8, prompts_of(model, count=8)) == 8


@pytest.mark.parametrize("family", ["Qwen3", "Gemma 3"])
def test_static_caches(family: str) -> None:
    with invariant(model_of(family)) as model:
        prompts = prompts_of(model, count=8)
        assert equal_to_alone(model, 4, prompts, cache_implementation="static", disable_compile=True) == 8
        assert all(
            torch.equal(generated(model, [p], cache_implementation="static", disable_compile=True)[0][0], row)
            for p, (row, _) in zip(prompts, generated(model, prompts), strict=True)
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_steps(family: str) -> None:
    """A prompt gives the same logits as a whole, in chunks and token by token, alone and padded."""
    with invariant(model_of(family)) as model:
        prompts = prompts_of(model, count=4)
        whole = [in_chunks(model, [prompt], (len(prompt),))[0] for prompt in prompts]
        for lengths in ((1000,), (7,), (16,), (40, 1)):
            assert same(in_chunks(model, prompts, lengths), whole), lengths
        assert same(in_chunks(model, prompts[-1:], (1,)), whole[-1:])


def test_long_prompts() -> None:
    """Of more keys than a split has."""
    with invariant(model_of("Qwen3")) as model:
        prompts = [*prompts_of(model, count=2), *prompts_of(model, 400, 2)]
        whole = [in_chunks(model, [prompt], (len(prompt),))[0] for prompt in prompts]
        assert same(in_chunks(model, prompts, (100,)), whole)
        assert same(in_chunks(model, prompts, (390, 1), static=True), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatched_chunks_and_steps_differ(family: str) -> None:
    model = model_of(family)
    prompts = prompts_of(model, count=4)
    with torch.inference_mode():
        whole = in_chunks(model, prompts, (1000,))
        assert not same(in_chunks(model, prompts, (7,)), whole)
        assert not same(in_chunks(model, prompts, (40, 1)), whole)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma 3"])
@pytest.mark.parametrize("left", [False, True])
def test_scores_are_those_of_generation(family: str, left: bool) -> None:
    """Padded on either side, and also where the padding is longer than needed."""
    with invariant(model_of(family)) as model:
        prompts = prompts_of(model, count=4)
        rows = generated(model, prompts)
        ids, mask = padded([tokens for _, tokens in rows], left, width=120)
        scores = onepass.models.score(model, ids, mask)
        assert scores.shape == (4, 119) and scores.dtype is torch.float32
        for row, (logits, tokens), kept in zip(scores, rows, mask, strict=True):
            real = row[(kept[1:] * kept[:-1]).bool()]
            assert len(real) == len(tokens) - 1 and row.count_nonzero() == len(real)
            for step, token, got in zip(logits, tokens[-NEW:], real[-NEW:], strict=True):
                assert torch.equal(torch.log_softmax(step.float(), -1)[token], got)
            assert torch.equal(onepass.models.score(model, tokens[None])[0], real)


def test_scores_of_an_unpatched_model_are_its_log_softmax() -> None:
    model = model_of("Llama", torch.float32)
    ids = torch.stack(prompts_of(model, 12, 1))
    with torch.inference_mode():
        expected = model(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(onepass.models.score(model, ids), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, dtype=torch.long),), "`ids` must have shape .batch, tokens."),
        ((torch.zeros(1, 3),), "`ids` must be an integer tensor"),
        ((torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 2)), "`attention_mask` must have the shape of `ids`"),
        ((torch.ones(1, 3, dtype=torch.long), torch.tensor([[1, 0, 1]])), "one run of ones"),
    ],
)
def test_bad_scores(arguments: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(onepass.errors.ContractError, match=f"score: .*{message}"):
        onepass.models.score(model_of("Llama"), *arguments)


def test_other_numbers_of_threads() -> None:
    before = torch.get_num_threads()
    with invariant(model_of("Qwen3")) as model:
        prompts = prompts_of(model, 300, 4)
        found: list[list[Tensor]] = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append([logits for logits, _ in generated(model, prompts)])
        finally:
            torch.set_num_threads(before)
        assert same(found[0], found[1]) and same(found[0], found[2])


@pytest.mark.parametrize("family", ["DeepSeek-V3", *MIXTURES])
def test_experts_do_the_same_as_the_models(family: str) -> None:
    model, ids = model_of(family), torch.arange(2, 26).view(2, 12)
    with torch.inference_mode():
        expected = model(ids).logits
    with invariant(model):
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["DeepSeek-V3", *MIXTURES])
def test_experts_are_reported(family: str) -> None:
    with onepass.patch(model_of(family), decode=True, batch_invariant=True, strict=True) as handle:
        assert not [change for change in handle.left if change.what.startswith("decode")]
        assert {"decode experts", "decode router"} <= {change.what for change in handle.replaced}


@pytest.mark.filterwarnings("ignore::onepass.models.NothingPatchedWarning")
def test_experts_of_other_code_are_listed() -> None:
    """gpt-oss multiplies by transposed weights, and adds biases."""
    model = model_of("gpt-oss", attn_implementation="eager")
    with onepass.patch(model, decode=True, batch_invariant=True) as handle:
        left = [change for change in handle.left if change.what == "decode experts"]
    assert [change.cls for change in left] == ["GptOssExperts"] * 2
    assert all("not one of the supported forms" in change.why for change in left)


@pytest.mark.parametrize("freed", [False, True])
def test_strict_refuses_experts_of_other_code(freed: bool) -> None:
    """Before any weight is freed."""
    model = copy.deepcopy(model_of("Qwen3-MoE"))
    before = copy.deepcopy(model.state_dict())
    model.model.layers[1].mlp.experts.act_fn = torch.nn.Tanh()
    options: dict[str, Any] = {"weights": "fp8", "keep_weights": False} if freed else {}
    with pytest.raises(
        onepass.errors.ContractError,
        match=r"strict=True.*is not batch-invariant, and is unchanged .*1 x Qwen3MoeExperts decode experts: its activation",
    ):
        onepass.patch(model, decode=True, batch_invariant=True, strict=True, **options)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_experts_refuse_gradients() -> None:
    model = model_of("Mixtral")
    with (
        onepass.patch(model, decode=True, batch_invariant=True),
        pytest.raises(onepass.errors.ContractError, match="have no backward"),
    ):
        model.model.layers[0].mlp.gate(torch.randn(3, SIZES["hidden_size"]))


def test_padding_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in keys and values of padding has no effect."""
    run: Callable[..., Tensor] = attend_sequence
    calls: list[int] = []

    def spoiled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *more: Any) -> Tensor:
        if mask is not None:
            hidden = ~mask.any(2).squeeze(1)[:, None, :, None]
            k, v = (t.masked_fill(hidden, torch.nan) for t in (k, v))
            calls.append(int(hidden.sum()))
        return run(q, k, v, mask, *more)

    with invariant(model_of("Qwen3")) as model:
        prompts = prompts_of(model, count=4)
        expected = [logits for logits, _ in generated(model, prompts)]
        monkeypatch.setattr(attend, "attend_sequence", spoiled)
        assert same([logits for logits, _ in generated(model, prompts)], expected)
    assert any(calls)


def test_compiled_steps() -> None:
    """A compiler calls the same kernel."""
    with invariant(model_of("Llama")) as model:
        ids = torch.stack(prompts_of(model, 20, 1))
        compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_one_launch_has_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer calls the kernel once, for prompts and for steps."""
    calls: list[SequenceCall] = []

    def launch(call: SequenceCall) -> None:
        calls.append(call)
        cpu.launch(call)

    monkeypatch.setitem(backend._launches, ("sequence_attention", "cpu"), launch)
    with invariant(model_of("Qwen3")) as model:
        generated(model, prompts_of(model, count=2))
    assert len(calls) == 2 * NEW and {call.rows.tokens for call in calls} == {90, 1}
