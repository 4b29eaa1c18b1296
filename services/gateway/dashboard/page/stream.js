// The stream of events, read by fetch: an EventSource cannot send a key.

const KEY = "slackwater-key";
const FIRST_PAUSE_MS = 500, LONGEST_PAUSE_MS = 10_000;

// Every request to the gateway goes through here.
export function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY), headers = new Headers(options.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  return fetch(path, { ...options, headers, cache: "no-store" });
}

export function keepKey(text) {
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

// Calls `act(event, data)` for each event, for ever. Beside the server's own: "lost" while there is
// no connection, and "locked" once where a key is asked for; then it ends.
export async function follow(path, act) {
  let pause = FIRST_PAUSE_MS;
  const on = (event, data) => {
    try {
      act(event, data);
    } catch (error) { // of the page's own: the stream goes on
      reportError(error);
    }
  };
  for (;;) {
    try {
      const answer = await request(path);
      if (answer.status === 401) return on("locked", null);
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      for await (const [event, data] of events(answer.body)) {
        pause = FIRST_PAUSE_MS;
        on(event, data);
      }
    } catch { // no connection, or one that broke off
    }
    on("lost", null);
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(LONGEST_PAUSE_MS, 2 * pause);
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const event = parse(text.slice(0, end));
      text = text.slice(end + 2);
      if (event) yield event;
    }
  }
}

// One event's lines; null for a comment.
function parse(lines) {
  let kind = "message", data = "";
  for (const line of lines.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    if (line.startsWith("data: ")) data += line.slice(6);
  }
  return data ? [kind, JSON.parse(data)] : null;
}
