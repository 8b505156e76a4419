// The service's HTTP interface. Addresses are relative to the page, so a path prefix of a proxy holds.

const KEY = "autoshard.key";

let askForKey = null;
let remembered = null; // where session storage is forbidden

/** The API key of this tab, or null; kept until the tab is closed. */
export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? remembered;
  } catch {
    return remembered;
  }
}

export function setKey(value) {
  remembered = value;
  try {
    if (value === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, value);
  } catch {
    // `remembered` has it
  }
}

/** Called when the service answers 401; gives true once there is another key to try. */
export function onUnauthorized(ask) {
  askForKey = ask;
}

/** An answer that is an error: its problem document and status. */
export class Problem extends Error {
  constructor(status, body, retryAfter = null) {
    super(body.detail || body.title || `the service answered ${status}`);
    this.status = status;
    this.body = body;
    this.retryAfter = retryAfter;
  }
}

export const absolute = (path) => new URL(path.replace(/^\//, ""), document.baseURI);

function withKey(headers) {
  const value = key();
  return value === null ? headers : { ...headers, Authorization: `Bearer ${value}` };
}

async function problemOf(response) {
  let body = {};
  try {
    body = await response.json();
  } catch {
    body = { title: `${response.status} ${response.statusText}` };
  }
  const retry = Number(response.headers.get("Retry-After"));
  return new Problem(response.status, body, retry || null);
}

/**
 * A response whose status says success, or a Problem. With `ask`, a 401 asks for a key and tries
 * again; without, it is a Problem like any other.
 */
export async function request(path, { method = "GET", headers = {}, body, signal, ask = true } = {}) {
  for (;;) {
    let response;
    try {
      response = await fetch(absolute(path), {
        method, headers: withKey(headers), body, signal, cache: "no-cache",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem(0, {
        title: "The service cannot be reached",
        detail: "The service cannot be reached. Is it running, and is this device online?",
      });
    }
    if (response.ok) return response;
    if (response.status === 401 && ask && askForKey && (await askForKey(key() !== null))) continue;
    throw await problemOf(response);
  }
}

export const getJson = async (path, options) => (await request(path, options)).json();

/** Random text for Idempotency-Key; `crypto.randomUUID` is absent on plain http. */
function nonce() {
  const numbers = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(numbers, (n) => n.toString(16).padStart(2, "0")).join("");
}

/** Asks for a plan: `{plan: envelope}` if there is one already, else `{job}`. */
export async function postPlan(body) {
  const response = await request("v1/plans", {
    method: "POST",
    headers: { "Content-Type": "application/json", "Idempotency-Key": nonce() },
    body: JSON.stringify(body),
  });
  const answer = await response.json();
  return response.status === 200 ? { plan: answer } : { job: answer };
}

export const cancelJob = (id) => request(`v1/jobs/${encodeURIComponent(id)}`, { method: "DELETE" });

export const planPath = (id, share, rest = "") =>
  `v1/plans/${encodeURIComponent(id)}${rest}${share ? `?share=${encodeURIComponent(share)}` : ""}`;

/** Splits a stream of server-sent events: gives {id, event, data} for each. */
async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let [text, event] = ["", { id: null, event: "message", data: [] }];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split(/\r\n|\n|\r(?!$)/);
    text = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (event.data.length) yield { ...event, data: event.data.join("\n") };
        event = { id: event.id, event: "message", data: [] };
        continue;
      }
      const colon = line.indexOf(":");
      const [field, rest] = colon < 0 ? [line, ""] : [line.slice(0, colon), line.slice(colon + 1)];
      const content = rest.startsWith(" ") ? rest.slice(1) : rest;
      if (field === "data") event.data.push(content);
      else if (field === "id" || field === "event") event[field] = content;
    }
  }
}

const pause = (milliseconds, signal) =>
  new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("stopped", "AbortError"));
    });
  });

export const ENDED = ["succeeded", "failed", "cancelled"];

/**
 * Calls `seen(data)` for each event of a job until its end, then gives the job. A stream that
 * breaks is taken up again after its last event; `broken(true)` says so meanwhile.
 */
export async function watchJob(id, { seen, broken, signal }) {
  const path = `v1/jobs/${encodeURIComponent(id)}`;
  let [last, tries] = [null, 0];
  for (;;) {
    try {
      const headers = { Accept: "text/event-stream", ...(last === null ? {} : { "Last-Event-ID": last }) };
      const response = await request(`${path}/events`, { headers, signal });
      for await (const event of eventsOf(response.body)) {
        [last, tries] = [event.id ?? last, 0];
        broken(false);
        seen(JSON.parse(event.data), event.event);
      }
    } catch (error) {
      if (error.name === "AbortError") throw error;
      if (error instanceof Problem && error.status >= 400 && error.status < 500 && error.status !== 429) {
        throw error;
      }
    }
    try {
      const job = await getJson(path, { signal });
      if (ENDED.includes(job.state)) return job;
      seen(job, "job");
      broken(false);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      if (error instanceof Problem && error.status >= 400 && error.status < 500 && error.status !== 429) {
        throw error;
      }
      broken(true);
    }
    await pause(Math.min(500 * 2 ** tries++, 8000), signal);
  }
}
