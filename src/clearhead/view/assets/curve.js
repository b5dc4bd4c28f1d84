// Inclusion curves: curves in the list, all of them on one chart with the protocol, and a view of one curve.

const { curves, protocols, what } = index;
const placeOf = new Map(curves.id.map((id, place) => [id, place]));
const spread = (interval) => (interval === null ? MISSING : interval[0] === interval[1] ? number(interval[0]) : `${number(interval[0])}–${number(interval[1])}`);
const hundredths = (value) => (value === null ? MISSING : value.toFixed(2).replace("-", MINUS));

const listed = {
  noun: "curve",
  ids: curves.id,
  columns: curves,
  sorts: {
    stable: { label: "Stable crossing", write: number, up: true },
    first: { label: "First crossing", write: number, up: true },
    auc: { label: "Area under F", write: hundredths },
    complement_f: { label: "F of the rest", write: hundredths, up: true },
  },
  filters: [choice("run", "run", curves.run, String), choice("rank", "ranking", curves.rank, String), choice("policy", "policy", curves.policy, String)],
  search: { hint: "Ranking, policy…", label: "Search by curve", about: "Finds curves by ranking, policy and run.", text: (place) => curves.name[place], exact: (text) => placeOf.get(text) },
  total: () => [curves.id.length, "curve"],
  name: (place) => [curves.name[place]],
  does: (place) => [el("span", {}, curves.stable[place] === null ? "does not stay above" : `${percent(curves.share[place])} of ${number(curves.n[place])}`)],
};

function openNamed(name) {
  const place = placeOf.get(name);
  if (place === undefined) return false;
  chooseInList(place);
  showCurve(place);
  return true;
}

const settle = () => {};
const notes = () => ({ leftOut: "", keys: [] });

function showSummary() {
  const view = byId("view");
  const { chart: spec } = index;
  const main = panel(spec.title, help(spec.name, spec.title), chart(spec, spec.title));
  main.classList.add("whole");
  view.replaceChildren(
    el(
      "div",
      { class: "summary sparse curves" },
      el("h1", {}, index.title),
      el("p", { class: "lead" }, "Choose a curve from the list for its ranking, its prompts and its circuit."),
      el("div", { class: "verdict" }, ...index.verdict.map((text) => el("p", {}, text))),
      el("div", { class: "charts" }, main, curveTable(), ...overlapTable()),
      el("section", {}, el("h2", {}, "Protocol"), ...protocols.map(protocolPanels)),
    ),
  );
  view.scrollTop = 0;
  redrawCharts();
}

function curveTable() {
  const at = (name, write) => (row) => write(curves[name][row]);
  const intervals = (name, label) => [label, index.help.interval, (row) => spread(curves[name][row])];
  return tablePanel(
    "Curves",
    [
      ["curve", "", (row) => el("a", { href: `#${curves.id[row]}` }, curves.name[row])],
      ["first", index.help.first, at("first", number)],
      ["stable", index.help.stable, at("stable", number)],
      [`of ${what}`, "", at("share", percent)],
      intervals("stable_prompts", "stable, over prompts"),
      intervals("stable_templates", "stable, over templates"),
      ["F of the rest", index.help.complement_f, at("complement_f", hundredths)],
      ["largest F", index.help.max_f, (row) => `${hundredths(curves.max_f[row])} at ${number(curves.max_f_at[row])}`],
      ["AUC", index.help.auc, at("auc", hundredths)],
      ["CPR", index.help.cpr, at("cpr", hundredths)],
      ["CMD", index.help.cmd, at("cmd", hundredths)],
      ["tied", index.help.tied, at("tied", number)],
    ],
    curves.id.length,
  );
}

function overlapTable() {
  const rows_ = index.overlap;
  if (!rows_.length) return [];
  const columns = [
    ["circuit", "", (row) => rows_[row][0]],
    ["and", "", (row) => rows_[row][1], "words"],
    ["overlap", index.help.overlap, (row) => percent(rows_[row][2])],
    ["sizes", "", (row) => `${number(rows_[row][3])}, ${number(rows_[row][4])}`],
  ];
  return [tablePanel("Overlap of the stable circuits", columns, rows_.length)];
}

function protocolPanels({ name, words, rows: entries, left }) {
  const title = protocols.length > 1 ? name : "In words";
  const said = panel(title, help("protocol", "the protocol"), ...words.map((text) => el("p", { class: "said" }, text)));
  const table = el("dl", { class: "entries" }, ...entries.flatMap(([label, value]) => [el("dt", {}, label), el("dd", {}, value)]));
  const gone = left.length
    ? tablePanel("Prompts left out", [["why", "", (row) => left[row][0]], ["prompts", index.help.left_out, (row) => number(left[row][1])], ["items of the task", "", (row) => left[row][2], "words"]], left.length)
    : el("p", { class: "hint" }, "No prompt was left out.");
  return el("div", { class: "charts" }, said, panel("As a table", null, table), gone);
}

async function showCurve(place) {
  const held = await part("curves", place);
  if (placeOf.get(decodeURIComponent(location.hash.slice(1))) !== place) return;
  const figure = (name, label, value, small = "") => bigNumber(label, value, help(name, label), small);
  const between = (name) => (curves[name][place] === null ? "" : `95 % ${spread(curves[name][place])}`);
  const charts = held.charts.map((spec) => panel(spec.title, help(spec.name, spec.title), chart(spec, spec.title)));
  if (charts.length % 2) charts[0].classList.add("whole");
  const { prompts } = held;
  const view = byId("view");
  view.replaceChildren(
    el(
      "div",
      { class: "summary sparse curves" },
      el("div", { class: "title" }, el("h1", {}, curves.name[place]), el("div", { class: "tags" }, el("span", { class: "tag" }, `${number(curves.prompts[place])} prompts`), el("span", { class: "tag" }, curves.metric[place].replaceAll("_", " "))), moves()),
      el(
        "div",
        { class: "figures" },
        figure("stable", `Stable, ${percent(curves.threshold[place])}`, number(curves.stable[place]), `of ${number(curves.n[place])}`),
        figure("interval", "Over prompts", spread(curves.stable_prompts[place])),
        figure("interval", "Over templates", spread(curves.stable_templates[place])),
        figure("first", "First", number(curves.first[place]), between("first_prompts")),
        figure("complement_f", "F of the rest", hundredths(curves.complement_f[place])),
        figure("max_f", "Largest F", hundredths(curves.max_f[place]), `at ${number(curves.max_f_at[place])}`),
        figure("auc", "AUC", hundredths(curves.auc[place]), between("auc_prompts")),
        figure("cpr", "CPR", hundredths(curves.cpr[place])),
        figure("cmd", "CMD", hundredths(curves.cmd[place])),
      ),
      el("div", { class: "charts" }, ...charts, circuitPanel(held), promptTable(prompts)),
    ),
  );
  view.scrollTop = 0;
  redrawCharts();
}

function circuitPanel({ circuit, size }) {
  const words = circuit.length ? `${plural(size, "component")}, most important first${size > circuit.length ? `; the first ${circuit.length} are named` : ""}.` : "Every prompt has a circuit of its own, or none is stable.";
  const made = panel("The stable circuit", help("stable", "the circuit"), el("p", { class: "hint" }, words), el("div", { class: "units-of" }, ...circuit.map((name) => el("code", {}, name))));
  made.classList.add("whole");
  return made;
}

function promptTable(prompts) {
  const columns = [
    ["item", "", (row) => String(prompts[row][0])],
    ["template", "", (row) => prompts[row][1], "words"],
    ["M(none)", index.help.prompts, (row) => number(prompts[row][2])],
    ["M(all)", "", (row) => number(prompts[row][3])],
    ["stable alone", index.help.per_prompt, (row) => (prompts[row][4] === null ? "never" : number(prompts[row][4]))],
  ];
  return tablePanel("Prompts", columns, prompts.length);
}
