"""The figures of README.md and docs/performance.md, read from the result files that those pages were made from.

A time of ours stands for what a page derives from it: a ratio to a peer, or a share of a ceiling. A goal has two figures:
how many rows reach it, and its worst row. An op that fuses launches has one for every row in which the separate launches
are measured too, or should be (`ALTERNATIVES`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.suite import gemv_norm, linear, qk_cache, qk_norm, rms_norm
from benchmarks.suite.results import CEILINGS, COMPILED, EAGER, OURS, Results, Row, load

from . import engine, formats, report
from . import linear as linear_tables
from .goals import Goal, Sheet
from .steps import LENGTH
from .ways import BASELINE, NAMES, WAYS

CHAIN, BEHIND, STEP, TURNS = "chain", "behind a kernel", "captured step", "in turns with the rest"
SEQUENCE, SCOREBOARD = "127 dependent steps", "scoreboard.json"
HOST, TUNING = "host time of a call", "behind a norm, tuning run"
MICROSECONDS, LONGER, AHEAD = "us", "times as long", "rows with a peer ahead"
FASTER, SHARE, REACHED = "times as fast", "share", "rows that reach it"
HIGHER: Final = (FASTER, SHARE, REACHED)
"""Units in which more is better."""
ALTERNATIVES: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    (gemv_norm.OP, ""): (gemv_norm.SEPARATE,),
    (gemv_norm.FP8, linear.ROWS): (gemv_norm.SEPARATE,),
    (gemv_norm.FP8, linear.BLOCKS): (gemv_norm.SEPARATE,),
    ("rms_norm", rms_norm.MORE["rms_norm"]): (rms_norm.SEPARATE,),
    (qk_norm.FUSED, ""): (qk_norm.HALVES, qk_norm.SEPARATE),
    (qk_cache.OP, ""): (qk_cache.SEPARATE,),
    (linear.FUSED, linear.NORM): (linear.THEN,),
    (linear.FUSED, linear.NORM_BLOCKS): (linear.THEN,),
}
"""What a fused op must not be slower than: launches of ours that do the same, by op and kind of row."""
_PATCHED, _BOTH, _DECODE = (WAYS[name].name for name in ("patched", "compile-patched", "decode"))
_COMPILED = WAYS["compile"].name
_STATIC: Final = "tuning/53-static-shapes.json"
_DECODED, _LAYER = "tuning/47-linear-decoded.json", "tuning/50-layernorm.json"
_EARLY, _NARROW = "static, 16 columns, steps of 256, 3 stages", "static, 16 columns, steps of 128, 4 stages"
_WIDE: Final = "static, 64 columns, steps of 128, 4 stages"
QUOTED: Final[dict[str, tuple[str, str, tuple[str | int, ...]]]] = {
    "linear 1 x 4096 x 4096, static weights": (TUNING, _STATIC, ("bf16 4096 x 4096, M = 1", _EARLY)),
    "linear 1 x 6144 x 4096, static weights": (TUNING, _STATIC, ("bf16 6144 x 4096, M = 1", _NARROW)),
    "linear 1 x 4096 x 12288, static weights": (TUNING, _STATIC, ("bf16 4096 x 12288, M = 1", _EARLY)),
    "linear 1 x 28672 x 4096, static weights": (TUNING, _STATIC, ("bf16 28672 x 4096, silu, M = 1", _WIDE)),
    "linear 1024 x 24576 x 4096, fp8 rows": (CHAIN, _DECODED, ("1024x24576x4096 row", "rows", 0, 0)),
    "linear 1024 x 24576 x 4096, fp8 blocks": (CHAIN, _DECODED, ("1024x24576x4096 block", "rows", 0, 0)),
    "rms_norm_fused_quant 16384 x 7168, LayerNorm": (CHAIN, _LAYER, ("us", "e4m3fn", "16384x7168", "4w late r80")),
}
"""Times that only prose has: protocol, file, and the keys that lead to the time."""
HOSTS: Final = {
    "host-native.txt": ("rms_norm", "rms_norm, out=", "rms_norm, in place"),
    "host-slower.txt": ("rms_norm", "rms_norm, out=", "rms_norm, in place"),
}


@dataclass(frozen=True)
class Figure:
    """A figure, and the times of the launches that it must beat: None where they are not measured yet."""

    name: str
    protocol: str
    value: float
    source: str
    unit: str = MICROSECONDS
    must_beat: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """What makes figures of two runs the same."""
        return self.name, self.protocol


def figures(folder: Path) -> list[Figure]:
    """All figures of a chip's folder. Of several with one name and protocol the last counts."""
    every = _of_cpu(folder) if folder.name == "cpu" else _of_gpu(folder)
    return list({figure.key: figure for figure in every}.values())


def _page(folder: Path, name: str) -> list[Path]:
    """The files that a page of this folder was made from."""
    return report.sources(folder / name) if (folder / name).exists() else []


# --- rows -----------------------------------------------------------------------------------------------------------


def _times(row: Row, source: str, chain: str = CHAIN) -> Iterator[Figure]:
    """A row in a chain and behind a kernel, each with its alternatives."""
    others = ALTERNATIVES.get((row.op, row.kind), ())
    for protocol, us in ((chain, row.us), *(((BEHIND, row.behind_us),) if OURS in row.behind_us else ())):
        beaten = {name: min(us[name]) if name in us else None for name in others}
        yield Figure(f"{row.op} {row.words}", protocol, min(us[OURS]), source, must_beat=beaten)


def _contests(paths: Sequence[Path]) -> Iterator[Figure]:
    """The rows that have alternatives."""
    for path in paths:
        if path.exists():
            rows = (row for row in load([path]).rows if (row.op, row.kind) in ALTERNATIVES)
            yield from (figure for row in rows for figure in _times(row, path.name))


def _ahead(name: str, results: Results, source: str, peers: Sequence[str], behind: bool = True) -> Iterator[Figure]:
    """In how many rows one of these peers is faster, and the least of their times over ours."""
    views = ((CHAIN, results), *(((BEHIND, results.behind_kernel),) if behind else ()))
    for protocol, view in views:
        over = [best / row.ours for row in view.rows if (best := row.best(peers)) is not None]
        if over:
            yield Figure(f"{name}: a peer is ahead", protocol, sum(ratio < 1 for ratio in over), source, AHEAD)
            yield from _extremes(f"{name}: {{}} time of a peer over ours", protocol, over, source)


def _extremes(name: str, protocol: str, ratios: Sequence[float], source: str) -> Iterator[Figure]:
    for word, extreme in (("least", min(ratios)), ("largest", max(ratios))):
        yield Figure(name.format(word), protocol, extreme, source, FASTER)


def _goals(name: str, goals: Iterable[Goal[Sheet]], sheet: Sheet, rows: Sequence[Row], source: str) -> Iterator[Figure]:
    for goal in goals:
        values = [value for value, _ in goal.values(sheet, rows)]
        if values:
            title = f"{name}: {goal.what}, {goal.words}"
            unit = {"": SHARE, "x": LONGER}.get(goal.unit, goal.unit.strip())
            protocol = BEHIND if BEHIND in goal.what else CHAIN
            yield Figure(f"{title}, reached", protocol, sum(map(goal.met, values)), source, REACHED)
            if (
                goal.value is not linear_tables.Sheet.more_than_alone
            ):  # a difference of two times, less than their noise
                yield Figure(f"{title}, worst", protocol, (max if goal.unit else min)(values), source, unit)


# --- a GPU ----------------------------------------------------------------------------------------------------------


def _of_gpu(folder: Path) -> Iterator[Figure]:
    yield from _of_bench(folder)
    yield from _of_linear(folder)
    yield from _of_formats(folder)
    yield from _of_models(folder / report.MODELS)
    yield from _of_scoreboard(folder / SCOREBOARD)
    yield from _of_hosts(folder)
    for name, (protocol, file, keys) in QUOTED.items():
        if (folder / file).exists():
            document = json.loads((folder / file).read_text())
            beaten = {"without static_weight": _at(document, (keys[0], "ordinary"))} if file == _STATIC else {}
            yield Figure(name, protocol, _at(document, keys), file, must_beat=beaten)


def _of_bench(folder: Path) -> Iterator[Figure]:
    paths = _page(folder, "README.md")
    # these ops were measured apart; rows of a whole run replace theirs
    yield from _of_cache(folder / "qk-cache.json")
    yield from _contests(paths)
    if paths:
        results = load(paths)
        yield from (figure for row in report.headlines(results) for figure in _times(row, paths[0].name))
        yield from _ahead("all shapes", results, paths[0].name, results.measured)


def _of_linear(folder: Path) -> Iterator[Figure]:
    paths = _page(folder, linear_tables.FILE)
    yield from _contests(paths)
    if paths:
        sheet, source = linear_tables.Sheet(load(paths)), "linear*.json"
        yield from _goals("linear", linear_tables.GOALS, sheet, sheet.rows, source)
        for name, op, peers in (
            ("up to 16 rows", linear.OP, (COMPILED[0], linear_tables.CUBLAS)),
            ("up to 16 rows, max-autotune", linear.OP, COMPILED[1:]),
            (f"fp8, {linear_tables.SCALED}", linear.FP8, (linear_tables.SCALED,)),
            (f"batch, {linear_tables.CUBLAS}", linear.BATCH, (linear_tables.CUBLAS,)),
        ):
            rows = tuple(row for row in sheet.rows if row.op == op)
            yield from _ahead(f"linear, {name}", replace(sheet.results, rows=rows), source, peers, op == linear.OP)


def _of_formats(folder: Path) -> Iterator[Figure]:
    paths = _page(folder, formats.FILE)
    if paths:
        sheet, source = formats.Sheet(load(paths)), paths[0].name
        yield from _goals("formats", formats.GOALS, sheet, sheet.rows, source)
        for name in (COMPILED[0], formats.FLASHINFER):
            yield from _ahead(f"formats, {name}", sheet.results, source, (name,), behind=False)


def _at(value: Any, keys: Sequence[str | int]) -> float:
    for key in keys:
        value = value[key]
    return float(value)


def _step(row: Mapping[str, Any]) -> str:
    """The name of a decode step: contexts that are not the usual one are named."""
    context = row.get("context", LENGTH)
    return f"{row['model']}, batch {row['batch']}{'' if context == LENGTH else f', context {context}'}"


def _of_models(path: Path) -> Iterator[Figure]:
    """The ranges of README.md, and each decode step next to the model that is only patched, and to the one that is not."""
    if not path.exists():
        return
    rows = [(_step(row), row["us"]) for row in json.loads(path.read_text())["rows"]]
    for way in (_PATCHED, _BOTH, _DECODE):
        gains = [us[BASELINE] / us[way] for _, us in rows if {way, BASELINE} <= us.keys()]
        if gains:
            yield from _extremes(f"{way}: {{}} gain over {BASELINE}", STEP, gains, path.name)
    over = [us[_COMPILED] / us[_DECODE] for _, us in rows if {_COMPILED, _DECODE} <= us.keys()]
    if over:
        yield Figure(f"{_DECODE}: {_COMPILED} is ahead", STEP, sum(ratio < 1 for ratio in over), path.name, AHEAD)
        yield Figure(f"{_DECODE}: largest gain over {_COMPILED}", STEP, max(over), path.name, FASTER)
    for name, us in rows:
        for way, others in ((_PATCHED, (BASELINE,)), (_DECODE, (BASELINE, _PATCHED))):
            if way in us:
                yield Figure(f"{name}, {way}", STEP, us[way], path.name, must_beat={o: us.get(o) for o in others})


def _of_scoreboard(path: Path) -> Iterator[Figure]:
    """Our ways under the scoreboard's protocol, and what a long cache costs."""
    every = json.loads(path.read_text())["rows"] if path.exists() else []
    short: dict[tuple[str, str], float] = {}
    for row in sorted((row for row in every if "us" in row), key=lambda row: int(row["capacity"])):
        name, key = f"{row['model']}, {row['way']}, {row['capacity']} entries", (row["model"], row["way"])
        if row["way"] in NAMES and not NAMES[row["way"]].ours:
            continue
        yield Figure(name, SEQUENCE, row["us"], path.name)
        if short.setdefault(key, row["us"]) != row["us"]:
            yield Figure(f"{name}: over the shortest cache", SEQUENCE, row["us"] / short[key], path.name, LONGER)
        if "gate" in row:
            yield Figure(f"{name}: gate", SEQUENCE, int(row["gate"]["passes"]), path.name, REACHED)


def _of_cache(path: Path) -> Iterator[Figure]:
    """qk_norm_rope_cache and its alternative, which this older file has in rows of their own."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    times = {(row["tokens"], row["cache"], row["way"]): row for row in rows}
    for (tokens, cache, way), row in times.items():
        if way == OURS:
            other = times[tokens, cache, qk_cache.SEPARATE]
            for protocol, key in ((CHAIN, "us"), (BEHIND, "behind")):
                name = f"{qk_cache.OP} {tokens} x 32 + 8 heads of 128, {cache}"
                yield Figure(name, protocol, min(row[key]), path.name, must_beat={qk_cache.SEPARATE: min(other[key])})


def host_times(path: Path) -> dict[str, float]:
    """The times of a file of host times; those without the fast path in C end in ``, in Python``."""
    times = {}
    where = ""
    for line in path.read_text().splitlines():
        if match := re.fullmatch(r"(.+?) +(\d+\.\d\d)", line):
            times[match[1].strip() + where] = float(match[2])
        elif line.startswith("off"):
            where = ", in Python"
    return times


def _of_hosts(folder: Path) -> Iterator[Figure]:
    for file, names in HOSTS.items():
        if (folder / file).exists():
            times = host_times(folder / file)
            yield from (Figure(f"{name}, {file}", HOST, times[name], file) for name in names)
            if "rms_norm, in Python" in times:
                yield Figure(f"rms_norm, in Python, {file}", HOST, times["rms_norm, in Python"], file)


# --- a CPU ----------------------------------------------------------------------------------------------------------


def _of_cpu(folder: Path) -> Iterator[Figure]:
    rows = load([folder / "rows.json"]).of(engine.OP)
    yield from (figure for row in rows for figure in _times(row, "rows.json", TURNS))
    for row in rows:
        if rms_norm.IN_PLACE in row.us:
            yield Figure(f"{row.op} {row.words}, in place", TURNS, min(row.us[rms_norm.IN_PLACE]), "rows.json")
    paths = _page(folder, linear_tables.FILE)
    for op, m, name, peers in (
        (linear.OP, 1, "a read of the weights", CEILINGS),
        (linear.OP, 1, "torch.compile", COMPILED),
        (linear.FP8, 1, "a read of the weights", CEILINGS),
        (linear.FP8, 1, "torch.compile", COMPILED),
        (linear.BATCH, 64, "torch eager", (EAGER,)),
    ):
        chosen = [row for row in load(paths).rows if row.op == op and row.m == m]
        over = [best / row.ours for row in chosen if (best := row.best(peers)) is not None]
        yield from _extremes(f"{op}, M = {m}: {{}} time of {name} over ours", TURNS, over, paths[0].name)
    for file in ("speed.json", "speed-second.json"):
        for row in load([folder / file]).of("rms_norm_fused_fp8"):
            if row.m == 4096:
                name = f"{row.op} {row.words}, {file}: over a memory stream"
                yield Figure(name, TURNS, row.ours / row.floor_us, file, LONGER)
