// What the list shows of units: sorts, filters, and the row of one unit.

const STATES = { alive: (place) => !units.dead[place], dead: (place) => units.dead[place] };
const SPREADS = { spanning: (place) => spans(place), single: (place) => units.host[place] !== null && !spans(place) };

const listed = {
  noun,
  ids: units.id,
  columns: units,
  sorts: {
    max_activation: { label: "Max activation", write: number, size: true },
    rate: { label: "Activation rate", write: percent, log: true },
    mean_activation: { label: "Mean activation", write: number },
    participation_output: { label: "Participation, output", write: number },
    participation_weights: { label: "Participation, weights", write: number },
    participation_routing: { label: "Participation, routing", write: number },
    stability: { label: "Stability over seeds", write: number },
    effect: { label: "Measured effect", write: number },
    logit: { label: "Largest logit effect", write: signed },
    distance: { label: "Distance to source", write: number },
    decoder_norm: { label: "Decoder norm", write: number },
    index: { label: "Index", write: number, up: true },
  },
  filters: [
    choice("kind", "kind", units.kind, kindName, kinds.length > 1 ? kinds[0] : ""),
    choice("layer", "layer", units.layer, (layer) => `layer ${layer}`),
    { name: "state", label: "Alive or dead", options: [["", "alive and dead"], ["alive", "alive"], ["dead", "dead"]], keeps: (place, value) => STATES[value](place) },
    {
      name: "spread",
      label: "Spread over original heads",
      options: [["", "any spread"], ["spanning", "spanning heads"], ["single", "one head"]],
      keeps: (place, value) => SPREADS[value](place),
    },
    {
      name: "behaviour",
      label: "Known behaviour",
      options: [["", "any behaviour"], ...index.cards.behaviours.filter((_, own) => units.behaves.some((found) => found.includes(own))).map((name) => [name, spoken(name)])],
      keeps: (place, value) => units.behaves[place].includes(index.cards.behaviours.indexOf(value)),
    },
    choice("group", "QK group", units.group, (group) => `QK group ${group}`),
    choice("host", "host head", units.host, (host) => `host head ${host}`),
  ],
  search: {
    hint: "Token or id…",
    label: "Search by token in top activations and raised logits, or by id",
    about: `Finds ${noun}s whose most active tokens or raised logits contain the text, or whose id does. Case is ignored.`,
    text: (place) => [...units.fires[place], ...units.raises[place]].map((entry) => vocab[entry]).join("\n"),
    exact: (text) => placeOf.get(text),
  },
  /** How many rows there are without a filter, and what they are called. */
  total: () => (query.kind ? [ofKind(query.kind), kindName(query.kind)] : [units.id.length, noun]),
  name: (place) => [query.kind || kinds.length === 1 ? shortId(place) : units.id[place], ...rowTags(place)],
  does: doing,
};

function rowTags(unit) {
  const tags = [];
  if (units.dead[unit]) tags.push(el("span", { class: "tag dead" }, "dead"));
  tags.push(...behaviourTags(unit).slice(0, 1));
  if (spans(unit)) tags.push(el("span", { class: "tag" }, `spans ${number(units.participation_output[unit])}`));
  else if (units.host[unit] !== null) tags.push(el("span", { class: "tag" }, `in head ${units.host[unit]}`));
  return tags;
}

/** "fires on X → raises Y" in pills. */
function doing(unit) {
  const parts = [];
  const [fires] = units.fires[unit];
  const [raises] = units.raises[unit];
  if (fires !== undefined) parts.push(pill(vocab[fires]));
  if (raises !== undefined) parts.push(el("span", { class: "sign" }, "→"), pill(vocab[raises]));
  return parts;
}

function openNamed(name) {
  const place = placeOf.get(name);
  if (place === undefined) return false;
  chooseInList(place);
  showUnit(place);
  return true;
}

const settle = () => drawActive();

/** What the page leaves out for clarity, and its own keys, for the dialog about it. */
function notes() {
  const { trimmed } = index.limits;
  return {
    leftOut: trimmed ? `Of patterns with many sources only the largest are drawn; ${plural(trimmed, "smaller source")} are part of “other tokens”.` : "",
    keys: [[["↑", "↓"], "examples"], [["←", "→"], "sources of one example"]],
  };
}
