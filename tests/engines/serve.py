"""A vLLM server in a process of its own: serve a saved model, write what happened as JSON.

``python -m tests.engines.serve MODEL REPORT --provider onepass``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
}

import torch
from vllm import LLM, SamplingParams
from vllm.ir.op import IrOp
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from tests.engines import calls
from tests.engines.small_models import VOCABULARY

LENGTHS = (5, 17, 33, 2, 64, 48, 9, 1)
"""Tokens of the prompts that are served at once."""
NEW_TOKENS = 32


def note_logits() -> list[list[str]]:
    """From now on, append a digest of each row of logits, a list per step. Rows are in the order of the requests."""
    steps: list[list[str]] = []
    forward = LogitsProcessor.forward

    def noted(*arguments: Any, **options: Any) -> Any:
        logits = forward(*arguments, **options)
        steps.append([hashlib.sha256(row.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] for row in logits])
        return logits

    LogitsProcessor.forward = noted
    return steps


def main() -> None:
    """Serve eight requests at once, then each by itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("report", type=Path, help="the file that results are written to as JSON")
    parser.add_argument("--provider", default="native")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--logits", action="store_true", help="report digests of the logits too")
    parser.add_argument("--ranks", type=int, default=1, help="processes that a layer's columns are spread over")
    options = parser.parse_args()
    priority = ["native"] if options.provider == "native" else [options.provider, "native"]
    llm = LLM(
        options.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        enforce_eager=not options.compile,
        ir_op_priority=dict.fromkeys(calls.OPS, priority),
        tensor_parallel_size=options.ranks,
    )

    def on_ranks(function: Callable[[], Any]) -> list[Any]:
        return [function()] if options.ranks == 1 else llm.collective_rpc(function)

    on_ranks(calls.count)
    steps = note_logits() if options.logits else []
    generator = torch.Generator().manual_seed(1)
    prompts: list[Any] = [
        {"prompt_token_ids": torch.randint(2, VOCABULARY, (n,), generator=generator).tolist()} for n in LENGTHS
    ]
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    llm.generate(prompts[:2], greedy, use_tqdm=False)  # compiles what is compiled
    on_ranks(calls.taken)
    steps.clear()
    started = time.perf_counter()
    together = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, greedy, use_tqdm=False)]
    seconds = time.perf_counter() - started
    counted, logits_together = on_ranks(calls.taken), list(steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        llm.generate(prompts[:1], greedy, use_tqdm=False)
    operators = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("onepass::")}
    steps.clear()
    alone = [list(llm.generate([p], greedy, use_tqdm=False)[0].outputs[0].token_ids) for p in prompts]
    report = {
        "tokens": together,
        "alone": alone,
        "calls": counted[0],
        "calls_of_ranks": counted,
        "logits": logits_together,
        "logits_alone": steps,
        "operators": operators,
        "per_second": sum(map(len, together)) / seconds,
        "priority": {op: IrOp.registry[op].get_priority() for op in calls.OPS},
    }
    options.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
