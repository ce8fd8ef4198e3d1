"use strict";
// Draws the page from the JSON block in it. Texts of checkpoints are only ever set as text, never as markup.
const page = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
// Eight colours of which any two differ by a CIEDE2000 of 17, also as people with protanopia, deuteranopia or tritanopia see them, and
// by 15 from the page's own white and black. What is beyond eight has them again, with a texture.
const PARTS = ["#0072b2", "#e69f00", "#960000", "#c3a5ff", "#4bb4a5", "#784b5a", "#b4e1a5", "#d24b4b"];
const CIVIDIS = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 184, 102], [254, 232, 56]];
const FATES = { kept: "#0072b2", derived: "#4bb4a5", changed: "#e69f00", "left behind": "#784b5a", lost: "#d24b4b", note: "#b0b7bf", "not accounted for": "#c3a5ff" };
const STATES = { committed: "#0072b2", damaged: "#d24b4b", partial: "#e69f00", foreign: "#784b5a", unreadable: "#c3a5ff", "no longer on the disk": "#8c8c8c" };

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
const isDark = (hex) => { const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)); return 0.3 * r + 0.59 * g + 0.11 * b < 125; };

// The nth of several: its colour, whether text on it is white, what fills an SVG shape (made once for each texture), and a CSS background.
const TEXTURES = [
  null,
  { size: 5, draw: (ink) => svg("rect", { width: 1.8, height: 5, fill: ink }), css: (ink) => `repeating-linear-gradient(45deg, ${ink} 0 2px, transparent 2px 5px)` },
  { size: 5, draw: (ink) => svg("circle", { cx: 2.5, cy: 2.5, r: 1.3, fill: ink }), css: (ink) => `radial-gradient(${ink} 1.3px, transparent 1.6px) 0 0 / 5px 5px` },
  { size: 5, draw: (ink) => svg("path", { d: "M0 2.5h5M2.5 0v5", stroke: ink, "stroke-width": 1.1 }), css: (ink) => `repeating-linear-gradient(0deg, ${ink} 0 1.2px, transparent 1.2px 5px), repeating-linear-gradient(90deg, ${ink} 0 1.2px, transparent 1.2px 5px)` },
];
function paint(n) {
  const which = n % PARTS.length, hex = PARTS[which], texture = TEXTURES[Math.floor(n / PARTS.length) % TEXTURES.length], dark = isDark(hex);
  if (!texture) return { hex, dark, fill: hex, css: hex };
  const ink = dark ? "rgb(255 255 255 / .8)" : "rgb(0 0 0 / .6)", id = `texture-${n % (PARTS.length * TEXTURES.length)}`;
  if (!document.getElementById(id)) {
    document.querySelector(".defs defs").append(svg("pattern", { id, width: texture.size, height: texture.size, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("rect", { width: texture.size, height: texture.size, fill: hex }), texture.draw(ink)));
  }
  return { hex, dark, fill: `url(#${id})`, css: `${texture.css(ink)}, ${hex}` };
}

// Buttons of which one is chosen. Every group has a name of its own: two that share one would unmake each other's choice.
let groups = 0;
function segments(title, values, chosen, choose) {
  groups += 1;
  const name = `choice-${groups}`;
  return el("fieldset", {}, el("legend", {}, title), el("div", { class: "segments" }, values.map(([value, text]) => el("label", {}, el("input", { type: "radio", name, value, checked: value === chosen, onchange: () => choose(value) }), el("span", {}, text)))));
}

// Arrow keys walk along a row of buttons, of which one is in the tab order.
function walkable(row, buttons, first) {
  const to = (at) => buttons.forEach((b, i) => { b.tabIndex = i === at ? 0 : -1; });
  to(Math.max(0, first || 0));
  row.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -1e9, End: 1e9 }[event.key], at = buttons.indexOf(document.activeElement);
    if (!step || at < 0) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(buttons.length - 1, at + step));
    to(next);
    buttons[next].focus();
  });
}

const ruler = document.createElement("canvas").getContext("2d");
function wide(text, font) {
  ruler.font = font || "11px system-ui, sans-serif";
  return ruler.measureText(text).width;
}
const narrow = () => matchMedia("(max-width: 900px)").matches;
const stamp = (t, digits) => { const date = new Date(t * 1000); return Number.isNaN(date.getTime()) ? String(t) : date.toISOString().slice(0, digits ? 20 + digits : 19).replace("T", " "); };
// Draws when the width is known, and again when it changes.
function sized(host, draw) {
  let last = -1;
  new ResizeObserver(() => { if (host.clientWidth && host.clientWidth !== last) { last = host.clientWidth; draw(last); } }).observe(host);
  return host;
}

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

const tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
document.body.append(tip);
function tell(target, x, y) {
  const told = target && target.closest && target.closest("[data-tip]");
  tip.hidden = !told;
  if (!told) return;
  tip.textContent = told.dataset.tip;
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 8 : y + 18}px`;
}
// A finger lies on what it touches, and what it opens says the same.
document.addEventListener("pointermove", (event) => tell(event.pointerType === "touch" ? null : event.target, event.clientX, event.clientY));
document.addEventListener("focusin", (event) => { const box = event.target.getBoundingClientRect(); tell(event.target.matches(":focus-visible") ? event.target : null, box.left, box.bottom - 12); });
document.addEventListener("focusout", () => { tip.hidden = true; });
document.addEventListener("pointerdown", () => { tip.hidden = true; });
