// The four small charts.

import { bytes, make, size, state } from "./state.js";

const STAGES = ["encode", "denoise", "decode"];
const MOST_CLASSES = 5;
// Borders between the columns of the histogram, seconds.
const BORDERS = [0, 1, 2, 5, 10, 30, 60];
const COUNTED = new Set(["succeeded", "failed", "expired"]); // a cancel is nobody's fault

export function drawPanels() {
  drawQueues(document.getElementById("queues"));
  drawShares(document.getElementById("shares"));
  drawSlack(document.getElementById("slack"));
  drawMemory(document.getElementById("memory"));
}

// `rows`: [label, [[class, share of the track], …], figure, title]
function bars(rows) {
  const grid = make("div", "bars");
  for (const [label, parts, figure, title] of rows) {
    const track = make("div", "track"), name = make("span", "label", label);
    name.title = title ?? label;
    for (const [kind, share] of parts) {
      const part = make("i", kind);
      part.style.width = `${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%`;
      track.append(part);
    }
    grid.append(name, track, make("span", "figure", figure));
  }
  return grid;
}

function drawQueues(host) {
  const rows = STAGES.map((stage) => {
    const jobs = [...state.jobs.values()].filter((job) => job.stage === stage);
    const running = jobs.filter((job) => job.running).length;
    return { stage, running, waiting: jobs.length - running };
  });
  const most = Math.max(4, ...rows.map((row) => row.running + row.waiting));
  const shown = state.jobs.size, all = state.pool.active ?? 0;
  host.replaceChildren(
    bars(rows.map((row) => [
      row.stage, [["running", row.running / most], ["waiting", row.waiting / most]],
      `${row.running} run, ${row.waiting} wait`,
    ])),
    make("p", "note", all > shown + 2 ? `${shown} of ${all} active jobs are looked at` : `${all} active jobs`),
  );
}

function drawShares(host) {
  const classes = new Map();
  const jobs = state.ended.filter((job) => COUNTED.has(job.status) && job.deadline !== null);
  for (const job of jobs) {
    const found = classes.get(size(job)) ?? { pixels: job.width * job.height, all: 0, met: 0 };
    found.all += 1;
    found.met += job.on_time === true ? 1 : 0;
    classes.set(size(job), found);
  }
  if (!jobs.length) return host.replaceChildren(make("p", "note", "No job with a deadline has ended yet."));
  const rows = [...classes].sort((a, b) => b[1].all - a[1].all).slice(0, MOST_CLASSES).sort((a, b) => a[1].pixels - b[1].pixels);
  const met = jobs.filter((job) => job.on_time === true).length;
  const row = (name, part) => [name, [["good", part.met / part.all], ["late", 1 - part.met / part.all]], `${percent(part)} of ${part.all}`];
  host.replaceChildren(
    bars([...rows.map(([name, part]) => row(name, part)), ...(rows.length > 1 ? [row("all", { met, all: jobs.length })] : [])]),
    make("p", "note", `by size; the last ${jobs.length} jobs that ended`),
  );
}

function percent({ met, all }) {
  return `${Math.floor((100 * met) / all)} %`;
}

function drawSlack(host) {
  const counts = Array(BORDERS.length + 1).fill(0);
  let known = 0;
  for (const job of state.jobs.values()) {
    if (job.slack === null) continue;
    known += 1;
    const place = BORDERS.findIndex((border) => job.slack < border);
    counts[place < 0 ? BORDERS.length : place] += 1;
  }
  const most = Math.max(4, ...counts), columns = make("div", "columns"), ticks = make("div", "ticks");
  counts.forEach((count, place) => {
    const column = make("div", place === 0 ? "late" : ""), bar = make("i");
    bar.style.height = `${((100 * count) / most) * 0.82}%`;
    column.append(make("span", "", count ? String(count) : ""), bar);
    columns.append(column);
    ticks.append(make("span", "", place === 0 ? "late" : place < BORDERS.length ? `<${BORDERS[place]}` : `${BORDERS.at(-1)}+`));
  });
  host.replaceChildren(columns, ticks, make("p", "note", `seconds to spare; ${known} active jobs`));
}

function drawMemory(host) {
  const { states = {}, arenas = {}, devices = {}, so_far = {} } = state.memory;
  const rows = [];
  for (const [name, { used, size: whole }] of Object.entries(arenas)) {
    rows.push([Object.keys(arenas).length > 1 ? `arena ${name}` : "arena", [["used", used / whole]], `${bytes(used)} of ${bytes(whole)}`, `arena of host ${name}`]);
  }
  for (const [name, { used, size: whole }] of Object.entries(devices)) {
    const rank = state.ranks.find((one) => one.name === name);
    rows.push([rank ? `${rank.stage} ${rank.number}` : name, [["used", used / whole]], `${bytes(used)} of ${bytes(whole)}`, `kept at hand by ${name}`]);
  }
  const inArena = states.arena ?? 0, spilled = states.redis ?? 0, most = Math.max(1, inArena, spilled);
  if (!rows.length) rows.push(["in the arena", [["used", inArena / most]], bytes(inArena)]);
  rows.push(["spilled", [["late", spilled / most]], bytes(spilled), "states of active jobs that lie in Redis"]);
  const resumed = (so_far.resumed_device ?? 0) + (so_far.resumed_read ?? 0);
  const notes = [`states of active jobs: ${bytes(Object.values(states).reduce((sum, one) => sum + one, 0))}`];
  if (resumed) notes.push(`${Math.floor((100 * so_far.resumed_device) / resumed)} % of chunks found theirs at hand`);
  host.replaceChildren(bars(rows), make("p", "note", notes.join("; ")));
}
