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

/* The queue and the GPUs. */

async function refresh() {
  try {
    const answer = await fetch(location.href);
    const text = await answer.text();
    const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("queue-and-gpus");
    if (answer.ok && fresh) byId("queue-and-gpus").replaceWith(fresh);
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
    on("Remeasuring", (found) => this.line(`confirming in a fresh process: ${planText(found.plan)}`));
    on("Confirmed", (found) => this.line(`confirmed: ${planText(found.plan)}`));
  }

  state(found) {
    const shown = byId("state");
    shown.className = `state ${found.state}`;
    shown.textContent = found.state + (found.waits_for ? `: waits for ${found.waits_for}` : "");
    byId("error").textContent = found.error ? found.error.message : "";
    document.querySelector('[data-order="cancel"]').hidden = found.ended !== null;
    const resumable = found.state === "failed" || found.state === "cancelled";
    document.querySelector('[data-order="resume"]').hidden = !resumable;
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
      [number, trial.plan, rate, peak, verdict].forEach((text, column) => {
        const cell = row.insertCell();
        cell.textContent = text;
        cell.dataset.title = byId("trials").tHead.rows[0].cells[column].textContent;
      });
      row.title = trial.reason;
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
      const circle = make("circle", { cx: x(trial.peak), cy: y(trial.rate), r: 6 });
      if (trial.best) circle.setAttribute("class", "best");
      circle.append(make("title", {}, `${number}: ${trial.plan}`));
      return circle;
    });
    svg.replaceChildren(
      make("line", { x1: left, x2: right, y1: bottom, y2: bottom }),
      make("line", { x1: left, x2: left, y1: top, y2: bottom }),
      make("text", { x: left - 8, y: top + 6, "text-anchor": "end" }, fastest.toPrecision(3)),
      make("text", { x: left - 8, y: bottom, "text-anchor": "end" }, "0"),
      make("text", { x: right, y: bottom + 18, "text-anchor": "end" }, size(most)),
      make("text", { x: left, y: bottom + 36 }, "samples/s against peak memory"),
      ...marks,
    );
    svg.removeAttribute("hidden"); // SVG elements have no property `hidden`
  }
}

if (byId("submit")) follow(byId("submit"));
if (byId("queue-and-gpus")) setInterval(refresh, 5000);
if (byId("search")) new Search(byId("search"));
