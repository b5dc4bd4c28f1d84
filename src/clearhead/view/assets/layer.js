// The view of one layer: its heads, and how much of what they read they share.

async function showLayer(layer) {
  const view = byId("view");
  const detail = await layerDetail(layer);
  if (location.hash !== `#layer.${layer}`) return;
  const here = heads.id.map((_, place) => place).filter((place) => heads.layer[place] === layer);
  const at = index.layers.indexOf(layer);
  const step = (by, label, mark) => {
    const other = index.layers[at + by];
    return el("button", { type: "button", class: "plain", "aria-label": label, title: label, disabled: other === undefined, onclick: () => (location.hash = `layer.${other}`) }, mark);
  };
  const sides = Object.entries(detail.sides).sort(([a], [b]) => (a < b ? 1 : -1));
  view.replaceChildren(
    el(
      "div",
      { class: "layer" },
      el("div", { class: "title" }, el("h1", {}, `Layer ${layer}`), el("div", { class: "tags" }, el("span", { class: "tag" }, plural(here.length, "head"))), el("div", { class: "moves" }, step(-1, "Layer before", "‹"), step(1, "Next layer", "›"))),
      sharedLine(detail),
      panel("Heads of the layer", null, el("div", { class: "siblings" }, ...here.map(headLink))),
      sides.length ? el("div", { class: "charts" }, ...sides.map(([side, pairs]) => sharedPanel(side, pairs, here))) : notice("The atlas does not say what the heads of this layer share."),
    ),
  );
  view.scrollTop = 0;
}

function headLink(place) {
  const { mark, colour: fill, name } = verdictOf(place);
  const own = heads.sparsity[place];
  return el("a", { href: `#${heads.id[place]}`, "data-tip": `${name}${own === null ? "" : `\nS ${hundredths(own)}`}` }, verdictMark(mark, fill), shortId(place));
}

function sharedLine({ shared, by_chance: chance }) {
  if (shared === null) return nothing();
  return el("p", { class: "reasons" }, `${plural(shared, "mode")} of this layer ${shared === 1 ? "reads" : "read"} nearly the same pair of directions as a mode of another head; ${number(chance)} would by chance.`, " ", help("clusters", "shared modes"));
}

/** Heads against heads, shaded from the overlap of random spaces to the same space. */
function sharedPanel(side, { head_a: a, head_b: b, overlap, random }, here) {
  const names = here.map((place) => heads.head[place]);
  const pairs = new Map(a.flatMap((_, at) => [[`${a[at]},${b[at]}`, at], [`${b[at]},${a[at]}`, at]]));
  const chance = random.reduce((sum, value) => sum + value, 0) / (random.length || 1);
  const strength = (value) => Math.min(Math.max((value - chance) / (1 - chance || 1), 0), 1);
  const cellAt = (row, column) => {
    const pair = pairs.get(`${names[row]},${names[column]}`);
    if (pair === undefined) return null;
    return {
      text: names.length <= 12 ? hundredths(overlap[pair]).replace(/^0/, "") : "",
      tip: `heads ${names[row]} and ${names[column]}, ${side} side\noverlap ${number(overlap[pair])}, random ${number(random[pair])}`,
      strength: strength(overlap[pair]),
      open: () => (location.hash = heads.id[here[column]]),
    };
  };
  const title = `What they read: ${side} side`;
  const links = here.map((place) => ({ label: heads.head[place], href: `#${heads.id[place]}`, title: `Head ${shortId(place)}` }));
  return panel(
    title,
    help("shared", title),
    cellGrid({ rows: links, columns: names, corner: "head", label: `${title}, overlap of heads`, cellAt }),
    el("div", { class: "legend plain" }, shadeScale(`random ${hundredths(chance)}`, "1, the same")),
  );
}
