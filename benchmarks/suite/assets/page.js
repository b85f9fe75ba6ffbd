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
