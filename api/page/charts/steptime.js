// Where a step's time goes.

import { h, responsive } from "../dom.js";
import { percent, seconds, secondsTick } from "../format.js";
import { keyTable, stackedBars } from "./bars.js";

/**
 * Seconds of compute in forward and in backward, from the predicted timeline; null where its bars
 * do not add up to what the plan says.
 */
export function computeSplit(plan, trace) {
  const sum = { forward: 0, backward: 0 };
  for (const event of trace.traceEvents) {
    if (event.ph !== "X" || event.cat !== "compute") continue;
    const phase = event.args?.phase;
    if (phase in sum) sum[phase] += (event.args.predicted_us ?? event.dur) / 1e6;
  }
  const whole = plan.step_time.compute_s;
  return Math.abs(sum.forward + sum.backward - whole) <= 0.01 * whole ? sum : null;
}

function contents(plan, split) {
  const time = plan.step_time;
  const exposed = time.exposed_communication_s;
  const hidden = Math.max(0, time.communication_s - exposed);
  const compute = split
    ? [["forward", "Forward compute", split.forward], ["backward", "Backward compute", split.backward]]
    : [["compute", "Compute, forward and backward", time.compute_s]];
  const parts = [
    ...compute,
    ["communication", "Communication not hidden", exposed],
    ["optimizer", "Optimizer’s update", time.optimizer_s],
  ];
  const rows = [
    { label: "One step", parts: parts.map(([kind, , value]) => ({ kind, value, text: kind })) },
  ];
  if (hidden > 0.01 * time.total_s) {
    rows.push({
      label: "Hidden behind compute",
      parts: [{ kind: "hidden-communication", value: hidden, text: "communication" }],
    });
  }
  const share = (value) => percent(value / time.total_s);
  const table = keyTable("Parts of the step time", [
    ...parts.map(([kind, name, value]) => [kind, name, seconds(value), share(value)]),
    ["", "Step", seconds(time.total_s), "", true],
    ["hidden-communication", "Communication hidden", seconds(hidden), ""],
  ]);
  const title = `Step time ${seconds(time.total_s)}: `
    + parts.map(([, name, value]) => `${name} ${share(value)}`).join(", ");
  const top = Math.max(time.total_s, hidden) * 1.02;
  return [responsive((width) => stackedBars(width, { rows, top, format: secondsTick, title })), table];
}

/** The picture, and `refine(trace)`, which divides compute once the timeline is there. */
export function stepTimeFigure(plan) {
  const body = h("div", {}, contents(plan, null));
  const bound = plan.lower_bound_s
    ? h("p", { class: "hint" },
      `By the same cost model no plan on these devices takes less than ${seconds(plan.lower_bound_s)}; `
      + `this one takes ${(plan.step_time.total_s / plan.lower_bound_s).toFixed(2)} times that.`)
    : null;
  return {
    element: h("div", { class: "stack small" }, body, bound),
    refine: (trace) => {
      const split = computeSplit(plan, trace);
      if (split) body.replaceChildren(...contents(plan, split));
    },
  };
}
