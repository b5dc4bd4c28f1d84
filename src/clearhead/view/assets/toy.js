// The toy model: pairs in the list, a summary with its charts and tables, and a view of one pair over training.

const { pairs, toys } = index;
const placeOf = new Map(pairs.id.map((id, place) => [id, place]));
const manySeeds = toys.length > 1;
const thousandths = (value) => (value === null ? MISSING : value.toFixed(3).replace("-", MINUS));
const hundredths = (value) => value.toFixed(2);
const tiny = (value) => value.toExponential(1).replaceAll("-", MINUS);
const pairName = (place) => (manySeeds ? `pair ${pairs.pair[place]} · seed ${pairs.seed[place]}` : `pair ${pairs.pair[place]}`);

const listed = {
  noun: "pair",
  ids: pairs.id,
  columns: pairs,
  sorts: {
    target: { label: "Target logit", write: thousandths },
    aligned: { label: "Cosine, the smaller", write: thousandths, up: true },
    query: { label: "Cosine, query", write: thousandths, up: true },
    key: { label: "Cosine, key", write: thousandths, up: true },
    ratio: { label: "Logit / target", write: thousandths, up: true },
    overlap: { label: "Overlap", write: thousandths },
    pair: { label: "Pair", write: number, up: true },
  },
  filters: [choice("seed", "seed", pairs.seed, (seed) => `seed ${seed}`, manySeeds ? String(toys[0].seed) : "")],
  search: {
    hint: "Pair…",
    label: "Search by pair",
    about: "Finds pairs by their number, and by their seed where there are several.",
    text: pairName,
    exact: (text) => placeOf.get(text),
  },
  total: () => [pairs.id.length, "pair"],
  name: (place) => [pairName(place), pairs.mode[place] === null ? el("span", { class: "tag dead" }, "no mode") : el("span", { class: "tag" }, `mode ${pairs.mode[place]}`)],
  does: (place) => [el("span", {}, `cos ${thousandths(pairs.query[place])}, ${thousandths(pairs.key[place])} · overlap ${hundredths(pairs.overlap[place])}`)],
};

function openNamed(name) {
  const place = placeOf.get(name);
  if (place === undefined) return false;
  chooseInList(place);
  showPair(place);
  return true;
}

const settle = () => {};
const notes = () => ({ leftOut: "", keys: [] });

function showSummary() {
  const view = byId("view");
  const tables = [pairsTable(), seedsTable(), sweepTable()].filter((table) => table !== null);
  view.replaceChildren(
    el(
      "div",
      { class: "summary" },
      el("h1", {}, index.title),
      el("p", { class: "lead" }, manySeeds ? `${toys.length} seeds; large numbers and charts are of seed ${toys[0].seed}, worst pair.` : "Large numbers are of the worst pair. Choose a pair from the list to see it alone."),
      verdictOf(toys[0]),
      el("div", { class: "figures" }, ...index.tiles.map(({ name, label, value, small }) => bigNumber(label, value, help(name, label), small))),
      el("div", { class: "charts" }, ...tables.slice(0, 2), ...index.charts.map(chartPanel), ...tables.slice(2)),
    ),
  );
  view.scrollTop = 0;
  redrawCharts();
}

function verdictOf({ outcome, verdict }) {
  const poor = outcome !== "aligned and orthogonal";
  return el("div", { class: "verdict" }, el("span", { class: `outcome ${poor ? "poor" : ""}` }, outcome), ...verdict.map((text) => el("p", {}, text)));
}

function chartPanel(spec) {
  return panel(spec.title, explain(spec.help, spec.title), chart(spec, spec.title));
}

function pairsTable() {
  const first = pairs.id.map((_, place) => place).filter((place) => pairs.toy[place] === 0);
  const at = (name, write) => (row) => write(pairs[name][first[row]]);
  return tablePanel(
    manySeeds ? `Pairs of seed ${toys[0].seed}` : "Pairs",
    [
      ["pair", "", (row) => el("a", { href: `#${pairs.id[first[row]]}` }, String(pairs.pair[first[row]]))],
      ["mode", index.help.mode, at("mode", number)],
      ["target", index.help.target, at("target", thousandths)],
      ["σ", index.help.sigma, at("sigma", thousandths)],
      ["cosine, query", index.help.query, at("query", thousandths)],
      ["cosine, key", index.help.key, at("key", thousandths)],
      ["logit / target", index.help.ratio, at("ratio", thousandths)],
      ["overlap", index.help.overlap, at("overlap", thousandths)],
      ["close modes", index.help.together, at("together", (count) => (count === 1 ? "none" : number(count - 1)))],
    ],
    first.length,
  );
}

function seedsTable() {
  if (!manySeeds) return null;
  const at = (name, write) => (row) => write(toys[row][name]);
  const event = (name) => [name, "Step from which every pair has reached it for good.", (row) => number(toys[row].events[name])];
  return tablePanel(
    "Seeds, worst pair of each",
    [
      ["seed", "", at("seed", number)],
      ["outcome", "", at("outcome", String), "words"],
      ["cosine, query", index.help.query, at("query", thousandths)],
      ["cosine, key", index.help.key, at("key", thousandths)],
      ["logit / target", index.help.ratio, at("ratio", thousandths)],
      ["overlap", index.help.overlap, at("overlap", thousandths)],
      ["error", index.help.error, at("error", tiny)],
      ...Object.keys(toys[0].events).map(event),
      ["pairs in this order", "Pairs that reached the three in this order.", at("in_order", number)],
      ["CPU s", "", at("seconds", (value) => value.toFixed(1))],
    ],
    toys.length,
  );
}

function sweepTable() {
  if (!index.sweep) return null;
  const { name, points } = index.sweep;
  const at = (column, write) => (row) => write(points[row][column]);
  return tablePanel(
    `Sweep over ${name.replaceAll("-", " ")}, worst pair of each`,
    [
      [name.replaceAll("-", " "), "", at("value", number)],
      ["outcome", "", at("outcome", String), "words"],
      ["cosine", index.help.query, at("cosine", thousandths)],
      ["logit / target", index.help.ratio, at("ratio", thousandths)],
      ["overlap", index.help.overlap, at("overlap", thousandths)],
      ["error", index.help.error, at("error", tiny)],
      ["others spread over", index.help.others_dim, at("others_dim", (value) => value.toFixed(1))],
      ["CPU s", "", at("cpu_seconds", (value) => value.toFixed(1))],
    ],
    points.length,
  );
}

async function showPair(place) {
  const curves = await part("curves", pairs.toy[place]);
  if (placeOf.get(decodeURIComponent(location.hash.slice(1))) !== place) return;
  const pair = pairs.pair[place];
  const spec = structuredClone(index.template);
  const steps = curves.steps.map((step) => Math.max(step, 1)).slice(1);
  ["query", "key", "overlap", "ratio"].forEach((name, line) => {
    spec.data[line].x = steps;
    spec.data[line].y = curves[name][pair].slice(1);
  });
  const figure = (name, label, value, small = "") => bigNumber(label, value, help(name, label), small);
  const partner = `${pairs.opposite[place] ? "away from" : "near"} feature ${pairs.partner[place]}`;
  const view = byId("view");
  view.replaceChildren(
    el(
      "div",
      { class: "summary" },
      el("div", { class: "title" }, el("h1", {}, pairName(place)), el("div", { class: "tags" }, el("span", { class: "tag" }, pairs.mode[place] === null ? "no mode of its own" : `mode ${pairs.mode[place]}`)), moves()),
      el("p", { class: "lead" }, `Query feature ${pair}, key feature ${pair + pairs.id.length / toys.length}.`),
      el(
        "div",
        { class: "figures" },
        figure("target", "Target logit", thousandths(pairs.target[place])),
        figure("sigma", "σ", thousandths(pairs.sigma[place])),
        figure("query", "Cosine, query", thousandths(pairs.query[place])),
        figure("key", "Cosine, key", thousandths(pairs.key[place])),
        figure("contained", "In the span", thousandths(pairs.contained[place])),
        figure("ratio", "Logit / target", thousandths(pairs.ratio[place])),
        figure("overlap", "Overlap", thousandths(pairs.overlap[place]), partner),
      ),
      panel("Over training", help("pair", "this chart"), chart(spec, `${pairName(place)} over training`)),
    ),
  );
  view.scrollTop = 0;
  redrawCharts();
}
