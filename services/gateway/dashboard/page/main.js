// Puts the page together: the stream, the theme, the key, and when to draw.

import { Gantt } from "./gantt.js";
import { drawJobs, drawPictures } from "./jobs.js";
import { drawPanels } from "./panels.js";
import { isDark, onTheme, state, take } from "./state.js";
import { follow, hasKey, keepKey } from "./stream.js";
import { loadModels } from "./submit.js";

const EVENTS = "/dashboard/events", THEME = "slackwater-theme";
// The chart flows; more often than this nobody sees a difference that is worth the battery.
const DRAW_MS = 100;
const element = (id) => document.getElementById(id);
const gantt = new Gantt(element("gantt"), element("tip"));
let live = false;

function standing(kind, text) {
  element("standing").dataset.state = kind;
  element("standing").querySelector("span").textContent = text;
  live = kind === "live";
}

function on(event, data) {
  if (event === "locked") return locked();
  if (event === "lost") return standing("away", "the gateway does not answer");
  if (event === "away") return standing("away", "Redis does not answer");
  take(event, data);
  standing("live", "live");
  document.querySelector("main").hidden = false;
  element("key").hidden = true;
  element("forget-key").hidden = !hasKey();
  if (event === "snapshot") loadModels();
  everything();
}

function everything() {
  const { pool, ranks } = state, here = ranks.filter((rank) => !rank.gone).length;
  const facts = [`${here} workers`, `${pool.active} active jobs`];
  if (pool.policy) facts.unshift(`policy ${pool.policy}`);
  element("said").textContent = pool.leads ? facts.join(" · ") : "no coordinator leads";
  drawPanels();
  drawJobs();
  drawPictures();
  gantt.draw();
}

// -- the key ----------------------------------------------------------------------------------

function locked() {
  const wrong = hasKey();
  keepKey(null);
  standing("locked", "locked");
  element("said").textContent = "";
  document.querySelector("main").hidden = true;
  element("forget-key").hidden = true;
  element("key").hidden = false;
  element("key").querySelector(".wrong").textContent = wrong ? "This key is not known here." : "";
  element("key-text").focus();
}

element("key").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(element("key-text").value.trim());
  element("key-text").value = "";
  standing("", "connecting");
  follow(EVENTS, on);
});
element("forget-key").addEventListener("click", () => {
  keepKey(null);
  location.reload();
});

// -- light and dark ---------------------------------------------------------------------------

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  if (live) everything();
}

theme(localStorage.getItem(THEME));
onTheme(() => theme(null));
element("theme").addEventListener("click", () => {
  const name = isDark() ? "light" : "dark";
  localStorage.setItem(THEME, name);
  theme(name);
});

// -- drawing ----------------------------------------------------------------------------------

const still = matchMedia("(prefers-reduced-motion: reduce)");
setInterval(() => {
  if (live && !document.hidden && !still.matches) requestAnimationFrame(() => gantt.draw());
}, DRAW_MS);
addEventListener("resize", () => live && gantt.draw());
follow(EVENTS, on);
