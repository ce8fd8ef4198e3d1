/* ---- the shard map ---- */
const maps = []; // every map of the page: its element, its search, how it is reset, how its sheet is closed
const KINDS = ["layer", "expert"];
const NUMBERED = { layer: "(?:layers?|blocks?|h)", expert: "(?:local_)?experts?" };

const pixels = (n) => (n <= 1 ? 8 : Math.max(14, Math.min(210, 13 * (Math.log2(n) - 2.4))));
const layered = (drawing) => drawing.places.some((place) => place !== "number");
const shownName = (drawing, numbers) => { let at = -1; return drawing.pattern.replace(/\{\}/g, () => { at += 1; return numbers && numbers[at] !== undefined ? numbers[at] : "#"; }); };
// What is asked of a tensor's numbers, by kind (a layer that was chosen) or by place (a number that was typed).
const fits = (drawing, member, asked) => member.numbers.every((list, place) => {
  const kind = drawing.places[place], byKind = asked[kind] === undefined ? null : asked[kind], byPlace = asked.places ? asked.places[place] : undefined;
  return (byKind === null || within(byKind, list)) && (byPlace === undefined || within(byPlace, list));
});

/* Names are searched as they are, not as they are drawn: `experts.5` is expert 5 of every tensor that has one, also where its number
   stands at the end (`experts.linear_fc1.weight5`) or is an index of a tensor that holds all experts. */
function alignments(text, drawing) {
  const found = [], units = [];
  let place = -1;
  for (const part of drawing.pattern.toLowerCase().split(/(\{\})/)) if (part === "{}") units.push(place += 1); else units.push(...part);
  for (let start = 0; start < units.length; start += 1) {
    const numbers = {};
    let at = 0, unit = start;
    for (; at < text.length && unit < units.length; unit += 1) {
      if (typeof units[unit] === "string") {
        if (units[unit] !== text[at]) break;
        at += 1;
        continue;
      }
      const digits = /^(?:\d+|[#*]|\{\})/.exec(text.slice(at));
      if (!digits) break;
      if (/\d/.test(digits[0])) numbers[units[unit]] = Number(digits[0]);
      at += digits[0].length;
    }
    if (at === text.length) found.push({ places: numbers, index: null });
  }
  return found;
}
const compatible = (a, b) => Object.entries(b.places).every(([place, n]) => a.places[place] === undefined || a.places[place] === n) && (a.index === null || b.index === null || a.index === b.index);
const together = (a, b) => ({ places: { ...a.places, ...b.places }, index: a.index === null ? b.index : a.index });
const crossed = (some, others) => some.flatMap((a) => others.filter((b) => compatible(a, b)).map((b) => together(a, b))).slice(0, 64);
const NOTHING = { places: {}, index: null };

function readings(text, drawing) {
  if (!text) return [NOTHING];
  const found = alignments(text, drawing);
  for (const kind of KINDS) {
    const said = new RegExp(`(^|[._])${NUMBERED[kind]}[._]?(\\d+)(?=$|[._])`).exec(text), place = drawing.places.indexOf(kind);
    if (!said || (place < 0 && (kind !== "expert" || drawing.experts === null))) continue;
    const n = Number(said[2]), here = place < 0 ? { places: {}, index: n } : { places: { [place]: n }, index: null };
    if (place < 0 && n >= drawing.shape[drawing.experts]) continue;
    const before = text.slice(0, said.index).replace(/[._]+$/, ""), after = text.slice(said.index + said[0].length).replace(/^[._]+/, "");
    found.push(...crossed(crossed([here], readings(before, drawing)), readings(after, drawing)));
  }
  return found;
}
const words = (query) => query.trim().toLowerCase().replace(/\b(layers?|blocks?|experts?)\s+(?=\d)/g, "$1.").split(/\s+/).filter(Boolean);
// Where a search stands in a drawing's names; the first reading that a tensor has. Null where none has.
function searched(query, drawing, members) {
  const all = words(query).reduce((some, word) => crossed(some, readings(word, drawing)), [NOTHING]);
  return all.find((reading) => !members || members.some((member) => fits(drawing, member, { places: reading.places }))) || null;
}

function portrait(map, view, drawing, member, scale, index) {
  const rows = drawing.shape.length < 2 ? 1 : drawing.shape.slice(0, -1).reduce((a, b) => a * b, 1);
  const columns = drawing.shape.length ? drawing.shape[drawing.shape.length - 1] : 1;
  const w = pixels(columns) * scale, h = rows === 1 ? 10 : pixels(rows) * scale, most = Math.max(...drawing.rectangles.map((r) => r.slots.length), 1);
  const pad = 2 + 3 * (Math.min(most, 4) - 1), X = (x) => pad + (x / columns) * w, Y = (y) => 2 + (y / rows) * h;
  const which = (slot) => (view.by === "file" ? member.files[slot] : slot);
  const out = svg("svg", { width: w + pad + 4, height: h + pad + 4, viewBox: `0 0 ${w + pad + 4} ${h + pad + 4}`, role: "img", "aria-label": count(drawing.rectangles.length, "part") });
  for (const r of drawing.rectangles) {
    const stacked = r.slots.slice(0, 4);
    stacked.map((slot, depth) => [slot, depth]).reverse().forEach(([slot, depth]) => {
      const rows_ = rows === 1 ? `elements ${r.x}–${r.x + r.w - 1}` : `rows ${r.y}–${r.y + r.h - 1}, columns ${r.x}–${r.x + r.w - 1}`;
      out.append(svg("rect", {
        x: X(r.x) - 3 * depth, y: Y(r.y) + 3 * depth, width: Math.max(0.6, (r.w / columns) * w), height: Math.max(0.6, (r.h / rows) * h),
        fill: paint(which(slot)).fill, class: "edge", "data-file": member.files[slot],
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
  if (index !== null && drawing.experts === 0) out.append(svg("rect", { x: X(0), y: Y((rows / drawing.shape[0]) * index), width: w, height: Math.max(2, h / drawing.shape[0]), class: "found" }));
  return out;
}

function where(drawing, held, member) {
  const names = (m) => m.numbers.map((list, i) => `${drawing.places[i]}s ${list.map(span).join(", ")}`).join(", ");
  return { here: names(member), all: held.members.length > 1 ? held.members.map(names) : [] };
}

function detail(shown, map, { drawing, held, member, reading }) {
  const place = where(drawing, held, member), one = drawing.shape.length < 2;
  const parts = drawing.rectangles.slice(0, 48).map((r) => [one ? `${r.x}–${r.x + r.w - 1}` : `${r.y}–${r.y + r.h - 1} × ${r.x}–${r.x + r.w - 1}`, el("span", { class: "mono" }, dotted(r.slots.map((slot) => map.files[member.files[slot]].path).join(" = ")))]);
  shown.replaceChildren(
    el("h3", { class: "mono" }, dotted(shownName(drawing, reading.places))),
    pairs([[reading.index === null ? "" : `expert ${reading.index}`, reading.index === null ? "" : `index ${reading.index} along dimension ${drawing.experts}, in which all experts of a layer lie`],
      ["shape", drawing.shape.join(" × ") || "a number"], ["type", held.dtype], ["cut", drawing.partition], ["in", place.here], ["tensors alike", count(held.tensors)], ["states alike", held.states.join(", ")],
      ["fused", (drawing.periods > 1 ? `${drawing.periods} times ` : "") + drawing.fused.map(([name, length]) => `${name} ${count(length)}`).join(" | ")], ["padding", drawing.padding === null ? null : `rows from ${count(drawing.padding)} on`], ["gaps", drawing.step ? "parts hold every so-many-th element" : null]]),
    el("h4", {}, one ? "elements → file" : "rows × columns → file"), table(["part", "file"], parts),
    drawing.rectangles.length > 48 ? el("p", { class: "soft small" }, `and ${count(drawing.rectangles.length - 48)} more parts`) : "",
    place.all.length ? el("details", {}, el("summary", {}, `${count(place.all.length)} groups in other files`), el("ul", {}, place.all.slice(0, 200).map((text) => el("li", {}, text)))) : "");
}

// Beside the drawings where there is room; on a phone a sheet at the foot, which opens for what was touched and can be closed.
function sheet() {
  const shown = el("div", { "aria-live": "polite" });
  let from = null;
  const larger = el("button", { class: "larger", "aria-expanded": "false", onclick: () => { const tall = node.classList.toggle("tall"); larger.setAttribute("aria-expanded", String(tall)); larger.textContent = tall ? "Less" : "More"; } }, "More");
  const close = () => {
    if (!node.classList.contains("open")) return false;
    node.classList.remove("open");
    document.body.classList.remove("sheet-open");
    if (from && from.isConnected) from.focus({ preventScroll: true });
    return true;
  };
  const node = el("aside", { class: "detail", "aria-label": "Details of a tensor" }, el("div", { class: "handle" }, larger, el("button", { class: "close", "aria-label": "Close the details", onclick: close }, "×")), shown);
  const open = (card) => {
    from = card;
    if (!narrow()) return;
    maps.forEach((other) => { if (other.node !== node) other.close(); });
    node.classList.add("open");
    document.body.classList.add("sheet-open");
    node.scrollTop = 0;
    const box = card.getBoundingClientRect(), below = box.bottom + 12 - node.getBoundingClientRect().top;
    if (below > 0) scrollBy({ top: Math.min(below, box.top - 8), behavior: "instant" });
  };
  return { node, shown, open, close };
}

// One cell for every layer or expert, coloured by the set of files that hold it: pipeline stages and expert ranks.
function strip(map, view, asked, kind, choose) {
  const of = new Map(), sets = new Map();
  for (const drawing of map.drawings) {
    const place = drawing.places.indexOf(kind), held = place < 0 ? null : drawing.held.find((one) => one.states.includes(view.state));
    for (const member of held ? held.members : []) {
      if (kind === "expert" && !fits(drawing, member, { layer: asked.layer })) continue;
      for (const [a, b] of member.numbers[place]) for (let n = a; n <= b; n += 1) { if (!of.has(n)) of.set(n, new Set()); member.files.forEach((f) => of.get(n).add(f)); }
    }
  }
  const all = [...of.keys()].sort((a, b) => a - b), keys = new Map(all.map((n) => [n, [...of.get(n)].sort((a, b) => a - b).join(" ")]));
  all.forEach((n) => sets.set(keys.get(n), [...(sets.get(keys.get(n)) || []), n]));
  if (!all.length) return "";
  const order = [...sets.keys()], buttons = all.map((n) => {
    const how = paint(order.indexOf(keys.get(n))), files = [...of.get(n)];
    return el("button", { class: how.dark ? "dark" : null, style: `background:${how.css}`, "aria-pressed": String(asked[kind] === n), "aria-label": `${kind} ${n}`, [`data-${kind}`]: n,
      "data-tip": `${kind} ${n}: ${count(files.length, "file")}, ${files.slice(0, 3).map((f) => map.files[f].path).join(", ")}${files.length > 3 ? ", …" : ""}`, onclick: () => choose(kind, n) }, el("span", { style: how.css === how.hex ? null : `background:${how.hex}` }, n));
  });
  const row = el("div", { class: "strip", role: "group", "aria-label": `${kind}s, coloured by the files that hold them` }, buttons);
  walkable(row, buttons, all.indexOf(asked[kind]));
  const ranges = (list) => list.reduce((found, n) => { const last = found[found.length - 1]; if (last && last[1] === n - 1) last[1] = n; else found.push([n, n]); return found; }, []).map(span).join(", ");
  return el("div", {}, el("h4", {}, `${count(all.length, kind)}: one colour for those in the same files`), row,
    order.length <= 24 ? legend(order.map((k, i) => [paint(i).css, `${kind}s ${ranges(sets.get(k))}: ${count(k.split(" ").length, "file")}`])) : el("p", { class: "soft small" }, `${count(order.length)} sets of files`));
}

// The state that most tensors have: ZeRO 3 stores masters, and of parameters just the buffers.
function fullest(map) {
  const tensors = (state) => map.drawings.reduce((n, d) => n + d.held.filter((h) => h.states.includes(state)).reduce((k, h) => k + h.tensors, 0), 0);
  return map.states.reduce((best, state) => (tensors(state) > tensors(best) ? state : best), map.states[0]);
}

// What is shown: drawings of the state, of the layer and expert that were chosen, and with the name that is searched.
function selection(map, view) {
  const found = map.drawings.flatMap((drawing) => {
    const held = drawing.held.find((one) => one.states.includes(view.state)), reading = held && searched(view.query, drawing, held.members);
    return reading ? [{ drawing, held, reading }] : [];
  });
  // A number on which all that was found agrees is shown as chosen.
  const asked = { ...view.chosen };
  for (const kind of view.query.trim() ? KINDS : []) {
    const numbers = new Set(found.map(({ drawing, reading }) => reading.places[drawing.places.indexOf(kind)]).filter((n) => n !== undefined));
    if (numbers.size === 1) asked[kind] = [...numbers][0];
    else if (numbers.size) asked[kind] = null;
  }
  const items = found.flatMap((one) => {
    const member = one.held.members.find((m) => fits(one.drawing, m, { ...(layered(one.drawing) ? asked : {}), places: one.reading.places }));
    return member ? [{ ...one, member }] : [];
  });
  return { items, asked };
}

function shardMap(role, model) {
  const map = model.shards, side = sheet(), body = el("div"), said = el("p", { class: "soft small said", role: "status" }), key = el("div");
  const view = { state: fullest(map), by: "shard", query: "", chosen: { layer: null, expert: null }, drawing: null };
  const largest = Math.max(...map.drawings.map((d) => pixels(Math.max(...d.shape, 1))), 1), scale = Math.max(1, Math.min(1.9, 150 / largest));
  const choose = (kind, n) => {
    const was = selection(map, view).asked[kind];
    view.query = search.value = "";
    view.chosen[kind] = was === n ? null : n;
    draw();
    const cell = body.querySelector(`[data-${kind}="${n}"]`);
    if (cell) cell.focus();
  };
  const card = (item) => {
    const { drawing, held, member, reading } = item, cut = drawing.pattern.indexOf("{}");
    const rest = cut < 0 ? drawing.pattern.split(".").slice(1).join(".") || drawing.pattern : shownName(drawing, reading.places).split(".").slice(drawing.pattern.slice(0, cut + 2).split(".").length).join(".") || shownName(drawing, reading.places);
    const button = el("button", { class: "tensor", "aria-pressed": "false", title: shownName(drawing, reading.places), onclick: () => { view.drawing = drawing; press(); detail(side.shown, map, item); side.open(button); } },
      portrait(map, view, drawing, member, scale, reading.index), el("span", { class: "name" }, dotted(rest)), el("span", { class: "of" }, `${drawing.shape.join(" × ") || "scalar"}${held.tensors > 1 ? ` · ${count(held.tensors)} alike` : ""}${reading.index === null ? "" : ` · expert ${reading.index} within`}`));
    const press = () => body.querySelectorAll(".tensor").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
    button.setAttribute("aria-pressed", String(view.drawing === drawing));
    return button;
  };
  const draw = () => {
    const { items, asked } = selection(map, view), heads = new Map();
    for (const item of items) {
      const { drawing } = item, cut = drawing.pattern.indexOf("{}"), head = cut < 0 ? drawing.pattern.split(".")[0] : drawing.pattern.slice(0, cut + 2);
      if (!heads.has(head)) heads.set(head, []);
      heads.get(head).push(card(item));
    }
    body.replaceChildren(...KINDS.map((kind) => strip(map, view, asked, kind, choose)), ...[...heads].flatMap(([head, cards]) => [el("h4", {}, head.replace("{}", asked.layer === null ? "#" : asked.layer)), el("div", { class: "tensors" }, cards)]));
    said.textContent = told(map, view, items);
    key.replaceChildren(meaning(map, view, items));
    const alive = items.find((item) => item.drawing === view.drawing) || items[0];
    if (alive) detail(side.shown, map, alive);
    else side.shown.replaceChildren(el("p", { class: "soft" }, "Nothing is chosen."));
    if (!alive || alive.drawing !== view.drawing) side.close();
  };
  const search = el("input", { type: "search", placeholder: "experts.5, layers.3.mlp, qkv …", "aria-label": `Search tensors${role ? ` of ${role}` : ""} by name`, autocomplete: "off", autocapitalize: "off", spellcheck: "false", oninput: (event) => { view.query = event.target.value; draw(); } });
  const files = [...map.files].sort((a, b) => b.bytes - a.bytes), most = files.length ? files[0].bytes : 1;
  const node = el("div", { class: "map" },
    el("div", { class: "figures" }, figure(count(map.tensors), "tensors in all states", "tensors"), figure(size(map.bytes), "of them, once"), figure(count(map.files.length), "files"), figure(count(map.replicas), "parts stored again"), map.replica_bytes ? figure(size(map.replica_bytes), "in replicas") : ""),
    el("div", { class: "controls" }, segments("State", map.states.map((s) => [s, s]), view.state, (state) => { view.state = state; draw(); }), segments("Colour by", [["shard", "part of the tensor"], ["file", "file"]], view.by, (by) => { view.by = by; draw(); }),
      el("label", { class: "wide" }, el("span", { class: "label" }, "Search by name"), search)), key, said,
    el("div", { class: "split" }, body, side.node),
    map.folded.length ? el("p", { class: "soft small" }, `Cut at other places in other layers, and not drawn: ${map.folded.map(([p, n]) => `${count(n)} of ${p.replace(/\{\}/g, "#")}`).join("; ")}.`) : "",
    el("details", {}, el("summary", {}, `${count(files.length, "file")}, by what they hold`), limited(files, 60, (rows) => table(["file", { t: "tensors", n: 1 }, { t: "bytes", n: 1 }, ""], rows.map((f) => [el("span", { class: "mono" }, f.path), count(f.tensors), size(f.bytes), el("div", { class: "meter" }, el("i", { style: `width:${(100 * f.bytes) / most}%` }))])))));
  maps.push({ root: node, search, node: side.node, close: side.close, reset: () => { view.chosen = { layer: null, expert: null }; view.query = search.value = ""; draw(); } });
  draw();
  return node;
}

// What the colours of the drawings stand for, where there are few enough to be listed.
function meaning(map, view, items) {
  const used = new Set(items.flatMap(({ member }) => (view.by === "file" ? member.files : member.files.map((_, slot) => slot))));
  if (used.size < 2 || used.size > 16) return "";
  return legend([...used].sort((a, b) => a - b).map((n) => [paint(n).css, view.by === "file" ? map.files[n].path : `part ${n + 1}`]));
}

function told(map, view, items) {
  if (!view.query.trim()) return items.length ? "" : `No tensor has the state ${view.state}.`;
  const hidden = map.folded.filter(([pattern]) => searched(view.query, { pattern, places: [], experts: null, shape: [] }, null)).reduce((n, [, more]) => n + more, 0);
  const more = hidden ? ` ${count(hidden)} more may be, and are not drawn: they are cut at other places.` : "";
  if (items.length) return `${count(items.length, "drawing")} of tensors called like “${view.query.trim()}”.${more}`;
  const elsewhere = map.states.filter((state) => state !== view.state && selection(map, { ...view, state }).items.length);
  return `No tensor of state ${view.state} is called like “${view.query.trim()}”.${elsewhere.length ? ` There are such of state ${elsewhere.join(", ")}.` : ""}${more}`;
}

// A step or a checkpoint: its roles, of which one is shown, each with controls of its own.
function stage(subject) {
  const roles = Object.entries(subject.models).filter(([, model]) => model.shards);
  if (!roles.length) return "";
  const panels = roles.map(([role, model], n) => el("div", { class: "role", hidden: n > 0, "data-role": role }, el("p", { class: "soft small" }, [role, model.facts ? `${model.facts.format}, ${model.facts.parallel.text}` : ""].filter(Boolean).join(": ")), shardMap(role, model)));
  const show = (role) => { maps.forEach((one) => one.close()); panels.forEach((panel) => { panel.hidden = panel.dataset.role !== role; }); };
  return el("div", { class: "card stage", role: "group", "aria-label": `Shard map of ${subject.path}` }, el("h3", {}, subject.label ? `${subject.label}: ` : "", el("span", { class: "mono" }, dotted(subject.path))),
    roles.length > 1 ? el("div", { class: "controls roles" }, segments("Role", roles.map(([role]) => [role, role]), roles[0][0], show)) : "", panels);
}

function shards(subjects) {
  // Keys act on the map that has the focus, or lies nearest to the middle of the window.
  const near = () => {
    const seen = maps.filter((one) => one.root.offsetParent), off = (one) => { const box = one.root.getBoundingClientRect(); return Math.max(box.top - innerHeight / 2, innerHeight / 2 - box.bottom, 0); };
    return seen.find((one) => one.root.contains(document.activeElement)) || seen.sort((a, b) => off(a) - off(b))[0];
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(input|textarea)$/i.test(event.target.tagName)) { event.preventDefault(); near().search.focus(); }
    if (event.key === "Escape" && !event.defaultPrevented && !maps.some((one) => one.close())) near().reset();
  });
  const marks = legend([[PARTS[0], "a part, in one file"], [svg("svg", { width: 18, height: 16 }, svg("rect", { x: 1, y: 5, width: 12, height: 9, fill: PARTS[1], class: "edge" }), svg("rect", { x: 4, y: 2, width: 12, height: 9, fill: PARTS[0], class: "edge" })), "stacked: replicas"], [svg("svg", { width: 14, height: 14 }, svg("rect", { width: 14, height: 14, fill: PARTS[0] }), svg("rect", { width: 14, height: 14, fill: "url(#hatch)" })), "padding of the vocabulary"], [svg("svg", { width: 16, height: 12 }, svg("line", { x1: 0, x2: 16, y1: 6, y2: 6, class: "seam" })), "seam of fused parts"]]);
  return [el("p", { class: "lead" }, "Every rectangle is a tensor, cut as it lies in the files. Sides grow with the logarithm of their length; tensors that are cut alike are drawn once. Choose a layer to see its files, a tensor for its numbers; “/” searches, Esc shows all."),
    marks, subjects.map(stage)];
}
