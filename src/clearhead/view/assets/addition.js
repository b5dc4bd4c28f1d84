// The addition toy: heads in the list, a summary per seed with wiring, tests and tables, and a view of one head.

const { heads, seeds, places } = index;
const placeOf = new Map(heads.id.map((id, place) => [id, place]));
const manySeeds = seeds.length > 1;
const PRETTY = { a1: "a₁", a0: "a₀", b1: "b₁", b0: "b₀", c2: "c₂", c1: "c₁", c0: "c₀" };
const PAIR = { a1: "tens", b1: "tens", a0: "units", b0: "units" };
const CARRIES = ["no carry from the units", "a carry from the units"];
const SHOWN = 0.02;
const SIGNAL = 0.005;
const pretty = (name) => PRETTY[name] ?? name;
const edgeCount = (count) => (count === 0 ? "0" : count < 0.05 ? "<0.1" : count.toFixed(1));
const share = (value) => (value === null || value === undefined ? MISSING : `${(100 * value).toFixed(value < 0.1 && value > 0 ? 2 : 1)} %`);
const whole = (value) => (value === null || value === undefined ? MISSING : `${(100 * value).toFixed(value > 0 && value < 0.995 && value > 0.985 ? 1 : 0)} %`);
const headName = (place) => `head ${heads.layer[place]}.${heads.head[place]}${manySeeds ? ` · seed ${heads.seed[place]}` : ""}`;

const listed = {
  noun: "head",
  ids: heads.id,
  columns: heads,
  sorts: {
    per_sum: { label: "Open edges", write: edgeCount },
    apart: { label: "Difference by carry", write: edgeCount },
    without: { label: "Accuracy without it", write: share, up: true },
    layer: { label: "Layer", write: number, up: true },
  },
  filters: [
    choice("seed", "seed", heads.seed, (seed) => `seed ${seed}`, manySeeds ? String(seeds[0].seed) : ""),
    choice("layer", "layer", heads.layer, (layer) => `layer ${layer}`),
  ],
  search: {
    hint: "Head…",
    label: "Search by head",
    about: "Finds heads by layer and number, as in 1.3.",
    text: headName,
    exact: (text) => placeOf.get(text),
  },
  total: () => [heads.id.length, "head"],
  name: (place) => [`head ${heads.layer[place]}.${heads.head[place]}`, heads.per_sum[place] === 0 ? el("span", { class: "tag dead" }, "closed") : el("span", { class: "tag" }, `layer ${heads.layer[place]}`)],
  does: (place) => [el("span", {}, heads.per_sum[place] === 0 ? "opens no edge" : `${edgeCount(heads.no_carry[place])} edges, ${edgeCount(heads.carry[place])} with a carry`)],
};

function openNamed(name) {
  const seed = seeds.findIndex((study) => `seed.${study.seed}` === name);
  if (seed >= 0) {
    if (manySeeds) setQuery({ seed: String(seeds[seed].seed) });
    chooseInList(null);
    showSeed(seed);
    return true;
  }
  const place = placeOf.get(name);
  if (place === undefined) return false;
  chooseInList(place);
  showHead(place);
  return true;
}

const settle = () => {};
const notes = () => ({ leftOut: "", keys: [] });
const showSummary = () => showSeed(0);

async function showSeed(at) {
  const asked = location.hash;
  const maps = await part("maps", at);
  if (location.hash !== asked) return;
  const study = seeds[at];
  const links = seeds.map(({ seed }, other) => el("a", { class: `plain ${other === at ? "current" : ""}`, href: `#seed.${seed}` }, `seed ${seed}`));
  const view = byId("view");
  view.replaceChildren(
    el(
      "div",
      { class: "summary" },
      el("div", { class: "title" }, el("h1", {}, index.title), manySeeds ? el("div", { class: "moves" }, ...links) : null),
      el("p", { class: "lead" }, `a₁a₀ + b₁b₀ = c₂c₁c₀, digit by digit. The model reads eight tokens; =, c₂ and c₁ predict the digits of the sum.`),
      el("div", { class: "figures" }, ...tiles(study)),
      wiringPanel(maps),
      statementsPanel(study),
      el("div", { class: "charts" }, readingTable(study), headsPanel(at, maps), classesTable(study), kindsTable(study), seedsTable(), ...index.charts.map((spec) => panel(spec.title, explain(spec.help, spec.title), chart(spec, spec.title)))),
    ),
  );
  view.scrollTop = 0;
  redrawCharts();
}

function tiles({ sparse, accuracy, dense, random }) {
  const tile = (name, label, value, small = "") => bigNumber(label, value, help(name, label), small);
  return [
    tile("edge_share", "Open edges", share(sparse.edge_share), `of ${number(index.visible)}`),
    tile("edges_per_sum", "Edges per sum", sparse.edges_per_sum.toFixed(1)),
    tile("exact_match", "Right sums", share(sparse.exact_match), `dense ${share(dense.exact_match)}`),
    tile("carry", "With a carry", share(accuracy.carry), `without ${share(accuracy.no_carry)}`),
    tile("same_weights", "Random edges", share(random.same_weights.mean), "same weights"),
    ...(random.trained ? [tile("trained", "Random edges", share(random.trained.exact_match), "trained with")] : []),
  ];
}

// Wiring: tokens from left to right, layers from bottom to top.

const STEP = 52;
const RISE = 74;
const LEFT = 58;

function wiringPanel(maps) {
  const top = lastOpenLayer(maps);
  const made = panel("Which token reads which", help("wiring", "the wiring"), el("div", { class: "side-by-side" }, ...[0, 1].map((carry) => el("figure", { class: "wiring" }, el("figcaption", {}, `Sums with ${CARRIES[carry]}`), wiring(maps.any_head[carry], maps.edges[carry], top, CARRIES[carry])))), wiringLegend(maps, top));
  made.classList.add("whole");
  return made;
}

/** The last layer in which an edge is drawn, at least the first. */
function lastOpenLayer({ any_head: anyHead }) {
  const layers = anyHead[0].map((_, layer) => layer).filter((layer) => anyHead.some((byLayer) => byLayer[layer].flat().some((value) => value >= SHOWN)));
  return Math.max(0, ...layers);
}

function wiringLegend({ any_head: anyHead }, top) {
  const silent = anyHead[0].map((_, layer) => layer).filter((layer) => layer > top);
  const rest = silent.length ? `Layer${silent.length > 1 ? "s" : ""} ${silent.join(", ")}: no edge in 2 % of sums or more.` : "";
  const swatch = (kind, text) => el("span", {}, el("i", { class: `swatch ${kind}` }), text);
  return el("div", { class: "wiring-legend" }, swatch("tens", "reads the tens pair a₁, b₁"), swatch("units", "reads the units pair a₀, b₀"), swatch("signs", "reads another token"), rest ? el("span", {}, rest) : null);
}

function wiring(anyHead, byHead, top, label) {
  const width = LEFT + STEP * places.length;
  const floor = RISE * (top + 1) + 34;
  const x = (place) => LEFT + STEP * place + STEP / 2 - 8;
  const y = (level) => floor - RISE * level;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${floor + 34}`, role: "img", "aria-label": `Edges of sums with ${label}` });
  places.forEach((name, place) => {
    drawing.append(svg("line", { class: "stream", x1: x(place), x2: x(place), y1: y(0), y2: y(top + 1) }));
    drawing.append(svg("text", { class: `token-name ${PAIR[name] ?? ""}`, x: x(place), y: floor + 22, "text-anchor": "middle" }, pretty(name)));
  });
  for (let layer = 0; layer <= top; layer += 1) drawing.append(svg("text", { class: "layer-name", x: 0, y: y(layer + 0.5) + 4 }, `layer ${layer}`));
  ["c2", "c1", "c0"].forEach((digit, place) => drawing.append(svg("text", { class: "predicted", x: x(5 + place), y: y(top + 1) - 12, "text-anchor": "middle" }, `→ ${pretty(digit)}`)));
  const edges = [];
  for (let layer = 0; layer <= top; layer += 1) {
    anyHead[layer].forEach((row, query) => row.forEach((value, key) => value >= SHOWN && edges.push({ layer, query, key, value })));
  }
  edges.sort((a, b) => a.value - b.value);
  for (const { layer, query, key, value } of edges) {
    const [from, to, low, high] = [x(key), x(query), y(layer), y(layer + 1)];
    const bend = key === query ? 15 : 0;
    const path = `M ${from} ${low} C ${from - bend} ${low - RISE * 0.42}, ${to - bend} ${high + RISE * 0.42}, ${to} ${high}`;
    const open = byHead[layer].map((head, place) => [place, head[query][key]]).filter(([, often]) => often >= SIGNAL);
    const said = `layer ${layer}: ${pretty(places[query])} reads ${pretty(places[key])} in ${share(value)} of these sums\n${open.map(([head, often]) => `head ${head}: ${share(often)}`).join(", ")}`;
    drawing.append(svg("path", { class: `edge ${PAIR[places[key]] ?? "signs"}`, d: path, "stroke-width": (1 + 2.6 * value).toFixed(2), "stroke-opacity": (0.2 + 0.75 * value).toFixed(2) }));
    drawing.append(svg("path", { class: "grip", d: path, "data-tip": said }));
  }
  places.forEach((_, place) => {
    for (let level = 0; level <= top + 1; level += 1) drawing.append(svg("circle", { class: "node", cx: x(place), cy: y(level), r: 2.6 }));
  });
  return drawing;
}

// Statements and what they rest on.

function statementsPanel({ statements }) {
  const one = ({ statement, held, numbers }) =>
    el(
      "li",
      { class: held ? "held" : "missed" },
      el("span", { class: "mark" }, held ? "held" : "not held"),
      el("span", {}, statement, " ", el("span", { class: "numbers-said" }, Object.entries(numbers).map(([name, value]) => `${name.replaceAll("_", " ")}: ${share(value)}`).join(" · "))),
    );
  return panel("Tested on held-out sums", help("held", "statements"), el("ul", { class: "statements" }, ...statements.map(one)));
}

const SOURCES = { tens: "tens a₁, b₁", units: "units a₀, b₀", "units, gathered": "units, gathered" };

function readingTable({ reading }) {
  const both = (pair) => `${whole(pair.no_carry)} / ${whole(pair.carry)}`;
  const change = (name) => (row) => {
    const found = reading[row].changes[name];
    if (!found) return "";
    const said = [["follows", found.follows], ["stays", found.stays]].filter(([, value]) => value !== null);
    return el("span", {}, ...said.flatMap(([word, value], at) => [el("span", { class: "said" }, `${word} ${whole(value)}${at + 1 < said.length ? "," : ""}`), " "]));
  };
  const layers = (counts) => counts.map((count, layer) => [layer, count]).filter(([, count]) => count >= SIGNAL);
  return tablePanel(
    "What each digit rests on",
    [
      ["digit", index.help.reading, (row) => `${pretty(reading[row].digit)} at ${pretty(reading[row].place)}`],
      ["reads", "", (row) => SOURCES[reading[row].source], "words"],
      ["edges by layer", index.help.by_layer, (row) => layers(reading[row].per_sum_by_layer).map(([layer, count]) => `${layer}: ${Number(count.toFixed(2))}`).join(" · ") || "none", "words"],
      ["open", index.help.opens, (row) => both(reading[row].open)],
      ["right if closed", index.help.closed, (row) => both(reading[row].closed)],
      ["carry in it", index.help.explained, (row) => whole(reading[row].explained_by_carry)],
      ...index.changes.map((name) => [`other ${name}`, index.help[name], change(name), "words"]),
    ],
    reading.length,
  );
}

// Maps of single heads.

const CELL = 15;
const GUTTER = 24;

function edgeMap(values, label, sayAt) {
  const size = GUTTER + CELL * places.length;
  const drawing = svg("svg", { class: "edge-map", viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": label });
  places.forEach((name, place) => {
    const middle = CELL * place + CELL / 2;
    drawing.append(svg("text", { x: GUTTER - 6, y: middle + 4, "text-anchor": "end" }, pretty(name)));
    drawing.append(svg("text", { x: GUTTER + middle, y: size - 8, "text-anchor": "middle" }, pretty(name)));
  });
  values.forEach((row, query) =>
    row.forEach((value, key) => {
      if (key > query) return;
      const box = { x: GUTTER + CELL * key + 0.75, y: CELL * query + 0.75, width: CELL - 1.5, height: CELL - 1.5, rx: 2 };
      drawing.append(svg("rect", { class: "ground", ...box }));
      if (value > 0) drawing.append(svg("rect", { class: "open", ...box, "fill-opacity": (0.12 + 0.88 * value).toFixed(3) }));
      drawing.append(svg("rect", { class: "grip", ...box, "data-tip": sayAt(query, key, value) }));
    }),
  );
  return drawing;
}

const sayOpen = (query, key, value) => `${pretty(places[query])} reads ${pretty(places[key])}\nin ${share(value)} of these sums`;
const sayAttention = (query, key, value) => `${pretty(places[query])} attends to ${pretty(places[key])}\nwith ${share(value)} on average`;

function mapFigure(values, caption, say = sayOpen) {
  return el("figure", { class: "map" }, edgeMap(values, caption, say), el("figcaption", {}, caption));
}

function headsPanel(at, maps) {
  const own = heads.id.map((_, place) => place).filter((place) => heads.study[place] === at);
  const opened = own.filter((place) => heads.per_sum[place] >= SIGNAL);
  const closed = own.filter((place) => heads.per_sum[place] < SIGNAL);
  const card = (place) => {
    const [layer, head] = [heads.layer[place], heads.head[place]];
    return el(
      "div",
      { class: "head-card" },
      el("a", { href: `#${heads.id[place]}` }, `head ${layer}.${head}`),
      el("span", { class: "aside-note" }, ` ${edgeCount(heads.per_sum[place])} edges · without it ${whole(heads.without[place])} right`),
      el("div", { class: "map-pair" }, mapFigure(maps.edges[0][layer][head], "no carry"), mapFigure(maps.edges[1][layer][head], "carry")),
    );
  };
  const rest = closed.length ? el("p", { class: "hint closed-heads" }, `Closed, or nearly: ${closed.map((place) => `${heads.layer[place]}.${heads.head[place]}`).join(", ")}.`) : null;
  const made = panel("Open edges, head by head", help("map", "these maps"), el("div", { class: "head-cards" }, ...opened.map(card)), rest);
  made.classList.add("whole");
  return made;
}

// Tables.

/** Accuracy, on a ground that darkens with what is lost. */
const loss = (value, best) => el("span", { class: "loss", "--lost": percentOf(Math.min(1, Math.max(0, best - value)) * 0.6) }, whole(value));

function classesTable({ classes, accuracy }) {
  const at = (name, write) => (row) => write(classes[row][name]);
  const lossAt = (name) => at(name, (value) => loss(value, accuracy[name]));
  return tablePanel(
    "Without one kind of edge",
    [
      ["layer", index.help.classes, at("layer", String)],
      ["edge", "", (row) => `${pretty(classes[row].query)} reads ${pretty(classes[row].key)}`, "words"],
      ["per sum", index.help.per_sum, at("per_sum", (value) => number(Number(value.toFixed(2))))],
      ["right sums", index.help.exact_match, lossAt("exact_match")],
      ["no carry", index.help.carry, lossAt("no_carry")],
      ["carry", "", lossAt("carry")],
      ["c₂", "", lossAt("c2")],
      ["c₁", "", lossAt("c1")],
      ["c₀", "", lossAt("c0")],
    ],
    classes.length,
  );
}

function kindsTable({ by_kind_of_carry: kinds }) {
  const at = (name, write) => (row) => write(kinds[row][name]);
  return tablePanel(
    "Accuracy by carries",
    [
      ["carries", index.help.kinds, at("carries", String)],
      ["sums", "", at("sums", number)],
      ["right sums", index.help.exact_match, at("exact_match", share)],
      ["c₂", "", at("c2", share)],
      ["c₁", "", at("c1", share)],
      ["c₀", "", at("c0", share)],
    ],
    kinds.length,
  );
}

function seedsTable() {
  const at = (write) => (row) => write(seeds[row]);
  return tablePanel(
    manySeeds ? "Seeds and controls" : "Controls",
    [
      ["seed", "", at(({ seed }) => el("a", { href: `#seed.${seed}` }, String(seed)))],
      ["open edges", index.help.edge_share, at(({ sparse }) => share(sparse.edge_share))],
      ["right, sparse", index.help.exact_match, at(({ sparse }) => share(sparse.exact_match))],
      ["right, dense", index.help.dense, at(({ dense }) => share(dense.exact_match))],
      ["random edges", index.help.same_weights, at(({ random }) => share(random.same_weights.mean))],
      ["best of 20", "", at(({ random }) => share(random.same_weights.largest))],
      ["trained with random", index.help.trained, at(({ random }) => (random.trained ? share(random.trained.exact_match) : MISSING))],
      ["statements held", "", at(({ statements }) => `${statements.filter(({ held }) => held).length} of ${statements.length}`)],
      ["CPU s, dense + sparse", "", at(({ dense, sparse }) => `${Math.round(dense.cpu_seconds)} + ${Math.round(sparse.cpu_seconds)}`)],
    ],
    seeds.length,
  );
}

async function showHead(place) {
  const maps = await part("maps", heads.study[place]);
  if (placeOf.get(decodeURIComponent(location.hash.slice(1))) !== place) return;
  const [layer, head] = [heads.layer[place], heads.head[place]];
  const own = [0, 1].map((carry) => maps.edges[carry][layer][head]);
  const figure = (name, label, value, small = "") => bigNumber(label, value, help(name, label), small);
  const view = byId("view");
  view.replaceChildren(
    el(
      "div",
      { class: "summary" },
      el("div", { class: "title" }, el("h1", {}, headName(place)), el("div", { class: "tags" }, el("span", { class: "tag" }, heads.per_sum[place] === 0 ? "opens no edge" : `layer ${layer}`)), moves()),
      el(
        "div",
        { class: "figures" },
        figure("per_sum", "Edges per sum", edgeCount(heads.per_sum[place]), `of ${number(index.visible / (maps.dense.length * maps.dense[0].length))}`),
        figure("map", "Without a carry", edgeCount(heads.no_carry[place])),
        figure("map", "With a carry", edgeCount(heads.carry[place])),
        figure("without", "Right without it", share(heads.without[place])),
      ),
      el(
        "div",
        { class: "charts maps-large" },
        panel("Open edges, no carry", help("map", "this map"), mapFigure(own[0], "rows read, columns are read")),
        panel("Open edges, carry", help("map", "this map"), mapFigure(own[1], "rows read, columns are read")),
        panel("Dense model, same head", help("dense_map", "this map"), mapFigure(maps.dense[layer][head], "mean attention", sayAttention)),
      ),
      edgesTable(own),
    ),
  );
  view.scrollTop = 0;
  redrawCharts();
}

function edgesTable([without, withCarry]) {
  const edges = [];
  places.forEach((_, query) => places.forEach((__, key) => (without[query][key] > 0 || withCarry[query][key] > 0) && edges.push([query, key])));
  if (!edges.length) return notice("This head opens no edge in any held-out sum.");
  const most = ([query, key]) => Math.max(without[query][key], withCarry[query][key]);
  edges.sort((a, b) => most(b) - most(a));
  const made = tablePanel(
    "Its edges",
    [
      ["edge", "", (row) => `${pretty(places[edges[row][0]])} reads ${pretty(places[edges[row][1]])}`],
      ["open, no carry", index.help.map, (row) => share(without[edges[row][0]][edges[row][1]])],
      ["open, carry", "", (row) => share(withCarry[edges[row][0]][edges[row][1]])],
    ],
    edges.length,
  );
  made.classList.add("spaced");
  return made;
}
