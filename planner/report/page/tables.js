/* The frontier, the tree of modules and the table of operations. */
let frontierPlot = null;
function frontier() {
  if (!D.frontier.length) return;
  byId("frontier-section").hidden = false;
  const all = [...D.frontier].sort((a, b) => a.peak - b.peak), own = D.own_point, box = byId("frontier");
  const xs = [...new Set([...all.map(p => p.peak), own.peak])].sort((a, b) => a - b);
  const at = (list, x) => { const p = list.find(p => p.peak === x); return p ? p.overhead * 100 : null; };
  if (frontierPlot) frontierPlot.destroy();
  const axis = { stroke: css("--soft"), grid: { stroke: css("--rule"), width: .5 }, ticks: { stroke: css("--rule") } };
  frontierPlot = new uPlot({
    width: Math.max(280, box.clientWidth), height: 260, legend: { show: false }, cursor: { drag: { x: false, y: false } },
    scales: { x: { time: false, range: (u, lo, hi) => [lo - (hi - lo) * .05 - 1, hi + (hi - lo) * .05 + 1] }, y: { range: (u, lo, hi) => [Math.min(0, lo), Math.max(1, hi) * 1.1] } },
    axes: [{ ...axis, space: 80, incrs: BINARY, values: (u, v) => v.map(bytesText) }, { ...axis, values: (u, v) => v.map(x => x + " %") }],
    series: [{}, { stroke: css("--accent"), width: 2, spanGaps: true, points: { show: true, size: 7 } }, { stroke: css("--budget"), width: 0, points: { show: true, size: 13, fill: css("--budget") } }],
  }, [xs, xs.map(x => at(all, x)), xs.map(x => at([own], x))], box);
  byId("frontier-table").tBodies[0].replaceChildren(...all.map(p => row([p.budget + (p.peak === own.peak && p.overhead === own.overhead ? " (this plan)" : ""), bytesText(p.peak), (p.overhead * 100).toFixed(1) + " %"], [1, 2])));
}

const tree = { name: "", path: "", children: new Map(), ops: 0, rerun: 0, kept: 0, again: 0, seconds: 0 };
for (let op = 0; op < D.forward; op++) {
  const runs = D.ops.runs[op];
  let node = tree;
  const walk = [tree];
  for (const part of D.modules[D.ops.module[op]].split(".").filter(Boolean)) {
    if (!node.children.has(part)) node.children.set(part, { name: part, path: node.path ? node.path + "." + part : part, children: new Map(), ops: 0, rerun: 0, kept: 0, again: 0, seconds: 0 });
    node = node.children.get(part);
    walk.push(node);
  }
  for (const n of walk) { n.ops++; n.rerun += runs > 0; n.kept += D.ops.kept[op]; n.again += runs * D.ops.bytes[op]; n.seconds += runs * D.ops.seconds[op]; }
}
const open = new Set([""]);
for (let node = tree; node.children.size === 1;) { node = node.children.values().next().value; open.add(node.path); }
function modules() {
  const rows = [];
  (function add(node, depth) {
    const cell = element("td", undefined, "name"), has = node.children.size > 0;
    cell.style.paddingLeft = .5 + depth * 1.2 + "rem";
    const name = node.name || "(the model)";
    if (has) {
      const b = element("button", (open.has(node.path) ? "▾ " : "▸ ") + name);
      b.type = "button"; b.dataset.path = node.path; b.setAttribute("aria-expanded", open.has(node.path));
      b.addEventListener("click", () => { if (!open.delete(node.path)) open.add(node.path); modules(); document.querySelector(`[data-path="${CSS.escape(node.path)}"]`).focus(); });
      cell.append(b);
    } else cell.append("   " + name);
    rows.push(row([cell, node.ops, node.rerun || "-", node.kept ? bytesText(node.kept) : "-", node.again ? bytesText(node.again) : "-", secondsText(node.seconds)], [1, 2, 3, 4, 5]));
    if (has && open.has(node.path)) for (const child of node.children.values()) add(child, depth + 1);
  })(tree, 0);
  byId("modules").tBodies[0].replaceChildren(...rows);
}

const PAGE = 100, opCount = D.ops.name.length;
const state = op => !isForward(op) ? "backward" : D.ops.runs[op] ? "re-run" + (D.ops.runs[op] > 1 ? " " + D.ops.runs[op] + "x" : "") : D.ops.kept[op] ? "kept" : "freed";
const COLUMNS = [["#", op => op, 1], ["operation", op => D.names[D.ops.name[op]]], ["module", op => moduleName(D.ops.module[op])], ["line", op => D.lines[D.ops.line[op]]],
  ["bytes", op => D.ops.bytes[op], 1, bytesText], ["time", op => D.ops.seconds[op], 1, secondsText], ["is", state]];
const texts = Array.from({ length: opCount }, (_, op) => [1, 2, 3, 6].map(c => COLUMNS[c][1](op)).join(" ").toLowerCase());
let order = Array.from({ length: opCount }, (_, i) => i), sorted = 0, down = false, first = 0;
function sift() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean), key = COLUMNS[sorted][1];
  order = [];
  for (let op = 0; op < opCount; op++) if (words.every(w => texts[op].includes(w))) order.push(op);
  const keys = new Map(order.map(op => [op, key(op)]));
  order.sort((a, b) => { const x = keys.get(a), y = keys.get(b), c = x < y ? -1 : x > y ? 1 : a - b; return down ? -c : c; });
  first = 0; operations();
}
function operations() {
  byId("ops").tHead.rows[0].replaceChildren(...COLUMNS.map(([name, , numeric], i) => {
    const th = element("th", undefined, numeric ? "n" : ""), b = element("button", name + (i === sorted ? (down ? " ▾" : " ▴") : ""));
    b.type = "button"; th.setAttribute("aria-sort", i !== sorted ? "none" : down ? "descending" : "ascending");
    b.addEventListener("click", () => { if (sorted === i) down = !down; else { sorted = i; down = !!numeric && i > 0; } sift(); byId("ops").tHead.rows[0].cells[i].firstChild.focus(); });
    th.append(b); return th;
  }));
  byId("ops").tBodies[0].replaceChildren(...order.slice(first, first + PAGE).map(op => row(COLUMNS.map(c => c[3] ? c[3](c[1](op)) : c[1](op)), [0, 4, 5])));
  byId("count").textContent = order.length ? `${(first + 1).toLocaleString("en")}-${Math.min(first + PAGE, order.length).toLocaleString("en")} of ${order.length.toLocaleString("en")} operations` : "no operation matches";
  byId("before").disabled = first === 0; byId("after").disabled = first + PAGE >= order.length;
}
byId("before").addEventListener("click", () => { first = Math.max(0, first - PAGE); operations(); });
byId("after").addEventListener("click", () => { first += PAGE; operations(); });
let typing = 0;
byId("search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(sift, 120); });
legend(); draw(); show(D.peak.step); modules(); sift(); frontier();
document.documentElement.dataset.ready = "yes";
