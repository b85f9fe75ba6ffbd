"""Results as one page that needs nothing but itself: plots, a table with every number, the machine."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from html import escape
from typing import Any

from . import charts
from .baseline import spread
from .charts import number
from .page_style import SCRIPT, STYLE
from .results import CEILINGS, COMPILED, EAGER, OURS, SMALL, WAYS, Results, Row
from .words import BEHIND, BEHIND_WORDS, ceiling_words


def html(results: Results) -> str:
    """The page."""
    title = f"onepass on {results.machine}"
    parts = [_head(results), _tiles(results)]
    groups = charts.panels(results)
    if groups:
        least = charts.least_us(results)
        plots = "".join(f"<div>{charts.panel(rows, least)}</div>" for rows in groups)
        names = charts.shown(row for rows in groups for row in rows)
        parts.append(
            _section(
                "Time against the number of rows",
                f"Microseconds per call{_chain(results)}, both axes logarithmic. The shaded part is below the ceiling: "
                f"{_ceiling(results)}. Point at a plot for its numbers, click a name to hide it.",
                f'<ul class="legend">{charts.legend(names)}</ul><div class="panels">{plots}</div>',
            )
        )
    if results.rows:
        parts.append(
            _section(
                "Roofline",
                "Bytes a second against the bytes an ideal kernel moves. Small calls lie under the slope of a launch, large ones "
                "under memory's roof; a line leads down to torch.compile on the same shape.",
                f'<div class="wide">{charts.roofline(results)}</div>',
            )
        )
        parts.append(_section("Every number", _table_words(results), _ops(results) + _table(results)))
    pairs = results.behind_kernel
    if pairs.rows:
        parts.append(_section(BEHIND, BEHIND_WORDS, _table(pairs, "behind")))
    elif results.device == "cuda":
        parts.append(_section(BEHIND, f"{BEHIND_WORDS} That was not measured in these runs.", ""))
    if results.host:
        parts.append(
            _section(
                "Host time of a call", "Microseconds of one eager call at M = 1, outputs allocated.", _host(results)
            )
        )
    parts.append(_section("Machine, versions, peers", "", "".join(_run(run) for run in results.runs)))
    return (
        f'<!DOCTYPE html>\n<html lang="en"{"" if results.quiet else " data-quiet=no"}><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>{charts.STYLE}{_scoped(charts.DARK)}{STYLE}</style></head>\n<body><main>"
        + "\n".join(parts)
        + f'</main><div id="tip" hidden></div><script>{SCRIPT}</script></body></html>\n'
    )


def _scoped(dark: str) -> str:
    """Dark colours when the reader's system is dark, unless the page's button says otherwise."""
    rules = [line for line in dark.strip().replace("}", "}\n").splitlines() if line.strip()]

    def under(root: str) -> str:
        scoped = []
        for rule in rules:
            selectors, _, body = rule.partition("{")
            scoped.append(", ".join(f"{root} {s.strip()}" for s in selectors.split(",")) + " {" + body)
        return "\n".join(scoped)

    return f"@media (prefers-color-scheme: dark) {{\n{under(':root:not([data-theme=light])')}\n}}\n{under(':root[data-theme=dark]')}\n"


def _section(title: str, words: str, body: str) -> str:
    about = f"<p>{escape(words)}</p>" if words else ""
    return f"<section><h2>{escape(title)}</h2>{about}{body}</section>"


def _head(results: Results) -> str:
    run = results.runs[0]
    chips = {
        "date": run.get("date"),
        "torch": run.get("torch"),
        "Triton": run.get("triton"),
        "Python": run.get("python"),
    }
    chips |= {"onepass": run.get("onepass"), "threads": run.get("threads"), **run.get("packages", {})}
    shown = "".join(f"<li><b>{escape(k)}</b> {escape(str(v))}</li>" for k, v in chips.items() if v is not None)
    how = (
        "A CUDA graph chains calls over inputs that rotate past the L2 cache, so launch gaps count; medians of 15 replays, taken "
        f"twice. {ceiling_words(results)}"
        if results.device == "cuda"
        else "Contenders take turns with a memory stream that moves as many bytes; medians of two halves of the rounds. "
        "The ceiling is that stream."
    )
    return (
        f'<header><button type="button" id="theme" title="light or dark">◐</button><h1>onepass <span>on {escape(results.machine)}'
        f"</span></h1><p>{how}</p><ul>{shown}</ul></header>"
    )


def _tiles(results: Results) -> str:
    if results.banner:
        return f'<p class="refused"><b>{escape(results.banner)}</b></p>{_refused(results)}'
    tiles: list[tuple[str, str, str]] = []
    for names, who in ((COMPILED, "torch.compile"), ((EAGER,), "torch eager")):
        mean = results.speedup(names)
        if mean is not None:
            count = sum(row.best(names) is not None for row in results.rows)
            mode = ", the better of its modes" if names == COMPILED and results.device == "cuda" else ""
            tiles.append((f"faster than {who}", f"{mean:.2f}x", f"geometric mean of {count} shapes{mode}"))
            pairs = results.behind_kernel
            behind = pairs.speedup(names) if names == COMPILED else None
            if behind is not None:
                tiles.append(
                    (f"than {who}, behind a kernel", f"{behind:.2f}x", f"geometric mean of {len(pairs.rows)} shapes")
                )
    large = [row.share for row in results.rows if row.bytes > SMALL]
    if large:
        tiles.append(
            (
                "of the ceiling",
                f"{statistics.median(large):.0%}",
                f"median of the {len(large)} shapes that move over 4 MB",
            )
        )
    roofs = charts.rates(results) if results.rows else []
    for name, rate in roofs[:1]:
        others = "; ".join(f"{other} {r:.2f} TB/s" for other, r in roofs[1:])
        launch = (
            f"{charts.least_words(results)} {number(charts.least_us(results))} µs" if results.device == "cuda" else ""
        )
        said = f"{rate:.2f} TB/s" if rate >= 1 else f"{rate * 1e3:.1f} GB/s"
        tiles.append((f"ceiling: {name}", said, "; ".join(filter(None, (others, launch)))))
    tiles.append(_ahead("shapes where a peer is ahead", results))
    if results.behind_kernel.rows:
        tiles.append(_ahead("where a peer is ahead behind a kernel", results.behind_kernel))
    shown = "".join(
        f"<div><dt>{escape(t)}</dt><dd>{escape(v)}</dd><small>{escape(s)}</small></div>" for t, v, s in tiles
    )
    return f"{_refused(results)}<dl>{shown}</dl>"


def _ahead(title: str, results: Results) -> tuple[str, str, str]:
    """How many shapes a peer is ahead in, which, and who the peers are: a count means nothing without them."""
    found = results.behind
    words = "; ".join(f"{row.op} {row.words}: {name} {row.ours / us - 1:.1%} ahead" for row, name, us in found)
    return title, f"{len(found)} of {len(results.rows)}", f"{words + '. ' if words else ''}{results.peer_words}"


def _refused(results: Results) -> str:
    return "".join(
        f'<p class="refused"><b>{escape(op)}</b> was refused, it fails a check: {escape(why)}</p>'
        for run in results.runs
        for op, why in run.get("refused", {}).items()
    )


def _chain(results: Results) -> str:
    return " in a chain" if results.device == "cuda" else ""


def _ceiling(results: Results) -> str:
    if results.has_best:
        return "the best copy of as many bytes, or a read for ops that write next to nothing"
    if results.device == "cuda":
        return "a large copy's rate, or a read's for ops that write next to nothing"
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
    heads = ["op", "shape", "bytes", OURS, "±", *share, *others]
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "\n".join(_table_row(row, others, bool(share), results.quiet) for row in results.rows)
    return f'<div class="scroll"><table class="numbers" id="{name}"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _table_row(row: Row, others: list[str], shares: bool, quiet: bool) -> str:
    cells = [
        f'<tr data-op="{escape(row.op)}"><th>{escape(row.op)}</th><td class="shape" data-value="{row.m}">{escape(row.words)}</td>',
        f'<td data-value="{row.bytes}">{charts.short(row.bytes)}B</td>',
        f'<td class="ours" data-name="{OURS}" data-value="{row.ours!r}">{row.ours:.2f}</td>',
        f'<td class="soft" data-value="{spread(row.us[OURS])}">{spread(row.us[OURS]):.1%}</td>' if len(row.us[OURS]) > 1 else "<td></td>",
    ]  # fmt: skip
    if shares:
        bar = f'<span><b style="width:{min(1.0, row.share):.1%}"></b></span><em>{row.share_words}</em>'
        cells.append(f'<td class="share" data-value="{row.share}">{bar}</td>' if quiet else "<td></td>")
    for name in others:
        if name not in row.us:
            cells.append("<td></td>")
            continue
        us = min(row.us[name])
        ratio = us / row.ours
        kind = "soft" if not quiet or name in (*CEILINGS, *WAYS) else "lost" if ratio < 1 else "won"
        times = f"<small>{ratio:.2f}x</small>" if quiet else ""
        cells.append(f'<td class="{kind}" data-name="{escape(name)}" data-value="{us!r}">{us:.2f}{times}</td>')
    return "".join(cells) + "</tr>"


def _host(results: Results) -> str:
    """Bars: torch's own ops in grey, ours in colour; what is left without the kernel, dark."""
    plain = {name: min(us) for name, us in results.host.items() if not name.endswith(", no kernel")}
    most = max(plain.values())
    rows = []
    for name, us in plain.items():
        bare = results.host.get(f"{name}, no kernel")
        kind = "k1" if name.startswith(("torch.", "x.", "F.", "its ")) else "k0"
        inner = f'<b style="width:{min(bare) / most:.1%}"></b>' if bare else ""
        rest = f"<small>{min(bare):.2f} without its kernel</small>" if bare else ""
        rows.append(
            f'<tr><th>{escape(name)}</th><td data-name="{escape(name)}" data-value="{us!r}">{us:.2f}</td>'
            f'<td class="bar {kind}"><span style="width:{us / most:.1%}"></span>{inner}</td><td>{rest}</td></tr>'
        )
    return f'<table id="host"><tbody>{"".join(rows)}</tbody></table>'


def _run(run: dict[str, Any]) -> str:
    return f"<table class='facts'><tbody>{''.join(_facts(run))}</tbody></table>"


def _facts(run: dict[str, Any]) -> Iterator[str]:
    facts: dict[str, str] = {}
    for key in ("machine", "date", "onepass", "torch", "triton", "python", "threads"):
        if key in run:
            facts[key] = str(run[key])
    for key in ("packages", "ceilings"):
        if run.get(key):
            facts[key] = ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in run[key].items())
    for when, found in run.get("clocks", {}).items():
        facts[f"clocks {when}"] = ", ".join(f"{k} {v:g}" for k, v in found.items()) or "not told"
    if run.get("peers"):
        facts["peers"] = ", ".join(f"{name} ({why})" if why else name for name, why in run["peers"].items())
    if run.get("checks"):
        facts["checks passed"] = ", ".join(f"{op} {count}" for op, count in run["checks"].items())
    if run.get("note"):
        facts["note"] = str(run["note"])
    for key, value in facts.items():
        yield f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>"
