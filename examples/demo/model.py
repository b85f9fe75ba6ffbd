"""The second part of the demo: a small model in float32, without and with onepass, and each op alone.

The model is a small one of a family with random weights, or one of yours. With random weights the
text is meaningless, but the tokens agree only if the logits do.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.text import Text
from torch import Tensor

from benchmarks.suite.console import live, progress_bar, table
from onepass.models import NothingPatchedWarning, Patched, patch
from onepass.models.forwards.attention import AttentionRecord
from onepass.models.forwards.latent import LatentRecord
from onepass.models.forwards.layer import LayerRecord
from onepass.models.forwards.norm import NormRecord, add_norm
from onepass.ops.gemv_norm.op import gemv_and_partial_norm
from onepass.ops.qk_norm.op import qk_rms_norm

from .screen import Screen, verdict

PROMPT: Final = 16
NEW_TOKENS: Final = 24
ROUNDS: Final = 5
WITHOUT, WITH = "without onepass", "with onepass"
FLOAT32_ERROR: Final = 1e-4
"""How much float32 logits may differ, as a share of the largest: only the order of summation differs."""
_LATENT_NORMS: Final = {"q_a_proj": "q_a_layernorm", "kv_a_proj_with_mqa": "kv_a_layernorm"}
"""The linear layers of latent attention that a norm follows."""

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_LATENT = {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
_DENSE = {"num_key_value_heads": 8, "first_k_dense_replace": 1, "moe_intermediate_size": 256}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "deepseek-v3": ("DeepseekV3Config", {**_LATENT, **_EXPERTS, **_DENSE}),
    "olmo2": ("Olmo2Config", {}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 128}),
    "llama": ("LlamaConfig", {}),
}
"""The configuration class of each family, and its values besides `_SIZES`."""


@dataclass
class Outcome:
    """What the report contains."""

    model: str
    parameters: int
    device: str
    rounding: str
    patch: dict[str, Any]
    cache: str = "the model's own"
    same_tokens: bool = False
    tokens: list[int] = field(default_factory=list)
    max_difference: float = 0.0
    largest_logit: float = 0.0
    bfloat16_equal: float = 0.0
    bfloat16_max_difference: float = 0.0
    milliseconds_a_token: dict[str, float] = field(default_factory=dict)
    ops: list[dict[str, Any]] = field(default_factory=list)

    @property
    def close(self) -> bool:
        """Whether the float32 logits agree."""
        return self.largest_logit > 0 and self.max_difference <= FLOAT32_ERROR * self.largest_logit

    def to_json(self) -> dict[str, Any]:
        """As plain data; ``fine``: onepass computed what the model computes."""
        return {"fine": self.same_tokens and self.close, **vars(self)}


def load(name: str, path: Path | None, device: str) -> Any:
    """The model in float32, ready to generate."""
    import transformers  # not installed with onepass

    transformers.utils.logging.set_verbosity_error()
    make: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    if path is not None:
        model = make.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    else:
        config, special = MODELS[name]
        model = make.from_config(getattr(transformers, config)(**{**_SIZES, **special}), dtype=torch.float32)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" in key:
                    parameter.add_(0.2 * torch.randn(parameter.shape))
                elif parameter.dim() > 1:  # large enough that layers matter more than the last token's embedding
                    parameter.mul_(4)
    return model.eval().to(device)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: one token of a small model is so little work that more threads mostly wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def patched(model: Any, **options: Any) -> Iterator[tuple[Patched, str]]:
    """A model while it is patched: the handle, and what had no effect, "" if all options had one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = patch(model, **options)
    nothing = [str(warning.message) for warning in caught if issubclass(warning.category, NothingPatchedWarning)]
    with handle:
        if not nothing and options.get("weights") and not handle.fp8:
            nothing = [f"no weight of {type(model).__name__} is {options['weights']}"]
        yield handle, " ".join(nothing)


def _replaced(model: Any, handle: Patched) -> list[Any]:
    """The modules whose forward was replaced."""
    return [model.get_submodule(name) for name in dict.fromkeys(change.where for change in handle.replaced)]


def latent_cache(model: Any, handle: Patched | None, length: int) -> Any:
    """The cache that a patched model with latent attention writes in one launch; None for any other model."""
    records = [] if handle is None else [module._onepass for module in _replaced(model, handle)]
    if not any(isinstance(record, LatentRecord) and record.fused for record in records):
        return None
    from onepass.models import MlaCache  # needs transformers

    return MlaCache(model.config.get_text_config().num_hidden_layers, length)


def generate(
    model: Any, prompt: Tensor, count: int, step: Callable[[], None], cache: Any = None
) -> tuple[Tensor, Tensor, list[float]]:
    """Greedy tokens, the logits each was chosen from, and the seconds per token after the prompt."""
    wait: Callable[[], None] = torch.cuda.synchronize if prompt.is_cuda else lambda: None
    ids, chosen, logits, seconds = prompt, [], [], []
    for _ in range(count):
        wait()
        begin = time.perf_counter()
        out = model(ids, past_key_values=cache, use_cache=True)
        wait()
        seconds.append(time.perf_counter() - begin)
        logits.append(out.logits[:, -1].float())
        ids, cache = logits[-1].argmax(-1, keepdim=True), out.past_key_values
        chosen.append(ids)
        step()
    return torch.cat(chosen, 1), torch.stack(logits), seconds[1:]


@dataclass(frozen=True)
class Pair:
    """The same work done by the model's code and by onepass."""

    op: str
    calls: int
    plain: Callable[[], object]
    ours: Callable[[], object]


def pairs(model: Any, handle: Patched, device: str) -> Iterator[Pair]:
    """One pair per kind of replacement, at the shapes of one decode step, with the weights of the first such module.

    A norm that is part of a larger replacement (after an addition, or of q and k) is counted there only.
    """
    kinds: dict[type, list[Any]] = {}
    inside: set[int] = set()
    for module in _replaced(model, handle):
        record = module._onepass
        kinds.setdefault(type(record), []).append(module)
        parts = {LayerRecord: (getattr(record, "norm", ""),), AttentionRecord: ("q_norm", "k_norm")}
        parts[LatentRecord] = tuple(_LATENT_NORMS.values())
        inside |= {id(getattr(module, name)) for name in parts.get(type(record), ())}
    widths: dict[int, list[Any]] = {}
    for norm in kinds.get(NormRecord, ()):
        if id(norm) not in inside:
            widths.setdefault(norm.weight.shape[0], []).append(norm)
    for width, norms in sorted(widths.items()):
        x = torch.randn(1, 1, width, device=device)
        yield Pair(f"rms_norm, {width}", len(norms), partial(_original, norms[0], x), partial(norms[0].forward, x))
    for kind, make in ((LayerRecord, _addition), (AttentionRecord, _queries_and_keys)):
        if modules := kinds.get(kind):
            yield make(modules[0], len(modules), device)
    if latents := kinds.get(LatentRecord):
        for linear, norm in _LATENT_NORMS.items():
            yield _latent(getattr(latents[0], linear), getattr(latents[0], norm), len(latents), device)


def _original(norm: Any, x: Tensor) -> Any:
    """A norm as the model's own class computes it."""
    return type(norm).forward(norm, x)


def _addition(layer: Any, calls: int, device: str) -> Pair:
    norm = getattr(layer, layer._onepass.norm)
    x, residual = (torch.randn(1, 1, norm.weight.shape[0], device=device) for _ in range(2))
    name = f"rms_norm with residual, {x.shape[-1]}"
    return Pair(name, calls, lambda: _original(norm, residual + x), lambda: add_norm(norm, x, residual))


def _queries_and_keys(module: Any, calls: int, device: str) -> Pair:
    record: AttentionRecord = module._onepass
    norm: NormRecord = module.q_norm._onepass
    widths = module.q_proj.out_features // (2 if record.gated else 1), module.k_proj.out_features
    q, k = (torch.randn(1, 1, width, device=device) for width in widths)
    name = f"qk_rms_norm, {q.shape[-1]} + {k.shape[-1]}"
    if record.per_head:
        q, k = (t.view(1, 1, -1, module.head_dim) for t in (q, k))
    weights = module.q_norm.weight, module.k_norm.weight
    options: dict[str, Any] = {"weight_offset": norm.weight_offset, "rounding": norm.rounding}
    ours = partial(qk_rms_norm, q, k, *weights, norm.eps, per_head=record.per_head, **options)
    return Pair(name, calls, lambda: (_original(module.q_norm, q), _original(module.k_norm, k)), ours)


def _latent(linear: Any, norm: Any, calls: int, device: str) -> Pair:
    x = torch.randn(1, linear.in_features, device=device)
    width = norm.weight.shape[0]
    name = f"gemv_and_partial_norm, {linear.out_features} x {linear.in_features}"
    ours = partial(gemv_and_partial_norm, x, linear.weight, norm.weight, norm._onepass.eps)
    return Pair(name, calls, lambda: _original(norm, linear(x)[:, :width]), ours)


def show(name: str, path: Path | None, rounding: Any, screen: Screen) -> dict[str, Any]:
    """Generate without and with onepass, compare and time; return the report."""
    with one_thread():
        device, console = screen.device, screen.console
        model = load(name, path, device)
        label = str(path) if path is not None else f"{name}, random weights"
        with patched(model, rounding=rounding) as (handle, nothing):
            count = sum(p.numel() for p in model.parameters())
        outcome = Outcome(label, count, device, rounding, handle.to_json())
        layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
        sizes = f"{layers} layers, {count / 1e6:.0f} M parameters, float32"
        console.print(f"{type(model).__name__} ({label}): {sizes}, {'one thread' if device == 'cpu' else device}")
        console.print(Text("\n".join(str(handle).splitlines()[1:]), style="dim"))
        if nothing:
            console.print(Text.assemble(verdict(False), f"  nothing was compared: {nothing}"), soft_wrap=True)
            return outcome.to_json()
        _show_tokens(model, rounding, outcome, screen)
        _compare_bfloat16(model, rounding, outcome)
        _show_agreement(outcome, screen)
        with patch(model, rounding=rounding) as handle:
            _show_ops(model, handle, outcome, screen)
    return outcome.to_json()


def _show_tokens(model: Any, rounding: Any, outcome: Outcome, screen: Screen) -> None:
    """Rounds alternate, so that both see the same disturbances; the quietest round of each counts."""
    vocabulary = model.config.get_text_config().vocab_size
    prompt = torch.randint(2, vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(0)).to(screen.device)
    times: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    results: dict[str, tuple[Tensor, Tensor]] = {}
    with progress_bar(screen.console, disable=not screen.console.is_terminal) as progress:
        task = progress.add_task("tokens", total=2 * ROUNDS * NEW_TOKENS)
        for title in (WITHOUT, WITH) * ROUNDS:
            with patch(model, rounding=rounding) if title == WITH else nullcontext() as handle:
                cache = latent_cache(model, handle, PROMPT + NEW_TOKENS)
                outcome.cache = type(cache).__name__ if cache is not None else outcome.cache
                step = partial(progress.advance, task)
                chosen, logits, seconds = generate(model, prompt, NEW_TOKENS, step, cache)
            results[title] = chosen, logits
            times[title].append(statistics.median(seconds))
    (tokens, expected), (ours, got) = results[WITHOUT], results[WITH]
    outcome.same_tokens = torch.equal(tokens, ours)
    outcome.tokens = ours[0].tolist()
    outcome.max_difference = float((got - expected).abs().max())
    outcome.largest_logit = float(expected.abs().max())
    outcome.milliseconds_a_token = {title: min(found) * 1e3 for title, found in times.items()}
    slow, fast = outcome.milliseconds_a_token.values()
    shown = table("", right=("time per token", "speed-up"))
    shown.add_column("first tokens")
    for title, ms, cell in ((WITHOUT, slow, ""), (WITH, fast, screen.speedup(slow, fast))):
        shown.add_row(title, f"{ms:.2f} ms", cell, " ".join(map(str, results[title][0][0, :8].tolist())))
    screen.console.print(shown)


def _compare_bfloat16(model: Any, rounding: Any, outcome: Outcome) -> None:
    """Compare one pass of a bfloat16 copy of the model over the tokens."""
    ids = torch.tensor([outcome.tokens], device=outcome.device)
    low = copy.deepcopy(model).to(torch.bfloat16)
    expected = low(ids, use_cache=False).logits
    with patch(low, rounding=rounding):
        got = low(ids, use_cache=False).logits
    outcome.bfloat16_equal = float((got == expected).float().mean())
    outcome.bfloat16_max_difference = float((got.float() - expected.float()).abs().max())


def _show_agreement(outcome: Outcome, screen: Screen) -> None:
    count = len(outcome.tokens)
    differs = (
        f"; the others differ by up to {outcome.bfloat16_max_difference:.1e}" if outcome.bfloat16_equal < 1 else ""
    )
    logits = f"{outcome.max_difference:.1e}; the largest logit is {outcome.largest_logit:.2f}"
    same = f"{count} of {count}" if outcome.same_tokens else "no"
    shown = table("", "", "", show_header=False)
    shown.add_row(verdict(outcome.same_tokens), "same tokens, float32", same)
    shown.add_row(verdict(outcome.close), "largest difference of logits, float32", logits)
    shown.add_row("", "bit-identical logits, bfloat16", f"{outcome.bfloat16_equal:.2%}{differs}")
    screen.console.print(shown)


def _show_ops(model: Any, handle: Patched, outcome: Outcome, screen: Screen) -> None:
    shown = table("op, one token, float32", right=("calls", "model's code", "onepass", "speed-up"))
    with live(screen.console, shown):
        for pair in pairs(model, handle, screen.device):
            slow, fast = screen.seconds(pair.plain, pair.ours)
            times = f"{slow * 1e6:.1f} us", f"{fast * 1e6:.1f} us"
            shown.add_row(pair.op, str(pair.calls), *times, screen.speedup(slow, fast))
            row = {"op": pair.op, "calls": pair.calls, "plain_us": slow * 1e6, "onepass_us": fast * 1e6}
            outcome.ops.append(row)
