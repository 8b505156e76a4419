// Errors of the service for people.

import { h } from "./dom.js";

/** What would fit, as buttons where it is one number of the form. */
function nearestList(nearest, apply) {
  const known = [
    [/^(\d+) devices?$/, (n) => ({ devices: n })],
    [/^global batch (\d+)$/, (n) => ({ global_batch: n })],
  ];
  return h("ul", { class: "plain" }, nearest.map((text) => {
    for (const [pattern, change] of known) {
      const found = pattern.exec(text);
      if (found && apply) {
        return h("li", {}, h("button", {
          type: "button", class: "button small", onclick: () => apply(change(Number(found[1]))),
        }, `Try ${text}`));
      }
    }
    return h("li", {}, text);
  }));
}

/** A problem document as a card; `apply(changes)` sets fields of the form and plans again. */
export function problemCard(body, { status = null, apply = null } = {}) {
  const infeasible = Boolean(body.binding);
  const title = infeasible ? "Nothing fits" : body.title || "That did not work";
  const detail = (body.detail || "").split("\n").filter((line) =>
    !infeasible || !/^what (binds|would fit):/.test(line));
  return h("section", { class: "card stack", "aria-labelledby": "problem-title" },
    h("div", { class: "problem" },
      h("h2", { id: "problem-title", tabindex: "-1" }, title),
      detail.map((line) => h("p", {}, line)),
      body.errors?.length
        ? h("ul", { class: "plain" }, body.errors.map((e) =>
          h("li", {}, e.pointer ? h("code", {}, e.pointer) : null, e.pointer ? ": " : null, e.detail)))
        : null),
    body.binding
      ? h("div", {}, h("h3", {}, "What binds"), h("p", {}, body.binding))
      : null,
    body.nearest?.length
      ? h("div", { class: "stack small" }, h("h3", {}, "What would fit"), nearestList(body.nearest, apply))
      : null,
    status || body.instance
      ? h("p", { class: "hint" }, [status ? `Status ${status}` : null, body.instance ? `request ${body.instance}` : null].filter(Boolean).join(", "))
      : null);
}
