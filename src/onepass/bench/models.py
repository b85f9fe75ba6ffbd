"""``python -m onepass.bench.models``: one decode step of patched transformers models, captured in a CUDA graph and replayed.

Models have the layer sizes of well-known ones, few layers and random weights, in bfloat16 with a static cache. For each, the
step is captured unpatched, patched (rounding="model") and patched with rounding="once", DeepSeek-V3 also over an `MlaCache`;
replays are compared with the unpatched model's own eager step, then timed in turns. On a CPU (``--device cpu``) sizes are small,
each way runs once, eagerly, and no time means anything: a rehearsal.
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
from typing import Any

import torch
from torch import Tensor

import onepass

PROMPT, LENGTH = 63, 128
BATCHES = (1, 8)
REPLAYS = 30
LATENT = "patched, once, MlaCache"
_COMMON: dict[str, Any] = {
    "vocab_size": 32000, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3 8B, 8 layers": (
        "LlamaConfig",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, **_HEADS},
    ),
    "Qwen3 8B, 8 layers": (
        "Qwen3Config",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 8, **_HEADS},
    ),
    "Gemma 3 12B, 8 layers": (
        "Gemma3TextConfig",
        {
            "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 8, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256, "layer_types": ["full_attention"] * 8,
        },
    ),
    "OLMo-2 7B, 8 layers": (
        "Olmo2Config",
        {
            "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 8, "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
    "DeepSeek-V3, 3 dense layers": (
        "DeepseekV3Config",
        {
            "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 3, "first_k_dense_replace": 3,
            "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        },
    ),
}  # fmt: skip
_TINY = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


class Step:
    """One decode step of a model over a static cache that can be set back."""

    def __init__(self, model: Any, batch: int, device: str, latent: bool = False) -> None:
        self.model = model
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
            from ..integrations import MlaCache

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
        out = self.model(
            self.ids, attention_mask=self.mask, position_ids=self.positions, past_key_values=self.cache, use_cache=True
        )
        logits: Tensor = out.logits
        return logits

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


def measure(model: Any, batch: int, device: str, replays: int) -> dict[str, Any]:
    """Agreement with the eager step, and microseconds a step, of the three or four ways to run it."""
    plain = Step(model, batch, device)
    plain.set_back()
    eager = plain().float()
    ways: dict[str, tuple[Callable[[], None], Tensor]] = {}
    steps: dict[str, Step] = {}
    reports: dict[str, Any] = {}
    latent = (LATENT,) if hasattr(model.config, "kv_lora_rank") else ()
    for way in ("unpatched", "patched", "patched, once", *latent):
        rounding: Any = "once" if "once" in way else "model"
        # a graph keeps the kernels it was captured with: the patch may be undone afterwards
        with nullcontext() if way == "unpatched" else onepass.patch(model, rounding=rounding) as handle:
            # entries of a latent cache are the patched model's own, the prompt's too
            step = steps[way] = Step(model, batch, device, latent=True) if way == LATENT else plain
            step.set_back()
            ways[way] = step.captured()
        if handle is not None:
            reports[way] = [f"{c.cls} {c.what}: {c.why}" for c in handle.replaced]
    row: dict[str, Any] = {"batch": batch, "agreement": {}, "us": {}}
    for way, (replay, logits) in ways.items():
        steps[way].set_back()
        replay()
        _wait(device)
        got = logits.float()
        row["agreement"][way] = {
            "equal": float((got == eager).float().mean()),
            "max_difference": float((got - eager).abs().max()),
            "largest_logit": float(eager.abs().max()),
            "same_token": bool(torch.equal(got[:, -1].argmax(-1), eager[:, -1].argmax(-1))),
        }
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(replays):
        for way, (replay, _) in ways.items():
            steps[way].set_back()
            samples[way].append(_timed(replay, device))
    row["us"] = {way: statistics.median(times) for way, times in samples.items()}
    row["replaced"] = {way: {line: lines.count(line) for line in lines} for way, lines in reports.items()}
    return row


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


def main() -> None:
    """Measure every model, print as it goes, write JSON if asked; exit status 1 where a patched step disagrees."""
    parser = argparse.ArgumentParser(prog="python -m onepass.bench.models", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parser.parse_args()
    import transformers

    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": [],
    }
    fine = True
    tiny = {} if options.device == "cuda" else _TINY
    with torch.inference_mode():
        for name, (config, sizes) in MODELS.items():
            if options.only not in name:
                continue
            special = {k: v for k, v in tiny.items() if not (k == "num_hidden_layers" and "layer_types" in sizes)}
            model = build(config, {**sizes, **special}, options.device)
            for batch in BATCHES:
                row = {"model": name, **measure(model, batch, options.device, REPLAYS)}
                report["rows"].append(row)
                fine = fine and all(
                    a["largest_logit"] > 0 and a["max_difference"] <= 0.05 * a["largest_logit"]
                    for a in row["agreement"].values()
                )
                plain = row["us"]["unpatched"]
                words = "  ".join(f"{way} {us:.0f} us ({plain / us:.2f}x)" for way, us in row["us"].items())
                equal = "  ".join(f"{a['equal']:.1%}" for a in row["agreement"].values())
                print(f"{name:28} batch {batch}: {words}; logits equal {equal}", flush=True)
            del model
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
