// The summary: numbers over all heads, the map of layers and heads, and the charts that hold every head or firing.

const mapped = { measure: "verdict" };

function showSummary() {
  const view = byId("view");
  const { tiles, charts } = index.summary;
  view.replaceChildren(
    limitsNotice(),
    el(
      "div",
      { class: "summary" },
      el("h1", {}, "Which modes make a head look there?"),
      el("p", { class: "lead" }, "Every head’s score is a sum over singular modes of its query–key product. Few modes, with controls beside every number; choose a head."),
      el("div", { class: "figures" }, ...tiles.map(({ name, label, value, small }) => bigNumber(label, value, help(name, label), small))),
      el("div", { class: "charts" }, mapPanel(), ...charts.map(censusChart)),
    ),
  );
  view.scrollTop = 0;
  redrawCharts();
}

function censusChart(spec) {
  const react = spec.name === "heads_against_control" ? (point) => point.customdata && (location.hash = point.customdata) : null;
  return panel(spec.title, help(spec.name, spec.title), chart(spec, spec.title, react));
}

/** Layers × heads, coloured by what is chosen; the choice stays while the page is open. */
function mapPanel() {
  // a tall map leaves room for the charts at its side
  const tall = index.layers.length > 12 && Math.max(...heads.head) < 16;
  const box = el("section", { class: `panel map ${tall ? "" : "wide"}` });
  fillMap(box);
  return box;
}

function fillMap(box) {
  const names = Object.keys(MEASURES).filter((name) => heldMeasures.includes(name));
  const choose = el("select", { id: "map-by", "aria-label": "Colour of the map", onchange: () => again(choose.value) });
  choose.append(el("option", { value: "verdict" }, "Verdict"), ...names.map((name) => el("option", { value: name }, MEASURES[name].label)));
  choose.value = mapped.measure;
  const again = (measure) => {
    mapped.measure = measure;
    fillMap(box);
    byId("map-by").focus();
  };
  const { measure } = mapped;
  const byVerdict = measure === "verdict";
  box.replaceChildren(
    el("header", {}, el("h3", {}, "All heads"), help("map", "the map"), el("div", { class: "options" }, el("label", { for: "map-by" }, "Colour"), choose, byVerdict ? help("verdict") : explain(measureHelp(measure), MEASURES[measure].label))),
    headMap(measure),
    byVerdict ? verdictLegend() : el("div", { class: "legend plain" }, shadeScale(...scaleEnds(measure))),
  );
}

function headMap(measure) {
  const columns = [...new Set(heads.head)].sort((a, b) => a - b);
  const write = measure === "verdict" ? null : MEASURES[measure].write;
  const strength = write && strengths(heads[measure], MEASURES[measure].log);
  const rowNames = index.layers.map((layer) => ({ label: layer, href: `#layer.${layer}`, title: `What the heads of layer ${layer} share` }));
  const cellAt = (row, column) => {
    const place = headAt.get(`${index.layers[row]}.${columns[column]}`);
    if (place === undefined) return null;
    const { name, mark, colour: fill } = verdictOf(place);
    const lines = [`head ${shortId(place)}: ${name}`, ...tipLines(place)];
    const cell = { tip: lines.join("\n"), open: () => (location.hash = heads.id[place]) };
    if (!write) return { ...cell, text: mark, fill };
    const value = heads[measure][place];
    cell.tip = `head ${shortId(place)}: ${MEASURES[measure].label} ${write(value)}\n${[name, ...tipLines(place)].join("\n")}`;
    return { ...cell, text: columns.length <= 16 ? shortly(measure, value) : "", strength: strength(value) };
  };
  return cellGrid({ rows: rowNames, columns, corner: "layer", label: `Heads by ${write ? MEASURES[measure].label : "verdict"}`, cellAt });
}

function tipLines(place) {
  if (heads.sparsity[place] === null) return [`${plural(heads.n_firings[place], "firing")}, ${number(heads.n_sink[place])} on the first token`];
  const beside = controlNames.filter((name) => heads[`under_${name}`][place] !== null).map((name) => `${name} ${hundredths(heads[`under_${name}`][place])}`);
  return [`S ${hundredths(heads.sparsity[place])}${beside.length ? ` (${beside.join(", ")})` : ""}`, `N_recon ${number(heads.n_recon[place])}, cancellation ${number(heads.cancellation[place])}, ${plural(heads.n_firings[place], "firing")}`];
}

/** A value in the four characters that a cell has room for. */
function shortly(measure, value) {
  if (value === null) return "";
  if (MEASURES[measure].write === percent) return `${Math.round(100 * value)}`;
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 10) return size >= 1000 ? `${Math.round(size / 1000)}k` : `${Math.round(value)}`.replace("-", MINUS);
  return size >= 1 ? value.toFixed(1).replace("-", MINUS) : value.toFixed(2).replace(/^(-?)0/, "$1").replace("-", MINUS);
}

function scaleEnds(measure) {
  const known = heads[measure].filter((value) => value !== null && (!MEASURES[measure].log || value > 0));
  return [Math.min(...known), Math.max(...known)].map((value) => MEASURES[measure].write(Number.isFinite(value) ? value : null));
}

/** The verdicts with their marks and counts; choosing one lists its heads. */
function verdictLegend() {
  const entry = ({ name, mark, colour: fill, count, meaning }, place) =>
    el("button", { type: "button", "data-tip": meaning || null, onclick: () => listOnly({ verdict: String(place) }) }, verdictMark(mark, fill), `${name} `, el("b", {}, number(count)));
  return el("div", { class: "legend plain verdicts" }, ...index.verdicts.map(entry));
}
