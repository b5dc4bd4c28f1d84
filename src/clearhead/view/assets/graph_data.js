// A graph in memory: units, edges from the heaviest on, what the sliders let through, and units in words.

const { units } = index;
const placeOf = new Map(units.id.map((id, place) => [id, place]));
const KINDS = {
  feature: "feature", features: "group of features", lorsa: "Lorsa head", head: "head", kvhead: "key-value head", head_q: "queries of a head", head_k: "keys of a head",
  head_v: "values of a head", mode: "mode", edge: "attention edge", attn: "attention", mlp: "MLP", attn_error: "attention error", error: "error",
  bias: "bias", embedding: "embedding", input: "input", positions: "positions", logit: "logit", target: "target",
};
const KIND_ORDER = Object.keys(KINDS).filter((kind) => units.kind.includes(kind));
const isTarget = (place) => units.row[place] === "target";
const isError = (place) => units.kind[place] === "error" || units.kind[place] === "attn_error";
const USUAL_UNITS = 140;
/** Of influence, in graphs of no prompt. */
const USUAL_SHARE = 0.9;
const USUAL_EDGES = 300;
/** Graphs of no prompt join units of different scales, which only their influence compares. */
const OF_NO_PROMPT = !index.tokens.length && index.ranked === "influence";

let edges = null;
/** Numbers of the edges into and out of every unit, the heaviest first. */
let into = [];
let outOf = [];
let totalWeight = 1;

/** What edges can be ordered by: their order, the value of each, and the share of all that those before it hold. */
const measures = {};

function holdEdges(read) {
  edges = read;
  into = units.id.map(() => []);
  outOf = units.id.map(() => []);
  const sizes = edges.weight.map(Math.abs);
  totalWeight = sizes.reduce((sum, size) => sum + size, 0) / (index.edges.carried || 1) || 1;
  sizes.forEach((_, edge) => {
    into[edges.target[edge]].push(edge);
    outOf[edges.source[edge]].push(edge);
  });
  measures.weight = measureOf(sizes, totalWeight);
  measures.share = measureOf(sizes.map((_, edge) => shareOf(edge)), null);
  if (OF_NO_PROMPT) measures.influence = measureOf(sizes.map((_, edge) => shareOf(edge) * ownInfluence(edges.target[edge])), null);
}

/** What a unit's influence adds to the cumulative share; ranks are in the order of influence. */
const ownInfluence = (place) => units.rank[place] - Math.max(0, ...units.rank.filter((rank) => rank < units.rank[place]));

function measureOf(values, whole) {
  const order = [...values.keys()].sort((a, b) => values[b] - values[a] || a - b);
  const total = whole ?? (values.reduce((sum, value) => sum + value, 0) || 1);
  const before = new Float64Array(values.length);
  let sum = 0;
  for (const edge of order) {
    before[edge] = sum / total;
    sum += values[edge];
  }
  return { order, values, before };
}

/** What the sliders and the legend let through, what is fastened, what is chosen, and what goes with what is chosen. */
const sight = { rank: 1, weight: 1, by: OF_NO_PROMPT ? "influence" : "weight", hidden: new Set(), pinned: new Set(), chosen: null, lit: new Set(), edgesLit: false };
let chosenEdge = null;

/** Settings at which the graph can be read: the usual number of units, the usual number of edges between them. */
function chooseSight() {
  const ranks = units.rank.filter((_, place) => !isTarget(place)).sort((a, b) => a - b);
  const crowded = ranks.length > USUAL_UNITS;
  sight.rank = crowded ? Math.max(0.01, Math.floor(100 * ranks[USUAL_UNITS]) / 100) : OF_NO_PROMPT ? USUAL_SHARE : 1;
  sight.weight = OF_NO_PROMPT ? USUAL_SHARE : 1;
  const { shownEdges } = look();
  if (shownEdges.length > USUAL_EDGES) sight.weight = Math.max(0.01, Math.floor(100 * measures[sight.by].before[shownEdges[USUAL_EDGES]]) / 100);
}

/** Which units and edges are in sight, and which share of Σ|weight| those edges carry. */
function look() {
  const ends = chosenEdge === null ? [] : [edges.source[chosenEdge], edges.target[chosenEdge]];
  const shown = units.id.map((_, place) => {
    if (sight.pinned.has(place) || place === sight.chosen || ends.includes(place)) return true;
    return !sight.hidden.has(units.kind[place]) && (isTarget(place) || units.rank[place] <= sight.rank + 1e-9);
  });
  const shownEdges = [];
  let carried = 0;
  const { order, before } = measures[sight.by];
  for (const edge of order) {
    if (sight.weight < 1 && before[edge] >= sight.weight - 1e-9) break;
    if (!shown[edges.source[edge]] || !shown[edges.target[edge]]) continue;
    shownEdges.push(edge);
    carried += Math.abs(edges.weight[edge]);
  }
  return { shown, shownEdges, carried: carried / totalWeight };
}

/** The statement that always stands above the drawing: nothing is hidden without a word. */
function statement({ shown, shownEdges, carried }) {
  const seen = shown.filter(Boolean).length;
  const kinds = [...sight.hidden].map((kind) => `${KINDS[kind]} (${number(units.kind.filter((other) => other === kind).length)})`);
  const { held, all, carried: share } = index.edges;
  const parts = [
    `${number(seen)} of ${plural(units.id.length, "unit")}, ${number(shownEdges.length)} of ${plural(all, "edge")} shown, with ${percent(carried)} of |weight|.`,
    kinds.length ? `Hidden by kind: ${kinds.join(", ")}.` : "",
    held < all ? `The page holds the ${number(held)} heaviest edges only, ${percent(share)} of |weight|.` : "",
  ];
  return parts.filter(Boolean).join(" ");
}

/** Share of an edge in Σ|weight| into its target, over all edges of the graph. */
const shareOf = (edge) => {
  const whole = units.in[edges.target[edge]];
  return whole ? Math.abs(edges.weight[edge]) / whole : 0;
};

/** The two graphs that are compared, and which of them has a unit; null where there is one graph. */
const { sides } = index;
const sideOf = (place) => (sides === null ? 0 : sides.of[place]);
const sideWords = (side) => (side === 0 ? "in both" : `only in ${sides.names[side - 1]}`);

/** The token a unit stands at, or null. */
const tokenAt = (position) => (position === null || position === undefined || index.tokens[position] === undefined ? null : vocab[index.tokens[position]]);
const tokenOf = (place) => tokenAt(units.position[place]);
const wordsOf = (place) => (units.words[place] === null ? null : vocab[units.words[place]]);

/** What a unit is, after its name: its own words, else the token it stands at. */
function glossOf(place) {
  return wordsOf(place) ?? tokenOf(place) ?? "";
}

function tipOf(place) {
  const words = wordsOf(place);
  const token = tokenOf(place);
  const where = units.position[place] === null ? "" : ` at ${token === null ? "" : `${quoted(token)}, `}token ${units.position[place]}`;
  const lines = [`${units.id[place]}: ${KINDS[units.kind[place]]}${where}`, words ?? ""];
  if (units.activation[place] !== null && sides === null) lines.push(`activation ${number(units.activation[place])}`);
  const chance = index.values.probability?.[place] ?? null;
  if (chance !== null && sides === null) lines.push(`probability ${percent(chance)}`);
  if (sides !== null) lines.push(sideWords(sideOf(place)));
  if (units.in[place] > 0) lines.push(`${percent(units.errors[place])} of its input from errors`);
  return lines.filter(Boolean).join("\n");
}

/** A link to a unit with its gloss; a name that is not in the graph is text. */
function unitLink(name) {
  const place = placeOf.get(name);
  if (place === undefined) return el("span", { class: "unit-link absent", "data-tip": "Not among the units of this graph.", tabindex: 0 }, el("code", {}, name), index.elsewhere[name] === undefined ? null : pill(vocab[index.elsewhere[name]]));
  const gloss = glossOf(place);
  return el("a", { class: "unit-link", href: `#${name}` }, el("i", { class: `dot k-${units.kind[place]}` }), el("code", {}, name), gloss ? pill(gloss) : null);
}
