"""``python -m tools.bench.model_tables``: writes the measured numbers about models into the documents.

It reads benchmarks/h200/models.json (`tools.bench.models`) and scoreboard.json (`tools.bench.scoreboard`), and of each
machine agreement.json (`tools.bench.agreement`), and replaces the text between markers in README.md and docs/. Columns
and sentences appear if the data contain them. A test fails if a document is stale.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

from .generating import FORMS
from .limits import OutOfTime
from .markdown import filled, markers, table
from .scoreboard import MODEL
from .steps import LENGTH, floor_of
from .ways import BASELINE, WAYS

_TITLES = {
    WAYS["once"].name: '`rounding="once"`',
    WAYS["latent"].name: "with `MlaCache`",
    WAYS["decode"].name: "`decode=True`",
    WAYS["fp8"].name: '`decode=True, weights="fp8"`',
}
SCOREBOARD: Final = f"{MODEL}, whole"
_WAYS = [way.name for way in WAYS.values()]
_PATCHED, _COMPILED, _BOTH, _DECODE = (WAYS[n].name for n in ("patched", "compile", "compile-patched", "decode"))
_FP8 = WAYS["fp8"].name
_AUTOTUNED = WAYS["max-autotune"].name


def _failed(row: dict[str, Any]) -> dict[str, str]:
    """What failed, and not because a time limit was reached."""
    return {way: error for way, error in row.get("failed", {}).items() if OutOfTime.__name__ not in error}


def _cell(row: dict[str, Any], way: str) -> str:
    """Microseconds; in brackets the speed-up over the baseline and, for decode steps, the share of the floor."""
    us, plain = row["us"].get(way), row["us"].get(BASELINE)
    if us is None:
        return "failed" if way in _failed(row) else ""
    floor = floor_of(row, way) if way in (_DECODE, _FP8) else None
    notes = [f"{plain / us:.2f}x"] if way != BASELINE and plain is not None else []
    notes += [f"{floor / us:.0%}"] if floor else []
    return f"{us:.0f} ({', '.join(notes)})" if notes else f"{us:.0f}"


def _name(row: dict[str, Any]) -> str:
    """The model, and the entries of a long cache."""
    context = row.get("context", LENGTH)
    return row["model"] if context == LENGTH else f"{row['model']}, context {context:,}"


def _floor(row: dict[str, Any]) -> list[str]:
    plain, quantized = (floor_of(row, way) for way in (BASELINE, _FP8))
    return [f"{plain:.0f} ({quantized:.0f})" if plain else ""]


def _times(rows: list[dict[str, Any]], way: str) -> str:
    """The range of speed-ups over the baseline, such as "1.13 to 1.50"; empty if nothing was measured."""
    found = [row["us"][BASELINE] / row["us"][way] for row in rows if {way, BASELINE} <= row["us"].keys()]
    return f"{min(found):.2f} to {max(found):.2f}" if found else ""


def _counted(rows: list[dict[str, Any]], faster: str, slower: str) -> tuple[int, int]:
    """In how many rows one way was faster than another, and how many rows have both."""
    both = [row["us"] for row in rows if faster in row["us"] and slower in row["us"]]
    return sum(us[faster] < us[slower] for us in both), len(both)


def steps(report: dict[str, Any]) -> str:
    """The table of decode steps and its conclusions."""
    rows = report["rows"]
    floor = any(row.get("floor") for row in rows)
    cached = any("cache" in row["floor"] for row in rows if row.get("floor"))
    ways = [way for way in _WAYS if any(way in row["us"] or way in _failed(row) for row in rows)]
    lines = [
        "One decode step of models with the layer sizes of well-known ones, with random bfloat16 weights and static caches, "
        f"captured in a CUDA graph and replayed on an {report['machine']} ({report['date']}, torch {report['torch']}, "
        f"transformers {report['transformers']}). Times are microseconds. The baseline is `unpatched`: transformers' own code, "
        "not compiled, in a CUDA graph like all the others. Brackets show the speed-up over this baseline.",
        "",
        *table(
            ["model", "batch", *(["floor"] if floor else []), *(_TITLES.get(way, way) for way in ways)],
            (
                [_name(row), str(row["batch"]), *(_floor(row) if floor else []), *(_cell(row, way) for way in ways)]
                for row in rows
            ),
            1,
        ),
        "",
    ]
    if floor:
        read = "all weights of a step, and the entries of its cache," if cached else "all weights of a step"
        lines.append(
            f"The floor reads {read} once at 4.55 TB/s; in brackets with fp8 projections. "
            "Percentages are the share of the floor in a step's time."
        )
    if _DECODE in ways:
        for name in (_COMPILED, _AUTOTUNED):
            wins, total = _counted(rows, _DECODE, name)
            lines += [f"`decode=True` was faster than {name} in {wins} of {total} rows."] if total else []
    if _COMPILED in ways:
        wins, total = _counted(rows, _COMPILED, _PATCHED)
        lines.append(
            f"**torch.compile without onepass was faster than a patched model that is not compiled in {wins} of {total} rows.**"
        )
        wins, total = _counted(rows, _BOTH, _COMPILED)
        lines.append(f"Compiled and patched was faster than compiled alone in {wins} of {total} rows.")
    else:
        lines.append("This run did not measure torch.compile.")
    failed = {(way, error) for row in rows for way, error in _failed(row).items()}
    lines += [f"`{way}` failed: `{error}`." for way, error in sorted(failed)]
    compared = [row["agreement"]["patched"] for row in rows if "patched" in row["agreement"]]
    equal = sum(a["equal"] == 1 for a in compared)
    lines.append(
        f"The logits of `patched` all equalled those of the unpatched model's eager step in {equal} of {len(compared)} rows; "
        f"in the others at least {min(a['equal'] for a in compared):.0%} did. The most likely token was the same in "
        f"{sum(a['same_token'] for a in compared)} of {len(compared)} rows."
    )
    if report.get("generated"):
        lines += ["", *_generated(report["generated"])]
    return "\n".join(lines)


def _generated(rows: list[dict[str, Any]]) -> list[str]:
    """The table of `generate()` in all forms that were measured."""
    names = [title for title, _ in FORMS.values()]
    names = [name for name in names if any(name in row["us_per_token"] or name in _failed(row) for row in rows)]
    lines = [
        "`model.generate()` as users call it, microseconds per token: the time of a call, with its prompt of "
        f"{rows[0]['prompt']} tokens, divided by {rows[0]['new_tokens']} new tokens. `captured` is "
        "`custom_generate=onepass.models.generate`; the first three columns have the default, growing cache.",
        "",
        *table(
            ["model", "batch", *names],
            (
                [
                    row["model"],
                    str(row["batch"]),
                    *(_cell({"us": row["us_per_token"], "failed": row["failed"]}, name) for name in names),
                ]
                for row in rows
            ),
            1,
        ),
        "",
    ]
    failed = {(name, error) for row in rows for name, error in _failed(row).items()}
    lines += [f"`{name}` failed: `{error}`." for name, error in sorted(failed)]
    captured = FORMS["captured"][0]
    same = [row["same_tokens"][captured] for row in rows if captured in row["same_tokens"]]
    if same:
        equal = sum(share == 1 for share in same)
        lines.append(f"`captured`, unpatched, generated the tokens of the first column in {equal} of {len(same)} rows.")
    return lines


def headline(report: dict[str, Any]) -> str:
    """One sentence."""
    rows = report["rows"]
    count = len({row["model"] for row in rows})
    text = (
        f"On an {report['machine'].removeprefix('NVIDIA ')}, a patched model decodes {_times(rows, 'patched')} times as fast "
        f"as uncompiled transformers, both in a CUDA graph, over {count} models."
    )
    decode, compiled, both = (_times(rows, way) for way in (_DECODE, _COMPILED, _BOTH))
    text += f" `decode=True` reaches {decode}." if decode else ""
    if compiled:
        text += f" `torch.compile` reaches {compiled}" + (f", and {both} on top of a patched model." if both else ".")
    return text


def _against(rows: list[dict[str, Any]], slower: str) -> str:
    """How often a decode step was faster than another way, by how much, and where it was not."""
    both = [row for row in rows if {_DECODE, slower} <= row["us"].keys()]
    if not both:
        return ""
    shares = [row["us"][slower] / row["us"][_DECODE] for row in both]
    behind = [f"{_name(row)}, batch {row['batch']}" for row, share in zip(both, shares, strict=True) if share <= 1]
    text = f"{min(shares):.2f} to {max(shares):.2f} times as fast as {slower}"
    wins = f", and faster in {len(both) - len(behind)} of {len(both)} rows"
    return text + wins + (f" (not in {'; '.join(behind)})" if behind else "")


def gains(report: dict[str, Any]) -> str:
    """What `decode=True` and captured decode gain, in one line."""
    found = [text for text in (_against(report["rows"], way) for way in (_COMPILED, _AUTOTUNED)) if text]
    lines = [f"A `decode=True` step is {'; it is '.join(found)}."] if found else []
    captured, static = FORMS["captured-decode"][0], FORMS["static"][0]
    for row in report.get("generated", []):
        us = row["us_per_token"]
        if {captured, static} <= us.keys():
            lines.append(
                f"For {row['model']}, batch {row['batch']}, captured decode takes {us[captured]:.0f} us per token and "
                f"transformers' compiled static cache {us[static]:.0f}."
            )
    return " ".join(lines)


PUBLIC: Final = (
    ("a CUDA graph with programmatic launch", 794.7, "passes"),
    ("Hazy Research's megakernel", 759.8, "misses it"),
)
"""Results of others on an H200, in microseconds per step, and what they say about the gate."""
PROTOCOL: Final = (
    "[msaroufim/megakernels-vs-cuda-graphs](https://github.com/msaroufim/megakernels-vs-cuda-graphs) times Llama-3.2-1B at batch 1: "
    "32 tokens, then 127 dependent steps with the choice of the token, in a cache of 16,384 entries. Its numerical gate subtracts the "
    "error of transformers' own bfloat16 from that of a contender: the KL divergence and the absolute difference of the NLL, both "
    "against float32. The upper end of the 95 % interval must not be above 0. Its results on an H200 (its docs/RESULTS.md, "
    "2026-09-14):"
)


def scoreboard(report: dict[str, Any] | None) -> str:
    """The results of others under the scoreboard's protocol, ours if there are any, and who is ahead."""
    heads = ["what", "us per step", "gate"]
    lines = [PROTOCOL, "", *table(heads, ([what, f"{us:.1f}", gate] for what, us, gate in PUBLIC), 1), ""]
    if report is None:
        return "\n".join((*lines, "onepass has not been measured under this protocol."))
    every = [row for row in report["rows"] if "us" in row and row["model"] == SCOREBOARD]
    longest = max(row["capacity"] for row in every)
    rows = [row for row in every if row["capacity"] == longest]
    lines += [
        f"The same protocol with random weights (`python -m tools.bench.scoreboard`, {report['machine']}, {report['date']}, torch "
        f"{report['torch']}, transformers {report['transformers']}). Bounds are those of the gate, for the KL divergence and the NLL. "
        f"The last column is the time with a cache of {longest:,} entries over that with a short one.",
        "",
        *table(["way", *heads[1:], "bounds", "long cache"], (_entry(row, every) for row in rows), 1),
        "",
    ]
    failed = [row for row in report["rows"] if "failed" in row]
    lines += [f"`{row['way']}`, {row['capacity']:,} entries, failed: `{row['failed']}`." for row in failed]
    exact = {way.name for way in WAYS.values() if way.ours and "weights" not in dict(way.options)}
    best = min((row for row in rows if row["way"] in exact), key=lambda row: (not row["gate"]["passes"], row["us"]))
    for what, us, _ in PUBLIC:
        word, gate = "ahead of" if best["us"] < us else "behind", "passes" if best["gate"]["passes"] else "misses"
        lines.append(f"`{best['way']}`, which {gate} the gate, is {word} {what}: {best['us']:.1f} against {us:.1f} us.")
    return "\n".join(lines)


def _entry(row: dict[str, Any], every: list[dict[str, Any]]) -> list[str]:
    """The cells of a contender. Captured `generate` runs the step of `decode=True`, whose gate counts."""
    gate = row.get("gate")
    verdict = ["as `decode=True`", ""]
    if gate:
        verdict = [
            "passes" if gate["passes"] else "misses it",
            f"{gate['kl']['bound']:+.1e}, {gate['nll']['bound']:+.1e}",
        ]
    ratios = [row["us"] / other["us"] for other in every if other["way"] == row["way"] and other is not row]
    return [_TITLES.get(row["way"], row["way"]), f"{row['us']:.1f}", *verdict, f"{max(ratios):.3f}x" if ratios else ""]


def agreement(reports: list[dict[str, Any]]) -> str:
    """How often logits are bit-identical, and why they are not always."""
    heads = ["machine", "model", "hidden size", "prompts equal", "logits equal", "same most likely token"]
    models = [(report["machine"], model) for report in reports for model in report["models"]]
    parts = [part for _, model in models for part in model["lengths"]]
    (lengths,) = {tuple(part["tokens"] for part in model["lengths"]) for _, model in models}
    (prompts,) = {part["prompts"] for part in parts}
    rows = []
    for machine, model in models:
        equal = ", ".join(str(part["equal_prompts"]) for part in model["lengths"])
        shares = (
            ", ".join(f"{part[key]:.1%}" for part in model["lengths"]) for key in ("equal_logits", "equal_argmax")
        )
        rows.append([machine, model["model"], str(model["hidden"]), equal, *shares])
    lines = [
        f"For prompts of {', '.join(str(n) for n in lengths[:-1])} and {lengths[-1]} tokens, {prompts} of each:",
        "",
        *table(heads, rows, 2),
        "",
        f"The most likely token after the prompt was the same for {sum(part['equal_next_token'] for part in parts)} of "
        f"{prompts * len(parts)} prompts.",
    ]
    for report in reports:
        norms = [model["norms"] for model in report["models"]]
        total = {key: sum(norm[key] for norm in norms) for key in norms[0] if key not in ("tokens", "prompts")}
        lines.append(
            f"On the {'CPU' if report['machine'] == 'cpu' else report['machine']}, with the inputs that the norms have in the "
            f"unpatched model, {total['differ']} of {total['values']} results of a norm differed. The float32 mean of squares "
            f"differed in {total['means_differ'] / total['rows']:.0%} of the rows. When the model's own code was given onepass's "
            f"mean, {total['differ_given_the_mean']} results differed."
        )
    return "\n".join(lines)


def render(root: Path) -> dict[Path, str]:
    """Every document that has one of the markers, with fresh text."""
    measured = json.loads((root / "benchmarks/h200/models.json").read_text())
    files = [root / f"benchmarks/{machine}/agreement.json" for machine in ("cpu", "h200")]
    reports = [json.loads(file.read_text()) for file in files if file.exists()]
    bodies = {"steps": steps(measured), "agreement": agreement(reports), "models": headline(measured)}
    bodies["gains"] = gains(measured)
    board = root / "benchmarks/h200/scoreboard.json"
    bodies["scoreboard"] = scoreboard(json.loads(board.read_text()) if board.exists() else None)
    found = {path: path.read_text() for path in (root / "README.md", *sorted((root / "docs").rglob("*.md")))}
    return {
        path: filled(text, bodies) for path, text in found.items() if any(markers(name)[0] in text for name in bodies)
    }


def main() -> None:
    """Write the documents."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.model_tables", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="the repository (default: here)")
    for path, text in render(parser.parse_args().root).items():
        path.write_text(text)


if __name__ == "__main__":
    main()
