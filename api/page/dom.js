// Elements by calls. Text is never parsed as markup, and no style attribute is written.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

/** An HTML element: `h("p", {class: "note"}, "text", child)`; null children are left out. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element, as `h` makes HTML ones. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export const byId = (id) => document.getElementById(id);

const NARROWEST = 120; // px; less is a moment between two layouts

/** A box whose content is drawn for its width, again whenever that changes. */
export function responsive(draw) {
  const box = h("div", { class: "chart" });
  let drawn = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width < NARROWEST || width === drawn) return;
    drawn = width;
    box.replaceChildren(draw(width));
  }).observe(box);
  return box;
}

/** Says something to screen readers, and to nobody else. */
export function announce(text) {
  const region = byId("announce");
  region.textContent = "";
  // A region that is emptied and filled in one turn counts as unchanged.
  setTimeout(() => (region.textContent = text), 50);
}

/** Copies text; works on plain http too, where `navigator.clipboard` is absent. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { readonly: true, class: "off-screen", "aria-hidden": "true" });
    area.value = text;
    const before = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    before?.focus();
    return done;
  }
}

/** A button that copies what `text()` gives, and says so. */
export function copyButton(label, text, attributes = {}) {
  const button = h("button", { type: "button", class: "button", ...attributes }, label);
  button.addEventListener("click", async () => {
    const done = await copy(text());
    button.textContent = done ? "Copied" : "Select and copy by hand";
    announce(button.textContent);
    setTimeout(() => (button.textContent = label), 1600);
  });
  return button;
}

/** Saves text or a Blob as a file. */
export function save(name, content, type) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

let serial = 0;

/** An id that no other element of the page has. */
export const freshId = (stem) => `${stem}-${++serial}`;
