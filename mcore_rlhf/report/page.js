"use strict";
// Draws the page from the JSON block in it. Texts of checkpoints are only ever set as text, never as markup.
const page = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const OKABE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#8c8c8c"];
const CIVIDIS = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 184, 102], [254, 232, 56]];
const FATES = { kept: "#0072b2", derived: "#56b4e9", changed: "#e69f00", "left behind": "#8c8c8c", lost: "#d55e00", note: "#b0b7bf", "not accounted for": "#cc79a7" };
const STATES = { committed: "#0072b2", damaged: "#d55e00", partial: "#e69f00", foreign: "#8c8c8c" };

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(4)) if (child !== null && child !== undefined && child !== "") node.append(child);
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const count = (n, noun) => n.toLocaleString("en-US") + (noun ? ` ${n === 1 ? noun : noun.endsWith("y") ? noun.slice(0, -1) + "ies" : noun + "s"}` : "");
function size(n) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) { n /= 1024; at += 1; }
  return at ? `${n.toFixed(2)} ${units[at]}` : count(n, "byte");
}
const short = (x) => (x === 0 ? "0" : typeof x !== "number" ? String(x) : Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? x.toExponential(2) : String(+x.toPrecision(4)));
const seconds = (s) => (s >= 3600 ? `${Math.floor(s / 3600)} h ${String(Math.round((s % 3600) / 60)).padStart(2, "0")} min` : s >= 60 ? `${Math.floor(s / 60)} min ${String(Math.round(s % 60)).padStart(2, "0")} s` : s >= 1 ? `${s.toFixed(1)} s` : `${Math.round(s * 1000)} ms`);
const span = ([a, b]) => (a === b ? String(a) : `${a}–${b}`);
const within = (n, list) => list.some(([a, b]) => a <= n && n <= b);
function ramp(t) {
  const at = Math.min(0.9999, Math.max(0, t)) * (CIVIDIS.length - 1), low = Math.floor(at);
  return `rgb(${CIVIDIS[low].map((c, i) => Math.round(c + (CIVIDIS[low + 1][i] - c) * (at - low))).join(",")})`;
}
const colour = (n, of) => (of <= OKABE.length ? OKABE[n] : ramp(n / (of - 1)));
const isDark = (n, of) => (of <= OKABE.length ? [0, 2, 5].includes(n) : n / (of - 1) < 0.45);

const pairs = (list) => el("dl", {}, list.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
const table = (heads, rows) => el("div", { class: "scroll" }, el("table", {},
  el("thead", {}, el("tr", {}, heads.map((h) => el("th", { scope: "col", class: h.n ? "n" : null }, h.t || h)))),
  el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el("td", { class: heads[i].n ? "n" : heads[i].tight ? "tight" : heads[i].wide ? "wide" : null }, cell)))))));
const chip = (text, c) => el("span", { class: "chip", style: `--c:${c}` }, text);
const legend = (items) => el("ul", { class: "legend" }, items.map(([c, text]) => el("li", {}, typeof c === "string" ? el("i", { style: `background:${c}` }) : c, text)));
const dotted = (text) => text.split(/(?<=[.\/_])/).flatMap((part, i) => (i ? [el("wbr"), part] : [part]));
const figure = (value, what, key) => el("div", {}, el("b", { "data-key": key }, value), el("span", {}, what));
const limited = (items, most, make) => {
  const host = el("div"), show = (n) => host.replaceChildren(make(items.slice(0, n)), items.length > n ? el("button", { onclick: () => show(items.length) }, `Show all ${count(items.length)}`) : "");
  show(most);
  return host;
};

const tip = el("div", { class: "tip", hidden: true, role: "status" });
document.body.append(tip);
document.addEventListener("pointermove", (event) => {
  const told = event.target.closest && event.target.closest("[data-tip]");
  tip.hidden = !told;
  if (!told) return;
  tip.textContent = told.dataset.tip;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 8 : event.clientY + 18}px`;
});

/* ---- the shard map ---- */
const view = { state: null, by: "shard", query: "", chosen: [null, null], redraw: [] };
const redrawn = (draw) => { view.redraw.push(draw); return draw(); };
const again = () => view.redraw.forEach((draw) => draw());

const layered = (drawing) => drawing.pattern.includes("{}") && /layers?\.\{\}|\bh\.\{\}|blocks?\.\{\}/.test(drawing.pattern);
const heldBy = (drawing) => drawing.held.find((held) => held.states.includes(view.state));
function memberOf(drawing, held) {
  const asked = layered(drawing) ? view.chosen : [];
  return held.members.find((member) => asked.every((n, i) => n === null || !member.numbers[i] || within(n, member.numbers[i])));
}
const pixels = (n) => (n <= 1 ? 8 : Math.max(14, Math.min(210, 13 * (Math.log2(n) - 2.4))));

function portrait(map, drawing, member, wide) {
  const rows = drawing.shape.length < 2 ? 1 : drawing.shape.slice(0, -1).reduce((a, b) => a * b, 1);
  const columns = drawing.shape.length ? drawing.shape[drawing.shape.length - 1] : 1;
  const w = pixels(columns) * wide, h = rows === 1 ? 10 : pixels(rows) * wide, most = Math.max(...drawing.rectangles.map((r) => r.slots.length), 1);
  const pad = 2 + 3 * (Math.min(most, 4) - 1), X = (x) => pad + (x / columns) * w, Y = (y) => 2 + (y / rows) * h;
  const of = view.by === "file" ? map.files.length : member.files.length, which = (slot) => (view.by === "file" ? member.files[slot] : slot);
  const out = svg("svg", { width: w + pad + 4, height: h + pad + 4, viewBox: `0 0 ${w + pad + 4} ${h + pad + 4}`, role: "img", "aria-label": `${drawing.pattern}: ${count(drawing.rectangles.length, "part")}` });
  for (const r of drawing.rectangles) {
    const stacked = r.slots.slice(0, 4);
    stacked.map((slot, depth) => [slot, depth]).reverse().forEach(([slot, depth]) => {
      const rows_ = rows === 1 ? `elements ${r.x}–${r.x + r.w - 1}` : `rows ${r.y}–${r.y + r.h - 1}, columns ${r.x}–${r.x + r.w - 1}`;
      out.append(svg("rect", {
        x: X(r.x) - 3 * depth, y: Y(r.y) + 3 * depth, width: Math.max(0.6, (r.w / columns) * w), height: Math.max(0.6, (r.h / rows) * h),
        fill: colour(which(slot), of), class: "edge", "data-file": member.files[slot],
        "data-tip": `${rows_} · ${map.files[member.files[slot]].path}${r.slots.length > 1 ? ` · copy ${depth + 1} of ${r.slots.length}` : ""}`,
      }));
    });
  }
  if (drawing.padding !== null) out.append(svg("rect", { x: X(0), y: Y(drawing.padding), width: w, height: Math.max(1.5, Y(rows) - Y(drawing.padding)), fill: "url(#hatch)", "data-tip": `rows ${drawing.padding}–${rows - 1} are padding of the vocabulary` }));
  let at = 0;
  const seams = [...Array(drawing.periods)].flatMap(() => drawing.fused).map(([, length]) => (at += length)).slice(0, -1);
  for (const at of (rows === 1 ? w : h) / drawing.periods < 9 ? seams.filter((_, n) => (n + 1) % drawing.fused.length === 0) : seams) { // where groups are thin, between groups alone
    const along = drawing.dim === drawing.shape.length - 1 && drawing.shape.length > 1 ? { x1: X(at), x2: X(at), y1: Y(0), y2: Y(rows) } : rows === 1 ? { x1: X(at), x2: X(at), y1: Y(0), y2: Y(1) } : { x1: X(0), x2: X(columns), y1: Y(at), y2: Y(at) };
    out.append(svg("line", { ...along, class: "seam" }));
  }
  out.append(svg("rect", { x: X(0), y: Y(0), width: w, height: h, class: "frame" }));
  return out;
}

function where(drawing, held, member) {
  const names = (m) => m.numbers.map((list, i) => `${i === 0 && layered(drawing) ? "layers" : i ? "experts" : "numbers"} ${list.map(span).join(", ")}`).join(", ");
  return { here: names(member), all: held.members.length > 1 ? held.members.map(names) : [] };
}
const shownName = (drawing) => drawing.pattern.replace(/\{\}/g, "#");

function detail(panel, map, drawing) {
  const held = heldBy(drawing), member = memberOf(drawing, held), place = where(drawing, held, member), one = drawing.shape.length < 2;
  const parts = drawing.rectangles.slice(0, 48).map((r) => [one ? `${r.x}–${r.x + r.w - 1}` : `${r.y}–${r.y + r.h - 1} × ${r.x}–${r.x + r.w - 1}`, el("span", { class: "mono" }, dotted(r.slots.map((slot) => map.files[member.files[slot]].path).join(" = ")))]);
  panel.replaceChildren(
    el("h3", { class: "mono" }, dotted(shownName(drawing))),
    pairs([["shape", drawing.shape.join(" × ") || "a number"], ["type", held.dtype], ["cut", drawing.partition], ["in", place.here], ["tensors alike", count(held.tensors)], ["states alike", held.states.join(", ")],
      ["fused", (drawing.periods > 1 ? `${drawing.periods} times ` : "") + drawing.fused.map(([name, length]) => `${name} ${count(length)}`).join(" | ")], ["padding", drawing.padding === null ? null : `rows from ${count(drawing.padding)} on`], ["gaps", drawing.step ? "parts hold every so-many-th element" : null]]),
    el("h4", {}, one ? "elements → file" : "rows × columns → file"), table(["part", "file"], parts),
    drawing.rectangles.length > 48 ? el("p", { class: "soft small" }, `and ${count(drawing.rectangles.length - 48)} more parts`) : "",
    place.all.length ? el("details", {}, el("summary", {}, `${count(place.all.length)} groups in other files`), el("ul", {}, place.all.slice(0, 200).map((text) => el("li", {}, text)))) : "");
}

// One cell for every layer (place 0) or expert (place 1), coloured by the set of files that hold it: pipeline stages and expert ranks.
function strip(map, place) {
  const noun = ["layer", "expert"][place], of = new Map(), sets = new Map();
  for (const drawing of map.drawings.filter(layered)) {
    const held = heldBy(drawing);
    for (const member of held ? held.members : []) {
      if (!member.numbers[place] || (place === 1 && view.chosen[0] !== null && !within(view.chosen[0], member.numbers[0]))) continue;
      for (const [a, b] of member.numbers[place]) for (let n = a; n <= b; n += 1) { if (!of.has(n)) of.set(n, new Set()); member.files.forEach((f) => of.get(n).add(f)); }
    }
  }
  const all = [...of.keys()].sort((a, b) => a - b), keys = new Map(all.map((n) => [n, [...of.get(n)].sort((a, b) => a - b).join(" ")]));
  all.forEach((n) => sets.set(keys.get(n), [...(sets.get(keys.get(n)) || []), n]));
  if (!all.length) return "";
  const order = [...sets.keys()], buttons = all.map((n) => {
    const which = order.indexOf(keys.get(n)), files = [...of.get(n)];
    return el("button", { class: isDark(which, order.length) ? "dark" : null, style: `background:${colour(which, order.length)}`, "aria-pressed": String(view.chosen[place] === n), "aria-label": `${noun} ${n}`, tabindex: n === (view.chosen[place] ?? all[0]) ? 0 : -1, [`data-${noun}`]: n,
      "data-tip": `${noun} ${n}: ${count(files.length, "file")}, ${files.slice(0, 3).map((f) => map.files[f].path).join(", ")}${files.length > 3 ? ", …" : ""}`,
      onclick: () => { view.chosen[place] = view.chosen[place] === n ? null : n; again(); const chosen = document.querySelector(`[data-${noun}="${n}"]`); if (chosen) chosen.focus(); } }, n);
  });
  const onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 }[event.key], at = buttons.indexOf(document.activeElement);
    if (!step || at < 0) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(buttons.length - 1, at + step));
    buttons.forEach((b, i) => { b.tabIndex = i === next ? 0 : -1; });
    buttons[next].focus();
  };
  const ranges = (list) => list.reduce((found, n) => { const last = found[found.length - 1]; if (last && last[1] === n - 1) last[1] = n; else found.push([n, n]); return found; }, []).map(span).join(", ");
  return el("div", {}, el("h4", {}, `${count(all.length, noun)}: one colour for those in the same files`), el("div", { class: "strip", role: "group", "aria-label": `${noun}s, coloured by the files that hold them`, onkeydown }, buttons),
    order.length <= 24 ? legend(order.map((k, i) => [colour(i, order.length), `${noun}s ${ranges(sets.get(k))}: ${count(k.split(" ").length, "file")}`])) : el("p", { class: "soft small" }, `${count(order.length)} sets of files`));
}

function shardPanel(label, model) {
  const map = model.shards, panel = el("aside", { class: "detail", "aria-live": "polite" }), body = el("div"), facts = model.facts;
  let chosen = null;
  const draw = () => {
    const groups = new Map(), q = view.query.trim().toLowerCase(), asked = q.replace(/(^|[._])\d+(?=[._]|$)/g, "$1{}").replace(/#/g, "{}");
    for (const drawing of map.drawings) {
      const held = heldBy(drawing), member = held && memberOf(drawing, held), name = drawing.pattern.toLowerCase();
      if (!held || !member || (q && !name.includes(q) && !name.includes(asked))) continue;
      const cut = drawing.pattern.indexOf("{}"), head = cut < 0 ? drawing.pattern.split(".")[0] : drawing.pattern.slice(0, cut + 2), rest = drawing.pattern.slice(head.length + 1) || drawing.pattern;
      const make = (wide) => { const card = el("button", { class: "tensor", "aria-pressed": String(chosen === drawing), title: shownName(drawing), onclick: () => { chosen = drawing; body.querySelectorAll(".tensor").forEach((b) => b.setAttribute("aria-pressed", String(b === card))); detail(panel, map, drawing); } },
        portrait(map, drawing, member, wide), el("span", { class: "name" }, dotted(rest.replace(/\{\}/g, "#"))), el("span", { class: "of" }, `${drawing.shape.join(" × ") || "scalar"}${held.tensors > 1 ? ` · ${count(held.tensors)} alike` : ""}`)); return card; };
      if (!groups.has(head)) groups.set(head, []);
      groups.get(head).push(make);
    }
    const wide = Math.max(1, Math.min(1.9, 150 / Math.max(...map.drawings.map((d) => pixels(Math.max(...d.shape, 1))))));
    for (const [head, cards] of groups) groups.set(head, cards.map((make) => make(wide)));
    const list = [...groups].map(([head, cards]) => [el("h4", {}, view.chosen[0] !== null && head.endsWith("{}") ? head.replace("{}", view.chosen[0]) : head.replace("{}", "#")), el("div", { class: "tensors" }, cards)]);
    body.replaceChildren(strip(map, 0), strip(map, 1), ...list.flat(), list.length ? "" : el("p", { class: "soft" }, q ? `No tensor of state ${view.state} is called like “${view.query}”.` : `No tensor has the state ${view.state}.`));
    const alive = chosen && heldBy(chosen) && memberOf(chosen, heldBy(chosen)) ? chosen : map.drawings.find((d) => heldBy(d) && memberOf(d, heldBy(d)));
    if (alive) detail(panel, map, alive);
  };
  redrawn(draw);
  const files = [...map.files].sort((a, b) => b.bytes - a.bytes), largest = files.length ? files[0].bytes : 1;
  return el("div", { class: "card" }, el("h3", {}, label, facts ? el("span", { class: "soft" }, ` ${facts.format}, ${facts.parallel.text}`) : ""),
    el("div", { class: "figures" }, figure(count(map.tensors), "tensors in all states", "tensors"), figure(size(map.bytes), "of them, once"), figure(count(map.files.length), "files"), figure(count(map.replicas), "parts stored again"), map.replica_bytes ? figure(size(map.replica_bytes), "in replicas") : ""),
    el("div", { class: "split" }, body, panel),
    map.folded.length ? el("p", { class: "soft small" }, `Cut at other places in other layers, and not drawn: ${map.folded.map(([p, n]) => `${count(n)} of ${p.replace(/\{\}/g, "#")}`).join("; ")}.`) : "",
    el("details", {}, el("summary", {}, `${count(files.length, "file")}, by what they hold`), limited(files, 60, (rows) => table(["file", { t: "tensors", n: 1 }, { t: "bytes", n: 1 }, ""], rows.map((f) => [el("span", { class: "mono" }, f.path), count(f.tensors), size(f.bytes), el("div", { class: "meter" }, el("i", { style: `width:${(100 * f.bytes) / largest}%` }))])))));
}

function shards(models) {
  const states = [...new Set(models.flatMap((m) => m.model.shards.states))];
  // The state that most tensors have: ZeRO 3 stores masters, and of parameters just the buffers.
  const held = (state) => models.reduce((n, m) => n + m.model.shards.drawings.reduce((k, d) => k + d.held.filter((h) => h.states.includes(state)).reduce((j, h) => j + h.tensors, 0), 0), 0);
  view.state = states.reduce((best, state) => (held(state) > held(best) ? state : best), states[0]);
  const radios = (name, legend_, values, key) => el("fieldset", {}, el("legend", {}, legend_), el("div", { class: "segments" }, values.map(([value, text]) => el("label", {}, el("input", { type: "radio", name, value, checked: view[key] === value, onchange: () => { view[key] = value; again(); } }), el("span", {}, text)))));
  const search = el("input", { type: "search", id: "search", placeholder: "layers.3.mlp, qkv, …", autocomplete: "off", spellcheck: "false", oninput: (event) => { view.query = event.target.value; const n = /layers?\.(\d+)/.exec(view.query); if (n) view.chosen[0] = Number(n[1]); again(); } });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(input|textarea)$/i.test(event.target.tagName)) { event.preventDefault(); search.focus(); }
    if (event.key === "Escape") { view.chosen = [null, null]; view.query = search.value = ""; again(); }
  });
  const marks = legend([[OKABE[0], "a part, in one file"], [svg("svg", { width: 18, height: 16 }, svg("rect", { x: 1, y: 5, width: 12, height: 9, fill: OKABE[1], class: "edge" }), svg("rect", { x: 4, y: 2, width: 12, height: 9, fill: OKABE[0], class: "edge" })), "stacked: replicas"], [svg("svg", { width: 14, height: 14 }, svg("rect", { width: 14, height: 14, fill: OKABE[0] }), svg("rect", { width: 14, height: 14, fill: "url(#hatch)" })), "padding of the vocabulary"], [svg("svg", { width: 16, height: 12 }, svg("line", { x1: 0, x2: 16, y1: 6, y2: 6, class: "seam" })), "seam of fused parts"]]);
  return [el("p", { class: "lead" }, "Every rectangle is a tensor, cut as it lies in the files. Sides grow with the logarithm of their length; tensors that are cut alike are drawn once. Choose a layer to see its files, a tensor for its numbers; “/” searches, Esc shows all."),
    el("div", { class: "controls" }, radios("state", "State", states.map((s) => [s, s]), "state"), radios("by", "Colour by", [["shard", "part of the tensor"], ["file", "file"]], "by"), el("div", { class: "wide" }, el("label", { class: "label", for: "search" }, "Search by name"), search)), marks,
    el("div", { class: models.length > 1 ? "stackwise" : null }, models.map(({ label, model }) => shardPanel(label, model)))];
}

/* ---- the account of a conversion ---- */
function account(conversion) {
  return Object.entries(conversion.accounts).map(([whose, told]) => {
    const figures = [["kept", told.kept], ["derived", told.derived], ["changed", told.changed], ["left behind", told.left_behind], ["lost", told.lost], ["not accounted for", told.unaccounted.length]].filter(([, n]) => n);
    const lines = conversion.lines[whose] || [], more = Object.entries(told.told);
    return el("div", { class: "card" }, el("h3", {}, whose || "The model"),
      el("div", { class: "figures" }, figure(count(told.items), "items in the source", "account.items"), figures.map(([fate, n]) => figure(count(n), fate, `account.${fate.replace(" ", "_")}`))),
      el("div", { class: "stack", role: "img", "aria-label": figures.map(([fate, n]) => `${n} ${fate}`).join(", ") }, figures.map(([fate, n]) => el("i", { style: `flex:${n};background:${FATES[fate]}`, "data-tip": `${count(n)} ${fate}` }))),
      legend(figures.map(([fate, n]) => [FATES[fate], `${fate} ${count(n)}`])),
      lines.length ? [el("h4", {}, "the report"), table([{ t: "fate", tight: 1 }, "what"], lines.map((line) => [chip(line.fate, FATES[line.fate]), line.text]))] : "",
      more.map(([fate, texts]) => el("details", {}, el("summary", {}, `Every item that is ${fate}`), el("ul", {}, Object.entries(texts).map(([text, items]) => el("li", {}, text || fate, ": ", el("span", { class: "mono" }, items.slice(0, 400).join(", ")), items.length > 400 ? ` and ${count(items.length - 400)} more` : ""))))));
  });
}

/* ---- a run ---- */
function timeline(run) {
  const host = el("div", { class: "scroll" }), saves = run.steps.filter((s) => s.committed_at !== null), events = run.events;
  const times = [...saves.flatMap((s) => [s.began_at, s.committed_at]), ...events.map((e) => e.time)].filter((t) => t !== null);
  if (!times.length) return "";
  const first = Math.min(...times), last = Math.max(...times, first + 1);
  const lanes = ["saves", ...["failed", "skip", "load", "delete", "clean", "export"].filter((kind) => events.some((e) => e.kind === kind))];
  const names = { saves: "saves", failed: "failures", skip: "passed over", load: "resumes", delete: "deletions", clean: "cleaned up", export: "exports" };
  const draw = () => {
    const W = Math.max(320, host.clientWidth || 900), left = 84, H = 34 * lanes.length + 34, X = (t) => left + ((t - first) / (last - first)) * (W - left - 20);
    const out = svg("svg", { width: W, height: H, viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${count(saves.length, "save")} and ${count(events.length, "event")} in ${seconds(last - first)}` });
    lanes.forEach((lane, i) => out.append(svg("text", { x: 0, y: 34 * i + 21 }, names[lane]), svg("line", { x1: left, x2: W - 8, y1: 34 * i + 32, y2: 34 * i + 32, class: "axis" })));
    let labelled = -1e9;
    for (const s of saves) {
      const a = X(s.began_at ?? s.committed_at), b = Math.max(X(s.committed_at), a + 3), stall = s.stall_seconds ? Math.max(2, X((s.began_at ?? 0) + s.stall_seconds) - a) : 0;
      out.append(svg("rect", { x: a, y: 12, width: b - a, height: 14, rx: 2, fill: STATES[s.state], opacity: 0.75, "data-tip": `step ${s.step}: ${s.state}${s.save_seconds !== null ? `, saved in ${seconds(s.save_seconds)}` : ""}${s.stall_seconds !== null ? `, training waited ${seconds(s.stall_seconds)}` : ""}` }));
      if (stall && s.began_at !== null) out.append(svg("rect", { x: a, y: 8, width: Math.min(stall, b - a), height: 22, rx: 2, fill: "#e69f00", "data-tip": `step ${s.step}: training waited ${seconds(s.stall_seconds)}` }));
      if (a - labelled > 34) { out.append(svg("text", { x: a, y: 8 + 1 - 2 }, String(s.step))); labelled = a; }
    }
    for (const e of events.filter((one) => one.kind === "commit" && one.values.seconds && !saves.some((s) => s.step === one.step))) {
      const a = X(Math.max(first, e.time - e.values.seconds));
      out.append(svg("rect", { x: a, y: 14, width: Math.max(3, X(e.time) - a), height: 10, rx: 2, fill: "#8c8c8c", opacity: 0.6, "data-tip": `step ${e.step}: saved in ${seconds(e.values.seconds)}, no longer on the disk` }));
    }
    for (const e of events) {
      const i = lanes.indexOf(e.kind);
      if (i < 0) continue;
      const x = X(e.time), y = 34 * i + 18, c = { failed: "#d55e00", skip: "#e69f00", load: "#009e73", delete: "#8c8c8c", clean: "#8c8c8c", export: "#56b4e9" }[e.kind];
      out.append(svg("path", { d: e.kind === "failed" ? `M${x - 5} ${y - 5}l10 10m0 -10l-10 10` : e.kind === "load" ? `M${x - 5} ${y + 5}l5 -10l5 10z` : `M${x - 4} ${y - 4}h8v8h-8z`, fill: e.kind === "failed" ? "none" : c, stroke: c, "stroke-width": 2, "data-tip": `${e.kind}${e.step === null ? "" : ` of step ${e.step}`}: ${e.text || stamp(e.time)}` }));
    }
    [0, 0.5, 1].forEach((t, i) => out.append(svg("text", { x: X(first + t * (last - first)), y: H - 6, "text-anchor": ["start", "middle", "end"][i] }, stamp(first + t * (last - first)).slice(i === 1 && W < 560 ? 11 : 0))));
    host.replaceChildren(out);
  };
  new ResizeObserver(draw).observe(host);
  return el("div", {}, host, legend([[STATES.committed, "written behind training, until committed"], ["#e69f00", "training waited"], ...(events.some((e) => e.kind === "delete") ? [["#8c8c8c", "no longer on the disk, or deleted"]] : []), ...Object.entries(STATES).slice(1).filter(([state]) => run.steps.some((s) => s.state === state)).map(([state, c]) => [c, state])]));
}
const stamp = (t) => new Date(t * 1000).toISOString().slice(0, 19).replace("T", " ");

function runSection(run) {
  const committed = run.steps.filter((s) => s.state === "committed").length;
  return [el("p", { class: "lead" }, el("span", { class: "mono" }, run.root)),
    el("div", { class: "card" }, el("div", { class: "figures" }, figure(count(run.steps.length), "steps on the disk", "run.steps"), figure(count(committed), "committed", "run.committed"), figure(size(run.steps.reduce((a, s) => a + s.bytes, 0)), "in all", "run.bytes"),
      run.stall_seconds !== null ? figure(seconds(run.stall_seconds), "training waits for a save (median)") : "", run.save_seconds !== null ? figure(seconds(run.save_seconds), "until it is committed (median)") : ""), timeline(run), el("p", { class: "soft small" }, run.history)),
    el("div", { class: "card" }, el("h3", {}, "Steps"), limited([...run.steps].reverse(), 100, (rows) => table([{ t: "step", n: 1 }, { t: "state", tight: 1 }, { t: "size", n: 1 }, "roles", { t: "written (UTC)", tight: 1 }, "metrics", { t: "what is wrong", wide: 1 }], rows.map((s) => [count(s.step), chip(s.state, STATES[s.state]), size(s.bytes), s.roles.join(", "), s.time.replace("T", " ").replace("Z", ""), Object.entries(s.metrics).map(([k, v]) => `${k} ${short(v)}`).join(", "), [s.quarantined ? `in quarantine: ${s.quarantined}` : "", s.why].filter(Boolean).join("; ")])))),
    run.events.length ? el("div", { class: "card" }, el("h3", {}, "Events"), limited([...run.events].reverse(), 25, (rows) => table([{ t: "when (UTC)", tight: 1 }, { t: "what", tight: 1 }, { t: "step", n: 1 }, { t: "numbers", wide: 1 }, { t: "told", wide: 1 }], rows.map((e) => [stamp(e.time), e.kind, e.step === null ? "" : count(e.step), Object.entries(e.values).map(([k, v]) => `${k} ${short(v)}`).join(", "), e.text])))) : ""];
}

/* ---- differences ---- */
const MEASURES = { ulps: "units in the last place", max_rel: "relative", max_abs: "absolute", differing: "elements" };
function heat(map, host) {
  const look = { state: (map.rows.find((r) => r.cells.length) || map.rows[0]).state, measure: "ulps" }, states = [...new Set(map.rows.map((r) => r.state))];
  const radios = (legend_, values, key) => el("fieldset", {}, el("legend", {}, legend_), el("div", { class: "segments" }, values.map(([value, text]) => el("label", {}, el("input", { type: "radio", name: `heat-${key}`, checked: look[key] === value, onchange: () => { look[key] = value; draw(); } }), el("span", {}, text)))));
  const chart = el("div", { class: "scroll" }), draw = () => {
    const rows = map.rows.filter((r) => r.state === look.state), columns = Math.max(1, ...rows.map((r) => r.columns)), W = Math.max(300, chart.clientWidth || 900);
    const left = Math.min(320, Math.max(120, W * 0.36)), cell = Math.max(4, Math.min(26, (W - left - 8) / columns)), tall = 20, H = rows.length * tall + 24;
    const worst = Math.max(...rows.flatMap((r) => r.cells.map((c) => c[look.measure] || 0)), 0), heat_ = (v) => (worst <= 0 ? 0 : Math.log1p((v / worst) * 999) / Math.log(1000));
    const out = svg("svg", { width: Math.max(W, left + columns * cell + 8), height: H, role: "img", "aria-label": "differences by layer and tensor" });
    const letters = Math.floor(left / 6.6);
    rows.forEach((row, y) => {
      const name = row.pattern.replace(/\{\}/g, "#"), at = new Map(row.cells.map((c) => [c.column, c]));
      out.append(svg("text", { x: 0, y: y * tall + 14, class: "rowname", "data-tip": name }, name.length > letters ? `…${name.slice(1 - letters)}` : name));
      for (let x = 0; x < row.columns; x += 1) {
        const c = at.get(x), there = within(x, row.compared);
        if (!there && !c) continue;
        out.append(svg("rect", { x: left + x * cell, y: y * tall + 2, width: Math.max(2, cell - 1.5), height: tall - 4, rx: 1.5, fill: c ? ramp(0.25 + 0.75 * heat_(c[look.measure] || 0)) : "none", class: c ? null : "frame", "data-tip": c ? `${name.replace("#", row.columns > 1 ? x : "#")}: ${c.what}${c.differing ? `, largest |a − b| ${short(c.max_abs)}, relative ${short(c.max_rel)}, ${count(c.ulps)} ulp` : ""}` : `${name.replace("#", row.columns > 1 ? x : "#")}: equal` }));
      }
    });
    if (columns > 1) for (let x = 0; x < columns; x += Math.max(1, Math.ceil(20 / cell))) out.append(svg("text", { x: left + x * cell + cell / 2, y: H - 6, "text-anchor": "middle" }, x));
    chart.replaceChildren(out);
    key.replaceChildren(legend([[svg("svg", { width: 14, height: 12 }, svg("rect", { x: 1, y: 1, width: 12, height: 10, class: "frame" })), "equal"], [ramp(0.25), "least"], [ramp(1), `most: ${short(worst)} (${MEASURES[look.measure]})`]]));
  };
  const key = el("div");
  new ResizeObserver(draw).observe(chart);
  host.append(el("div", { class: "controls" }, radios("State", states.map((s) => [s, s]), "state"), radios("Colour by", Object.entries(MEASURES), "measure")), key, chart);
}

function differences(diff) {
  const parts = Object.entries(diff.models), how = (d) => (d.exact ? "bit for bit" : `within atol ${d.atol}, rtol ${d.rtol}`);
  const verdict = diff.equal
    ? el("div", { class: "banner good" }, el("b", {}, "Equal. "), parts.map(([role, d]) => `${role ? `${role}: ` : ""}${count(d.tensors, "tensor")}, ${count(d.elements, "element")}, compared ${how(d)}: there is nothing to see. `))
    : el("div", { class: "banner bad" }, el("b", {}, "Different. "), parts.filter(([, d]) => !d.equal).map(([role, d]) => `${role ? `${role}: ` : ""}${count(d.differences.length, "difference")} in ${count(d.tensors, "tensor")}, ${count(d.elements, "element")}, compared ${how(d)}. `));
  return [verdict, parts.map(([role, d]) => {
    const card = el("div", { class: "card" }, el("h3", {}, role || `${d.a.format} ${d.a.parallel.text} and ${d.b.format} ${d.b.parallel.text}`),
      el("div", { class: "figures" }, figure(count(d.tensors), "tensors compared", "diff.tensors"), figure(count(d.elements), "elements compared", "diff.elements"), figure(count(d.differences.length), "differences", "diff.differences")));
    if (d.heat.rows.length) heat(d.heat, card);
    if (d.differences.length) card.append(limited(d.differences, 50, (rows) => table(["what differs", "how", { t: "largest |a − b|", n: 1 }, { t: "relative", n: 1 }, { t: "ulp", n: 1 }], rows.map((x) => [el("span", { class: "mono" }, x.name), x.what, x.differing ? short(x.max_abs) : "", x.differing ? short(x.max_rel) : "", x.differing ? count(x.max_ulps) : ""]))));
    if (d.notes.length) card.append(el("details", {}, el("summary", {}, "What was not compared, and how"), el("ul", {}, d.notes.map((text) => el("li", {}, text)))));
    return card;
  }), Object.keys(diff.others).length ? el("div", { class: "card" }, el("h3", {}, "Files beside the models"), table(["file", "is"], Object.entries(diff.others).map(([name, is]) => [el("span", { class: "mono" }, name), is]))) : ""];
}

/* ---- trust ---- */
function verdictCard(label, verdict) {
  const good = verdict.intact, text = good ? (verdict.depth === "quick" ? "No fault was seen" : "Intact") : good === null ? "Could not be read" : `Damaged: ${count(verdict.problems.length, "problem")}`;
  const depth = { quick: "Sizes and zip directories were looked at; no checksum was computed (--verify reads every byte).", full: "Every byte was read and held against its checksum.", deep: "Every byte was read; replicas and masters were compared." }[verdict.depth];
  return [el("div", { class: `banner ${good ? "good" : "bad"}` }, el("b", {}, `${text}. `), verdict.error ? verdict.error.message : depth), el("ul", {}, (verdict.checked || []).map((t) => el("li", {}, t))),
    (verdict.problems || []).length ? limited(verdict.problems, 40, (rows) => table(["kind", "problem", "what to do"], rows.map((p) => [p.kind, p.message, p.advice]))) : ""];
}

function trust() {
  const cards = page.subjects.flatMap((subject) => [subject, ...[]].map((s) => el("div", { class: "card" }, el("h3", {}, s.label ? `${s.label}: ` : "", el("span", { class: "mono" }, s.path)),
    s.step_verdict ? verdictCard(s.label, s.step_verdict) : "",
    Object.entries(s.models).map(([role, m]) => [Object.keys(s.models).length > 1 ? el("h4", {}, role) : "", m.verdict ? verdictCard(role, m.verdict) : ""]),
    pairs([["manifest", s.manifest ? s.manifest.path : "none: not written by mcore_rlhf, so that nobody else says which files there should be"], ...(s.manifest ? [["files listed", count(s.manifest.files)], ["transaction", s.manifest.transaction], ["lossless", s.manifest.lossless === null ? "" : s.manifest.lossless ? "yes" : "no"], ...Object.entries(s.manifest.provenance).map(([k, v]) => [k, String(v)])] : [])]))));
  const check = page.resume_check;
  if (check) cards.push(el("div", { class: "card" }, el("h3", {}, "Resume check"), el("div", { class: `banner ${check.passed ? "good" : "bad"}` }, el("b", {}, `${check.passed ? "Passed" : "Not passed"}. `), check.verdict || ""),
    pairs([["steps", check.steps], ["then", check.more], ["took", check.seconds === undefined ? "" : seconds(check.seconds)], ["folder", check.folder]]), table([{ t: "run", n: 1 }, "killed and resumed", "what"], (check.runs || []).map((r, i) => [i + 1, r.equal === undefined ? "" : r.equal ? "equal in every bit" : "different", r.differences && r.differences.length ? count(r.differences.length, "difference") : ""])), (check.notes || []).length ? el("ul", {}, check.notes.map((n) => el("li", {}, String(n)))) : ""));
  return cards;
}

/* ---- the page ---- */
function overview(subject, role, m) {
  const f = m.facts;
  if (!f) return el("div", { class: "card" }, el("h3", {}, role), el("div", { class: "banner bad" }, m.error.message));
  const words = f.model.padded_vocab_size === null ? "" : f.model.vocab_size === null ? `${count(f.model.padded_vocab_size)} rows with padding` : `${count(f.model.vocab_size)} words in ${count(f.model.padded_vocab_size)} rows`;
  return el("div", { class: "card" }, el("p", { class: "kicker" }, [subject.label, role].filter(Boolean).join(" · ") || f.role), el("h3", { class: "mono" }, f.path),
    el("div", { class: "figures" }, figure(count(f.model.parameters), "parameters", "model.parameters"), figure(count(f.model.num_layers), "layers", "model.num_layers"), f.model.num_experts ? figure(count(f.model.num_experts), "experts a layer", "model.num_experts") : "", figure(size(f.bytes), `in ${count(f.file_count, "file")}`, "bytes")),
    pairs([["format", `${f.format}, ${f.release ? "release" : `iteration ${count(f.iteration)}`}`], ["layout", `${f.parallel.text} (${count(f.parallel.world_size, "rank")})`], ["pipeline", f.parallel.pipeline_layout], ["vocabulary", words], ["types", Object.keys(f.model.dtypes).join(", ")],
      ["optimizer", f.optimizer ? `${f.optimizer.kind}: ${Object.entries(f.optimizer.states).map(([k, v]) => `${k} ${v || ""}`.trim()).join(", ")}` : f.unread ? "not understood" : "none stored"], ...Object.entries(f.counters).map(([k, v]) => [k.replace(/_/g, " "), typeof v === "number" ? count(v) : String(v)])]),
    f.notes.length ? el("details", {}, el("summary", {}, count(f.notes.length, "note")), el("ul", {}, f.notes.map((n) => el("li", {}, n.fate === "note" ? "" : `${n.fate}: `, n.text)))) : "");
}

const models = page.subjects.flatMap((s) => Object.entries(s.models).map(([role, model]) => ({ label: [s.label, role].filter(Boolean).join(" · ") || "The checkpoint", subject: s, role, model })));
const drawn = models.filter((m) => m.model.shards);
const converted = page.subjects.filter((s) => s.conversion).pop();
const sections = [
  ["overview", "Overview", models.length ? () => el("div", { class: "grid" }, models.map((m) => overview(m.subject, m.role, m.model))) : null],
  ["run", "Run", page.run ? () => runSection(page.run) : null],
  ["shards", "Shard map", drawn.length ? () => shards(drawn) : null],
  ["account", "Account", converted ? () => [el("p", { class: "lead" }, `What became of everything that ${converted.conversion.source} had.`), el("div", { class: `banner ${converted.conversion.lossless ? "good" : "warn"}` }, el("b", {}, converted.conversion.lossless ? "Lossless. " : "Not lossless. "), converted.conversion.lossless ? "Everything that the source had is in the target, or can be derived from it." : "What was lost stands below."), account(converted.conversion)] : null],
  ["diff", "Differences", page.diff ? () => differences(page.diff) : null],
  ["trust", "Trust", page.subjects.length || page.resume_check ? trust : null],
].filter(([, , make]) => make);
document.getElementById("top").append(el("p", { class: "kicker" }, page.kind), el("h1", {}, page.title), el("p", { class: "soft" }, page.subtitle), ...page.problems.map((text) => el("div", { class: "banner bad" }, text)), el("nav", { "aria-label": "Sections" }, sections.map(([id, name]) => el("a", { href: `#${id}` }, name))));
document.getElementById("main").append(...sections.map(([id, name, make]) => el("section", { id, "aria-labelledby": `${id}-h` }, el("h2", { id: `${id}-h` }, name), make())));
document.getElementById("foot").append(`Made by mcore-rlhf ${page.made.mcore_rlhf} on ${page.made.time}. One file: it asks no network for anything; the data that it shows stands in it as JSON.`);
document.documentElement.dataset.ready = "yes";
