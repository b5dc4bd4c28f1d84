// A fidelity report: runs in the list, layers and sizes in the summary, and a view of one run's error.

const { runs, layers, labels } = index;
const placeOf = new Map(runs.id.map((id, place) => [id, place]));
const thousandths = (value) => (value === null ? MISSING : value.toFixed(3).replace("-", MINUS));
const between = (ends) => (ends === null ? "" : ` (${thousandths(ends[0])} to ${thousandths(ends[1])})`);

const listed = {
  noun: "run",
  ids: runs.id,
  columns: runs,
  sorts: {
    ordinary: { label: "FVU", write: thousandths, up: true },
    layer: { label: "Layer", write: number, up: true },
    parameters: { label: "Parameters", write: number },
    k: { label: "Active units", write: number },
    dead_share: { label: "Dead units", write: percent },
  },
  filters: [choice("kind", "kind", runs.kind, (kind) => labels[kind]), choice("layer", "layer", runs.layer, (layer) => `layer ${layer}`), choice("k", "K", runs.k, (k) => `K ${k}`)],
  search: { hint: "Run…", label: "Search by run", about: "Finds runs by the name of their directory.", text: (place) => runs.run[place], exact: (text) => placeOf.get(text) },
  total: () => [runs.id.length, "run"],
  name: (place) => [runs.run[place]],
  does: (place) => [el("span", {}, `${labels[runs.kind[place]]} · FVU ${thousandths(runs.ordinary[place])}`), runs.opened[place] ? el("span", { class: "tag" }, "error opened") : nothing()],
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

function chartPanels(specs) {
  const made = specs.map((spec) => panel(spec.title, explain(spec.help, spec.title), chart(spec, spec.title)));
  if (made.length % 2) made[0].classList.add("whole");
  return made;
}

function showSummary() {
  const view = byId("view");
  view.replaceChildren(
    el(
      "div",
      { class: "summary sparse fidelity" },
      el("h1", {}, index.title),
      el("p", { class: "lead" }, "Measured on the same held-out tokens. Choose a run from the list for what its error contains."),
      el("div", { class: "verdict" }, ...index.verdict.map((text) => el("p", {}, text))),
      el("div", { class: "charts" }, ...chartPanels(index.charts), ...layerTables(), ...acrossTable(), ...fitTable(), runTable(), ...leftOutTable()),
    ),
  );
  view.scrollTop = 0;
  redrawCharts();
}

function layerTables() {
  if (!layers.length) return [];
  const at = (label, help_, name, write = thousandths) => [label, help_ && index.help[help_], (row) => write(layers[row][name])];
  const beside = Object.keys(labels).filter((name) => layers.some(({ compared }) => compared[name]));
  const other = (name) => [labels[name], "", (row) => (layers[row].compared[name] ? `${thousandths(layers[row].compared[name][0])}${layers[row].compared[name][1] ? "" : " *"}` : MISSING)];
  const starred = layers.some(({ compared }) => Object.values(compared).some((found) => found && !found[1]));
  const massive = layers.some(({ massive: found }) => found) ? [at("massive tokens", "massive", "massive", number), at("their error", "", "massive_share", percent)] : [];
  const faithful = tablePanel(`FVU by layer${starred ? " (* other budget)" : ""}`, [at("layer", "", "layer", String), at("Lorsa", "fvu", "fvu"), ...beside.map(other), ...massive], layers.length);
  const missed = tablePanel(
    "What the Lorsa misses, by layer",
    [
      at("layer", "", "layer", String),
      at("correlation", "correlation", "correlation"),
      at("relative ranks", "relative", "relative_rank_correlation"),
      at("cosine", "cosine", "cosine"),
      at("shuffled", "shuffled", "shuffled_cosine"),
      at("R², SAE’s error", "r2_partner", "r2_partner"),
      at("R², input", "r2_input", "r2_input"),
      at("inside heads", "inside", "inside", percent),
      at("other token’s", "inside_other", "inside_other", percent),
    ],
    layers.length,
  );
  return [faithful, missed];
}

function acrossTable() {
  const found = index.across;
  if (!found.length) return [];
  const columns = [
    ["against", "", (row) => found[row][0]],
    ["layers", "", (row) => number(found[row][1])],
    ["Lorsa lower", "", (row) => number(found[row][2])],
    ["FVU ratio", index.help.ratio, (row) => thousandths(found[row][3]) + between(found[row][4])],
    ["rank correlation", index.help.rank, (row) => thousandths(found[row][5]) + between(found[row][6])],
  ];
  return [tablePanel("Over layers, equal budgets", columns, found.length)];
}

function fitTable() {
  const { fits } = index;
  if (!fits.length) return [];
  const columns = [
    ["series", "", (row) => fits[row][0], "words"],
    ["over", "", (row) => fits[row][1]],
    ["a", index.help.fit, (row) => number(fits[row][2])],
    ["b", "", (row) => thousandths(fits[row][3])],
    ["c", "", (row) => thousandths(fits[row][4])],
    ["error, or why there is no fit", "", (row) => fits[row][5], "words"],
  ];
  return [tablePanel("Fits", columns, fits.length)];
}

function runTable() {
  const at = (label, help_, name, write) => [label, help_ && index.help[help_], (row) => write(runs[name][row])];
  const columns = [
    ["run", "", (row) => el("a", { href: `#${runs.id[row]}` }, runs.run[row])],
    at("layer", "", "layer", String),
    at("units", "", "units", number),
    at("parameters", "", "parameters", number),
    at("K", "", "k", number),
    at("trained on", "", "trained_tokens", number),
    at("FVU", "fvu", "ordinary", thousandths),
    at("L0", "l0", "l0", number),
    at("dead", "dead", "dead_share", percent),
  ];
  return tablePanel("Runs", columns, runs.id.length);
}

function leftOutTable() {
  const gone = index.left_out;
  if (!gone.length) return [];
  return [tablePanel("Left out", [["directory", "", (row) => gone[row][0]], ["why", "", (row) => gone[row][1], "words"]], gone.length)];
}

async function showRun(place) {
  const held = await part("runs", place);
  if (placeOf.get(decodeURIComponent(location.hash.slice(1))) !== place) return;
  const figure = (label, value, help_ = null, small = "") => bigNumber(label, value, help_ && help(help_, label), small);
  const view = byId("view");
  view.replaceChildren(
    el(
      "div",
      { class: "summary sparse fidelity" },
      el("div", { class: "title" }, el("h1", {}, runs.run[place]), el("div", { class: "tags" }, el("span", { class: "tag" }, labels[runs.kind[place]]), el("span", { class: "tag" }, `layer ${runs.layer[place]}`), el("span", { class: "tag" }, `seed ${number(runs.seed[place])}`), runs.init[place] ? el("span", { class: "tag" }, `init ${runs.init[place]}`) : nothing()), moves()),
      el(
        "div",
        { class: "figures" },
        figure("FVU", thousandths(runs.ordinary[place]), "fvu", runs.ordinary[place] === runs.fvu[place] ? "" : `${thousandths(runs.fvu[place])} with massive tokens`),
        figure("L0", number(runs.l0[place]), "l0", `K ${number(runs.k[place])}`),
        figure("Units", number(runs.units[place])),
        figure("Dead", percent(runs.dead_share[place]), "dead"),
        figure("Parameters", number(runs.parameters[place])),
        figure("Trained on", number(runs.trained_tokens[place]), null, "tokens"),
      ),
      runs.opened[place] ? nothing() : el("p", { class: "hint" }, "The error of this run was not opened: the report opens that of each layer’s Lorsa and of the SAE beside it."),
      el("div", { class: "charts" }, ...chartPanels(held.charts), ...overlapTable(held.overlap), ...headTable(held.heads), ...tokenTables(held.tables)),
    ),
  );
  view.scrollTop = 0;
  redrawCharts();
}

function overlapTable(found) {
  if (!found.length) return [];
  const columns = [
    ["its error and that of", "", (row) => found[row][0]],
    ["correlation", index.help.correlation, (row) => thousandths(found[row][1])],
    ["relative ranks", index.help.relative, (row) => thousandths(found[row][2])],
    ["cosine", index.help.cosine, (row) => thousandths(found[row][3]) + between(found[row][4])],
    ["shuffled", index.help.shuffled, (row) => thousandths(found[row][5])],
  ];
  return [tablePanel("Overlap of errors", columns, found.length)];
}

function headTable(found) {
  if (!found) return [];
  const columns = [
    ["head", "", (row) => String(row)],
    ["of the output", index.help.heads, (row) => percent(found[row][0])],
    ["of the error", "", (row) => percent(found[row][1])],
    ["unexplained", index.help.unexplained, (row) => percent(found[row][2])],
  ];
  return [tablePanel("Original heads", columns, found.length)];
}

function tokenTables(tables) {
  const titles = { repeats: "First occurrences and repeats", positions: "Positions", worst: "Worst tokens", heaviest: "Tokens with most of the error" };
  return Object.entries(titles)
    .filter(([name]) => tables[name])
    .map(([name, title]) => {
      const found = tables[name];
      const columns = [
        ["", "", (row) => (name === "worst" || name === "heaviest" ? pill(found[row][0]) : found[row][0])],
        ["tokens", index.help[name], (row) => number(found[row][1])],
        ["of all tokens", "", (row) => percent(found[row][2])],
        ["of the error", "", (row) => percent(found[row][3])],
        ["relative error", index.help.positions, (row) => thousandths(found[row][4])],
      ];
      const made = tablePanel(title, columns, found.length);
      made.classList.remove("whole");
      return made;
    });
}
