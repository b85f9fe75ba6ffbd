"""``python -m tools.bench.models``: one decode step of patched transformers models, captured in a CUDA graph and replayed.

Models have the layer sizes of well-known ones, few layers and random weights, in bfloat16 with a
static cache. The step is captured in several ways: unpatched; patched (rounding="model"); patched
with rounding="once", DeepSeek-V3 also with an `MlaCache`; under torch.compile, unpatched and patched;
with ``--max-autotune`` those two in that mode too. The baseline is "unpatched": transformers' own
code, not compiled, in a CUDA graph. Replays are compared with the unpatched model's eager step, then
timed in turns. A way that fails is recorded with the first line of its error. ``--generate`` also
times `generate()` with its default cache, patched and not. Results are written after each row.

On a CPU (``--device cpu``) sizes are small, each way runs once, eagerly, and times mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass

from . import common

PROMPT, LENGTH = 63, 128
BATCHES = (1, 8)
LAYERS = 8
REPLAYS = 30
NEW_TOKENS = 32
_TINY = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256}  # on a CPU


class Way(NamedTuple):
    """How a step is run: patched with a rounding or not, compiled in a mode or not, with an `MlaCache` or not."""

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


class Step:
    """One decode step of a model with a static cache that can be reset."""

    def __init__(self, model: Any, batch: int, device: str, latent: bool = False) -> None:
        self.model = model
        self.call: Callable[..., Any] = model
        self.compiled: list[Any] = []  # compiled code: a captured graph runs its kernels
        self.device = device
        self.cache = self._cache(latent)
        vocabulary = model.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(2, vocabulary, (batch, PROMPT), generator=generator).to(device)
        self.ids = torch.randint(2, vocabulary, (batch, 1), generator=generator).to(device)
        self.positions = torch.full((batch, 1), PROMPT, device=device)
        # four dimensions: the model uses it unchanged and builds none on the host
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
        """The tensors that a step changes."""
        if hasattr(layer, "paged"):
            return layer.paged.blocks, layer.paged.cache_lengths
        return layer.keys, layer.values, layer.cumulative_length

    def reset(self) -> None:
        """Restore the cache to its state after the prompt."""
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
        """Compile the step. On a CPU it is only traced, because nothing is timed there."""
        torch._dynamo.reset()

        def backend(graph: Any, inputs: Any) -> Any:
            if self.device == "cpu":
                made: Any = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
            else:
                from torch._inductor import list_mode_options
                from torch._inductor.compile_fx import compile_fx

                made = compile_fx(graph, inputs, config_patches=list_mode_options(mode))
            self.compiled.append(made)
            return made

        self.call = torch.compile(self.model, backend=backend, dynamic=False)

    def captured(self) -> tuple[Callable[[], None], Tensor]:
        """A function that replays the step, and the tensor of its logits. On a CPU the step runs once and is not replayed."""
        if self.device == "cpu":
            logits = self().clone()
            return lambda: None, logits
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.reset()
                self()
        torch.cuda.current_stream().wait_stream(stream)
        self.reset()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self()
        return graph.replay, logits


def _captured(
    model: Any, way: Way, batch: int, device: str, plain: Step
) -> tuple[Step, Callable[[], None], Tensor, onepass.integrations.Patched | None]:
    """The step, the function that replays it, its logits, and what was patched."""
    rounding: Any = way.rounding
    # A graph keeps the kernels it was captured with, so the patch may be undone afterwards.
    with onepass.patch(model, rounding=rounding) if way.rounding else nullcontext() as handle:
        # Only the patched model writes entries of a latent cache; a compiled way needs a step of its own.
        step = Step(model, batch, device, latent=way.latent) if way.latent or way.mode else plain
        if way.mode:
            step.compile(way.mode)
        step.reset()
        replay, logits = step.captured()
    return step, replay, logits, handle


def measure(model: Any, batch: int, device: str, replays: int, ways: tuple[Way, ...] = EAGER) -> dict[str, Any]:
    """Agreement with the eager step, and microseconds per step, of each way that did not fail."""
    plain = Step(model, batch, device)
    plain.reset()
    eager = plain().float()
    if hasattr(model.config, "kv_lora_rank"):
        ways = (*ways[: len(EAGER)], LATENT, *ways[len(EAGER) :])
    captured: dict[str, tuple[Step, Callable[[], None], Tensor]] = {}
    row: dict[str, Any] = {"batch": batch, "agreement": {}, "us": {}, "replaced": {}, "compiled": {}, "failed": {}}
    for way in ways:
        start = time.perf_counter()
        try:
            step, replay, logits, handle = _captured(model, way, batch, device, plain)
        except Exception as error:  # the other ways continue
            row["failed"][way.name] = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
            continue
        captured[way.name] = step, replay, logits
        if way.mode:
            row["compiled"][way.name] = {"seconds": time.perf_counter() - start, "graphs": len(step.compiled)}
        if handle is not None:
            lines = [f"{c.cls} {c.what}: {c.why}" for c in handle.replaced]
            row["replaced"][way.name] = {line: lines.count(line) for line in lines}
    for name, (step, replay, logits) in captured.items():
        step.reset()
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
            step.reset()
            samples[name].append(_timed(replay, device))
    row["us"] = {name: statistics.median(times) for name, times in samples.items()}
    return row


def generating(model: Any, batch: int, device: str, repeats: int, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """Microseconds per token in `generate()` with its default cache, unpatched and patched, without the prompt.

    The time of ``new_tokens`` tokens beyond the first, divided by their number; the median of a few turns.
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
    for turn in range(repeats + 1):  # the first one warms up
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
    """Whether all of our ways ran, and every way gives the eager step's logits up to 16-bit rounding.

    Patched models were within 0.034 of the largest logit (benchmarks/h200/models.json); compilers round elsewhere.
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
    """Measure every model, print progress, write JSON if asked; exit status 1 if a patched step disagrees."""
    parser = common.parser("models", __doc__, LAYERS)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="batch sizes, separated by commas")
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile")
    parser.add_argument("--max-autotune", action="store_true", help="also compile in max-autotune mode")
    parser.add_argument("--generate", action="store_true", help="also time generate()")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    baseline = "transformers' own code, not compiled, in a CUDA graph"
    report: dict[str, Any] = {**common.head(options.device), "baseline": baseline, "rows": [], "generate": []}
    ways = (*EAGER, *(() if options.no_compile else COMPILED), *(AUTOTUNED if options.max_autotune else ()))
    repeats, new_tokens = (3, NEW_TOKENS) if on_gpu else (1, 2)  # of generate()
    agreed = True
    with torch.no_grad():
        for name in common.chosen(options.models):
            title, config, sizes = common.sized(name, options.layers if on_gpu else 2)
            model = common.build(config, sizes if on_gpu else {**sizes, **_TINY}, options.device)
            for batch in map(int, options.batches.split(",")):
                row = {"model": title, **measure(model, batch, options.device, REPLAYS, ways)}
                agreed = agrees(row) and agreed
                report["rows"].append(row)
                common.write(report, options.json)
                _show(row)
                if options.generate:
                    times = {"model": title, **generating(model, batch, options.device, repeats, new_tokens)}
                    report["generate"].append(times)
                    common.write(report, options.json)
                    words = "  ".join(f"{way} {us:.0f} us per token" for way, us in times["us_per_token"].items())
                    print(f"{title:28} batch {batch}, generate(): {words}", flush=True)
            del model
            torch._dynamo.reset()
    raise SystemExit(0 if agreed else 1)


if __name__ == "__main__":
    main()
