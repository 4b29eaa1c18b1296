// Active jobs as a table, pictures as they grow and as they are.

import { request } from "./stream.js";
import { jobColor, make, now, seconds, size, state, write } from "./state.js";

const MOST_ROWS = 60, MOST_PICTURES = 24, MOST_GROWING = 8;
const rows = new Map(), canceling = new Set(), mine = new Set();

export function markAsNew(id) {
  mine.add(id);
}

export function drawJobs() {
  const order = (job) => (job.running ? 0 : job.begun ? 1 : 2);
  const jobs = [...state.jobs.values()].sort(
    (a, b) => order(a) - order(b) || (a.place ?? 1e9) - (b.place ?? 1e9) || a.created - b.created,
  );
  const shown = jobs.slice(0, MOST_ROWS), body = document.querySelector("#jobs tbody");
  const ids = new Set(shown.map((job) => job.id));
  for (const [id, row] of rows) {
    if (ids.has(id)) continue;
    row.element.remove();
    rows.delete(id);
    canceling.delete(id);
  }
  shown.forEach((job, place) => {
    const row = rows.get(job.id) ?? newRow(job);
    update(row, job);
    if (body.children[place] !== row.element) body.insertBefore(row.element, body.children[place] ?? null);
  });
  document.getElementById("jobs").hidden = jobs.length === 0;
  document.getElementById("jobs-none").hidden = jobs.length > 0;
  const hidden = (state.pool.active ?? jobs.length) - shown.length;
  const running = jobs.filter((job) => job.running).length;
  const said = `${running} run, ${jobs.length - running} wait${hidden > 2 ? `, and ${hidden} more` : ""}`;
  write(document.getElementById("jobs-said"), jobs.length ? said : "");
}

function newRow(job) {
  const element = make("tr", mine.has(job.id) ? "new" : ""), thumb = make("span", "thumb"), image = make("img");
  image.alt = "";
  image.hidden = true;
  thumb.append(image);
  const cells = Array.from({ length: 8 }, () => make("td"));
  const stage = make("span", "stage"), meter = make("span", "meter"), filled = make("i"), steps = make("span");
  const button = make("button", "", "cancel");
  button.type = "button";
  button.setAttribute("aria-label", `cancel ${job.prompt || job.id}`);
  button.addEventListener("click", () => cancel(job.id, button));
  meter.append(filled);
  cells[0].append(thumb);
  cells[1].textContent = job.prompt || job.id;
  cells[1].title = `${job.prompt}\n${job.id}`;
  cells[2].textContent = size(job);
  cells[3].append(stage);
  cells[4].append(meter, steps);
  cells[7].append(button);
  element.append(...cells);
  element.dataset.job = job.id;
  const row = { element, image, stage, filled, steps, slack: cells[5], due: cells[6], button };
  rows.set(job.id, row);
  return row;
}

function update(row, job) {
  row.element.style.setProperty("--job", jobColor(job.id));
  const preview = state.previews.get(job.id);
  if (preview) {
    show(row.image, preview);
    row.image.hidden = false;
  }
  write(row.stage, job.running ? job.stage : job.place === null ? "waits" : `waits, ${ordinal(job.place + 1)}`);
  row.stage.title = job.running ? `runs ${job.stage}` : `waits for ${job.stage}`;
  row.stage.classList.toggle("on", job.running);
  row.filled.style.width = `${(100 * job.step) / Math.max(1, job.steps)}%`;
  write(row.steps, `${job.step}/${job.steps}`);
  write(row.slack, job.slack === null ? "–" : seconds(job.slack));
  row.slack.classList.toggle("is-late", job.slack !== null && job.slack < 0);
  const left = job.deadline === null ? null : job.deadline - now();
  write(row.due, left === null ? "–" : left < 0 ? `${seconds(-left)} ago` : `in ${seconds(left)}`);
  row.due.classList.toggle("is-late", left !== null && left < 0);
  row.button.disabled = canceling.has(job.id);
  write(row.button, canceling.has(job.id) ? "canceling" : "cancel");
}

function ordinal(n) {
  const ending = n % 100 > 10 && n % 100 < 14 ? "th" : ["th", "st", "nd", "rd"][n % 10] ?? "th";
  return n + ending;
}

async function cancel(id, button) {
  canceling.add(id);
  button.disabled = true;
  const answer = await request(`/v1/jobs/${encodeURIComponent(id)}`, { method: "DELETE" }).catch(() => null);
  if (!answer?.ok) canceling.delete(id);
}

// -- pictures ---------------------------------------------------------------------------------

const figures = new Map();

export function drawPictures() {
  const host = document.getElementById("pictures");
  const growing = [...state.previews.keys()].map((id) => state.jobs.get(id)).filter(Boolean)
    .sort((a, b) => b.running - a.running || b.step / b.steps - a.step / a.steps).slice(0, MOST_GROWING);
  const ended = state.ended.filter((job) => job.status !== "canceled").slice(-MOST_PICTURES).reverse();
  const wanted = [];
  for (const job of growing) wanted.push([`growing ${job.id}`, () => newGrowing(job), (one) => grow(one, job)]);
  for (const job of ended) {
    const pictures = job.pictures.length ? job.pictures : [null];
    pictures.forEach((url, n) => wanted.push([`${job.id} ${n}`, () => newPicture(job, url, n)]));
  }
  const shown = wanted.slice(0, MOST_PICTURES), names = new Set(shown.map(([name]) => name));
  for (const [name, one] of figures) {
    if (names.has(name)) continue;
    one.element.remove();
    figures.delete(name);
  }
  shown.forEach(([name, fresh, act], place) => {
    const one = figures.get(name) ?? fresh();
    figures.set(name, one);
    act?.(one);
    if (host.children[place] !== one.element) host.insertBefore(one.element, host.children[place] ?? null);
  });
  document.getElementById("pictures-none").hidden = shown.length > 0;
}

function newFigure(job, inside, facts) {
  const element = make("figure"), caption = make("figcaption");
  element.style.setProperty("--job", jobColor(job.id));
  element.dataset.job = job.id;
  const said = make("span", "facts", facts);
  caption.append(make("span", "prompt", job.prompt || job.id), said);
  caption.title = `${job.prompt}\n${job.id}`;
  element.append(inside, caption);
  return { element, said };
}

function newGrowing(job) {
  const frame = make("div", "frame growing"), image = make("img"), track = make("span", "grow"), filled = make("i");
  image.alt = `what ${job.prompt || job.id} has come to`;
  track.append(filled);
  frame.append(image, track);
  return { ...newFigure(job, frame, ""), image, filled };
}

function grow(one, job) {
  show(one.image, state.previews.get(job.id));
  one.filled.style.width = `${(100 * job.step) / Math.max(1, job.steps)}%`;
  write(one.said, `${size(job)} · step ${job.step} of ${job.steps}`);
}

function newPicture(job, url, n) {
  const late = job.on_time === false, facts = [size(job), job.on_time === null ? "" : late ? "late" : "on time"];
  if (job.finished && job.created) facts.push(seconds(job.finished - job.created));
  let inside;
  if (url) {
    inside = make("a", "frame");
    inside.href = url;
    inside.target = "_blank";
    inside.rel = "noopener";
    const image = make("img");
    image.src = url;
    image.alt = job.prompt || job.id;
    image.decoding = "async";
    inside.append(image);
  } else {
    inside = make("div", "frame");
    const done = job.status === "succeeded";
    inside.append(make("span", done ? "why" : "why is-late", done ? "no picture to show" : `${job.status}: ${job.error}`));
  }
  const figure = newFigure(job, inside, facts.filter(Boolean).join(" · "));
  figure.said.classList.toggle("is-late", late);
  return figure;
}

function show(image, preview) {
  const source = `data:image/webp;base64,${preview.image}`;
  if (image.src !== source) image.src = source;
}
