// The list: which units are shown, in which order, and the few rows that are on the screen.

const ROW_HEIGHT = 56;
const SORTS = {
  max_activation: { label: "Max activation", write: number, size: true },
  rate: { label: "Activation rate", write: percent, log: true },
  mean_activation: { label: "Mean activation", write: number },
  participation_output: { label: "Participation, output", write: number },
  participation_weights: { label: "Participation, weights", write: number },
  participation_routing: { label: "Participation, routing", write: number },
  logit: { label: "Largest logit effect", write: signed },
  distance: { label: "Distance to source", write: number },
  decoder_norm: { label: "Decoder norm", write: number },
  index: { label: "Index", write: number, up: true },
};
const STATES = { alive: (place) => !units.dead[place], dead: (place) => units.dead[place] };
const SPREADS = { spanning: (place) => spans(place), single: (place) => units.host[place] !== null && !spans(place) };
const spans = (place) => units.spans[place];

const NO_FILTER = { text: "", state: "", spread: "", group: "", host: "", kind: kinds.length > 1 ? kinds[0] : "", layer: "" };
const query = { ...NO_FILTER, sort: "max_activation", up: false };
let found = [];
let chosenPlace = null;
const haystack = units.id.map((id, place) =>
  [id, ...[...units.fires[place], ...units.raises[place]].map((entry) => vocab[entry])].join("\n").toLowerCase(),
);

/** Places of the units that the search and the filters let through, sorted; missing values come last either way. */
function findUnits() {
  const text = query.text.toLowerCase();
  const isId = placeOf.has(query.text.trim());
  const equal = (name) => query[name] === "" || ((place) => String(units[name][place]) === query[name]);
  const tests = [STATES[query.state], SPREADS[query.spread], ...["group", "host", "kind", "layer"].map(equal)].filter((test) => typeof test === "function");
  found = units.id.map((_, place) => place).filter((place) => tests.every((test) => test(place)));
  if (isId) found = found.filter((place) => units.id[place] === query.text.trim());
  else if (text) found = found.filter((place) => haystack[place].includes(text));
  const column = SORTS[query.sort].size ? units[query.sort].map((value) => value && Math.abs(value)) : units[query.sort];
  const direction = query.up ? 1 : -1;
  const missing = (value) => value === null || value === undefined;
  found.sort((a, b) => missing(column[a]) - missing(column[b]) || direction * (column[a] - column[b]) || a - b);
}

const rows = el("div", { class: "rows", role: "listbox", tabindex: 0, "aria-label": `${noun}s`, onscroll: drawRows, onkeydown: moveInList });
const spacer = el("div", { class: "spacer" });
const countLine = el("span", { role: "status" });

function buildList() {
  const search = el("input", {
    type: "search", id: "search", placeholder: "Token or id…", autocomplete: "off", spellcheck: "false",
    "aria-label": "Search by token in top activations and raised logits, or by id",
    oninput: () => setQuery({ text: search.value }),
  });
  const about = `Finds ${noun}s whose most active tokens or raised logits contain the text, or whose id does. Case is ignored.`;
  const sort = select("sort", "Sort by", Object.entries(SORTS).filter(([name]) => units[name].some((v) => v !== null)).map(([name, { label }]) => [name, label]));
  sort.value = query.sort;
  const turn = el("button", { type: "button", id: "direction", onclick: () => setQuery({ up: !query.up }) });
  const reset = el("button", { type: "button", id: "reset", onclick: resetQuery }, "Clear filters");
  byId("list").append(
    el(
      "div",
      { class: "controls" },
      el("div", { class: "search" }, search, explain(about, "the search")),
      el(
        "div",
        { class: "fields" },
        ...choices("kind", "kind", (kind) => kindName(kind)),
        ...choices("layer", "layer", (layer) => `layer ${layer}`),
        field(select("state", "Alive or dead", [["", "alive and dead"], ["alive", "alive"], ["dead", "dead"]])),
        field(select("spread", "Spread over original heads", [["", "any spread"], ["spanning", "spanning heads"], ["single", "one head"]])),
        ...choices("group", "QK group", (group) => `QK group ${group}`),
        ...choices("host", "host head", (host) => `host head ${host}`),
        el("div", { class: "field sort" }, el("label", { for: "sort" }, "Sort"), sort, turn),
      ),
      el("div", { class: "found" }, countLine, reset),
    ),
    rows,
  );
  rows.append(spacer);
  new ResizeObserver(drawRows).observe(rows);
  updateList();
}

const field = (control) => el("div", { class: "field" }, control);

function select(name, label, options) {
  const control = el("select", { id: name, "aria-label": label, title: label, onchange: () => setQuery({ [name]: control.value }) });
  control.append(...options.map(([value, text]) => el("option", { value }, text)));
  return control;
}

/** A filter over the values of a column; none when there is only one value to choose. */
function choices(name, label, write) {
  const values = [...new Set(units[name])].filter((value) => value !== null);
  if (values.length < 2) return [];
  values.sort((a, b) => (typeof a === "number" ? a - b : a < b ? -1 : 1));
  return [field(select(name, label, [["", `any ${label}`], ...values.map((value) => [String(value), write(value)])]))];
}

function setQuery(change) {
  if (change.sort) change.up = SORTS[change.sort].up ?? false;
  Object.assign(query, change);
  updateList();
}

function resetQuery() {
  byId("search").value = "";
  setQuery(NO_FILTER);
}

function updateList() {
  findUnits();
  for (const name of ["sort", "state", "spread", "group", "host", "kind", "layer"]) {
    const control = byId(name);
    if (control) control.value = query[name];
    control?.classList.toggle("set", name !== "sort" && query[name] !== NO_FILTER[name]);
  }
  const all = query.kind ? ofKind(query.kind) : units.id.length;
  const name = query.kind ? kindName(query.kind) : noun;
  countLine.textContent = found.length < all ? `${number(found.length)} of ${plural(all, name)}` : plural(all, name);
  byId("reset").hidden = Object.entries(NO_FILTER).every(([filter, value]) => query[filter] === value);
  byId("direction").textContent = query.up ? "↑" : "↓";
  byId("direction").setAttribute("aria-label", query.up ? "Ascending; turn to descending" : "Descending; turn to ascending");
  rows.scrollTop = 0;
  spacer.style.height = `${found.length * ROW_HEIGHT}px`;
  drawRows();
}

/** Only the rows in sight exist, so 5,000 units cost what 20 do. */
function drawRows() {
  const first = Math.max(0, Math.floor(rows.scrollTop / ROW_HEIGHT) - 4);
  const last = Math.min(found.length, Math.ceil((rows.scrollTop + rows.clientHeight) / ROW_HEIGHT) + 4);
  const values = units[query.sort];
  const scale = barScale(values, SORTS[query.sort].log);
  const drawn = [];
  for (let place = first; place < last; place += 1) drawn.push(row(found[place], place, scale));
  if (!found.length) drawn.push(el("p", { class: "none" }, `No ${noun} fits. Clear the filters or search for part of a token.`));
  spacer.replaceChildren(...drawn);
  const at = found.indexOf(chosenPlace);
  if (at >= first && at < last) rows.setAttribute("aria-activedescendant", `row-${chosenPlace}`);
  else rows.removeAttribute("aria-activedescendant");
}

function barScale(values, log) {
  const known = values.filter((value) => value !== null && (!log || value > 0)).map((value) => (log ? Math.log(value) : Math.abs(value)));
  const high = Math.max(...known, 1e-12);
  const low = log ? Math.min(...known) - 0.2 : 0;
  return (value) => (value === null || (log && value <= 0) ? 0 : ((log ? Math.log(value) : Math.abs(value)) - low) / (high - low || 1));
}

function row(unit, place, scale) {
  const { write } = SORTS[query.sort];
  const value = units[query.sort][unit];
  const node = el(
    "div",
    {
      class: `row ${unit === chosenPlace ? "chosen" : ""}`, role: "option", id: `row-${unit}`, "aria-selected": String(unit === chosenPlace),
      "aria-setsize": found.length, "aria-posinset": place + 1, onclick: () => openUnit(unit),
    },
    el("div", { class: "name" }, query.kind || kinds.length === 1 ? shortId(unit) : units.id[unit], ...rowTags(unit)),
    el("div", { class: "does" }, ...doing(unit)),
    el("div", { class: "amount" }, el("span", {}, write(value)), el("div", { class: "track" }, el("i", { "width%": percentOf(scale(value)) }))),
  );
  node.style.top = `${place * ROW_HEIGHT}px`;
  return node;
}

function rowTags(unit) {
  const tags = [];
  if (units.dead[unit]) tags.push(el("span", { class: "tag dead" }, "dead"));
  if (spans(unit)) tags.push(el("span", { class: "tag" }, `spans ${number(units.participation_output[unit])}`));
  else if (units.host[unit] !== null) tags.push(el("span", { class: "tag" }, `in head ${units.host[unit]}`));
  return tags;
}

/** "fires on X → raises Y" in pills. */
function doing(unit) {
  const parts = [];
  const [fires] = units.fires[unit];
  const [raises] = units.raises[unit];
  if (fires !== undefined) parts.push(pill(vocab[fires]));
  if (raises !== undefined) parts.push(el("span", { class: "sign" }, "→"), pill(vocab[raises]));
  return parts;
}

function moveInList(event) {
  const page = Math.max(1, Math.floor(rows.clientHeight / ROW_HEIGHT) - 1);
  const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -found.length, End: found.length }[event.key];
  if (!step || !found.length) return;
  event.preventDefault();
  stepUnit(step);
}

/** Open the unit some rows further in the present order. */
function stepUnit(step) {
  const at = found.indexOf(chosenPlace);
  const next = at < 0 ? (step > 0 ? 0 : found.length - 1) : Math.min(Math.max(at + step, 0), found.length - 1);
  openUnit(found[next], false);
}

function openUnit(place, move = true) {
  // at once, for the next key may come before the address has changed
  chosenPlace = place;
  location.hash = units.id[place];
  if (move) document.body.dataset.panel = "view";
}

/** Mark a unit in the list and bring its row into sight. */
function chooseInList(place) {
  chosenPlace = place;
  const at = found.indexOf(place);
  const top = at * ROW_HEIGHT;
  const seen = top >= rows.scrollTop && top + ROW_HEIGHT <= rows.scrollTop + rows.clientHeight;
  if (at >= 0 && !seen) rows.scrollTop = top - (rows.clientHeight - ROW_HEIGHT) / 2;
  drawRows();
}
