// Memory of the fullest device, by category, against what may be used.

import { h, responsive } from "../dom.js";
import { MEMORY, memoryTotal } from "../facts.js";
import { bytes, percent } from "../format.js";
import { keyTable, stackedBars } from "./bars.js";

export function memoryFigure(plan) {
  const memory = plan.memory;
  const total = memoryTotal(memory);
  const limit = memory.limit_bytes;
  const parts = MEMORY.map(([field, kind, name]) => ({
    value: memory[field], kind, text: name.toLowerCase(),
  }));
  const rows = [{ label: "", parts }];
  const table = keyTable("Memory of the fullest device", [
    ...MEMORY.map(([field, kind, name]) =>
      [kind, name, bytes(memory[field]), percent(memory[field] / total)]),
    ["", "Sum", bytes(total), limit === null ? "" : `${percent(total / limit)} of ${bytes(limit)}`, true],
  ]);
  const mark = limit === null ? null : { value: limit, text: `limit ${bytes(limit)}` };
  const title = `Memory of the fullest device: ${bytes(total)}`
    + (limit === null ? "" : ` of ${bytes(limit)}`);
  const top = Math.max(total, limit ?? 0) * 1.02;
  return h("div", {},
    responsive((width) => stackedBars(width, { rows, top, format: bytes, limit: mark, title })),
    table);
}
