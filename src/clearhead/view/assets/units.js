// The units of the page: their columns, names, and what is unpacked when one is opened.

const units = index.units;
const placeOf = new Map(units.id.map((id, place) => [id, place]));
const kinds = [...new Set(units.kind)].sort((a, b) => ofKind(b) - ofKind(a));
const noun = units.kind.every((kind) => kind === "lorsa" || kind === "head") ? "head" : "unit";
const KIND_NAMES = { lorsa: "Lorsa head", head: "Attention head" };

const kindName = (kind) => KIND_NAMES[kind] ?? kind;
/** The id without its kind, where all units of the list or panel are of one. */
const shortId = (place) => units.id[place].slice(units.kind[place].length + 1);
const spans = (place) => units.spans[place];

function ofKind(kind) {
  return units.kind.filter((other) => other === kind).length;
}

/** Logits, histogram, shares and examples of one unit. */
async function detailOf(place) {
  const packed = await part("units", Math.floor(place / index.unitsPerPart));
  return packed[place % index.unitsPerPart];
}

/** A function from position to token text for one block; undefined where no example shows the position. */
async function readerOf(block) {
  const texts = await part("texts", index.partOfBlock[block]);
  const runs = texts[block];
  return (position) => {
    const run = runs.find(([first, tokens]) => position >= first && position < first + tokens.length);
    return run && vocab[run[1][position - run[0]]];
  };
}
