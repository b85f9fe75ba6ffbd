"""The attention of batch-invariant decode steps on a GPU, with torch's kernel replaced by its formula."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import onepass
from onepass.models.forwards import attend
from onepass.models.forwards.attend import biases

pytest.importorskip("transformers")

from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache

from tests.helpers.models import close, fresh, small, tokens

SCALING = 0.2
MODULE: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"), scaling=SCALING, layer_idx=0)


def aligned(bias: Tensor) -> bool:
    """What torch checks before it launches the kernel, and the address, for which it would fail."""
    steps = [step for step, size in zip(bias.stride()[:-1], bias.shape[:-1], strict=True) if size > 1]
    return bias.stride(-1) == 1 and all(step % 8 == 0 for step in steps) and bias.data_ptr() % 16 == 0


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool, *, scale: float) -> tuple[Tensor, ...]:
    """The kernel: no groups of heads, a bias of the full shape, and rows of all heads side by side in memory."""
    assert q.shape[:2] == k.shape[:2] == v.shape[:2] and k.shape[2] == v.shape[2] and not sums
    scores = q.double() @ k.double().mT * scale
    if bias is not None:
        assert bias.shape == scores.shape and bias.dtype is q.dtype
        assert torch.compiler.is_compiling() or aligned(bias)
        scores = scores + bias.double()
    out = (scores.softmax(-1) @ v.double()).to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), q.new_empty(0)


class Calls(list[tuple[Any, ...]]):
    """The arguments of all calls of the kernel."""

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        self.append(args)
        return formula(*args, **options)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A CPU has the kernel."""
    found = Calls()
    monkeypatch.setattr(attend, "KERNEL", found)
    monkeypatch.setattr(attend, "takes_unsplit", lambda *_: True)
    return found


def states(batch: int, heads: tuple[int, int], length: int, context: int, columns: tuple[int, int] = (16, 16)) -> Any:
    """Queries as a projection returns them, and keys and values of a cache."""
    generator = torch.Generator().manual_seed(context)
    q = torch.randn(batch, length, heads[0], columns[0], generator=generator).transpose(1, 2)
    k, v = (torch.randn(batch, heads[1], context, size, generator=generator) for size in columns)
    return q, k, v


def masked(*shape: int) -> Tensor:
    """A mask that is True where attention is allowed, different in all rows."""
    allowed = torch.rand(*shape, generator=torch.Generator().manual_seed(shape[0])) > 0.4
    allowed[..., -1] = True
    return allowed


def expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Rows of all heads, by the formula."""
    k, v = (t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q.double() @ k.mT * SCALING
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.double()
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("kind", "length"), [("none", 1), *product(["bool", "float", "one for all", "per head"], [1, 3, 20])]
)
@pytest.mark.parametrize("context", [37, 40])
@pytest.mark.parametrize("heads", [(8, 2), (6, 6), (4, 1)], ids=str)
def test_the_result_is_that_of_the_formula(
    heads: tuple[int, int], length: int, context: int, kind: str, calls: Calls
) -> None:
    """A prompt without a mask is left to transformers' causal attention."""
    q, k, v = states(3, heads, length, context)
    mask = None
    if kind == "per head":
        mask = torch.randn(3, heads[0], length, context, generator=torch.Generator().manual_seed(7))
    elif kind != "none":
        mask = masked(1 if kind == "one for all" else 3, 1, length, context)
        mask = torch.log(mask) if kind == "float" else mask
    got, weights = attend.attend(MODULE, "", (q, k, v), mask, {}, invariant=True)
    assert len(calls) == 1 and weights is None
    want = expected(q, k, v, mask)
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)


def test_one_token_copies_nothing(calls: Calls) -> None:
    """Rows are the queries themselves, a cache is read where it is, and the result has the order of the model."""
    q, k, v = states(3, (8, 2), 1, 40)
    attend.attend(MODULE, "", (q, k, v), masked(3, 1, 1, 40), {}, invariant=True)
    rows, keys, values, bias = calls[0][:4]
    assert [t.data_ptr() for t in (rows, keys, values)] == [t.data_ptr() for t in (q, k, v)]
    assert rows.shape == (6, 1, 4, 16) and keys.shape == (6, 1, 40, 16)
    assert bias.stride(2) == 0, "one row for all query heads of a group"


def test_a_bias_is_made_once_per_step(calls: Calls) -> None:
    q, k, v = states(2, (4, 2), 1, 9)
    mask = masked(2, 1, 1, 9)
    for layer in (0, 1, 2, 0):
        module: Any = SimpleNamespace(config=MODULE.config, scaling=SCALING, layer_idx=layer)
        attend.attend(module, "", (q, k, v), mask, {}, invariant=True)
        if layer == 2:
            mask[..., 0] = ~mask[..., 0]  # in place, for the next step
    kept = [call[3] for call in calls]
    assert kept[0].data_ptr() == kept[1].data_ptr() == kept[2].data_ptr() != kept[3].data_ptr()
    assert torch.equal(kept[0][..., 1:], kept[3][..., 1:]) and not torch.equal(kept[0], kept[3])


def test_a_bias_that_is_aligned_is_not_copied() -> None:
    whole = torch.zeros(2, 1, 3, 24)
    for bias, same in (
        (whole, True),
        (whole[..., :17], True),
        (whole[..., 1:], False),
        (whole[..., :17].clone(), False),
    ):
        made = biases.aligned(bias, torch.float32, 0)
        assert (made is bias) is same and torch.equal(made, bias)
        assert same or aligned(made)
    assert biases.aligned(whole, torch.bfloat16, 0).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("heads", "length", "columns"), [((8, 2), 1, (16, 16)), ((4, 4), 3, (24, 16)), ((8, 2), 20, (16, 16))]
)
def test_torch_knows_the_kernel_by_these_arguments(
    heads: tuple[int, int], length: int, columns: tuple[int, int]
) -> None:
    """Its shapes without values. Values of 24 and 16 columns are DeepSeek's in small."""
    states_ = [t.to("meta", torch.bfloat16) for t in states(3, heads, length, 40, columns)]
    mask = torch.zeros(3, 1, length, 40, device="meta", dtype=torch.bfloat16)
    out = attend.attend_unsplit(states_[0], states_[1], states_[2], mask, SCALING, 0)
    assert out.shape == (3, length, heads[0] * columns[1]) and out.dtype is torch.bfloat16


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_chips", {})
    majors = {0: 9, 1: 7, 2: 8}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=majors[device]))

    def tensor(dtype: torch.dtype = torch.bfloat16, columns: int = 128, device: int = 0, cuda: bool = True) -> Any:
        return SimpleNamespace(is_cuda=cuda, dtype=dtype, shape=(2, 8, 1, columns), get_device=lambda: device)

    def takes(mask: Any = None, values: int = 128, **options: Any) -> bool:
        return attend.takes_unsplit(tensor(**options), tensor(columns=values), mask)

    assert (
        takes() and takes(dtype=torch.float16) and takes(dtype=torch.float32) and takes(columns=192) and takes(device=2)
    )
    assert takes(torch.zeros(2, 1, 1, 9)) and not takes(torch.zeros(1, 9))
    assert not takes(cuda=False) and not takes(dtype=torch.float64) and not takes(device=1)
    assert not takes(columns=20) and not takes(values=20)
    monkeypatch.setattr(attend, "_chips", {})
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not takes()


def run(model: Any, static: bool, lengths: tuple[int, ...], calls: Calls) -> Tensor:
    """The logits of a prompt and of steps after it. ``calls`` has those of the steps."""
    kind: Any = StaticCache if static else DynamicCache
    cache = kind(config=model.config, **({"max_cache_len": sum(lengths) + 3} if static else {}))
    found = []
    with torch.inference_mode():
        for number, length in enumerate(lengths):
            found.append(model(tokens(2, length, seed=length), past_key_values=cache).logits)
            if number == 0:
                calls.clear()
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma 3", "DeepSeek-V3"])
def test_steps_of_an_invariant_model_use_the_kernel(name: str, static: bool, calls: Calls) -> None:
    """One token, several, and more than a decode step has otherwise; over windows that are full, too."""
    model, lengths = small(name, torch.float32), (5, 1, 3, 18, 1)
    want = run(model, static, lengths, calls)
    with onepass.patch(model, decode=True):
        run(model, static, lengths, calls)
        assert not calls
    with onepass.patch(model, decode=True, batch_invariant=True):
        close(run(model, static, lengths, calls), want)
    assert len(calls) == 2 * 4, "two layers, four steps"


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled step over a static cache, with a context that is no multiple of the alignment."""
    monkeypatch.setattr(attend, "KERNEL", formula)
    monkeypatch.setattr(attend, "takes_unsplit", lambda *_: True)
    model, make = fresh("Qwen3", layers=1), cast(Any, StaticCache)
    with onepass.patch(model, decode=True, batch_invariant=True), torch.no_grad():
        cache = make(config=model.config, max_cache_len=13)
        model(tokens(2, 6), past_key_values=cache)
        step: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
        got = [step(tokens(2, 1, seed=n), past_key_values=cache).logits for n in range(3)]
        cache = make(config=model.config, max_cache_len=13)
        model(tokens(2, 6), past_key_values=cache)
        want = [model(tokens(2, 1, seed=n), past_key_values=cache).logits for n in range(3)]
    close(torch.cat(got), torch.cat(want))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
