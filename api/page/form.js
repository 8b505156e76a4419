// The form: fills it, checks what needs no service, and makes a request of it.

import { byId, h } from "./dom.js";
import { tiersOf } from "./facts.js";
import { bytes, count, integer, plural } from "./format.js";
import { jsonFault } from "./json.js";

const FIRST = { model: "llama-3-8b", cluster: "h100", devices: 8 };
const VISION = ["resnet", "vit", "swin", "convnext"];

/** Field of the form for a JSON pointer into the request; the longest prefix decides. */
const FIELDS = [
  ["/model/config", "config"], ["/model/graph", "config"], ["/model/preset", "preset"],
  ["/model", "preset"], ["/cluster/devices", "devices"], ["/cluster", "cluster"],
  ["/workload/global_batch", "global_batch"], ["/workload/seq_len", "seq_len"],
  ["/workload/dtype", "dtype"], ["/workload/optimizer", "optimizer"],
  ["/search/strategy", "strategy"], ["/search/mesh", "mesh"],
  ["/search/memory_limit_bytes", "memory_limit"], ["/search/trials", "trials"],
  ["/search/seed", "seed"], ["/validate", "validate"],
];
const ALL = [...new Set(FIELDS.map(([, id]) => id))];
const MORE = ["strategy", "mesh", "memory_limit", "trials", "seed", "validate"];
const UNITS = { "": 1, b: 1, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30, tib: 2 ** 40 };

/** A wrong field, before anything is sent. */
class Wrong extends Error {
  constructor(id, message) {
    super(message);
    this.id = id;
  }
}

export class Form {
  /** `submitted(request)` is called with a request that passed the checks here. */
  constructor({ submitted }) {
    this.models = [];
    this.clusters = [];
    this.form = byId("form");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      const request = this.read();
      if (request) submitted(request);
    });
    for (const id of ALL) {
      byId(id).addEventListener("input", () => {
        this.clear(id);
        if (id === "cluster") byId("devices").value = this.cluster()?.devices ?? "";
        this.hints();
      });
    }
    for (const radio of this.form.elements.source) {
      radio.addEventListener("change", () => this.hints());
    }
    byId("config-file").addEventListener("change", async (event) => {
      const [file] = event.target.files;
      if (!file) return;
      byId("config").value = await file.text();
      byId("config").dispatchEvent(new Event("input"));
      event.target.value = "";
    });
  }

  /** Fill the lists of presets. */
  offer(models, clusters) {
    [this.models, this.clusters] = [models, clusters];
    const groups = [["Language", (m) => !VISION.includes(m.model_type)], ["Vision", (m) => VISION.includes(m.model_type)]];
    byId("preset").replaceChildren(...groups.map(([label, of]) =>
      h("optgroup", { label }, models.filter(of).map((m) =>
        h("option", { value: m.name }, `${m.name} (${count(m.parameter_count)})`)))));
    byId("cluster").replaceChildren(...clusters.map((c) =>
      h("option", { value: c.name }, c.name === "local" ? "local: the server itself" : `${c.name}: ${c.document.device.name}`)));
    const has = (list, name) => (list.some((x) => x.name === name) ? name : list[0]?.name);
    byId("preset").value = has(models, FIRST.model) ?? "";
    byId("cluster").value = has(clusters, FIRST.cluster) ?? "";
    byId("devices").value = byId("cluster").value === FIRST.cluster ? FIRST.devices : this.cluster()?.devices ?? "";
    this.hints();
  }

  cluster() {
    return this.clusters.find((c) => c.name === byId("cluster").value);
  }

  source() {
    return this.form.elements.source.value;
  }

  /** What follows from the fields as they are. */
  hints() {
    const pasted = this.source() === "config";
    byId("field-preset").hidden = pasted;
    byId("field-config").hidden = !pasted;
    const model = this.models.find((m) => m.name === byId("preset").value);
    byId("preset-hint").textContent = model ? modelText(model) : "";
    const state = byId("config-state");
    const text = byId("config").value;
    if (!text.trim()) {
      state.textContent = "";
    } else {
      const fault = jsonFault(text);
      state.className = fault ? "state wrong" : "state";
      state.textContent = fault ? fault.message : pastedText(JSON.parse(text));
    }
    const cluster = this.cluster();
    const per = cluster?.document.devices_per_node;
    const devices = Number(byId("devices").value) || cluster?.devices;
    if (!cluster) return;
    const nodes = Math.ceil(devices / per);
    byId("global_batch").placeholder = `${integer(devices)} samples`;
    byId("cluster-hint").textContent = `${plural(nodes, "node")} of ${integer(per)}, ${bytes(cluster.document.device.memory_bytes)} each; `
      + tiersOf(cluster.document).slice(0, nodes > 1 ? undefined : 1).map((tier) => `${tier.name}: ${tier.link}`).join(", ");
    const usual = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384].filter((n) => n % per === 0 || per % n === 0);
    byId("devices-usual").replaceChildren(...usual.map((n) => h("option", { value: n })));
  }

  /** The request, or null after showing what is wrong. */
  read() {
    this.clearAll();
    const wrong = [];
    const take = (read) => {
      try {
        return read();
      } catch (error) {
        if (!(error instanceof Wrong)) throw error;
        wrong.push(error);
        return undefined;
      }
    };
    const search = {
      strategy: byId("strategy").value === "auto" ? undefined : byId("strategy").value,
      mesh: take(() => meshOf(byId("mesh").value)),
      memory_limit_bytes: take(() => bytesOf(byId("memory_limit").value)),
      trials: take(() => whole("trials", "a number of configurations")),
      seed: take(() => whole("seed", "a seed", 0)),
    };
    const request = {
      model: take(() => this.model()),
      cluster: { preset: byId("cluster").value, devices: take(() => whole("devices", "a number of devices")) },
      workload: {
        global_batch: take(() => whole("global_batch", "a number of samples")),
        seq_len: take(() => whole("seq_len", "a number of tokens")),
        dtype: byId("dtype").value || undefined,
        optimizer: byId("optimizer").value,
      },
      search: Object.values(search).some((v) => v !== undefined) ? search : undefined,
      validate: byId("validate").value === "none" ? undefined : byId("validate").value,
    };
    if (wrong.length) {
      for (const { id, message } of wrong) this.mark(id, message);
      this.focusFirst(wrong.map((w) => w.id));
      return null;
    }
    return JSON.parse(JSON.stringify(request)); // leaves out what is undefined
  }

  model() {
    if (this.source() === "preset") return { preset: byId("preset").value };
    const text = byId("config").value;
    if (!text.trim()) throw new Wrong("config", "Paste a config.json, or choose a file.");
    const fault = jsonFault(text);
    if (fault) {
      byId("config").setSelectionRange(fault.at, fault.at + 1);
      throw new Wrong("config", fault.message);
    }
    const value = JSON.parse(text);
    if (value === null || typeof value !== "object" || Array.isArray(value)) {
      throw new Wrong("config", "A config is a JSON object: {…}.");
    }
    return value.kind === "autoshard.graph" ? { graph: value } : { config: value };
  }

  /** Shows a problem of the service at the fields it points to; what points nowhere, at the button. */
  show(problem) {
    const elsewhere = [];
    const marked = [];
    for (const { pointer, detail } of problem.errors ?? []) {
      const [, id] = FIELDS.find(([prefix]) => pointer === prefix || pointer?.startsWith(`${prefix}/`)) ?? [];
      if (!id) {
        elsewhere.push(pointer ? `${pointer}: ${detail}` : detail);
        continue;
      }
      const inside = id === "config" ? pointer.split("/").slice(3).join("/") : "";
      if (id === "config" && this.source() === "config") select(byId("config"), pointer.split("/").at(-1));
      this.mark(id, inside ? `${inside}: ${detail}` : detail);
      marked.push(id);
    }
    const box = byId("form-problem");
    if (!marked.length || elsewhere.length) {
      box.hidden = false;
      box.replaceChildren(
        h("strong", {}, problem.title ?? "That did not work"),
        ...(elsewhere.length ? elsewhere : [problem.detail]).filter(Boolean).map((t) => h("p", {}, t)));
    }
    if (marked.length) this.focusFirst(marked);
    else box.scrollIntoView({ block: "nearest" });
  }

  mark(id, message) {
    const error = byId(`${id}-error`);
    error.textContent = error.textContent ? `${error.textContent}; ${message}` : message;
    byId(id).setAttribute("aria-invalid", "true");
    if (MORE.includes(id)) byId("more").open = true;
  }

  focusFirst(ids) {
    byId("form-panel").open = true;
    const [first] = ALL.map((id) => byId(id))
      .filter((e) => ids.includes(e.id))
      .sort((a, b) => (a.compareDocumentPosition(b) & Node.DOCUMENT_POSITION_FOLLOWING ? -1 : 1));
    first?.focus();
  }

  clear(id) {
    byId(`${id}-error`).textContent = "";
    byId(id).removeAttribute("aria-invalid");
  }

  clearAll() {
    ALL.forEach((id) => this.clear(id));
    byId("form-problem").hidden = true;
  }

  /** Sets fields as in a request; what it does not name stays. */
  set({ model, cluster, workload = {}, search = {} }) {
    if (model?.preset && this.models.some((m) => m.name === model.preset)) {
      this.form.elements.source.value = "preset";
      byId("preset").value = model.preset;
    }
    if (cluster?.preset && this.clusters.some((c) => c.name === cluster.preset)) byId("cluster").value = cluster.preset;
    if (cluster?.devices) byId("devices").value = cluster.devices;
    for (const id of ["global_batch", "seq_len", "dtype", "optimizer"]) {
      if (workload[id] !== undefined) byId(id).value = workload[id];
    }
    if (search.strategy) byId("strategy").value = search.strategy;
    if (search.seed) byId("seed").value = search.seed;
    if (search.memory_limit_bytes) byId("memory_limit").value = search.memory_limit_bytes;
    this.hints();
  }

  busy(on) {
    byId("submit").disabled = on;
    byId("submit").textContent = on ? "Planning…" : "Find the plan";
  }
}

function whole(id, what, least = 1) {
  const field = byId(id);
  if (field.validity.badInput) throw new Wrong(id, `Give ${what}: a whole number.`);
  if (field.value === "") return undefined;
  const value = Number(field.value);
  if (!Number.isInteger(value) || value < least) {
    throw new Wrong(id, `Give ${what}: a whole number from ${least} on.`);
  }
  return value;
}

function bytesOf(text) {
  if (!text.trim()) return undefined;
  const found = /^\s*([\d.]+)\s*([a-z]*)\s*$/i.exec(text);
  const unit = found && UNITS[found[2].toLowerCase()];
  const value = found && Math.floor(Number(found[1]) * unit);
  if (!unit || !(value >= 1)) throw new Wrong("memory_limit", "Give an amount such as 72GiB, 80GB or 17179869184.");
  return value;
}

function meshOf(text) {
  if (!text.trim()) return undefined;
  const short = { dp: "data", tp: "model" };
  const mesh = {};
  for (const part of text.split(",")) {
    const found = /^\s*(\w+)\s*=\s*(\d+)\s*$/.exec(part);
    if (!found) throw new Wrong("mesh", "Give sizes of axes, as data=4,model=2.");
    mesh[short[found[1]] ?? found[1]] = Number(found[2]);
  }
  return mesh;
}

/** Puts the cursor on a key of pasted JSON. */
function select(area, key) {
  const at = area.value.indexOf(`"${key}"`);
  if (at >= 0) area.setSelectionRange(at, at + key.length + 2);
}

const first = (config, keys) => keys.map((k) => config[k]).find((v) => typeof v === "number");

function modelText(model) {
  const layers = first(model.config, ["num_hidden_layers", "n_layer", "num_layers"]);
  const width = first(model.config, ["hidden_size", "n_embd", "d_model"]);
  const parts = [`${model.architecture}, ${count(model.parameter_count)} parameters`];
  if (layers) parts.push(`${layers} layers${width ? ` of width ${integer(width)}` : ""}`);
  return parts.join("; ");
}

function pastedText(value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return "Valid JSON, but not an object.";
  if (value.kind === "autoshard.graph") return "A graph of a model.";
  const type = typeof value.model_type === "string" ? value.model_type : null;
  if (!type) return "Valid JSON. It has no model_type, which the service needs.";
  const layers = first(value, ["num_hidden_layers", "n_layer", "num_layers"]);
  return `Valid JSON: ${type}${layers ? `, ${layers} layers` : ""}`;
}
