// The predicted timeline of one step, from a Chrome trace: one lane for compute, one for each axis.

import { freshId, h, responsive, s } from "../dom.js";
import { bytes, seconds, secondsTick } from "../format.js";
import { ticksBetween } from "./scale.js";

const LANE = 34;
const LEGEND = [
  ["forward", "forward"], ["backward", "backward"], ["optimizer", "optimizer"],
  ["communication", "communication not hidden"],
  ["hidden-communication", "communication hidden"],
];
const CLOSEST = 4000; // how far one may zoom in

/** Lanes of rank 0 with their bars in order of time, and the length of all; µs become seconds. */
export function lanesOf(trace) {
  const names = new Map();
  const lanes = new Map();
  let end = 0;
  for (const event of trace.traceEvents) {
    if (event.pid !== 0 && event.pid !== undefined) continue;
    if (event.ph === "M" && event.name === "thread_name") names.set(event.tid, event.args.name);
    if (event.ph !== "X") continue;
    const bar = {
      name: event.name, kind: event.cat, start: event.ts / 1e6, end: (event.ts + event.dur) / 1e6,
      args: event.args ?? {},
    };
    end = Math.max(end, bar.end);
    if (!lanes.has(event.tid)) lanes.set(event.tid, []);
    lanes.get(event.tid).push(bar);
  }
  const rank = (bars) => ["phase", "compute", "comm"].indexOf(bars[0].kind);
  const out = [...lanes].map(([tid, bars]) => ({
    name: names.get(tid) ?? `track ${tid}`, bars: bars.sort((a, b) => a.start - b.start),
  }));
  return { lanes: out.sort((a, b) => rank(a.bars) - rank(b.bars)), end };
}

/** Class of a bar. */
function classOf(bar) {
  if (bar.kind === "comm") {
    const { blocked_us: blocked, predicted_us: whole } = bar.args;
    return blocked < 0.5 * whole ? "hidden-communication" : "communication";
  }
  if (bar.kind === "phase") return bar.name;
  return ["forward", "backward", "optimizer"].includes(bar.args.phase) ? bar.args.phase : "compute";
}

function describe(bar) {
  const parts = [`${bar.name}`, `${seconds(bar.end - bar.start)} from ${seconds(bar.start)}`];
  if (bar.args.bytes) parts.push(bytes(bar.args.bytes));
  if (bar.args.phase && bar.kind !== "phase") parts.push(bar.args.phase);
  if (bar.args.count > 1) parts.push(`${bar.args.count} events together`);
  if (bar.args.blocked_us !== undefined) {
    parts.push(bar.args.blocked_us ? `${seconds(bar.args.blocked_us / 1e6)} not hidden` : "hidden behind compute");
  }
  return parts.join(" · ");
}

export function timelineFigure(trace) {
  const { lanes, end } = lanesOf(trace);
  if (!end) return h("p", { class: "hint" }, "The service kept no timeline for this plan.");
  let [from, to] = [0, end];
  let redraw = () => {};
  let grip = null; // where a drag began
  const range = h("p", { class: "hint", "aria-live": "polite" });
  const read = h("p", { class: "readout" }, "Point at a bar to see what it is.");

  const look = (a, b) => {
    const width = Math.min(end, Math.max(end / CLOSEST, b - a));
    from = Math.min(Math.max(0, a), end - width);
    to = from + width;
    redraw();
  };
  const zoom = (factor, around = (from + to) / 2) =>
    look(around - (around - from) * factor, around + (to - around) * factor);
  const pan = (part) => look(from + (to - from) * part, to + (to - from) * part);
  const ACTIONS = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
    ArrowLeft: () => pan(-0.25), ArrowRight: () => pan(0.25),
    Home: () => look(0, end), 0: () => look(0, end),
    PageUp: () => pan(-0.9), PageDown: () => pan(0.9),
  };

  const draw = (width) => {
    const left = width < 520 ? 0 : Math.min(200, 14 + 7.2 * Math.max(...lanes.map((l) => l.name.length)));
    const right = width - 2;
    const labelled = left > 0;
    const step = LANE + (labelled ? 4 : 22);
    const height = lanes.length * step + 26;
    const x = (t) => left + ((t - from) / (to - from)) * (right - left);
    const clip = freshId("clip");
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "timeline" },
      s("clipPath", { id: clip }, s("rect", { x: left, y: 0, width: right - left, height })));
    const marks = ticksBetween(from, to, width < 520 ? 3 : 7);
    for (const tick of marks) {
      const at = x(tick);
      svg.append(
        s("line", { class: "gridline", x1: at, x2: at, y1: 0, y2: height - 20 }),
        s("text", { class: "tick", x: Math.min(at, right), y: height - 5, "text-anchor": at > right - 34 ? "end" : at < left + 20 ? "start" : "middle" }, secondsTick(tick)));
    }
    const area = s("g", { "clip-path": `url(#${clip})` });
    const texts = s("g", { "clip-path": `url(#${clip})` });
    lanes.forEach((lane, i) => {
      const y = i * step + (labelled ? 0 : 18);
      svg.append(labelled
        ? s("text", { class: "row-label", x: 0, y: y + 22 }, lane.name)
        : s("text", { class: "row-label", x: 0, y: y - 5 }, lane.name));
      svg.append(s("rect", { class: "lane", x: left, y, width: right - left, height: LANE }));
      let run = null; // bars thinner than a pixel that follow each other become one
      const flush = () => {
        if (!run) return;
        area.append(s("rect", { class: `bar ${run.kind}`, x: run.x, y: y + 2, width: Math.max(run.end - run.x, 0.6), height: LANE - 4 }));
        run = null;
      };
      for (const bar of lane.bars) {
        if (bar.end < from || bar.start > to) continue;
        const [a, b] = [Math.max(x(bar.start), left - 2), Math.min(x(bar.end), right + 2)];
        const kind = classOf(bar);
        if (b - a < 1.6) {
          if (run && run.kind === kind && a - run.end < 0.6) run.end = Math.max(run.end, b);
          else {
            flush();
            run = { x: a, end: b, kind };
          }
          continue;
        }
        flush();
        area.append(s("rect", { class: `bar ${kind}`, x: a, y: y + 2, width: b - a - (b - a > 6 ? 1 : 0), height: LANE - 4 }));
        const room = Math.floor((b - a - 8) / 7.1);
        if (room >= Math.min(9, bar.name.length)) {
          // The end of a dotted name says more than its beginning.
          const text = bar.name.length > room ? `…${bar.name.slice(1 - room)}` : bar.name;
          texts.append(s("text", { class: `inside on-${kind}`, x: a + 5, y: y + 22 }, text));
        }
      }
      flush();
    });
    svg.append(area, texts);
    const at = (event) => {
      const box = svg.getBoundingClientRect();
      const px = ((event.clientX - box.left) / box.width) * width;
      const py = ((event.clientY - box.top) / box.height) * height;
      const time = from + ((px - left) / (right - left)) * (to - from);
      return { time, lane: lanes[Math.floor((py - (labelled ? 0 : 18)) / step)] };
    };
    svg.addEventListener("pointermove", (event) => {
      if (grip) return;
      const { time, lane } = at(event);
      const slack = (to - from) / width;
      const found = lane?.bars.find((b) => b.start - slack <= time && time <= b.end + slack);
      if (found) read.textContent = describe(found);
    });
    return { svg, at };
  };

  // Dragging redraws, so what holds the pointer is the box, not the drawing in it.
  let drawing = null;
  let lastWidth = 0;
  const box = responsive((width) => {
    lastWidth = width;
    drawing = draw(width);
    return drawing.svg;
  });
  box.classList.add("zoomable");
  box.tabIndex = 0;
  box.setAttribute("role", "application");
  box.setAttribute("aria-label", "Predicted timeline. Plus and minus zoom, arrow keys move, Home shows the whole step.");
  redraw = () => {
    range.textContent = to - from >= end * 0.999
      ? `The whole step, ${seconds(end)}`
      : `${seconds(from)} to ${seconds(to)} of ${seconds(end)}`;
    if (!lastWidth) return;
    drawing = draw(lastWidth);
    box.replaceChildren(drawing.svg);
  };
  redraw();
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const action = ACTIONS[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // a plain wheel scrolls the page
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, drawing.at(event).time);
  }, { passive: false });
  box.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" && to - from >= end * 0.999) return; // nothing to move
    grip = { x: event.clientX, from, to };
    box.setPointerCapture(event.pointerId);
  });
  box.addEventListener("pointermove", (event) => {
    if (!grip) return;
    const moved = ((event.clientX - grip.x) / box.clientWidth) * (grip.to - grip.from);
    look(grip.from - moved, grip.to - moved);
  });
  for (const name of ["pointerup", "pointercancel"]) box.addEventListener(name, () => (grip = null));

  const button = (label, text, action) =>
    h("button", { type: "button", class: "button small", "aria-label": label, onclick: action }, text);
  return h("div", {},
    h("div", { class: "tools no-print" },
      h("div", { class: "buttons" },
        button("Zoom in", "+", ACTIONS["+"]),
        button("Zoom out", "−", ACTIONS["-"]),
        button("Earlier", "←", ACTIONS.ArrowLeft),
        button("Later", "→", ACTIONS.ArrowRight),
        button("Whole step", "Whole step", ACTIONS.Home)),
      range),
    box,
    h("p", { class: "legend", "aria-hidden": "true" }, LEGEND.map(([kind, text]) =>
      h("span", {}, h("span", { class: `swatch ${kind}` }), text))),
    read);
}
