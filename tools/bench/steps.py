"""One decode step of a model in several ways: captured in a CUDA graph, compared with the eager step, and timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .limits import over, until
from .ways import BASELINE, NAMES, Models, Way, effort, first_line

PROMPT, LENGTH = 63, 128
"""Tokens before the step, and the entries of its cache. Longer caches are full behind the step."""
BANDWIDTH = 4.55e12
"""Bytes per second that an H200 reads at most: the rate of a 1 GiB read (docs/performance.md)."""


class Size(NamedTuple):
    """Sequences of a step, and entries of their caches."""

    batch: int
    context: int = LENGTH


class Step:
    """One decode step of a model behind a prompt, with a static cache of ``context`` entries, that can be reset."""

    def __init__(
        self,
        model: Any,
        batch: int,
        device: str,
        latent: bool = False,
        context: int = LENGTH,
        prompt: Tensor | None = None,
    ) -> None:
        self.model = model
        self.call: Callable[..., Any] = model
        self.compiled: list[Any] = []  # compiled code: a captured graph runs its kernels
        self.device = device
        self.cache = self._cache(latent, context)
        vocabulary = model.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        if prompt is None:
            tokens = PROMPT if context == LENGTH else context - 1
            prompt = torch.randint(2, vocabulary, (batch, tokens), generator=generator).to(device)
        self.used = prompt.shape[1]
        self.ids = torch.randint(2, vocabulary, (batch, 1), generator=generator).to(device)
        self.positions = torch.full((batch, 1), self.used, device=device)
        self.slots = torch.arange(context, device=device)
        # four dimensions: the model uses it unchanged and builds none on the host
        self.mask = (self.slots <= self.used).expand(batch, 1, 1, context).contiguous()
        model(prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.saved = [[t.clone() for t in self._state(layer)] for layer in self.cache.layers]

    def _cache(self, latent: bool, context: int) -> Any:
        if latent:
            from onepass.models import MlaCache

            return MlaCache(self.model.config.num_hidden_layers, context, static=True)
        import transformers

        make: Any = transformers.StaticCache
        return make(config=self.model.config, max_cache_len=context)

    @staticmethod
    def _state(layer: Any) -> tuple[Tensor, ...]:
        """The tensors that a step changes, except for the entry that the next one overwrites."""
        return (layer.paged.cache_lengths,) if hasattr(layer, "paged") else (layer.cumulative_length,)

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

    def compile(self, mode: str, only_trace: bool = False) -> None:
        """Compile the step in a mode of torch.compile, or only trace it."""

        def backend(graph: Any, inputs: Any) -> Any:
            if only_trace:
                made: Any = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
            else:
                from torch._inductor import list_mode_options
                from torch._inductor.compile_fx import compile_fx

                made = compile_fx(graph, inputs, config_patches=list_mode_options(mode))
            self.compiled.append(made)
            return made

        self.call = torch.compile(self.model, backend=backend, dynamic=False)

    def captured(self) -> tuple[Callable[[], None], Tensor]:
        """A function that replays the step, and the tensor of its logits. On a CPU it calls the step."""
        if self.device == "cpu":
            logits = self().clone()

            def call() -> None:
                logits.copy_(self())

            return call, logits
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


class Row:
    """One model and batch size: the ways that were prepared, and what is known about each.

    ``found`` is the row of the report. A way that fails is recorded there with the first line of its error.
    """

    def __init__(self, models: Models, batch: int, device: str, context: int = LENGTH) -> None:
        self.models, self.batch, self.device, self.context = models, batch, device, context
        self.captured: dict[str, tuple[Step, Callable[[], None], Tensor]] = {}
        self.plain = Step(models.model, batch, device, context=context)
        self.plain.reset()
        self.eager = self.plain().float()
        self.found: dict[str, Any] = {"batch": batch, "context": context, "agreement": {}, "us": {}, "medians": {}}
        self.found |= {"replaced": {}, "compiled": {}, "failed": {}}
        self.found["floor"] = floors(models.model, batch * (self.plain.used + 1)) if device == "cuda" else {}

    def prepare(self, way: Way, only_trace: bool = False, deadline: float | None = None) -> None:
        """Patch, compile and capture a step, unless time is over. Nothing is timed."""
        if over(deadline):
            return
        start = time.perf_counter()
        try:
            with until(deadline):
                model, handle = self.models.of(way)
                made = (model, self.batch, self.device, way.latent, self.context)
                step = self.plain if way.name == BASELINE else Step(*made)
                if way.mode:
                    step.compile(way.mode, only_trace)
                step.reset()
                self.captured[way.name] = (step, *step.captured())
        except Exception as error:  # the other ways continue
            self.found["failed"][way.name] = first_line(error)
            return
        if way.mode:
            seconds = time.perf_counter() - start
            self.found["compiled"][way.name] = {"seconds": seconds, "graphs": len(step.compiled)}
        if handle is not None:
            lines = [f"{c.cls} {c.what}: {c.why}" for c in handle.replaced]
            self.found["replaced"][way.name] = {line: lines.count(line) for line in lines}

    def measured(self, replays: int) -> dict[str, Any]:
        """The row with agreement and times of all ways that were prepared.

        All ways are timed in turns, twice: ``medians`` has both medians, and ``us`` that of all samples.
        """
        row = self.found
        for name, (step, replay, logits) in self.captured.items():
            step.reset()
            replay()
            wait(self.device)
            row["agreement"][name] = _agreement(logits.float(), self.eager)
        halves = [_turns(self.captured, replays, self.device) for _ in range(2)]
        for name in self.captured:
            row["medians"][name] = [statistics.median(half[name]) for half in halves]
            row["us"][name] = statistics.median(halves[0][name] + halves[1][name])
        return row


def _agreement(got: Tensor, eager: Tensor) -> dict[str, Any]:
    return {
        "equal": float((got == eager).float().mean()),
        "max_difference": float((got - eager).abs().max()),
        "largest_logit": float(eager.abs().max()),
        "same_token": bool(torch.equal(got[:, -1].argmax(-1), eager[:, -1].argmax(-1))),
    }


def prepared(
    models: Models,
    sizes: Sequence[Size],
    device: str,
    ways: Sequence[Way],
    only_trace: bool = False,
    deadline: float | None = None,
) -> list[Row]:
    """Rows of several sizes with every way prepared, those first that take least time to prepare."""
    rows = [Row(models, batch, device, context) for batch, context in sizes]
    for way in sorted(ways, key=effort):
        for row in rows:
            if way.mode:
                torch._dynamo.reset()  # it compiles the same code only a few times; captured steps do not need it
            row.prepare(way, only_trace, deadline)
    return rows


def measure(
    models: Models,
    size: Size,
    device: str,
    replays: int,
    ways: tuple[Way, ...],
    only_trace: bool = False,
    deadline: float | None = None,
) -> dict[str, Any]:
    """Agreement with the eager step, and microseconds per step, of each way that did not fail."""
    torch._dynamo.reset()
    row = Row(models, size.batch, device, size.context)
    for way in ways:
        row.prepare(way, only_trace, deadline)
    return row.measured(replays)


def _turns(captured: dict[str, Any], replays: int, device: str) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in captured}
    for _ in range(replays):
        for name, (step, replay, _) in captured.items():
            step.reset()
            samples[name].append(timed(replay, device))
    return samples


def floors(model: Any, entries: int = 0) -> dict[str, float]:
    """Microseconds in which an H200 reads all weights of a step once, and the same with projections of one byte per weight.

    A step reads one row of the embedding, but all of it where it is also the output projection. ``cache`` is the time for
    so many entries of the cache.
    """
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    weights = [p for p in model.parameters() if p is not embedding or tied]
    total = sum(p.numel() * p.element_size() for p in weights)
    layers = model.get_decoder().layers
    saved = sum(m.weight.numel() for m in layers.modules() if isinstance(m, torch.nn.Linear))
    sizes = {"": total, "fp8": total - saved, "cache": entries * _entry(model.config)}
    return {name: size / BANDWIDTH * 1e6 for name, size in sizes.items()}


def _entry(config: Any) -> int:
    """Bytes of an entry of all layers of a 16-bit cache; DeepSeek's has latents."""
    columns = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if latent := getattr(config, "kv_lora_rank", None):
        return 2 * int(config.num_hidden_layers) * int(latent + config.qk_rope_head_dim)
    return 4 * int(config.num_hidden_layers * config.num_key_value_heads * columns)


def floor_of(row: dict[str, Any], name: str) -> float | None:
    """The floor of a way in microseconds, with the cache if the row has it."""
    floor = row.get("floor")
    if not floor:
        return None
    quantized = name in NAMES and "weights" in dict(NAMES[name].options)
    return float(floor["fp8" if quantized else ""] + floor.get("cache", 0.0))


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], None], device: str) -> float:
    """Microseconds of a call on the device."""
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


def agrees(row: dict[str, Any], ways: dict[str, Way]) -> bool:
    """Whether all of our ways ran, and every way gives the eager step's logits up to rounding.

    Patched models were within 0.034 of the largest logit (benchmarks/h200/models.json); compilers round elsewhere,
    and fp8 weights have 4 significant bits.
    """

    def limit(way: Way) -> float:
        return 0.3 if "weights" in dict(way.options) else 0.1 if way.mode else 0.05

    ours = [name for name in row["failed"] if ways[name].ours]
    return not ours and all(
        a["largest_logit"] > 0 and a["max_difference"] <= limit(ways[name]) * a["largest_logit"]
        for name, a in row["agreement"].items()
    )
