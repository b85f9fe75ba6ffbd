"""``python -m tools.bench.models``: one decode step of patched transformers models, captured in a CUDA graph and replayed.

Models have the layer sizes of well-known ones, few layers and random weights, in bfloat16 with a static cache. For each, the
step is captured in several ways: unpatched; patched (rounding="model"); patched with rounding="once", DeepSeek-V3 also over an
`MlaCache`; under torch.compile, unpatched and patched; with ``--max-autotune`` those two in that mode too. The baseline of all
is "unpatched": transformers' own code, not compiled, in a CUDA graph. Replays are compared with the unpatched model's own eager
step, then timed in turns. A way that fails is recorded with the first line of its error. ``--generate`` also times
`generate()` with the cache it makes by default, patched and not. Results are written after each row.

On a CPU (``--device cpu``) sizes are small, each way runs once, eagerly, and no time means anything: a rehearsal.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass

PROMPT, LENGTH = 63, 128
BATCHES = (1, 8)
LAYERS = 8
REPLAYS = 30
NEW_TOKENS = 32
_COMMON: dict[str, Any] = {
    "vocab_size": 32000, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3 8B": (
        "LlamaConfig",
        {"hidden_size": 4096, "intermediate_size": 14336, **_HEADS},
    ),
    "Qwen3 8B": (
        "Qwen3Config",
        {"hidden_size": 4096, "intermediate_size": 12288, **_HEADS},
    ),
    "Gemma 3 12B": (
        "Gemma3TextConfig",
        {
            "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256,
        },
    ),
    "OLMo-2 7B": (
        "Olmo2Config",
        {
            "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {
            "hidden_size": 7168, "intermediate_size": 18432,
            "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        },
    ),
}  # fmt: skip
_TINY = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256}  # for a rehearsal on a CPU


class Way(NamedTuple):
    """How a step is run: patched with a rounding or not, compiled in a mode or not, over an `MlaCache` or not."""

    name: str
    rounding: str = ""
    mode: str = ""
    latent: bool = False


BASELINE = "unpatched"
EAGER = (Way(BASELINE), Way("patched", "model"), Way("patched, once", "once"))
LATENT = Way("patched, once, MlaCache", "once", latent=True)
COMPILED = (Way("torch.compile", mode="default"), Way("torch.compile, patched", "model", "default"))
AUTOTUNED = (
    Way("max-autotune", mode="max-autotune-no-cudagraphs"),
    Way("max-autotune, patched", "model", "max-autotune-no-cudagraphs"),
)


def sized(name: str, layers: int) -> tuple[str, str, dict[str, Any]]:
    """A title, the configuration's class and its sizes, with so many decoder layers; of DeepSeek-V3's three are dense."""
    config, sizes = MODELS[name]
    if name.startswith("DeepSeek"):
        layers = min(layers, 3)
        more: dict[str, Any] = {"first_k_dense_replace": layers}
    else:
        more = {"layer_types": ["full_attention"] * layers} if name.startswith("Gemma") else {}
    dense = " dense" if name.startswith("DeepSeek") else ""
    return f"{name}, {layers}{dense} layers", config, {**sizes, "num_hidden_layers": layers, **more}


class Step:
    """One decode step of a model over a static cache that can be set back."""

    def __init__(self, model: Any, batch: int, device: str, latent: bool = False) -> None:
        self.model = model
        self.call: Callable[..., Any] = model
        self.kept: list[Any] = []  # what a compiler made: a captured graph runs its kernels
        self.device = device
        self.cache = self._cache(latent)
        vocabulary = model.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(2, vocabulary, (batch, PROMPT), generator=generator).to(device)
        self.ids = torch.randint(2, vocabulary, (batch, 1), generator=generator).to(device)
        self.positions = torch.full((batch, 1), PROMPT, device=device)
        # four dimensions: the model takes it as it is, and builds none on the host
        self.mask = (torch.arange(LENGTH, device=device) <= PROMPT).expand(batch, 1, 1, LENGTH).contiguous()
        model(prompt, past_key_values=self.cache, use_cache=True)
        self.saved = [[t.clone() for t in self._state(layer)] for layer in self.cache.layers]

    def _cache(self, latent: bool) -> Any:
        if latent:
            from onepass.integrations import MlaCache

            return MlaCache(self.model.config.num_hidden_layers, LENGTH, static=True)
        import transformers

        make: Any = transformers.StaticCache
        return make(config=self.model.config, max_cache_len=LENGTH)

    @staticmethod
    def _state(layer: Any) -> tuple[Tensor, ...]:
        """What a step changes."""
        if hasattr(layer, "paged"):
            return layer.paged.blocks, layer.paged.cache_lengths
        return layer.keys, layer.values, layer.cumulative_length

    def set_back(self) -> None:
        """The cache as it was after the prompt."""
        for layer, saved in zip(self.cache.layers, self.saved, strict=True):
            for now, then in zip(self._state(layer), saved, strict=True):
                now.copy_(then)

    def __call__(self) -> Tensor:
        """The logits of the next token."""
        out = self.call(
            self.ids, attention_mask=self.mask, position_ids=self.positions, past_key_values=self.cache, use_cache=True
        )
        logits: Tensor = out.logits
        return logits

    def compile(self, mode: str) -> None:
        """From now on the step is compiled. On a CPU it is only traced: nothing there is timed."""
        torch._dynamo.reset()

        def backend(graph: Any, inputs: Any) -> Any:
            if self.device == "cpu":
                made: Any = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
            else:
                from torch._inductor import list_mode_options
                from torch._inductor.compile_fx import compile_fx

                made = compile_fx(graph, inputs, config_patches=list_mode_options(mode))
            self.kept.append(made)
            return made

        self.call = torch.compile(self.model, backend=backend, dynamic=False)

    def captured(self) -> tuple[Callable[[], None], Tensor]:
        """A function that replays the step, and where it leaves the logits. On a CPU it ran once, and nothing is replayed."""
        if self.device == "cpu":
            kept = self().clone()
            return lambda: None, kept
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.set_back()
                self()
        torch.cuda.current_stream().wait_stream(stream)
        self.set_back()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self()
        return graph.replay, logits


def build(config: str, sizes: dict[str, Any], device: str) -> Any:
    """A model with random weights, made on the device."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**_COMMON, **sizes})
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, attn_implementation="sdpa")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def _captured(
    model: Any, way: Way, batch: int, device: str, plain: Step
) -> tuple[Step, Callable[[], None], Tensor, onepass.integrations.Patched | None]:
    """The step, what replays it, where its logits are, and what was patched."""
    rounding: Any = way.rounding
    # a graph keeps the kernels it was captured with: the patch may be undone afterwards
    with onepass.patch(model, rounding=rounding) if way.rounding else nullcontext() as handle:
        # entries of a latent cache are the patched model's own, the prompt's too; what compiles has a step of its own
        step = Step(model, batch, device, latent=way.latent) if way.latent or way.mode else plain
        if way.mode:
            step.compile(way.mode)
        step.set_back()
        replay, logits = step.captured()
    return step, replay, logits, handle


def measure(model: Any, batch: int, device: str, replays: int, ways: tuple[Way, ...] = EAGER) -> dict[str, Any]:
    """Agreement with the eager step, and microseconds a step, of each way to run it that did not fail."""
    plain = Step(model, batch, device)
    plain.set_back()
    eager = plain().float()
    if hasattr(model.config, "kv_lora_rank"):
        ways = (*ways[: len(EAGER)], LATENT, *ways[len(EAGER) :])
    captured: dict[str, tuple[Step, Callable[[], None], Tensor]] = {}
    row: dict[str, Any] = {"batch": batch, "agreement": {}, "us": {}, "replaced": {}, "compiled": {}, "failed": {}}
    for way in ways:
        start = time.perf_counter()
        try:
            step, replay, logits, handle = _captured(model, way, batch, device, plain)
        except Exception as error:  # whatever it is, the other ways go on
            row["failed"][way.name] = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
            continue
        captured[way.name] = step, replay, logits
        if way.mode:
            row["compiled"][way.name] = {"seconds": time.perf_counter() - start, "graphs": len(step.kept)}
        if handle is not None:
            lines = [f"{c.cls} {c.what}: {c.why}" for c in handle.replaced]
            row["replaced"][way.name] = {line: lines.count(line) for line in lines}
    for name, (step, replay, logits) in captured.items():
        step.set_back()
        replay()
        _wait(device)
        got = logits.float()
        row["agreement"][name] = {
            "equal": float((got == eager).float().mean()),
            "max_difference": float((got - eager).abs().max()),
            "largest_logit": float(eager.abs().max()),
            "same_token": bool(torch.equal(got[:, -1].argmax(-1), eager[:, -1].argmax(-1))),
        }
    samples: dict[str, list[float]] = {name: [] for name in captured}
    for _ in range(replays):
        for name, (step, replay, _) in captured.items():
            step.set_back()
            samples[name].append(_timed(replay, device))
    row["us"] = {name: statistics.median(times) for name, times in samples.items()}
    return row


def generating(model: Any, batch: int, device: str, repeats: int, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """Microseconds a token in `generate()` with its default cache, unpatched and patched: time on the host, prompt aside.

    Time for ``new_tokens`` more tokens than one, by that number; the median of a few, taken in turns.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, model.config.vocab_size, (batch, PROMPT), generator=generator).to(device)

    def run(tokens: int) -> tuple[float, Tensor]:
        _wait(device)
        start = time.perf_counter()
        found: Tensor = model.generate(ids, max_new_tokens=tokens, do_sample=False)
        _wait(device)
        return time.perf_counter() - start, found

    samples: dict[str, list[float]] = {BASELINE: [], "patched": []}
    tokens: dict[str, Tensor] = {}
    for turn in range(repeats + 1):  # the first is to warm up
        for name, times in samples.items():
            with onepass.patch(model) if name == "patched" else nullcontext():
                one, _ = run(1)
                many, tokens[name] = run(1 + new_tokens)
            if turn:
                times.append((many - one) / new_tokens * 1e6)
    same = (tokens[BASELINE] == tokens["patched"])[:, PROMPT:]
    return {
        "batch": batch,
        "new_tokens": new_tokens,
        "us_per_token": {name: statistics.median(times) for name, times in samples.items()},
        "same_tokens": float(same.float().mean()),
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _timed(call: Callable[[], None], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def agrees(row: dict[str, Any]) -> bool:
    """Whether every way that is ours ran, and all that ran give the eager step's logits, but for 16-bit rounding.

    Patched models were within 0.034 of the largest logit (benchmarks/h200); compilers round elsewhere.
    """
    ours = [name for name in row["failed"] if name in {way.name for way in (*EAGER, LATENT)}]
    limits = {name: 0.1 if name in row["compiled"] else 0.05 for name in row["agreement"]}
    return not ours and all(
        a["largest_logit"] > 0 and a["max_difference"] <= limits[name] * a["largest_logit"]
        for name, a in row["agreement"].items()
    )


def _show(row: dict[str, Any]) -> None:
    plain = row["us"].get(BASELINE, float("nan"))
    words = [f"{way} {us:.0f} us ({plain / us:.2f}x)" if us else way for way, us in row["us"].items()]
    words += [f"{way} failed: {error}" for way, error in row["failed"].items()]
    equal = "  ".join(f"{a['equal']:.1%}" for a in row["agreement"].values())
    print(f"{row['model']:28} batch {row['batch']}: {'  '.join(words)}; logits equal {equal}", flush=True)


def main() -> None:
    """Measure every model, print as it goes, write JSON if asked; exit status 1 where a patched step disagrees."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.models", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write results here, after each row")
    parser.add_argument("--models", default="", help="models whose name contains one of these, separated by commas")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="batch sizes, separated by commas")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"decoder layers (default {LAYERS})")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--max-autotune", action="store_true", help="compile in that mode as well")
    parser.add_argument("--generate", action="store_true", help="time generate() too")
    options = parser.parse_args()
    import transformers

    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "baseline": "transformers' own code, not compiled, in a CUDA graph",
        "rows": [],
        "generate": [],
    }
    ways = (*EAGER, *(() if options.no_compile else COMPILED), *(AUTOTUNED if options.max_autotune else ()))
    tiny = {} if options.device == "cuda" else _TINY
    counts = (3, NEW_TOKENS) if options.device == "cuda" else (1, 2)  # of generate()
    fine = True

    def keep(kind: str, row: dict[str, Any]) -> None:
        report[kind].append(row)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")

    with torch.no_grad():
        for name in MODELS:
            if not any(part in name for part in options.models.split(",")):
                continue
            title, config, sizes = sized(name, options.layers if options.device == "cuda" else 2)
            model = build(config, {**sizes, **tiny}, options.device)
            for batch in map(int, options.batches.split(",")):
                row = {"model": title, **measure(model, batch, options.device, REPLAYS, ways)}
                fine = agrees(row) and fine
                keep("rows", row)
                _show(row)
                if options.generate:
                    told = {"model": title, **generating(model, batch, options.device, *counts)}
                    keep("generate", told)
                    words = "  ".join(f"{way} {us:.0f} us a token" for way, us in told["us_per_token"].items())
                    print(f"{title:28} batch {batch}, generate(): {words}", flush=True)
            del model
            torch._dynamo.reset()
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
