"use strict";
// What the page was made of, and what its charts share: the view in time, the colors, the mark.

const data = JSON.parse(document.getElementById("data").textContent);
const ENDS = ["done", "error", "refused", "returned", "member"];
const DONE = 0, MEMBER = 4;
const COUNTED = new Set(["succeeded", "failed", "expired"]); // a cancel is nobody's fault

// An id that a client drew at random says little beyond its beginning.
function short(id) {
  return /^[0-9a-f]{32}$/.test(id) ? id.slice(0, 8) : id;
}

for (const run of data.runs) {
  run.jobs = run.jobs.map(([id, cls, arrival, deadline, started, finished, status, steps, missed, size]) =>
    ({ id, name: short(id), cls, arrival, deadline, started, finished, status, steps, missed, size, counted: COUNTED.has(status) }));
  run.lanes = run.ranks.map(([name, label, stage]) => ({ name, label, stage, bars: [] }));
  for (const [rank, begin, end, seq, asked, rows] of run.bars) {
    run.lanes[rank].bars.push({
      begin, end, seq, asked,
      rows: rows.map(([job, start, stop, planned, slack, end]) => ({ job, start, stop, planned, slack, end })),
    });
  }
}

// The part of time that every chart shows, in seconds from the begin.
const view = { from: data.window[0], to: data.window[1] };
// `hovered` and `kept` are ids of jobs: the same job in every chart.
const mark = { hovered: null, kept: null, by: "class" };

const systemDark = matchMedia("(prefers-color-scheme: dark)");

function dark() {
  const set = document.documentElement.dataset.theme;
  return set ? set === "dark" : systemDark.matches;
}

function shade(pair) {
  return pair[dark() ? 1 : 0];
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function colorOf(run, row) {
  if (row.end !== DONE && row.end !== MEMBER) return shade(data.refused);
  if (mark.by === "job") return shade(data.series[row.job % data.series.length]);
  const job = run.jobs[row.job];
  return job && job.cls >= 0 ? shade(data.classes[job.cls][1]) : shade(data.refused);
}

function seconds(value) {
  const sign = value < 0 ? "−" : "", size = Math.abs(value);
  return sign + (size < 10 ? size.toFixed(2) : size < 1000 ? size.toFixed(1) : size.toFixed(0)) + " s";
}

// Round distances for about `count` lines over `span`.
function step(span, count) {
  const raw = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((times) => times * power >= raw);
}

function timeLabel(at, every) {
  if (data.epoch === null) {
    const digits = Math.max(0, -Math.floor(Math.log10(every)));
    return (at + data.zero).toFixed(digits) + " s";
  }
  const date = new Date(1000 * (data.epoch + at));
  const text = date.toTimeString().slice(0, 8);
  return every < 1 ? text + "." + String(date.getMilliseconds()).padStart(3, "0") : text;
}

// A canvas as sharp as the screen; lengths are CSS pixels.
function prepare(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return [pen, width];
}
