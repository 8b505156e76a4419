// The page: which view is shown, and what leads from one to the next.

import {
  ENDED, Problem, cancelJob, getJson, key, onUnauthorized, planPath, postPlan, setKey, watchJob,
} from "./api.js";
import { announce, byId, h } from "./dom.js";
import { Form } from "./form.js";
import { integer } from "./format.js";
import { requestOf } from "./facts.js";
import { historyCard } from "./history.js";
import { linkOf, planView, sentence } from "./plan.js";
import { problemCard } from "./problem.js";
import { ProgressCard } from "./progress.js";

const NARROW = matchMedia("(max-width: 1039px)"); // one column, as in style.css
const result = byId("result");
let view = new AbortController(); // aborted when another view takes over
let version = { keys_required: false };
let known = null; // {id, request, plan} of what this page asked for last; id of the job

const form = new Form({ submitted: submit });

// ---- views --------------------------------------------------------------------------------------

/** Puts a view there; gives the signal that ends with it. */
function show(...content) {
  view.abort();
  view = new AbortController();
  form.busy(false);
  result.replaceChildren(...content);
  return view.signal;
}

function mark(page, title) {
  document.title = title ? `${title} · autoshard` : "autoshard";
  document.querySelector(".columns").classList.toggle("single", page === "history");
  for (const name of ["new", "history"]) {
    if (name === page) byId(`nav-${name}`).setAttribute("aria-current", "page");
    else byId(`nav-${name}`).removeAttribute("aria-current");
  }
}

function go(address) {
  history.pushState(null, "", address);
  return route({ moved: true });
}

function focusOn(id) {
  const target = byId(id);
  target?.focus({ preventScroll: true });
  target?.scrollIntoView({ block: "nearest" });
}

/** To where the answer begins: beside the form that is the top, below it on a phone. */
function scrollUp() {
  if (NARROW.matches) result.scrollIntoView({ block: "start" });
  else scrollTo(0, 0);
}

/** Shows what the address asks for. */
async function route({ moved = false } = {}) {
  const asked = new URLSearchParams(location.search);
  try {
    if (asked.has("plan")) await openPlan(asked.get("plan"), asked.get("share"), moved);
    else if (asked.has("job")) await openJob(asked.get("job"), moved);
    else if (asked.get("view") === "history") await openHistory(moved);
    else welcome(moved);
  } catch (error) {
    if (error.name !== "AbortError") fail(error, moved);
  }
}

function fail(error, moved = true) {
  if (!(error instanceof Problem)) throw error;
  show(problemCard(error.body, { status: error.status || null, apply: tryAgain }));
  mark("new", "Problem");
  if (moved) focusOn("problem-title");
  announce(error.message);
}

function welcome(moved) {
  mark("new", "");
  show(h("section", { class: "card welcome stack", "aria-labelledby": "welcome-title" },
    h("h1", { id: "welcome-title", tabindex: "-1" }, "The fastest way to shard a model over a cluster"),
    h("p", {}, "Say which model you train on which devices. The answer is a plan: which mesh, how each parameter is cut, "
      + "what a step costs, where the time and the memory go, what else was priced and why it lost."),
    h("p", {}, "The form is filled with an example that works: ",
      h("button", { type: "button", class: "button", onclick: () => byId("form").requestSubmit() }, "plan Llama 3 8B on 8 H100")),
    h("ul", { class: "plain" },
      h("li", {}, "Nothing runs on your cluster: a cost model prices every operator and message."),
      h("li", {}, "No code and no weights are read: a preset’s or a config.json’s sizes are enough."),
      h("li", {}, "Each plan has a link that can be sent to others, and the same request as a command line."))));
  if (moved) focusOn("welcome-title");
}

async function openPlan(id, share, moved) {
  const signal = show(h("p", { class: "card" }, "Loading the plan."));
  mark("new", "Plan");
  const envelope = await getJson(planPath(id, share), { signal });
  const mine = known?.plan === envelope.id ? known.request : null;
  await presets; // names of models are needed for the commands
  if (signal.aborted) return;
  if (!mine) form.set(requestOf(envelope.plan, form.models) ?? { cluster: { preset: envelope.plan.cluster.name, devices: envelope.plan.cluster.devices } });
  const next = show();
  result.replaceChildren(planView(envelope, {
    models: form.models, keysRequired: version.keys_required, known: mine, signal: next,
  }));
  mark("new", envelope.plan.model.name);
  history.replaceState(null, "", linkOf(envelope));
  announce(`The plan is there: ${sentence(envelope.plan)}`);
  if (moved) {
    byId("plan-title").focus({ preventScroll: true });
    scrollUp();
  }
}

async function openJob(id, moved) {
  const signal = show(h("p", { class: "card" }, "Loading the job."));
  mark("new", "Job");
  const job = await getJson(`v1/jobs/${encodeURIComponent(id)}`, { signal });
  await (ENDED.includes(job.state) ? finish(job, moved) : follow(job, moved));
}

const subjectOf = ({ subject }) =>
  `${subject.model} on ${subject.devices ? `${integer(subject.devices)} × ` : ""}${subject.cluster}`;

/** Watches a job to its end, and shows what became of it. */
async function follow(job, moved) {
  const card = new ProgressCard(job, {
    subject: subjectOf(job),
    cancel: () => cancelJob(job.id).catch(() => {}), // it ended first: the stream says how
  });
  const signal = show(card.element);
  signal.addEventListener("abort", () => card.close());
  mark("new", subjectOf(job));
  form.busy(true);
  if (moved) {
    card.heading.focus({ preventScroll: true });
    scrollUp();
  }
  const ended = await watchJob(job.id, {
    signal,
    seen: (data, kind) => card.seen(data, kind),
    broken: (on) => card.broken(on),
  });
  if (signal.aborted) return;
  // Focus follows only where the reader has not gone elsewhere, back into the form say.
  const at = document.activeElement;
  await finish(ended, at === document.body || result.contains(at));
}

/** Shows what became of a job that has ended. */
async function finish(ended, moved) {
  if (ended.state === "succeeded") {
    if (known?.id === ended.id) known.plan = ended.plan_id;
    history.replaceState(null, "", `?plan=${encodeURIComponent(ended.plan_id)}`);
    await openPlan(ended.plan_id, null, moved);
  } else if (ended.state === "cancelled") {
    show(h("section", { class: "card stack" },
      h("h2", { id: "problem-title", tabindex: "-1" }, "Cancelled"),
      h("p", {}, `${subjectOf(ended)} was stopped before there was a plan.`)));
    announce("Cancelled");
    if (moved) focusOn("problem-title");
  } else {
    showFailure(ended.problem ?? { title: "The job failed" }, moved);
  }
}

function showFailure(problem, moved) {
  show(problemCard(problem, { apply: tryAgain }));
  announce(`${problem.title}. ${problem.detail ?? ""}`);
  if (problem.errors?.length) form.show(problem);
  else if (moved) focusOn("problem-title");
}

async function openHistory(moved) {
  mark("history", "History");
  const signal = show();
  const card = historyCard({ signal, open: (job) => go(`?job=${encodeURIComponent(job.id)}`) });
  result.replaceChildren(card.element);
  if (moved) focusOn("history-title");
  await card.start();
}

// ---- asking -------------------------------------------------------------------------------------

async function submit(request) {
  form.busy(true);
  let answer;
  try {
    answer = await postPlan(request);
  } catch (error) {
    form.busy(false);
    if (!(error instanceof Problem)) throw error;
    const body = error.status === 429 && error.retryAfter
      ? { ...error.body, detail: `${error.message} Try again in ${error.retryAfter} s.` }
      : { ...error.body, detail: error.message };
    form.show(body);
    announce(error.message);
    return;
  }
  try {
    if (answer.plan) {
      known = { id: null, request, plan: answer.plan.id };
      await go(answer.plan.links.page.replace(/^\//, "./"));
    } else {
      known = { id: answer.job.id, request };
      history.pushState(null, "", `?job=${encodeURIComponent(answer.job.id)}`);
      await follow(answer.job, true);
    }
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
  }
}

/** Sets what was suggested, and asks again. */
function tryAgain({ devices, global_batch: batch }) {
  form.set({ cluster: { devices }, workload: batch ? { global_batch: batch } : {} });
  byId("form").requestSubmit();
}

// ---- keys ---------------------------------------------------------------------------------------

let asking = null;

/** Asks for an API key, once for all that wait for it; true if there is one to try. */
function askForKey(refused) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key-why").textContent = refused
      ? "The service does not know this key. Check it, or ask its operator for another."
      : "Its operator makes one with “autoshard keys create”. It is kept in this tab only.";
    byId("key").value = "";
    const done = (value) => {
      byId("key-form").onsubmit = byId("key-cancel").onclick = dialog.oncancel = null;
      dialog.close();
      asking = null;
      keyChanged();
      resolve(value);
    };
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      setKey(byId("key").value.trim());
      done(true);
    };
    byId("key-cancel").onclick = () => done(false);
    dialog.oncancel = (event) => {
      event.preventDefault();
      done(false);
    };
    dialog.showModal();
  });
  return asking;
}

function keyChanged() {
  byId("forget-key").hidden = key() === null;
}

byId("forget-key").addEventListener("click", () => {
  setKey(null);
  keyChanged();
  announce("The API key was forgotten");
});
onUnauthorized(askForKey);
keyChanged();

// ---- start --------------------------------------------------------------------------------------

for (const link of document.querySelectorAll("[data-go]")) {
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(link.getAttribute("href"));
  });
}
// Paper shows what is folded on the screen.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...result.querySelectorAll("details:not([open])")];
  for (const details of folded) details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of folded) details.open = false;
});
addEventListener("popstate", () => route({ moved: true }));

/** The presets; someone who only has a link to a plan is not asked for a key. */
async function loadPresets() {
  const ask = !new URLSearchParams(location.search).has("share");
  try {
    const [models, clusters, about] = await Promise.all([
      getJson("v1/models", { ask }), getJson("v1/clusters", { ask }), getJson("v1/version", { ask }),
    ]);
    version = about;
    byId("version").textContent = `autoshard ${about.version}`;
    form.offer(models.models, clusters.clusters);
    byId("form-problem").hidden = true;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    const box = byId("form-problem");
    box.hidden = false;
    box.replaceChildren(
      h("p", {}, error.status === 401 ? "To make plans of your own, give an API key." : error.message),
      h("button", {
        type: "button", class: "button",
        onclick: async () => {
          if (error.status === 401 && !(await askForKey(false))) return;
          presets = loadPresets();
        },
      }, error.status === 401 ? "Give a key" : "Try again"));
  }
}

if (NARROW.matches && new URLSearchParams(location.search).has("plan")) {
  byId("form-panel").open = false; // on a phone a plan that was opened by its link comes first
}
let presets = loadPresets();
route();
