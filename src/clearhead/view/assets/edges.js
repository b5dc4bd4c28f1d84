// The edges of a head on a sentence, sparse beside dense: as arcs above and below the tokens, and as squares.
// An edge is three numbers in a row: query, key, thousandths.

const LEAST_SHOWN = 10;
const SHADES = [0.16, 0.34, 0.52, 0.76, 1];

/** Edges as [query, key, weight], those of the base from 1 % on. */
function edgesOf(flat, least = 0) {
  const edges = [];
  for (let at = 0; at < flat.length; at += 3) if (flat[at + 2] >= least) edges.push([flat[at], flat[at + 1], flat[at + 2] / 1000]);
  return edges;
}

/**
 * Tokens in one line with the arcs of the sparse model above and of the base below. `tokens` are texts; `label` says
 * whose attention it is. Arcs are drawn by `drawButterflies`, once the tokens have their places.
 */
function butterfly(tokens, { model, base }, label) {
  const edges = { up: edgesOf(model), down: base === null ? [] : edgesOf(base, LEAST_SHOWN) };
  const reads = new Set(edges.up.map(([query]) => query));
  const box = el("div", { class: "butterfly scroll", tabindex: 0, role: "group", "aria-label": label });
  const chips = tokens.map((text, place) =>
    el(
      "button",
      {
        type: "button", class: `chip ${reads.has(place) ? "" : "silent"}`, "data-tip": saidOf(tokens, edges, place), "aria-label": saidOf(tokens, edges, place),
        onmouseenter: () => single(box, place), onmouseleave: () => single(box, null), onfocus: () => single(box, place), onblur: () => single(box, null),
      },
      text.trim() ? text : text.replaceAll(" ", "\u2423"),
    ),
  );
  const wings = { up: svg("svg", { class: "wing up", "aria-hidden": "true" }), down: svg("svg", { class: "wing down", "aria-hidden": "true" }) };
  box.append(el("div", { class: "body" }, wings.up, el("div", { class: "chips" }, ...chips), base === null ? nothing() : wings.down));
  butterflies.set(box, { edges, wings, chips });
  return box;
}

const butterflies = new Map();

/** Draw, or draw again, the arcs of what is on the page, and forget what has left it. */
function drawButterflies() {
  for (const [box, { edges, wings, chips }] of butterflies) {
    if (!box.isConnected) {
      butterflies.delete(box);
      continue;
    }
    const body = box.firstElementChild;
    const centres = chips.map((chip) => chip.offsetLeft + chip.offsetWidth / 2);
    const longest = Math.max(1, ...edges.up.concat(edges.down).map(([query, key]) => centres[query] - centres[key]));
    const height = Math.min(130, 24 + longest * 0.3);
    for (const side of ["up", "down"]) {
      wings[side].setAttribute("viewBox", `0 0 ${body.scrollWidth} ${height}`);
      wings[side].style.height = `${height}px`;
      const order = [...edges[side]].sort((a, b) => a[2] - b[2]);
      wings[side].replaceChildren(...order.map(([query, key, weight]) => arc(centres, query, key, weight, side === "up", height, longest)));
    }
  }
}

/** An arc from the token that is read to the one that reads; a token that reads itself has a loop. */
function arc(centres, query, key, weight, up, height, longest) {
  const floor = up ? height - 2 : 2;
  const rise = (distance) => (up ? floor - distance : floor + distance);
  const [start, end] = [centres[key], centres[query]];
  const lift = 10 + (height - 18) * Math.sqrt((end - start) / longest);
  const path = query === key ? `M ${start - 3} ${floor} C ${start - 9} ${rise(15)}, ${start + 9} ${rise(15)}, ${start + 3} ${floor}` : `M ${start} ${floor} C ${start} ${rise(lift * 1.3)}, ${end} ${rise(lift * 1.3)}, ${end} ${floor}`;
  return svg("path", { d: path, "data-query": query, "stroke-width": (0.8 + 3 * weight).toFixed(2), "stroke-opacity": (0.25 + 0.7 * weight).toFixed(2) });
}

/** Only the arcs into one token, or all of them. */
function single(box, place) {
  box.classList.toggle("alone", place !== null);
  for (const path of box.querySelectorAll("path")) path.classList.toggle("of", Number(path.dataset.query) === place);
}

/** What a token reads, in words. */
function saidOf(tokens, edges, place) {
  const listed = (side) => {
    const own = edges[side].filter(([query]) => query === place).sort((a, b) => b[2] - a[2]);
    const more = own.length > 6 ? `, and ${own.length - 6} more` : "";
    return own.slice(0, 6).map(([, key, weight]) => `${quoted(tokens[key])}${key === place ? " (itself)" : ""} ${percent(weight)}`).join(", ") + more;
  };
  const base = listed("down");
  return `${quoted(tokens[place])} reads ${listed("up") || "nothing"}${base ? `\nin the base: ${base}` : ""}`;
}

/** A pattern as squares, queries down and keys across; five shades, one path each. */
function squares(size, edges, kind, label) {
  const paths = SHADES.map(() => "");
  for (const [query, key, weight] of edges) paths[Math.min(SHADES.length - 1, Math.floor(Math.sqrt(weight) * SHADES.length))] += `M${key} ${query}h1v1h-1z`;
  const corner = `M0 0${"h1v1".repeat(size)}H0z`;
  return svg(
    "svg",
    { class: `squares ${kind}`, viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": label },
    svg("path", { class: "seen", d: corner }),
    ...paths.map((d, place) => svg("path", { d, "fill-opacity": SHADES[place] })),
  );
}
