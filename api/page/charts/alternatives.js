// What else was priced: step time against memory, with the limit and the Pareto front.

import { h, responsive, s } from "../dom.js";
import { memoryTotal } from "../facts.js";
import { bytes, plural, seconds, secondsTick } from "../format.js";
import { scaleOf } from "./scale.js";

/** The plan and its alternatives that have figures, fastest first. */
export function pointsOf(plan) {
  const chosen = {
    label: plan.label, time: plan.step_time.total_s, memory: memoryTotal(plan.memory),
    fits: plan.memory.limit_bytes === null || memoryTotal(plan.memory) <= plan.memory.limit_bytes,
    chosen: true,
  };
  chosen.why = chosen.fits ? "chosen: the fastest that fits" : "as asked for; it does not fit";
  const others = plan.alternatives
    .filter((a) => a.step_time_s !== null && a.memory_bytes !== null)
    .map((a) => ({
      label: a.label, time: a.step_time_s, memory: a.memory_bytes, fits: a.fits, why: a.why,
      chosen: false,
    }));
  return [chosen, ...others].sort((a, b) => a.time - b.time);
}

/** Of the points that fit, those than which none is both faster and smaller. */
function front(points) {
  const out = [];
  for (const p of points.filter((q) => q.fits)) {
    if (!out.length || p.memory < out.at(-1).memory) out.push(p);
  }
  return out;
}

const MARKS = {
  chosen: (x, y) => s("path", { d: star(x, y, 11) }),
  fits: (x, y) => s("circle", { cx: x, cy: y, r: 6 }),
  over: (x, y) => s("path", { d: `M${x - 5} ${y - 5}l10 10m0 -10l-10 10` }),
};

function star(x, y, r) {
  const points = Array.from({ length: 10 }, (_, i) => {
    const [radius, angle] = [i % 2 ? r * 0.45 : r, (Math.PI * i) / 5];
    return `${(x + radius * Math.sin(angle)).toFixed(1)} ${(y - radius * Math.cos(angle)).toFixed(1)}`;
  });
  return `M${points.join("L")}Z`;
}

// What needs far more memory or time than matters is left to the table: it would press all else
// into a corner.
const FAR_MEMORY = 2.5;
const FAR_TIME = 6;

/** The scatter; `lit(index)` is called for the point that is pointed at. */
export function alternativesFigure(plan, { lit }) {
  const points = pointsOf(plan);
  const limit = plan.memory.limit_bytes;
  let current = points.findIndex((p) => p.chosen);
  const read = h("div", { class: "readout", "aria-live": "polite" });
  const chosen = points[current];
  const room = FAR_MEMORY * Math.max(limit ?? 0, chosen.memory);
  const drawn = points.map((p) =>
    p.chosen || limit === null || (p.memory <= room && p.time <= FAR_TIME * chosen.time));
  const shown = points.filter((_, i) => drawn[i]);
  let marks = [];

  const show = (index, tell = true) => {
    marks[current]?.classList.remove("current");
    marks[current]?.setAttribute("tabindex", "-1");
    current = index;
    marks[current]?.classList.add("current");
    marks[current]?.setAttribute("tabindex", "0");
    const p = points[index];
    read.replaceChildren(
      h("strong", {}, p.label),
      h("span", { class: "number" }, `${seconds(p.time)} · ${bytes(p.memory)}${p.fits ? "" : " · does not fit"}`),
      h("span", {}, p.why));
    if (tell) lit(index);
  };

  const moved = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const order = [...points.keys()].filter((i) => drawn[i]);
    const place = order.indexOf(current);
    const to = event.key === "Home" ? order[0] : event.key === "End" ? order.at(-1)
      : step ? order[Math.min(order.length - 1, Math.max(0, place + step))] : null;
    if (to === null || !marks[to]) return;
    event.preventDefault();
    show(to);
    marks[to].focus();
  };

  const draw = (width) => {
    const height = width < 480 ? 270 : 320;
    const box = { left: 64, right: width - 16, top: 26, bottom: height - 46 };
    const x = scaleOf([...shown.map((p) => p.memory), ...(limit === null ? [] : [limit])], box.left, box.right);
    const y = scaleOf(shown.map((p) => p.time), box.bottom, box.top, { loose: true });
    const svg = s("svg", {
      viewBox: `0 0 ${width} ${height}`, role: "group",
      "aria-label": "Step time against memory of what was priced; arrow keys go from point to point",
    });
    let free = -1e9; // tick labels that would touch the one before are left out
    for (const tick of x.ticks) {
      svg.append(s("line", { class: "gridline", x1: x.at(tick), x2: x.at(tick), y1: box.top, y2: box.bottom }));
      const text = bytes(tick);
      const half = text.length * 3.6;
      if (x.at(tick) - half < free || x.at(tick) + half > width) continue;
      free = x.at(tick) + half + 8;
      svg.append(s("text", { class: "tick", x: x.at(tick), y: box.bottom + 17, "text-anchor": "middle" }, text));
    }
    for (const tick of y.ticks) {
      svg.append(
        s("line", { class: "gridline", x1: box.left, x2: box.right, y1: y.at(tick), y2: y.at(tick) }),
        s("text", { class: "tick", x: box.left - 8, y: y.at(tick) + 4, "text-anchor": "end" }, secondsTick(tick)));
    }
    const note = (scale) => (scale.log ? " (log scale)" : "");
    svg.append(
      s("text", { class: "axis", x: (box.left + box.right) / 2, y: height - 8, "text-anchor": "middle" },
        `Memory of the fullest device${note(x)}`),
      s("text", { class: "axis", x: 4, y: 12 }, `Step time${note(y)}`));
    if (limit !== null) {
      const at = x.at(limit);
      const end = at > (box.left + box.right) / 2;
      svg.append(
        s("rect", { class: "beyond", x: at, y: box.top, width: Math.max(0, box.right - at), height: box.bottom - box.top }),
        s("line", { class: "limit", x1: at, x2: at, y1: box.top, y2: box.bottom }),
        s("text", { class: "limit-text", x: end ? at - 6 : at + 6, y: box.top + 14, "text-anchor": end ? "end" : "start" },
          `limit ${bytes(limit)}`));
    }
    const best = front(shown);
    if (best.length > 1) {
      svg.append(s("path", { class: "front", d: best.map((p, i) => `${i ? "L" : "M"}${x.at(p.memory)} ${y.at(p.time)}`).join("") }));
    }
    marks = points.map((p, index) => {
      if (!drawn[index]) return null;
      const kind = p.chosen ? "chosen" : p.fits ? "fits" : "over";
      const [px, py] = [x.at(p.memory), y.at(p.time)];
      return s("g", {
        class: `point ${kind}`, tabindex: "-1", role: "img",
        "aria-label": `${p.label}: ${seconds(p.time)}, ${bytes(p.memory)}. ${p.why}`,
        onpointerenter: () => show(index), onclick: () => show(index), onfocus: () => show(index),
        onkeydown: moved,
      }, s("circle", { class: "target", cx: px, cy: py, r: 13 }), MARKS[kind](px, py));
    });
    // Drawn from slow to fast, so that the better one lies on top, and the chosen one last.
    const order = [...marks.keys()].filter((i) => marks[i]).reverse().sort((a, b) => points[a].chosen - points[b].chosen);
    svg.append(...order.map((i) => marks[i]));
    show(current, false);
    return svg;
  };

  const legend = h("p", { class: "legend", "aria-hidden": "true" },
    [["chosen", "chosen"], ["fits", "fits"], ["over", "does not fit"]].map(([kind, text]) =>
      h("span", {}, s("svg", { class: "mark", viewBox: "0 0 24 24", width: 20, height: 20 },
        s("g", { class: `point ${kind}` }, MARKS[kind](12, 12))), text)),
    h("span", {}, s("svg", { class: "mark", viewBox: "0 0 24 24", width: 20, height: 20 },
      s("path", { class: "front", d: "M1 12H23" })), "fastest for its memory"));
  const left = points.length - shown.length;
  const note = left === 0 ? null
    : h("p", { class: "hint" }, `${plural(left, "configuration")} that need far more memory or time: in the table below.`);
  return { element: h("div", {}, responsive(draw), legend, note, read), show: (index) => show(index, true), points };
}
