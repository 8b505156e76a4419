"""The stylesheet and the script of every report."""

from __future__ import annotations

from autoshard.drawing.svg import FONTS
from autoshard.figures.palette import dark_css

STYLE = f"""
:root{{color-scheme:light dark;--ink:#1f2933;--grey:#5a6775;--line:#d9dee4;--paper:#fff;
--wash:#f5f7f9;--accent:#005a8f;--bad:#b34700}}
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%}}
body{{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 {FONTS}}}
main{{max-width:54rem;margin:0 auto;padding:1.5rem 1rem 3rem}}
h1{{font-size:1.6rem;line-height:1.25;margin:0 0 .3rem;overflow-wrap:anywhere}}
h2{{font-size:1.2rem;margin:2.4rem 0 .5rem}}
h3{{font-size:1rem;margin:1.4rem 0 .3rem}}
p{{margin:.3rem 0 .6rem}}
.lead{{font-size:1.05rem;overflow-wrap:anywhere}}
.note,figcaption{{color:var(--grey);font-size:.9rem}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.6rem;
margin:1.2rem 0;padding:0}}
.tiles div{{background:var(--wash);
border:1px solid var(--line);border-radius:8px;padding:.6rem .8rem}}
.tiles dt{{color:var(--grey);font-size:.82rem}}
.tiles dd{{margin:0;font-size:1.15rem;font-weight:600;overflow-wrap:anywhere}}
.tiles dd small{{display:block;font-size:.82rem;font-weight:400;color:var(--grey)}}
.warn{{border-left:4px solid var(--bad);background:var(--wash);padding:.5rem .9rem;margin:1rem 0}}
.warn h2{{margin:0 0 .2rem;font-size:1rem}}
.bad{{color:var(--bad)}}
ul{{margin:.3rem 0;padding-left:1.2rem}}
li{{overflow-wrap:anywhere}}
figure{{margin:.6rem 0 1rem}}
figure svg{{display:block;max-width:100%;height:auto}}
.narrow{{display:none}}
.scroll{{overflow-x:auto;margin:.4rem 0}}
table{{border-collapse:collapse;font-size:.88rem;min-width:100%}}
th,td{{text-align:left;vertical-align:top;padding:.28rem .9rem .28rem 0;
border-bottom:1px solid var(--line)}}
th{{color:var(--grey);font-weight:600}}
.r{{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}}
.name{{overflow-wrap:anywhere;min-width:14rem}}
.long{{min-width:15rem;overflow-wrap:anywhere}}
tr.total td,tr.chosen td{{font-weight:600}}
th button{{font:inherit;color:inherit;background:none;border:0;padding:0;cursor:pointer;
text-align:inherit}}
th button::after{{content:" \\2195";opacity:.5}}
th[aria-sort=ascending] button::after{{content:" \\2191";opacity:1}}
th[aria-sort=descending] button::after{{content:" \\2193";opacity:1}}
details{{border-top:1px solid var(--line);padding:.35rem 0}}
summary{{cursor:pointer;font-weight:600}}
input[type=search]{{font:inherit;width:100%;max-width:24rem;padding:.35rem .6rem;
margin:.5rem 0 .2rem;border:1px solid var(--grey);border-radius:6px;
background:var(--paper);color:var(--ink)}}
:focus-visible{{outline:2px solid var(--accent);outline-offset:2px}}
code{{font-size:.9em;overflow-wrap:anywhere}}
footer{{margin-top:3rem;color:var(--grey);font-size:.85rem;overflow-wrap:anywhere}}
@media screen and (max-width:46rem){{.wide{{display:none}}.narrow{{display:block}}
main{{padding:1rem .9rem 2rem}}h1{{font-size:1.3rem}}
.stack thead{{display:none}}.stack tr:not([hidden]){{display:flex;flex-wrap:wrap;gap:0 .9rem;
padding:.35rem 0;border-bottom:1px solid var(--line)}}.stack td{{border:0;padding:0}}
.stack .name,.stack .long{{flex-basis:100%;min-width:0}}.stack .long{{color:var(--grey)}}}}
@media screen and (prefers-color-scheme:dark){{:root{{--ink:#e6eaef;--grey:#a3afbc;--line:#39434e;
--paper:#161b21;--wash:#1f262e;--accent:#8fd0f7;--bad:#f0834a}}{dark_css()}}}
@media print{{@page{{margin:14mm}}:root{{color-scheme:light}}main{{max-width:none;padding:0}}
body{{font-size:10.5pt}}h2,h3,summary{{break-after:avoid}}
figure,tr,.tiles div,.warn{{break-inside:avoid}}.scroll{{overflow:visible}}input{{display:none}}
th button::after{{content:""}}table{{min-width:0}}}}
""".strip()

SCRIPT = """
(() => {
  for (const input of document.querySelectorAll("input[data-for]")) {
    const rows = document.getElementById(input.dataset.for).tBodies[0].rows;
    input.hidden = false;
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\\s+/);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
  }
  for (const table of document.querySelectorAll("table[data-sort]")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const value = (row) => {
          const cell = row.cells[column];
          return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
        };
        const compare = (a, b) =>
          typeof a === typeof b && typeof a === "number"
            ? a - b
            : String(a).localeCompare(String(b));
        const rows = [...table.tBodies[0].rows].sort((a, b) => compare(value(a), value(b)));
        table.tBodies[0].append(...(down ? rows.reverse() : rows));
      });
    });
  }
  const folded = [];
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details:not([open])")) {
      part.open = true;
      folded.push(part);
    }
  });
  addEventListener("afterprint", () => {
    while (folded.length) folded.pop().open = false;
  });
})();
""".strip()
