"""The first part of ``onepass demo``: a model generates text without and with onepass, and every number is measured.

The model is a small one of a family, with random weights, or one of yours. Random weights make poor text but honest
arithmetic: the tokens that come out are the same only if every logit is.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..integrations import Patched, patch
from ..integrations.forwards import AttentionCall, LayerCall, MlaCall, NormCall, add_norm
from ..ops.gemv_norm import gemv_and_partial_norm
from ..ops.qk_norm import qk_rms_norm

Speedup = Callable[[float, float], Text]
"""A cell of a table from the slower and the faster time."""
PROMPT: Final = 16
NEW_TOKENS: Final = 24
ROUNDS: Final = 5
_WITHOUT: Final = "without onepass"
_WITH: Final = "with onepass"
FLOAT32_ERROR: Final = 1e-4
"""How far logits may be apart in float32, as a share of the largest: sums are added in another order, nothing else."""

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("LlamaConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 128}),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "q_lora_rank": 256, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
            "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "moe_intermediate_size": 256, "n_shared_experts": 1,
        },
    ),
}  # fmt: skip
"""Configuration class and what it has besides the sizes above."""


@dataclass
class Outcome:
    """Everything the report says."""

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
    def fine(self) -> bool:
        """Whether onepass computed what the model computes."""
        return self.same_tokens and self.largest_logit > 0 and self.max_difference <= FLOAT32_ERROR * self.largest_logit


def load(name: str, path: Path | None, device: str) -> Any:
    """The model in float32, ready to generate."""
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
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
    """One token of a small model is too little work to share; waiting for a second thread is all that would be timed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def latent_cache(model: Any, handle: Patched | None, length: int) -> Any:
    """The cache whose entries a patched model with latent attention writes in one launch; None for any other."""
    if handle is None:
        return None
    modules = map(model.get_submodule, dict.fromkeys(change.where for change in handle.replaced))
    if not any(isinstance(module.__dict__["_onepass"], MlaCall) for module in modules):
        return None
    from ..integrations import MlaCache

    return MlaCache(model.config.get_text_config().num_hidden_layers, length)


def generate(
    model: Any, prompt: Tensor, count: int, step: Callable[[], None], cache: Any = None
) -> tuple[Tensor, Tensor, list[float]]:
    """Greedy tokens, the logits each was chosen from, and the seconds that each took after the prompt."""
    device = prompt.device.type
    ids, chosen, logits, seconds = prompt, [], [], []
    for index in range(count):
        _wait(device)
        begin = time.perf_counter()
        out = model(ids, past_key_values=cache, use_cache=True)
        _wait(device)
        if index:
            seconds.append(time.perf_counter() - begin)
        logits.append(out.logits[:, -1].float())
        ids, cache = logits[-1].argmax(-1, keepdim=True), out.past_key_values
        chosen.append(ids)
        step()
    return torch.cat(chosen, 1), torch.stack(logits), seconds


# --- the time of each op --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """The same work twice: as the model's code does it, and as onepass does."""

    op: str
    calls: int
    plain: Callable[[], object]
    ours: Callable[[], object]


def pairs(model: Any, handle: Patched, device: str) -> Iterator[Pair]:
    """One pair a kind of replacement, at the shapes of one decode step, with the weights of the model's first such module.

    A norm that is part of a larger replacement (behind an addition, or of q and k) is counted there alone.
    """
    kinds: dict[type, list[Any]] = {}
    inside: set[int] = set()
    for module in map(model.get_submodule, dict.fromkeys(change.where for change in handle.replaced)):
        how = module.__dict__["_onepass"]
        kinds.setdefault(type(how), []).append(module)
        parts = {LayerCall: (getattr(how, "norm", ""),), AttentionCall: ("q_norm", "k_norm"), MlaCall: _LATENT_NORMS}
        inside |= {id(getattr(module, name)) for name in parts.get(type(how), ())}
    widths: dict[int, list[Any]] = {}
    for norm in kinds.get(NormCall, ()):
        if id(norm) not in inside:
            widths.setdefault(norm.weight.shape[0], []).append(norm)
    for width, norms in sorted(widths.items()):
        x = torch.randn(1, 1, width, device=device)
        yield Pair(f"rms_norm, {width}", len(norms), partial(_original, norms[0], x), partial(norms[0].forward, x))
    if layers := kinds.get(LayerCall):
        yield _addition(getattr(layers[0], layers[0]._onepass.norm), len(layers), device)
    if attentions := kinds.get(AttentionCall):
        yield _queries_and_keys(attentions[0], len(attentions), device)
    if latents := kinds.get(MlaCall):
        for linear, norm in zip(("q_a_proj", "kv_a_proj_with_mqa"), _LATENT_NORMS, strict=True):
            yield _latent(getattr(latents[0], linear), getattr(latents[0], norm), len(latents), device)


_LATENT_NORMS: Final = ("q_a_layernorm", "kv_a_layernorm")


def _original(norm: Any, x: Tensor) -> Any:
    """A norm as the model's own class computes it."""
    return type(norm).forward(norm, x)


def _addition(norm: Any, calls: int, device: str) -> Pair:
    x, residual = (torch.randn(1, 1, norm.weight.shape[0], device=device) for _ in range(2))
    return Pair(
        f"rms_norm with residual, {x.shape[-1]}",
        calls,
        lambda: _original(norm, residual + x),
        lambda: add_norm(norm, x, residual),
    )


def _queries_and_keys(module: Any, calls: int, device: str) -> Pair:
    how: AttentionCall = module._onepass
    q, k = (torch.randn(1, 1, p.out_features, device=device) for p in (module.q_proj, module.k_proj))
    label = f"qk_rms_norm, {q.shape[-1]} + {k.shape[-1]}"
    if how.per_head:
        q, k = (t.view(1, 1, -1, module.head_dim) for t in (q, k))
    weights = module.q_norm.weight, module.k_norm.weight
    options: dict[str, Any] = {name: getattr(how, name) for name in ("weight_offset", "rounding", "per_head")}
    return Pair(
        label,
        calls,
        lambda: (_original(module.q_norm, q), _original(module.k_norm, k)),
        lambda: qk_rms_norm(q, k, *weights, how.eps, **options),
    )


def _latent(linear: Any, norm: Any, calls: int, device: str) -> Pair:
    x = torch.randn(1, linear.in_features, device=device)
    width, eps = norm.weight.shape[0], norm._onepass.eps
    return Pair(
        f"gemv_and_partial_norm, {linear.out_features} x {linear.in_features}",
        calls,
        lambda: _original(norm, linear(x)[:, :width]),
        lambda: gemv_and_partial_norm(x, linear.weight, norm.weight, eps),
    )


# --- showing it -----------------------------------------------------------------------------------------------------


class _Speeds:
    """The table of times as it stands."""

    def __init__(self, speedup: Speedup) -> None:
        self.speedup = speedup
        self.times: dict[str, list[float]] = {_WITHOUT: [], _WITH: []}
        self.results: dict[str, tuple[Tensor, Tensor]] = {}

    def __rich__(self) -> Table:
        table = Table("", box=None, pad_edge=False)
        for title in ("time a token", "speed-up"):
            table.add_column(title, justify="right")
        table.add_column("first tokens")
        for title, times in self.times.items():
            if times:
                shown = self.speedup(min(self.times[_WITHOUT]), min(times))
                first = " ".join(map(str, self.results[title][0][0, :8].tolist()))
                table.add_row(title, f"{min(times) * 1e3:.2f} ms", shown if title == _WITH else "", first)
        return table


@contextmanager
def _live(console: Console, *parts: Any) -> Iterator[None]:
    """Show these as they grow, or the first of them at the end where nobody is watching."""
    if console.is_terminal:
        with Live(Group(*parts), console=console, refresh_per_second=8):
            yield
    else:
        yield
        console.print(parts[0])


def show(
    name: str, path: Path | None, device: str, rounding: Any, report: Path, console: Console,
    timer: Callable[..., list[float]], speedup: Speedup,
) -> bool:  # fmt: skip
    """Generate without and with onepass, compare, time, write the report; whether the results agree."""
    with one_thread():
        outcome = _run(name, path, device, rounding, console, timer, speedup)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps({"fine": outcome.fine, **vars(outcome)}, indent=1) + "\n")
    console.print(f"Report written to {report}", soft_wrap=True)
    return outcome.fine


def _run(
    name: str, path: Path | None, device: str, rounding: Any, console: Console, timer: Callable[..., list[float]], speedup: Speedup
) -> Outcome:  # fmt: skip
    model = load(name, path, device)
    label = str(path) if path is not None else f"{name}, random weights"
    handle = patch(model, rounding=rounding)
    handle.undo()
    count = sum(p.numel() for p in model.parameters())
    outcome = Outcome(label, count, device, rounding, handle.to_json())
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    where = "one thread" if device == "cpu" else device
    console.print(
        f"{type(model).__name__} ({label}): {layers} layers, {count / 1e6:.0f} M parameters, float32, {where}"
    )
    console.print(Text("\n".join(str(handle).splitlines()[1:]), style="dim"))
    _show_tokens(model, rounding, outcome, console, speedup)
    _compare_bfloat16(model, rounding, outcome)
    _show_agreement(outcome, console)
    with patch(model, rounding=rounding) as handle:
        _show_ops(model, handle, outcome, console, timer, speedup)
    return outcome


def _show_tokens(model: Any, rounding: Any, outcome: Outcome, console: Console, speedup: Speedup) -> None:
    """Rounds alternate, so that both see the same disturbances; each is judged by its quietest."""
    device = outcome.device
    vocabulary = model.config.get_text_config().vocab_size
    prompt = torch.randint(2, vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
    speeds = _Speeds(speedup)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, console=console)
    task = progress.add_task("tokens", total=2 * ROUNDS * NEW_TOKENS)
    with _live(console, speeds, progress):
        for _ in range(ROUNDS):
            for title, times in speeds.times.items():
                with patch(model, rounding=rounding) if title == _WITH else nullcontext() as handle:
                    cache = latent_cache(model, handle, PROMPT + NEW_TOKENS)
                    outcome.cache = type(cache).__name__ if cache is not None else outcome.cache
                    step = partial(progress.advance, task)
                    chosen, logits, seconds = generate(model, prompt, NEW_TOKENS, step, cache)
                speeds.results[title] = (chosen, logits)
                times.append(statistics.median(seconds))
    (tokens, expected), (ours, got) = (speeds.results[title] for title in (_WITHOUT, _WITH))
    outcome.same_tokens = torch.equal(tokens, ours)
    outcome.tokens = ours[0].tolist()
    outcome.max_difference = float((got - expected).abs().max())
    outcome.largest_logit = float(expected.abs().max())
    outcome.milliseconds_a_token = {title: min(times) * 1e3 for title, times in speeds.times.items()}


def _compare_bfloat16(model: Any, rounding: Any, outcome: Outcome) -> None:
    """A copy of the model in bfloat16, one pass over the tokens."""
    ids = torch.tensor([outcome.tokens], device=outcome.device)
    low = copy.deepcopy(model).to(torch.bfloat16)
    expected = low(ids, use_cache=False).logits
    with patch(low, rounding=rounding):
        got = low(ids, use_cache=False).logits
    outcome.bfloat16_equal = float((got == expected).float().mean())
    outcome.bfloat16_max_difference = float((got.float() - expected.float()).abs().max())


def _show_agreement(outcome: Outcome, console: Console) -> None:
    table = Table("", "", "", box=None, pad_edge=False, show_header=False)
    good, bad = Text("ok", style="green"), Text("WRONG", style="bold red")
    words = f"{len(outcome.tokens)} of {len(outcome.tokens)}" if outcome.same_tokens else "no"
    table.add_row(good if outcome.same_tokens else bad, "same tokens, float32", words)
    close = outcome.fine or outcome.max_difference <= FLOAT32_ERROR * outcome.largest_logit
    table.add_row(
        good if close else bad,
        "largest difference of logits, float32",
        f"{outcome.max_difference:.1e}, the largest logit being {outcome.largest_logit:.2f}",
    )
    others = f"; the others differ by up to {outcome.bfloat16_max_difference:.1e}" if outcome.bfloat16_equal < 1 else ""
    table.add_row("", "logits equal to the bit, bfloat16", f"{outcome.bfloat16_equal:.2%}{others}")
    console.print(table)


def _show_ops(
    model: Any, handle: Patched, outcome: Outcome, console: Console, timer: Callable[..., list[float]], speedup: Speedup
) -> None:  # fmt: skip
    table = Table("op, one token, float32", box=None, pad_edge=False)
    for title in ("calls a token", "the model's code", "onepass", "speed-up"):
        table.add_column(title, justify="right")
    with _live(console, table):
        for pair in pairs(model, handle, outcome.device):
            slow, fast = timer((pair.plain, pair.ours), outcome.device)
            table.add_row(
                pair.op,
                str(pair.calls),
                f"{slow * 1e6:.1f} us",
                f"{fast * 1e6:.1f} us",
                speedup(slow, fast),
            )
            outcome.ops.append(
                {"op": pair.op, "calls": pair.calls, "plain_us": slow * 1e6, "onepass_us": fast * 1e6}
            )  # fmt: skip
