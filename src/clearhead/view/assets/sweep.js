// A sweep over checkpoints: heads in the list, all heads' curves in the summary, and a view of one head over training.

const { heads } = index;
const placeOf = new Map(heads.id.map((id, place) => [id, place]));
const thousandths = (value) => (value === null ? MISSING : value.toFixed(3).replace("-", MINUS));

const listed = {
  noun: "head",
  ids: heads.id,
  columns: heads,
  sorts: {
    fall: { label: "Fall of S", write: thousandths },
    last: { label: "S, last checkpoint", write: thousandths, up: true },
    induction: { label: "Induction", write: thousandths },
    previous: { label: "Previous token", write: thousandths },
    sink: { label: "First token", write: thousandths },
    firings: { label: "Firings", write: number },
  },
  filters: [choice("layer", "layer", heads.layer, (layer) => `layer ${layer}`)],
  search: {
    hint: "Head…",
    label: "Search by head",
    about: "Finds heads by layer and number, as in 1.3.",
    text: (place) => `head ${heads.name[place]}`,
    exact: (text) => placeOf.get(text) ?? placeOf.get(`head.${text}`),
  },
  total: () => [heads.id.length, "head"],
  name: (place) => [`head ${heads.name[place]}`, heads.last[place] === null ? el("span", { class: "tag dead" }, "never fires") : el("span", { class: "tag" }, `S ${thousandths(heads.last[place])}`)],
  does: (place) => [el("span", {}, `S ${thousandths(heads.first[place])} → ${thousandths(heads.last[place])}, rotated ${thousandths(heads.rotated[place])}`)],
};

function openNamed(name) {
  const place = placeOf.get(name);
  if (place === undefined) return false;
  chooseInList(place);
  showHead(place);
  return true;
}

const settle = () => {};
const notes = () => ({ leftOut: "", keys: [] });
const chartPanel = (spec) => panel(spec.title, explain(spec.help, spec.title), chart(spec, spec.title));

function showSummary() {
  const view = byId("view");
  view.replaceChildren(
    el(
      "div",
      { class: "summary" },
      el("h1", {}, index.title),
      el("p", { class: "lead" }, `${number(index.checkpoints)} checkpoints, measured at the pairs that fire in the last one. Choose a head from the list to see it beside rotated bases.`),
      el("div", { class: "charts" }, ...index.charts.map(chartPanel)),
    ),
  );
  view.scrollTop = 0;
  redrawCharts();
}

async function showHead(place) {
  const charts = await part("heads", place);
  if (placeOf.get(decodeURIComponent(location.hash.slice(1))) !== place) return;
  const figure = (name, label, value, small = "") => bigNumber(label, value, help(name, label), small);
  const view = byId("view");
  view.replaceChildren(
    el(
      "div",
      { class: "summary" },
      el("div", { class: "title" }, el("h1", {}, `head ${heads.name[place]}`), el("div", { class: "tags" }, el("span", { class: "tag" }, `layer ${heads.layer[place]}`)), moves()),
      heads.pairs[place] === 0 ? notice("This head does not fire in the last checkpoint, so there are no pairs to follow.") : nothing(),
      el(
        "div",
        { class: "figures" },
        figure("sparsity", "S, last", thousandths(heads.last[place]), `first ${thousandths(heads.first[place])}`),
        figure("rotated", "S, rotated", thousandths(heads.rotated[place])),
        figure("span", "S, rotated spans", thousandths(heads.span[place])),
        figure("n_recon", "N_recon", number(heads.n_recon[place]), `rotated ${number(heads.rotated_n_recon[place])}`),
        figure("induction", "Induction", thousandths(heads.induction[place])),
        figure("pairs", "Pairs", number(heads.pairs[place])),
        figure("firings", "Firings", number(heads.firings[place])),
      ),
      el("div", { class: "charts" }, ...charts.map(chartPanel)),
    ),
  );
  view.scrollTop = 0;
  redrawCharts();
}
