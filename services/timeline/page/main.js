// Puts the page together: charts, legend, tooltip, and what moves the view.

const charts = data.runs.map((run) => new Gantt(run, document.getElementById("charts")));
const overview = new Overview(document.getElementById("overview"));
const tip = document.getElementById("tip");
const SHORTEST_S = 0.02;

let waiting = false;

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const chart of charts) chart.draw();
    overview.draw();
  });
}

function everything() {
  drawLegend();
  drawCurves(document.getElementById("curves"));
  redraw();
}

// -- the view -------------------------------------------------------------------------------

function look(from, to) {
  const length = Math.min(Math.max(to - from, SHORTEST_S), data.length);
  view.from = Math.min(Math.max(0, from), data.length - length);
  view.to = view.from + length;
  redraw();
}

function zoom(times, around = (view.from + view.to) / 2) {
  look(around - (around - view.from) * times, around + (view.to - around) * times);
}

function lookAtJob(run, job) {
  const found = run.jobs[job];
  if (!found || found.cls < 0) return;
  const end = Math.max(found.finished ?? data.length, found.deadline), margin = 0.1 * (end - found.arrival);
  look(found.arrival - margin, end + margin);
}

function moves(chart) {
  const canvas = chart.canvas;
  let from = null, moved = false;
  canvas.addEventListener("pointerdown", (event) => {
    from = { x: event.offsetX, view: { ...view } };
    moved = false;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (from === null) return hover(chart, event);
    if (Math.abs(event.offsetX - from.x) < 4 && !moved) return;
    moved = true;
    canvas.classList.add("moving");
    hideTip();
    const by = ((event.offsetX - from.x) / (chart.width - GUTTER)) * (from.view.to - from.view.from);
    look(from.view.from - by, from.view.to - by);
  });
  const release = () => { from = null; canvas.classList.remove("moving"); };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("click", (event) => {
    if (moved) return;
    const found = chart.find(event.offsetX, event.offsetY);
    const id = found ? idOf(chart.run, found.row) : null;
    mark.kept = id === mark.kept ? null : id;
    redraw();
  });
  canvas.addEventListener("dblclick", (event) => {
    const found = chart.find(event.offsetX, event.offsetY);
    if (found) lookAtJob(chart.run, found.row.job);
    else zoom(0.5, chart.time(event.offsetX));
  });
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY / 300), chart.time(event.offsetX));
    else if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) {
      const by = (sideways / (chart.width - GUTTER)) * (view.to - view.from);
      look(view.from + by, view.to + by);
    } else return; // the page scrolls
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("pointerleave", () => { mark.hovered = null; hideTip(); redraw(); });
  canvas.addEventListener("keydown", keys);
}

function keys(event) {
  const by = (view.to - view.from) / 5;
  const acts = {
    ArrowLeft: () => look(view.from - by, view.to - by), ArrowRight: () => look(view.from + by, view.to + by),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => look(0, data.length),
    Escape: () => { mark.kept = null; redraw(); },
  };
  if (!acts[event.key]) return;
  event.preventDefault();
  acts[event.key]();
}

function overviewMoves() {
  const canvas = overview.canvas;
  const centre = (event) => {
    const half = (view.to - view.from) / 2, at = overview.time(event.offsetX);
    look(at - half, at + half);
  };
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); centre(event); });
  canvas.addEventListener("pointermove", (event) => { if (event.buttons) centre(event); });
  canvas.addEventListener("keydown", keys);
}

// -- the tooltip ----------------------------------------------------------------------------

function idOf(run, row) {
  return run.jobs[row.job].id;
}

function hover(chart, event) {
  const found = chart.find(event.offsetX, event.offsetY);
  const id = found ? idOf(chart.run, found.row) : null;
  if (id !== mark.hovered) {
    mark.hovered = id;
    redraw();
  }
  if (found) showTip(event, id, describe(chart.run, found));
  else hideTip();
}

function describe(run, { lane, bar, row }) {
  const job = run.jobs[row.job], facts = [];
  facts.push(["rank", lane.label === lane.name ? lane.name : `${lane.label} (${lane.name})`]);
  if (job.cls >= 0) facts.push(["class", data.classes[job.cls][0] + (job.size && job.size !== data.classes[job.cls][0] ? `, ${job.size}` : "")]);
  if (lane.stage === "denoise") {
    facts.push(["steps", `${row.start}–${row.stop} of ${job.steps || "?"}` +
      (row.stop < row.planned ? (bar.asked ? `, yielded (planned to ${row.planned})` : `, planned to ${row.planned}`) : "")]);
  }
  facts.push(["ran", `${timeLabel(bar.begin, 0.001)}, for ${seconds(bar.end - bar.begin)}`]);
  if (row.slack !== null) facts.push(["slack", seconds(row.slack)]);
  if (job.cls >= 0) {
    const left = job.finished === null ? null : job.deadline - job.finished;
    facts.push(["deadline", timeLabel(job.deadline, 0.001) + (left === null ? "" : left < 0 ? `, missed by ${seconds(-left)}` : `, made by ${seconds(left)}`),
      null, job.missed]);
    facts.push(["job", job.finished === null ? job.status : `${job.status} ${seconds(job.finished - job.arrival)} after it came`]);
  }
  if (ENDS[row.end] !== "done") facts.push(["ended as", ENDS[row.end]]);
  if (bar.seq) facts.push(["seq", String(bar.seq)]);
  return facts;
}

// `facts`: [name, text, color or null, whether it is bad news].
function showTip(event, title, facts) {
  const head = document.createElement("b"), list = document.createElement("dl");
  head.textContent = title;
  for (const [name, text, color, missed] of facts) {
    const term = document.createElement("dt"), said = document.createElement("dd");
    if (color) {
      const swatch = document.createElement("i");
      swatch.style.background = color;
      term.append(swatch);
    }
    term.append(name);
    said.textContent = text;
    if (missed) said.className = "missed";
    list.append(term, said);
  }
  tip.replaceChildren(head, list);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
}

function hideTip() {
  tip.hidden = true;
}

// -- the rest -------------------------------------------------------------------------------

function drawLegend() {
  const legend = document.getElementById("legend");
  const entry = (text, color, kind = "") => {
    const item = document.createElement("span"), swatch = document.createElement("i");
    if (kind) swatch.className = kind;
    else swatch.style.background = color;
    item.append(swatch, text);
    return item;
  };
  legend.replaceChildren();
  if (mark.by === "class") legend.append(...data.classes.map(([name, pair]) => entry(name, shade(pair))));
  else legend.append("a color a job, in turn");
  legend.append(entry("past its deadline", "", "late"));
  if (data.runs.some((run) => run.lanes.some((lane) => lane.bars.some((bar) => bar.rows.some((row) => row.end === 1 || row.end === 2))))) {
    legend.append(entry("counted for nobody", shade(data.refused)));
  }
  if (data.runs.length > 1) {
    legend.append("curves:", ...data.runs.map((run) => entry(run.name, shade(run.color))));
  }
}

for (const button of document.querySelectorAll("[data-by]")) {
  button.addEventListener("click", () => {
    mark.by = button.dataset.by;
    for (const other of document.querySelectorAll("[data-by]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    everything();
  });
}
for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => {
    if (button.dataset.zoom === "all") look(0, data.length);
    else zoom(Number(button.dataset.zoom));
  });
}
document.querySelector("[data-theme-toggle]").addEventListener("click", () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  everything();
});
systemDark.addEventListener("change", everything);
addEventListener("resize", redraw);
charts.forEach(moves);
overviewMoves();
everything();
