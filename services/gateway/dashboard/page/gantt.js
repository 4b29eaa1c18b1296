// The live chart: a lane a rank, the last minute up to now, and the deadlines ahead.

import { css, jobColor, make, now, seconds, state } from "./state.js";

const BACK_S = 60, AHEAD_S = 15, FLAGS = 20, AXIS = 20, FONT = '11px system-ui, "DejaVu Sans", sans-serif';
const STAGES = ["denoise", "encode", "decode"];

export class Gantt {
  constructor(canvas, tip) {
    Object.assign(this, { canvas, tip, pointer: null, marked: null });
    canvas.addEventListener("pointermove", (event) => { this.pointer = event; this.hover(); });
    canvas.addEventListener("pointerleave", () => { this.pointer = null; this.hover(); });
  }

  get gutter() {
    return this.width < 560 ? 64 : 86;
  }

  lanes() {
    const order = (rank) => [STAGES.indexOf(rank.stage), rank.number];
    const ranks = [...state.ranks].sort((a, b) => order(a)[0] - order(b)[0] || order(a)[1] - order(b)[1]);
    const denoisers = ranks.filter((rank) => rank.stage === "denoise").length;
    const tall = denoisers <= 8 ? 30 : Math.max(8, Math.floor(240 / denoisers));
    let top = FLAGS;
    return ranks.map((rank) => {
      const height = rank.stage === "denoise" ? tall : Math.min(14, tall);
      const lane = { rank, top, height };
      top += height + (height > 10 ? 5 : 2);
      return lane;
    });
  }

  draw() {
    this.at = now();
    const lanes = this.lanes(), last = lanes.at(-1);
    const bottom = last ? last.top + last.height + 4 : FLAGS + 30;
    this.prepare(bottom + AXIS);
    this.placed = [];
    this.axis(bottom);
    const pen = this.pen;
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, 0, this.width - this.gutter, bottom);
    pen.clip();
    const lane = new Map(lanes.map((one) => [one.rank.name, one]));
    for (const bar of state.bars) this.bar(lane.get(bar[0]), bar);
    for (const [rank, task] of Object.entries(state.running)) this.running(lane.get(rank), task);
    this.flags(bottom);
    pen.restore();
    this.names(lanes);
    this.line(this.x(this.at), FLAGS - 6, bottom, css("--muted"), []);
    if (!lanes.length) this.text("no worker is here", this.gutter + 12, FLAGS + 14, css("--muted"), "left");
  }

  prepare(height) {
    const ratio = devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    const [w, h] = [Math.round(this.width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w;
      this.canvas.height = h;
      this.canvas.style.height = `${height}px`;
    }
    this.pen = this.canvas.getContext("2d");
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.pen.clearRect(0, 0, this.width, height);
    this.pen.font = FONT;
    this.pen.textBaseline = "middle";
  }

  x(time) {
    return this.gutter + ((time - this.at + BACK_S) / (BACK_S + AHEAD_S)) * (this.width - this.gutter);
  }

  axis(bottom) {
    const every = this.width < 560 ? 20 : 10;
    for (let ago = -Math.floor(AHEAD_S / every) * every; ago <= BACK_S; ago += every) {
      const x = this.x(this.at - ago);
      this.line(x, FLAGS, bottom, css("--line"), []);
      const text = ago === 0 ? "now" : `${ago > 0 ? "−" : "+"}${Math.abs(ago)} s`;
      if (x > this.gutter + 14 && x < this.width - 14) this.text(text, x, bottom + AXIS / 2, css("--muted"), "center");
    }
  }

  names(lanes) {
    for (const { rank, top, height } of lanes) {
      if (height < 9) continue;
      const word = rank.hung ? "hangs" : rank.draining ? "drains" : "";
      const color = rank.hung ? css("--late") : css("--muted");
      this.pen.globalAlpha = rank.gone ? 0.45 : 1;
      this.text(`${rank.stage} ${rank.number}`, this.gutter - 10, top + height / 2 - (word ? 6 : 0), color, "right");
      if (word) this.text(word, this.gutter - 10, top + height / 2 + 7, color, "right");
    }
    this.pen.globalAlpha = 1;
  }

  bar(lane, [, stage, start, end, yielded, rows]) {
    if (!lane || end < this.at - BACK_S) return;
    rows.forEach(([job, from, to, slack, how], place) => {
      const counts = how === "done" || how === "member";
      this.block(lane, place, rows.length, start, end, job, counts ? 1 : 0.35);
      this.placed.push({ lane, place, rows: rows.length, start, end, job, stage, from, to, slack, how, yielded });
    });
  }

  running(lane, task) {
    if (!lane) return;
    task.jobs.forEach((job, place) => {
      this.block(lane, place, task.jobs.length, task.since, this.at, job, 0.6);
      this.placed.push({ lane, place, rows: task.jobs.length, start: task.since, end: this.at, job, stage: task.stage, how: "runs" });
    });
  }

  block(lane, place, rows, start, end, job, alpha) {
    const left = this.x(start), width = Math.max(1, this.x(end) - left - (this.x(end) - left > 4 ? 1 : 0));
    const each = lane.height / rows, pen = this.pen;
    pen.globalAlpha = this.marked === null || this.marked === job ? alpha : 0.15;
    pen.fillStyle = jobColor(job);
    pen.fillRect(left, lane.top + place * each, width, Math.max(1, each - (rows > 1 ? 1 : 0)));
    const due = deadline(job);
    if (due !== null && end > due) { // what ran after its deadline is underlined
      const from = this.x(Math.max(start, due));
      pen.fillStyle = css("--late");
      pen.fillRect(from, lane.top + (place + 1) * each - 3, Math.max(1, left + width - from), 3);
    }
    pen.globalAlpha = 1;
  }

  // A flag where each active job is due; the marked one's goes through all lanes.
  flags(bottom) {
    const pen = this.pen;
    for (const [id, job] of state.jobs) {
      if (job.deadline === null || job.deadline < this.at - BACK_S || job.deadline > this.at + AHEAD_S) continue;
      const x = this.x(job.deadline), late = job.deadline < this.at;
      pen.globalAlpha = this.marked === null || this.marked === id ? 1 : 0.2;
      pen.fillStyle = late ? css("--late") : jobColor(id);
      pen.beginPath();
      pen.moveTo(x, 4);
      pen.lineTo(x + 9, 8);
      pen.lineTo(x, 12);
      pen.fill();
      this.line(x, 4, FLAGS - 2, pen.fillStyle, []);
      this.placed.push({ flag: true, x, job: id });
      pen.globalAlpha = 1;
    }
    const due = this.marked === null ? null : deadline(this.marked);
    if (due !== null) this.line(this.x(due), 0, bottom, css("--late"), [4, 3]);
  }

  line(x, top, bottom, color, dash) {
    const pen = this.pen, at = Math.round(x) + 0.5;
    pen.strokeStyle = color;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(at, top);
    pen.lineTo(at, bottom);
    pen.stroke();
    pen.setLineDash([]);
  }

  text(words, x, y, color, align) {
    this.pen.fillStyle = color;
    this.pen.textAlign = align;
    this.pen.fillText(words, x, y);
  }

  // -- the pointer ----------------------------------------------------------------------------

  find(x, y) {
    return this.placed?.findLast((one) => {
      if (one.flag) return y < FLAGS && x >= one.x - 3 && x <= one.x + 10;
      const each = one.lane.height / one.rows, top = one.lane.top + one.place * each;
      return y >= top && y < top + each && x >= this.x(one.start) - 1 && x <= this.x(one.end) + 1;
    });
  }

  hover() {
    const found = this.pointer ? this.find(this.pointer.offsetX, this.pointer.offsetY) : null;
    this.marked = found?.job ?? null;
    this.tip.hidden = !found;
    if (found) this.tell(found);
    this.draw();
  }

  tell(found) {
    const job = state.jobs.get(found.job) ?? state.ended.findLast((one) => one.id === found.job);
    const said = [make("b", "", job?.prompt || found.job), make("span", "", found.job)];
    const fact = (text) => said.push(make("span", "", text));
    if (found.flag) fact(`due in ${seconds(job.deadline - this.at)}`);
    else if (found.how === "runs") fact(`runs for ${seconds(found.end - found.start)}`);
    else {
      if (found.stage === "denoise") fact(`steps ${found.from}–${found.to}${found.yielded ? ", made way" : ""}`);
      fact(`${found.stage}, ${seconds(found.end - found.start)}${found.how === "done" ? "" : `, ${found.how}`}`);
      if (found.slack !== null) fact(`slack ${seconds(found.slack)} as it was handed out`);
    }
    this.tip.replaceChildren(...said);
    const box = this.tip.getBoundingClientRect(), { clientX, clientY } = this.pointer;
    this.tip.style.left = `${Math.max(4, Math.min(clientX + 14, innerWidth - box.width - 8))}px`;
    this.tip.style.top = `${clientY + 18 + box.height > innerHeight ? clientY - box.height - 12 : clientY + 18}px`;
  }
}

function deadline(id) {
  const job = state.jobs.get(id) ?? ended().get(id);
  return job?.deadline ?? null;
}

let index = new Map(), indexed = null;

function ended() {
  const last = state.ended.at(-1);
  if (last !== indexed) {
    index = new Map(state.ended.map((job) => [job.id, job]));
    indexed = last;
  }
  return index;
}
