// Building elements and writing numbers. Text reaches the page only as text nodes and attribute values.

/** An element with attributes, `on…` listeners and children; strings become text nodes. */
function el(tag, attributes = {}, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
function svg(tag, attributes = {}, ...children) {
  return furnish(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--") || name === "width%") node.style.setProperty(name.replace("%", ""), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const byId = (id) => document.getElementById(id);
const MISSING = "–";
const MINUS = "\u2212";

/** Three significant digits; "–" for a number the atlas does not hold. */
function number(value) {
  if (value === null || value === undefined) return MISSING;
  if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", MINUS);
  const size = Math.abs(value);
  if (size < 1e-4) return value.toExponential(1).replaceAll("-", MINUS);
  const text = size >= 1000 ? Math.round(size).toLocaleString("en") : Number(size.toPrecision(3)).toString();
  return (value < 0 ? MINUS : "") + text;
}

/** With its sign always written: colour is never the only carrier of a sign. */
function signed(value, write = number) {
  if (value === null || value === undefined) return MISSING;
  return (value < 0 ? MINUS : "+") + write(Math.abs(value));
}

function percent(value) {
  if (value === null || value === undefined) return MISSING;
  const hundredth = 100 * value;
  const digits = Math.abs(hundredth) >= 10 || hundredth === 0 ? 0 : Math.abs(hundredth) >= 1 ? 1 : 2;
  return hundredth !== 0 && Math.abs(hundredth) < 0.005 ? "<0.01 %" : `${hundredth.toFixed(digits).replace("-", MINUS)} %`;
}

const quoted = (text) => `\u2018${text}\u2019`;
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

/** A token on a grey ground, so that its leading space can be seen; spaces alone are written ␣. */
function pill(text) {
  const shown = text.trim() ? text : text.replaceAll(" ", "\u2423");
  return el("span", { class: "token-pill", title: text }, shown);
}
