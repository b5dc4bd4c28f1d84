// Tables of signed weights with bars: edges of a unit, heads of an edge, units of an attention table.

const FEW = 12;

/** A weight as a bar from the middle, blue to the right and red to the left, with its number. */
function signedBar(value, largest) {
  const part = largest ? Math.min(Math.abs(value) / largest, 1) : 0;
  return el("span", { class: `signed-bar ${value < 0 ? "minus" : "plus"}`, "--part": part.toFixed(3) }, el("i"), el("b", {}, value === 0 ? "0" : signed(value)));
}

/**
 * A table of which the first few rows are shown and the rest on demand. `columns`: [label, explanation, class];
 * `lines`: cells of a row; `rest` says what the other rows hold.
 */
function longTable(columns, lines, rest, empty) {
  if (!lines.length) return el("p", { class: "hint none-here" }, empty);
  const head = el("tr", {}, ...columns.map(([label, text, kind]) => el("th", { scope: "col", class: kind ?? null }, label, explain(text, label))));
  const bodyOf = (some) => some.map((cells) => el("tr", {}, ...cells.map((cell, at) => el("td", { class: columns[at][2] ?? null }, cell))));
  const inner = el("tbody", {}, ...bodyOf(lines.slice(0, FEW)));
  const made = el("div", {}, el("div", { class: "scroll" }, el("table", { class: "numbers weights" }, el("thead", {}, head), inner)));
  if (lines.length > FEW) {
    const more = el("button", { type: "button", class: "more", onclick: () => { inner.append(...bodyOf(lines.slice(FEW))); more.remove(); } }, `Show all ${number(lines.length)}${rest ? `; ${rest}` : ""}`);
    made.append(more);
  }
  return made;
}

/** Edges into or out of a unit; `end` gives the other end. */
function edgeTable(some, end, empty) {
  const largest = Math.abs(edges.weight[some[0]] ?? 0);
  const drawn = new Set(seen?.shownEdges ?? []);
  const lines = some.map((edge) => [
    unitLink(units.id[end[edge]]),
    el("a", { class: "to-edge", href: `#${addressOf(edge)}`, "aria-label": `This edge: ${addressOf(edge)}` }, signedBar(edges.weight[edge], largest)),
    percent(shareOf(edge)),
    drawn.has(edge) ? "" : el("span", { class: "tag", "data-tip": "The sliders or the legend hide this edge or its other end.", tabindex: 0, "aria-label": "hidden" }, "○"),
  ]);
  const beyond = some.slice(FEW).reduce((sum, edge) => sum + Math.abs(edges.weight[edge]), 0);
  const whole = some.reduce((sum, edge) => sum + Math.abs(edges.weight[edge]), 0);
  const columns = [["unit", "", "unit-cell"], ["weight", "", "bar-cell"], ["share", ""], ["", ""]];
  return longTable(columns, lines, `the others hold ${percent(whole ? beyond / whole : 0)} of |weight|`, empty);
}

/** A grid of layers and heads with signed or unsigned values in its cells. `entries`: [layer, head, value]. */
function headMap(entries, label, isSigned) {
  const held = new Map(entries.map(([layer, head, value]) => [`${layer}.${head}`, value]));
  const everywhere = index.loadings.heads;
  const layers = [...new Set(everywhere.map(([layer]) => layer))].sort((a, b) => b - a);
  const heads = Math.max(...everywhere.map(([, head]) => head)) + 1;
  const largest = Math.max(...entries.map(([, , value]) => Math.abs(value)), 1e-30);
  return cellGrid({
    rows: layers.map(String),
    columns: [...Array(heads).keys()].map(String),
    label,
    cellAt: (row, column) => {
      const value = held.get(`${layers[row]}.${column}`);
      if (value === undefined) return { text: "", tip: `head ${layers[row]}.${column}: nothing listed`, fill: null };
      const said = `head ${layers[row]}.${column}: ${isSigned ? signed(value) : number(value)}`;
      const strength = Math.abs(value) / largest;
      if (!isSigned) return { text: "", tip: said, strength };
      const fill = `color-mix(in srgb, var(${value < 0 ? "--minus" : "--plus"}) ${(8 + 88 * strength).toFixed(0)}%, var(--raised))`;
      return { text: value < 0 ? MINUS : "", tip: said, fill };
    },
  });
}
