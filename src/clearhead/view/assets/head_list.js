// What the list shows of heads: sorts, filters, and the row of one head; and where addresses lead.

const BEHAVES = { induction: "induction", previous: "previous token", duplicate: "duplicate token", sink: "first token" };
const BEHAVES_FROM = 0.3;
/** The behaviours of a head whose mean attention is at least `BEHAVES_FROM`. */
const behaviours = (place) => Object.keys(BEHAVES).filter((name) => heads[name][place] >= BEHAVES_FROM);

const listed = {
  noun: "head",
  ids: heads.id,
  columns: heads,
  sorts: { ...Object.fromEntries(heldMeasures.map((name) => [name, MEASURES[name]])), layer: { label: "Layer and head", write: number, up: true } },
  filters: [
    {
      name: "verdict",
      label: "Verdict",
      options: [["", "any verdict"], ...index.verdicts.map(({ name, count }, place) => [String(place), `${name} (${count})`])],
      keeps: (place, value) => String(heads.verdict[place]) === value,
    },
    choice("layer", "layer", heads.layer, (layer) => `layer ${layer}`),
    {
      name: "behaviour",
      label: `Behaviour: mean attention of at least ${BEHAVES_FROM}`,
      options: [["", "any behaviour"], ...Object.entries(BEHAVES).filter(([name]) => heads[name].some((value) => value >= BEHAVES_FROM))],
      keeps: (place, value) => heads[value][place] >= BEHAVES_FROM,
    },
    {
      name: "fires",
      label: "With or without firings",
      options: [["", "with or without firings"], ["yes", "with firings"], ["no", "without firings"]],
      keeps: (place, value) => heads.n_firings[place] > 0 === (value === "yes"),
    },
  ],
  search: {
    hint: "Token or head…",
    label: "Search by token near the leading modes, or by head as in 5.3",
    about: "Finds heads whose leading modes have the text among their nearest tokens, on the query or the key side, or whose name (5.3) does. Case is ignored.",
    text: (place) => [shortId(place), ...[...heads.query_tokens[place], ...heads.key_tokens[place]].map((entry) => vocab[entry])].join("\n"),
    exact: (text) => headAt.get(text) ?? placeOf.get(text),
  },
  total: () => [heads.id.length, "head"],
  name: (place) => [shortId(place), verdictTag(verdictOf(place))],
  does: sparsityLine,
};

/** S of a head with the controls' beside it; the first two in sight, all of them in the tip. */
function sparsityLine(place) {
  if (heads.sparsity[place] === null) return [el("span", {}, heads.n_sink[place] ? "fires on the first token only" : "never fires")];
  const under = controlNames.filter((name) => heads[`under_${name}`][place] !== null);
  const beside = under.slice(0, 2).map((name) => `${name} ${hundredths(heads[`under_${name}`][place])}`);
  return [el("b", {}, `S ${hundredths(heads.sparsity[place])}`), el("span", {}, beside.length ? `· ${beside.join(" · ")}` : "no control")];
}

/** `head.5.3`, `mode.5.3.0` (the head, its firings by that mode) and `layer.5`. */
function openNamed(name) {
  const [kind, ...numbers] = name.split(".");
  const place = headAt.get(numbers.slice(0, 2).join("."));
  if (kind === "layer" && numbers.length === 1 && index.layers.includes(Number(numbers[0]))) {
    chooseInList(null);
    showLayer(Number(numbers[0]));
    return true;
  }
  if (place === undefined || !((kind === "head" && numbers.length === 2) || (kind === "mode" && numbers.length === 3))) return false;
  chooseInList(place);
  showHead(place, kind === "mode" ? Number(numbers[2]) : null);
  return true;
}

const settle = () => drawFiringArcs();

function notes() {
  const leftOut = limitsText();
  return { leftOut, keys: [[["↑", "↓", "←", "→"], "cells of a map"], [["Enter"], "open"]] };
}

/** What the page leaves out to stay small, in words; "" when it holds every firing of the atlas. */
function limitsText() {
  const { firings, most, held } = index.limits;
  if (firings === null || most <= firings) return "";
  return `To stay small this page holds at most ${firings} firings of each head, evenly from the strongest to the weakest attention; the atlas holds ${number(held)}, up to ${number(most)} of one head. No number depends on this.`;
}
