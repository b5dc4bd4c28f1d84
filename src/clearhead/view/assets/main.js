// Routing by the address (#lorsa.12.345, #head.5.3, #summary), the colour scheme, and the keys that work everywhere.

const SCHEMES = ["light dark", "light", "dark"];
const SCHEME_NAMES = { "light dark": "as the system", light: "light", dark: "dark" };
const SCHEME_ICONS = {
  "light dark": "M8 2 a6 6 0 1 0 0.01 0 M8 2 v12 M10 4 h1 M10 6.5 h3 M10 9 h3.5 M10 11.5 h2",
  light: "M8 5 a3 3 0 1 0 0.01 0 M8 1 v1.5 M8 13.5 v1.5 M1 8 h1.5 M13.5 8 h1.5 M3 3 l1 1 M12 12 l1 1 M13 3 l-1 1 M4 12 l-1 1",
  dark: "M13 9.5 A5.5 5.5 0 1 1 6.5 3 A4.5 4.5 0 0 0 13 9.5",
};

function route() {
  const name = decodeURIComponent(location.hash.slice(1));
  hideTip();
  const known = openNamed(name);
  byId("to-summary").classList.toggle("current", !known);
  if (known) return;
  chooseInList(null);
  showSummary();
  if (name && name !== "summary") byId("view").prepend(notice(`There is no ${listed.noun} ${quoted(name)} on this page; this is the summary.`));
}

function setScheme(scheme) {
  document.documentElement.style.colorScheme = scheme;
  byId("theme").dataset.scheme = scheme;
  byId("theme").setAttribute("aria-label", `Colour scheme: ${SCHEME_NAMES[scheme]}`);
  byId("theme").title = `Colour scheme: ${SCHEME_NAMES[scheme]}`;
  byId("theme").replaceChildren(svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: SCHEME_ICONS[scheme] })));
  redrawCharts();
}

function onKey(event) {
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape") {
    hideTip();
    if (typing) event.target.blur();
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    document.body.dataset.panel = "list";
    byId("search").focus();
  }
  if (event.key === "j") stepInList(1);
  if (event.key === "k") stepInList(-1);
}

function togglePanel() {
  document.body.dataset.panel = document.body.dataset.panel === "list" ? "view" : "list";
  drawRows();
}

buildProvenance();
buildAbout();
buildList();
setScheme(SCHEMES[0]);
byId("theme").addEventListener("click", () => setScheme(SCHEMES[(SCHEMES.indexOf(byId("theme").dataset.scheme) + 1) % SCHEMES.length]));
byId("to-list").addEventListener("click", togglePanel);
byId("to-summary").addEventListener("click", () => (document.body.dataset.panel = "view"));
byId("view").addEventListener("click", (event) => event.target.closest("a[href^='#']") && (document.body.dataset.panel = "view"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
document.addEventListener("keydown", onKey);
addEventListener("hashchange", route);
new ResizeObserver(() => settle()).observe(byId("view"));
route();
