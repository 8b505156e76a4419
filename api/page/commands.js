// The same request from a terminal.

import { copyButton, h } from "./dom.js";
import { absolute } from "./api.js";

/** A word as a POSIX shell reads it. */
export const quoted = (text) =>
  /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;

/** `curl` line of a request; `withKey` where the service asks for keys. */
export function curlOf(request, withKey) {
  return [
    `curl ${quoted(absolute("v1/plans").href)}`,
    "-H 'Content-Type: application/json' -H 'Prefer: wait=60'",
    ...(withKey ? [`-H "Authorization: Bearer $AUTOSHARD_API_KEY"`] : []),
    `-d ${quoted(JSON.stringify(request))}`,
  ].join(" \\\n  ");
}

/** `autoshard plan` line of a request; a pasted config stands there as a file. */
export function cliOf(request) {
  const { model, cluster, workload = {}, search = {} } = request;
  const words = ["autoshard", "plan", model.preset ?? (model.graph ? "graph.json" : "config.json")];
  const option = (name, value) => {
    if (value !== undefined && value !== null) words.push(name, quoted(String(value)));
  };
  option("--cluster", cluster.preset);
  option("--devices", cluster.devices);
  option("--global-batch", workload.global_batch);
  option("--seq-len", workload.seq_len);
  option("--dtype", workload.dtype);
  if (workload.optimizer && workload.optimizer !== "adamw") option("--optimizer", workload.optimizer);
  if (search.mesh) {
    option("--mesh", Object.entries(search.mesh).map(([n, size]) => `${n}=${size}`).join(","));
  }
  option("--strategy", search.strategy);
  option("--memory-limit", search.memory_limit_bytes);
  option("--trials", search.trials);
  if (search.seed) option("--seed", search.seed);
  return words.join(" ");
}

function block(label, text) {
  return h("div", { class: "command" },
    h("div", { class: "bar" }, h("strong", {}, label), copyButton("Copy", () => text, { class: "button small no-print", "aria-label": `Copy: ${label}` })),
    h("pre", { tabindex: "0" }, text));
}

/**
 * The lines with a button to copy each; `request` is null where a plan does not tell what it was
 * asked with, and `document` is the address of its JSON.
 */
export function commandsOf(request, { withKey, document }) {
  const config = request?.model.config ? " (config.json is what was pasted)" : "";
  return h("details", { class: "commands" },
    h("summary", {}, "The same from a terminal"),
    request ? block(`Plan on your machine${config}`, cliOf(request)) : null,
    request ? block("Plan by this service", curlOf(request, withKey)) : null,
    block("Fetch this plan", `curl ${quoted(document)}`));
}
