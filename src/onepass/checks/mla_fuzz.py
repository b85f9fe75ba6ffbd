"""``python -m onepass.checks.mla_fuzz``: random ragged batches of MLA's cache write against the oracle.

Page sizes 1 to 256, shuffled tables, empty requests, padding, slots, strides, dtypes and options at random; every value
is checked, and so is every byte around and between the buffers. A case is known by its number: ``--seed S --cases 1``
runs the one that failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from random import Random
from typing import Any

import torch

from ..formats import FLOATS
from .mla_cases import FNUZ, FP8, MlaCase
from .mla_rope_norm import inputs, run_once

BF16, F16, F32 = FLOATS
_KERNELS: tuple[
    tuple[Any, ...], ...
] = (  # q, kv, gamma, cache, q_rope_output, style, scale, rounding: few, as each is compiled
    (BF16, BF16, BF16, FP8, None, "interleaved", "none", "once"),
    (BF16, BF16, BF16, FP8, None, "half", "token", "once"),
    (BF16, BF16, F32, FP8, None, "interleaved", "tensor", "once"),
    (BF16, BF16, BF16, FP8, None, "interleaved", "none", "reference"),
    (BF16, BF16, BF16, FP8, FP8, "half", "token", "reference"),
    (BF16, BF16, F32, BF16, None, "interleaved", "none", "once"),
    (F16, F16, F16, FNUZ, None, "half", "none", "once"),
    (F16, F16, F16, FNUZ, FNUZ, "interleaved", "token", "once"),
    (F32, F32, F32, F32, None, "interleaved", "none", "once"),
    (F32, F32, F32, F32, None, "half", "none", "once"),
    (F32, BF16, F32, F16, BF16, "half", "none", "reference"),
)


def random_case(number: int) -> MlaCase:
    """The case of a number."""
    r = Random(number)
    page = r.choice((1, 2, 3, r.randint(4, 64), r.randint(65, 256), 16, 64))
    batch = tuple(
        (r.choice((0, r.randint(1, 9), r.randint(10, 300))), r.choice((0, 1, 1, r.randint(2, 12))))
        for _ in range(r.randint(0, 7))
    )
    q, kv, gamma, cache, out, style, scale, rounding = r.choice(_KERNELS)
    rope = r.choice((64, 64, 0, 2 * r.randint(1, 50), r.randint(1, 80)))
    turned = None if rope and rope % 2 == 0 and r.random() < 0.6 else 2 * r.randint(0, rope // 2)
    slots = r.choice((None, None, None, torch.int32, torch.int64))
    return MlaCase(
        "fuzz",
        batch,
        heads=r.choice((1, 2, 3, r.randint(4, 20))),
        latent=r.choice((r.randint(1, 100),) if page > 64 else (512, 128, r.randint(1, 100), r.randint(101, 700))),
        rope=rope,
        turned=turned,
        q=q,
        kv=kv,
        gamma=gamma,
        cache=cache,
        out=out,
        freqs=None if turned == 0 and r.random() < 0.5 else F32,
        page=page,
        style=style,
        scale=scale,
        index=r.choice((torch.uint32, torch.int32, torch.int64)),
        slots=slots,
        positions=r.choice((None, None, torch.int32, torch.int64)),
        padding=r.choice(((0, 0), (0, 0), (r.randint(0, 3), r.randint(0, 5)))),
        layout=r.choice(("contiguous", "slices", "misaligned", "transposed")),
        fault=r.choice(("", "", "", "", "pages" if slots is None else "slots")),
        options={"rounding": rounding},
    )


def run_number(number: int, device: str) -> str | None:
    """None, or what is wrong with the case of a number."""
    case = random_case(number)
    wrong = run_once(case, inputs(case, device, number))[1]
    return None if wrong is None else f"case {number} ({case.name}): {wrong}"


def main() -> int:
    """Run the cases; the exit status is 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m onepass.checks.mla_fuzz", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    start, failed = time.perf_counter(), 0
    with torch.inference_mode():
        for number in range(options.seed, options.seed + options.cases):
            wrong = run_number(number, options.device)
            if wrong is not None:
                failed += 1
                print(wrong, flush=True)
    seconds = time.perf_counter() - start
    print(f"{options.cases - failed} passed, {failed} failed on {options.device} in {seconds:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
