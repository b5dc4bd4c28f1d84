// The view of one unit: what it does in a line, its numbers, its examples, and the panels beside them.

const CATEGORIES = { top: "Top", quantile: "Quantiles", negative: "Negatives" };
const SIBLINGS_SHOWN = 60;
const shown = { category: "top", whole: false };

async function showUnit(place) {
  const view = byId("view");
  const detail = await detailOf(place);
  if (placeOf.get(decodeURIComponent(location.hash.slice(1))) !== place) return;
  const examples = el("section", { class: "panel examples", "aria-label": "Examples" });
  view.replaceChildren(
    limitsNotice(),
    el(
      "div",
      { class: "unit" },
      unitTitle(place),
      unitSentence(place),
      explanationLines(detail),
      unitFigures(place),
      trustLine(detail),
      el(
        "div",
        { class: "columns" },
        examples,
        el("div", { class: "aside" }, behavioursPanel(detail), logitsPanel(detail), ...relationsPanels(detail), familyPanel(place), histogramPanel(detail), sharesPanel(detail), groupPanel(place)),
      ),
    ),
  );
  view.scrollTop = 0;
  await fillExamples(examples, place, detail);
  // after the text, for starting plotly takes longer than all the rest
  redrawCharts();
}

/** What the page leaves out to stay small, in words; nothing when it holds all examples. */
function limitsNotice() {
  const { examples, held } = index.limits;
  if (examples === null) return nothing();
  const most = Math.max(...Object.values(held));
  const text = `To stay small this page holds the first ${examples} of up to ${most} examples of each kind per ${noun}; the atlas holds all.`;
  return notice(text);
}

function unitTitle(place) {
  const tags = [];
  if (units.dead[place]) tags.push(el("span", { class: "tag dead" }, "dead"));
  tags.push(...behaviourTags(place));
  if (units.group[place] !== null) tags.push(el("span", { class: "tag" }, `QK group ${units.group[place]}`));
  if (spans(place)) tags.push(el("span", { class: "tag" }, `spans ${number(units.participation_output[place])} original heads`));
  else if (units.host[place] !== null) tags.push(el("span", { class: "tag" }, `mostly original head ${units.host[place]}`));
  return el(
    "div",
    { class: "title" },
    el("h1", {}, `${kindName(units.kind[place])} `, el("code", {}, units.id[place].slice(units.kind[place].length + 1))),
    el("div", { class: "tags" }, ...tags),
    moves(),
  );
}

/** Fires on …, reading …, and raises …: the most frequent three of each. */
function unitSentence(place) {
  const line = el("p", { class: "sentence" });
  const say = (words, entries, after = null) => {
    if (entries.length) line.append(el("span", {}, words), ...entries.slice(0, 3).map((entry) => pill(vocab[entry])), after ?? "");
  };
  const distance = units.distance[place];
  const back = distance === null ? null : el("span", {}, distance ? `typically ${plural(distance, "token")} back` : "typically the token itself");
  say("Fires on", units.fires[place]);
  say("reading", units.reads[place], back);
  say("raises", units.raises[place]);
  return line;
}

function unitFigures(place) {
  const active = units.n_active[place];
  const entries = [
    ["rate", "Rate", percent(units.rate[place]), active === null ? "" : plural(active, "token")],
    ["max_activation", "Max", number(units.max_activation[place]), ""],
    ["mean_activation", "Mean", number(units.mean_activation[place]), ""],
    ["participation", "Participation", number(units.participation_output[place]), "heads"],
    ["logit", "Largest logit", signed(units.logit[place]), ""],
    ["decoder_norm", "Decoder norm", number(units.decoder_norm[place]), ""],
  ];
  return el("div", { class: "figures" }, ...entries.map(([name, label, value, small]) => bigNumber(label, value, help(name, label), small)));
}

async function fillExamples(panel, place, detail) {
  const held = Object.keys(CATEGORIES).filter((category) => detail.examples[category].length);
  const category = held.includes(shown.category) ? shown.category : held[0];
  const again = (change) => {
    Object.assign(shown, change);
    fillExamples(panel, place, detail);
  };
  const cardsShown = category ? await exampleCards(place, detail.examples[category]) : [];
  panel.replaceChildren(
    el(
      "header",
      {},
      el("div", { class: "tabs", role: "group", "aria-label": "Kind of example" }, ...Object.entries(CATEGORIES).map(([name, label]) => tab(name, label, detail, category, again))),
      category ? help(category) : null,
      el("div", { class: "options" }, wholeSwitch(again)),
    ),
    category ? legend() : el("p", { class: "none" }, units.dead[place] ? `This ${noun} was never active on the tokens analysed, so there is nothing to show.` : "The atlas holds no examples of it."),
    el("div", { class: "cards" }, ...cardsShown),
  );
  if (cardsShown.length) activate(cards.get(cardsShown[0]));
}

function tab(name, label, detail, current, again) {
  const count = detail.examples[name].length;
  return el(
    "button",
    { type: "button", "data-category": name, "aria-pressed": String(name === current), disabled: !count, onclick: () => again({ category: name }) },
    `${label} ${count}`,
  );
}

function wholeSwitch(again) {
  const box = el("input", { type: "checkbox", id: "whole", checked: shown.whole, onchange: () => again({ whole: box.checked }) });
  return el("label", {}, box, "Full context");
}

function legend() {
  return el(
    "div",
    { class: "legend" },
    el("span", {}, el("i", { class: "heat" }), "activation"),
    el("span", {}, el("i", { class: "plus" }), "adds (+)"),
    el("span", {}, el("i", { class: "minus" }), "subtracts (−)"),
    el("span", {}, "sources: the z pattern", help("z_pattern")),
  );
}

async function exampleCards(place, examples) {
  const readers = await Promise.all(examples.map((example) => readerOf(example.block)));
  const peak = Math.abs(units.max_activation[place] ?? 0);
  return examples.map((example, at) => exampleCard(example, readers[at], peak, shown.whole));
}

function logitsPanel(detail) {
  if (!detail.raised.length) return nothing();
  const largest = Math.max(...[...detail.raised, ...detail.lowered].map(([, value]) => Math.abs(value)), 1e-9);
  const column = (name, label, entries) =>
    el(
      "div",
      { class: name },
      el("h4", {}, label),
      el("ol", {}, ...entries.map(([token, value]) => el("li", {}, el("i", { "width%": percentOf(Math.abs(value) / largest) }), pill(vocab[token]), el("span", {}, signed(value))))),
    );
  const box = panel("Effect on logits", help("logits"), el("div", { class: "logits" }, column("raised", "Raised", detail.raised), column("lowered", "Lowered", detail.lowered)));
  box.classList.add("first");
  return box;
}

function histogramPanel(detail) {
  if (!detail.counts.some((count) => count > 0)) return nothing();
  const spec = structuredClone(index.templates.histogram);
  const edges = detail.edges;
  Object.assign(spec.data[0], {
    x: detail.counts.map((_, bin) => (edges[bin] + edges[bin + 1]) / 2),
    y: detail.counts,
    width: detail.counts.map((_, bin) => edges[bin + 1] - edges[bin]),
  });
  return panel("Activations", help("histogram"), chart(spec, "Histogram of activations"));
}

function sharesPanel(detail) {
  const formulas = ["output", "weights", "routing"];
  if (!formulas.some((formula) => detail.shares[formula].some((share) => share !== 0))) return nothing();
  const spec = structuredClone(index.templates.shares);
  formulas.forEach((formula, place) => {
    const shares = detail.shares[formula];
    Object.assign(spec.data[place], { x: shares.map((_, head) => head), y: shares });
  });
  if (detail.shares.output.length > 16) delete spec.layout.xaxis.dtick;
  return panel("Share over original heads", help("shares"), chart(spec, "Share over the original heads by three formulas"));
}

function groupPanel(place) {
  const group = units.group[place];
  if (group === null) return nothing();
  const same = (other) => units.group[other] === group && units.layer[other] === units.layer[place] && units.kind[other] === units.kind[place];
  const members = units.id.map((_, other) => other).filter((other) => same(other) && other !== place);
  members.sort((a, b) => (units.max_activation[b] ?? -1) - (units.max_activation[a] ?? -1));
  const showAll = () => {
    const held = (name) => (byId(name) ? { [name]: String(units[name][place]) } : {});
    listOnly({ group: String(group), ...held("layer"), ...held("kind") });
  };
  return panel(
    `QK group ${group}`,
    help("group"),
    el("p", { class: "hint" }, `${plural(members.length, `other ${noun}`)} with the same attention pattern, most active first.`),
    el("div", { class: "siblings" }, ...members.slice(0, SIBLINGS_SHOWN).map(memberLink)),
    el("button", { type: "button", class: "more", onclick: showAll }, "Show the group in the list"),
  );
}
