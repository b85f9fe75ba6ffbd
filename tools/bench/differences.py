"""``python -m tools.bench.differences``: why logits of patched models are not always those of the model.

The models of `tools.bench.common` with random bfloat16 weights, patched with rounding="hf", run prompts and a decode
step. Every launch of a patched forward is compared with the model's own code on the same inputs, by kind of launch. Then the
model goes on with the values of its own code, in the memory of the launch's results. So all inputs are those of the
unpatched model, and if its logits are equal too, nothing but these values makes a difference.

The known cause is the float32 mean of squares, which onepass adds in another order than torch. A row that differs is
explained if the model's own code gives onepass's row for a mean within a few last places of torch's. A separate
check compares reciprocal roots, on rows of one column, which have no order. Sizes are smaller on a CPU. Nothing here
depends on speed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import onepass
from onepass.models.forwards import attention, layer
from onepass.models.forwards import norm as norm_module
from onepass.models.forwards.attention import Turn
from onepass.models.forwards.norm import NormRecord
from onepass.ops.qk_norm.op import qk_rms_norm

from . import common
from .agreement import own_norm, same_bytes, small_sizes
from .markdown import table
from .steps import Step

LAYERS: Final = 4
PROMPTS: Final = ((1, 128), (8, 16))
"""Sequences and tokens."""
STEPS: Final = (1, 16)
"""Sequences of a decode step, behind a prompt."""
ULPS: Final = 8
"""Last places by which two means of a row may differ: float32 sums of up to 7168 squares in blocks or as a tree."""
NORM, ADDED, HEADS, TURNED = "norm", "addition + norm", "q/k norm", "q/k norm + rotation"


class Rows(NamedTuple):
    """A norm's rows: inputs, the weight and how it is computed, and what follows it, a function of rows and their numbers."""

    x: Tensor
    weight: Tensor
    record: NormRecord
    then: Callable[[Tensor, Tensor], Tensor] | None = None


class Found:
    """What one kind of launch gave."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("values", "differ", "rows", "rows_differ", "explained", "sums_differ"), 0)
        self.ulps = 0
        self.largest = 0.0

    def compare(self, ours: Tensor, own: Tensor, rows: Rows) -> None:
        """Count differing values, and the rows that another mean explains."""
        ours, own = (t.reshape(-1, rows.x.shape[-1]) for t in (ours, own))
        x = rows.x.reshape(ours.shape)
        other = ~same_bytes(ours, own)
        numbers = other.any(1).nonzero()[:, 0]
        self.counts["values"] += ours.numel()
        self.counts["rows"] += len(ours)
        self.counts["differ"] += int(other.sum())
        self.counts["rows_differ"] += len(numbers)
        if len(numbers):
            ulps = explained(ours[numbers], rows._replace(x=x[numbers]), numbers)
            self.counts["explained"] += int((ulps <= ULPS).sum())
            self.ulps = max(self.ulps, *(int(u) for u in ulps[ulps <= ULPS]), 0)
            size = own[numbers].float().abs().amax(1, keepdim=True)
            self.largest = max(self.largest, float(((ours[numbers].float() - own[numbers].float()) / size).abs().max()))

    @property
    def report(self) -> dict[str, Any]:
        """The counts, by how many last places means differed at most, and the largest difference relative to its row."""
        return {**self.counts, "ulps": self.ulps, "largest": self.largest}


def explained(ours: Tensor, rows: Rows, numbers: Tensor) -> Tensor:
    """By how many last places torch's mean must change for the model's own code to give our rows; more than `ULPS` if by none."""
    mean = rows.x.float().pow(2).mean(-1, keepdim=True)
    found = torch.full((len(ours),), ULPS + 1, device=ours.device)
    for change in sorted(range(-ULPS, ULPS + 1), key=abs):
        other = (mean.view(torch.int32) + change).view(torch.float32)
        made = own_norm(rows.x, rows.weight, rows.record, other)
        made = made if rows.then is None else rows.then(made, numbers)
        equal = same_bytes(made, ours).all(1) & (found > ULPS)
        found[equal] = abs(change)
    return found


class Comparison:
    """Compares the launches of patched forwards with the model's own code, and replaces their values by its own."""

    def __init__(self, model: Any) -> None:
        self.kinds: dict[str, Found] = {}
        self.attentions = {m.q_norm.weight.data_ptr(): m for m in model.modules() if hasattr(m, "q_norm")}
        self.own_add_norm: Any = norm_module.add_norm
        self.own_heads: Any = qk_rms_norm
        self.own_turned = attention.turned

    @contextmanager
    def on(self) -> Iterator[None]:
        """Compare every launch in this block."""
        places: list[tuple[Any, str, Any]] = [(module, "add_norm", self.add_norm) for module in (norm_module, layer)]
        places += [(attention, "qk_rms_norm", self.heads), (attention, "turned", self.turned)]
        before = [(module, name, getattr(module, name)) for module, name, _ in places]
        for module, name, function in places:
            setattr(module, name, function)
        try:
            yield
        finally:
            for module, name, function in before:
                setattr(module, name, function)

    def found(self, kind: str) -> Found:
        """What is known about a kind."""
        return self.kinds.setdefault(kind, Found())

    def add_norm(self, norm: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        """A norm, or an addition and the norm of the sum."""
        made = self.own_add_norm(norm, x, residual)
        ours, total = made if residual is not None else (made, None)
        found = self.found(NORM if residual is None else ADDED)
        h = x
        if residual is not None and total is not None:
            h = residual + x
            found.counts["sums_differ"] += int((~same_bytes(total, h)).sum())
            total.copy_(h)
        own = type(norm).forward(norm, h)
        found.compare(ours, own, Rows(h, norm.weight, norm._onepass))
        ours.copy_(own)
        return made

    def heads(self, q: Tensor, k: Tensor, gamma_q: Tensor, gamma_k: Tensor, eps: float, **options: Any) -> Any:
        """The norms of q and k."""
        made = self.own_heads(q, k, gamma_q, gamma_k, eps, **options)
        attention = self.attentions[gamma_q.data_ptr()]
        for ours, x, norm in zip(made, (q, k), (attention.q_norm, attention.k_norm), strict=True):
            own = type(norm).forward(norm, x)
            self.found(HEADS).compare(ours, own, Rows(x, norm.weight, norm._onepass))
            ours.copy_(own)
        return made

    def turned(self, module: Any, turn: Turn, states: tuple[Any, ...], angles: Any, layer: Any = None) -> Any:
        """The norms of q and k and their rotation."""
        made = self.own_turned(module, turn, states, angles, layer)
        q, k, _ = states
        rotate = sys.modules[module._onepass.namespace].apply_rotary_pos_emb
        norms = module.q_norm, module.k_norm
        heads = [type(norm).forward(norm, x).transpose(1, 2) for norm, x in zip(norms, (q, k), strict=True)]
        turned = [t.transpose(1, 2) for t in rotate(*heads, *angles)]
        for ours, own, x, norm in zip(made, turned, (q, k), norms, strict=True):
            then = _rotation(rotate, angles, x)
            self.found(TURNED).compare(ours, own, Rows(x, norm.weight, norm._onepass, then))
            ours.copy_(own)
        return made


def _rotation(rotate: Any, angles: tuple[Tensor, Tensor], x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The rotation of some rows of heads [batch, tokens, heads, columns], by their numbers."""
    cos, sin = (t.expand(x.shape[0], *t.shape[1:]).reshape(-1, t.shape[-1]) for t in angles)
    heads = x.shape[2]

    def turned(rows: Tensor, numbers: Tensor) -> Tensor:
        tokens = numbers // heads
        made: Tensor = rotate(rows[None, None], rows[None, None], cos[None, tokens], sin[None, tokens])[0]
        return made[0, 0]

    return turned


def logits_of(model: Any, device: str) -> Iterator[tuple[str, Tensor]]:
    """Names and logits of prompts and decode steps."""
    for batch, tokens in PROMPTS:
        ids = torch.randint(
            2, model.config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(tokens)
        )
        yield f"prompts of {batch} x {tokens}", model(ids.to(device), use_cache=False).logits
    for batch in STEPS:
        yield f"step of batch {batch}", Step(model, batch, device)()


def compared(model: Any, device: str) -> dict[str, Any]:
    """Launches by kind, and logits: those of the patched model, and of the patched model with values of the model's own code."""
    expected = dict(logits_of(model, device))
    with onepass.patch(model, strict=True):
        plain = dict(logits_of(model, device))
        comparison = Comparison(model)
        with comparison.on():
            given = dict(logits_of(model, device))
    logits = {
        name: {
            "patched": float(same_bytes(plain[name], own).float().mean()),
            "own_values": float(same_bytes(given[name], own).float().mean()),
        }
        for name, own in expected.items()
    }
    return {"logits": logits, "kinds": {kind: found.report for kind, found in comparison.kinds.items()}}


def roots(device: str, count: int = 1 << 20) -> dict[str, int]:
    """How many reciprocal roots of onepass and torch differ. The mean of one square has no order of summation."""
    x = torch.randn(count, 1, generator=torch.Generator().manual_seed(0)).to(device)
    one = torch.ones(1, device=device)
    ours = onepass.rms_norm(x, one, 1e-6, rounding="once")
    own = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert ours.abs().max() > 0.5
    return {"values": count, "differ": int((ours != own).sum())}


def markdown(report: dict[str, Any]) -> str:
    """The tables of a report, and what they say about the cause."""
    lines = []
    for row in report["models"]:
        for kind, found in row["kinds"].items():
            cells = [str(found[key]) for key in ("values", "differ", "rows_differ", "explained", "ulps")]
            lines.append([row["model"], kind, *cells])
    heads = ["model", "launch", "values", "differ", "rows with one", "explained by the mean", "last places"]
    logits = [
        [row["model"], name, f"{found['patched']:.1%}", f"{found['own_values']:.1%}"]
        for row in report["models"]
        for name, found in row["logits"].items()
    ]
    shares = ["model", "input", "logits equal, patched", "logits equal, patched, with the model's own values"]
    root = report["roots"]
    text = f"{report['machine']}, torch {report['torch']}. Reciprocal roots that differ: {root['differ']} of {root['values']}."
    return "\n".join([text, "", *table(heads, lines, 2), "", *table(shares, logits, 2)])


def known(report: dict[str, Any]) -> bool:
    """Whether the known cause explains every difference."""
    kinds = [found for row in report["models"] for found in row["kinds"].values()]
    logits = [found for row in report["models"] for found in row["logits"].values()]
    return bool(
        kinds
        and all(k["explained"] == k["rows_differ"] and not k["sums_differ"] and k["values"] for k in kinds)
        and all(found["own_values"] == 1 for found in logits)
    )


def main() -> None:
    """Compare all models, print tables, write files if asked; exit status 1 if the known cause does not explain everything."""
    parser = common.parser("differences", __doc__, LAYERS)
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    options = parser.parse_args()
    report: dict[str, Any] = {**common.head(options.device), "roots": roots(options.device), "models": []}
    for name in common.chosen(options.model):
        title, config, sizes = common.sized(name, options.layers)
        sizes |= small_sizes(name) if options.device == "cpu" else {}
        with torch.inference_mode():
            model = common.build(config, sizes, options.device)
            row = {"model": title, "hidden": model.config.hidden_size, **compared(model, options.device)}
        report["models"].append(row)
        print(row, flush=True)
        common.write(report, options.json)
        del model
    print(markdown(report))
    if options.markdown:
        options.markdown.write_text(markdown(report) + "\n")
    raise SystemExit(0 if known(report) else 1)


if __name__ == "__main__":
    main()
