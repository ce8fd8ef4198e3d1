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

/* ---- differences ---- */
const MEASURES = { ulps: "units in the last place", max_rel: "relative", max_abs: "absolute", differing: "elements" };
function heat(map, host) {
  const look = { state: (map.rows.find((r) => r.cells.length) || map.rows[0]).state, measure: "ulps" }, states = [...new Set(map.rows.map((r) => r.state))];
  const choose = (key) => (value) => { look[key] = value; draw(); };
  const chart = el("div", { class: "scroll" }), draw = () => {
    const rows = map.rows.filter((r) => r.state === look.state), columns = Math.max(1, ...rows.map((r) => r.columns)), W = Math.max(300, chart.clientWidth || 900);
    const left = Math.min(320, Math.max(120, W * 0.36)), cell = Math.max(4, Math.min(26, (W - left - 8) / columns)), tall = 20, H = rows.length * tall + 24;
    const worst = Math.max(...rows.flatMap((r) => r.cells.map((c) => c[look.measure] || 0)), 0), heat_ = (v) => (worst <= 0 ? 0 : Math.log1p((v / worst) * 999) / Math.log(1000));
    const out = svg("svg", { width: Math.max(W, left + columns * cell + 8), height: H, role: "img", "aria-label": "differences by layer and tensor" });
    const fitting = (name) => { let cut = name; while (cut.length > 4 && wide(cut, "11px system-ui, sans-serif") > left - 14) cut = `…${cut.slice(cut[0] === "…" ? 2 : 1)}`; return cut; };
    rows.forEach((row, y) => {
      const name = row.pattern.replace(/\{\}/g, "#"), at = new Map(row.cells.map((c) => [c.column, c]));
      out.append(svg("text", { x: 0, y: y * tall + 14, class: "rowname", "data-tip": name }, fitting(name)));
      for (let x = 0; x < row.columns; x += 1) {
        const c = at.get(x), there = within(x, row.compared);
        if (!there && !c) continue;
        out.append(svg("rect", { x: left + x * cell, y: y * tall + 2, width: Math.max(2, cell - 1.5), height: tall - 4, rx: 1.5, fill: c ? ramp(0.25 + 0.75 * heat_(c[look.measure] || 0)) : "none", class: c ? null : "frame", "data-tip": c ? `${name.replace("#", row.columns > 1 ? x : "#")}: ${c.what}${c.differing ? `, largest |a − b| ${short(c.max_abs)}, relative ${short(c.max_rel)}, ${count(c.ulps)} ulp` : ""}` : `${name.replace("#", row.columns > 1 ? x : "#")}: equal` }));
      }
    });
    if (columns > 1) for (let x = 0; x < columns; x += Math.max(1, Math.ceil((wide(String(columns), "11px system-ui, sans-serif") + 8) / cell))) out.append(svg("text", { x: left + x * cell + cell / 2, y: H - 6, "text-anchor": "middle" }, x));
    chart.replaceChildren(out);
    key.replaceChildren(legend([[svg("svg", { width: 14, height: 12 }, svg("rect", { x: 1, y: 1, width: 12, height: 10, class: "frame" })), "equal"], [ramp(0.25), "least"], [ramp(1), `most: ${short(worst)} (${MEASURES[look.measure]})`]]));
  };
  const key = el("div");
  sized(chart, draw);
  host.append(el("div", { class: "controls" }, segments("State", states.map((s) => [s, s]), look.state, choose("state")), segments("Colour by", Object.entries(MEASURES), look.measure, choose("measure"))), key, chart);
}

function differences(diff) {
  const parts = Object.entries(diff.models), how = (d) => (d.exact ? "bit for bit" : `within atol ${d.atol}, rtol ${d.rtol}`);
  const others = Object.values(diff.others).filter((is) => is !== "equal").length;
  const verdict = diff.equal
    ? el("div", { class: "banner good" }, el("b", {}, "Equal. "), parts.map(([role, d]) => `${role ? `${role}: ` : ""}${count(d.tensors, "tensor")}, ${count(d.elements, "element")}, compared ${how(d)}: there is nothing to see. `))
    : el("div", { class: "banner bad" }, el("b", {}, "Different. "), parts.filter(([, d]) => !d.equal).map(([role, d]) => `${role ? `${role}: ` : ""}${count(d.differences.length, "difference")} in ${count(d.tensors, "tensor")}, ${count(d.elements, "element")}, compared ${how(d)}. `), others ? `${count(others, "file")} beside the models ${others === 1 ? "is" : "are"} not the same.` : "");
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

const ORIGINS = { conversion: "a conversion", run: "a training run, from live state", adoption: "another trainer, and adopted" };
// Only what was converted can have lost something on the way.
function losslessness(s) {
  if (s.origin !== "conversion") return s.origin === "unknown" ? "" : "does not apply: nobody converted this, so that there is nothing to have been lost";
  return s.manifest.lossless === null ? "" : s.manifest.lossless ? "yes: everything that the source had is here, or can be derived" : "no: what was lost stands under Account";
}

function trust() {
  const cards = page.subjects.flatMap((subject) => [subject, ...[]].map((s) => el("div", { class: "card" }, el("h3", {}, s.label ? `${s.label}: ` : "", el("span", { class: "mono" }, s.path)),
    s.step_verdict ? verdictCard(s.label, s.step_verdict) : "",
    Object.entries(s.models).map(([role, m]) => [Object.keys(s.models).length > 1 ? el("h4", {}, role) : "", m.verdict ? verdictCard(role, m.verdict) : ""]),
    pairs([["manifest", s.manifest ? s.manifest.path : "none: not written by mcore_rlhf, so that nobody else says which files there should be"], ...(s.manifest ? [["files listed", count(s.manifest.files)], ["transaction", s.manifest.transaction], ["written by", ORIGINS[s.origin]], ["lossless", losslessness(s)], ...Object.entries(s.manifest.provenance).map(([k, v]) => [k, String(v)])] : [])]))));
  const check = page.resume_check;
  if (check) cards.push(el("div", { class: "card" }, el("h3", {}, "Resume check"), el("div", { class: `banner ${check.passed ? "good" : "bad"}` }, el("b", {}, `${check.passed ? "Passed" : "Not passed"}. `), check.verdict || ""),
    pairs([["steps", check.steps], ["then", check.more], ["took", check.seconds === undefined ? "" : seconds(check.seconds)], ["folder", check.folder]]), table([{ t: "run", n: 1 }, "killed and resumed", "what"], (check.runs || []).map((r, i) => [i + 1, r.equal === undefined ? "" : r.equal ? "equal in every bit" : "different", r.differences && r.differences.length ? count(r.differences.length, "difference") : ""])), (check.notes || []).length ? el("ul", {}, check.notes.map((n) => el("li", {}, String(n)))) : ""));
  return cards;
}
