"use strict";

const byId = (id) => document.getElementById(id);
const MIB = 1024 * 1024;

async function ask(path, options) {
  const answer = await fetch(path, options);
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function size(bytes) {
  const mib = bytes / MIB;
  return mib < 1000 ? `${mib.toFixed(1)} MiB` : `${(mib / 1024).toFixed(1)} GiB`;
}

function planText(plan) {
  const words = Object.entries(plan).map(([name, level]) => `${name.replaceAll("_", " ")}: ${level}`);
  return words.join(", ") || "as it is";
}

/* The form of a new search. */

function follow(form) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const problem = form.querySelector(".warn");
    problem.textContent = "";
    try {
      const { upload } = await ask("/api/uploads", { method: "POST", body: form.archive.files[0] });
      const options = {};
      for (const name of ["memory", "timeout"]) {
        if (form[name].value.trim()) options[name] = form[name].value.trim();
      }
      const request = {
        script: form.script.value.trim(),
        args: form.args.value.split(/\s+/).filter(Boolean),
        upload,
        options,
        priority: Number(form.priority.value) || 0,
        deadline: form.deadline.value.trim() || null,
      };
      const search = await ask("/api/searches", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(request),
      });
      location.assign(`/searches/${search.id}`);
    } catch (error) {
      problem.textContent = error.message;
    }
  });
}

/* The searches, the queue and the GPUs. */

/* Makes `old` like `fresh`. An element that is in both, known by its id or its place, stays: it keeps the focus. */
function become(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  for (const { name, value } of fresh.attributes) old.setAttribute(name, value);
  let last = null; // of the children that are as they should be
  const next = () => (last ? last.nextSibling : old.firstChild);
  for (const child of [...fresh.childNodes]) {
    let same = next();
    while (same && !(same.nodeName === child.nodeName && same.id === child.id)) same = same.nextSibling;
    if (!same) {
      old.insertBefore(child, next());
      last = child;
      continue;
    }
    while (same.previousSibling !== last) same.previousSibling.remove();
    if (same.nodeType === Node.ELEMENT_NODE) become(same, child);
    else same.nodeValue = child.nodeValue;
    last = same;
  }
  while (old.lastChild !== last) old.lastChild.remove();
}

async function refresh() {
  try {
    const answer = await fetch(location.href);
    const text = await answer.text();
    const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("live");
    if (answer.ok && fresh) become(byId("live"), fresh);
  } catch {
    // the service is being restarted
  }
}

/* A search. */

class Search {
  constructor(section) {
    this.path = `/api/searches/${section.dataset.number}`;
    this.trials = new Map();
    this.budget = 0;
    for (const button of document.querySelectorAll("[data-order]")) {
      button.addEventListener("click", () => this.order(button.dataset.order));
    }
    this.listen();
  }

  async order(name) {
    try {
      await ask(`${this.path}/${name}`, { method: "POST" });
      if (name === "resume") location.reload();
    } catch (error) {
      byId("error").textContent = error.message;
    }
  }

  listen() {
    const stream = new EventSource(`${this.path}/events`);
    const on = (kind, take) =>
      stream.addEventListener(kind, (event) => take(JSON.parse(event.data)));
    on("state", (found) => this.state(found));
    on("end", (found) => {
      stream.close();
      this.state(found);
      byId("now").textContent = "";
    });
    on("StudyStarted", (found) => {
      this.budget = found.budget;
      byId("head").textContent =
        `${found.devices} x ${found.hardware.name}, budget ${size(found.budget)}, study ${found.study}`;
      byId("report").hidden = false;
    });
    on("TrialStarted", (found) => {
      byId("now").textContent = `Now: ${planText(found.plan)}`;
    });
    on("PhaseBegun", (found) => {
      const text = byId("now").textContent.split(" (")[0];
      byId("now").textContent = `${text} (${found.phase})`;
    });
    on("TrialEnded", (found) => this.trial(found));
    on("Line", (found) => this.line(found.text));
    on("NewOutput", (found) => this.output(found));
    on("Remeasuring", (found) => this.line(`confirming in a fresh process: ${planText(found.plan)}`));
    on("Confirmed", (found) => this.line(`confirmed: ${planText(found.plan)}`));
  }

  state(found) {
    const shown = byId("state");
    shown.className = `state ${found.state}`;
    shown.textContent = found.state + (found.waits_for ? `: waits for ${found.waits_for}` : "");
    byId("error").textContent = found.error ? found.error.message : "";
    byId("traceback").textContent = found.error ? found.error.traceback : "";
    byId("traceback").hidden = !byId("traceback").textContent;
    document.querySelector('[data-order="cancel"]').hidden = found.ended !== null;
    const resumable = found.state === "failed" || found.state === "cancelled";
    document.querySelector('[data-order="resume"]').hidden = !resumable;
    if (document.activeElement.hidden) shown.focus();
  }

  /* Shows the last lines of a script, and follows them unless the reader has scrolled up. */
  output(found) {
    const id = `output-${found.slot}`;
    if (!byId(id)) {
      const [title, text] = [document.createElement("h2"), document.createElement("pre")];
      title.textContent = found.slot ? `Output, slot ${found.slot}` : "Output";
      Object.assign(text, { id, tabIndex: 0, role: "region", ariaLabel: title.textContent });
      byId("output").append(title, text);
    }
    const text = byId(id);
    const follows = text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
    text.textContent = found.text;
    if (follows) text.scrollTop = text.scrollHeight;
  }

  line(text) {
    const item = document.createElement("li");
    item.textContent = text;
    byId("lines").append(item);
  }

  trial(found) {
    const { report } = found;
    const measured = report.verdict === "measured" ? report.measurements.at(-1) : null;
    if (found.best) for (const each of this.trials.values()) each.best = false;
    this.trials.set(found.number, {
      plan: planText(report.best ?? report.plan),
      rate: measured ? measured.effective_batch / median(measured.step_seconds) : null,
      peak: measured ? measured.peak_device : null,
      verdict: found.best ? "best" : report.verdict.replaceAll("_", " "),
      reason: report.reason,
      best: found.best,
    });
    this.table();
    this.plot();
  }

  table() {
    const rows = [...this.trials].map(([number, trial]) => {
      const row = document.createElement("tr");
      row.className = trial.best ? "best" : "";
      const rate = trial.rate === null ? "-" : trial.rate.toPrecision(3);
      const peak = trial.peak === null ? "-" : size(trial.peak);
      const verdict = trial.best ? "best" : trial.verdict === "best" ? "measured" : trial.verdict;
      const why = trial.reason ? `${verdict}: ${trial.reason}` : verdict;
      [number, trial.plan, rate, peak, why].forEach((text, column) => {
        const cell = row.insertCell();
        cell.textContent = text;
        cell.dataset.title = byId("trials").tHead.rows[0].cells[column].textContent;
      });
      return row;
    });
    byId("trials").hidden = false;
    byId("trials").tBodies[0].replaceChildren(...rows);
  }

  plot() {
    const points = [...this.trials].filter(([, trial]) => trial.rate !== null);
    if (!points.length) return;
    const svg = byId("plot");
    const [left, right, top, bottom] = [60, 620, 15, 215];
    const fastest = Math.max(...points.map(([, trial]) => trial.rate)) * 1.1;
    const most = Math.max(this.budget, ...points.map(([, trial]) => trial.peak));
    const x = (peak) => left + ((right - left) * peak) / most;
    const y = (rate) => bottom - ((bottom - top) * rate) / fastest;
    const make = (name, values, text) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(values)) node.setAttribute(key, value);
      if (text !== undefined) node.textContent = text;
      return node;
    };
    const marks = points.map(([number, trial]) => {
      const [cx, cy, kind] = [x(trial.peak), y(trial.rate), trial.best ? "best" : "fits"];
      const circle = make("circle", { cx, cy, r: 6, class: kind });
      circle.append(make("title", {}, `${number}: ${trial.plan}`));
      return [circle, make("text", { x: cx + 9, y: cy + 4 }, number)];
    });
    svg.replaceChildren(
      make("line", { x1: left, x2: right, y1: bottom, y2: bottom }),
      make("line", { x1: left, x2: left, y1: top, y2: bottom }),
      make("text", { x: left - 8, y: top + 6, "text-anchor": "end" }, fastest.toPrecision(3)),
      make("text", { x: left - 8, y: bottom, "text-anchor": "end" }, "0"),
      make("text", { x: right, y: bottom + 18, "text-anchor": "end" }, size(most)),
      ...marks.flat(),
    );
    byId("figure").hidden = false;
    const [number, best] = points.find(([, trial]) => trial.best) ?? points[0];
    byId("caption").textContent =
      `Samples/s against peak memory of ${points.length} plans, by their numbers in the table.` +
      ` ${best.best ? "The best" : "The first"}, ${number}: ${best.rate.toPrecision(3)} samples/s in ${size(best.peak)}.`;
  }
}

if (byId("submit")) follow(byId("submit"));
if (byId("live")) setInterval(refresh, 5000);
if (byId("search")) new Search(byId("search"));
