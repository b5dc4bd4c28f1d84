// What is known of one unit, and of one edge with the heads that carry it.

const NEEDED = 0.9;

function showUnit(place) {
  const figure = (name, label, value, small = "") => bigNumber(label, value, help(name, label), small);
  const known = (value, made) => (value === null ? [] : [made]);
  const others = Object.entries(index.values).filter(([name, column]) => name !== "influence" && name !== "error_share" && column[place] !== null);
  const gloss = wordsOf(place);
  const token = tokenOf(place);
  const pin = el("button", { type: "button", class: "plain", id: "pin", onclick: () => togglePin(place), title: "Keep in sight (p)" }, sight.pinned.has(place) ? "Unpin" : "Pin");
  const group = groupOf(place);
  const tables = index.attention.map((line, at) => [line, at]).filter(([line]) => concerns(line, place));
  return [
    el("div", { class: "title" }, el("h2", {}, el("i", { class: `dot k-${units.kind[place]}` }), el("code", {}, units.id[place])), pin, moves()),
    el("p", { class: "sentence" }, el("span", {}, KINDS[units.kind[place]]), sides === null ? null : el("span", {}, sideWords(sideOf(place))), gloss === null ? null : pill(gloss), token === null ? null : el("span", {}, "at"), token === null ? null : pill(token), units.position[place] === null ? null : el("span", {}, `token ${units.position[place]}`), group === null ? null : el("a", { href: `#group.${group}` }, `in ${quoted(groups[group].name)}`)),
    el(
      "div",
      { class: "figures" },
      ...known(units.activation[place], figure("activation", sides === null ? "Activation" : "Activation, difference", number(units.activation[place]))),
      figure(index.ranked, index.ranked === "influence" ? "Influence up to here" : "Weight before it", percent(units.rank[place])),
      ...(into[place].length ? [figure("balance", "Sum of inputs", signed(units.balance[place])), figure("errors_in", "Input from errors", percent(units.errors[place]))] : []),
      ...others.map(([name, column]) => figure(name, name.replaceAll("_", " "), number(column[place]))),
      ...known(units.read[place], figure("read", "|read|", number(units.read[place]))),
      ...known(units.write[place], figure("write", "|write|", number(units.write[place]))),
    ),
    panel(`In: ${plural(into[place].length, "edge")}`, help("in", "edges in"), edgeTable(into[place], edges.source, "Nothing in this graph contributes to it.")),
    panel(`Out: ${plural(outOf[place].length, "edge")}`, help("out", "edges out"), edgeTable(outOf[place], edges.target, "It contributes to nothing in this graph.")),
    ...(tables.length ? [panel("Where it looks", help("attention", "attention"), attentionList(tables.map(([, at]) => at)))] : []),
  ];
}

/** Whether an attention table explains this unit. */
function concerns(line, place) {
  if (line.unit === units.id[place]) return true;
  const [kind, layer, head] = units.id[place].split("@")[0].split(".");
  return line.kind === "edge" && kind.startsWith("head") && Number(layer) === line.layer && Number(head) === line.head && (units.position[place] === null || units.position[place] === line.query);
}

async function showEdge(edge) {
  const [from, to] = [edges.source[edge], edges.target[edge]];
  const figure = (label, value, text, small = "") => bigNumber(label, value, explain(text, label), small);
  const carried = index.loadings === null ? null : (await part("loadings", Math.floor(edge / index.loadings.size)))[edge % index.loadings.size];
  const heads = carried === null ? [] : triples(carried[2]);
  const needed = carried === null ? null : neededHeads(heads, carried[0]);
  return [
    el("div", { class: "title edge-title" }, el("h2", {}, "Edge")),
    el("p", { class: "sentence ends" }, unitLink(units.id[from]), "→", unitLink(units.id[to])),
    el(
      "div",
      { class: "figures" },
      figure(sides === null ? "Weight" : "Difference", signed(edges.weight[edge]), index.protocol),
      ...(sides === null ? [] : ["first", "second"].map((name, at) => figure(`In ${sides.names[at]}`, number(edges[name][edge]), "Its weight in this graph; 0 where it has no such edge."))),
      figure("Share of the input", percent(shareOf(edge)), "|weight| over Σ|weight| of all edges into the upper unit."),
      figure("Rank", number(edge + 1), "Place among all edges by |weight|.", `of ${number(index.edges.all)}`),
      ...(heads.length ? [figure("Heads for 90 %", needed === null ? `> ${heads.length}` : number(needed), index.help.heads_needed, `of ${heads.length}`)] : []),
    ),
    ...loadingPanels(edge, carried, heads),
  ];
}

const triples = (flatList) => Array.from({ length: flatList.length / 3 }, (_, at) => flatList.slice(3 * at, 3 * at + 3));

/** How many of the largest heads reach 90 % of Σ|loading|; null when more are needed than the page holds. */
function neededHeads(heads, whole) {
  let sum = 0;
  for (let at = 0; at < heads.length; at += 1) {
    sum += Math.abs(heads[at][2]);
    if (sum >= NEEDED * whole * (1 - 1e-3)) return at + 1;
  }
  return null;
}

function loadingPanels(edge, carried, heads) {
  if (index.loadings === null) return [el("p", { class: "hint" }, "This graph says nothing about the heads that carry its edges.")];
  const about = el("p", { class: "hint" }, `${quoted(index.loadings.kind)}: ${index.loadings.words || "see the protocol."}`);
  if (!heads.length) return [panel("Heads that carry it", help("loadings", "loadings"), about, el("p", {}, "No head carries this edge: it stays at its token."))];
  const [whole, net, , left] = carried;
  let sum = 0;
  const lines = heads.map(([layer, head, value]) => {
    sum += Math.abs(value);
    const places = tablesOfHead(edge, layer, head);
    return [
      el("span", { class: "unit-link" }, el("code", {}, `head ${layer}.${head}`), ...places.map((at) => el("a", { href: `#attention.${at}` }, "why"))),
      signedBar(value, Math.abs(heads[0][2])),
      percent(Math.abs(value) / whole),
      percent(Math.min(1, sum / whole)),
    ];
  });
  const columns = [["head", "", "unit-cell"], ["loading", "", "bar-cell"], ["share", index.help.loadings], ["together", "Share of this head and all above it."]];
  return [
    panel("Heads that carry it", help("loadings", "loadings"), about, longTable(columns, lines, "", ""), left ? el("p", { class: "hint" }, `The page holds the ${heads.length} largest; ${plural(left, "smaller one")} left out.`) : nothing(), el("p", { class: "hint" }, `These heads carry ${signed(net)} of the edge's ${signed(edges.weight[edge])}; the rest passes no head, or heads that are not listed. Σ|loading| ${number(whole)}.`)),
    panel("By layer and head", help("edge_map", "this map"), headMap(heads, "Loadings of this edge by layer and head", true)),
  ];
}

/** Attention tables of a head that fit the tokens an edge joins. */
function tablesOfHead(edge, layer, head) {
  const fits = ({ kind, layer: l, head: h, query: q, key: k }) => kind === "edge" && l === layer && h === head && (q === units.position[edges.target[edge]] || k === units.position[edges.source[edge]]);
  return index.attention.map((line, at) => [line, at]).filter(([line]) => fits(line)).map(([, at]) => at).slice(0, 2);
}
