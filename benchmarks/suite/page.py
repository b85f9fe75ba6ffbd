"""Results as one self-contained page: plots, a table with every number, the machine."""

from __future__ import annotations

import statistics
from html import escape
from string import Template
from typing import Any

from . import charts
from .baseline import spread
from .charts import asset, number
from .results import CEILINGS, COMPILED, EAGER, OURS, SMALL, WAYS, Results, Row
from .words import BEHIND, BEHIND_WORDS, ceiling_words


def html(results: Results) -> str:
    """The page."""
    parts = [_head(results), _tiles(results), *_plots(results)]
    if results.rows:
        parts.append(_section("Every number", _table_words(results), _ops(results) + _table(results)))
    pairs = results.behind_kernel
    if pairs.rows:
        parts.append(_section(BEHIND, BEHIND_WORDS, _table(pairs, "behind")))
    elif results.device == "cuda":
        parts.append(_section(BEHIND, f"{BEHIND_WORDS} That was not measured in these runs.", ""))
    if results.host:
        words = "Microseconds of one eager call at M = 1, outputs allocated."
        parts.append(_section("Host time per call", words, _host(results)))
    parts.append(_section("Machine, versions, peers", "", "".join(_facts(run) for run in results.runs)))
    return Template(asset("page.html")).substitute(
        quiet="" if results.quiet else " data-quiet=no",
        title=escape(f"onepass on {results.machine}"),
        style=f"{asset('charts.css')}\n{asset('page.css')}",
        dark=f"{asset('page_dark.css')}\n{asset('charts_dark.css')}",
        body="\n".join(parts),
        script=asset("page.js"),
    )


def _section(title: str, words: str, body: str) -> str:
    about = f"<p>{escape(words)}</p>" if words else ""
    return f"<section><h2>{escape(title)}</h2>{about}{body}</section>"


def _head(results: Results) -> str:
    run = results.runs[0]
    keys = {"date": "date", "torch": "torch", "Triton": "triton", "Python": "python", "onepass": "onepass"}
    chips = {name: run.get(key) for name, key in {**keys, "threads": "threads"}.items()} | run.get("packages", {})
    shown = "".join(f"<li><b>{escape(k)}</b> {escape(str(v))}</li>" for k, v in chips.items() if v is not None)
    how = (
        "A CUDA graph chains calls over inputs that rotate past the L2 cache, so launch gaps count; medians of 15 replays, measured "
        f"twice. {ceiling_words(results)}"
        if results.device == "cuda"
        else "Contenders take turns with a memory stream that moves as many bytes; medians of two halves of the rounds. "
        "The ceiling is that stream."
    )
    return (
        f'<header><button type="button" id="theme" title="light or dark">◐</button><h1>onepass <span>on {escape(results.machine)}'
        f"</span></h1><p>{how}</p><ul>{shown}</ul></header>"
    )


def _plots(results: Results) -> list[str]:
    parts = []
    groups = charts.panels(results)
    if groups:
        least = charts.least_us(results)
        plots = "".join(f"<div>{charts.panel(rows, least)}</div>" for rows in groups)
        names = charts.shown(row for rows in groups for row in rows)
        words = (
            f"Microseconds per call{_chain(results)}, both axes logarithmic. The shaded part lies below the ceiling: "
            f"{_ceiling(results)}. Point at a plot for its numbers, click a name to hide it."
        )
        body = f'<ul class="legend">{charts.legend(names)}</ul><div class="panels">{plots}</div>'
        parts.append(_section("Time against the number of rows", words, body))
    if results.rows:
        line = "" if results.speedup(COMPILED) is None else "; a line leads down to torch.compile at the same shape"
        words = (
            "Bytes per second against the bytes that an ideal kernel moves. Small calls lie under the slope of a launch, large "
            f"ones under the roof of memory{line}."
        )
        parts.append(_section("Roofline", words, f'<div class="wide">{charts.roofline(results)}</div>'))
    return parts


def _tiles(results: Results) -> str:
    """The headline numbers, or a banner if the machine was not quiet."""
    refused = "".join(
        f'<p class="refused"><b>{escape(op)}</b> was refused because it fails a check: {escape(why)}</p>'
        for run in results.runs
        for op, why in run.get("refused", {}).items()
    )
    if results.banner:
        return f'<p class="refused"><b>{escape(results.banner)}</b></p>{refused}'
    tiles: list[tuple[str, str, str]] = []
    pairs = results.behind_kernel
    for names, who in ((COMPILED, "torch.compile"), ((EAGER,), "torch eager")):
        mean = results.speedup(names)
        if mean is not None:
            count = sum(row.best(names) is not None for row in results.rows)
            mode = ", the better of its modes" if names == COMPILED and results.device == "cuda" else ""
            tiles.append((f"faster than {who}", f"{mean:.2f}x", f"geometric mean of {count} shapes{mode}"))
            behind = pairs.speedup(names) if names == COMPILED else None
            if behind is not None:
                words = f"geometric mean of {len(pairs.rows)} shapes"
                tiles.append((f"than {who}, behind a kernel", f"{behind:.2f}x", words))
    large = [row.share for row in results.rows if row.bytes > SMALL]
    if large:
        words = f"median of the {len(large)} shapes that move over 4 MB"
        tiles.append(("of the ceiling", f"{statistics.median(large):.0%}", words))
    if results.rows:
        (name, rate), *others = charts.rates(results)
        words = "; ".join(f"{other} {r:.2f} TB/s" for other, r in others)
        if results.device == "cuda":
            launch = f"{charts.least_words(results)} {number(charts.least_us(results))} µs"
            words = f"{words}; {launch}" if words else launch
        tiles.append((f"ceiling: {name}", f"{rate:.2f} TB/s" if rate >= 1 else f"{rate * 1e3:.1f} GB/s", words))
    tiles.append(_ahead("shapes where a peer is ahead", results))
    if pairs.rows:
        tiles.append(_ahead("where a peer is ahead behind a kernel", pairs))
    shown = "".join(
        f"<div><dt>{escape(t)}</dt><dd>{escape(v)}</dd><small>{escape(s)}</small></div>" for t, v, s in tiles
    )
    return f"{refused}<dl>{shown}</dl>"


def _ahead(title: str, results: Results) -> tuple[str, str, str]:
    """In how many shapes a peer is faster, in which, and who the peers are; the count means nothing without them."""
    found = results.behind
    words = "; ".join(f"{row.op} {row.words}: {name} {row.ours / us - 1:.1%} ahead" for row, name, us in found)
    return title, f"{len(found)} of {len(results.rows)}", f"{words + '. ' if words else ''}{results.peer_words}"


def _chain(results: Results) -> str:
    return " in a chain" if results.device == "cuda" else ""


def _ceiling(results: Results) -> str:
    if results.has_best:
        return "the best copy of as many bytes, or a read for ops that write almost nothing"
    if results.device == "cuda":
        return "the rate of a large copy, or of a read for ops that write almost nothing"
    return "a memory stream of the same size"


def _table_words(results: Results) -> str:
    small = "" if results.has_best else " A call too small for its bytes to matter is marked latency."
    ratios = ", and how many times longer than onepass" if results.quiet else ""
    return (
        f"Microseconds{_chain(results)}{ratios}. The ceiling is {_ceiling(results)}.{small} ± is how far two medians of onepass are "
        "apart. Click a column to sort by it."
    )


def _ops(results: Results) -> str:
    ops = "".join(f'<button type="button" data-op="{escape(op)}">{escape(op)}</button>' for op in results.ops)
    return f'<div class="ops"><button type="button" class="on" data-op="">all ops</button>{ops}</div>'


def _table(results: Results, name: str = "rows") -> str:
    others = [name for name in results.contenders if name != OURS]
    share = ["of the ceiling"] if name == "rows" else []
    head = "".join(f"<th>{escape(title)}</th>" for title in ("op", "shape", "bytes", OURS, "±", *share, *others))
    body = "\n".join(_table_row(row, others, bool(share), results.quiet) for row in results.rows)
    table = f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody>"
    return f'<div class="scroll"><table class="numbers" id="{name}">{table}</table></div>'


def _cell(value: object, words: str, kind: str = "", name: str = "") -> str:
    kinds = f' class="{kind}"' if kind else ""
    names = f' data-name="{escape(name)}"' if name else ""
    return f'<td{kinds}{names} data-value="{value}">{words}</td>'


def _table_row(row: Row, others: list[str], shares: bool, quiet: bool) -> str:
    cells = [
        f'<tr data-op="{escape(row.op)}"><th>{escape(row.op)}</th>',
        _cell(row.m, escape(row.words), "shape"),
        _cell(row.bytes, f"{charts.short(row.bytes)}B"),
        _cell(repr(row.ours), f"{row.ours:.2f}", "ours", OURS),
    ]
    apart = spread(row.us[OURS])
    cells.append(_cell(apart, f"{apart:.1%}", "soft") if len(row.us[OURS]) > 1 else "<td></td>")
    if shares:
        bar = f'<span><b style="width:{min(1.0, row.share):.1%}"></b></span><em>{row.share_words}</em>'
        cells.append(_cell(row.share, bar, "share") if quiet else "<td></td>")
    for name in others:
        if name not in row.us:
            cells.append("<td></td>")
            continue
        us = min(row.us[name])
        ratio = us / row.ours
        kind = "soft" if not quiet or name in (*CEILINGS, *WAYS) else "lost" if ratio < 1 else "won"
        times = f"<small>{ratio:.2f}x</small>" if quiet else ""
        cells.append(_cell(repr(us), f"{us:.2f}{times}", kind, name))
    return "".join(cells) + "</tr>"


def _host(results: Results) -> str:
    """Bars: torch's own ops in grey, ours in colour, the part without the kernel darker."""
    plain = {name: min(us) for name, us in results.host.items() if not name.endswith(", no kernel")}
    most = max(plain.values())
    rows = []
    for name, us in plain.items():
        bare = results.host.get(f"{name}, no kernel")
        kind = "k1" if name.startswith(("torch.", "x.", "F.", "its ")) else "k0"
        inner = f'<b style="width:{min(bare) / most:.1%}"></b>' if bare else ""
        rest = f"<small>{min(bare):.2f} without its kernel</small>" if bare else ""
        bar = f'<td class="bar {kind}"><span style="width:{us / most:.1%}"></span>{inner}</td>'
        time = _cell(repr(us), f"{us:.2f}", name=name)
        rows.append(f"<tr><th>{escape(name)}</th>{time}{bar}<td>{rest}</td></tr>")
    return f'<table id="host"><tbody>{"".join(rows)}</tbody></table>'


def _facts(run: dict[str, Any]) -> str:
    keys = ("machine", "date", "onepass", "torch", "triton", "python", "threads")
    facts = {key: str(run[key]) for key in keys if key in run}
    for key in ("packages", "ceilings"):
        found = run.get(key, {})
        facts[key] = ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
    for when, clocks in run.get("clocks", {}).items():
        facts[f"clocks {when}"] = ", ".join(f"{k} {v:g}" for k, v in clocks.items()) or "unknown"
    facts["peers"] = ", ".join(f"{name} ({why})" if why else name for name, why in run.get("peers", {}).items())
    facts["checks passed"] = ", ".join(f"{op} {count}" for op, count in run.get("checks", {}).items())
    facts["note"] = str(run.get("note", ""))
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in facts.items() if v)
    return f"<table class='facts'><tbody>{rows}</tbody></table>"
