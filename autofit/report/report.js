"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");

  /* Returns a copy of a figure in which the names of CSS variables are their values. */
  function coloured(part, style) {
    if (typeof part === "string") {
      return part.startsWith("--") ? style.getPropertyValue(part).trim() : part;
    }
    if (Array.isArray(part)) return part.map((each) => coloured(each, style));
    if (part === null || typeof part !== "object") return part;
    return Object.fromEntries(
      Object.entries(part).map(([key, value]) => [key, coloured(value, style)])
    );
  }

  function axis(style, given) {
    const line = style.getPropertyValue("--line").trim();
    const title = typeof given.title === "string" ? { text: given.title } : given.title;
    return { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, ...given, title };
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--text").trim();
    const panel = style.getPropertyValue("--panel").trim();
    for (const [id, figure] of Object.entries(coloured(figures, style))) {
      const axes = Object.fromEntries(
        Object.entries({ xaxis: {}, yaxis: {}, ...figure.layout })
          .filter(([key]) => /^[xy]axis\d*$/.test(key))
          .map(([key, value]) => [key, axis(style, value)])
      );
      const layout = {
        ...figure.layout,
        ...axes,
        font: { color: text, size: 13, family: "system-ui, sans-serif" },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        margin: { l: 50, r: 16, t: 24, b: 44 },
        hovermode: "closest",
        hoverlabel: { bgcolor: panel, bordercolor: text, font: { color: text }, align: "left" },
        legend: {
          orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom",
          ...figure.layout.legend,
        },
      };
      const settings = { responsive: true, displaylogo: false, displayModeBar: false };
      Plotly.react(id, figure.data, layout, settings);
    }
  }

  /* Sorts the table by a column: numbers by their value, missing ones last; others as text. */
  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    const key = (row, column) => {
      const cell = row.cells[column];
      return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
    };
    heads.forEach((head, column) => {
      head.firstElementChild.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const missing = (value) => typeof value === "number" && value < 0;
        const rows = [...body.rows].sort((one, other) => {
          const [a, b] = [key(one, column), key(other, column)];
          if (missing(a) || missing(b)) return missing(a) - missing(b);
          const order = typeof a === "number" ? a - b : a.localeCompare(b);
          return down ? -order : order;
        });
        body.append(...rows);
      });
    });
  }

  draw();
  dark.addEventListener("change", draw);
  sortable(document.getElementById("trials"));
})();
