// The summary: the metrics of each layer and the charts over all its units.

function showSummary() {
  const view = byId("view");
  view.replaceChildren(limitsNotice(), el("div", { class: "summary" }, ...index.summaries.map(layerSection), behavioursSummary(), familiesSummary()));
  view.scrollTop = 0;
  redrawCharts();
}

function layerSection({ layer, kind, metrics, charts }) {
  const here = units.id.map((_, place) => place).filter((place) => units.layer[place] === layer && units.kind[place] === kind);
  const live = here.filter((place) => !units.dead[place]).length;
  const what = here.length ? `${plural(here.length, kindName(kind))}, ${number(live)} alive. Choose one from the list, or a point or bar below.` : "";
  return el(
    "section",
    { "data-layer": layer },
    el("h1", {}, layer === null ? `${kindName(kind)}s` : `Layer ${layer}`),
    el("p", { class: "lead" }, what),
    el("div", { class: "figures" }, ...metrics.filter((metric) => metric.headline).map(metricTile)),
    el("div", { class: "charts" }, ...charts.map(chartPanel), metricsPanel(metrics)),
  );
}

function metricTile({ label, value, interval, help: text }) {
  return bigNumber(label, value, explain(text, label), interval);
}

function metricsPanel(metrics) {
  if (!metrics.length) return null;
  const line = ({ label, value, interval, help: text }) => [
    el("dt", {}, label, explain(text, label)),
    el("dd", {}, value, interval ? el("small", {}, ` (${interval})`) : null),
  ];
  return panel("All metrics", null, el("dl", { class: "metrics" }, ...metrics.flatMap(line)));
}

function chartPanel(spec) {
  const reactions = {
    map: (point) => (location.hash = point.customdata),
    hosts: (point) => listOnly({ host: String(point.x), spread: point.curveNumber === 1 ? "spanning" : "single" }),
    dead: (point) => listOnly({ group: String(point.x), state: point.curveNumber === 1 ? "dead" : "alive" }),
  };
  const box = panel(spec.title, help(spec.name, spec.title), chart(spec, spec.title, reactions[spec.name] ?? null));
  box.classList.toggle("wide", spec.name === "map");
  return box;
}
