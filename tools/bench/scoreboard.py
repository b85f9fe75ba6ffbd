"""``python -m tools.bench.scoreboard``: the protocol of msaroufim/megakernels-vs-cuda-graphs, for a model with random weights.

A sequence has 32 tokens before it and a cache of 16,384 entries. Its 127 dependent decode steps, each with the choice of
its token, are timed together. Before each sequence every contender gets the cache and the first token that transformers made
of the prompt. Contenders take turns, in alternating order.

The gate compares logits with transformers' float32 model, whose greedy tokens all contenders are given. An error is the
KL divergence of a step's logits, or the absolute difference of the token's negative log-likelihood. From it the error of
transformers' own bfloat16 model is subtracted. Over prompts, the upper end of the mean's 95 % interval (bootstrap) must
not be above 0, for both. Both reference models use the "eager" attention. What is judged is what is timed: on a GPU the
captured step.

Contenders that are not compiled are also timed with a cache of 256 entries: the rest of a long one should cost nothing.
Captured `generate` is `model.generate` with ``decode=True`` and a cache of this length: the time of a call for 128 tokens
less one for a single token.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import onepass

from . import common, generating
from .steps import Step, timed
from .ways import NAMES, WAYS, Models, first_line

MODEL: Final = "Llama-3.2-1B"
PROMPT: Final = 32
"""Tokens of a prompt."""
SHORT, CAPACITY = 256, 16384
"""Entries of a cache that a sequence nearly fills, and of the protocol's."""
CONTENDERS: Final = ("eager", "compile", "max-autotune", "decode", "fp8", "invariant")
GENERATE: Final = "captured generate"
RESAMPLES: Final = 10_000


class Plan(NamedTuple):
    """How many prompts, tokens for each, and timed sequences of each; and the caches, the protocol's last.

    A prompt gives the first token, so there is one step less than tokens.
    """

    prompts: int = 8
    outputs: int = 128
    samples: int = 3
    capacities: tuple[int, ...] = (SHORT, CAPACITY)


class Start(NamedTuple):
    """Where all contenders begin: keys and values of a prompt in bfloat16, and the first new token."""

    prompt: Tensor
    entries: list[tuple[Tensor, Tensor]]
    first: Tensor


class Fixture(NamedTuple):
    """A prompt with what it is judged by: tokens [outputs], float32 logits [steps, vocabulary], the errors in bfloat16."""

    start: Start
    tokens: Tensor
    logits: Tensor
    native: tuple[float, float]


class Decoding(Step):
    """A step that also chooses its token, and goes on by one position."""

    def __init__(self, model: Any, device: str, capacity: int, start: Start) -> None:
        super().__init__(model, 1, device, context=capacity, prompt=start.prompt)
        self.start = start
        self.history = torch.zeros(1, capacity, dtype=torch.long, device=device)

    def reset(self) -> None:
        """Go back to the end of the prompt."""
        for layer, (keys, values) in zip(self.cache.layers, self.start.entries, strict=True):
            layer.keys[:, :, : self.used].copy_(keys)
            layer.values[:, :, : self.used].copy_(values)
            layer.cumulative_length.fill_(self.used)
        self.positions.fill_(self.used)
        self.mask.copy_(self.slots <= self.used)
        self.ids.copy_(self.start.first)

    def __call__(self) -> Tensor:
        """The logits of the next token, which is chosen, written and made visible."""
        logits = super().__call__()
        self.ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.history.scatter_(1, self.positions, self.ids)
        self.positions.add_(1)
        self.mask.scatter_(3, self.positions.view(1, 1, 1, 1), True)
        return logits


class Arm(NamedTuple):
    """A contender that is ready: its row of the report, and its captured step."""

    row: dict[str, Any]
    step: Decoding
    replay: Callable[[], None]
    logits: Tensor

    def forced(self, fixture: Fixture) -> Tensor:
        """The logits [steps, vocabulary] of all steps, given the reference's tokens."""
        self.step.start = fixture.start
        self.step.reset()
        rows = []
        for token in fixture.tokens[:-1]:
            self.step.ids.fill_(token)
            self.replay()
            rows.append(self.logits[0, -1].float().clone())
        return torch.stack(rows)

    def sequence(self, start: Start, steps: int) -> float:
        """Microseconds per step of a sequence that chooses its own tokens."""
        self.step.start = start
        self.step.reset()

        def run() -> None:
            for _ in range(steps):
                self.replay()

        return timed(run, self.step.device) / steps


# --- the gate -------------------------------------------------------------------------------------------------------


def errors(reference: Tensor, logits: Tensor, targets: Tensor) -> tuple[float, float]:
    """The mean over steps of the KL divergence from the reference, and of the absolute difference of the targets' NLL."""
    expected, got = (t.double().log_softmax(-1) for t in (reference, logits))
    divergence = (expected.exp() * (expected - got)).sum(-1).mean()
    likelihoods = (t.gather(1, targets.unsqueeze(1)) for t in (expected, got))
    return float(divergence), float(torch.sub(*likelihoods).abs().mean())


def upper_bound(differences: Sequence[float]) -> float:
    """The upper end of the 95 % interval of their mean, by bootstrap."""
    values = torch.tensor(differences, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    return float(values[drawn].mean(1).quantile(0.975))


def verdict(found: Sequence[tuple[float, float]], native: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """For both errors of some prompts the mean, that of transformers' bfloat16 and the bound; and whether both pass."""
    gate: dict[str, Any] = {}
    for i, name in enumerate(("kl", "nll")):
        ours, theirs = [pair[i] for pair in found], [pair[i] for pair in native]
        bound = upper_bound([a - b for a, b in zip(ours, theirs, strict=True)])
        gate[name] = {"error": statistics.mean(ours), "native": statistics.mean(theirs), "bound": bound}
    return {**gate, "passes": all(gate[name]["bound"] <= 0 for name in ("kl", "nll"))}


def rollout(model: Any, prompt: Tensor, outputs: int, forced: Tensor | None = None) -> tuple[Start, Tensor, Tensor]:
    """A decode with a growing cache: where it starts, its tokens, or those given, and the logits of its steps."""
    import transformers

    cache: Any = transformers.DynamicCache(config=model.config)
    last = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    entries = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    tokens = [last.argmax() if forced is None else forced[0]]
    rows = []
    for i in range(1, outputs):
        ids = tokens[-1].view(1, 1)
        last = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        rows.append(last.float())
        tokens.append(last.argmax() if forced is None else forced[i])
    return Start(prompt, entries, tokens[0]), torch.stack(tokens), torch.stack(rows)


def fixtures(model: Any, plan: Plan) -> list[Fixture]:
    """Random prompts with the float32 reference and the errors of the bfloat16 model, which adds in float32 meanwhile."""
    exact = copy.deepcopy(model).float()
    attention, products = model.config._attn_implementation, torch.backends.cuda.matmul
    reduced = products.allow_bf16_reduced_precision_reduction
    products.allow_bf16_reduced_precision_reduction = False
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, model.config.vocab_size, (plan.prompts, 1, PROMPT), generator=generator).to(model.device)
    found = []
    for each in (exact, model):
        each.set_attn_implementation("eager")
    for prompt in ids:
        _, tokens, reference = rollout(exact, prompt, plan.outputs)
        start, _, logits = rollout(model, prompt, plan.outputs, tokens)
        found.append(Fixture(start, tokens, reference, errors(reference, logits, tokens[1:])))
    model.set_attn_implementation(attention)
    products.allow_bf16_reduced_precision_reduction = reduced
    return found


# --- contenders -----------------------------------------------------------------------------------------------------


def arms(models: Models, rows: Sequence[dict[str, Any]], start: Start, device: str) -> Iterator[Arm]:
    """The contenders of these rows that could be prepared; the other rows get the error."""
    for row in rows:
        way = NAMES[row["way"]]
        torch._dynamo.reset()
        try:
            step = Decoding(models.of(way)[0], device, row["capacity"], start)
            if way.mode:
                step.compile(way.mode, only_trace=device == "cpu")
            step.reset()
            yield Arm(row, step, *step.captured())
        except Exception as error:  # the others continue
            row["failed"] = first_line(error)


def times(means: Sequence[float]) -> dict[str, Any]:
    """What a row says about the mean microseconds per step of each prompt: mean, least and largest."""
    return {"us": statistics.mean(means), "of_prompts": [min(means), max(means)]}


def judge(arm: Arm, some: Sequence[Fixture]) -> None:
    """Put the verdict into the contender's row."""
    found = [errors(f.logits, arm.forced(f), f.tokens[1:]) for f in some]
    arm.row["gate"] = verdict(found, [f.native for f in some])


def race(contenders: Sequence[Arm], some: Sequence[Fixture], samples: int) -> None:
    """Time all contenders in turns, and put microseconds per step into their rows."""
    means: list[list[float]] = [[] for _ in contenders]
    for fixture in some:
        found: list[list[float]] = [[] for _ in contenders]
        for sample in range(samples + 1):  # the first one warms up
            order = list(enumerate(contenders))
            for i, arm in order if sample % 2 else reversed(order):
                found[i].append(arm.sequence(fixture.start, len(fixture.tokens) - 1))
        for mean, each in zip(means, found, strict=True):
            mean.append(statistics.mean(each[1:]))
    for arm, mean in zip(contenders, means, strict=True):
        arm.row.update(times(mean))


def generated(models: Models, some: Sequence[Fixture], device: str, plan: Plan) -> dict[str, Any]:
    """The row of captured `generate`."""
    row: dict[str, Any] = {"way": GENERATE, "capacity": plan.capacities[-1]}
    options = {"do_sample": False, "max_cache_len": row["capacity"], "custom_generate": onepass.models.generate}
    try:
        model, _ = models.of(WAYS["decode"])
        means = []
        for fixture in some:
            prompt = fixture.start.prompt
            call = {"attention_mask": torch.ones_like(prompt), **options}
            seconds = []
            for _ in range(plan.samples + 1):
                whole, one = (
                    generating.call(model, prompt, {**call, "max_new_tokens": new}, device)[1]
                    for new in (plan.outputs, 1)
                )
                seconds.append((whole - one) / (plan.outputs - 1))
            means.append(statistics.mean(seconds[1:]) * 1e6)
        row |= times(means)
    except Exception as error:
        row["failed"] = first_line(error)
    return row


def measure(model: Any, names: Sequence[str], device: str, plan: Plan) -> list[dict[str, Any]]:
    """The rows of all contenders."""
    some, models = fixtures(model, plan), Models(model)
    ways = [WAYS[name] for name in names]
    sizes = ((way, size) for way in ways for size in (plan.capacities[-1:] if way.mode else plan.capacities))
    rows: list[dict[str, Any]] = [{"way": way.name, "capacity": size} for way, size in sizes]
    ready = list(arms(models, rows, some[0].start, device))
    for arm in ready:
        judge(arm, some)
    race(ready, some, plan.samples)
    return [*rows, generated(models, some, device, plan)]


def shown(row: dict[str, Any]) -> str:
    """A row as a line."""
    name = f"  {row['way']:28} capacity {row['capacity']:6}"
    if "failed" in row:
        return f"{name}  failed: {row['failed']}"
    gate = row.get("gate")
    bounds = (
        ""
        if gate is None
        else "  gate {}: KL {:+.2e}, NLL {:+.2e}".format(
            "passed" if gate["passes"] else "missed", gate["kl"]["bound"], gate["nll"]["bound"]
        )
    )
    return f"{name}  {row['us']:9.1f} us{bounds}"


def main() -> None:
    """Measure, print a table, write JSON if asked; exit status 1 if a contender of ours failed to run."""
    parser = common.parser("scoreboard", __doc__, 2)
    parser.add_argument("--contender", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="ways to run a step")
    for name, value in Plan()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value, nargs="+" if name == "capacities" else None)
    parser.add_argument("--tiny", action="store_true", help="small sizes: a test of this program")
    options = parser.parse_args()
    plan = Plan(options.prompts, options.outputs, options.samples, tuple(options.capacities))
    report = {**common.head(options.device), "rows": []}
    for name in common.chosen(options.model or [f"={MODEL}"], common.WHOLE_MODELS):
        title, config, sizes = common.sized(name, options.layers)
        sizes = {**(common.tiny(sizes) if options.tiny else sizes), "max_position_embeddings": CAPACITY}
        with torch.no_grad():
            model = common.build(config, sizes, options.device)
            rows = measure(model, options.contender, options.device, plan)
        print(f"{title}: us per step", *map(shown, rows), sep="\n", flush=True)
        report["rows"] += [{"model": title, **row} for row in rows]
        common.write(report, options.json)
    theirs = {way.name for way in WAYS.values() if not way.ours}
    raise SystemExit(1 if any("failed" in row and row["way"] not in theirs for row in report["rows"]) else 0)


if __name__ == "__main__":
    main()
