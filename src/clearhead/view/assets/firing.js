// One firing: the text with query and key marked and joined, its numbers, and the bars of what each mode contributes.

const AROUND_QUERY = 10;
const AROUND_KEY = 5;
const BAR_ROOM = 46;
const firingCards = new Set();

/**
 * The card of firing `at` of a head. `texts` maps prompts to {name, tokens}; `chosen` is the mode picked out, `pick` is
 * called with the mode whose bar is chosen, `whole` shows every token.
 */
function firingCard({ firings, modes, at, text, chosen, pick, whole }) {
  const [query, key, attention] = ["query", "key", "attention"].map((name) => firings[name][at]);
  const word = (position) => vocab[text.tokens[position]];
  const card = el("article", { class: "example firing", tabindex: 0, role: "group", "aria-label": `${quoted(word(query))} looks at ${quoted(word(key))} with ${percent(attention)} of its attention` });
  const line = el("div", { class: "tokens" });
  const state = { card, line, query, key, attention, text, whole };
  card.append(
    el("div", { class: "score", "data-tip": index.help.attention }, percent(attention), el("div", { class: "track" }, el("i", { "width%": percentOf(attention) }))),
    el("div", { class: "body" }, line, firingFacts(firings, at, text), contributionBars(firings, modes, at, chosen, pick)),
  );
  fillFiring(state);
  firingCards.add(state);
  return card;
}

function fillFiring(state) {
  const { line, query, key, text } = state;
  const end = text.tokens.length;
  const shown = new Set();
  for (const [place, around] of [[query, AROUND_QUERY], [key, AROUND_KEY]]) {
    for (let near = place - around; near <= place + around; near += 1) shown.add(near);
  }
  line.replaceChildren(svg("svg", { class: "arcs", "aria-hidden": "true" }));
  const span = (position) => {
    const kind = [position === query && "query", position === key && "key"].filter(Boolean).join(" ");
    const made = wordSpan(position, vocab[text.tokens[position]], kind);
    if (kind) made.dataset.tip = `${kind.replace(" ", " and ")}, position ${position}`;
    return made;
  };
  const open = () => {
    state.whole = true;
    fillFiring(state);
    drawFiringArcs();
  };
  fillLine(line, 0, end, state.whole ? null : closeGaps(shown, 0, end), span, open);
}

/** The arc of every firing in sight, again after anything that moves its tokens. */
function drawFiringArcs() {
  for (const state of firingCards) {
    const { card, line, query, key, attention } = state;
    if (!card.isConnected) {
      firingCards.delete(state);
      continue;
    }
    const token = (position) => line.querySelector(`[data-position="${position}"]`);
    drawArcs(line.querySelector(".arcs"), token(query), [{ token: token(key), share: attention }]);
  }
}

function firingFacts(firings, at, text) {
  const fact = (name, label, value) => el("span", { "data-tip": index.help[name] }, `${label} `, el("b", {}, value));
  const back = firings.query[at] - firings.key[at];
  return el(
    "div",
    { class: "facts" },
    fact("sparsity", "S", hundredths(firings.sparsity[at])),
    fact("n_recon", "N_recon", number(firings.n_recon[at])),
    fact("cancellation", "cancellation", number(firings.cancellation[at])),
    fact("largest_rank", "largest mode at", percent(firings.largest_rank[at])),
    fact("relative", "relative score", signed(firings.relative[at])),
    fact("score", "score", signed(firings.score[at])),
    el("span", { class: "from", title: text.name }, text.name),
    el("span", { class: "place" }, `${firings.query[at]} ← ${firings.key[at]}${back ? `, ${number(back)} back` : ", itself"}`),
  );
}

/** Signed bars around a line, largest first, then all other modes together; each chooses its mode. */
function contributionBars(firings, modes, at, chosen, pick) {
  const values = [...firings.contributions[at], firings.rest[at]];
  const names = [...firings.modes[at], null];
  const largest = Math.max(...values.map(Math.abs), 1e-12);
  const room = (sign) => Math.max(...values.map((value) => (value * sign > 0 ? Math.abs(value) : 0)));
  const write = (value) => signed(value, largest >= 1 ? hundredths : number);
  const bars = el("div", { class: "bars", role: "list", "aria-label": "Contributions by mode", "--up": `${(BAR_ROOM * room(1)) / largest}px`, "--down": `${(BAR_ROOM * room(-1)) / largest}px` });
  values.forEach((value, place) => {
    const mode = names[place];
    const known = modes.find((one) => one.mode === mode);
    const attributes = { role: "listitem", class: `mode-bar ${mode === null ? "others" : value < 0 ? "subtracts" : "adds"} ${mode !== null && mode === chosen ? "chosen" : ""}`, "data-tip": barTip(firings, at, place, mode, known) };
    const column = [
      el("span", { class: "above" }, value >= 0 ? write(value) : "", el("i", { "--height": `${value > 0 ? (BAR_ROOM * value) / largest : 0}px` })),
      el("span", { class: "below" }, el("i", { "--height": `${value < 0 ? (-BAR_ROOM * value) / largest : 0}px` }), value < 0 ? write(value) : ""),
      el("span", { class: "name" }, ...(mode === null ? ["others"] : [`${mode}`])),
    ];
    bars.append(mode === null ? el("span", attributes, ...column) : el("span", attributes, el("button", { type: "button", "data-mode": mode, "aria-label": `Mode ${mode} contributes ${signed(value)}; show firings by it`, onclick: () => pick(mode) }, ...column)));
  });
  return bars;
}

function barTip(firings, at, place, mode, known) {
  const value = firings.contributions[at][place] ?? firings.rest[at];
  const share = firings.relative[at] ? `, ${signed(value / firings.relative[at], percent)} of the relative score` : "";
  if (mode === null) return `all other modes: ${signed(value)}${share}`;
  const held = firings.query_side[at][place];
  const words = (tokens) => tokens.slice(0, 4).map(([token]) => quoted(vocab[token])).join(" ");
  const lines = [`mode ${mode}: ${signed(value)}${share}`, `the query holds ${signed(held)} of its direction, the key ${held ? signed(value / held) : MISSING} more than the other keys`];
  for (const side of ["query", "key"]) if (known?.[side].length) lines.push(`${side}: ${words(known[side])}`);
  return lines.join("\n");
}
