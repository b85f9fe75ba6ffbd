"""The look of the page, and the little it does by itself: theme, names that hide, numbers under the pointer, sorting."""

from typing import Final

_DARK = """--bg: #0f1215; --card: #161a1f; --ink: #e9ecef; --soft: #9aa4ae; --line: #2b3138; --band: #20262c;
  --won: #58bd78; --lost: #ff7d73;"""

STYLE: Final = (
    """
:root { color-scheme: light; --bg: #f6f6f4; --card: #fff; --ink: #1b1f24; --soft: #5d6670; --line: #e1e4e7; --band: #eef0f2;
  --won: #23804a; --lost: #c5352b; }
:root[data-theme=dark] { color-scheme: dark; """
    + _DARK
    + """ }
@media (prefers-color-scheme: dark) { :root:not([data-theme=light]) { color-scheme: dark; """
    + _DARK
    + """ } }
* { box-sizing: border-box; margin: 0; padding: 0; }
body { background: var(--bg); color: var(--ink); font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; padding: 36px 24px 64px; }
main { max-width: 1240px; margin: auto; }
h1 { font-size: 27px; line-height: 1.2; font-weight: 680; letter-spacing: -0.015em; } h1 span { color: var(--soft); font-weight: 450; }
h2 { font-size: 17px; font-weight: 650; letter-spacing: -0.01em; } section { margin-top: 34px; }
header p, section > p { color: var(--soft); max-width: 88ch; } section > p { margin-bottom: 12px; } header p { margin-top: 6px; }
header ul { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 12px; font-size: 13px; }
ul { list-style: none; } header li { border: 1px solid var(--line); border-radius: 99px; padding: 1px 11px; background: var(--card); }
header b { font-weight: 400; color: var(--soft); }
button { font: inherit; color: inherit; background: none; border: 0; cursor: pointer; }
#theme { float: right; font-size: 20px; line-height: 1; padding: 6px 9px; border-radius: 8px; color: var(--soft); }
#theme:hover, .legend button:hover { background: var(--band); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(205px, 1fr)); gap: 12px; margin-top: 24px; }
dl > div, .panels > div, .wide, .scroll, #host, .facts { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
dl > div { padding: 13px 16px 14px; } dt { color: var(--soft); font-size: 13px; }
dd { font-size: 25px; line-height: 1.3; font-weight: 640; letter-spacing: -0.015em; }
dl small { color: var(--soft); display: block; font-size: 12px; line-height: 1.4; }
.refused { margin-top: 18px; padding: 10px 16px; border-radius: 10px; border: 1px solid var(--lost); color: var(--lost); }
.legend { display: flex; flex-wrap: wrap; gap: 2px; margin: 2px 0 10px -8px; font-size: 13px; }
.legend button { padding: 2px 9px; border-radius: 7px; } .legend button.off { opacity: 0.35; text-decoration: line-through; }
.legend i { display: inline-block; width: 15px; height: 4px; border-radius: 2px; background: currentColor;
  margin-right: 7px; vertical-align: 3px; }
.legend button:has(.k0) { font-weight: 640; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 12px; }
.panels > div { padding: 12px 10px 6px; } .chart { display: block; width: 100%; } .wide { padding: 10px 8px; overflow-x: auto; }
.wide .chart { min-width: 900px; } .panel .cursor { stroke: var(--soft); stroke-dasharray: 2 3; }
.op { transition: opacity 0.15s; } .roofline:has(.op:hover) .op:not(:hover) { opacity: 0.18; }
#tip { position: absolute; z-index: 3; pointer-events: none; background: var(--card); border: 1px solid var(--line); border-radius: 9px;
  box-shadow: 0 6px 22px rgb(0 0 0 / 0.16); padding: 8px 12px; font-size: 12.5px; }
#tip b { display: block; color: var(--soft); font-weight: 500; } #tip div { display: flex; gap: 18px; justify-content: space-between; }
#tip .ours { font-weight: 660; }
.ops { display: flex; flex-wrap: wrap; gap: 4px; margin-bottom: 10px; font-size: 12.5px; }
.ops button { border: 1px solid var(--line); border-radius: 99px; padding: 1px 11px; color: var(--soft); background: var(--card); }
.ops .on { color: var(--bg); background: var(--ink); border-color: var(--ink); }
.scroll { overflow: auto; max-height: 82vh; } table { border-collapse: separate; border-spacing: 0; width: 100%; }
th, td { padding: 5px 14px; text-align: right; font-weight: 400; white-space: nowrap; }
tbody tr + tr > * { border-top: 1px solid var(--line); } tbody th, td.shape { text-align: left; }
.numbers thead th { position: sticky; top: 0; background: var(--card); color: var(--soft); font-size: 12px;
  border-bottom: 1px solid var(--line); cursor: pointer; user-select: none; } .numbers thead th:nth-child(-n+2) { text-align: left; }
.numbers thead th:hover { color: var(--ink); } .numbers thead th.up::after { content: " ↑"; }
.numbers thead th.down::after { content: " ↓"; }
.numbers tbody tr:hover > * { background: var(--band); } .ours { font-weight: 680; } .soft { color: var(--soft); }
td small { display: inline-block; min-width: 52px; margin-left: 8px; font-size: 12px; } .won small { color: var(--won); }
.lost small { color: var(--lost); font-weight: 680; } .soft small { color: inherit; }
.share span { display: inline-block; width: 64px; height: 6px; margin-right: 10px; border-radius: 3px;
  background: var(--band); vertical-align: 2px; }
.share em { display: inline-block; min-width: 48px; font-style: normal; }
.share b { display: block; height: 6px; border-radius: 3px; background: var(--soft); }
#host { padding: 6px 4px; } #host td:last-child { text-align: left; color: var(--soft); width: 22%; }
#host td.bar { width: 46%; position: relative; }
.bar span, .bar b { position: absolute; left: 14px; top: 9px; height: 14px; border-radius: 3px; background: currentColor; opacity: 0.45; }
.facts { padding: 6px 4px; } .facts + .facts { margin-top: 12px; } .facts th { color: var(--soft); width: 130px; vertical-align: top; }
.facts td { text-align: left; white-space: normal; }
@media print { #theme, .ops { display: none; } .scroll { max-height: none; overflow: visible; } }
"""
)

SCRIPT: Final = """
(() => {
  const root = document.documentElement, all = (query, from = document) => [...from.querySelectorAll(query)];
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; });

  for (const button of all(".legend button")) button.addEventListener("click", () => {
    const off = button.classList.toggle("off");
    for (const line of all(".panel .line")) if (line.dataset.name === button.dataset.name) line.style.display = off ? "none" : "";
  });

  const tip = document.getElementById("tip");
  for (const svg of all(".panel")) {
    const points = JSON.parse(svg.dataset.at), cursor = document.createElementNS(svg.namespaceURI, "path");
    cursor.setAttribute("class", "cursor");
    svg.prepend(cursor);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
      const [at, words, times] = points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      cursor.setAttribute("d", `M${at} ${svg.dataset.top}V${svg.dataset.bottom}`);
      tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: words }));
      for (const [name, us] of Object.entries(times).sort((a, b) => a[1] - b[1])) {
        const line = document.createElement("div"), of = root.dataset.quiet ? "" : (us / times.onepass).toFixed(2) + "x";
        line.className = name === "onepass" ? "ours" : "";
        for (const text of [name, us.toFixed(2) + " µs" + (name === "onepass" ? "" : "  " + of)])
          line.append(Object.assign(document.createElement("span"), { textContent: text }));
        tip.append(line);
      }
      tip.hidden = false;
      tip.style.left = Math.min(event.pageX + 16, root.clientWidth - tip.offsetWidth - 8) + "px";
      tip.style.top = event.pageY + 14 + "px";
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("d", ""); });
  }

  const shows = [];
  for (const button of all(".ops button")) button.addEventListener("click", () => {
    for (const show of shows) show(button.dataset.op);
    for (const other of all(".ops button")) other.classList.toggle("on", other === button);
  });
  for (const table of all(".numbers")) {
    const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
    const show = (op) => {
      for (const row of rows) row.hidden = Boolean(op) && row.dataset.op !== op;
      heads.forEach((head, i) => {  // a column nobody is in takes no room
        const empty = rows.every((row) => row.hidden || row.cells[i].textContent === "");
        for (const cell of [head, ...rows.map((row) => row.cells[i])]) cell.hidden = empty;
      });
    };
    shows.push(show);
    heads.forEach((head, i) => head.addEventListener("click", () => {
      const down = head.className === "up", value = (row) => row.cells[i].dataset.value ?? row.cells[i].textContent;
      for (const other of heads) other.className = "";
      head.className = down ? "down" : "up";
      const order = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        return (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y) * (down ? -1 : 1);
      };
      body.append(...rows.slice().sort(order));
    }));
    show("");
  }
  root.dataset.ready = "yes";
})();
"""
