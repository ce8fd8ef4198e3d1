/* ---- a run ---- */
const LANES = { saves: ["saves", "save"], failed: ["failures", "failure"], skip: ["passed over", "step passed over"], load: ["resumes", "resume"], delete: ["deletions", "deletion"], clean: ["cleaned up", "cleaning"], export: ["exports", "export"] };
const EVENTS = { failed: "#d24b4b", skip: "#e69f00", load: "#0072b2", delete: "#784b5a", clean: "#784b5a", export: "#c3a5ff" };
const SHAPES = { failed: "cross", load: "up", delete: "square", clean: "square", skip: "square", export: "square" };

// Everything that has a place on the timeline, oldest first.
function happenings(run) {
  const saves = run.steps.filter((s) => s.committed_at !== null).map((s) => ({
    lane: "saves", from: s.began_at ?? s.committed_at, to: s.committed_at, step: s.step, colour: STATES[s.state], stall: s.stall_seconds,
    short: `step ${s.step}: ${s.state}${s.save_seconds === null ? "" : `, saved in ${seconds(s.save_seconds)}`}${s.stall_seconds === null ? "" : `, training waited ${seconds(s.stall_seconds)}`}`,
    facts: [["state", s.state], ["committed (UTC)", stamp(s.committed_at, s.committed_at % 1 ? 3 : 0)], ["saved in", s.save_seconds === null ? "" : seconds(s.save_seconds)], ["training waited", s.stall_seconds === null ? "" : seconds(s.stall_seconds)], ["size", size(s.bytes)], ["metrics", metricText(s.metrics)], ["quarantined", s.quarantined], ["what is wrong", s.why]],
  }));
  const gone = run.events.filter((e) => e.kind === "commit" && e.values.seconds && !saves.some((s) => s.step === e.step)).map((e) => ({
    lane: "saves", from: e.time - e.values.seconds, to: e.time, step: e.step, colour: STATES["no longer on the disk"], stall: null,
    short: `step ${e.step}: saved in ${seconds(e.values.seconds)}, no longer on the disk`, facts: [["state", "no longer on the disk"], ["committed (UTC)", stamp(e.time, 3)], ["saved in", seconds(e.values.seconds)]],
  }));
  const events = run.events.filter((e) => e.kind !== "commit" && Object.hasOwn(LANES, e.kind)).map((e) => ({
    lane: e.kind, from: e.time, to: e.time, step: e.step, colour: EVENTS[e.kind], shape: SHAPES[e.kind],
    short: `${LANES[e.kind][1]}${e.step === null ? "" : ` of step ${e.step}`}: ${e.text || stamp(e.time)}`, facts: [["when (UTC)", stamp(e.time, 3)], ["what", e.kind], ["told", e.text], ["numbers", metricText(e.values)]],
  }));
  return [...saves, ...gone, ...events].filter((i) => Number.isFinite(i.from) && Number.isFinite(i.to)).sort((a, b) => a.to - b.to || (a.step ?? 0) - (b.step ?? 0));
}

// Where everything lies: by time, or one after another with a place of its own each.
function places(items, width, scale) {
  const first = Math.min(...items.map((i) => i.from)), last = Math.max(...items.map((i) => i.to)), long = Math.max(last - first, 1e-3), slot = width / items.length;
  const longest = Math.max(...items.map((i) => i.to - i.from), 1e-9);
  return items.map((item, n) => {
    if (scale === "time") return { item, x: ((item.from - first) / long) * (width - 10), w: ((item.to - item.from) / long) * (width - 10) };
    const w = Math.max(8, ((item.to - item.from) / longest) * Math.min(slot * 0.7, 90));
    return { item, x: Math.max(0, (n + 0.5) * slot - w / 2), w };
  });
}

// Neighbours that lie too near to be told apart, or touched, are one mark that says how many it is.
function clustered(placed, lane, width) {
  const own = placed.filter((p) => p.item.lane === lane).sort((a, b) => a.x - b.x), least = narrow() ? 24 : 13, marks = [];
  const label = (text) => wide(text, "600 12px system-ui, sans-serif") + 22;
  for (let at = 0; at < own.length;) {
    let next = at + 1;
    if (next < own.length && own[next].x - own[at].x < least) {
      const chip = label(count(own.length, LANES[lane][1]));
      while (next < own.length && own[next].x - own[at].x < chip) next += 1;
      const items = own.slice(at, next).map((p) => p.item), end = own[next] ? own[next].x - 4 : width;
      marks.push({ x: own[at].x, w: Math.min(Math.max(chip - 4, own[next - 1].x + own[next - 1].w - own[at].x), end - own[at].x), room: chip, items, text: count(items.length, LANES[lane][1]) });
    } else {
      const end = own[next] ? own[next].x - 2 : width;
      marks.push({ x: own[at].x, w: Math.max(lane === "saves" ? 6 : 12, Math.min(own[at].w, end - own[at].x)), items: [own[at].item], text: "" });
    }
    at = next;
  }
  // At the right edge there is no room for a last mark's words: it moves in, and takes what it would cover.
  for (let last = marks[marks.length - 1]; last; last = marks[marks.length - 1]) {
    last.x = Math.max(0, Math.min(last.x, width - (last.room || last.w) + 4));
    last.w = Math.min(Math.max(last.w, (last.room || 0) - 4), width - last.x);
    const before = marks[marks.length - 2];
    if (!before || before.x + (before.room ? before.room - 4 : Math.min(before.w, least)) + 2 <= last.x) {
      if (before) before.w = Math.min(before.w, last.x - before.x - 2);
      break;
    }
    const items = [...before.items, ...last.items], text = count(items.length, LANES[lane][1]), room = label(text);
    marks.splice(-2, 2, { x: before.x, w: room, room, items, text });
  }
  return marks;
}
const crowded = (items, width, scale) => { const placed = places(items, width, scale); return Object.keys(LANES).reduce((n, lane) => n + clustered(placed, lane, width).filter((m) => m.text).reduce((k, m) => k + m.items.length, 0), 0); };

function ticks(items, width, scale) {
  if (scale !== "time") return [[0, "start", stamp(items[0].to)], ...(width > 300 && items.length > 1 ? [[width, "end", stamp(items[items.length - 1].to)]] : [])];
  const first = Math.min(...items.map((i) => i.from)), last = Math.max(...items.map((i) => i.to)), long = Math.max(last - first, 1e-3);
  const digits = long < 1 ? 3 : long < 12 ? 1 : 0, day = stamp(first).slice(0, 10) === stamp(last).slice(0, 10);
  const text = (t, whole) => { const full = stamp(t, digits); return whole || !day ? (day || whole ? full : full.slice(5, 16)) : full.slice(11); };
  const n = Math.max(2, Math.min(6, Math.floor(width / 170))), found = [];
  let until = -1;
  for (let i = 0; i < n; i += 1) {
    const x = (i / (n - 1)) * width, label = text(first + (i / (n - 1)) * long, i === 0), w = wide(label, "12px system-ui, sans-serif") + 4, left = i === 0 ? 0 : i === n - 1 ? width - w : x - w / 2;
    if (left <= until) continue;
    found.push([x, i === 0 ? "start" : i === n - 1 ? "end" : "middle", label]);
    until = left + w + 12;
  }
  return found;
}

function timeline(run) {
  const all = happenings(run);
  if (!all.length) return "";
  const look = { items: all, scale: null, trail: [], chosen: null };
  const lanes = Object.keys(LANES).filter((lane) => all.some((item) => item.lane === lane)), host = el("div", { class: "lanes", role: "group", "aria-label": `${count(run.steps.length, "step")} and ${count(run.events.length, "event")} on time` });
  const told = el("div", { class: "told", "aria-live": "polite" }), crumbs = el("p", { class: "crumbs small" });
  const scales = el("div", { class: "controls" });
  const zoom = (items, scale) => { look.trail.push([look.items, look.scale]); Object.assign(look, { items, scale, chosen: null }); draw(); const mark = host.querySelector(".mark"); if (mark) mark.focus(); };
  const back = () => { if (!look.trail.length) return false; [look.items, look.scale] = look.trail.pop(); look.chosen = null; draw(); const mark = host.querySelector(".mark"); if (mark) mark.focus(); return true; };
  const open = (mark, width) => {
    const [first, last] = [mark.items[0], mark.items[mark.items.length - 1]], from = Math.min(first.from, last.from), to = Math.max(...mark.items.map((i) => i.to));
    const inside = look.scale === "time" ? look.items.filter((i) => mark.items.includes(i) || (i.lane !== mark.items[0].lane && i.to >= from && i.to <= to)) : mark.items;
    // Where time does not tell them apart either, as manifests count whole seconds, they stand in their order.
    const scale = look.scale === "time" && crowded(inside, width, "time") < inside.length / 2 ? "time" : "order";
    zoom(inside, scale);
  };
  const show = (mark) => {
    look.chosen = mark.items[0];
    told.replaceChildren(el("b", {}, mark.items[0].step === null ? LANES[mark.items[0].lane][1] : `step ${mark.items[0].step}`), pairs(mark.items[0].facts));
    host.querySelectorAll(".mark").forEach((one) => one.setAttribute("aria-pressed", String(one === document.activeElement)));
  };
  const button = (mark, width) => {
    const [item] = mark.items, many = mark.text !== "";
    const mixed = [...new Set(mark.items.map((i) => i.colour))], css = mixed.length > 1 ? `linear-gradient(90deg, ${mixed.map((c, i) => `${c} ${(100 * i) / mixed.length}% ${(100 * (i + 1)) / mixed.length}%`).join(", ")})` : item.colour;
    const names = many && item.step !== null ? `steps ${Math.min(...mark.items.map((i) => i.step ?? 1 / 0))}–${Math.max(...mark.items.map((i) => i.step ?? 0))}` : "";
    const node = el("button", { class: `mark ${many ? "many" : item.shape || "save"}`, style: `left:${mark.x.toFixed(1)}px;width:${mark.w.toFixed(1)}px;--c:${css}`, "data-tip": many ? `${mark.text}${names ? `, ${names}` : ""}: open` : item.short, "aria-label": many ? `${mark.text}${names ? `, ${names}` : ""}: show them apart` : item.short, "aria-pressed": many ? null : String(look.chosen === item), onclick: () => (many ? open(mark, width) : show(mark)) }, many ? mark.text : "");
    if (!many && item.stall) node.append(el("i", { style: `width:${Math.min(100, (100 * item.stall) / Math.max(item.to - item.from, 1e-9)).toFixed(1)}%` }));
    return node;
  };
  const draw = () => {
    const width = Math.max(120, host.clientWidth - (host.clientWidth < 640 ? 0 : 108));
    if (look.scale === null) look.scale = crowded(all, width, "time") > all.length / 2 && crowded(all, width, "order") < crowded(all, width, "time") ? "order" : "time";
    const placed = places(look.items, width, look.scale);
    host.replaceChildren(...lanes.filter((lane) => look.items.some((item) => item.lane === lane)).map((lane) => {
      const marks = clustered(placed, lane, width), buttons = marks.map((mark) => button(mark, width)), track = el("div", { class: `track${lane === "saves" ? " tall" : ""}` }, buttons);
      let until = -1;
      if (lane === "saves") marks.forEach((mark) => { // the numbers of steps, where there is room for them
        const steps = mark.items.map((i) => i.step), text = mark.text ? `${Math.min(...steps)}–${Math.max(...steps)}` : String(steps[0]), w = wide(text, "12px system-ui, sans-serif"), x = Math.max(0, Math.min(mark.x + mark.w / 2 - w / 2, width - w));
        if (x < until || (mark.text && w > mark.w)) return;
        track.append(el("span", { class: "number", style: `left:${x.toFixed(1)}px` }, text));
        until = x + w + 8;
      });
      walkable(track, buttons, 0);
      return el("div", { class: "lane" }, el("span", { class: "lane-name" }, LANES[lane][0]), track);
    }), el("div", { class: "lane" }, el("span", { class: "lane-name" }, ""), el("div", { class: "track ticks" }, ticks(look.items, width, look.scale).map(([x, how, text]) => el("span", { class: `tick ${how}`, style: how === "end" ? "right:0" : `left:${x.toFixed(1)}px` }, text)))));
    crumbs.replaceChildren(look.trail.length ? el("button", { class: "back", onclick: back }, "← Back") : "", ` ${look.trail.length ? `${count(look.items.length)} of ${count(all.length)}` : count(all.length, "mark")}${look.scale === "order" ? ", one after another: distances are not times." : ", by time (UTC)."}${host.querySelector(".many") ? " What is too near to be told apart is counted: open it." : ""}`);
    if (all.length > 1) scales.replaceChildren(segments("Scale", [["time", "by time"], ["order", "one after another"]], look.scale, (scale) => { look.scale = scale; draw(); }));
    if (!look.chosen) told.replaceChildren();
  };
  host.addEventListener("keydown", (event) => { if (event.key === "Escape" && back()) event.preventDefault(); });
  sized(host, draw);
  return el("div", { class: "timeline" }, scales, crumbs, host, told, legend([[STATES.committed, "written behind training, until committed"], ["#e69f00", "training waited"], ...(all.some((i) => i.colour === STATES["no longer on the disk"]) ? [[STATES["no longer on the disk"], "no longer on the disk"]] : []), ...Object.entries(STATES).slice(1, 5).filter(([state]) => run.steps.some((s) => s.state === state)).map(([state, c]) => [c, state])]));
}

const metricText = (metrics) => Object.entries(metrics).map(([k, v]) => `${k} ${short(v)}`).join(", ");

function runSection(run) {
  const committed = run.steps.filter((s) => s.state === "committed").length;
  return [el("p", { class: "lead" }, el("span", { class: "mono" }, run.root)),
    el("div", { class: "card" }, el("div", { class: "figures" }, figure(count(run.steps.length), "steps on the disk", "run.steps"), figure(count(committed), "committed", "run.committed"), figure(size(run.steps.reduce((a, s) => a + s.bytes, 0)), "in all", "run.bytes"),
      run.stall_seconds !== null ? figure(seconds(run.stall_seconds), "training waits for a save (median)") : "", run.save_seconds !== null ? figure(seconds(run.save_seconds), "until it is committed (median)") : ""), timeline(run), el("p", { class: "soft small" }, run.history)),
    el("div", { class: "card" }, el("h3", {}, "Steps"), limited([...run.steps].reverse(), 100, (rows) => table([{ t: "step", n: 1 }, { t: "state", tight: 1 }, { t: "size", n: 1 }, "roles", { t: "written (UTC)", tight: 1 }, { t: "what is wrong", wide: 1 }], rows.map((s) => [count(s.step), chip(s.state, STATES[s.state]), size(s.bytes), s.roles.join(", "), s.time.replace("T", " ").replace("Z", ""), [s.quarantined ? `in quarantine: ${s.quarantined}` : "", s.why].filter(Boolean).join("; ")])))),
    run.events.length ? el("div", { class: "card" }, el("h3", {}, "Events"), limited([...run.events].reverse(), 25, (rows) => table([{ t: "when (UTC)", tight: 1 }, { t: "what", tight: 1 }, { t: "step", n: 1 }, { t: "numbers", wide: 1 }, { t: "told", wide: 1 }], rows.map((e) => [stamp(e.time), e.kind, e.step === null ? "" : count(e.step), metricText(e.values), e.text])))) : ""];
}
