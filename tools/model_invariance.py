"""``python -m tools.model_invariance``: `onepass invariance` on small models of six families, in two processes each.

Weights are random, and large enough that every layer changes the logits. Prompts have 3 to 2,048 tokens. The digest of all
logits must be the same in a second process with another number of threads. Results are written after each model.
The exit status is 1 if any logits of a patched model differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tools import compact

COMMON: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_WINDOW: Final[dict[str, Any]] = {
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "full_attention"],
}
_LATENT: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
_EXPERTS: Final[dict[str, Any]] = {
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "Llama": ("llama", {}),
    "Qwen3": ("qwen3", {"head_dim": 64}),
    "Gemma 3": ("gemma3_text", _WINDOW),
    "OLMo-2": ("olmo2", {}),
    "DeepSeek-V3": ("deepseek_v3", _LATENT),
    "Qwen3-MoE": ("qwen3_moe", _EXPERTS),
}
"""transformers' model type, and what differs from `COMMON`, by family."""


def config(family: str, **more: Any) -> dict[str, Any]:
    """The contents of a family's config.json."""
    kind, special = MODELS[family]
    return {"model_type": kind, **COMMON, **special, **more}


def counts(folder: Path, options: Sequence[str], threads: int) -> dict[str, Any]:
    """The report of `onepass invariance` on a config, in a new process with this number of threads."""
    out = folder / "counts.json"
    command = [sys.executable, "-m", "onepass", "invariance", "--model", str(folder), "--json", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    ended = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ended.returncode not in (0, 1):
        raise RuntimeError(ended.stderr.strip())
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def measure(family: str, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """One family's row: the counts, the seconds they took, and whether another process has the same logits."""
    sizes = ["--prompts", str(options.prompts), "--longest", str(options.longest), "--new", str(options.new)]
    sizes += ["--batches", *map(str, options.batches), "--chunks", *map(str, options.chunks)]
    sizes += ["--device", options.device]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config(family, **more)))
        report = counts(folder, sizes, options.threads)
        alone = ["--patched-only", "--batches", "--chunks"]
        again = counts(folder, [*sizes, *alone], 2 if options.threads == 1 else 1)["digest"]
    return {
        "family": family,
        **report,
        "same_digest": report["digest"] == again,
        "seconds": time.perf_counter() - start,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the families and write their rows."""
    parser = argparse.ArgumentParser(prog="python -m tools.model_invariance", description=__doc__)
    parser.add_argument("--family", nargs="+", choices=tuple(MODELS), default=tuple(MODELS), help="default: all")
    parser.add_argument("--prompts", type=int, default=1000, help="default 1000")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest prompt (default 2048)")
    parser.add_argument("--new", type=int, default=8, help="tokens to generate (default 8)")
    parser.add_argument("--batches", type=int, nargs="+", default=(2, 8, 64), help="default 2 8 64")
    parser.add_argument("--chunks", type=int, nargs="+", default=(64, 256, 1024), help="default 64 256 1024")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1; again with 2, or 1)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--json", type=Path, required=True, help="rows of other families stay in this file")
    options = parser.parse_args(arguments)
    rows = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    different = False
    for family in options.family:
        row = measure(family, options)
        kept = all(logits == row["prompts"] for logits, _ in row["patched"].values()) and row["same_digest"]
        print(f"{family}: {'every bit kept' if kept else 'logits differ'}, {row['seconds']:.0f} s", flush=True)
        different |= not kept
        rows = sorted([*(r for r in rows if r["family"] != family), row], key=lambda r: list(MODELS).index(r["family"]))
        options.json.write_text(compact.dumps({"rows": rows}))
    return int(different)


if __name__ == "__main__":
    raise SystemExit(main())
