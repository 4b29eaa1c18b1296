// Latency curves, a small chart a class, a line a run; and the jobs in the system over time.

const CURVE = { width: 300, height: 170, left: 34, right: 8, top: 8, bottom: 22 };

function svg(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

// Sorted latencies of the jobs of a class that ended well, and how many jobs there were.
function latencies(run, cls) {
  const jobs = run.jobs.filter((job) => (cls === null || job.cls === cls) && job.counted);
  const ended = jobs.filter((job) => job.status === "succeeded").map((job) => job.finished - job.arrival);
  return { ended: ended.sort((a, b) => a - b), of: jobs.length };
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[sorted.length >> 1];
}

function drawCurves(host) {
  host.replaceChildren();
  const names = data.classes.map(([name], place) => [name, place]);
  if (names.length > 1) names.unshift(["all", null]);
  for (const [name, cls] of names) {
    const lines = data.runs.map((run) => latencies(run, cls));
    const most = Math.max(...lines.map((line) => line.ended.at(-1) ?? 0));
    if (most > 0) host.append(curve(name, cls, lines, most));
  }
}

function curve(name, cls, lines, most) {
  const { width, height, left, right, top, bottom } = CURVE;
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  const title = document.createElement("b");
  title.textContent = name;
  caption.append(title);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `latency of ${name}` });
  const x = (value) => left + (value / most) * (width - left - right);
  const y = (share) => height - bottom - share * (height - top - bottom);
  for (const share of [0, 0.5, 1]) {
    svg("line", { class: "grid", x1: left, x2: width - right, y1: y(share), y2: y(share) }, chart);
    svg("text", { x: left - 5, y: y(share) + 3.5, "text-anchor": "end" }, chart).textContent = `${100 * share} %`;
  }
  const every = step(most, 4);
  for (let at = 0; at <= most; at += every) {
    svg("text", { x: x(at), y: height - 7, "text-anchor": "middle" }, chart).textContent = `${+at.toPrecision(6)} s`;
  }
  if (cls !== null) {
    const due = median(data.runs[0].jobs.filter((job) => job.cls === cls).map((job) => job.deadline - job.arrival));
    if (due <= most) svg("line", { class: "due", x1: x(due), x2: x(due), y1: y(0), y2: y(1) }, chart);
  }
  lines.forEach(({ ended, of }, place) => {
    let path = `M${x(0)} ${y(0)}`;
    ended.forEach((value, i) => { path += `H${x(value).toFixed(1)}V${y((i + 1) / of).toFixed(1)}`; });
    path += `H${x(most)}`;
    svg("path", { class: "curve", d: path, stroke: shade(data.runs[place].color) }, chart);
  });
  const cross = svg("line", { class: "cross", y1: y(0), y2: y(1), visibility: "hidden" }, chart);
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const at = (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * most;
    if (at < 0 || at > most) return hideTip();
    for (const end of ["x1", "x2"]) cross.setAttribute(end, x(at));
    cross.setAttribute("visibility", "visible");
    showTip(event, `${name}: within ${seconds(at)}`, lines.map(({ ended, of }, place) => [
      data.runs[place].name, `${((100 * first(ended.map((end) => ({ end })), at)) / Math.max(1, of)).toFixed(1)} %`,
      shade(data.runs[place].color)]));
  });
  chart.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
  figure.append(caption, chart);
  return figure;
}

// How many jobs had arrived and not ended, as steps [time, count].
function inSystem(run) {
  const changes = [];
  for (const job of run.jobs) {
    if (job.cls < 0) continue;
    changes.push([job.arrival, 1]);
    if (job.finished !== null) changes.push([job.finished, -1]);
  }
  changes.sort((a, b) => a[0] - b[0]);
  let count = 0;
  return changes.map(([at, change]) => [at, (count += change)]);
}

class Overview {
  constructor(canvas) {
    this.canvas = canvas;
    this.lines = data.runs.map(inSystem);
    this.most = Math.max(1, ...this.lines.flatMap((line) => line.map(([, count]) => count)));
  }

  x(at) {
    return GUTTER + (at / data.length) * (this.width - GUTTER);
  }

  time(x) {
    return ((x - GUTTER) / (this.width - GUTTER)) * data.length;
  }

  draw() {
    const height = 64;
    [this.pen, this.width] = prepare(this.canvas, height);
    const pen = this.pen, y = (count) => height - 3 - (count / this.most) * (height - 8);
    pen.fillStyle = css("--line");
    pen.fillRect(this.x(view.from), 0, Math.max(2, this.x(view.to) - this.x(view.from)), height);
    this.lines.forEach((line, place) => {
      pen.strokeStyle = shade(data.runs[place].color);
      pen.lineWidth = 1.5;
      pen.beginPath();
      pen.moveTo(this.x(0), y(0));
      let before = 0;
      for (const [at, count] of line) {
        const x = this.x(Math.max(0, at));
        pen.lineTo(x, y(before));
        pen.lineTo(x, y(count));
        before = count;
      }
      pen.lineTo(this.x(data.length), y(before));
      pen.stroke();
    });
    pen.font = FONT;
    pen.fillStyle = css("--muted");
    pen.textAlign = "right";
    pen.fillText(String(this.most), GUTTER - 8, 10);
    pen.fillText("0", GUTTER - 8, height - 4);
  }
}
