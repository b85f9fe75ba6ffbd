(() => {
  const svg = document.querySelector(".timeline"), zoom = svg.querySelector(".zoom"), axis = svg.querySelector(".axis");
  const marks = svg.querySelectorAll("text.mark"), number = Object.fromEntries(Object.entries(svg.dataset).map(([k, v]) => [k, +v]));
  const { total, left, plot, top, bottom, median } = number, add = (name, cls) => {
    const node = document.createElementNS(svg.namespaceURI, name);
    node.setAttribute("class", cls);
    return svg.appendChild(node);
  };
  const cursor = add("path", "cursor"), drag = add("rect", "drag"), now = add("text", "now");
  let from = 0, to = total, down = null;
  const xOf = (ns) => left + (ns - from) * plot / (to - from);
  const nsOf = (x) => from + (x - left) * (to - from) / plot;
  const words = (ns) => total >= 2e6 ? [ns / 1e6, "ms"] : [ns / 1e3, "µs"];
  const draw = () => {
    const k = plot / (to - from), power = 10 ** Math.floor(Math.log10((to - from) / 10));
    const step = [1, 2, 5, 10].map((s) => s * power).find((s) => (to - from) / s <= 10);
    zoom.setAttribute("transform", `scale(${k} 1) translate(${-from} 0)`);
    svg.classList.toggle("dense", median * k < 3);
    let out = "";
    for (let ns = Math.ceil(from / step) * step, first = true; ns <= to; ns += step, first = false) {
      const [value, unit] = words(ns), text = +value.toPrecision(9) + (first ? " " + unit : ""), x = xOf(ns).toFixed(1);
      out += `<path d="M${x} ${top}V${bottom}"/>`;
      for (const y of [number.axis, bottom + 16]) out += `<text x="${x}" y="${y}">${text}</text>`;
    }
    axis.innerHTML = out;
    for (const mark of marks) {
      const x = xOf(+mark.dataset.ns);
      mark.setAttribute("x", x);
      mark.style.display = x < left || x > left + plot ? "none" : "";
    }
  };
  const at = (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    return Math.min(left + plot, Math.max(left, x));
  };
  svg.addEventListener("pointerdown", (event) => { if (event.button === 0) { down = at(event); svg.setPointerCapture(event.pointerId); } });
  svg.addEventListener("pointermove", (event) => {
    const x = at(event), [value, unit] = words(nsOf(x));
    cursor.setAttribute("d", `M${x} ${top}V${bottom}`);
    now.textContent = value.toPrecision(5) + " " + unit;
    now.setAttribute("x", x + 4);
    now.setAttribute("y", top + 8);
    if (down === null) return;
    for (const [k, v] of Object.entries({ x: Math.min(x, down), width: Math.abs(x - down), y: top, height: bottom - top }))
      drag.setAttribute(k, v);
  });
  svg.addEventListener("pointerup", (event) => {
    const range = [at(event), down ?? at(event)].sort((a, b) => a - b).map(nsOf);
    const wide = down !== null && Math.abs(at(event) - down) > 3;
    down = null;
    drag.setAttribute("width", 0);
    if (wide && range[1] - range[0] >= 20) { [from, to] = range; draw(); }
  });
  svg.addEventListener("dblclick", () => { from = 0; to = total; draw(); });
  const hint = document.createElement("li");
  hint.className = "hint";
  hint.textContent = "drag to zoom, double-click to reset";
  document.querySelector(".legend").append(hint);
})();
