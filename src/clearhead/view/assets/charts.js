// plotly figures made in Python, fitted to their column and to the colour scheme of the page.

let plotly = null;
const specs = new Map();

/** plotly.js out of its packed data element. The content policy knows the hash of exactly this script. */
function loadPlotly() {
  plotly ??= inflate("plotly-0").text().then((code) => {
    document.head.append(Object.assign(document.createElement("script"), { textContent: code }));
    return window.Plotly;
  });
  return plotly;
}

/** A box that `redrawCharts` turns into the chart `spec` ({data, layout}); `onPoint` gets the clicked point. */
function chart(spec, label, onPoint = null) {
  const box = el("div", { class: "chart", role: "img", "aria-label": label });
  box.style.height = `${spec.layout.height}px`;
  specs.set(box, { spec, onPoint });
  return box;
}

async function drawChart(box) {
  const library = await loadPlotly();
  if (!box.isConnected) return;
  const { spec, onPoint } = specs.get(box);
  const fresh = !box.classList.contains("js-plotly-plot");
  await library.react(box, structuredClone(spec.data), themed(spec.layout), { displayModeBar: false, responsive: true });
  if (fresh && onPoint) box.on("plotly_click", (event) => onPoint(event.points[0]));
}

function themed(layout) {
  const ink = colour("--ink");
  const copy = structuredClone(layout);
  copy.font = { ...copy.font, color: colour("--muted"), family: getComputedStyle(document.body).fontFamily };
  copy.hoverlabel = { ...copy.hoverlabel, bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: ink } };
  copy.dragmode = false;
  for (const axis of [copy.xaxis, copy.yaxis]) {
    axis.gridcolor = colour("--line");
    axis.fixedrange = true;
  }
  return copy;
}

/** A custom property as the colour it stands for in the present scheme. */
function colour(name) {
  const probe = el("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

/** Draw, or draw again, what is on the page and forget what has left it. */
function redrawCharts() {
  for (const box of specs.keys()) {
    if (box.isConnected) drawChart(box);
    else specs.delete(box);
  }
}
