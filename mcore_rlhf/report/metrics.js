/* ---- what was measured ---- */
const number = (value) => (typeof value === "number" ? value : value === "inf" ? Infinity : value === "-inf" ? -Infinity : NaN);
const metricNames = (run) => [...new Set(run.steps.flatMap((s) => Object.keys(s.metrics)))];

// Round numbers between two others: where lines are drawn, and what they are called.
function rounds(low, high, most) {
  const rough = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough)), step = power * ([1, 2, 2.5, 5, 10].find((k) => k * power >= rough) || 10);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9 && found.length <= most + 1; n += 1) found.push(+(n * step).toPrecision(12));
  return found;
}

function curve(name, points) {
  const known = points.filter((p) => Number.isFinite(p.value)), host = el("div", { class: "plot" }), read = el("span", { class: "reading" });
  let at = points.length - 1, marker = null, place = null;
  const say = (p) => `step ${count(p.step)}: ${short(Number.isFinite(p.value) ? p.value : String(p.value))}${p.state === "committed" ? "" : ` (${p.state})`}`;
  const choose = (n) => {
    at = Math.max(0, Math.min(points.length - 1, n));
    read.textContent = say(points[at]);
    host.setAttribute("aria-valuenow", at);
    host.setAttribute("aria-valuetext", say(points[at]));
    if (marker && place) { const [x, y] = place(points[at]); marker.replaceChildren(svg("line", { x1: x, x2: x, y1: 8, y2: 122, class: "cursor" }), svg("circle", { cx: x, cy: y, r: 5, class: "cursor" })); }
  };
  const draw = (W) => {
    const low = known.length ? Math.min(...known.map((p) => p.value)) : 0, high = known.length ? Math.max(...known.map((p) => p.value)) : 1, pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    const lines = rounds(low - pad, high + pad, 4), labels = lines.map(short), left = Math.max(...labels.map((t) => wide(t, "11px system-ui, sans-serif")), 10) + 10, right = W - 12, top = 12, bottom = 118;
    const first = points[0].step, last = points[points.length - 1].step, X = (step) => (last === first ? (left + right) / 2 : left + ((step - first) / (last - first)) * (right - left)), Y = (value) => bottom - ((value - low + pad) / (high - low + 2 * pad)) * (bottom - top);
    place = (p) => [X(p.step), Number.isFinite(p.value) ? Y(p.value) : p.value === Infinity ? top - 4 : bottom];
    const out = svg("svg", { width: W, height: 142, viewBox: `0 0 ${W} 142`, "aria-hidden": "true" });
    lines.forEach((value, i) => out.append(svg("line", { x1: left, x2: right, y1: Y(value), y2: Y(value), class: "axis" }), svg("text", { x: left - 6, y: Y(value) + 4, "text-anchor": "end" }, labels[i])));
    let until = -1;
    for (const step of last === first ? [first] : rounds(first, last, Math.max(2, Math.floor((right - left) / 70))).filter(Number.isInteger)) {
      const text = count(step), w = wide(text, "11px system-ui, sans-serif"), x = Math.max(w / 2, Math.min(X(step), W - w / 2));
      if (x - w / 2 < until) continue;
      out.append(svg("text", { x, y: 136, "text-anchor": "middle" }, text));
      until = x + w / 2 + 8;
    }
    let path = "", pen = false;
    for (const p of points) { if (Number.isFinite(p.value)) { path += `${pen ? "L" : "M"}${X(p.step).toFixed(1)} ${Y(p.value).toFixed(1)}`; pen = true; } else pen = false; }
    out.append(svg("path", { d: path, class: "curve" }));
    const dots = points.length * 7 < right - left;
    for (const p of points) {
      const [x, y] = place(p), what = Math.abs(p.value) === Infinity ? svg("path", { d: p.value > 0 ? `M${x - 4} ${y + 7}l4 -7l4 7z` : `M${x - 4} ${y - 7}l4 7l4 -7z`, class: "odd" }) : Number.isNaN(p.value) ? svg("path", { d: `M${x - 3} ${y - 7}l6 6m0 -6l-6 6`, class: "odd" }) : dots || p.state !== "committed" ? svg("circle", { cx: x, cy: y, r: 3, class: p.state === "committed" ? "dot" : "dot hollow" }) : null;
      if (what) out.append(what);
    }
    marker = svg("g");
    out.append(marker);
    host.replaceChildren(out);
    if (host.matches(":focus")) choose(at);
  };
  fill(host, { tabindex: 0, role: "slider", "aria-label": `${name}, by step`, "aria-valuemin": 0, "aria-valuemax": points.length - 1,
    onkeydown: (event) => { const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -1e9, End: 1e9 }[event.key]; if (by) { event.preventDefault(); choose(at + by); } },
    onfocus: () => choose(at),
    onpointermove: (event) => { const x = event.clientX - host.getBoundingClientRect().left; if (place) choose(points.reduce((best, p, i) => (Math.abs(place(p)[0] - x) < Math.abs(place(points[best])[0] - x) ? i : best), 0)); },
    onpointerleave: () => { if (marker && !host.matches(":focus")) marker.replaceChildren(); } }, []);
  choose(at);
  sized(host, draw);
  const odd = points.length - known.length;
  return el("figure", { class: "card metric" }, el("figcaption", {}, el("h3", { class: "mono" }, dotted(name)), read), host,
    el("p", { class: "soft small" }, known.length ? `least ${short(Math.min(...known.map((p) => p.value)))}, most ${short(Math.max(...known.map((p) => p.value)))}, at ${count(points.length, "step")}` : `at ${count(points.length, "step")}`, odd ? `; ${count(odd)} not a finite number` : ""));
}

function metricsSection(run) {
  const names = metricNames(run), steps = run.steps.filter((s) => Object.keys(s.metrics).length);
  const points = (name) => steps.filter((s) => Object.hasOwn(s.metrics, name)).map((s) => ({ step: s.step, value: number(s.metrics[name]), state: s.state })).sort((a, b) => a.step - b.step);
  return [el("p", { class: "lead" }, `What the steps on the disk were saved with, by step. ${steps.some((s) => s.state !== "committed") ? "A hollow point is of a step that is not committed. " : ""}Steps that were deleted took theirs along.`),
    limited(names, 12, (some) => el("div", { class: "metrics" }, some.map((name) => curve(name, points(name))))),
    el("details", { class: "card numbers" }, el("summary", {}, "The same as a table"), limited([...steps].reverse(), 200, (rows) => table([{ t: "step", n: 1 }, ...names.map((t) => ({ t, n: 1 }))], rows.map((s) => [count(s.step), ...names.map((name) => (Object.hasOwn(s.metrics, name) ? short(s.metrics[name]) : ""))]))))];
}
