/* The timeline: every step of the schedule, thinned for drawing so that of each stretch its largest step stays. */
const steps = D.schedule.length, POINTS = 1500;
const stack = D.groups.map(() => new Float64Array(steps + 1));
D.values.op.forEach((op, i) => {
  const s = stack[D.ops.group[op]];
  s[D.values.start[i]] += D.values.bytes[i];
  s[D.values.end[i] + 1] -= D.values.bytes[i];
});
for (const s of stack) for (let i = 1; i <= steps; i++) s[i] += s[i - 1];
for (let g = 1; g < stack.length; g++) for (let i = 0; i < steps; i++) stack[g][i] += stack[g - 1][i];
const unplanned = new Float64Array(steps);
{
  const U = D.unplanned, f = U.forward, b = U.bytes.length - f, F = Math.max(D.forward, 1), B = Math.max(steps - D.forward, 1);
  const most = (from, to) => { let m = 0; for (let k = Math.floor(from); k < Math.max(Math.ceil(to), Math.floor(from) + 1); k++) m = Math.max(m, U.bytes[k] || 0); return m; };
  for (let i = 0; i < steps; i++) unplanned[i] = i < D.forward ? most(i / F * f, (i + 1) / F * f)
    : most(f + (i - D.forward) / B * b, f + (i + 1 - D.forward) / B * b);
}
let view = [0, steps - 1], held = null, here = D.peak.step, shownSteps = [], unplannedShown = [], plot = null;
function chosen() {
  const [from, to] = view, count = to - from + 1, per = Math.max(1, count / POINTS), found = [];
  unplannedShown = [];
  for (let k = from; k <= to; k += per) {
    let best = Math.floor(k);
    let above = 0;
    for (let i = Math.floor(k); i < Math.min(Math.floor(k + per), to + 1); i++) { if (D.live[i] > D.live[best]) best = i; above = Math.max(above, unplanned[i]); }
    found.push(best); unplannedShown.push(above);
  }
  return found;
}
const BINARY = Array.from({ length: 46 }, (_, i) => 2 ** i);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function columns() {
  shownSteps = chosen();
  const pick = a => shownSteps.map(i => a[i]);
  const data = [shownSteps];
  const byModule = byId("stacked").checked;
  for (let g = stack.length - 1; g >= 0; g--) data.push(byModule ? pick(stack[g]) : shownSteps.map(() => null));
  data.push(pick(D.live), unplannedShown, shownSteps.map(() => D.room));
  return data;
}
function draw() {
  const box = byId("chart"), width = Math.max(280, box.clientWidth), height = Math.max(260, Math.min(460, width * .45));
  if (plot) plot.destroy();
  const stepped = uPlot.paths.stepped({ align: 1 });
  const axis = { stroke: css("--soft"), grid: { stroke: css("--rule"), width: .5 }, ticks: { stroke: css("--rule") } };
  const series = [{}];
  for (let g = stack.length - 1; g >= 0; g--) series.push({ fill: COLOURS[g % COLOURS.length], width: 0, paths: stepped, points: { show: false } });
  series.push({ stroke: css("--ink"), width: 1.5, paths: stepped, points: { show: false } });
  series.push({ stroke: css("--unplanned"), width: 1.5, dash: [3, 3], paths: stepped, points: { show: false } });
  series.push({ stroke: css("--budget"), width: 1.5, dash: [10, 4], points: { show: false } });
  plot = new uPlot({
    width, height, series, legend: { show: false },
    scales: { x: { time: false }, y: { range: (u, lo, hi) => [0, Math.max(hi, 1) * 1.05] } },
    axes: [{ ...axis, values: (u, v) => v.map(x => Number.isInteger(x) ? x.toLocaleString("en") : "") },
      { ...axis, incrs: BINARY, size: 84, values: (u, v) => v.map(bytesText) }],
    cursor: { drag: { x: true, y: false, setScale: false }, focus: { prox: -1 } },
    hooks: {
      setCursor: [u => { if (held === null && u.cursor.idx != null && u.cursor.event) show(shownSteps[u.cursor.idx]); }],
      setSelect: [u => {
        if (u.select.width < 4) return;
        const a = Math.round(u.posToVal(u.select.left, "x")), b = Math.round(u.posToVal(u.select.left + u.select.width, "x"));
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        zoom(a, b);
      }],
      draw: [u => {
        const line = (x, colour, dash) => { const p = u.valToPos(x, "x", true); if (p < u.bbox.left || p > u.bbox.left + u.bbox.width) return; const c = u.ctx; c.save(); c.strokeStyle = colour; c.setLineDash(dash); c.beginPath(); c.moveTo(p, u.bbox.top); c.lineTo(p, u.bbox.top + u.bbox.height); c.stroke(); c.restore(); };
        line(D.forward, css("--soft"), [2, 4]);
        line(here, css("--accent"), []);
      }, lane],
    },
  }, columns(), box);
  plot.over.addEventListener("dblclick", () => zoom(0, steps - 1));
  plot.over.addEventListener("click", () => { held = held === null ? here : null; if (plot.cursor.idx != null) show(shownSteps[plot.cursor.idx]); });
}
/* What the link carries, under the chart: a bar for each result, from where it waits to where it is there. Drawn with
   the chart, which has no scale before. */
function lane(plot) {
  const svg = byId("link"), left = plot.over.offsetLeft, width = plot.over.clientWidth, high = 10;
  svg.style.display = D.link.length ? "block" : "none";
  svg.setAttribute("width", left + width); svg.setAttribute("height", 2 * high + 2);
  const bars = D.link.flatMap(r => [[0, r.to, r.bytes], ...r.back.map(b => [1, b, r.bytes])]);
  svg.replaceChildren(...bars.filter(([, [a, b]]) => b >= view[0] && a <= view[1]).map(([y, [a, b], bytes]) => {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect"), title = document.createElementNS("http://www.w3.org/2000/svg", "title");
    const from = plot.valToPos(Math.max(a, view[0]), "x"), to = plot.valToPos(Math.min(b, view[1]), "x");
    for (const [name, value] of [["x", left + from], ["y", y * (high + 2)], ["width", Math.max(1, to - from)], ["height", high], ["fill", COLOURS[y]], ["opacity", .5]]) bar.setAttribute(name, value);
    title.textContent = `${bytesText(bytes)} ${y ? "fetched from" : "on the way to"} the host, steps ${a} to ${b}`;
    bar.append(title);
    return bar;
  }));
}
function zoom(from, to) {
  from = Math.max(0, Math.min(from, steps - 1)); to = Math.max(from, Math.min(to, steps - 1));
  if (to - from < 8) { const m = (from + to) >> 1; from = Math.max(0, m - 4); to = Math.min(steps - 1, m + 4); }
  view = [from, to]; plot.setData(columns()); show(here);
}
function around(factor) {
  const half = Math.max(4, (view[1] - view[0]) * factor / 2), middle = here >= view[0] && here <= view[1] ? here : (view[0] + view[1]) / 2;
  zoom(Math.round(middle - half), Math.round(middle + half));
}
function aliveAt(step) {
  const found = [];
  for (let i = 0; i < D.values.op.length; i++) if (D.values.start[i] <= step && step <= D.values.end[i] && D.values.bytes[i]) found.push(i);
  return found.sort((a, b) => D.values.bytes[b] - D.values.bytes[a]);
}
function kind(i) {
  const op = D.values.op[i];
  if (!isForward(op)) return "of the backward";
  if (D.values.start[i] >= D.forward) return "recomputed";
  return D.values.end[i] >= D.forward ? "kept for the backward" : "of the forward";
}
function show(step) {
  if (step === undefined) return;
  here = step;
  const op = D.schedule[step], again = isForward(op) && step >= D.forward, line = D.lines[D.ops.line[op]];
  const where = again ? "recomputed in the backward" : isForward(op) ? "forward" : "backward", alive = aliveAt(step);
  const text = `step ${step} of ${steps}, ${where}: ${D.names[D.ops.name[op]]} of ${moduleName(D.ops.module[op])}` + (line ? ` (${line})` : "");
  const box = byId("moment");
  box.replaceChildren(element("div", text), element("div",
    `${bytesText(D.live[step])} live in ${alive.length} results` + (D.room !== null ? `; the budget allows ${bytesText(D.room)}` : "") + (held !== null ? "; held, click the chart to let go" : "")));
  box.dataset.step = step; box.dataset.bytes = D.live[step];
  byId("alive").tBodies[0].replaceChildren(...alive.slice(0, 12).map(i => {
    const o = D.values.op[i];
    return row([D.names[D.ops.name[o]], moduleName(D.ops.module[o]), D.lines[D.ops.line[o]], bytesText(D.values.bytes[i]), kind(i), D.values.end[i]], [3, 5]);
  }));
  if (plot) plot.redraw(false);
}
function legend() {
  const items = byId("stacked").checked ? D.groups.map((g, i) => [COLOURS[i % COLOURS.length], g]) : [];
  items.push(["var(--ink)", `planned, at most ${bytesText(D.peak.bytes)}`], ["var(--unplanned)", `unplanned (dotted), at most ${bytesText(D.unplanned.peak)}; its steps stretched to these`]);
  if (D.room !== null) items.push(["var(--budget)", `what the budget allows (dashed), ${bytesText(D.room)}`]);
  if (D.link.length) items.push([COLOURS[0], "bars below: made, and not all on the host yet"], [COLOURS[1], "fetched, and not read yet"]);
  byId("legend").replaceChildren(...items.map(([colour, text]) => { const li = element("li"), i = element("i"); i.style.background = colour; li.append(i, text); return li; }));
}
const actions = { in: () => around(.4), out: () => around(2.5), all: () => zoom(0, steps - 1), peak: () => { held = null; if (D.peak.step < view[0] || D.peak.step > view[1]) zoom(0, steps - 1); show(D.peak.step); } };
for (const b of document.querySelectorAll("[data-do]")) b.addEventListener("click", () => actions[b.dataset.do]());
byId("stacked").addEventListener("change", () => { legend(); draw(); });
byId("chart").addEventListener("keydown", e => {
  const by = e.shiftKey ? Math.max(1, Math.round((view[1] - view[0]) / 20)) : 1;
  const keys = { ArrowLeft: () => show(Math.max(0, here - by)), ArrowRight: () => show(Math.min(steps - 1, here + by)), "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.all, p: actions.peak, Home: () => show(0), End: () => show(steps - 1), Escape: () => { held = null; show(here); } };
  if (!keys[e.key] || e.ctrlKey || e.metaKey) return;
  e.preventDefault(); keys[e.key]();
  if (here < view[0] || here > view[1]) { const half = (view[1] - view[0]) >> 1; zoom(here - half, here + half); }
});
byId("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark"; draw(); frontier();
});
let waiting = 0;
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { draw(); frontier(); }, 100); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { draw(); frontier(); });
