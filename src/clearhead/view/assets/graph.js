// A graph: units in the list, the drawing with its sliders, and beside it what was chosen: a unit, an edge, a group.

const listed = {
  noun: "unit",
  ids: units.id,
  columns: units,
  sorts: {
    rank: { label: index.ranked === "influence" ? "Influence" : "Weight", write: percent, up: true },
    out: { label: "Σ|weight| out", write: number },
    in: { label: "Σ|weight| in", write: number },
    activation: { label: "Activation", write: number, size: true },
    errors: { label: "Input from errors", write: percent },
  },
  filters: [
    choice("kind", "kind", units.kind, (kind) => KINDS[kind]),
    choice("layer", "layer", units.layer, (layer) => `layer ${layer}`),
    ...(sides === null ? [] : [choice("side", "graph", sides.of, sideWords)]),
    choice("position", "token", units.position, (position) => `${position} ${tokenAt(position) ?? ""}`),
  ],
  search: {
    hint: "Unit, token, words…",
    label: "Search by unit, token or words",
    about: "Finds units by name, as in feature.4.17@3, by the token they stand at, and by their words.",
    text: (place) => `${KINDS[units.kind[place]]} ${glossOf(place)} ${tokenOf(place) ?? ""}`,
    exact: (text) => placeOf.get(text),
  },
  total: () => [units.id.length, "unit"],
  name: (place) => [el("i", { class: `dot k-${units.kind[place]}` }), units.id[place]],
  does: (place) => [glossOf(place) ? pill(glossOf(place)) : el("span", {}, KINDS[units.kind[place]]), units.activation[place] === null || sides !== null ? nothing() : el("span", {}, `activation ${number(units.activation[place])}`)],
};

const details = el("div", { class: "details", "aria-live": "off" });
const ready = part("edges", 0).then((read) => {
  holdEdges(read);
  chooseSight();
});
let turn = 0;

/** What an address shows: a unit, `a>b` an edge, `attention.N`, `group.N`; false for what is not there. */
function openNamed(name) {
  const place = placeOf.get(name);
  const [from, to] = name.split(">").map((end) => placeOf.get(end));
  const table = /^attention\.\d+$/.test(name) ? Number(name.slice(10)) : -1;
  const group = /^group\.\d+$/.test(name) ? groups[Number(name.slice(6))] : undefined;
  if (place !== undefined) show(() => showUnit(place), { place });
  else if (from !== undefined && to !== undefined) show(() => showFound(from, to), { ends: [from, to] });
  else if (index.attention[table] !== undefined) show(() => showAttention(table), { lit: namesIn(table) });
  else if (group !== undefined) show(() => showGroup(groups.indexOf(group)), { lit: group.units, edgesLit: true });
  else return false;
  return true;
}

function showFound(from, to) {
  const edge = outOf[from].find((candidate) => edges.target[candidate] === to);
  return edge === undefined ? [notice(`No edge from ${units.id[from]} to ${units.id[to]} on this page.`)] : showEdge(edge);
}

const namesIn = async (table) => (await part("attention", table)).units;

function showSummary() {
  show(() => overview());
}

/** Put the drawing on the page where it is not, then what was chosen beside it. */
async function show(make, { place = null, ends = null, lit = [], edgesLit = false } = {}) {
  turn += 1;
  const mine = turn;
  layOut();
  chooseInList(place);
  await ready;
  const before_ = [sight.chosen, chosenEdge];
  sight.chosen = place;
  sight.edgesLit = edgesLit;
  sight.lit = new Set((await lit).map((name) => placeOf.get(name)).filter((each) => each !== undefined));
  chosenEdge = ends === null ? null : outOf[ends[0]].find((candidate) => edges.target[candidate] === ends[1]) ?? null;
  if (!plan || mustMove(before_)) drawGraph();
  else emphasise();
  const made = await make();
  if (mine !== turn) return;
  details.replaceChildren(...made);
  details.scrollTop = 0;
  byId("spoken").textContent = place === null ? "" : tipOf(place);
  if (place !== null) bringIntoView(place);
  else if (chosenEdge !== null) bringIntoView(edges.target[chosenEdge], edges.source[chosenEdge]);
}

/** Whether units that the sliders hide come or go with what is chosen. */
function mustMove([unit, edge]) {
  const ends = [chosenEdge, edge].filter((each) => each !== null).flatMap((each) => [edges.source[each], edges.target[each]]);
  return [sight.chosen, unit, ...ends].some((place) => place !== null && (sight.hidden.has(units.kind[place]) || (!isTarget(place) && units.rank[place] > sight.rank + 1e-9)));
}

/** Scroll to a unit, or to the middle between two. */
function bringIntoView(place, other = place) {
  const x = (plan.x[place] + plan.x[other]) / 2;
  if (x < sideways.scrollLeft + 20 || x > sideways.scrollLeft + sideways.clientWidth - 20) sideways.scrollLeft = x - sideways.clientWidth / 2;
}

function layOut() {
  const view = byId("view");
  for (const old of view.querySelectorAll(":scope > .notice")) old.remove();
  if (view.querySelector(".net")) return;
  view.replaceChildren(
    el(
      "div",
      { class: "summary graph" },
      promptLine(),
      el("div", { class: "figures" }, ...index.tiles.map(({ label, value, help: text, small }) => bigNumber(label, value, explain(text, label), small))),
      el("section", { class: "panel controls-of-graph" }, sliders(), el("p", { id: "statement", role: "status" }, "Opening the edges…"), groupBar),
      el("div", { class: "beside" }, el("section", { class: "panel drawing" }, legend(), net), details),
    ),
  );
  fillGroups();
  ready.then(() => {
    fillSliders();
    drawGraph();
    // the answer stands at the end of a prompt; without one the middle shows most
    sideways.scrollLeft = index.tokens.length ? sideways.scrollWidth : (sideways.scrollWidth - sideways.clientWidth) / 2;
  });
}

function promptLine() {
  if (!index.tokens.length) return el("h1", {}, index.title);
  return el("h1", { class: "prompt", title: index.title }, ...index.tokens.map((place) => el("span", { class: "prompt-token" }, vocab[place])));
}

const MEASURE_WORDS = { ...(OF_NO_PROMPT ? { influence: "influence" } : {}), weight: "|weight|", share: "share of the input" };

function sliders() {
  const slider = (id, label, text, act, extra = null) => el("div", { class: "slider" }, el("label", { for: id }, label), extra, explain(text, label), el("input", { type: "range", id, min: 0, max: 100, step: 0.5, oninput: act }), el("output", { for: id, id: `${id}-said` }));
  const by = el("select", { id: "edges-by", "aria-label": "Order edges by", onchange: () => { sight.by = by.value; chooseSight(); fillSliders(); drawGraph(); } }, ...Object.keys(MEASURE_WORDS).map((name) => el("option", { value: name, selected: name === sight.by }, MEASURE_WORDS[name])));
  const set = (name) => (event) => {
    sight[name] = Number(event.target.value) / 100;
    fillSliders();
    drawSoon();
  };
  return el(
    "div",
    { class: "sliders" },
    slider("units-slider", index.ranked === "influence" ? "Units, by influence" : "Units, by weight", index.help[index.ranked], set("rank")),
    slider("edges-slider", "Edges, by", index.help.edges, set("weight"), by),
    el("button", { type: "button", class: "plain", id: "usual", onclick: () => { sight.hidden.clear(); chooseSight(); fillSliders(); drawGraph(); } }, "Usual view"),
  );
}

function fillSliders() {
  for (const [id, value] of [["units-slider", sight.rank], ["edges-slider", sight.weight]]) {
    byId(id).value = 100 * value;
    byId(`${id}-said`).textContent = `${Number((100 * value).toFixed(1))} %`;
  }
  for (const button of document.querySelectorAll(".kinds button")) button.setAttribute("aria-pressed", String(!sight.hidden.has(button.dataset.kind)));
}

/** Kinds of units, each of which can be hidden, and the two signs. */
function legend() {
  const toggle = (kind) => () => {
    if (!sight.hidden.delete(kind)) sight.hidden.add(kind);
    fillSliders();
    drawGraph();
  };
  const kinds = KIND_ORDER.map((kind) =>
    el("button", { type: "button", "aria-pressed": "true", "data-kind": kind, title: `Show or hide units of this kind`, onclick: toggle(kind) }, svg("svg", { viewBox: "-7 -7 14 14", width: 13, height: 13, "aria-hidden": "true" }, svg("path", { class: `k-${kind}`, d: SHAPES[SHAPE_OF[kind] ?? "diamond"] })), `${KINDS[kind]} `, el("b", {}, number(units.kind.filter((other) => other === kind).length))),
  );
  return el("div", { class: "kinds" }, ...kinds, el("span", { class: "signs" }, ...signWords(), help(sides === null ? "graph" : "sides", "the drawing")));
}

/** What the two signs of an edge mean, and hollow units where two graphs are compared. */
function signWords() {
  const words = sides === null ? ["adds", "subtracts"] : sides.names.map((name) => `more in ${name}`);
  const hollow = sides === null ? [] : sides.names.map((name, at) => el("span", { class: "side" }, svg("svg", { viewBox: "-7 -7 14 14", width: 13, height: 13, "aria-hidden": "true" }, svg("path", { class: `mark k-feature only-${at ? "second" : "first"}`, d: SHAPES.circle })), `only in ${name}`));
  return [...hollow, el("i", { class: "adds" }), words[0], el("i", { class: "subtracts" }), words[1]];
}

function overview() {
  const pin = [el("kbd", {}, "p"), " or ", el("kbd", {}, "Ctrl"), " + click pins a unit; "];
  return [
    panel("How to read this", null, el("p", { class: "words" }, index.help.graph), ...(sides === null ? [] : [el("p", { class: "words sides" }, index.help.sides, ` First: ${sides.names[0]}. Second: ${sides.names[1]}. ${sidesCounted()}`)]), el("p", { class: "words muted" }, ...pin, "arrow keys in the drawing walk along edges; click beside everything to come back here.")),
    panel("Protocol", null, el("p", { class: "words" }, index.protocol || "Not stated.")),
    ...(index.loadings === null ? [] : [panel("Heads that carry this graph", help("head_map", "this map"), el("p", { class: "hint" }, `${quoted(index.loadings.kind)}: ${index.loadings.words || "see the protocol."}`), headMap(index.loadings.heads, "Loadings of all edges by layer and head", false))]),
    ...(index.attention.length ? [panel("Attention explained", help("attention", "attention"), attentionList([...index.attention.keys()]))] : []),
  ];
}

function sidesCounted() {
  const count = (side) => number(sides.of.filter((each) => each === side).length);
  return `${count(0)} units in both, ${count(1)} only in the first, ${count(2)} only in the second.`;
}

const settle = () => drawGraph();
const notes = () => ({
  leftOut: index.edges.held < index.edges.all ? `Of ${number(index.edges.all)} edges the page holds the ${number(index.edges.held)} heaviest.` : "",
  keys: [[["p"], "pin the chosen unit"], [["↑", "↓", "←", "→"], "in the drawing: along edges and rows"]],
});

document.addEventListener("keydown", (event) => {
  if (event.key === "p" && sight.chosen !== null && !event.target.matches("input, select, textarea, .net-scroll") && !event.ctrlKey && !event.metaKey) togglePin(sight.chosen);
});
new MutationObserver(drawEdges).observe(document.documentElement, { attributes: true, attributeFilter: ["style"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawEdges);
