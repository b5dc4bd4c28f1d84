// The drawing: edges on a canvas as wide as what is in view, units as shapes above them.

const SHAPES = {
  circle: "M-4.4 0a4.4 4.4 0 1 0 8.8 0a4.4 4.4 0 1 0-8.8 0z", diamond: "M0-5.6L5.6 0L0 5.6L-5.6 0z", square: "M-4-4h8v8h-8z",
  cross: "M-4.6-2.6L-2.6-4.6L0-2L2.6-4.6L4.6-2.6L2 0L4.6 2.6L2.6 4.6L0 2L-2.6 4.6L-4.6 2.6L-2 0z", plus: "M-1.5-4.8h3v3.3h3.3v3h-3.3v3.3h-3v-3.3h-3.3v-3h3.3z",
  up: "M0-5.2L5.2 4.2L-5.2 4.2z", bar: "M-5.4-3.2h10.8v6.4h-10.8z",
};
const SHAPE_OF = { feature: "circle", mlp: "square", features: "square", error: "cross", attn_error: "cross", bias: "plus", embedding: "bar", input: "bar", positions: "bar", logit: "up", target: "up" };
const WIDTHS = [0.7, 1.2, 1.9, 2.8, 4];
const NEAR = 6;
const IN_ONE_PATH = 10;
/** From how many edges on the thinnest are drawn without dashes. */
const DASHED = 3000;

let plan = null;
let seen = null;
let pointed = null;

const base = el("canvas", { class: "edges", "aria-hidden": "true" });
const over = el("canvas", { class: "edges over", "aria-hidden": "true" });
const marks = svg("svg", { class: "marks", "aria-hidden": "true" });
const tokenLine = el("div", { class: "net-tokens", "aria-hidden": "true" });
const body = el("div", { class: "net-body" }, el("div", { class: "net-window" }, base, over), marks, tokenLine);
const sideways = el("div", {
  class: "net-scroll", tabindex: 0, role: "group", onscroll: scrollSoon, onkeydown: walkGraph, onclick: clickGraph, onmousemove: pointGraph, onmouseleave: () => point(null),
  "aria-label": "The graph. Arrow keys go along the heaviest shown edges and along a row, p pins; the list holds the same units.",
}, body);
const rowLine = el("div", { class: "net-rows", "aria-hidden": "true" });
const wider = el("p", { class: "wider", hidden: true }, "Wider than its frame: scroll sideways.");
const net = el("div", { class: "net" }, rowLine, sideways, wider);

/** Look again and draw all of it. */
function drawGraph() {
  if (!edges || !sideways.clientWidth) return;
  seen = look();
  plan = arrange(seen.shown, sideways.clientWidth);
  body.style.width = `${plan.width}px`;
  body.style.height = `${plan.height + (index.tokens.length ? 30 : 0)}px`;
  marks.setAttribute("width", plan.width);
  marks.setAttribute("height", plan.height);
  const made = [];
  seen.shown.forEach((shown, place) => shown && made.push(...markOf(place)));
  marks.replaceChildren(...made);
  rowLine.replaceChildren(...index.rows.map(rowLabel));
  tokenLine.style.top = `${plan.height}px`;
  tokenLine.replaceChildren(...(index.tokens.length ? plan.columns.map(columnLabel) : []));
  wider.hidden = plan.width <= sideways.clientWidth;
  byId("statement").textContent = statement(seen);
  paint(base, seen.shownEdges, true);
  emphasise();
}

let awaited = false;

/** Draw at the next frame, however often a slider moved before it. */
function drawSoon() {
  if (awaited) return;
  awaited = true;
  requestAnimationFrame(() => {
    awaited = false;
    drawGraph();
  });
}

let scrolled = false;

function scrollSoon() {
  if (scrolled) return;
  scrolled = true;
  requestAnimationFrame(() => {
    scrolled = false;
    drawEdges();
  });
}

function rowLabel(name) {
  const label = el("span", {}, rowWords(name));
  label.style.top = `${plan.rowAt.get(name)}px`;
  return label;
}

function columnLabel({ position, until, left, width }) {
  const text = position === -1 ? "all" : tokenAt(position) ?? String(position);
  const hidden = until === undefined ? null : `Tokens ${position} to ${until}: no unit shown.`;
  const label = el("span", { class: hidden ? "closed" : "", "data-tip": hidden ?? (position === -1 ? "Units of all positions" : `${quoted(text)}, token ${position}`) }, hidden ? "…" : text.trim() ? text : "\u2423");
  label.style.left = `${left}px`;
  label.style.width = `${width}px`;
  return label;
}

function markOf(place) {
  const group = groupOf(place);
  const shape = SHAPES[SHAPE_OF[units.kind[place]] ?? "diamond"];
  const kind = `mark k-${units.kind[place]}${sight.pinned.has(place) ? " pinned" : ""}${["", " only-first", " only-second"][sideOf(place)]}`;
  const mark = svg("path", { class: kind, d: shape, transform: `translate(${plan.x[place]} ${plan.y[place]})`, "data-place": place, "data-tip": tipOf(place) });
  if (group !== null) mark.style.setProperty("--ring", ringOf(group));
  mark.classList.toggle("grouped", group !== null);
  if (plan.named) return [mark, ...namesOf(place)];
  if (!isTarget(place)) return [mark];
  return [mark, svg("text", { class: "mark-label", x: plan.x[place], y: plan.y[place] - (plan.raised.has(place) ? 20 : 8) }, shorten(wordsOf(place) ?? units.id[place].split("@")[0].replace("logit.", "#"), 8))];
}

/** A unit's words, in two lines where they have two parts. */
const linesOf = (place) => (wordsOf(place) ?? units.id[place]).split(": ").slice(0, 2).map((line) => shorten(line, 24));

function namesOf(place) {
  const lines = linesOf(place);
  return lines.map((line, at) => svg("text", { class: "mark-label beside-mark", x: plan.x[place] + 8, y: plan.y[place] + 3 + 11 * (at - (lines.length - 1) / 2) }, line));
}

const shorten = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Classes of what is chosen and its neighbours; then the edges. */
function emphasise() {
  const { chosen } = sight;
  const near = new Set(chosen === null ? sight.lit : [...into[chosen].map((edge) => edges.source[edge]), ...outOf[chosen].map((edge) => edges.target[edge])]);
  const pair = chosenEdge === null ? [] : [edges.source[chosenEdge], edges.target[chosenEdge]];
  marks.classList.toggle("focused", isFocused());
  for (const mark of marks.querySelectorAll(".mark")) {
    const place = Number(mark.dataset.place);
    mark.classList.toggle("chosen", place === chosen || pair.includes(place));
    mark.classList.toggle("near", near.has(place));
  }
  base.classList.toggle("faded", isFocused());
  paintOver();
}

const isFocused = () => sight.chosen !== null || chosenEdge !== null || sight.lit.size > 0;

function drawEdges() {
  if (!plan) return;
  paint(base, seen.shownEdges, true);
  paintOver();
}

function paintOver() {
  const { chosen } = sight;
  const places = [chosen, pointed].filter((place) => place !== null);
  const within = (edge) => sight.edgesLit && (sight.lit.has(edges.source[edge]) || sight.lit.has(edges.target[edge]));
  const strong = seen.shownEdges.filter((edge) => edge === chosenEdge || places.includes(edges.source[edge]) || places.includes(edges.target[edge]) || within(edge));
  if (chosenEdge !== null && !strong.includes(chosenEdge)) strong.push(chosenEdge);
  paint(over, strong, false);
}

/** Draw edges on a canvas that covers what is in view: short paths of one sign and width, for long ones take longer. */
function paint(canvas, drawn, lines) {
  const [width, height, dots] = [sideways.clientWidth, plan.height, devicePixelRatio];
  if (canvas.width !== Math.round(width * dots) || canvas.height !== Math.round(height * dots)) {
    canvas.width = Math.round(width * dots);
    canvas.height = Math.round(height * dots);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(dots, 0, 0, dots, 0, 0);
  pen.clearRect(0, 0, width, height);
  if (lines) {
    pen.strokeStyle = colour("--line");
    pen.lineWidth = 0.5;
    pen.beginPath();
    for (const y of plan.rowAt.values()) {
      pen.moveTo(0, y);
      pen.lineTo(width, y);
    }
    pen.stroke();
  }
  pen.translate(-sideways.scrollLeft, 0);
  const { values } = measures[sight.by];
  const heaviest = values[seen.shownEdges[0] ?? drawn[0]] || 1;
  const dashed = drawn.length <= DASHED;
  const [left, right] = [sideways.scrollLeft - 20, sideways.scrollLeft + width + 20];
  const paths = new Map();
  for (const edge of drawn) {
    const [from, to, weight] = [edges.source[edge], edges.target[edge], edges.weight[edge]];
    if (Number.isNaN(plan.x[from]) || Number.isNaN(plan.x[to]) || Math.max(plan.x[from], plan.x[to]) < left || Math.min(plan.x[from], plan.x[to]) > right) continue;
    const level = Math.min(WIDTHS.length - 1, Math.floor(Math.sqrt(values[edge] / heaviest) * WIDTHS.length));
    const key = weight < 0 ? -1 - level : level;
    if (!paths.has(key)) paths.set(key, []);
    const some = paths.get(key);
    if (!some.length || some.at(-1).curves === IN_ONE_PATH) some.push({ path: new Path2D(), curves: 0 });
    trace(some.at(-1).path, from, to);
    some.at(-1).curves += 1;
  }
  const [plus, minus] = [colour("--plus"), colour("--minus")];
  for (const [key, some] of [...paths].sort((a, b) => widthAt(a[0]) - widthAt(b[0]))) {
    pen.strokeStyle = key < 0 ? minus : plus;
    pen.setLineDash(key < 0 && (dashed || levelAt(key) > 1) ? [5, 3] : []);
    pen.lineWidth = widthAt(key);
    pen.globalAlpha = lines ? 0.28 + 0.14 * levelAt(key) : 0.95;
    for (const { path } of some) pen.stroke(path);
  }
  pen.globalAlpha = 1;
}

const levelAt = (key) => (key < 0 ? -1 - key : key);
const widthAt = (key) => WIDTHS[levelAt(key)];

/** A curve that leaves upwards and arrives from below; within a row it bows. */
function trace(path, from, to) {
  const [x1, y1, x2, y2] = [plan.x[from], plan.y[from], plan.x[to], plan.y[to]];
  const lift = Math.max(10, Math.abs(y1 - y2) * 0.45);
  path.moveTo(x1, y1);
  if (Math.abs(y1 - y2) < 1) path.bezierCurveTo(x1, y1 - lift, x2, y2 - lift, x2, y2);
  else path.bezierCurveTo(x1, y1 - lift, x2, y2 + lift, x2, y2);
}

/** The shown edge nearest to a point of the drawing, within a few pixels; null for none. */
function edgeAt(x, y) {
  const candidates = sight.chosen === null ? seen.shownEdges : seen.shownEdges.filter((edge) => edges.source[edge] === sight.chosen || edges.target[edge] === sight.chosen);
  let [best, nearest] = [null, NEAR];
  for (const edge of candidates) {
    const [x1, y1, x2, y2] = [plan.x[edges.source[edge]], plan.y[edges.source[edge]], plan.x[edges.target[edge]], plan.y[edges.target[edge]]];
    if (x < Math.min(x1, x2) - NEAR || x > Math.max(x1, x2) + NEAR) continue;
    const lift = Math.max(10, Math.abs(y1 - y2) * 0.45);
    const end = Math.abs(y1 - y2) < 1 ? y2 - lift : y2 + lift;
    for (let at = 0; at <= 24; at += 1) {
      const [t, s] = [at / 24, 1 - at / 24];
      const px = s * s * s * x1 + 3 * s * s * t * x1 + 3 * s * t * t * x2 + t * t * t * x2;
      const py = s * s * s * y1 + 3 * s * s * t * (y1 - lift) + 3 * s * t * t * end + t * t * t * y2;
      const distance = Math.hypot(px - x, py - y);
      if (distance < nearest) [best, nearest] = [edge, distance];
    }
  }
  return best;
}

function clickGraph(event) {
  const mark = event.target.closest(".mark");
  if (mark) {
    const place = Number(mark.dataset.place);
    if (event.ctrlKey || event.metaKey || event.shiftKey) togglePin(place);
    else openInList(place);
    return;
  }
  const origin = body.getBoundingClientRect();
  const edge = edgeAt(event.clientX - origin.left, event.clientY - origin.top);
  location.hash = edge === null ? "summary" : addressOf(edge);
}

const addressOf = (edge) => `${units.id[edges.source[edge]]}>${units.id[edges.target[edge]]}`;

function pointGraph(event) {
  const mark = event.target.closest(".mark");
  point(mark ? Number(mark.dataset.place) : null);
}

function point(place) {
  if (place === pointed || !plan) return;
  pointed = place;
  paintOver();
}

/** Up and down along the heaviest shown edge, left and right along the row. */
function walkGraph(event) {
  const { chosen } = sight;
  if (event.key === "p" && chosen !== null) togglePin(chosen);
  if (!event.key.startsWith("Arrow") || !seen) return;
  event.preventDefault();
  const along = { ArrowUp: outOf, ArrowDown: into }[event.key];
  let next = null;
  if (chosen === null) next = seen.shown.findIndex((shown, place) => shown && isTarget(place));
  else if (along) {
    const edge = along[chosen].find((candidate) => seen.shownEdges.includes(candidate));
    next = edge === undefined ? null : (along === into ? edges.source : edges.target)[edge];
  } else {
    const inRow = units.id.map((_, place) => place).filter((place) => seen.shown[place] && units.row[place] === units.row[chosen]);
    inRow.sort((a, b) => plan.x[a] - plan.x[b]);
    next = inRow[inRow.indexOf(chosen) + (event.key === "ArrowRight" ? 1 : -1)] ?? null;
  }
  if (next !== null && next >= 0) openInList(next);
}
