// Horizontal stacked bars with a legend that is a table.

import { h, s } from "../dom.js";
import { linearTicks } from "./scale.js";

/**
 * Bars as SVG. `rows`: [{label, parts: [{value, kind, text}], marks: [{value, text}]}]; `kind` is the
 * class that colours the part; a part may begin elsewhere than at the end of the one before (`from`).
 */
export function stackedBars(width, { rows, top, format, limit = null, title }) {
  const [left, right, barHeight, rowHeight] = [4, 14, 34, 64];
  const ticks = linearTicks(top, width < 420 ? 4 : 6);
  const scale = (v) => left + (v / top) * (width - left - right);
  const height = rows.length * rowHeight + 28;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  const bottom = rows.length * rowHeight + 2;
  for (const tick of ticks) {
    svg.append(
      s("line", { class: "gridline", x1: scale(tick), x2: scale(tick), y1: 18, y2: bottom }),
      s("text", {
        class: "tick", x: scale(tick), y: bottom + 16,
        "text-anchor": tick === 0 ? "start" : scale(tick) > width - 40 ? "end" : "middle",
      }, format(tick)),
    );
  }
  rows.forEach((row, i) => {
    const y = i * rowHeight + 22;
    svg.append(s("text", { class: "row-label", x: left, y: y - 7 }, row.label));
    let at = 0;
    for (const part of row.parts) {
      const from = part.from ?? at;
      at = from + part.value;
      if (part.value <= 0) continue;
      const [x, w] = [scale(from), scale(at) - scale(from)];
      svg.append(
        s("rect", { class: `part ${part.kind}`, x, y, width: Math.max(w, 0.75), height: barHeight }),
      );
      if (part.text && w > 7.4 * part.text.length + 10) {
        svg.append(
          s("text", { class: `inside on-${part.kind}`, x: x + w / 2, y: y + 22, "text-anchor": "middle" },
            part.text),
        );
      }
    }
  });
  if (limit !== null) {
    const x = scale(limit.value);
    const end = x > width / 2;
    svg.append(
      s("line", { class: "limit", x1: x, x2: x, y1: 10, y2: bottom }),
      s("text", { class: "limit-text", x: end ? x - 6 : x + 6, y: 15, "text-anchor": end ? "end" : "start" },
        limit.text),
    );
  }
  return svg;
}

/** The key of a picture as a table: swatch, name, value, share. */
export function keyTable(caption, rows) {
  return h("table", { class: "key" },
    h("caption", { class: "off-screen" }, caption),
    h("tbody", {},
      rows.map(([kind, name, value, share, bold]) =>
        h("tr", { class: bold ? "sum" : null },
          h("th", { scope: "row" }, h("span", { class: "named" },
            h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), h("span", {}, name))),
          h("td", { class: "number" }, value),
          h("td", { class: "number soft" }, share)),
      )));
}
