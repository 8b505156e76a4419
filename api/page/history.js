// The caller's jobs, newest first.

import { ENDED, cancelJob, getJson } from "./api.js";
import { announce, h } from "./dom.js";
import { integer, moment, seconds } from "./format.js";

const what = (job) => {
  const { model, cluster, devices } = job.subject;
  return `${model} on ${devices ? `${integer(devices)} × ` : ""}${cluster}`;
};

const sizes = ({ global_batch: batch, seq_len: length }) =>
  [batch ? `batch ${integer(batch)}` : null, length ? `${integer(length)} tokens` : null].filter(Boolean).join(", ");

function outcome(job) {
  if (job.state === "failed") return job.problem?.title ?? "failed";
  if (job.state === "running") return job.progress?.message ?? "";
  if (job.started_s && job.finished_s) return `planned in ${seconds(Math.max(0.001, job.finished_s - job.started_s))}`;
  return "";
}

/** The list as a card; it renews itself while something runs, until `signal` aborts. */
export function historyCard({ open, signal }) {
  const body = h("tbody");
  const note = h("p", { class: "soft" });
  const older = h("button", { type: "button", class: "button", hidden: true }, "Older jobs");
  const table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Jobs" },
    h("table", { id: "jobs" },
      h("caption", { class: "off-screen" }, "Jobs, newest first"),
      h("thead", {}, h("tr", {},
        h("th", { scope: "col", class: "name" }, "Asked for"),
        h("th", { scope: "col" }, "State"),
        h("th", { scope: "col" }, "When"),
        h("th", { scope: "col" }, "Outcome"),
        h("th", { scope: "col" }, h("span", { class: "off-screen" }, "Actions")))),
      body));
  let cursor = null;
  let jobs = [];

  const row = (job) => h("tr", {},
    h("th", { scope: "row", class: "name" },
      h("a", {
        href: `?job=${encodeURIComponent(job.id)}`,
        onclick: (event) => {
          if (event.ctrlKey || event.metaKey || event.shiftKey) return;
          event.preventDefault();
          open(job);
        },
      }, what(job)),
      h("div", { class: "hint" }, sizes(job.subject), job.kind === "estimate" ? " estimate" : null)),
    h("td", {}, h("span", { class: `badge ${job.state}` }, job.state)),
    h("td", { class: "nowrap" }, moment(job.created_s)),
    h("td", { class: "why" }, outcome(job)),
    h("td", {}, ENDED.includes(job.state) ? null : h("button", {
      type: "button", class: "button small", "aria-label": `Cancel ${what(job)}`,
      onclick: async (event) => {
        event.currentTarget.disabled = true;
        await cancelJob(job.id).catch(() => {}); // it may have ended in the meantime: the list will say
        announce("Cancelled");
        await load();
      },
    }, "Cancel")));

  const draw = () => {
    const before = document.activeElement?.closest?.("#jobs a")?.getAttribute("href");
    body.replaceChildren(...jobs.map(row));
    if (before) body.querySelector(`a[href="${CSS.escape(before)}"], a[href="${before}"]`)?.focus();
    table.hidden = jobs.length === 0;
    note.hidden = jobs.length > 0;
    note.textContent = jobs.length === 0 ? "No jobs yet. What you plan stands here, and can be opened again." : "";
    older.hidden = cursor === null;
  };
  const load = async () => {
    const page = await getJson("v1/jobs?limit=25", { signal });
    const known = new Set(page.jobs.map((j) => j.id));
    const rest = jobs.filter((j) => !known.has(j.id) && j.id < (page.jobs.at(-1)?.id ?? ""));
    if (!rest.length) cursor = page.next_cursor;
    jobs = [...page.jobs, ...rest];
    draw();
  };
  older.addEventListener("click", async () => {
    const page = await getJson(`v1/jobs?limit=25&cursor=${encodeURIComponent(cursor)}`, { signal });
    cursor = page.next_cursor;
    jobs = [...jobs, ...page.jobs];
    draw();
  });
  const again = () => {
    if (signal.aborted) return;
    const wait = jobs.some((j) => !ENDED.includes(j.state)) ? 2000 : 15_000;
    setTimeout(() => {
      if (signal.aborted) return;
      const next = document.hidden ? Promise.resolve() : load();
      next.catch(() => {}).finally(again); // shown again as soon as the service is back
    }, wait);
  };
  return {
    element: h("section", { class: "card stack", "aria-labelledby": "history-title" },
      h("h1", { id: "history-title", tabindex: "-1" }, "History"), note, table,
      h("div", { class: "buttons" }, older)),
    start: async () => {
      await load();
      again();
    },
  };
}
