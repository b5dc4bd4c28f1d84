// Tokens in a line of text: words with their spaces outside the tint, and gaps that open when chosen.

const SHORTEST_GAP = 5;
const LONG = 40;
const MARKED = /^(?:[\u21b5\u21e5]|\u27e8[^\u27e9]+\u27e9)+$/;

/** One token as a span; `kind` is its further class. */
function wordSpan(position, text, kind = "") {
  const span = el("span", { class: `token ${kind} ${MARKED.test(text) ? "mark" : ""} ${text.length > LONG ? "long" : ""}`, "data-position": position });
  // the space before a word stays outside the tint, for a line may break there
  const spaces = text.trim() ? text.length - text.trimStart().length : 0;
  span.append(text.slice(0, spaces), el("span", { class: "word" }, text.slice(spaces)));
  return span;
}

/** `shown`, a set of positions, with the short gaps of [start, end) closed. */
function closeGaps(shown, start, end) {
  let last = start - 1;
  for (const position of [...shown].filter((p) => p >= start && p < end).sort((a, b) => a - b).concat(end)) {
    if (position - last <= SHORTEST_GAP) for (let near = last + 1; near < position; near += 1) shown.add(near);
    last = position;
  }
  return shown;
}

/** Append the tokens of [start, end) that are in `shown` (null for all), each made by `span`; `open` opens the gaps. */
function fillLine(line, start, end, shown, span, open) {
  let skipped = 0;
  const skip = () => {
    if (skipped) line.append(el("button", { type: "button", class: "gap", "aria-label": `Show ${plural(skipped, "more token")}`, onclick: open }, "…"));
    skipped = 0;
  };
  for (let position = start; position < end; position += 1) {
    if (shown && !shown.has(position)) {
      skipped += 1;
      continue;
    }
    skip();
    line.append(span(position));
  }
  skip();
}
