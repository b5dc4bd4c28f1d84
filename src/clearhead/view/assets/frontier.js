// Several sparse runs: runs in the list, the frontier in the summary, and a view of one run's numbers.

const { runs } = index;
const placeOf = new Map(runs.id.map((id, place) => [id, place]));
const nats = (value) => signed(value, (size) => size.toFixed(4));

const listed = {
  noun: "run",
  ids: runs.id,
  columns: runs,
  sorts: {
    per_query: { label: "Edges per query", write: number, up: true },
    rise: { label: "Rise of the loss", write: nats, up: true },
    tolerance: { label: "Tolerance", write: number, up: true },
  },
  filters: [choice("kind", "kind", runs.kind, (kind) => kind), choice("tolerance", "tolerance", runs.tolerance, (tolerance) => `tolerance ${tolerance}`)],
  search: { hint: "Run…", label: "Search by run", about: "Finds runs by the name of their directory.", text: (place) => runs.run[place], exact: (text) => placeOf.get(text) },
  total: () => [runs.id.length, "run"],
  name: (place) => [runs.run[place], el("span", { class: "tag" }, runs.kind[place])],
  does: (place) => [el("span", {}, `${percent(runs.share[place])} open · ${nats(runs.rise[place])} nats`)],
};

function openNamed(name) {
  const place = placeOf.get(name);
  if (place === undefined) return false;
  chooseInList(place);
  showRun(place);
  return true;
}

const settle = () => {};
const notes = () => ({ leftOut: "", keys: [] });

function showSummary() {
  const charts = index.charts.map((spec) => panel(spec.title, explain(spec.help, spec.title), chart(spec, spec.title)));
  if (charts.length % 2) charts[0].classList.add("whole");
  const at = (name, write) => [name === "per_query" ? "edges/query" : name.replaceAll("_", " "), index.help[name], (row) => write(runs[name][row])];
  const oracle = (label, name) => [label, index.help[name], (row) => nats(runs[name][row])];
  const table = tablePanel(
    "Runs",
    [
      ["run", "", (row) => el("a", { href: `#${runs.id[row]}` }, runs.run[row])],
      ["kind", "", (row) => runs.kind[row]],
      ["tolerance", "", (row) => (runs.kind[row] === "sparse" ? number(runs.tolerance[row]) : MISSING)],
      ["seed", "", (row) => number(runs.seed[row])],
      at("per_query", number),
      at("share", percent),
      at("rise", nats),
      oracle("base, top of row", "top_in_row_base"),
      oracle("base, top of head", "top_probability_base"),
      at("empty_rows", percent),
      at("leak", percent),
    ],
    runs.id.length,
  );
  const view = byId("view");
  view.replaceChildren(
    el(
      "div",
      { class: "summary sparse" },
      el("h1", {}, index.title),
      el("p", { class: "lead" }, "Sparse runs of one model, measured on the same held-out text. Choose a run from the list for its numbers."),
      el("div", { class: "verdict" }, ...index.verdict.map((text) => el("p", {}, text))),
      el("div", { class: "charts" }, ...charts, table),
    ),
  );
  view.scrollTop = 0;
  redrawCharts();
}

function showRun(place) {
  const figure = (name, label, write, small = "") => bigNumber(label, write(runs[name][place]), help(name, label), small);
  const view = byId("view");
  view.replaceChildren(
    el(
      "div",
      { class: "summary sparse" },
      el("div", { class: "title" }, el("h1", {}, runs.run[place]), el("div", { class: "tags" }, el("span", { class: "tag" }, runs.kind[place]), el("span", { class: "tag" }, `seed ${number(runs.seed[place])}`)), moves()),
      el(
        "div",
        { class: "figures" },
        figure("per_query", "Edges per query", number),
        figure("share", "Open edges", percent),
        figure("rise", "Rise of the loss", nats, runs.kind[place] === "sparse" ? `allowed ${number(runs.tolerance[place])}` : ""),
        figure("sampled_rise", "Rise, sampled gates", nats),
        figure("top_in_row_base", "Base, top of row", nats),
        figure("top_probability_base", "Base, top of head", nats),
        figure("empty_rows", "Empty rows", percent),
        figure("leak", "Leak", percent),
        figure("trained_tokens", "Trained on", number, "tokens"),
      ),
    ),
  );
  view.scrollTop = 0;
}
