// The form: what the model takes, as its manifest says; what the gateway answers, as it says it.

import { markAsNew } from "./jobs.js";
import { request } from "./stream.js";

const form = document.getElementById("submit"), said = document.getElementById("submit-said");
const TEXT = new Set(["prompt", "negative_prompt", "model", "on_late"]);
let models = [];

export async function loadModels() {
  const answer = await request("/v1/models").catch(() => null);
  if (!answer?.ok) return;
  models = (await answer.json()).data;
  const select = form.elements.model;
  select.replaceChildren(...models.map(({ id }) => new Option(id, id)));
  form.querySelector('[data-name="model"]').hidden = models.length < 2;
  fit();
}

// Bounds and defaults of the chosen model; what it does not take is not shown.
function fit() {
  const model = models.find(({ id }) => id === form.elements.model.value);
  if (!model) return;
  for (const label of form.querySelectorAll("[data-name]")) {
    const { name } = label.dataset, input = form.elements[name], takes = model.parameters[name];
    if (name === "model") continue;
    label.hidden = !takes;
    if (!takes || input.type !== "number") continue;
    input.min = takes.min ?? "";
    input.max = takes.max ?? "";
    input.step = takes.multiple_of ?? takes.step ?? (takes.type === "int" ? 1 : "any");
    if (!input.placeholder || input.dataset.set) {
      input.placeholder = takes.default ?? "";
      input.dataset.set = "1";
    }
  }
}

function body() {
  const found = {};
  for (const input of form.elements) {
    const { name, value } = input;
    if (!name || value === "" || input.closest("[hidden]")) continue;
    if (name === "due_s") found.slo_ms = 1000 * Number(value);
    else if (name !== "on_late" || value !== "run") found[name] = TEXT.has(name) ? value : Number(value);
  }
  return found;
}

async function submit(event) {
  event.preventDefault();
  const button = form.querySelector("button.main");
  button.disabled = true;
  tell("");
  try {
    const answer = await request("/v1/jobs", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body()),
    });
    const job = await answer.json();
    if (answer.ok) {
      markAsNew(job.id);
      tell(job.admission === "best_effort" ? `taken as ${short(job.id)}; it will probably be late` : `taken as ${short(job.id)}`);
    } else tell(job.error?.message ?? `refused: ${answer.status}`, true);
  } catch {
    tell("the gateway does not answer", true);
  }
  button.disabled = false;
}

function tell(text, wrong = false) {
  said.textContent = text;
  said.classList.toggle("wrong", wrong);
}

function short(id) {
  return /^[0-9a-f]{32}$/.test(id) ? id.slice(0, 8) : id;
}

form.elements.model.addEventListener("change", fit);
form.addEventListener("submit", submit);
