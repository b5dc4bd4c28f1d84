// The firings of a head: in an order, by mode, those on the first token apart, a few at a time.

const AT_ONCE = 16;
const ORDERS = {
  attention: { label: "strongest attention", by: (firings) => firings.attention, down: true },
  sparsity: { label: "sparsest", by: (firings) => firings.sparsity },
  n_recon: { label: "most modes needed", by: (firings) => firings.n_recon, down: true },
  cancellation: { label: "most cancelling", by: (firings) => firings.cancellation, down: true },
  relative: { label: "largest relative score", by: (firings) => firings.relative, down: true },
  place: { label: "place in the texts", by: (firings) => firings.prompt.map((prompt, at) => prompt * 1e6 + firings.query[at]) },
};
const looking = { order: "attention", whole: false, sink: false };

/** The panel of a head's firings; `mode` shows those that a mode is among the largest of, by its contribution. */
function firingsPanel(place, detail, mode) {
  const box = el("section", { class: "panel examples firings", "aria-label": "Firings" });
  fillFirings(box, place, detail, { mode, count: AT_ONCE });
  return box;
}

async function fillFirings(box, place, detail, show) {
  const { firings } = detail;
  const all = firings.query.map((_, at) => at);
  const measured = all.filter((at) => !firings.sink[at]);
  const sinks = all.filter((at) => firings.sink[at]);
  const onSink = sinks.length > 0 && (looking.sink || !measured.length);
  const chosen = arranged(firings, onSink ? sinks : measured, show.mode);
  const again = (change, settings = {}) => {
    Object.assign(looking, settings);
    fillFirings(box, place, detail, { ...show, count: AT_ONCE, ...change });
  };
  const drawn = chosen.slice(0, show.count);
  const texts = new Map(await Promise.all([...new Set(drawn.map((at) => firings.prompt[at]))].map(async (prompt) => [prompt, await promptOf(prompt)])));
  const pick = (mode) => again({ mode: mode === show.mode ? null : mode });
  const cards = drawn.map((at) => firingCard({ firings, modes: detail.modes, at, text: texts.get(firings.prompt[at]), chosen: show.mode, pick, whole: looking.whole }));
  box.replaceChildren(
    el(
      "header",
      {},
      el("div", { class: "tabs", role: "group", "aria-label": "Kind of firing" }, firingTab("Firings", measured.length, !onSink, () => again({}, { sink: false })), firingTab("On the first token", sinks.length, onSink, () => again({}, { sink: true }))),
      help(onSink ? "sinks" : "firings", "firings"),
      el("div", { class: "options" }, modeChoice(firings, onSink ? sinks : measured, show.mode, again), orderChoice(show.mode, again), wholeSwitch(again)),
    ),
    chosen.length ? firingLegend() : el("p", { class: "none" }, noFirings(place, show.mode)),
    el("p", { class: "hint shown" }, shownText(place, chosen.length, onSink, show.mode)),
    el("div", { class: "cards" }, ...cards),
    chosen.length > show.count ? el("button", { type: "button", class: "more", onclick: () => again({ count: show.count + 2 * AT_ONCE }) }, `Show more of ${number(chosen.length)}`) : nothing(),
  );
  drawFiringArcs();
}

/** Firings in the chosen order; with a mode, those it is among the largest of, by the size of its contribution. */
function arranged(firings, places, mode) {
  if (mode !== null) {
    const size = (at) => Math.abs(firings.contributions[at][firings.modes[at].indexOf(mode)]);
    return places.filter((at) => firings.modes[at].includes(mode)).sort((a, b) => size(b) - size(a));
  }
  const { by, down } = ORDERS[looking.order];
  const values = by(firings);
  return [...places].sort((a, b) => (down ? values[b] - values[a] : values[a] - values[b]) || a - b);
}

function firingTab(label, count, current, open) {
  return el("button", { type: "button", "aria-pressed": String(current), disabled: !count, onclick: open }, `${label} ${number(count)}`);
}

function modeChoice(firings, places, mode, again) {
  const counts = new Map();
  for (const at of places) for (const one of firings.modes[at]) counts.set(one, (counts.get(one) ?? 0) + 1);
  if (mode !== null && !counts.has(mode)) counts.set(mode, 0);
  const ordered = [...counts].sort((a, b) => b[1] - a[1]);
  const control = el("select", { id: "by-mode", "aria-label": "Firings by mode", onchange: () => again({ mode: control.value === "" ? null : Number(control.value) }) });
  control.append(el("option", { value: "" }, "all modes"), ...ordered.map(([one, count]) => el("option", { value: one }, `mode ${one} (${number(count)})`)));
  control.value = mode ?? "";
  control.classList.toggle("set", mode !== null);
  return control;
}

function orderChoice(mode, again) {
  if (mode !== null) return el("span", { class: "by" }, "by its contribution");
  const control = el("select", { id: "order", "aria-label": "Order of the firings", onchange: () => again({}, { order: control.value }) });
  control.append(...Object.entries(ORDERS).map(([name, { label }]) => el("option", { value: name }, label)));
  control.value = looking.order;
  return control;
}

function wholeSwitch(again) {
  const box = el("input", { type: "checkbox", id: "whole", checked: looking.whole, onchange: () => again({}, { whole: box.checked }) });
  return el("label", {}, box, "Full text");
}

function noFirings(place, mode) {
  if (mode !== null) return `No firing here has mode ${mode} among its largest.`;
  return heads.n_firings[place] ? "The atlas holds no firing of this head." : "No query gave one key more than the threshold of its attention.";
}

/** How many of how many: the page may hold fewer than the atlas, the atlas fewer than were measured. */
function shownText(place, count, onSink, mode) {
  const total = onSink ? heads.n_sink[place] : heads.n_firings[place];
  if (mode !== null) return `${plural(count, "firing")} with mode ${mode} among the largest.`;
  return count < total ? `${number(count)} of ${plural(total, "firing")} are held here.` : "";
}

function firingLegend() {
  return el(
    "div",
    { class: "legend" },
    el("span", {}, el("i", { class: "outlined" }), "query"),
    el("span", {}, el("i", { class: "tinted" }), "key it looks at"),
    el("span", {}, el("i", { class: "plus" }), "adds (+)"),
    el("span", {}, el("i", { class: "minus hatched" }), "subtracts (−)"),
    el("span", {}, "bars: what each mode contributes, by its number", help("contributions")),
  );
}
