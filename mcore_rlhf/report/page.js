/* ---- the page ---- */
function overview(subject, role, m) {
  const f = m.facts;
  if (!f) return el("div", { class: "card" }, el("h3", {}, role), el("div", { class: "banner bad" }, m.error.message));
  const words = f.model.padded_vocab_size === null ? "" : f.model.vocab_size === null ? `${count(f.model.padded_vocab_size)} rows with padding` : `${count(f.model.vocab_size)} words in ${count(f.model.padded_vocab_size)} rows`;
  return el("div", { class: "card" }, el("p", { class: "kicker" }, [subject.label, role].filter(Boolean).join(" · ") || f.role), el("h3", { class: "mono" }, f.path),
    el("div", { class: "figures" }, figure(count(f.model.parameters), "parameters", "model.parameters"), f.model.num_layers ? figure(count(f.model.num_layers), "layers", "model.num_layers") : "", f.model.num_experts ? figure(count(f.model.num_experts), "experts a layer", "model.num_experts") : "", figure(size(f.bytes), `in ${count(f.file_count, "file")}`, "bytes")),
    pairs([["format", `${f.format}, ${f.release ? "release" : `iteration ${count(f.iteration)}`}`], ["layout", `${f.parallel.text} (${count(f.parallel.world_size, "rank")})`], ["pipeline", f.parallel.pipeline_layout], ["vocabulary", words], ["types", Object.keys(f.model.dtypes).join(", ")],
      ["optimizer", f.optimizer ? `${f.optimizer.kind}: ${Object.entries(f.optimizer.states).map(([k, v]) => `${k} ${v || ""}`.trim()).join(", ")}` : f.unread ? "not understood" : "none stored"], ...Object.entries(f.counters).map(([k, v]) => [k.replace(/_/g, " "), typeof v === "number" ? count(v) : String(v)])]),
    f.notes.length ? el("details", {}, el("summary", {}, count(f.notes.length, "note")), el("ul", {}, f.notes.map((n) => el("li", {}, n.fate === "note" ? "" : `${n.fate}: `, n.text)))) : "");
}

// A role that no reader knows as a model: its files have names, shapes and types, and nothing says what they mean.
function savedOverview(subject, s) {
  const parameters = Object.values(s.dtypes).reduce((a, b) => a + b, 0), optimizer = s.optimizer;
  const groups = optimizer ? optimizer.groups.map((g) => ["lr", "weight_decay"].filter((k) => k in g).map((k) => `${k.replace("_", " ")} ${short(g[k])}`).join(", ")).filter(Boolean) : [];
  const others = s.parts.filter((name) => !["model", "optimizer"].includes(name));
  return el("div", { class: "card", "data-saved": s.role }, el("p", { class: "kicker" }, [subject.label, s.role].filter(Boolean).join(" · ")), el("h3", { class: "mono" }, dotted(`${subject.path}/${s.role}`)),
    el("div", { class: "figures" }, s.tensors.length ? [figure(count(parameters), "parameters and buffers", "saved.parameters"), figure(count(s.tensors.length + s.omitted), "tensors of the model", "saved.tensors")] : s.live ? figure(count(s.live.tensors), "tensors when it was saved", "saved.live") : "", figure(size(s.bytes), `in ${count(s.files, "file")}`, "saved.bytes")),
    pairs([["format", `${s.format}: its trainer loads it`], ["layout", s.parallel], ["types", Object.entries(s.dtypes).map(([type, n]) => `${type} ${count(n)}`).join(", ")],
      ["optimizer", optimizer ? `${optimizer.kind || "of a class that is not told"}${Object.keys(optimizer.states).length ? `: ${Object.entries(optimizer.states).map(([k, v]) => `${k} ${v}`).join(", ")}` : ""}` : s.parts.length ? "none stored" : ""], ["groups", groups.map((text, i) => `${groups.length > 1 ? `${i + 1}: ` : ""}${text}`).join("; ")],
      ["besides", others.join(", ")], ["live state", s.live ? `${count(s.live.tensors, "tensor")}, ${size(s.live.bytes)}` : ""], ["not opened", s.why]]),
    s.tensors.length ? el("details", {}, el("summary", {}, "Tensors of the model"), limited(s.tensors, 40, (rows) => table(["name", { t: "shape", tight: 1 }, { t: "type", tight: 1 }], rows.map((t) => [el("span", { class: "mono" }, dotted(t.name)), t.shape.join(" × ") || "a number", t.dtype]))), s.omitted ? el("p", { class: "soft small" }, `and ${count(s.omitted)} more`) : "") : "");
}

// What one step was measured at, where no curve of a run says it.
const stepMetrics = (s) => (page.run || !Object.keys(s.metrics).length ? "" : el("div", { class: "card" }, el("p", { class: "kicker" }, [s.label, "metrics"].filter(Boolean).join(" · ")), el("div", { class: "figures" }, Object.entries(s.metrics).map(([name, value]) => figure(short(value), name)))));

const models = page.subjects.flatMap((s) => Object.entries(s.models).map(([role, model]) => ({ label: [s.label, role].filter(Boolean).join(" · ") || "The checkpoint", subject: s, role, model })));
const saved = page.subjects.flatMap((s) => s.saved.map((role) => [s, role]));
const converted = page.subjects.filter((s) => s.conversion).pop();
const sections = [
  ["overview", "Overview", models.length || saved.length ? () => el("div", { class: "grid" }, models.map((m) => overview(m.subject, m.role, m.model)), saved.map(([s, role]) => savedOverview(s, role)), page.subjects.map(stepMetrics)) : null],
  ["run", "Run", page.run ? () => runSection(page.run) : null],
  ["metrics", "Metrics", page.run && metricNames(page.run).length ? () => metricsSection(page.run) : null],
  ["shards", "Shard map", models.some((m) => m.model.shards) ? () => shards(page.subjects) : null],
  ["account", "Account", converted ? () => [el("p", { class: "lead" }, `What became of everything that ${converted.conversion.source} had.`), el("div", { class: `banner ${converted.conversion.lossless ? "good" : "warn"}` }, el("b", {}, converted.conversion.lossless ? "Lossless. " : "Not lossless. "), converted.conversion.lossless ? "Everything that the source had is in the target, or can be derived from it." : "What was lost stands below."), account(converted.conversion)] : null],
  ["diff", "Differences", page.diff ? () => differences(page.diff) : null],
  ["trust", "Trust", page.subjects.length || page.resume_check ? trust : null],
].filter(([, , make]) => make);
document.getElementById("top").append(el("p", { class: "kicker" }, page.kind), el("h1", {}, page.title), el("p", { class: "soft" }, page.subtitle), ...page.problems.map((text) => el("div", { class: "banner bad" }, text)), el("nav", { "aria-label": "Sections" }, sections.map(([id, name]) => el("a", { href: `#${id}` }, name))));
document.getElementById("main").append(...sections.map(([id, name, make]) => el("section", { id, "aria-labelledby": `${id}-h` }, el("h2", { id: `${id}-h` }, name), make())));
document.getElementById("foot").append(`Made by mcore-rlhf ${page.made.mcore_rlhf} on ${page.made.time}. One file: it asks no network for anything; the data that it shows stands in it as JSON.`);
document.documentElement.dataset.ready = "yes";
