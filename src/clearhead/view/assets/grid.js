// A grid of cells that the keyboard can walk: the map of heads, and the matrices of a layer.

/**
 * `rows`: labels, or {label, href}; `columns`: labels; `cellAt(row, column)`: null for none, else
 * {text, tip, strength (0 to 1) or fill, open}. `strength` mixes one hue into the ground, so that darkness alone orders.
 */
function cellGrid({ rows: rowNames, columns, corner = "", label, cellAt }) {
  const cells = new Map();
  const head = (name, axis) => {
    const inner = typeof name === "object" ? el("a", { href: name.href, title: name.title }, name.label) : name;
    return el("span", { class: `axis of-${axis}`, role: `${axis}header` }, inner);
  };
  const grid = el("div", { class: `grid ${rowNames.length > 20 ? "low" : ""} ${columns.length > 9 ? "many" : ""}`, role: "grid", "aria-label": label, "--columns": columns.length, onkeydown: (event) => walk(event, cells, rowNames.length, columns.length) });
  grid.append(el("div", { class: "line", role: "row" }, el("span", { class: "axis corner" }, corner), ...columns.map((name) => head(name, "column"))));
  rowNames.forEach((name, row) => {
    const line = el("div", { class: "line", role: "row" }, head(name, "row"));
    columns.forEach((_, column) => {
      const made = gridCell(cellAt(row, column));
      if (made.matches("button")) cells.set(`${row},${column}`, made);
      line.append(made);
    });
    grid.append(line);
  });
  const first = [...cells.values()].find((cell) => cell.matches(".chosen")) ?? cells.values().next().value;
  first?.setAttribute("tabindex", 0);
  return el("div", { class: "grid-frame" }, grid);
}

function gridCell(content) {
  if (content === null) return el("span", { class: "cell empty", role: "gridcell" });
  const { text, tip: said, strength = null, fill = null, chosen = false, open } = content;
  const attributes = { type: "button", role: "gridcell", tabindex: -1, "aria-label": said.replaceAll("\n", ", "), "data-tip": said, onclick: open };
  const shade = strength === null ? { "--fill": fill ?? "var(--raised)" } : { "--strength": percentOf(0.04 + 0.9 * strength) };
  const kind = strength === null ? (fill ? "filled" : "bare") : strength > 0.5 ? "shaded strong" : "shaded";
  return el("button", { class: `cell ${kind} ${chosen ? "chosen" : ""}`, ...attributes, ...shade }, text);
}

/** Arrow keys move over cells, skipping holes; Home and End go to the ends of a row. */
function walk(event, cells, height, width) {
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  const at = [...cells].find(([, cell]) => cell === event.target);
  if (!at || (!step && event.key !== "Home" && event.key !== "End")) return;
  event.preventDefault();
  const [row, column] = at[0].split(",").map(Number);
  const inRow = [...Array(width).keys()].filter((place) => cells.has(`${row},${place}`));
  let next = step ? null : cells.get(`${row},${event.key === "Home" ? inRow[0] : inRow.at(-1)}`);
  if (step) {
    let [y, x] = [row + step[0], column + step[1]];
    while (y >= 0 && y < height && x >= 0 && x < width && !next) {
      next = cells.get(`${y},${x}`);
      [y, x] = [y + step[0], x + step[1]];
    }
  }
  if (!next) return;
  event.target.setAttribute("tabindex", -1);
  next.setAttribute("tabindex", 0);
  next.focus();
}

/** A function from values to 0…1 between the smallest and the largest, over logarithms where they span decades. */
function strengths(values, log) {
  const eased = (value) => (log ? Math.log10(Math.max(value, 1e-12)) : value);
  const known = values.filter((value) => value !== null && (!log || value > 0)).map(eased);
  const low = Math.min(...known);
  const spread = Math.max(...known) - low;
  return (value) => (value === null ? null : spread > 0 ? Math.min(Math.max((eased(value) - low) / spread, 0), 1) : 0.5);
}

/** The scale of a shaded grid: its ends as numbers. */
function shadeScale(low, high) {
  return el("span", { class: "scale" }, low, el("i", { class: "shades" }), high);
}
