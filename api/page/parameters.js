// How each parameter is stored: a table that folds repeated layers and can be searched.

import { h, s } from "./dom.js";
import { localShape, specText } from "./facts.js";
import { bytes, integer, percent, plural } from "./format.js";

/** `0..31`, `0,2..4` */
function ranges(numbers) {
  const sorted = [...new Set(numbers)].sort((a, b) => a - b);
  const parts = [];
  for (let i = 0; i < sorted.length;) {
    let j = i;
    while (j + 1 < sorted.length && sorted[j + 1] === sorted[j] + 1) j++;
    if (j - i >= 2) parts.push(`${sorted[i]}..${sorted[j]}`);
    else parts.push(...sorted.slice(i, j + 1).map(String));
    i = j + 1;
  }
  return parts.join(",");
}

/**
 * Names that differ in numbers only and are stored alike, as one: [{name, names, tensor}]. Where
 * the numbers are no full product of ranges, one group per first number.
 */
export function fold(parameters) {
  const groups = new Map();
  for (const [name, tensor] of Object.entries(parameters)) {
    const frame = name.split(".").map((p) => (/^\d+$/.test(p) ? "#" : p)).join(".");
    const id = JSON.stringify([frame, tensor.shape, tensor.dtype, tensor.partition_spec, tensor.local_bytes]);
    if (!groups.has(id)) groups.set(id, { frame, tensor, names: [] });
    groups.get(id).names.push(name);
  }
  const out = [];
  const emit = ({ frame, tensor, names }) => {
    const columns = [];
    for (const name of names) {
      name.split(".").filter((p) => /^\d+$/.test(p)).forEach((p, i) => (columns[i] ??= []).push(Number(p)));
    }
    const product = columns.reduce((n, c) => n * new Set(c).size, 1);
    if (columns.length > 1 && product !== names.length) {
      const byFirst = Map.groupBy
        ? Map.groupBy(names, (_, i) => columns[0][i])
        : names.reduce((m, n, i) => m.set(columns[0][i], [...(m.get(columns[0][i]) ?? []), n]), new Map());
      if (byFirst.size > 1) {
        for (const part of byFirst.values()) emit({ frame, tensor, names: part });
        return;
      }
    }
    const texts = columns.map((c) => (new Set(c).size > 1 ? `{${ranges(c)}}` : String(c[0])));
    out.push({
      name: frame.split(".").map((p) => (p === "#" ? texts.shift() : p)).join("."), names, tensor,
    });
  };
  groups.forEach(emit);
  return out;
}

const elements = (shape) => shape.reduce((a, b) => a * b, 1);

/** A dotted name that may break after its dots. */
const breakable = (name) => name.split(/(?<=\.)/).flatMap((part) => [part, h("wbr")]);

/** A bar as wide as the share of the tensor that one device keeps. */
function shareBar(share) {
  return s("svg", { class: "cell-bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { width: 100, height: 8, rx: 2 }),
    s("rect", { class: "parameters", width: Math.max(1, 100 * share), height: 8, rx: 2 }));
}

const SORTS = {
  order: () => 0,
  name: (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }),
  each: (a, b) => a.tensor.local_bytes - b.tensor.local_bytes,
  all: (a, b) => a.tensor.local_bytes * a.names.length - b.tensor.local_bytes * b.names.length,
};

export function parametersTable(plan) {
  const parameters = plan.parameters;
  const folded = fold(parameters);
  const single = Object.entries(parameters).map(([name, tensor]) => ({ name, names: [name], tensor }));
  const total = single.reduce((sum, p) => sum + p.tensor.local_bytes, 0);
  let [sort, down] = ["order", false];

  const search = h("input", { type: "search", id: "parameter-search", placeholder: "name, spec or shape", autocomplete: "off" });
  const every = h("input", { type: "checkbox", id: "parameter-every" });
  const found = h("p", { class: "hint", "aria-live": "polite" });
  const body = h("tbody");
  const heads = [];

  const row = (item) => {
    const { tensor, names } = item;
    const local = localShape(tensor, plan.mesh);
    const share = elements(local) / Math.max(1, elements(tensor.shape));
    return h("tr", {},
      h("th", { scope: "row", class: "name mono" }, breakable(item.name)),
      h("td", { class: "number" }, names.length > 1 ? `× ${integer(names.length)}` : ""),
      h("td", { class: "nowrap number" }, tensor.shape.map(integer).join(" × ") || "scalar"),
      h("td", { class: "mono spec" }, specText(tensor.partition_spec)),
      h("td", { class: "nowrap number" }, local.map(integer).join(" × ") || "scalar"),
      h("td", {}, shareBar(share), h("span", { class: "off-screen" }, percent(share))),
      h("td", { class: "number" }, bytes(tensor.local_bytes)),
      h("td", { class: "number" }, bytes(tensor.local_bytes * names.length)),
      h("td", {}, tensor.dtype));
  };

  const draw = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const source = every.checked ? single : folded;
    const hit = source.filter((item) => {
      const text = `${item.name} ${item.names.length > 1 ? item.names.join(" ") : ""} ${specText(item.tensor.partition_spec)} `
        + `${item.tensor.shape.join(" × ")} ${item.tensor.shape.join("x")} ${item.tensor.dtype}`.toLowerCase();
      return words.every((w) => text.toLowerCase().includes(w));
    });
    const ordered = sort === "order" ? hit : [...hit].sort(SORTS[sort]);
    if (down) ordered.reverse();
    body.replaceChildren(...ordered.map(row));
    const tensors = hit.reduce((n, item) => n + item.names.length, 0);
    const kept = hit.reduce((n, item) => n + item.tensor.local_bytes * item.names.length, 0);
    found.textContent = hit.length === 0 ? "No parameter has that in its name, spec or shape."
      : `${plural(tensors, "tensor")} of ${integer(single.length)}, ${bytes(kept)} of ${bytes(total)} on each device`;
    for (const [name, head] of heads) {
      head.setAttribute("aria-sort", sort === name ? (down ? "descending" : "ascending") : "none");
    }
  };
  const sortable = (name, label, kind = "") => {
    const head = h("th", { scope: "col", class: kind }, h("button", {
      type: "button", class: "sort",
      onclick: () => {
        if (sort !== name) [sort, down] = [name, name !== "name"];
        else if (down === (name !== "name")) down = !down;
        else [sort, down] = ["order", false];
        draw();
      },
    }, label));
    heads.push([name, head]);
    return head;
  };
  const head = h("thead", {}, h("tr", {},
    sortable("name", "Parameter", "name"),
    h("th", { scope: "col", class: "number" }, "Alike"),
    h("th", { scope: "col", class: "number" }, "Shape"),
    h("th", { scope: "col" }, "Partition spec"),
    h("th", { scope: "col", class: "number" }, "On a device"),
    h("th", { scope: "col" }, "Kept share"),
    sortable("each", "Bytes of one", "number"),
    sortable("all", "Bytes of all", "number"),
    h("th", { scope: "col" }, "Dtype")));
  search.addEventListener("input", draw);
  every.addEventListener("change", draw);
  draw();
  return h("div", {},
    h("div", { class: "table-tools" },
      h("div", { class: "field" }, h("label", { for: "parameter-search" }, "Search"), search),
      h("label", { class: "check" }, every, "Show every layer by itself")),
    found,
    h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Parameters" },
      h("table", { id: "parameters" }, h("caption", { class: "off-screen" }, "How each parameter is stored; bytes are per device"), head, body)));
}
