// Where the numbers come from: in the bar in short, in the dialog whole.

function buildProvenance() {
  const { model, layer, model_note: note, task, text, text_sha256: hash, tokens } = index.about;
  const place = layer === undefined || layer === null ? "" : ` · layer ${layer}`;
  const about = [task, text, tokens ? `${number(tokens)} tokens` : "", hash ? `sha256 ${hash.slice(0, 12)}` : ""].filter(Boolean).join(" · ");
  const lines = [el("div", {}, el("strong", {}, model ?? "unnamed model"), place, about ? el("span", { class: "note" }, `  ${about}`) : null)];
  if (note && note !== model) lines.push(el("div", { class: "note", title: note }, note));
  byId("provenance").append(...lines);
}

function buildAbout() {
  const dialog = byId("about");
  const entries = flat(index.about);
  const close = el("button", { type: "button", class: "plain", onclick: () => dialog.close() }, "Close");
  const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;
  const { data, plotly: library } = index.bytes;
  const { leftOut, keys } = notes();
  const shortcuts = [[["/"], "search"], [["j", "k"], `next and previous ${listed.noun}`], ...keys];
  const parts = [
    el("header", {}, el("h2", { id: "about-title" }, "Where these numbers come from"), close),
    el("dl", {}, ...entries.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    el("p", {}, `This file makes no network request. Packed data take ${megabytes(data)} of it, plotly.js ${megabytes(library)}.`),
    leftOut ? el("p", {}, leftOut) : null,
    el("p", {}, ...shortcuts.flatMap(([names, words]) => [...names.flatMap((name) => [el("kbd", {}, name), " "]), `${words}  `])),
  ];
  dialog.append(...parts.filter((part) => part !== null));
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  byId("to-about").addEventListener("click", () => dialog.showModal());
}

/** Nested objects as [“a · b”, text] pairs. */
function flat(value, name = "") {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    return Object.entries(value).flatMap(([key, inner]) => flat(inner, name ? `${name} · ${key}` : key));
  }
  const text = Array.isArray(value) ? value.map(String).join(" ") : String(value ?? MISSING);
  return [[name.replaceAll("_", " "), text || MISSING]];
}
