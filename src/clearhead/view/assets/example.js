// One example: tokens tinted by activation; when it is active, its sources tinted by share and joined by arcs.

const AROUND_QUERY = 14;
const AROUND_SOURCE = 2;
const WORTH_SHOWING = 0.04;

/**
 * The card of one example. `read` maps a block position to its token text, `peak` is the unit's largest |activation|,
 * `whole` shows every token instead of those around the query and its larger sources.
 */
function exampleCard(example, read, peak, whole) {
  const card = el("article", { class: "example", tabindex: 0, role: "group" });
  const state = { card, example, read, peak, whole, pattern: mainPattern(example), chosen: null, tokens: new Map() };
  const share = peak > 0 ? Math.min(Math.abs(example.activation) / peak, 1) : 0;
  card.append(
    el("div", { class: "score" }, number(example.activation), el("div", { class: "track" }, el("i", { "width%": percentOf(share) })), preActivation(state)),
    el("div", { class: "body" }, el("div", { class: "tokens" }), el("div", { class: "sources" })),
  );
  const word = read(example.position);
  card.setAttribute("aria-label", `Activation ${number(example.activation)} at ${quoted(word)}, ${vocab[example.document]}`);
  fillTokens(state);
  fillSources(state);
  card.addEventListener("mouseenter", () => activate(state));
  card.addEventListener("focusin", () => activate(state));
  card.addEventListener("click", () => activate(state));
  card.addEventListener("keydown", (event) => moveInCard(event, state));
  cards.set(card, state);
  return card;
}

/** The sum of the pattern where it is not the activation itself: below the threshold, or cut off by the top K. */
function preActivation({ example, pattern, peak }) {
  if (!pattern || Math.abs(pattern.sum - example.activation) <= 0.005 * peak) return null;
  return el("div", { class: "pre", "data-tip": index.help.row_sum }, `pre ${number(pattern.sum)}`);
}

const cards = new WeakMap();

/** The pattern of the token the example is about. */
function mainPattern(example) {
  const query = example.position - example.start;
  return example.patterns.find((pattern) => pattern.query === query) ?? example.patterns[0] ?? null;
}

/** Sources of a pattern with their signed share of Σ|w|, in the order of the atlas. */
function sharesOf(pattern) {
  const total = pattern.weights.reduce((sum, weight) => sum + Math.abs(weight), Math.abs(pattern.rest));
  return pattern.keys.map((key, place) => ({ key, place, weight: pattern.weights[place], share: total ? pattern.weights[place] / total : 0 }));
}

function fillTokens(state) {
  const { card, example, read, whole } = state;
  const line = card.querySelector(".tokens");
  const shown = whole ? null : positionsWorthShowing(state);
  const warmth = new Map(example.active.map((offset, place) => [example.start + offset, example.values[place]]));
  state.tokens.clear();
  line.replaceChildren(svg("svg", { class: "arcs", "aria-hidden": "true" }));
  for (const key of sourcesElsewhere(state)) line.append(tokenSpan(state, key, read(key) ?? `position ${key}`, 0, "elsewhere"));
  const span = (position) => tokenSpan(state, position, read(position), warmth.get(position) ?? 0, "");
  const open = () => {
    state.whole = true;
    fillTokens(state);
    activate(state);
  };
  fillLine(line, example.start, example.start + example.length, shown, span, open);
}

/** Keys before the first token shown; every pattern's, so that each arc has a foot. */
function sourcesElsewhere({ example }) {
  const keys = new Set(example.patterns.flatMap((pattern) => pattern.keys.filter((key) => key < example.start)));
  return [...keys].sort((a, b) => a - b);
}

/** Positions around the query, around larger sources and around strong activations; short gaps are closed. */
function positionsWorthShowing({ example, peak }) {
  const shown = new Set();
  const add = (position, around) => {
    for (let near = position - around; near <= position + around; near += 1) shown.add(near);
  };
  add(example.position, AROUND_QUERY);
  for (const pattern of example.patterns) {
    add(example.start + pattern.query, AROUND_SOURCE);
    for (const { key, share } of sharesOf(pattern)) add(key, Math.abs(share) >= WORTH_SHOWING ? AROUND_SOURCE : 0);
  }
  example.active.forEach((offset, place) => Math.abs(example.values[place]) > peak / 4 && add(example.start + offset, AROUND_SOURCE));
  return closeGaps(shown, example.start, example.start + example.length);
}

function tokenSpan(state, position, text, activation, kind) {
  const span = wordSpan(position, text, kind);
  if (activation) {
    const fraction = Math.min(Math.abs(activation) / (state.peak || 1), 1);
    span.style.setProperty("--warmth", percentOf(0.12 + 0.6 * fraction));
  }
  const said = tokenTip(state, position, text, activation);
  if (said) span.dataset.tip = said;
  const own = state.example.patterns.find((pattern) => state.example.start + pattern.query === position);
  if (own) span.addEventListener("mouseenter", () => own !== state.pattern && activate(state, own));
  state.tokens.set(position, span);
  return span;
}

/** Numbers of a token that is active or a source; nothing for the others, so that no tip covers the text. */
function tokenTip(state, position, text, activation) {
  const source = state.pattern && sharesOf(state.pattern).find(({ key }) => key === position);
  if (!activation && !source) return "";
  const lines = [`${quoted(text)} at position ${position}`];
  if (activation) lines.push(`activation ${number(activation)}`);
  if (source) lines.push(`contributes ${signed(source.weight)} (${signed(source.share, percent)})`);
  return lines.join("\n");
}

function fillSources({ card, example, read, pattern }) {
  const line = card.querySelector(".sources");
  line.replaceChildren();
  if (pattern) {
    const list = el("span", { class: "list-of" });
    for (const source of sharesOf(pattern).sort((a, b) => Math.abs(b.share) - Math.abs(a.share))) {
      const item = el(
        "span",
        { class: "source", "data-source": source.place, onmouseenter: () => singleOut(card, source.place), onmouseleave: () => singleOut(card, null) },
        pill(read(source.key) ?? `position ${source.key}`),
        el("span", { class: source.share < 0 ? "subtracts" : "adds" }, signed(source.share, percent)),
      );
      list.append(item);
    }
    if (pattern.rest) list.append(el("span", { class: "rest" }, `other tokens ${signed(pattern.rest)}`));
    line.append(list);
  }
  const from = vocab[example.document];
  line.append(el("span", { class: "from", title: from }, from), el("span", { class: "place" }, `${example.block}:${example.position}`));
}

let active = null;

/** Make this the one example whose sources are drawn. */
function activate(state, pattern = state.pattern) {
  if (active && active !== state) quieten(active);
  if (state.pattern !== pattern) {
    state.pattern = pattern;
    fillSources(state);
  }
  active = state;
  state.card.classList.add("active");
  drawActive();
}

function quieten({ card, tokens }) {
  card.classList.remove("active");
  card.querySelector(".arcs").replaceChildren();
  for (const span of tokens.values()) span.classList.remove("adds", "subtracts", "query");
}

/** Tints and arcs of the active example; again after anything that moves its tokens. */
function drawActive() {
  if (!active || !active.card.isConnected) return;
  const { card, example, pattern, tokens } = active;
  for (const span of tokens.values()) span.classList.remove("adds", "subtracts", "query");
  const query = tokens.get(pattern ? example.start + pattern.query : example.position);
  query?.classList.add("query");
  if (!pattern || !query) return;
  const sources = sharesOf(pattern).map((source) => ({ ...source, token: tokens.get(source.key) }));
  for (const { token, share } of sources) {
    token.classList.add(share < 0 ? "subtracts" : "adds");
    token.style.setProperty("--share", percentOf(0.06 + 0.5 * Math.abs(share)));
  }
  drawArcs(card.querySelector(".arcs"), query, sources);
}

/** Up and down: another example. Left and right: one source at a time, spoken. */
function moveInCard(event, state) {
  const along = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  if (along) {
    state.card[along]?.focus();
    event.preventDefault();
  }
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step && state.pattern?.keys.length) {
    const sources = sharesOf(state.pattern);
    const next = state.chosen === null ? (step > 0 ? 0 : sources.length - 1) : state.chosen + step;
    state.chosen = (next + sources.length) % sources.length;
    singleOut(state.card, state.chosen);
    const { key, share } = sources[state.chosen];
    byId("spoken").textContent = `${quoted(state.read(key) ?? `position ${key}`)} ${signed(share, percent)}`;
    event.preventDefault();
  }
}

/** Show one source alone, or all again with null. */
function singleOut(card, place) {
  for (const path of card.querySelectorAll(".arcs path")) {
    path.classList.toggle("faded", place !== null && Number(path.dataset.source) !== place);
  }
  for (const source of card.querySelectorAll(".source")) {
    source.classList.toggle("chosen", Number(source.dataset.source) === place);
  }
}
