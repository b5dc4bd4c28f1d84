// Why a query looks at a key: the score split over pairs of units, over units of one side, and over singular modes.

const MATRIX = 10;

/** A line per attention table: who looks where, and with which score. */
function attentionList(places) {
  const lines = places.map((at) => {
    const { score, pairs } = index.attention[at];
    return [el("a", { href: `#attention.${at}`, class: "looks" }, ...looksOf(at)), signed(score), number(pairs)];
  });
  return longTable([["who looks where", "", "unit-cell"], ["score", "", null], ["pairs", "", null]], lines, "the rest of the tables", "");
}

/** “head 5.3 · query ‘is’ → key ‘large’”. */
function looksOf(at) {
  const { kind, layer, head, query: asks, key, tokens } = index.attention[at];
  const token = (place, position) => (position === null ? null : place === null ? `token ${position}` : pill(vocab[place]));
  const name = kind === "lorsa" ? `Lorsa head ${layer}.${head}` : `head ${layer}.${head}`;
  return [`${name} `, token(tokens[0], asks), key === null ? null : " → ", key === null ? null : token(tokens[1], key)].filter((each) => each !== null);
}

async function showAttention(at) {
  const line = index.attention[at];
  const table = await part("attention", at);
  const figure = (label, value, text, small = "") => bigNumber(label, value, explain(text, label), small);
  const listed_ = table.pairs.reduce((sum, [, , weight]) => sum + weight, 0);
  const against = line.against === null ? nothing() : el("p", { class: "hint" }, `Minus the score of token ${line.against}`, line.tokens[2] === null ? "" : " ", line.tokens[2] === null ? "" : pill(vocab[line.tokens[2]]), ".", help("against", "the other key"));
  return [
    el("div", { class: "title" }, el("h2", {}, "Attention")),
    el("p", { class: "sentence ends" }, ...looksOf(at)),
    against,
    el(
      "div",
      { class: "figures" },
      figure("Score", signed(line.score), index.help.attention),
      figure("Sum of all pairs", signed(line.total), "Sum over all pairs, those that are not listed included; equals the score where nothing is left out."),
      figure("Listed pairs", signed(listed_), "Sum of the pairs that this page lists.", plural(table.pairs.length, "pair")),
    ),
    panel("Pairs", help("pairs", "pairs"), pairTable(table, line.total)),
    ...matrixOf(table),
    ...(table.queries.length ? [panel("Query side", help("marginals", "marginals"), sideTable(table, table.queries))] : []),
    ...(table.keys.length ? [panel("Key side", help("marginals", "marginals"), sideTable(table, table.keys))] : []),
    ...(table.triples.length ? [panel("By singular mode", help("modes", "modes"), modeTable(table), tripleTable(table))] : []),
  ];
}

function pairTable({ units: names, pairs }, total) {
  const largest = Math.max(...pairs.map(([, , weight]) => Math.abs(weight)), 0);
  const lines = pairs.map(([asks, key, weight]) => [el("span", { class: "two-units" }, unitLink(names[asks]), unitLink(names[key])), signedBar(weight, largest), total ? percent(weight / total) : MISSING]);
  return longTable([["query-side unit, key-side unit", "", "unit-cell"], ["weight", "", "bar-cell"], ["share", ""]], lines, "", "No pair is listed.");
}

function sideTable({ units: names }, entries) {
  const largest = Math.max(...entries.map(([, weight]) => Math.abs(weight)), 0);
  const lines = entries.map(([place, weight]) => [unitLink(names[place]), signedBar(weight, largest)]);
  return longTable([["unit", "", "unit-cell"], ["weight", "", "bar-cell"]], lines, "", "");
}

/** Pairs as a square: rows are query-side units, columns key-side units, in the order of Σ|weight|. */
function matrixOf({ units: names, pairs }) {
  const heaviest = (side) => {
    const sums = new Map();
    for (const pair of pairs) sums.set(pair[side], (sums.get(pair[side]) ?? 0) + Math.abs(pair[2]));
    return [...sums].sort((a, b) => b[1] - a[1]).slice(0, MATRIX).map(([place]) => place);
  };
  const [asking, keys] = [heaviest(0), heaviest(1)];
  if (asking.length < 2 || keys.length < 2) return [];
  const held = new Map(pairs.map(([asks, key, weight]) => [`${asks},${key}`, weight]));
  const largest = Math.max(...pairs.map(([, , weight]) => Math.abs(weight)));
  const grid = cellGrid({
    rows: asking.map((_, at) => `q${at + 1}`),
    columns: keys.map((_, at) => `k${at + 1}`),
    label: "Pairs by query-side and key-side unit",
    cellAt: (row, column) => {
      const weight = held.get(`${asking[row]},${keys[column]}`);
      const said = `${names[asking[row]]}\n${names[keys[column]]}\n${weight === undefined ? "not listed" : signed(weight)}`;
      if (weight === undefined) return { text: "", tip: said };
      return { text: weight < 0 ? MINUS : "", tip: said, fill: `color-mix(in srgb, var(${weight < 0 ? "--minus" : "--plus"}) ${(8 + (88 * Math.abs(weight)) / largest).toFixed(0)}%, var(--raised))` };
    },
  });
  const legend = (letter, places) => el("ol", { class: "axis-names" }, ...places.map((place, at) => el("li", {}, `${letter}${at + 1} `, unitLink(names[place]))));
  return [panel("Pairs as a square", help("pairs", "this square"), el("div", { class: "signed-grid" }, grid), el("div", { class: "axes" }, legend("q", asking), legend("k", keys)))];
}

function modeTable({ triples: found }) {
  const sums = new Map();
  for (const [, mode, , weight] of found) sums.set(mode, (sums.get(mode) ?? 0) + weight);
  const lines = [...sums].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
  const largest = Math.max(...lines.map(([, weight]) => Math.abs(weight)), 0);
  return longTable([["mode", "", "unit-cell"], ["listed weight", "", "bar-cell"]], lines.map(([mode, weight]) => [`mode ${mode}`, signedBar(weight, largest)]), "", "");
}

function tripleTable({ units: names, triples: found }) {
  const largest = Math.max(...found.map(([, , , weight]) => Math.abs(weight)), 0);
  const lines = found.map(([asks, mode, key, weight]) => [el("span", { class: "two-units" }, unitLink(names[asks]), unitLink(names[key])), String(mode), signedBar(weight, largest)]);
  return longTable([["query-side unit, key-side unit", "", "unit-cell"], ["mode", ""], ["weight", "", "bar-cell"]], lines, "", "");
}
