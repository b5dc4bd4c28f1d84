// Where units stand: columns are tokens, as wide as what is shown in them needs; rows are layers.

const SPACING = 13;
/** Down to which units stand closer where the graph has no tokens, so that its one column fits the frame. */
const CLOSEST = 8;
const LABELLED = 54;
/** From how many targets on their labels stand at two heights, closer together. */
const STAGGERED = 4;
const NARROWEST = 26;
const CLOSED = 16;

/** Up to how many units in a row of a graph without tokens stand so far apart that their names fit beside them. */
const NAMED = 12;
const LETTER = 6;
const BEFORE_NAME = 16;
const PARTS = { reads: "q, k", attention: "attn", mlp: "mlp" };

/** Words for a row: `4.reads`, `4.attention`, `4.mlp`, `embedding`, `target`. Parts are named only where a layer has several. */
function rowWords(name) {
  if (name === "embedding") return "tokens";
  if (name === "target") return "output";
  const [layer, part] = name.split(".");
  return index.rows.filter((row) => row.startsWith(`${layer}.`)).length > 1 ? `${layer} ${PARTS[part]}` : `layer ${layer}`;
}

const nameWidth = (place) => BEFORE_NAME + LETTER * Math.max(...linesOf(place).map((line) => line.length));

/** Positions of the shown units in pixels, the columns with their tokens, and the size of the whole. */
function arrange(shown, available) {
  const rows = Math.max(index.rows.length, 1);
  // few rows leave room for edges between them
  const height = Math.min(rows < 8 ? 90 : 40, Math.max(12, Math.floor((rows < 8 ? 320 : 500) / rows)));
  const targets = units.id.filter((_, place) => shown[place] && isTarget(place)).length;
  const staggered = targets >= STAGGERED;
  const top = staggered ? 30 : 18;
  const rowAt = new Map(index.rows.map((name, at) => [name, top + height * (index.rows.length - 1 - at) + height / 2]));
  const last = index.tokens.length - 1;
  const cells = new Map();
  const columnOf = (place) => units.position[place] ?? (isTarget(place) && last >= 0 ? last : -1);
  units.id.forEach((_, place) => {
    if (!shown[place]) return;
    const column = columnOf(place);
    if (!cells.has(column)) cells.set(column, new Map());
    const inColumn = cells.get(column);
    if (!inColumn.has(units.row[place])) inColumn.set(units.row[place], []);
    inColumn.get(units.row[place]).push(place);
  });
  const most = Math.max(1, ...[...cells.values()].flatMap((column) => [...column].map(([row, places]) => (row === "target" ? 0 : places.length))));
  const named = !index.tokens.length && most <= NAMED;
  const nameWidths = new Map();
  if (named) units.id.forEach((_, place) => shown[place] && nameWidths.set(units.row[place], Math.max(nameWidths.get(units.row[place]) ?? 0, nameWidth(place))));
  const widest = Math.max(0, ...nameWidths.values());
  const spacing = index.tokens.length ? SPACING : Math.min(SPACING, Math.max(CLOSEST, (available - 12) / most));
  const step = (row) => (named ? nameWidths.get(row) : row !== "target" ? spacing : staggered ? LABELLED / 2 : LABELLED);
  const margin = (row) => (row === "target" ? 40 : 6);
  const wanted = (column) => Math.max(NARROWEST, ...[...cells.get(column)].map(([row, places]) => places.length * step(row) + margin(row)));
  const positions = [...new Set([...index.tokens.keys(), ...cells.keys()])].sort((a, b) => a - b);
  const columns = [];
  for (const position of positions) {
    if (cells.has(position)) columns.push({ position, width: wanted(position) });
    // tokens in a row at which nothing is shown share one narrow column
    else if (columns.at(-1)?.until !== undefined) columns.at(-1).until = position;
    else columns.push({ position, until: position, width: CLOSED });
  }
  const natural = columns.reduce((sum, { width }) => sum + width, 0);
  const spare = Math.max(0, available - natural) / Math.max(1, columns.filter(({ until }) => until === undefined).length);
  const x = new Float32Array(units.id.length).fill(NaN);
  const y = new Float32Array(units.id.length).fill(NaN);
  const raised = new Set();
  let left = 0;
  for (const column of columns) {
    if (column.until === undefined) column.width += named ? spare : Math.min(spare, 90);
    column.left = left;
    for (const [row, places] of cells.get(column.position) ?? []) {
      const between = Math.min(Math.max(step(row), (column.width - margin(row)) / places.length), row === "target" ? step(row) * 1.6 : named ? Infinity : index.tokens.length ? 22 : 44);
      const half = ((places.length - 1) / 2) * between;
      // names stand to the right of their marks, which are as far left in every row, where the row has room for it
      const aside = named ? Math.max(step(row) / 2, Math.min(widest / 2, column.width / 2 - half - margin(row))) : 0;
      places.forEach((place, at) => {
        x[place] = left + column.width / 2 - aside - half + at * between;
        y[place] = rowAt.get(row);
        if (staggered && at % 2 && row === "target") raised.add(place);
      });
    }
    left += column.width;
  }
  return { x, y, columns, rowAt, raised, named, width: Math.max(left, available), height: top + height * index.rows.length + 6 };
}
