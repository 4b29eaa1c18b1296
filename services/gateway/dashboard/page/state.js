// What the page knows, and small things that every part of it needs.

export const state = {
  now: 0, pool: {}, ranks: [], running: {}, memory: {}, jobs: new Map(), previews: new Map(), bars: [], ended: [],
};
const HISTORY_S = 120, MOST_ENDED = 200, MOST_COLORS = 2000;
let behind_s = 0; // this computer's clock, seen from Redis'

export function now() {
  return Date.now() / 1000 + behind_s;
}

export function take(kind, news) {
  if (kind === "snapshot") {
    state.jobs.clear();
    state.previews.clear();
    state.bars = [];
    state.ended = [];
  }
  for (const part of ["now", "pool", "ranks", "running", "memory"]) if (part in news) state[part] = news[part];
  behind_s = news.now - Date.now() / 1000;
  merge(state.jobs, news.jobs);
  merge(state.previews, news.previews);
  state.bars.push(...(news.bars ?? []));
  const first = state.bars.findIndex((bar) => bar[3] > news.now - HISTORY_S);
  if (first > 0) state.bars.splice(0, first);
  state.ended.push(...(news.ended ?? []));
  state.ended.splice(0, state.ended.length - MOST_ENDED);
}

function merge(map, changes = {}) {
  for (const [id, fields] of Object.entries(changes)) {
    if (fields === null) map.delete(id);
    else map.set(id, { ...map.get(id), ...fields });
  }
}

// -- colors: a hue a job, in order of appearance; red is kept for what is late ----------------

const hues = new Map();
let given = 0;

function hue(id) {
  if (!hues.has(id)) {
    if (hues.size >= MOST_COLORS) hues.delete(hues.keys().next().value);
    hues.set(id, 60 + ((given++ * 137.508) % 290));
  }
  return hues.get(id);
}

export function jobColor(id) {
  return `oklch(${css("--job-l")} ${css("--job-c")} ${hue(id).toFixed(1)})`;
}

// -- light and dark ---------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
let styles = null;

export function css(name) {
  styles ??= getComputedStyle(document.documentElement);
  return styles.getPropertyValue(name).trim();
}

export function isDark() {
  const set = document.documentElement.dataset.theme;
  return set ? set === "dark" : dark.matches;
}

export function onTheme(act) {
  dark.addEventListener("change", act);
}

// -- words ------------------------------------------------------------------------------------

export function seconds(value) {
  const size = Math.abs(value), sign = value < 0 ? "−" : "";
  if (size < 10) return `${sign}${size.toFixed(1)} s`;
  if (size < 120) return `${sign}${size.toFixed(0)} s`;
  return size < 7200 ? `${sign}${(size / 60).toFixed(0)} min` : `${sign}${(size / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  for (; value >= 1000 && place < units.length - 1; place++) value /= 1000;
  return `${place && value < 10 ? value.toFixed(1) : value.toFixed(0)} ${units[place]}`;
}

export function size(job) {
  return job.width ? `${job.width}×${job.height}` : "–";
}

// An element with a class and text; text is never markup.
export function make(tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== "") element.textContent = text;
  return element;
}

// Text is only written where it changed, so that a selection or a click is not disturbed.
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
