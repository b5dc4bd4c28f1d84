// Parts of every view: panels, large numbers, tables, and the step to the next of the list.

const percentOf = (fraction) => `${(100 * fraction).toFixed(1)}%`;

function panel(title, explanation, ...children) {
  return el("section", { class: "panel" }, el("h3", {}, title, explanation), ...children);
}

function bigNumber(label, value, explanation, small = "") {
  return el(
    "div",
    { class: "figure" },
    el("div", { class: "label" }, label, explanation),
    el("div", { class: "value" }, el("span", {}, value), small && value !== MISSING ? el("small", {}, ` ${small}`) : null),
  );
}

/** A panel with a table; `columns` are [label, help, cells of one row]. */
function tablePanel(title, columns, count) {
  const cell = (content) => (content instanceof Node ? content : String(content));
  const head = columns.map(([label, text, , kind]) => el("th", { scope: "col", class: kind ?? null }, label, explain(text, label)));
  const line = (row) => el("tr", {}, ...columns.map(([, , write, kind]) => el("td", { class: kind ?? null }, cell(write(row)))));
  const body = [...Array(count).keys()].map(line);
  const made = panel(title, null, el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, el("table", { class: "numbers" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body))));
  made.classList.add("whole");
  return made;
}

/** Buttons to the previous and next of the list. */
function moves() {
  return el(
    "div",
    { class: "moves" },
    el("button", { type: "button", class: "plain", id: "previous", "aria-label": "Previous in the list", title: "Previous in the list (k)", onclick: () => stepInList(-1) }, "‹"),
    el("button", { type: "button", class: "plain", id: "next", "aria-label": "Next in the list", title: "Next in the list (j)", onclick: () => stepInList(1) }, "›"),
  );
}

/** A filter of the list over the values of a column, none of them chosen at first unless `first` is. */
function choice(name, label, column, write, first = "") {
  const values = [...new Set(column)].filter((value) => value !== null);
  values.sort((a, b) => (typeof a === "number" ? a - b : a < b ? -1 : 1));
  const options = [["", `any ${label}`], ...values.map((value) => [String(value), write(value)])];
  return { name, label, first, options, keeps: (place, value) => String(column[place]) === value };
}

const nothing = () => el("span", { hidden: true });
const notice = (text) => el("p", { class: "notice" }, text);
