"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
function bytesText(amount) {
  if (Math.abs(amount) < 1024) return amount + " B";
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let n = amount / 1024, i = 0;
  while (i < units.length - 1 && Math.abs(n) >= 1023.95) { n /= 1024; i++; }
  return n.toFixed(1) + " " + units[i];
}
function secondsText(s) {
  if (s === 0) return "-";
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) if (s >= scale) return Number((s / scale).toPrecision(3)) + " " + unit;
  return Number((s * 1e9).toPrecision(3)) + " ns";
}
/* All text goes in as text: names are from files and modules. */
function element(tag, text, cls) {
  const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls;
  return e;
}
function row(cells, numeric) {
  const tr = element("tr");
  cells.forEach((c, i) => tr.append(c instanceof Node ? c : element("td", c, numeric.includes(i) ? "n" : "")));
  return tr;
}
const moduleName = i => D.modules[i] || "(the model)";
const isForward = op => op < D.forward;
/* Okabe and Ito's colours, which colour-blind people tell apart. */
const COLOURS = ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#0072b2", "#999999"];
for (const text of D.story) byId("story").append(element("p", text));
for (const [where, pairs] of [["facts", D.facts], ["words", D.words]])
  for (const [name, text] of pairs) byId(where).append(element("dt", name), element("dd", text));
if (D.notes.length) { byId("notes-section").hidden = false; for (const n of D.notes) byId("notes").append(element("li", n)); }
