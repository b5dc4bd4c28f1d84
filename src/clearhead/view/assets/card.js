// The card of one unit beyond its examples: behaviours, what it reads, writes and looks for, its family, and how far
// all that can be trusted. A part that the atlas does not hold is left out.

const spoken = (name) => name.replaceAll("_", " ");
const behaviourName = (place) => spoken(index.cards.behaviours[place]);
const RELATIONS = {
  reads: "What it reads",
  writes: "What it writes",
  query: "What makes it look",
  key: "What it looks for",
  modes: "Singular modes of its host head",
};
const MEASURES = {
  seed_stability: "stable over seeds",
  explained: "held by the model's own output",
  host_share: "in one original head",
  causal_effect: "effect on its logits",
  gradient_effect: "as predicted to first order",
  causal_kl: "KL when removed",
  control_kl: "KL of a random direction",
  pattern_rank: "coordinates of its pattern needed",
  pattern_overlap: "overlap with another pattern of its group",
};
const FURTHER = { predicted_effect: "effect predicted by the direct path", linear_effect: "effect predicted through attention alone" };
const BECOMES = { mean: "its mean", elsewhere: "another token's" };
const QUERY_CONTEXT = [10, 2];
const KEY_CONTEXT = [4, 2];
const KEYS_SHOWN = 2;
const SCORERS = { detection: "detection", fuzzing: "fuzzing", intruder: "intruder" };

const interval = (low, high, write = number) => (low === null || high === null ? "" : `${write(low)} to ${write(high)}`);

function behaviourTags(place) {
  return units.behaves[place].map((behaviour) => el("span", { class: "tag behaviour" }, behaviourName(behaviour)));
}

/** What was said of it in words, each text with the scores that judges gave it. */
function explanationLines(detail) {
  if (!detail.explanations.length) return nothing();
  const score = ([scorer, judge, value, low, high, cases]) =>
    el(
      "span",
      { class: "judged", title: `${plural(cases, "example")}${vocab[judge] ? `, judged by ${vocab[judge]}` : ""}` },
      `${SCORERS[scorer] ?? scorer} ${number(value)}`,
      el("small", {}, interval(low, high)),
    );
  const line = ({ by, text, scores }, place) =>
    el("p", {}, el("span", { class: "said" }, vocab[text]), el("small", {}, `by ${vocab[by]}`), ...scores.map(score), place ? null : help("explanations"));
  return el("div", { class: "explained" }, ...detail.explanations.map(line));
}

/** One line: each measure with its interval and the number of cases that it rests on. */
function trustLine(detail) {
  const held = Object.entries(detail.trust).filter(([name]) => name !== "pattern_coordinates");
  if (!held.length) return nothing();
  const known = Object.keys(MEASURES);
  const order = (name) => (known.includes(name) ? known.indexOf(name) : known.length);
  held.sort(([a], [b]) => order(a) - order(b));
  const first = held.filter(([name]) => known.includes(name));
  const others = held.filter(([name]) => !known.includes(name));
  const entry = ([name, measured]) => measureSaid(name, measured, detail.trust);
  const rest = others.length ? el("details", {}, el("summary", {}, `${number(others.length)} more`), ...others.map(entry)) : null;
  const lead = el("span", { class: "lead-in" }, "Trust", help("trust"));
  return el("div", { class: "trust", role: "group", "aria-label": "How far to trust this card" }, lead, ...first.map(entry), rest, interventions(detail));
}

function measureSaid(name, [value, low, high, cases], all) {
  const of = name === "pattern_rank" && all.pattern_coordinates ? ` of ${number(all.pattern_coordinates[0])}` : "";
  return el(
    "span",
    { title: `on ${plural(cases, "case")}`, "data-measure": name },
    el("b", {}, `${number(value)}${of}`),
    ` ${MEASURES[name] ?? FURTHER[name] ?? spoken(name)}`,
    el("small", {}, interval(low, high)),
    index.help[name] ? help(name) : null,
  );
}

/** What happens to the logits that it writes to when its activations are set to something else, controls beside it. */
function interventions(detail) {
  const rows = detail.interventions;
  if (rows.length < 2) return null;
  const setting = (becomes) => BECOMES[becomes] ?? (Number(becomes) === 0 ? "removed" : `${becomes} times`);
  const columns = [
    ["its activation", null, (row) => setting(rows[row][0])],
    ["change of its logits", null, (row) => el("span", {}, signed(rows[row][1]), el("small", {}, interval(rows[row][2], rows[row][3]))), "number"],
    ["first order", index.help.gradient_effect, (row) => signed(rows[row][4]), "number"],
    ["another head", index.help.control_effect, (row) => signed(rows[row][5]), "number"],
    ["random", null, (row) => signed(rows[row][6]), "number"],
    ["KL", index.help.causal_kl, (row) => number(rows[row][7]), "number"],
  ];
  const made = tablePanel("When its activation is set", columns, rows.length);
  return el("details", { class: "interventions" }, el("summary", {}, "ablated, patched, steered"), made);
}

/** Scores of all behaviours tested, against their thresholds, and the case that shows a found one best. */
function behavioursPanel(detail) {
  if (!detail.behaviours.length) return nothing();
  const tested = detail.behaviours.filter(({ cases, score }) => cases > 0 && score > 0.005);
  const line = (entry) =>
    el(
      "li",
      { class: entry.found ? "found" : "", title: `${plural(entry.cases, "case")}; found from ${number(entry.threshold)}` },
      el("span", {}, behaviourName(entry.name)),
      el("span", { class: "meter" }, el("i", { "width%": percentOf(Math.min(entry.score, 1)) }), el("b", { "--at": percentOf(entry.threshold) })),
      el("span", { class: "value" }, number(entry.score)),
      entry.tokens ? behaviourCase(entry) : null,
    );
  const none = el("p", { class: "none" }, "None of the behaviours tested has a score above 0.");
  const made = panel("Known behaviours", help("behaviours"), tested.length ? el("ol", { class: "behaviours" }, ...tested.map(line)) : none);
  made.classList.add("first");
  return made;
}

/** The case that shows it best: the query and the tokens read most there in sight, the rest behind gaps that open. */
function behaviourCase({ tokens, query, keys }) {
  const line = el("p", { class: "case" });
  const shown = new Set();
  const add = (position, [before, behind]) => {
    for (let near = position - before; near <= position + behind; near += 1) shown.add(near);
  };
  add(query, QUERY_CONTEXT);
  keys.slice(0, KEYS_SHOWN).forEach((key) => add(key, KEY_CONTEXT));
  const span = (at) => wordSpan(at, vocab[tokens[at]], at === query ? "query" : keys.includes(at) ? "key" : "");
  const fill = (kept) => {
    line.replaceChildren();
    fillLine(line, 0, tokens.length, kept, span, () => fill(null));
  };
  fill(closeGaps(shown, 0, tokens.length));
  return line;
}

function relationsPanels(detail) {
  const held = Object.keys(RELATIONS).filter((name) => detail.relations[name]?.length);
  return held.map((name) => relationPanel(name, detail.relations[name]));
}

function relationPanel(name, entries) {
  // statistics have a share of the examples, the rest a strength of its own: bars of either are to their own scale
  const size = ([, , value, share]) => Math.abs(share ?? value);
  const largest = (entry) => Math.max(...entries.filter(([, , , share]) => (share === null) === (entry[3] === null)).map(size), 1e-9);
  // tokens and distances come ranked apart: together they stand by their share, before what has none
  const ordered = [...entries].sort((a, b) => (a[3] === null) - (b[3] === null) || (a[3] === null ? 0 : size(b) - size(a)));
  const said = ([, , value, share]) => (share === null ? number(value) : percent(share));
  const lift = ([other, , value, share]) => (share === null || other.startsWith("offset") ? "" : `, ${number(value)} times the base rate`);
  const named = ([other, label]) => {
    const place = placeOf.get(other);
    // many features share the label of their dictionary; tokens and distances are their labels
    const numbered = /^(feature|lorsa)\./.test(other);
    const shown = label === null || numbered ? el("span", {}, el("code", {}, other), label === null ? null : el("small", {}, ` ${vocab[label]}`)) : pill(vocab[label]);
    return place === undefined ? shown : el("a", { href: `#${other}` }, shown);
  };
  const line = (entry) =>
    el("li", { title: `${entry[0]}${lift(entry)}` }, el("i", { class: entry[2] < 0 ? "minus" : "plus", "width%": percentOf(size(entry) / largest(entry)) }), named(entry), el("span", {}, said(entry)));
  return panel(RELATIONS[name], help(`relation_${name}`), el("ol", { class: "relations" }, ...ordered.map(line)));
}

function familyPanel(place) {
  const own = units.family[place];
  if (own === null) return nothing();
  const { name, label, overlap, read_rank, write_rank, trust, units: members } = index.cards.families[own];
  const others = members.filter((id) => id !== units.id[place] && placeOf.has(id));
  const made = panel(
    `Family ${name.replace("family.", "")}`,
    help("family"),
    el("p", { class: "hint" }, label === null ? "" : `Reads ${vocab[label]}. `, `${plural(members.length, noun)} that look at the same tokens (overlap ${number(overlap)}), each reading and writing one direction: together ${number(read_rank)} dimensions read and ${number(write_rank)} written, of ${number(members.length)} if no two were alike.`),
    trust.causal_effect ? el("p", { class: "hint" }, "Removed together: ", ...["causal_effect", "gradient_effect", "causal_kl"].filter((measure) => trust[measure]).map((measure) => measureSaid(measure, trust[measure], trust))) : null,
    el("div", { class: "siblings" }, ...others.slice(0, SIBLINGS_SHOWN).map((id) => memberLink(placeOf.get(id)))),
  );
  made.classList.add("family");
  return made;
}

function memberLink(place) {
  const [fires] = units.fires[place];
  return el("a", { href: `#${units.id[place]}`, class: units.dead[place] ? "dead" : "" }, shortId(place), fires === undefined ? null : pill(vocab[fires]));
}

/** How many units of each kind and layer show each behaviour; a number leads to those units in the list. */
function behavioursSummary() {
  const { found, behaviours } = index.cards;
  if (!found.length) return nothing();
  const places = [...new Set(found.map(([layer, kind]) => JSON.stringify([layer, kind])))].map((text) => JSON.parse(text));
  places.sort(([a, one], [b, other]) => a - b || (one < other ? 1 : -1));
  const counts = new Map(found.map(([layer, kind, behaviour, count, tested]) => [JSON.stringify([layer, kind, behaviour]), [count, tested]]));
  const cell = (layer, kind) => (row) => {
    const entry = counts.get(JSON.stringify([layer, kind, row]));
    if (!entry) return MISSING;
    const [count, tested] = entry;
    const show = () => listOnly({ behaviour: behaviours[row], ...(byId("kind") ? { kind } : {}), ...(byId("layer") && layer !== null ? { layer: String(layer) } : {}) });
    return el("span", {}, count ? el("button", { type: "button", class: "plain link", onclick: show }, number(count)) : "0", el("small", {}, ` of ${number(tested)}`));
  };
  const columns = [["behaviour", null, (row) => behaviourName(row)], ...places.map(([layer, kind]) => [`${kindName(kind)}s${layer === null ? "" : `, layer ${layer}`}`, null, cell(layer, kind), "number"])];
  const made = tablePanel("Known behaviours", columns, behaviours.length);
  made.querySelector("h3").append(help("behaviours"));
  return made;
}

function familiesSummary() {
  const { families, familiesShown } = index.cards;
  if (!families.length) return nothing();
  const largest = families.slice(0, familiesShown);
  const columns = [
    ["family", null, (row) => largest[row].name.replace("family.", "")],
    ["in words", null, (row) => (largest[row].label === null ? MISSING : vocab[largest[row].label]), "words"],
    ["members", null, (row) => number(largest[row].units.length), "number"],
    ["overlap", index.help.family_overlap, (row) => number(largest[row].overlap), "number"],
    ["reads", index.help.family_rank, (row) => number(largest[row].read_rank), "number"],
    ["writes", index.help.family_rank, (row) => number(largest[row].write_rank), "number"],
    ["most active", null, (row) => el("a", { href: `#${largest[row].units[0]}` }, largest[row].units[0])],
  ];
  const made = tablePanel(families.length > familiesShown ? `Families: the ${familiesShown} largest of ${number(families.length)}` : "Families", columns, largest.length);
  made.querySelector("h3").append(help("family"));
  return made;
}
