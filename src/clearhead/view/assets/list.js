// The list: which items are shown, in which order, and the few rows that are on the screen. `listed` says what they are.

const ROW_HEIGHT = 56;
const filters = listed.filters.filter(({ options }) => options.length > 2);
const NO_FILTER = { text: "", ...Object.fromEntries(filters.map(({ name, first }) => [name, first ?? ""])) };
const query = { ...NO_FILTER, sort: Object.keys(listed.sorts)[0], up: false };
sortBy(query.sort);
let found = [];
let chosenPlace = null;
const haystack = listed.ids.map((id, place) => `${id}\n${listed.search.text(place)}`.toLowerCase());

/** Places of the items that the search and the filters let through, sorted; missing values come last either way. */
function findItems() {
  const text = query.text.trim() ? query.text.toLowerCase() : "";
  const exact = listed.search.exact(query.text.trim());
  const set = filters.filter(({ name }) => query[name] !== "");
  found = listed.ids.map((_, place) => place).filter((place) => set.every(({ name, keeps }) => keeps(place, query[name])));
  if (exact !== undefined) found = found.filter((place) => place === exact);
  else if (text) found = found.filter((place) => haystack[place].includes(text));
  const column = listed.sorts[query.sort].size ? valuesOf(query.sort).map((value) => value && Math.abs(value)) : valuesOf(query.sort);
  const direction = query.up ? 1 : -1;
  const missing = (value) => value === null || value === undefined;
  found.sort((a, b) => missing(column[a]) - missing(column[b]) || direction * (column[a] - column[b]) || a - b);
}

/** A column to sort by. */
function valuesOf(sort) {
  return listed.columns[sort];
}

const rows = el("div", { class: "rows", role: "listbox", tabindex: 0, "aria-label": `${listed.noun}s`, onscroll: drawRows, onkeydown: moveInList });
const spacer = el("div", { class: "spacer" });
const countLine = el("span", { role: "status" });

function buildList() {
  const { hint, label, about } = listed.search;
  const search = el("input", {
    type: "search", id: "search", placeholder: hint, autocomplete: "off", spellcheck: "false", "aria-label": label, oninput: () => setQuery({ text: search.value }),
  });
  const held = Object.entries(listed.sorts).filter(([name]) => valuesOf(name).some((value) => value !== null));
  const sort = select("sort", "Sort by", held.map(([name, { label: words }]) => [name, words]));
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
        ...filters.map(({ name, label: words, options }) => el("div", { class: "field" }, select(name, words, options))),
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

function select(name, label, options) {
  const control = el("select", { id: name, "aria-label": label, title: label, onchange: () => setQuery({ [name]: control.value }) });
  control.append(...options.map(([value, text]) => el("option", { value }, text)));
  return control;
}

function setQuery(change) {
  Object.assign(query, change);
  if (change.sort) sortBy(change.sort);
  updateList();
}

/** Sort by a column in its usual direction: largest first, unless it says otherwise. */
function sortBy(name) {
  query.up = listed.sorts[name].up ?? false;
}

function resetQuery() {
  byId("search").value = "";
  setQuery(NO_FILTER);
}

function updateList() {
  findItems();
  byId("sort").value = query.sort;
  for (const { name } of filters) {
    byId(name).value = query[name];
    byId(name).classList.toggle("set", query[name] !== NO_FILTER[name]);
  }
  const [all, name] = listed.total();
  countLine.textContent = found.length < all ? `${number(found.length)} of ${plural(all, name)}` : plural(all, name);
  byId("reset").hidden = Object.entries(NO_FILTER).every(([filter, value]) => query[filter] === value);
  byId("direction").textContent = query.up ? "↑" : "↓";
  byId("direction").setAttribute("aria-label", query.up ? "Ascending; turn to descending" : "Descending; turn to ascending");
  rows.scrollTop = 0;
  spacer.style.height = `${found.length * ROW_HEIGHT}px`;
  drawRows();
}

/** Only the rows in sight exist, so 5,000 items cost what 20 do. */
function drawRows() {
  const first = Math.max(0, Math.floor(rows.scrollTop / ROW_HEIGHT) - 4);
  const last = Math.min(found.length, Math.ceil((rows.scrollTop + rows.clientHeight) / ROW_HEIGHT) + 4);
  const scale = barScale(valuesOf(query.sort), listed.sorts[query.sort].log);
  const drawn = [];
  for (let place = first; place < last; place += 1) drawn.push(row(found[place], place, scale));
  if (!found.length) drawn.push(el("p", { class: "none" }, `No ${listed.noun} fits. Clear the filters or search for part of a token.`));
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

function row(item, place, scale) {
  const value = valuesOf(query.sort)[item];
  const node = el(
    "div",
    {
      class: `row ${item === chosenPlace ? "chosen" : ""}`, role: "option", id: `row-${item}`, "aria-selected": String(item === chosenPlace),
      "aria-setsize": found.length, "aria-posinset": place + 1, onclick: () => openInList(item),
    },
    el("div", { class: "name" }, ...listed.name(item)),
    el("div", { class: "does" }, ...listed.does(item)),
    el(
      "div",
      { class: "amount" },
      el("span", {}, listed.sorts[query.sort].write(value)),
      el("div", { class: "track" }, el("i", { "width%": percentOf(scale(value)) })),
    ),
  );
  node.style.top = `${place * ROW_HEIGHT}px`;
  return node;
}

function moveInList(event) {
  const page = Math.max(1, Math.floor(rows.clientHeight / ROW_HEIGHT) - 1);
  const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -found.length, End: found.length }[event.key];
  if (!step || !found.length) return;
  event.preventDefault();
  stepInList(step);
}

/** Open the item some rows further in the present order. */
function stepInList(step) {
  if (!found.length) return;
  const at = found.indexOf(chosenPlace);
  const next = at < 0 ? (step > 0 ? 0 : found.length - 1) : Math.min(Math.max(at + step, 0), found.length - 1);
  openInList(found[next], false);
}

function openInList(place, move = true) {
  // at once, for the next key may come before the address has changed
  chosenPlace = place;
  location.hash = listed.ids[place];
  if (move) document.body.dataset.panel = "view";
}

/** Mark an item in the list and bring its row into sight. */
function chooseInList(place) {
  chosenPlace = place;
  const at = found.indexOf(place);
  const top = at * ROW_HEIGHT;
  const seen = top >= rows.scrollTop && top + ROW_HEIGHT <= rows.scrollTop + rows.clientHeight;
  if (at >= 0 && !seen) rows.scrollTop = top - (rows.clientHeight - ROW_HEIGHT) / 2;
  drawRows();
}

/** Show the list with these filters alone. */
function listOnly(set) {
  resetQuery();
  setQuery(set);
  document.body.dataset.panel = "list";
}
