// The answer: what the plan is, as pictures first, then in tables.

import { absolute, getJson, key, planPath, request } from "./api.js";
import { alternativesFigure } from "./charts/alternatives.js";
import { meshFigure } from "./charts/mesh.js";
import { memoryFigure } from "./charts/memory.js";
import { stepTimeFigure } from "./charts/steptime.js";
import { timelineFigure } from "./charts/timeline.js";
import { commandsOf } from "./commands.js";
import { announce, copyButton, h, save } from "./dom.js";
import { deviceCount, memoryTotal, meshText, requestOf, throughput, tiersOf, tokensOfStep } from "./facts.js";
import { bytes, count, digits, integer, moment, percent, plural, seconds } from "./format.js";
import { parametersTable } from "./parameters.js";
import { alternativesTable, collectivesTable, measurementsTable, validationText } from "./tables.js";

let serial = 0;

function card(title, under, content, kind = "") {
  const id = `card-${++serial}`;
  return h("section", { class: `card ${kind}`, "aria-labelledby": id },
    h("header", {}, h("h2", { id }, title), under ? h("p", {}, under) : null), content);
}

const tile = (name, value, under) => h("div", { class: "tile" },
  h("dt", {}, name),
  h("dd", {}, h("div", { class: "value number" }, value), under ? h("div", { class: "under" }, under) : null));

/** The headline in one sentence, as it is also said to screen readers. */
export function sentence(plan) {
  const [rate, unit] = throughput(plan);
  return `${seconds(plan.step_time.total_s)} a step, ${digitsOf(rate)} ${unit}, `
    + `${bytes(memoryTotal(plan.memory))} on the fullest device`;
}

const digitsOf = (rate) => (rate >= 1000 ? integer(Math.round(rate / 10 ** (Math.floor(Math.log10(rate)) - 2)) * 10 ** (Math.floor(Math.log10(rate)) - 2)) : digits(rate));

/** Link that shows this plan to whoever has it. */
export const linkOf = (envelope) => new URL(envelope.links.page.replace(/^\//, ""), document.baseURI).href;

const shareOf = (envelope) => new URL(linkOf(envelope)).searchParams.get("share");

/** A button that fetches something and saves it; says so where that fails. */
function download(label, name, path, type) {
  const button = h("button", { type: "button", class: "button" }, label);
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      const response = await request(path);
      save(name, new Blob([await response.arrayBuffer()], { type }));
      announce(`${name} saved`);
    } catch (error) {
      button.textContent = `${label}: ${error.message}`;
      announce(error.message);
    } finally {
      button.disabled = false;
    }
  });
  return button;
}

function headline(envelope, plan) {
  const memory = memoryTotal(plan.memory);
  const limit = plan.memory.limit_bytes;
  const [rate, unit] = throughput(plan);
  const tokens = tokensOfStep(plan);
  const devices = deviceCount(plan.mesh);
  const nodes = Math.ceil(devices / plan.cluster.devices_per_node);
  const share = shareOf(envelope);
  const stem = `${plan.model.name}-${plan.cluster.name}-${devices}`.replace(/[^\w.-]+/g, "_");
  const over = limit !== null && memory > limit;
  return h("section", { class: "card headline", "aria-labelledby": "plan-title" },
    h("div", {},
      h("h1", { id: "plan-title", tabindex: "-1" }, `${plan.model.name} on ${integer(devices)} × ${plan.cluster.device.name}`),
      h("p", { class: "soft" }, `${count(plan.model.parameter_count)} parameters, ${plan.dtype}, ${plan.optimizer}, `
        + `${plural(plan.global_batch, "sample")} a step${tokens ? ` (${integer(tokens)} tokens)` : ""}`)),
    h("p", { class: "label" }, h("strong", {}, "The plan: "), plan.label),
    h("dl", { class: "tiles" },
      tile("Predicted step time", seconds(plan.step_time.total_s),
        `${percent(plan.step_time.exposed_communication_s / plan.step_time.total_s)} of it communication not hidden`),
      tile("Throughput", `${digitsOf(rate)}`, `${unit}; ${digitsOf(rate / devices)} a device`),
      tile("Fullest device", bytes(memory), limit === null ? "no limit"
        : over ? h("span", { class: "badge over" }, `${bytes(memory - limit)} over ${bytes(limit)}`)
          : `${percent(memory / limit)} of ${bytes(limit)}`),
      tile("Mesh", meshText(plan.mesh), `${plural(devices, "device")} on ${plural(nodes, "node")}`)),
    h("div", { class: "buttons" },
      copyButton("Copy link", () => linkOf(envelope), { class: "button primary", id: "copy-link" }),
      h("button", {
        type: "button", class: "button", id: "download-plan",
        onclick: () => save(`${stem}.plan.json`, `${JSON.stringify(plan, null, 1)}\n`, "application/json"),
      }, "Plan (JSON)"),
      h("a", {
        class: "button", target: "_blank", rel: "noopener",
        href: absolute(planPath(envelope.id, share, "/report")).href,
      }, "Open report"),
      download("Report (HTML)", `${stem}.report.html`, planPath(envelope.id, share, "/report"), "text/html"),
      download("Timeline (trace)", `${stem}.trace.json`, planPath(envelope.id, share, "/trace"), "application/json"),
      h("button", { type: "button", class: "button", onclick: () => window.print() }, "Print")));
}

function clusterFacts(plan) {
  const { cluster } = plan;
  const flops = cluster.device.peak_flops_per_second[plan.dtype];
  const rate = (link) => `${bytes(link.bytes_per_second)}/s, ${seconds(link.latency_s)}`;
  const rows = [
    [`Device`, cluster.device.name, null],
    [`Peak of ${plan.dtype}`, flops ? `${digits(flops / 1e12)} TFLOP/s` : null, `device.peak_flops_per_second.${plan.dtype}`],
    ["Part of the peak that is reached", percent(cluster.device.efficiency), "device.efficiency"],
    ["Memory", bytes(cluster.device.memory_bytes), "device.memory_bytes"],
    ["Memory bandwidth", `${bytes(cluster.device.memory_bytes_per_second)}/s`, "device.memory_bytes_per_second"],
    ["Part of the bandwidth that is reached", percent(cluster.device.memory_efficiency), "device.memory_efficiency"],
    ["Launch of an operator", seconds(cluster.device.launch_s), "device.launch_s"],
    ...tiersOf(cluster).map((tier) => [`Links of the ${tier.name}: ${tier.link}`, rate(tier), tier.source]),
    ["Start of a collective", seconds(cluster.collective_s), "collective_s"],
    ["Reserve", bytes(cluster.reserve_bytes), "reserve_bytes"],
  ];
  return h("details", {},
    h("summary", {}, `The figures of ${cluster.name}, and where they come from`),
    h("dl", { class: "facts" }, rows.filter(([, value]) => value).flatMap(([name, value, source]) => [
      h("dt", {}, name),
      h("dd", {}, h("span", { class: "number" }, value),
        cluster.sources?.[source] ? h("div", { class: "hint" }, cluster.sources[source]) : null),
    ])));
}

/**
 * The answer to an envelope of `GET /v1/plans/{id}`, for the page.
 *
 * @param known  the request that it came from, where this page made it
 */
export function planView(envelope, { models, keysRequired, known = null, signal }) {
  const { plan } = envelope;
  const { validation } = envelope.summary;
  const again = known ?? requestOf(plan, models);
  const steps = stepTimeFigure(plan);
  const rows = [];
  const scatter = alternativesFigure(plan, {
    lit: (index) => rows.forEach((r, i) => r.classList.toggle("lit", i === index)),
  });
  const table = alternativesTable(scatter.points, rows, scatter.show);
  const timeline = h("div", {}, h("p", { class: "hint" }, "Loading the timeline."));
  loadTimeline(envelope, { timeline, steps, signal });
  return h("article", { class: "stack", id: "answer", "aria-labelledby": "plan-title" },
    headline(envelope, plan),
    plan.warnings.length
      ? h("div", { class: "notice" }, h("strong", {}, plan.warnings.length > 1 ? "Warnings" : "Warning"), h("ul", {}, plan.warnings.map((w) => h("li", {}, w))))
      : null,
    validation || plan.measurements.length
      ? card("Validation", plan.measurements[0]?.devices, h("div", { class: "stack small" },
        validation ? validationText(validation) : null,
        plan.measurements.length ? measurementsTable(plan.measurements) : null))
      : null,
    h("div", { class: "grid two" },
      h("div", { class: "stack" },
        card("The mesh on the nodes", meshText(plan.mesh), meshFigure(plan)),
        card("Where the step’s time goes", `${seconds(plan.step_time.total_s)} predicted`, steps.element)),
      h("div", { class: "stack" },
        card("Memory of the fullest device", plan.memory.limit_bytes === null ? null : `limit ${bytes(plan.memory.limit_bytes)}`, memoryFigure(plan)),
        card("What else was priced", `${plural(scatter.points.length, "configuration")}: time against memory`, scatter.element))),
    card("Predicted timeline of one step", "as the device at the mesh’s origin sees it", timeline),
    card("Alternatives, and why they lost", null, table, "long"),
    card("Parameters", `${plural(Object.keys(plan.parameters).length, "tensor")}, ${count(plan.model.parameter_count)} elements`, parametersTable(plan), "long"),
    card("Collectives of one step", "as one device issues them", collectivesTable(plan), "long"),
    card("Assumptions", null, h("div", { class: "stack small" },
      plan.assumptions.length ? h("ul", { class: "plain" }, plan.assumptions.map((a) => h("li", {}, a))) : null,
      clusterFacts(plan)), "long"),
    h("section", { class: "card no-print", "aria-label": "Commands" }, commandsOf(again, {
      withKey: keysRequired || key() !== null,
      document: absolute(planPath(envelope.id, shareOf(envelope))).href,
    })),
    h("p", { class: "hint" }, `Plan ${envelope.id}, made ${moment(envelope.created_s)}; model ${plan.model.fingerprint}, seed ${plan.seed}, strategy ${plan.strategy}`));
}

async function loadTimeline(envelope, { timeline, steps, signal }) {
  try {
    const trace = await getJson(planPath(envelope.id, shareOf(envelope), "/trace"), { signal });
    steps.refine(trace);
    timeline.replaceChildren(timelineFigure(trace));
  } catch (error) {
    if (error.name === "AbortError") return;
    timeline.replaceChildren(h("p", { class: "hint" }, `The timeline could not be loaded: ${error.message}`));
  }
}
