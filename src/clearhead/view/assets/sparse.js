// A sparse model: heads in the list, a summary of what it costs and which edges are open, and a view of one head.

const { heads, layers, sentences, sections } = index;
const placeOf = new Map(heads.id.map((id, place) => [id, place]));
const texts = sentences.map((places) => places.map((place) => vocab[place]));
const ALL_AT_ONCE = 16;
const edgesWritten = (value) => (value === null ? MISSING : value !== 0 && value < 0.005 ? "<0.01" : number(value));

const listed = {
  noun: "head",
  ids: heads.id,
  columns: heads,
  sorts: {
    per_query: { label: "Edges per query", write: edgesWritten },
    distance: { label: "Distance of edges", write: number },
    row: { label: "Layer", write: (value) => number(layers[value]), up: true },
  },
  filters: [choice("layer", "layer", heads.layer, (layer) => `layer ${layer}`)],
  search: {
    hint: "Head…",
    label: "Search by head",
    about: "Finds heads by layer and number, as in 1.3.",
    text: (place) => `head ${heads.name[place]}`,
    exact: (text) => placeOf.get(text) ?? placeOf.get(`head.${text}`),
  },
  total: () => [heads.id.length, "head"],
  name: (place) => [`head ${heads.name[place]}`, heads.per_query[place] < 0.01 ? el("span", { class: "tag dead" }, "closed") : nothing()],
  does: (place) => [el("span", {}, `${percent(heads.share[place])} open · ${heads.distance[place] === null ? "no edges" : `${number(heads.distance[place])} tokens apart`}`)],
};

function openNamed(name) {
  const place = placeOf.get(name);
  if (place === undefined) return false;
  chooseInList(place);
  showHead(place);
  return true;
}

const settle = () => drawButterflies();
const notes = () => ({ leftOut: "", keys: [] });
const openHead = (row, head) => (location.hash = `head.${layers[row]}.${head}`);

function showSummary() {
  const view = byId("view");
  const chosen = texts.length ? [sentencesSection()] : [];
  view.replaceChildren(
    el(
      "div",
      { class: "summary sparse" },
      el("h1", {}, index.title),
      el("p", { class: "lead" }, "Choose a head from the list to see which edges it opens, beside the dense base."),
      el("div", { class: "verdict" }, el("span", { class: `outcome ${index.outcome.good ? "" : "poor"}` }, index.outcome.text), ...index.verdict.map((text) => el("p", {}, text))),
      el("div", { class: "figures" }, ...index.tiles.map(({ name, label, value, small }) => bigNumber(label, value, help(name, label), small))),
      ...chosen,
      ...sections.map(sectionOf),
    ),
  );
  view.scrollTop = 0;
  redrawCharts();
}

function sectionOf({ title, charts, tables }) {
  const toHead = (spec) => (spec.name === "heads" ? (point) => openHead(point.pointIndex[0], point.pointIndex[1]) : null);
  const made = charts.map((spec) => panel(spec.title, explain(spec.help, spec.title), chart(spec, spec.title, toHead(spec))));
  if (made.length % 2 && charts.length) made.at(charts[0].name === "heads" ? 0 : -1).classList.add("whole");
  return el("section", {}, el("h2", {}, title), el("div", { class: "charts" }, ...made, ...tables.map(tableOf)));
}

function tableOf({ title, help: text, head, rows, words }) {
  const columns = head.map((label, column) => [label, "", (row) => rows[row][column], column === words ? "words" : null]);
  const made = tablePanel(title, columns, rows.length);
  made.querySelector("h3").append(explain(text, title));
  made.querySelector("table").classList.toggle("told", words >= 0);
  made.querySelector("table").style.setProperty("--numbers", head.length - 2);
  return made;
}

/** One head on one sentence, and small squares of all heads of a layer. */
function sentencesSection() {
  const [row, head] = index.chosen;
  const hero = el("div", { class: "panel whole" });
  const squared = el("div", { class: "panel whole" });
  fillHero(hero, row, head);
  fillSquares(squared, heads.id.length <= ALL_AT_ONCE ? layers.map((_, place) => place) : [row]);
  return el("section", {}, el("h2", {}, "What it looks like"), el("div", { class: "charts" }, hero, squared));
}

async function fillHero(box, row, head) {
  const edges = (await part("layers", row))[head][0];
  const name = `head ${layers[row]}.${head}`;
  box.replaceChildren(
    el("h3", {}, `A sentence in ${name}`, help("sentences", "the arcs"), el("a", { class: "onward", href: `#head.${layers[row]}.${head}` }, "open this head")),
    key(edges, texts[0].length),
    butterfly(texts[0], edges, `${name}, tokens of a sentence`),
  );
  drawButterflies();
}

/** How many edges there are above and below. */
function key({ model, base }, size) {
  const pairs = (size * (size + 1)) / 2;
  const shown = base === null ? null : edgesOf(base, LEAST_SHOWN).length;
  return el(
    "p",
    { class: "key" },
    el("span", { class: "sparse" }, `above, sparse: ${plural(model.length / 3, "open edge")} of ${number(pairs)}`),
    shown === null ? null : el("span", { class: "dense" }, `below, dense base: ${number(shown)} from 1 % on`),
  );
}

async function fillSquares(box, rows) {
  const choose = el("select", { "aria-label": "Layer", onchange: () => fillSquares(box, [Number(choose.value)]) });
  choose.append(...layers.map((layer, place) => el("option", { value: place, selected: rows.length === 1 && place === rows[0] }, `layer ${layer}`)));
  const found = await Promise.all(rows.map((row) => part("layers", row)));
  const size = texts[0].length;
  const cards = rows.flatMap((row, at) =>
    found[at].map(([edges], head) => {
      const name = `head ${layers[row]}.${head}`;
      const dense = edges.base === null ? null : squares(size, edgesOf(edges.base), "dense", `${name}, base`);
      return el("a", { class: "pair", href: `#head.${layers[row]}.${head}` }, el("span", {}, name), el("span", { class: "two" }, squares(size, edgesOf(edges.model), "sparse", `${name}, sparse`), dense));
    }),
  );
  box.replaceChildren(el("h3", {}, "All heads on this sentence: sparse, and base", help("patterns", "the squares"), rows.length === 1 && layers.length > 1 ? choose : null), el("div", { class: "pairs" }, ...cards));
}

async function showHead(place) {
  const row = heads.row[place];
  const found = (await part("layers", row))[heads.head[place]] ?? [];
  if (placeOf.get(decodeURIComponent(location.hash.slice(1))) !== place) return;
  const figure = (name, label, value, small = "") => bigNumber(label, value, help(name, label), small);
  const view = byId("view");
  view.replaceChildren(
    el(
      "div",
      { class: "summary sparse" },
      el("div", { class: "title" }, el("h1", {}, `head ${heads.name[place]}`), el("div", { class: "tags" }, el("span", { class: "tag" }, `layer ${heads.layer[place]}`)), moves()),
      el(
        "div",
        { class: "figures" },
        figure("per_query", "Edges per query", edgesWritten(heads.per_query[place])),
        figure("share", "Open edges", percent(heads.share[place])),
        figure("distance", "Distance of edges", number(heads.distance[place]), "tokens"),
      ),
      ...found.map((edges, at) => sentencePanel(edges, at, place)),
    ),
  );
  view.scrollTop = 0;
  drawButterflies();
}

function sentencePanel(edges, at, place) {
  const words = texts[at];
  const name = `head ${heads.name[place]}`;
  const dense = edges.base === null ? null : el("figure", {}, squares(words.length, edgesOf(edges.base), "dense", `${name}, base`), el("figcaption", {}, "dense base"));
  return el(
    "section",
    { class: "panel" },
    el("h3", {}, `Sentence ${at + 1}`, help("sentences", "the arcs")),
    key(edges, words.length),
    butterfly(words, edges, `${name}, tokens of sentence ${at + 1}`),
    el("div", { class: "large" }, el("figure", {}, squares(words.length, edgesOf(edges.model), "sparse", `${name}, sparse`), el("figcaption", {}, "sparse")), dense),
  );
}
