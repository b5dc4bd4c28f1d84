// Parts of every view: panels, large numbers, and the step to the next of the list.

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
