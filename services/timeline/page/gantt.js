// A chart of one run: arrivals, a lane a rank, the time axis. Only what is in view is drawn.

const GUTTER = 86, ARRIVALS = 16, AXIS = 20, FONT = '11px system-ui, "DejaVu Sans", sans-serif';

class Gantt {
  constructor(run, host) {
    this.run = run;
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const name = document.createElement("b"), said = document.createElement("span");
    name.textContent = run.name;
    said.textContent = run.said;
    caption.append(name, said);
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("aria-label", `Gantt chart of ${run.name}: ${run.said}`);
    figure.append(caption, this.canvas);
    host.append(figure);
    const denoisers = run.lanes.filter((lane) => lane.stage === "denoise").length;
    const tall = denoisers <= 8 ? 34 : Math.max(7, Math.floor(280 / denoisers));
    let top = ARRIVALS;
    for (const lane of run.lanes) {
      lane.top = top;
      lane.height = lane.stage === "denoise" ? tall : Math.min(14, tall);
      top += lane.height + (lane.height > 10 ? 4 : 1);
    }
    this.bottom = top + 2;
  }

  x(at) {
    return GUTTER + ((at - view.from) / (view.to - view.from)) * (this.width - GUTTER);
  }

  time(x) {
    return view.from + ((x - GUTTER) / (this.width - GUTTER)) * (view.to - view.from);
  }

  draw() {
    [this.pen, this.width] = prepare(this.canvas, this.bottom + AXIS);
    const pen = this.pen;
    pen.font = FONT;
    pen.textBaseline = "middle";
    this.axis();
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, this.width - GUTTER, this.bottom);
    pen.clip();
    const marked = mark.hovered ?? mark.kept;
    const job = marked === null ? null : this.run.jobs.findIndex((found) => found.id === marked);
    this.arrivals(job);
    for (const lane of this.run.lanes) this.lane(lane, job);
    if (job !== null && job >= 0 && this.run.jobs[job].cls >= 0) this.marked(this.run.jobs[job]);
    pen.restore();
    this.labels();
  }

  axis() {
    const pen = this.pen, every = step(view.to - view.from, (this.width - GUTTER) / 110);
    pen.strokeStyle = css("--line");
    pen.fillStyle = css("--muted");
    pen.textAlign = "center";
    const offset = data.epoch ?? data.zero;
    for (let at = Math.ceil((view.from + offset) / every) * every - offset; at <= view.to; at += every) {
      const x = Math.round(this.x(at)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, ARRIVALS);
      pen.lineTo(x, this.bottom);
      pen.stroke();
      if (x < this.width - 20) pen.fillText(timeLabel(at, every), x, this.bottom + AXIS / 2 + 1);
    }
  }

  labels() {
    const pen = this.pen;
    pen.fillStyle = css("--muted");
    pen.textAlign = "right";
    pen.fillText("arrivals", GUTTER - 8, ARRIVALS / 2);
    for (const lane of this.run.lanes) {
      if (lane.height >= 9) pen.fillText(lane.label, GUTTER - 8, lane.top + lane.height / 2);
    }
  }

  arrivals(marked) {
    const pen = this.pen;
    this.run.jobs.forEach((job, place) => {
      if (job.cls < 0 || job.arrival < view.from || job.arrival > view.to) return;
      const x = this.x(job.arrival), big = place === marked ? 2 : 0;
      pen.globalAlpha = marked === null || place === marked ? 1 : 0.25;
      pen.fillStyle = colorOf(this.run, { job: place, end: DONE });
      pen.beginPath();
      pen.moveTo(x - 4 - big, 5 - big);
      pen.lineTo(x + 4 + big, 5 - big);
      pen.lineTo(x, 13);
      pen.fill();
    });
    pen.globalAlpha = 1;
  }

  lane(lane, marked) {
    const pen = this.pen, bars = lane.bars;
    const px = (view.to - view.from) / (this.width - GUTTER);
    let reached = -1; // no pixel is drawn on twice for bars narrower than one
    for (let i = first(bars, view.from); i < bars.length && bars[i].begin < view.to; i++) {
      const bar = bars[i], left = this.x(bar.begin), right = this.x(bar.end);
      const mine = marked !== null && bar.rows.some((row) => row.job === marked);
      if (right <= reached && !mine) continue;
      const gap = right - left > 5 ? 1 : 0;
      const width = Math.max(mine ? 2 : 1, right - left - gap);
      reached = left + width;
      const each = lane.height / bar.rows.length;
      bar.rows.forEach((row, place) => {
        pen.globalAlpha = marked === null || row.job === marked ? 1 : 0.22;
        pen.fillStyle = colorOf(this.run, row);
        pen.fillRect(left, lane.top + place * each, width, Math.max(1, each - (bar.rows.length > 1 && each > 3 ? 1 : 0)));
      });
      this.late(lane, bar, px);
    }
    pen.globalAlpha = 1;
    if (lane.height >= 14) this.texts(lane, marked);
    this.ends(lane, marked);
  }

  // What ran past its job's deadline is underlined.
  late(lane, bar, px) {
    for (const row of bar.rows) {
      const job = this.run.jobs[row.job];
      if (!job || !job.missed || bar.end <= job.deadline) continue;
      const left = this.x(Math.max(bar.begin, job.deadline)), thick = Math.min(3, lane.height / 3);
      this.pen.fillStyle = shade(data.late);
      this.pen.fillRect(left, lane.top + lane.height - thick, Math.max(1, (bar.end - Math.max(bar.begin, job.deadline)) / px), thick);
    }
  }

  // A job's id on each stretch of its bars that has room for it.
  texts(lane, marked) {
    const { bars } = lane;
    for (let i = first(bars, view.from), next; i < bars.length && bars[i].begin < view.to; i = next) {
      const { job } = bars[i].rows[0];
      next = i + 1;
      while (next < bars.length && bars[next].rows[0].job === job && bars[next].begin < view.to) next++;
      const left = Math.max(GUTTER, this.x(bars[i].begin)), right = this.x(bars[next - 1].end);
      if (right - left < 30 || bars[i].rows.length > 1 || (marked !== null && job !== marked)) continue;
      this.text(lane, bars[i].rows[0], bars[next - 1].rows[0].stop, left, right - left - 9);
    }
  }

  text(lane, row, stop, left, room) {
    const pen = this.pen, job = this.run.jobs[row.job];
    const steps = lane.stage === "denoise" ? `${row.start}–${stop}` : "";
    const text = [`${job.name}  ${steps}`, job.name, steps].find((words) => words && pen.measureText(words).width < room);
    if (!text) return;
    const ground = colorOf(this.run, row);
    pen.textAlign = "left";
    pen.lineWidth = 3;
    pen.strokeStyle = ground; // over the gaps between chunks
    pen.strokeText(text, left + 5, lane.top + lane.height / 2);
    pen.fillStyle = ink(ground);
    pen.fillText(text, left + 5, lane.top + lane.height / 2);
    pen.lineWidth = 1;
  }

  // A mark where a job that missed its deadline left this rank for good.
  ends(lane, marked) {
    if (lane.stage !== "denoise" || lane.height < 12) return;
    lane.last ??= lastBars(lane);
    const pen = this.pen;
    pen.fillStyle = shade(data.late);
    for (const [place, end] of lane.last) {
      const job = this.run.jobs[place];
      if (!job || !job.missed || end <= job.deadline || end < view.from || end > view.to) continue;
      pen.globalAlpha = marked === null || place === marked ? 1 : 0.25;
      const x = this.x(end);
      pen.beginPath();
      pen.moveTo(x - 4, lane.top - 3);
      pen.lineTo(x + 4, lane.top - 3);
      pen.lineTo(x, lane.top + 4);
      pen.fill();
    }
    pen.globalAlpha = 1;
  }

  // Arrival and deadline of the marked job, through all lanes.
  marked(job) {
    const pen = this.pen;
    for (const [at, color, dash] of [[job.arrival, css("--ink"), []], [job.deadline, shade(data.late), [4, 3]]]) {
      const x = Math.round(this.x(at)) + 0.5;
      pen.strokeStyle = color;
      pen.setLineDash(dash);
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, this.bottom);
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  // The row under a point, with its bar and lane; null where there is none.
  find(x, y) {
    const lane = this.run.lanes.find((one) => y >= one.top && y < one.top + one.height);
    if (!lane || x < GUTTER) return null;
    const at = this.time(x), reach = (2 * (view.to - view.from)) / (this.width - GUTTER);
    for (let i = first(lane.bars, at - reach); i < lane.bars.length && lane.bars[i].begin <= at + reach; i++) {
      const bar = lane.bars[i];
      if (bar.end >= at - reach && (bar.end >= at || !lane.bars[i + 1] || lane.bars[i + 1].begin > at)) {
        const place = Math.min(bar.rows.length - 1, Math.floor(((y - lane.top) / lane.height) * bar.rows.length));
        return { lane, bar, row: bar.rows[place] };
      }
    }
    return null;
  }
}

// The first bar that ends after `at`; bars of a lane do not overlap.
function first(bars, at) {
  let low = 0, high = bars.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (bars[middle].end < at) low = middle + 1;
    else high = middle;
  }
  return low;
}

function lastBars(lane) {
  const last = new Map();
  for (const bar of lane.bars) for (const row of bar.rows) if (row.end === DONE) last.set(row.job, bar.end);
  return last;
}

// Black or white, whichever reads better on a color.
function ink(color) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) / 255);
  return 0.299 * r + 0.587 * g + 0.114 * b > 0.58 ? "#161513" : "#ffffff";
}
