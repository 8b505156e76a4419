// The mesh on the nodes: boxes are nodes, cells are devices, colours say where on an axis they are.

import { announce, freshId, h, responsive, s } from "../dom.js";
import { axesOf, deviceCount, groupOf, tiersOf } from "../facts.js";
import { integer, plural } from "../format.js";

const MOST_DRAWN = 128; // devices that are drawn one by one; of more, the first and the last nodes
const MOST_SQUARES = 2048;
const COLOURS = 8;
const TALLEST = 260; // px of the picture of all nodes

const colour = (axis, device) => (axis ? `c${axis.index(device) % COLOURS}` : "c0");

/** How an axis lies on the machines, in words. */
function axisText(axis, plan) {
  const perNode = plan.cluster.devices_per_node;
  const links = tiersOf(plan.cluster).map((tier) => tier.link);
  const [inside, across] = [links[0], links.at(-1)];
  const group = groupOf(axis, 0);
  const shown = group.length > 5 ? `${group.slice(0, 3).join(", ")}, … ${integer(group.at(-1))}` : group.join(", ");
  const where = axis.nodes === 1
    ? `inside a node, over ${inside}`
    : axis.stride % perNode === 0 || axis.stride >= perNode
      ? `one device on each of ${plural(axis.nodes, "node")}, over ${across}`
      : `over ${plural(axis.nodes, "node")}, by ${inside} and ${across}`;
  return `${integer(axis.size)} devices of a group: ${shown}; ${where}`;
}

export function meshFigure(plan) {
  const axes = axesOf(plan);
  const devices = deviceCount(plan.mesh);
  const perNode = Math.min(plan.cluster.devices_per_node, devices);
  const nodes = Math.ceil(devices / perNode);
  const whole = devices <= MOST_DRAWN;
  let by = axes[0] ?? null;
  let cells = new Map();
  let current = 0;

  const read = h("p", { class: "readout", "aria-live": "off" });
  const place = (device) =>
    axes.map((a) => `${a.name} ${integer(a.index(device))}`).join(", ") || "the only one";

  const light = (device) => {
    cells.get(current)?.setAttribute("tabindex", "-1");
    current = device;
    cells.get(current)?.setAttribute("tabindex", "0");
    const peers = new Set(axes.flatMap((a) => groupOf(a, device)));
    for (const [other, cell] of cells) {
      cell.classList.toggle("current", other === device);
      cell.classList.toggle("peer", other !== device && peers.has(other));
    }
    const node = Math.floor(device / perNode);
    const partners = axes.map((a) => {
      const rest = groupOf(a, device).filter((d) => d !== device);
      const names = rest.length > 6 ? `${rest.slice(0, 4).join(", ")}, … ${integer(rest.at(-1))}` : rest.join(", ");
      return `over ${a.name} with ${names}`;
    });
    read.textContent = `Device ${integer(device)} on node ${integer(node)}: ${place(device)}`
      + (partners.length ? `. Talks ${partners.join("; ")}.` : ".");
  };

  const grid = Math.min(perNode, perNode > 4 ? Math.ceil(perNode / 2) : perNode);
  const moved = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid, ArrowUp: -grid }[event.key];
    const shown = [...cells.keys()];
    const to = event.key === "Home" ? shown[0] : event.key === "End" ? shown.at(-1)
      : step ? shown[Math.min(shown.length - 1, Math.max(0, shown.indexOf(current) + step))] : null;
    if (to === null) return;
    event.preventDefault();
    light(to);
    cells.get(to).focus();
    announce(read.textContent);
  };

  /** Nodes with their devices; `list` holds node numbers, null for those left out. */
  const drawNodes = (width, list) => {
    const rows = Math.ceil(perNode / grid);
    const pad = 8;
    let [cell, perRow] = [16, 1];
    for (const size of [64, 56, 48, 40, 34, 30, 26, 22, 18]) {
      cell = size;
      perRow = Math.max(1, Math.floor((width + 12) / (grid * size + 2 * pad + 12)));
      const height = Math.ceil(list.length / perRow) * (rows * size + 40);
      if (grid * size + 2 * pad > width) continue;
      const enough = size >= 34 ? list.length : 2; // of elided nodes, in a row
      if (list.includes(null) ? perRow >= enough : height <= 380) break;
    }
    const [w, hgt] = [grid * cell + 2 * pad, rows * cell + 2 * pad + 18];
    const lines = Math.ceil(list.length / perRow);
    const used = Math.min(perRow, list.length) * (w + 12) - 12;
    const svg = s("svg", {
      viewBox: `0 0 ${width} ${lines * (hgt + 12)}`, role: "group",
      "aria-label": `${plural(nodes, "node")}, ${plural(devices, "device")}; arrow keys go from device to device`,
    });
    const shift = Math.max(0, (width - used) / 2);
    cells = new Map();
    list.forEach((node, i) => {
      const [x, y] = [shift + (i % perRow) * (w + 12), Math.floor(i / perRow) * (hgt + 12) + 1];
      if (node === null) {
        svg.append(
          s("text", { class: "dots", x: x + w / 2, y: y + hgt / 2, "text-anchor": "middle" }, "…"),
          s("text", { class: "tick", x: x + w / 2, y: y + hgt / 2 + 20, "text-anchor": "middle" },
            `${integer(nodes - list.length + 1)} more`));
        return;
      }
      const count = Math.min(perNode, devices - node * perNode);
      svg.append(
        s("rect", { class: "node", x: x + 0.5, y, width: w - 1, height: hgt, rx: 8 }),
        s("text", { class: "tick", x: x + pad, y: y + 15 }, `node ${integer(node)}`));
      for (let k = 0; k < count; k++) {
        const device = node * perNode + k;
        const [cx, cy] = [x + pad + (k % grid) * cell, y + 20 + Math.floor(k / grid) * cell];
        const group = s("g", {
          class: "device", tabindex: device === current ? "0" : "-1", role: "img",
          "aria-label": `device ${device}: ${place(device)}`,
          onpointerenter: () => light(device), onclick: () => light(device),
          onfocus: () => light(device), onkeydown: moved,
        }, s("rect", { class: colour(by, device), x: cx + 2, y: cy + 2, width: cell - 4, height: cell - 4, rx: 4 }));
        if (cell >= 26 && String(device).length * 8.2 <= cell - 6) {
          group.append(s("text", { class: "rank", x: cx + cell / 2, y: cy + cell / 2 + (cell >= 48 ? -2 : 4), "text-anchor": "middle" }, String(device)));
        }
        const coordinates = axes.map((a) => a.index(device)).join("·");
        if (cell >= 48 && coordinates.length * 6.4 < cell - 6) {
          group.append(s("text", { class: "coordinates", x: cx + cell / 2, y: cy + cell / 2 + 14, "text-anchor": "middle" }, coordinates));
        }
        cells.set(device, group);
        svg.append(group);
      }
    });
    light(cells.has(current) ? current : 0);
    return svg;
  };

  /** All nodes as squares, coloured where a node has one place on the axis. */
  const drawAll = (width) => {
    const each = 2 ** Math.max(0, Math.ceil(Math.log2(nodes / MOST_SQUARES)));
    const squares = Math.ceil(nodes / each);
    const block = by ? Math.max(1, Math.round((by.stride / perNode) / each)) : 1;
    // Whole runs of one colour to a row, as large as the height allows.
    let [size, perRow] = [0, 1];
    for (let columns = block; columns <= squares + block; columns += block) {
      const fits = Math.min(14, Math.floor(width / columns), Math.floor(TALLEST / Math.ceil(squares / columns)));
      if (fits > size) [size, perRow] = [fits, columns];
    }
    if (size < 3) { // a run is longer than a row
      size = Math.max(3, Math.floor(Math.sqrt((width * TALLEST) / squares) * 0.8));
      perRow = Math.floor(width / size);
    }
    const lines = Math.ceil(squares / perRow);
    const svg = s("svg", {
      viewBox: `0 0 ${width} ${lines * size}`, role: "img",
      "aria-label": `All ${plural(nodes, "node")}, coloured by ${by ? by.name : "nothing"}`,
    });
    const shift = Math.floor((width - perRow * size) / 2);
    const even = by && by.stride % (perNode * each) === 0;
    for (let i = 0; i < squares; i++) {
      svg.append(s("rect", {
        class: even ? colour(by, i * each * perNode) : "mixed",
        x: shift + (i % perRow) * size, y: Math.floor(i / perRow) * size, width: size - 1, height: size - 1,
      }));
    }
    const text = `All ${plural(nodes, "node")}, ${each > 1 ? `${each} to a square` : "one to a square"}; `
      + (even ? `the colour changes with the index on ${by.name}` : `each holds several places on ${by.name}`);
    return h("div", {}, svg, h("p", { class: "hint" }, text));
  };

  const body = h("div", { class: "stack small" });
  const draw = () => {
    const ends = [0, 1, null, nodes - 1];
    const list = whole || nodes <= ends.length ? Array.from({ length: nodes }, (_, i) => i) : ends;
    body.replaceChildren(
      ...[
        responsive((width) => drawNodes(width, list)),
        whole || nodes < 8 ? null : responsive(drawAll),
      ].filter(Boolean));
  };
  draw();

  const group = freshId("colour");
  const choice = axes.length < 2 ? null
    : h("div", { class: "tools" },
      h("span", { class: "soft", id: group }, "Colour by axis"),
      h("div", { class: "choice small", role: "radiogroup", "aria-labelledby": group },
        axes.map((axis) =>
          h("label", {},
            h("input", {
              type: "radio", name: group, value: axis.name, checked: axis === by,
              onchange: () => { by = axis; draw(); },
            }),
            h("span", {}, axis.name)))));
  return h("div", { class: "stack small" },
    choice,
    body,
    read,
    h("dl", { class: "facts" },
      axes.flatMap((axis) => [h("dt", {}, `${axis.name} = ${integer(axis.size)}`), h("dd", {}, axisText(axis, plan))]),
      axes.length ? [] : [h("dt", {}, "mesh"), h("dd", {}, "one device: nothing is divided")]));
}
