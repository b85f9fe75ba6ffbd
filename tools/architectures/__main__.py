"""``python -m tools.architectures``: compare every architecture, and write a JSON file."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tools import compact

from .classes import describe, rms_norms
from .compare import compare, why_not_run
from .small import ARCHITECTURES


def measure(architectures: list[str]) -> dict[str, Any]:
    """The results as plain data."""
    import transformers

    rows, not_run = {}, {}
    for name in architectures:
        problem = why_not_run(name)
        if problem:
            print(f"{name}: not run: {problem}")
            not_run[name] = problem
            continue
        found, agreement = compare(name)
        objection = agreement.objection()
        print(
            f"{name}: {found.norms} norms, {found.additions} additions, {found.heads} q and k, {found.layers} decode layers, "
            f"{found.rotary} rotary; {objection or 'equal'}"
        )
        short = {"error": float(f"{agreement.error:.1e}"), "limit": float(f"{agreement.limit:.1e}")}
        rows[name] = {**asdict(found), **asdict(agreement), **short, "apart": round(agreement.apart, 2)}
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "models": rows,
        "not_run": not_run,
        "classes": {cls.__name__: describe(cls) for cls in rms_norms()},
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.architectures", description=__doc__)
    parser.add_argument("--only", nargs="+", default=ARCHITECTURES, help="architectures, by transformers' model_type")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.only)
    if options.json is not None:
        options.json.write_text(compact.dumps(found))


if __name__ == "__main__":
    main()
