// The plan's lists as tables.

import { h, s } from "./dom.js";
import { MEMORY } from "./facts.js";
import { bytes, integer, percent, seconds } from "./format.js";

const scroll = (label, head, body, { id = null, caption = label } = {}) =>
  h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", { id }, h("caption", { class: "off-screen" }, caption),
      h("thead", {}, h("tr", {}, head.map(([text, kind]) => h("th", { scope: "col", class: kind }, text)))),
      h("tbody", {}, body)));

const bar = (share, kind) =>
  s("svg", { class: "cell-bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { width: 100, height: 8, rx: 2 }),
    s("rect", { class: kind, width: Math.max(0.5, 100 * share), height: 8, rx: 2 }));

/** Alternatives, fastest first; puts the rows into `rows`, pointing at one calls `point(index)`. */
export function alternativesTable(points, rows, point) {
  points.forEach((p, index) => {
    rows.push(h("tr", {
      class: p.chosen && p.fits ? "chosen" : p.fits ? null : "over", onpointerenter: () => point(index),
    },
      h("th", { scope: "row", class: "name" }, p.label),
      h("td", { class: "number" }, seconds(p.time)),
      h("td", { class: "number" }, bytes(p.memory)),
      h("td", {}, h("span", { class: `badge ${p.fits ? "fits" : "over"}` }, p.chosen && p.fits ? "chosen" : p.fits ? "fits" : "too large")),
      h("td", { class: "why" }, p.why)));
  });
  return scroll("Alternatives", [["Configuration", "name"], ["Step time", "number"], ["Memory", "number"], ["Fits", ""], ["Why not", ""]], rows, { id: "alternatives" });
}

export function collectivesTable(plan) {
  if (!plan.collectives.length) return h("p", {}, "None: nothing is sent.");
  const most = Math.max(...plan.collectives.map((c) => c.seconds));
  const rows = plan.collectives.map((c) => h("tr", {},
    h("th", { scope: "row", class: "mono" }, c.op),
    h("td", { class: "nowrap" }, c.axes.join(" × ")),
    h("td", {}, c.phase),
    h("td", { class: "number" }, integer(c.count)),
    h("td", { class: "number" }, bytes(c.total_bytes)),
    h("td", { class: "number" }, seconds(c.seconds)),
    h("td", {}, bar(c.seconds / most, "communication"))));
  return scroll("Collectives", [["Collective", ""], ["Over axis", ""], ["Phase", ""], ["Count", "number"], ["Bytes", "number"], ["Time", "number"], ["", ""]], rows, { id: "collectives" });
}

/** What a validation found, in words. */
export function validationText(report) {
  const { passed, collectives, checks, devices } = report;
  const badge = h("span", { class: `badge ${passed ? "succeeded" : "failed"}` }, passed ? "passed" : "failed");
  const sent = collectives.differences === 0
    ? `${integer(collectives.issued)} collectives were issued, exactly those that were predicted.`
    : `${integer(collectives.differences)} collectives differ from the ${integer(collectives.predicted)} predicted: ${collectives.first}`;
  if (!checks) return h("p", {}, badge, ` A dry run on ${integer(devices)} simulated devices: ${sent}`);
  const worst = checks.reduce((a, b) => (b.deviation > a.deviation ? b : a), { deviation: 0, name: "none" });
  return h("p", {}, badge, ` Run on ${integer(devices)} real processes and compared with one device: `
    + `${integer(checks.length)} values (loss, outputs, gradients) differ by ${worst.deviation.toExponential(1)} at most (${worst.name}), `
    + `where ${report.tolerance.toExponential(0)} is allowed. ${sent}`);
}

/** Prediction and measurement as pairs of bars. */
export function measurementsTable(measurements) {
  const rows = measurements.flatMap((m) => {
    const pairs = [["Step time", m.predicted_step_time_s, m.step_time_s, seconds]];
    if (m.peak_memory_bytes !== null && m.predicted_memory_bytes !== null) {
      pairs.push(["Peak memory", m.predicted_memory_bytes, m.peak_memory_bytes, bytes]);
    }
    if (m.memory && m.predicted_memory) {
      for (const [field, , name] of MEMORY) {
        const [said, found] = [m.predicted_memory[field], m.memory[field]];
        if (said || found) pairs.push([`of it ${name}`, said, found, bytes]);
      }
    }
    return pairs.map(([name, predicted, measured, text]) => {
      const most = Math.max(predicted, measured);
      const off = measured ? predicted / measured - 1 : null;
      return h("tr", {},
        h("th", { scope: "row" }, name),
        h("td", {}, bar(predicted / most, "predicted"), bar(measured / most, "measured")),
        h("td", { class: "number" }, text(predicted)),
        h("td", { class: "number" }, text(measured)),
        h("td", { class: "number" }, off === null ? "" : `${off >= 0 ? "+" : "−"}${percent(Math.abs(off))}`));
    });
  });
  return scroll("Predicted beside measured", [["", ""], ["", ""], ["Predicted", "number"], ["Measured", "number"], ["Prediction off by", "number"]], rows, { id: "measurements" });
}
