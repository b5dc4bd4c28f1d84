// The view of one head: its verdict and why, its numbers, its modes, its firings, and the panels beside them.

const NEAR_SHOWN = 4;

async function showHead(place, mode) {
  const view = byId("view");
  const name = location.hash;
  const detail = await headDetail(place);
  if (location.hash !== name) return;
  const firings = firingsPanel(place, detail, mode);
  const choose = (one) => {
    fillFirings(firings, place, detail, { mode: one, count: AT_ONCE });
    firings.scrollIntoView({ block: "nearest" });
  };
  view.replaceChildren(
    limitsNotice(),
    el(
      "div",
      { class: "unit head" },
      headTitle(place, detail),
      reasons(place, detail),
      headFigures(place, detail),
      el(
        "div",
        { class: "columns" },
        el("div", { class: "main" }, modesPanel(detail, choose), firings),
        el("div", { class: "aside" }, controlsPanel(place, detail), spectrumPanel(place, detail), behaviourPanel(place)),
      ),
    ),
  );
  view.scrollTop = 0;
  // after the text, for starting plotly takes longer than all the rest
  redrawCharts();
}

function limitsNotice() {
  const text = limitsText();
  return text ? notice(text) : nothing();
}

function headTitle(place, detail) {
  const layer = heads.layer[place];
  const tags = behaviours(place).map((name) => el("span", { class: "tag", "data-tip": index.help[name] }, `${BEHAVES[name]} ${hundredths(heads[name][place])}`));
  if (detail.by_offset) tags.push(el("span", { class: "tag", "data-tip": index.help.basis }, "basis by offset"));
  return el(
    "div",
    { class: "title" },
    el("h1", {}, "Head ", el("code", {}, shortId(place))),
    el("div", { class: "tags" }, verdictTag(verdictOf(place)), ...tags, el("a", { class: "tag", href: `#layer.${layer}` }, `layer ${layer}`)),
    moves(),
  );
}

function reasons(place, detail) {
  const { name, meaning } = verdictOf(place);
  return el("p", { class: "reasons" }, el("b", {}, `${name[0].toUpperCase()}${name.slice(1)}.`), meaning ? ` ${meaning} ` : " ", detail.reasons.join(" "));
}

function headFigures(place, detail) {
  const gauge = detail.controls[0];
  const beside = (name) => (gauge ? `${gauge.control} ${name === "sparsity" ? hundredths(gauge[name]) : number(gauge[name])}` : "");
  const sinks = heads.n_sink[place];
  const short = (value) => number(Number(value.toPrecision(2)));
  const entries = [
    ["sparsity", "S", hundredths(heads.sparsity[place]), beside("sparsity")],
    ["n_recon", "N_recon", number(heads.n_recon[place]), beside("n_recon")],
    ["cancellation", "Cancellation", number(heads.cancellation[place]), ""],
    ["largest_rank", "Largest mode", percent(heads.largest_rank[place]), nearMode(place)],
    ["firings", "Firings", number(heads.n_firings[place]), sinks ? `+ ${number(sinks)} on first` : ""],
    ["rank", "Rank", number(heads.rank[place]), heads.degenerate[place] ? `${number(heads.degenerate[place])} degenerate` : `of ${heads.width[place]}`],
    ["energy", "Energy", `${short(heads.energy_query[place])}, ${short(heads.energy_key[place])}`, "query, key"],
  ];
  return el("div", { class: "figures" }, ...entries.map(([name, label, value, small]) => bigNumber(label, value, help(name, label), small)));
}

/** The largest mode's place in the spectrum as the number of a mode. */
function nearMode(place) {
  const rank = heads.largest_rank[place];
  return rank === null ? "" : `near mode ${Math.round(rank * (heads.width[place] - 1))}`;
}

/** One line per mode: what a query holds, what a key holds, and how much it matters; choosing one filters the firings. */
function modesPanel(detail, choose) {
  if (!detail.modes.length) return nothing();
  const largest = Math.max(...detail.modes.map(({ share }) => share), 1e-9);
  const line = (mode) =>
    el(
      "tr",
      {},
      el(
        "th",
        { scope: "row" },
        el("button", { type: "button", class: "plain", "data-mode": mode.mode, "aria-label": `Firings by mode ${mode.mode}`, onclick: () => choose(mode.mode) }, `mode ${mode.mode}`),
        el("small", {}, `σ ${number(mode.sigma)}`),
        mode.degenerate ? el("small", { "data-tip": index.help.rank }, "degenerate") : null,
      ),
      el("td", { class: "share" }, el("span", {}, percent(mode.share)), el("div", { class: "track" }, el("i", { "width%": percentOf(mode.share / largest) })), detail.by_offset ? null : el("small", {}, alongText(mode))),
      nearCell(mode.query, detail.by_offset),
      el("td", { class: "arrow", "aria-hidden": "true" }, "→"),
      nearCell(mode.key, detail.by_offset),
    );
  const column = (label, explanation = null) => el("th", { scope: "col" }, label, explanation);
  const table = el(
    "table",
    { class: "modes" },
    el("thead", {}, el("tr", {}, column("Mode"), column("Share", detail.by_offset ? null : help("direction", "along and against")), column("A query near"), el("th", { "aria-hidden": "true" }), column("looks at a key near"))),
    el("tbody", {}, ...detail.modes.map(line)),
  );
  return panel("Modes that carry the contributions", help("modes"), el("div", { class: "wide-table" }, table));
}

/** The nearest tokens of one side, all of them with their cosines in the tip; the reason where there are none. */
function nearCell(tokens, byOffset) {
  if (!tokens.length) return el("td", { class: "side nothing" }, byOffset ? "differs with the offset" : "no token nearer than chance");
  const said = tokens.map(([token, cosine]) => `${quoted(vocab[token])} ${signed(cosine, hundredths)}`).join("\n");
  return el("td", { class: "side", "data-tip": said }, ...tokens.slice(0, NEAR_SHOWN).map(([token]) => pill(vocab[token])));
}

function alongText({ n, along }) {
  if (!n) return MISSING;
  const share = along / n;
  return share >= 0.5 ? `along ${percent(share)}` : `against ${percent(1 - share)}`;
}

function controlsPanel(place, detail) {
  if (!detail.controls.length || heads.sparsity[place] === null) return nothing();
  const spec = structuredClone(index.templates.controls);
  const own = heads.sparsity[place];
  const column = (name) => detail.controls.map((control) => control[name]);
  const [effect, low, high] = ["effect", "low", "high"].map(column);
  Object.assign(spec.data[0], { x: effect.map((value) => own + value), y: column("control"), customdata: effect.map((value, at) => [value, low[at], high[at]]) });
  Object.assign(spec.data[0].error_x, { array: high.map((value, at) => value - effect[at]), arrayminus: effect.map((value, at) => value - low[at]) });
  Object.assign(spec.layout.shapes[0], { x0: own, x1: own });
  Object.assign(spec.layout.shapes[1], { x0: detail.reference, x1: detail.reference });
  spec.layout.height = 92 + 24 * detail.controls.length;
  const line = (control) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", "data-tip": index.help[`control ${control.control}`] ?? null }, control.control),
      el("td", {}, hundredths(control.sparsity)),
      el("td", {}, `${change(control.effect)} (${hundredths(control.low)} to ${hundredths(control.high)})`),
      el("td", {}, chance(control.q)),
      el("td", {}, number(control.n_recon)),
    );
  const table = el(
    "table",
    { class: "controls-table" },
    el("thead", {}, el("tr", {}, ...["", "S", "difference (95 %)", "q", "N_recon"].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, el("tr", { class: "own" }, el("th", { scope: "row" }, "this head"), el("td", {}, hundredths(own)), el("td", {}), el("td", {}), el("td", {}, number(heads.n_recon[place]))), ...detail.controls.map(line)),
  );
  return panel("S against every control", help("controls"), chart(spec, `S of the head, ${hundredths(own)}, against every control`), el("div", { class: "wide-table" }, table));
}

/** A probability in as few characters as say how small it is. */
function chance(q) {
  if (q === null) return MISSING;
  return q < 0.001 ? "<0.001" : q.toFixed(q < 0.1 ? 3 : 2);
}

function spectrumPanel(place, detail) {
  if (!detail.sigma.some((value) => value > 0)) return nothing();
  const spec = structuredClone(index.templates.spectrum);
  const positive = (value) => (value > 0 ? value : null);
  Object.assign(spec.data[0], { x: detail.sigma.map((_, mode) => mode), y: detail.sigma.map(positive) });
  const marked = detail.modes.filter(({ sigma }) => sigma > 0);
  Object.assign(spec.data[1], { x: marked.map(({ mode }) => mode), y: marked.map(({ sigma }) => sigma), customdata: marked.map(({ share }) => share) });
  spec.data[1].marker.size = marked.map(({ share }) => 6 + 14 * Math.sqrt(share));
  return panel("Spectrum", help("spectrum"), chart(spec, `Singular values of head ${shortId(place)}`));
}

function behaviourPanel(place) {
  const bar = (name) => [
    el("dt", {}, BEHAVES[name], help(name, BEHAVES[name])),
    el("dd", {}, el("div", { class: "track" }, el("i", { "width%": percentOf(Math.min(heads[name][place], 1)) })), hundredths(heads[name][place])),
  ];
  return panel("What the head does", help("behaviour", "behaviour"), el("dl", { class: "behaviour" }, ...Object.keys(BEHAVES).flatMap(bar)));
}
