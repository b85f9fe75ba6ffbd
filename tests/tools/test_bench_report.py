"""Results as tables, plots and a page: they show what was measured, and committed files are current."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite import baseline, charts, page
from benchmarks.suite.results import Results, load, of_report, of_reports, shape_words
from tools.bench import report, svg
from tools.bench.markdown import markers

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("benchmarks/*/README.md"))
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def h200() -> Results:
    return load(report.sources(ROOT / "benchmarks/h200/README.md"))


def document(**us: Any) -> dict[str, Any]:
    """A small run on a GPU with one op at two shapes."""
    rows = [
        {
            "op": "rms_norm",
            "shape": [m, 7168],
            "bytes": m * 28672,
            "us": {name: [t * m, t * m * 1.02] for name, t in us.items()},
        }
        for m in (1, 1000)
    ]
    ceilings = {"copy 2 GiB TB/s": 4.0, "read 1 GiB TB/s": 5.0, "empty kernel us": 0.7}
    head = {"machine": "<A & B>", "date": "2030-01-01", "torch": "9", "triton": "8", "python": "7"}
    refused = {"qk_rms_norm": "short: 1x2: 3 > 2"}
    return {**head, "ceilings": ceilings, "rows": rows, "refused": refused, "peers": {"quack": "not installed"}}


# --- reading --------------------------------------------------------------------------------------------------------


def test_shapes_in_words() -> None:
    assert shape_words({"shape": [64, 128, 64], "latent": 512, "cache": "fp8"}) == ("64", "128 heads, fp8")
    assert shape_words({"shape": [64, 32, 8, 128], "cache": "bf16"}) == ("64", "32 + 8 heads of 128, bf16")
    assert shape_words({"shape": [16, 7168]}) == ("16", "7168")
    assert shape_words({"shape": [16, 6144, 1024]}) == ("16", "(6144 + 1024)")
    assert shape_words({"shape": [1, 2112, 7168], "normed": 1536}) == ("1", "2112 x 7168, 1536 normed")
    assert shape_words({"shape": [8]}) == ("batch 8", "")
    product = {"op": "linear, fp8", "shape": [4, 2112, 7168], "with": "fp8 rows"}
    assert shape_words(product) == ("4", "2112 x 7168, fp8 rows")


def test_floor_share_and_peers_of_a_row() -> None:
    row = of_report(
        document(onepass=8.0, **{"torch eager": 40.0, "torch.compile": 6.0, "copy of as many bytes": 7.0})
    ).rows[1]
    assert row.floor_us == pytest.approx(28_672_000 / 4e6) and row.share == pytest.approx(7.168 / 8000)
    assert row.peers == {"torch eager": 40000.0, "torch.compile": 6000.0}
    assert row.us["memory stream"] == (7000.0, 7140.0) and row.ours == 8000.0
    assert row.best(("torch.compile", "torch.compile max")) == 6000.0 and row.best(("vLLM",)) is None


def test_reading_ops_are_compared_with_the_read_ceiling() -> None:
    given = document(onepass=1.0)
    given["rows"] = [{**given["rows"][0], "op": "gemv_and_partial_norm"}, {**given["rows"][0], "stream": "read"}]
    assert [row.floor_us for row in of_report(given).rows] == [pytest.approx(28672 / 5e6)] * 2


def test_on_a_cpu_the_ceiling_is_the_stream() -> None:
    given = {**document(onepass=8.0, stream=6.0), "threads": 2}
    found = of_report(given)
    assert found.device == "cpu" and [row.share for row in found.rows] == [0.75, 0.75]
    old = {
        **given,
        "rows": [{**given["rows"][0], "us": {"onepass": 8.0, "stream": 4.0}}],
        "overhead_us": {"rms_norm": 3.0},
    }
    assert of_report(old).rows[0].share == 0.5 and of_report(old).host == {"rms_norm": (3.0,)}


def test_several_files_are_combined(h200: Results) -> None:
    both = of_reports([document(onepass=1.0), document(onepass=2.0)])
    assert [row.run for row in both.rows] == [0, 0, 1, 1] and len(both.runs) == 2
    assert both.speedup(("torch eager",)) is None
    assert len(h200.ops) >= 7 and all(row.floor_us > 0 and "onepass" in row.us for row in h200.rows)


def test_speedups_and_faster_peers() -> None:
    found = of_report(document(onepass=8.0, **{"torch eager": 32.0, "torch.compile": 4.0, "memory stream": 1.0}))
    assert found.speedup(("torch eager",)) == pytest.approx(4.0)
    assert found.speedup(("torch eager", "torch.compile")) == pytest.approx(0.5)
    assert [(row.m, name, us) for row, name, us in found.behind] == [
        (1, "torch.compile", 4.0),
        (1000, "torch.compile", 4000.0),
    ]


def test_other_files_are_rejected(tmp_path: Path) -> None:
    for text in ("[]", "{}", '{"rows": [{}]}', "not json"):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match="is not a result file"):
            load([tmp_path / "x.json"])


# --- the baseline ---------------------------------------------------------------------------------------------------


def changed(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, float, float]]:
    found = baseline.compare(of_report(old), of_report(new)).changes
    return [(c.verdict, round(c.noise, 3), round(c.drift, 3)) for c in found]


def test_changes_within_the_noise_are_the_same() -> None:
    """Two medians 2 % apart are a noise of 2 %."""
    old = document(onepass=10.0)
    assert changed(old, document(onepass=10.15)) == [("same", 0.02, 0.0)] * 2
    assert changed(old, document(onepass=10.5)) == [("slower", 0.02, 0.0)] * 2
    assert changed(old, document(onepass=9.0)) == [("faster", 0.02, 0.0)] * 2
    noisy = document(onepass=9.0)
    noisy["rows"][0]["us"]["onepass"] = [9.0, 10.9]
    assert [verdict for verdict, *_ in changed(old, noisy)] == ["same", "faster"]


def test_drift_of_the_machine_is_not_a_change() -> None:
    """All contenders are 10 % slower, so the machine is. A larger change is ours."""
    old = document(onepass=10.0, **{"torch eager": 100.0, "torch.compile": 20.0})
    slower = {"torch eager": 110.0, "torch.compile": 22.0}
    assert changed(old, document(onepass=11.0, **slower)) == [("same", 0.02, 0.1)] * 2
    assert changed(old, document(onepass=12.5, **slower)) == [("slower", 0.02, 0.1)] * 2


def test_a_comparison_in_words() -> None:
    old, new = document(onepass=10.0), {**document(onepass=12.0), "torch": "10"}
    new["rows"].append({**new["rows"][0], "shape": [5, 7168]})
    text = baseline.text(baseline.compare(of_report(old), of_report(new)))
    assert "note: torch differs: 9, now 10" in text
    assert "slower  20.0%  rms_norm 1 x 7168: 10.00 -> 12.00 us (noise 2.0%, drift +0.0%)" in text
    assert "0 of 2 rows are the same" in text and "only in the baseline: 0, only now: 1" in text
    single = {**old, "rows": [{**old["rows"][0], "us": {"onepass": [10.0]}}]}
    assert "their noise is unknown" in baseline.text(baseline.compare(of_report(single), of_report(old)))


# --- tables ---------------------------------------------------------------------------------------------------------


def test_headlines_are_few_and_cover_every_op(h200: Results) -> None:
    rows = report.headlines(h200)
    assert 9 <= len(rows) <= 14 and len({row.key for row in rows}) == len(rows)
    assert set(report.HEADLINES) <= {row.op for row in rows}


def test_the_short_table() -> None:
    found = of_report(document(onepass=8.0, **{"torch eager": 32.0, "torch.compile": 6.0, "torch.compile max": 4.0}))
    lines = report.short_table(found).splitlines()
    assert lines[2:] == [
        "| `rms_norm` | 1 x 7168 | **8.00** | not measured | latency | 4.00 (0.50x) | 32.00 (4.00x) |",
        "| `rms_norm` | 1000 x 7168 | **8000.00** | not measured | 0% | 4000.00 (0.50x) | 32000.00 (4.00x) |",
    ]


def test_the_short_table_with_times_behind_a_kernel_and_the_best_copy() -> None:
    given = document(
        onepass=8.0, **{"torch eager": 32.0, "torch.compile": 6.0, "torch.compile max": 4.0, "best copy": 6.4}
    )
    given["rows"][0]["behind_us"] = {"onepass": [9.0, 9.5], "torch.compile": [7.5, 7.0]}
    found = of_report(given)
    assert report.short_table(found).splitlines()[2:] == [
        "| `rms_norm` | 1 x 7168 | **8.00** | 9.00 / 7.00 | 80% | 4.00 (0.50x) | 32.00 (4.00x) |",
        "| `rms_norm` | 1000 x 7168 | **8000.00** | not measured | 80% | 4000.00 (0.50x) | 32000.00 (4.00x) |",
    ]
    text = report.full(found, ["x.json"])
    assert "The ceiling of a row is the fastest of several copies" in text and "Behind an ordinary kernel:" in text
    assert "onepass is fastest in 0 of 2 shapes back to back, and in 0 of 1 behind another kernel." in text
    html = page.html(found)
    assert 'id="behind"' in html and "where a peer is ahead behind a kernel" in html and "was not measured" not in html


@pytest.mark.parametrize("readme", PAGES, ids=lambda path: path.parent.name)
def test_committed_files_are_current(readme: Path) -> None:
    paths = report.sources(readme)
    command = f"python -m tools.bench.report {' '.join(str(path.relative_to(ROOT)) for path in paths)}"
    for name, text in report.files(paths).items():
        assert (readme.parent / name).read_text() == text, (
            f"{name} is stale; run: {command} --readme docs/performance.md"
        )


def test_generated_tables_are_current_and_short(h200: Results) -> None:
    """In every document that has the markers of one."""
    found = 0
    for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        text = path.read_text()
        folder = "benchmarks/h200" if path.parent == ROOT else "../benchmarks/h200"
        assert text == report.with_section(text, h200, folder), (
            f"{path.name} is stale: run python -m tools.bench.report with --readme docs/performance.md"
        )
        begin, end = markers(report.SHORT)
        if begin in text:
            assert 0 < len(text.split(begin)[1].split(end)[0].splitlines()) <= 24
            found += 1
    assert found


def test_tokens_per_second_of_generate() -> None:
    """Forms that were not measured have no column, and models without a baseline no row."""
    rows = [
        {"model": "One", "batch": 4, "us_per_token": {"unpatched": 8000.0, "patched": 4000.0}},
        {"model": "Two", "batch": 1, "us_per_token": {"patched": 4000.0}},
        {"model": "Three", "batch": 1, "us_per_token": {"unpatched": 4000.0, "captured": 1000.0}},
    ]
    models = {"date": "today", "torch": "2", "transformers": "5", "generated": rows}
    text = report.full(of_report(document(onepass=8.0)), ["x.json"], models)
    table = text.split("## Eager `generate()`")[1].split("##")[0].splitlines()
    assert table[-4:-1] == [
        "| model | batch | unpatched | `onepass.patch` |",
        "|---|---:|---:|---:|",
        "| One | 4 | 500.0 | 1000.0 (2.00x) |",
    ]
    assert "generate" not in report.full(of_report(document(onepass=8.0)), ["x.json"], {**models, "generated": []})


def test_only_the_text_between_the_markers_is_replaced(h200: Results) -> None:
    begin, end = markers(report.SHORT)
    text = report.with_section(f"before\n{begin}\nold\n{end}\nafter\n", h200, "there")
    assert text.startswith(f"before\n{begin}\n") and text.endswith(f"{end}\nafter\n")
    assert "old" not in text and report.short_table(h200) in text and "(there/time.svg)" in text


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.parent.name)
def test_committed_results_are_complete(path: Path) -> None:
    """Every op next to eager and compiled torch, two medians each, and nothing faster than memory beyond the noise."""
    found = load(report.sources(path))
    assert set(report.HEADLINES) <= set(found.ops)
    for row in found.rows:
        assert {"onepass", "torch eager", "torch.compile"} <= set(row.us), row.key
        assert all(len(us) == 2 for us in row.us.values())
        assert found.device == "cpu" or row.share < (1.03 if "best copy" in row.us else 1.1)


# --- plots ----------------------------------------------------------------------------------------------------------


def test_a_logarithmic_axis() -> None:
    axis = charts.Log(1, 100, 0, 200)
    assert [axis(value) for value in (1, 10, 100)] == pytest.approx([0, 100, 200])
    assert axis.ticks() == pytest.approx([1, 10, 100]) and axis.ticks((2, 5)) == pytest.approx([2, 5, 20, 50])


def test_points_are_plotted_at_their_times(h200: Results) -> None:
    """Read back from the plot, equal ratios are equal distances on both axes."""
    rows = h200.main("rms_norm_fused_fp8")
    tree = ElementTree.fromstring(charts.panel(rows, 0.8))
    lines = {group.attrib["data-name"]: group for group in tree.iter("g") if "data-name" in group.attrib}
    places = {
        name: [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in group.iter("circle")]
        for name, group in lines.items()
    }
    (x0, y0), *_, (x1, y1) = places["onepass"]
    for name, found in places.items():
        measured = [row for row in rows if name in row.us]
        for (x, y), row in zip(found, measured, strict=True):
            across = math.log(row.m / rows[0].m) / math.log(rows[-1].m / rows[0].m)
            up = math.log(min(row.us[name]) / rows[0].ours) / math.log(rows[-1].ours / rows[0].ours)
            assert (x, y) == pytest.approx((x0 + across * (x1 - x0), y0 + up * (y1 - y0)), abs=0.3)


def test_plots_are_svg_files_with_every_row(h200: Results) -> None:
    for text in (svg.time_svg(h200), svg.roofline_svg(h200)):
        tree = ElementTree.fromstring(text)
        assert tree.tag == "{http://www.w3.org/2000/svg}svg"
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "prefers-color-scheme: dark" in text
    roofline = ElementTree.fromstring(svg.roofline_svg(h200))
    ours = [circle for circle in roofline.iter() if circle.tag.endswith("circle") and list(circle)]
    assert len(ours) == len(h200.rows)


@pytest.mark.parametrize("ops", [2, 30])
def test_the_legend_of_a_roofline_has_room_and_names_what_was_measured(ops: int) -> None:
    """Few rows make a low roof, whose name is next to the legend. No peer was measured."""
    rows = [
        {"op": f"op {i}", "shape": [m, 64], "bytes": m * 16384, "us": {"onepass": 8.0 * m, "memory stream": 5.0 * m}}
        for i in range(ops)
        for m in (1, 4)
    ]
    found = of_report({"machine": "M", "torch": "9", "device": "cpu", "threads": 2, "rows": rows, "peers": {}})
    tree = ElementTree.fromstring(charts.roofline(found))
    words = {text.text: float(text.attrib["y"]) for text in tree.iter("text") if text.attrib.get("class") == "end"}
    assert list(words) == ["fastest stream 3 GB/s", *(f"op {i}" for i in range(ops))]
    axes = [text.attrib.get("class") for text in tree.iter("text")]
    assert axes.count("y") >= 1 and axes.count("x") >= 3, "short axes have numbers too; one x is the name"
    places = sorted([*words.values(), float(tree.attrib["viewBox"].split()[-1])])
    assert min(b - a for a, b in itertools.pairwise(places)) >= 11
    assert "leads down to torch.compile" not in page.html(found)
    assert "leads down to torch.compile" in page.html(of_report(document(onepass=8.0, **{"torch.compile": 4.0})))


# --- the page -------------------------------------------------------------------------------------------------------


class Cells(HTMLParser):
    """The numbers of the page's table, and attributes of its root."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root: dict[str, str | None] = {}
        self.rows: list[dict[str, tuple[float, str]]] = []
        self.name: str | None = None
        self.value = 0.0
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "html":
            self.root = found
        if tag == "table":
            self.inside = found.get("id") == "rows"
        if self.inside and tag == "tr" and "data-op" in found:
            self.rows.append({})
        self.name = found.get("data-name") if self.inside and tag == "td" else None
        self.value = float(found["data-value"] or 0) if self.name else 0.0

    def handle_data(self, data: str) -> None:
        if self.name is not None:
            self.rows[-1][self.name] = (self.value, data)
            self.name = None


def shown_numbers(text: str) -> list[dict[str, tuple[float, str]]]:
    return Cells(text).rows


def expected_numbers(results: Results) -> list[dict[str, tuple[float, str]]]:
    return [{name: (min(us), f"{min(us):.2f}") for name, us in row.us.items()} for row in results.rows]


def in_browser(html: str, tmp_path: Path) -> tuple[str, str]:
    """The document after its script has run in a browser, and what it logged to the console."""
    assert BROWSER is not None
    file = tmp_path / "page.html"
    file.write_text(html)
    switches = "headless no-sandbox disable-gpu disable-dev-shm-usage enable-logging=stderr disable-quic no-first-run"
    switches += " disable-background-networking disable-component-update disable-sync window-size=1280,900 dump-dom"
    options = [f"--{switch}" for switch in switches.split()]
    command = [BROWSER, *options, f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_the_page_is_self_contained(h200: Results) -> None:
    text = page.html(h200)
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org)""", text)
    assert shown_numbers(text) == expected_numbers(h200)
    assert text.count('class="chart panel"') == len(charts.panels(h200)) and text.count("chart roofline") == 1


def test_the_page_shows_refused_ops_and_absent_peers_escaped() -> None:
    text = page.html(of_report(document(onepass=8.0, **{"torch.compile": 4.0})))
    assert "&lt;A &amp; B&gt;" in text and "<A & B>" not in text
    assert "<b>qk_rms_norm</b> was refused because it fails a check: short: 1x2: 3 &gt; 2" in text
    assert "quack (not installed)" in text and 'class="lost"' in text and "2 of 2" in text


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_the_page_in_a_browser(h200: Results, tmp_path: Path) -> None:
    """It renders, its script runs to the end, the console stays empty, and the numbers are those of the files."""
    html = page.html(h200)
    dom, console = in_browser(html, tmp_path)
    assert console == ""
    assert Cells(dom).root["data-ready"] == "yes"
    assert shown_numbers(dom) == expected_numbers(h200)
    # Try what a reader can do: sizes on the screen, sorting, hiding, numbers under the pointer.
    probe = """<script>
      const say = (name, value) => { document.documentElement.dataset[name] = JSON.stringify(value); };
      const size = (svg) => { const box = svg.getBoundingClientRect(); return [box.width, box.height]; };
      const heads = [...document.querySelectorAll("#rows thead th")];
      say("edges", Object.fromEntries(heads.map((th) => [th.textContent, th.getBoundingClientRect().right])));
      say("sizes", [...document.querySelectorAll(".chart")].map(size));
      const rows = () => [...document.querySelectorAll("#rows tbody tr")];
      document.querySelectorAll("#rows thead th")[3].click();
      say("sorted", rows().map((row) => +row.cells[3].dataset.value));
      document.querySelector(".ops button[data-op=rms_norm]").click();
      say("visible", rows().filter((row) => row.offsetParent !== null).map((row) => row.dataset.op));
      document.querySelector('.legend button[data-name="torch eager"]').click();
      const gone = [...document.querySelectorAll(".panel .line")].filter((g) => getComputedStyle(g).display === "none");
      say("hidden", gone.map((g) => g.dataset.name));
      const panel = document.querySelector(".panel"), box = panel.getBoundingClientRect();
      panel.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 60, clientY: box.top + 90 }));
      say("tip", document.getElementById("tip").innerText);
      const before = getComputedStyle(document.body).backgroundColor;
      document.getElementById("theme").click();
      say("themes", [before, getComputedStyle(document.body).backgroundColor]);
      console.error("seen");
    </script></body>"""
    dom, console = in_browser(html.replace("</body>", probe), tmp_path)
    assert "seen" in console, "errors on the console would go unnoticed"
    found = {
        key: json.loads(value or "null")
        for key, value in Cells(dom).root.items()
        if key.startswith("data-") and key != "data-ready" and key != "data-theme"
    }
    assert found["data-edges"]["torch.compile"] < 1280, "torch.compile is not visible in a window of 1280 pixels"
    assert len(found["data-sizes"]) == len(charts.panels(h200)) + 1
    assert all(width > 200 and height > 100 for width, height in found["data-sizes"])
    assert found["data-sorted"] == sorted(row.ours for row in h200.rows)
    assert found["data-visible"] == ["rms_norm"] * len(h200.of("rms_norm"))
    assert set(found["data-hidden"]) == {"torch eager"}
    first = charts.panels(h200)[0][0]
    assert f"{first.ours:.2f} µs" in found["data-tip"] and f"rows {first.m}" in found["data-tip"]
    assert len(set(found["data-themes"])) == 2
